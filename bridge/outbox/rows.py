"""The rows of the outbox's tables; what was written has a checksum, which is compared when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from bridge.events.model import StoredEvent
from bridge.outbox.sqlite import Damaged, Database, checksum
from bridge.runtime.json import Json

# A batch of events is read up to this many bytes, so that a backlog of huge documents costs no memory.
READ_BYTES = 4 * 1024 * 1024

# The kind of the records that are kept for ever; others are forgotten after a while.
STATE = "state"
OCCURRENCE = "occurrence"  # how often a transition was seen, by its fingerprint
RUN, LOSSES = "run", "losses"
SINKS = "sinks"  # which are not new

DAMAGE, SIZE_LIMIT, STATE_FOLDER_GONE, OTHER_VM = "Damage", "SizeLimit", "StateFolderGone", "OtherVm"


@dataclass(frozen=True)
class DeadLetter:
    """An event that a sink did not get."""

    sink: str
    id: str
    type: str
    reason: str
    detail: str
    dead_at: float
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Events that were lost, as far as that is known.

    Args:
        reason: why.
        count: how many; None: unknown.
        sink: the only sink that lost them; "": every one that had not had them.
        oldest: not later than the oldest was stored, in steady seconds; None: unknown.
        newest: not earlier than the newest was stored.
    """

    reason: str
    count: int | None
    sink: str = ""
    oldest: float | None = None
    newest: float | None = None

    def __add__(self, other: Loss) -> Loss:
        counts = [loss.count for loss in (self, other) if loss.count is not None]
        oldest = [loss.oldest for loss in (self, other) if loss.oldest is not None]
        newest = [loss.newest for loss in (self, other) if loss.newest is not None]
        return replace(
            self,
            count=sum(counts) if counts else None,
            oldest=min(oldest, default=None),
            newest=max(newest, default=None),
        )


def save_event(database: Database, event: StoredEvent) -> None:
    """Write an event; the caller holds the transaction."""
    values = (event.id, event.type, event.stored_at, event.body)
    database.execute("save-event", event.seq, *values, checksum(*values))


def read_events(rows: Iterable[Sequence[Any]], *, limit: int) -> list[StoredEvent]:
    """Read up to `limit` events, and fewer if they are large.

    Raises:
        Damaged: one is not as it was written.
    """
    events: list[StoredEvent] = []
    size = 0
    for row in rows:
        events.append(stored_event(row))
        size += len(events[-1].body)
        if len(events) == limit or size >= READ_BYTES:
            break
    return events


def stored_event(row: Sequence[Any]) -> StoredEvent:
    """Make an event of a row.

    Raises:
        Damaged: it is not as it was written.
    """
    seq, *values, expected = row
    event_id, event_type, stored_at, body = verified(values, expected)
    return StoredEvent(seq=seq, id=event_id, type=event_type, stored_at=stored_at, body=body)


def save_dead_letter(
    database: Database, dead: DeadLetter, *, number: int | None = None, retry: int = 0
) -> None:
    """Write a dead letter; the caller holds the transaction."""
    values = astuple(dead)
    database.execute("save-dead-letter", number, *values, checksum(*values), retry)


def stored_dead_letter(row: Sequence[Any]) -> tuple[DeadLetter, int, int]:
    """Make a dead letter of a row; return its number and whether it is to be sent again, too.

    Raises:
        Damaged: it is not as it was written.
    """
    number, *values, expected, retry = row
    return DeadLetter(*verified(values, expected)), number, retry


def save_record(database: Database, kind: str, key: str, value: Json, *, at: float) -> None:
    """Write a record; the caller holds the transaction."""
    text = json.dumps(value)
    database.execute("save-record", kind, key, text, at, checksum(kind, key, text))


def read_record(database: Database, kind: str, key: str) -> Any:
    """Return a record's value, None if there is none.

    Raises:
        Damaged: it is not as it was written.
    """
    row = database.execute("record", kind, key).fetchone()
    return json.loads(verified(row[:3], row[3])[2]) if row else None


def stored_record(row: Sequence[Any]) -> tuple[str, str, Any, float]:
    """Return the kind, key and value of a row, and when it was saved.

    Raises:
        Damaged: it is not as it was written.
    """
    *values, saved_at, expected = row
    kind, key, text = verified(values, expected)
    return kind, key, json.loads(text), saved_at


def losses(database: Database) -> list[Loss]:
    """Return the losses that are not published yet."""
    return [Loss(**loss) for loss in read_record(database, STATE, LOSSES) or ()]


def save_losses(database: Database, found: Iterable[Loss]) -> None:
    """Write the losses that are not published yet; the caller holds the transaction."""
    save_record(database, STATE, LOSSES, [asdict(loss) for loss in found], at=0.0)


def note_losses(database: Database, new: Iterable[Loss]) -> None:
    """Remember losses, together with others of their reason and sink; the caller holds the transaction."""
    known = {(loss.reason, loss.sink): loss for loss in losses(database)}
    for loss in new:
        key = (loss.reason, loss.sink)
        known[key] = known[key] + loss if key in known else loss
    save_losses(database, known.values())


def last_seq(database: Database) -> int:
    """Return the last number that was given in this database."""
    run = read_record(database, STATE, RUN) or {}
    return max(int(run.get("seq", 0)), int(database.execute("last-seq").fetchone()[0]))


def verified(values: Sequence[Any], expected: int) -> Sequence[Any]:
    """Return a row's values.

    Raises:
        Damaged: they are not as they were written.
    """
    if checksum(*values) != expected:
        raise Damaged("a row is not as it was written")
    return values
