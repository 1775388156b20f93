"""CloudEvents as values: as built, as they are encoded and stored, and in which order they are delivered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import NamedTuple, cast

from bridge.contract.types import type_of
from bridge.imds.document import ADVISORY
from bridge.runtime.json import Json, object_of
from bridge.runtime.time import iso_utc

encode_json = json.JSONEncoder(separators=(",", ":")).encode


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
    """An event as the outbox keeps it, byte for byte as it came if others have written it.

    `seq` is its position in the outbox, 0 before it is stored, `body` the CloudEvent as structured JSON, `stored_at`
    steady seconds since 1970.
    """

    id: str
    type: str
    body: bytes
    seq: int = 0
    stored_at: float = 0.0

    @cached_property
    def envelope(self) -> dict[str, Json]:
        """The CloudEvent as a dictionary."""
        parsed: dict[str, Json] = json.loads(self.body)
        return parsed

    @property
    def data(self) -> Mapping[str, Json]:
        """What the CloudEvent says, empty if that is no object."""
        return object_of(self.envelope.get("data"))


def is_alarm(envelope: Mapping[str, Json]) -> bool:
    """Return whether it is bad news that no notice announced: a start without one, a failed approval or drain.

    An early warning is no notice. The receipt of a drain that failed is Rejected. A VM that stays out of work is one
    as well.
    """
    data = object_of(envelope.get("data"))
    if envelope.get("type") == type_of("approval.outofwork"):
        return True
    if envelope.get("type") == type_of("scheduledevent.started"):
        return str(data.get("PreviousStatus") or ADVISORY).lower() == ADVISORY
    return data.get("Outcome") in ("Rejected", "Failed")


def structured(event: CloudEvent) -> bytes:
    """Write the whole event as one JSON object.

    ASCII only: what IMDS sent may hold lone surrogates, which only an escape can carry.
    """
    return encode_json(envelope_of(event)).encode("ascii")


def envelope_of(event: CloudEvent) -> dict[str, Json]:
    """Return the whole event as a dictionary."""
    return {
        "specversion": "1.0",
        "source": event.source,
        "type": event.type,
        "dataschema": event.dataschema,
        "datacontenttype": "application/json",
        "id": event.id,
        "subject": event.subject,
        "time": iso_utc(event.time),
        **event.extensions,
        "data": cast("dict[str, Json]", event.data),  # the builder makes no other mapping
    }


def stored(event: CloudEvent | StoredEvent, *, seq: int, at: float) -> StoredEvent:
    """Return a new event, or one that is given byte for byte, as it is stored; it need not be parsed again."""
    if isinstance(event, StoredEvent):
        made, envelope = replace(event, seq=seq, stored_at=at), event.envelope
    else:
        envelope = envelope_of(event)
        body = encode_json(envelope).encode("ascii")
        made = StoredEvent(seq=seq, id=event.id, type=event.type, stored_at=at, body=body)
    vars(made)["envelope"] = envelope
    return made


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
