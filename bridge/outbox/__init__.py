"""What must not be lost.

Events and records come in, in one transaction; what waits for a sink goes out until the sink has had it. It never
raises because of the disk, and never gives a number twice.
"""
