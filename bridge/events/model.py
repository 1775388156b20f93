"""CloudEvents as values: as built, as the outbox stores them, and in which order they are delivered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import NamedTuple

from bridge.runtime.json import Json


class CloudEvent(NamedTuple):
    """A CloudEvent 1.0; `extensions` are its further attributes, all strings."""

    id: str
    source: str
    type: str
    subject: str
    time: datetime
    dataschema: str
    extensions: Mapping[str, str]
    data: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True)
class StoredEvent:
    """An event as the outbox keeps it.

    `seq` is its position in the outbox, `body` the CloudEvent as structured JSON, `stored_at` steady seconds
    since 1970.
    """

    seq: int
    id: str
    type: str
    stored_at: float
    body: bytes

    @cached_property
    def envelope(self) -> dict[str, Json]:
        """The CloudEvent as a dictionary."""
        parsed: dict[str, Json] = json.loads(self.body)
        return parsed


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
