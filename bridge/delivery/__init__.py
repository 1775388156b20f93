"""What is sent next to a receiver, and what became of it.

What waits in the outbox comes in; what a sink is to send and a note of its fate go out. It never changes an event,
and one sink never waits for another.
"""
