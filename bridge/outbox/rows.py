"""The rows of the outbox's tables: each with a checksum, which is compared when it is read."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import astuple, dataclass
from typing import Any

from bridge.events.model import StoredEvent
from bridge.outbox.sqlite import Damaged, Database, checksum

# A batch of events is read up to this many bytes, so that a backlog of huge documents costs no memory.
READ_BYTES = 4 * 1024 * 1024
# The columns of a dead letter that its checksum leaves out: `number` and `retry`.
DEAD_LETTER_UNCHECKED = 2


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """An event that a sink did not get; `body` is None when the size limit dropped it."""

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
    """Make the dead letter of an event that a sink will not get.

    Args:
        sink: the sink's name.
        event: the event.
        reason: why, in a word.
        detail: why, for a person.
        at: when, in steady seconds.
        keep: whether the body is kept, so that it can be sent again.
    """
    body = event.body if keep else None
    return DeadLetter(
        sink=sink, id=event.id, type=event.type, reason=reason, detail=detail, dead_at=at, body=body
    )


def save_event(database: Database, event: StoredEvent) -> None:
    """Write an event; the caller holds the transaction."""
    database.execute("save-event", event.seq, event.id, event.type, event.stored_at, event.body)


def save_dead_letter(database: Database, dead: DeadLetter) -> None:
    """Write a new dead letter; the caller holds the transaction."""
    database.execute("save-dead_letter", None, 0, *astuple(dead))


def read(database: Database, table: str, *values: Any) -> Iterator[tuple[Any, ...]]:
    """Yield all rows of a table without their checksums; of `event`, those after a number."""
    with contextlib.closing(database.execute(f"all-{table}", *values)) as rows:
        for row in rows:
            yield verified(row, skip=DEAD_LETTER_UNCHECKED if table == "dead_letter" else 0)


def read_one(database: Database, name: str, *values: Any) -> tuple[Any, ...] | None:
    """Return the row that a statement finds, without its checksum; None if there is none."""
    row = database.execute(name, *values).fetchone()
    return None if row is None else verified(row)


def verified(row: tuple[Any, ...], *, skip: int = 0) -> tuple[Any, ...]:
    """Return a row's values.

    Raises:
        Damaged: they are not what was written.
    """
    *values, expected = row
    if checksum(*values[skip:]) != expected:
        raise Damaged("a row is not as it was written")
    return tuple(values)


def read_events(database: Database, *, after: int, but: Container[int], limit: int) -> list[StoredEvent]:
    """Read up to `limit` events behind the number `after`, leaving out `but`."""
    events: list[StoredEvent] = []
    size = 0
    with contextlib.closing(database.execute("seqs-after", after)) as seqs:
        for (seq,) in seqs:
            if seq not in but:
                events.append(stored_event(*verified(database.execute("event", seq).fetchone())))
                size += len(events[-1].body)
            if len(events) == limit or size >= READ_BYTES:
                break
    return events


def newest_events(database: Database, after: int) -> Iterator[StoredEvent]:
    """Yield the events behind the number `after`, the newest first."""
    for seq, *row in read(database, "event-newest-first", after):
        yield stored_event(seq, *row)


def read_retries(database: Database, sink: str, limit: int) -> list[tuple[int, StoredEvent]]:
    """Read the dead letters that are to be sent again, with their numbers."""
    found = []
    for row in database.execute("retries", sink, limit).fetchall():
        number, _, _, event_id, type_, _, _, dead_at, body = verified(row, skip=DEAD_LETTER_UNCHECKED)
        found.append((number, stored_event(0, event_id, type_, dead_at, body)))
    return found


def stored_event(seq: int, event_id: str, type_: str, stored_at: float, body: bytes) -> StoredEvent:
    """Make an event of a row's values."""
    return StoredEvent(seq=seq, id=event_id, type=type_, stored_at=stored_at, body=body)
