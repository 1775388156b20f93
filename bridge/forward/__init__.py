"""What has changed.

A document of IMDS comes in, or a message of the relay's subscription; events that are committed with the state
that they follow from go out. It never sends anything, and never waits for a receiver.
"""
