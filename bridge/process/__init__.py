"""Who the process is, whether it is well, and how it ends.

The configuration and signals come in; what every process is built on, its status and metrics, and the events about
itself go out. It never knows what its flow does.
"""
