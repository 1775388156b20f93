"""An Event Grid for the lab: a custom topic and the topics of a namespace, with push delivery to webhooks.

Where Microsoft documents an answer, or somebody has shown one, it is the same here; what nobody says was chosen
and is marked so in rules.py. What it does not have of the service: other schemas than CloudEvents, signatures
(`aeg-sas-token`), domains, filters, pull delivery, dead-letter storage, TLS.
"""

from __future__ import annotations

from bridge.lab.eventgrid.delivery import Subscription
from bridge.lab.eventgrid.server import EventGridLab

__all__ = ["EventGridLab", "Subscription"]
