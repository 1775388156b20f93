"""A Service Bus for the lab: AMQP 1.0 over TCP for unmodified clients. In memory, for tests and demonstrations.

It needs python-qpid-proton, which the extra `lab` brings. What it does not have of the service: transactions,
scheduled and deferred messages, the state of sessions, rules and entities managed over the wire, forwarding, rule
actions, TLS, WebSockets, partitions, expiry of tokens.
"""

from __future__ import annotations

from bridge.lab.servicebus.server import ServiceBusLab

__all__ = ["ServiceBusLab"]
