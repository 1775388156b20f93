"""What the order of events is promised for: each EventId, and each reporter."""

from __future__ import annotations

from collections.abc import Mapping

from bridge.runtime.json import Json


def order_key(envelope: Mapping[str, Json]) -> str:
    """Return what an event belongs to; events with the same key are delivered in their order.

    Events and receipts about a Scheduled Event belong to its EventId, the VM's own events to their reporter, and the
    events of other programs to their subject.
    """
    if correlation := envelope.get("correlationid"):
        return f"event {str(correlation).lower()}"
    if reporter := envelope.get("reporter"):
        return f"reporter {reporter}"
    return f"subject {envelope.get('source')} {envelope.get('subject') or envelope.get('id')}"
