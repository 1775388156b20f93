"""The stays of events in the document: an approval, or a drain before it, counts for one content and one stay."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent
from bridge.runtime.time import iso_utc, parse_instant

GAP_SECONDS = 5.0  # in a longer gap between two documents an event may have left and returned
RECENT_SECONDS = 60.0


@dataclass(kw_only=True)
class Stay:
    """An event that was Scheduled with the same content in each document since it was first seen.

    Attributes:
        id: differs for each stay, also for one of the same content.
        event: as it is.
        since: when it was first seen, monotonic.
        approved_at: when IMDS approved it, None if this VM has not asked for that.
    """

    id: str
    event: ScheduledEvent
    since: float
    approved_at: datetime | None = None


class Stays:
    """Knows the stay of each Scheduled event of the last document; for the listener's thread.

    Args:
        stored: returns the committed record of an EventId in lower case, None if there is none.
    """

    def __init__(self, stored: Callable[[str], Any]) -> None:
        self._stored = stored
        self._document: Document | None = None
        self._read_at = 0.0
        self._stays: dict[str, Stay] = {}

    def update(self, document: Document, *, read_at: float) -> list[str]:
        """Forget the stay of each event that has left, changed or started; begin one for each that is new.

        Args:
            document: the last one, perhaps once more.
            read_at: when it was read, monotonic.

        Returns:
            The EventIds whose approval counts no more.
        """
        if document is self._document:
            return []
        before = self._stays
        known = before if self._follows(document, read_at) else {}
        self._stays = {
            key: self._continued(known.get(key), event) or self._begun(event, document, read_at)
            for key, event in document.events.items()
            if event.status == SCHEDULED
        }
        self._document, self._read_at = document, read_at
        return [
            stay.event.event_id
            for key, stay in before.items()
            if stay.approved_at and self._stays.get(key) is not stay
        ]

    def _follows(self, document: Document, read_at: float) -> bool:
        """Return whether no event can have left and returned between the last document and this one."""
        before = self._document.incarnation if self._document else None
        return read_at - self._read_at <= GAP_SECONDS or (
            before is not None and before == document.incarnation
        )

    def _continued(self, stay: Stay | None, event: ScheduledEvent) -> Stay | None:
        if stay is None or (stay.event.raw != event.raw and stay.event.content != event.content):
            return None
        return stay

    def _begun(self, event: ScheduledEvent, document: Document, read_at: float) -> Stay:
        stay = Stay(id=uuid4().hex, event=event, since=read_at)
        stored = self._stored(event.key) if self._document is None else None
        if stored and document.incarnation is not None and stored["place"] == _place(document, event):
            stay.id, stay.approved_at = stored["stay"], parse_instant(stored["at"])
        return stay

    def get(self, key: str) -> Stay | None:
        """Return the stay of an EventId in lower case, None if the document does not show it Scheduled."""
        return self._stays.get(key)

    def approve(self, key: str, *, at: datetime) -> None:
        """Note that IMDS has approved an event that is Scheduled."""
        self._stays[key].approved_at = at

    def record(self, key: str) -> dict[str, Any]:
        """Return what is stored of the stay of an EventId that is Scheduled."""
        stay = self._stays[key]
        assert self._document is not None  # noqa: S101 - there is a stay
        return {
            "stay": stay.id,
            "place": _place(self._document, stay.event),
            "at": iso_utc(stay.approved_at) if stay.approved_at else None,
        }

    def is_approved(self, event: ScheduledEvent, *, now: datetime) -> bool:
        """Return whether IMDS approved an event of the document within the last minute, and for this stay."""
        stay = self._stays.get(event.key)
        at = stay.approved_at if stay else None
        if event.status == STARTED and (stored := self._stored(event.key)):
            at = parse_instant(stored["at"])
        return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


def _place(document: Document, event: ScheduledEvent) -> list[Any]:
    """Return what is the same while a process restarts, unless the document has changed meanwhile."""
    content = sha256(json.dumps(event.content, sort_keys=True).encode()).hexdigest()
    return [document.incarnation, content]
