"""An Event Grid for the lab: a custom topic and the topics of a namespace, with push delivery to webhooks.

Answers follow Microsoft's documentation or answers that users have reported; where neither exists, rules.py marks
the behaviour as chosen. Not simulated: schemas other than CloudEvents, tokens, domains, filters, pull delivery,
dead-letter storage and TLS.
"""

from __future__ import annotations

from bridge.lab.eventgrid.server import EventGridLab

__all__ = ["EventGridLab"]
