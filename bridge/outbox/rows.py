"""How events and dead letters lie in the file: each body with a checksum, which is compared when it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from bridge.events.model import StoredEvent
from bridge.outbox.sqlite import Damaged, Database

# A batch of events is read up to this many bytes, so that a backlog of huge documents costs no memory.
READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """An event that a sink did not get; `body` is None when it was given up for want of room."""

    sink: str
    id: str
    type: str
    reason: str
    detail: str
    dead_at: float
    body: bytes | None


def dead_letter(
    sink: str, event: StoredEvent, reason: str, detail: str, at: float, *, keep: bool = True
) -> DeadLetter:
    """Make the record of an event that a sink will not get; `keep` its body, so that it can be sent again."""
    return DeadLetter(
        sink=sink,
        id=event.id,
        type=event.type,
        reason=reason,
        detail=detail,
        dead_at=at,
        body=event.body if keep else None,
    )


def save_event(database: Database, event: StoredEvent) -> None:
    """Write an event; the caller holds the transaction."""
    values = (event.seq, event.id, event.type, event.stored_at, event.body, crc32(event.body))
    database.execute("save-event", *values)


def save_dead_letter(database: Database, letter: DeadLetter) -> None:
    """Write a dead letter; the caller holds the transaction."""
    checksum = None if letter.body is None else crc32(letter.body)
    database.execute("save-dead-letter", *vars(letter).values(), checksum)


def read_events(
    database: Database, *, after: int, but: Container[int], limit: int
) -> tuple[list[StoredEvent], bool]:
    """Read events behind the number `after`, leaving out `but`; tell whether there may be more."""
    events: list[StoredEvent] = []
    size = 0
    with contextlib.closing(database.execute("pending", after)) as rows:
        for seq, *row in rows:
            if seq in but:
                continue
            events.append(_checked(seq, row))
            size += len(events[-1].body)
            if len(events) == limit or size >= READ_BYTES:
                return events, True
    return events, False


def read_retries(database: Database, sink: str, limit: int) -> list[tuple[int, StoredEvent]]:
    """Read the dead letters that are to be sent again, with their numbers."""
    rows = database.execute("retries", sink, limit).fetchall()
    return [(number, _checked(0, row)) for number, *row in rows]


def _checked(seq: int, row: Sequence[Any]) -> StoredEvent:
    event_id, event_type, stored_at, body, checksum = row
    if crc32(body) != checksum:
        raise Damaged("an event is not as it was written")
    return StoredEvent(seq=seq, id=event_id, type=event_type, stored_at=stored_at, body=body)
