"""What `imds-bridge outbox` does: look at events and dead letters and change what waits, beside the process."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

from bridge.config.values import nearest
from bridge.errors import StateError, UsageError
from bridge.events.model import StoredEvent
from bridge.outbox.rows import FILTERS, SINKS, STATE, Ledger, stored_event
from bridge.outbox.sqlite import ERRORS, Mode
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.time import iso_utc

BUSY_SECONDS = 10.0
# So that the process never waits long for the lock.
CHANGED_ROWS = 500
_UNKNOWN = "{which}: no such event is stored; `imds-bridge outbox list` shows which are"


@contextmanager
def _open(folder: StateFolder, mode: Mode) -> Iterator[Ledger]:
    """Open the file, also beside the process that uses it.

    Raises:
        UsageError: there is no file.
        StateError: it cannot be used.
    """
    path = folder.database
    try:
        if not path.exists():
            raise UsageError(
                f"there is no outbox in {folder.path}: has `imds-bridge forward` run with this state_dir?"
            )
        with closing(Ledger(path, mode=mode, busy_seconds=BUSY_SECONDS)) as database:
            yield database
    except PermissionError:
        raise StateError(f"{path}: you may not read it; try as root or as its owner") from None
    except (OSError, *ERRORS) as error:
        raise StateError(f"{path}: {error}") from error


def _rows(folder: StateFolder, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """Read everything before anything is printed: a reader that waits would keep SQLite's log from being emptied."""
    with _open(folder, "read") as database:
        return database.execute(statement, *values).fetchall()


def newest(folder: StateFolder, limit: int) -> list[dict[str, Any]]:
    """Return the newest events, oldest of them first, without their bodies."""
    rows = _rows(folder, "newest-events", limit)
    names = ("seq", "id", "type", "stored_at", "bytes")
    return [dict(zip(names, (*row[:3], _time(row[3]), row[4]), strict=True)) for row in reversed(rows)]


def waiting(folder: StateFolder, sink: str | None, limit: int, now: datetime) -> list[dict[str, Any]]:
    """Return what waits for one sink or all, the oldest first.

    Each has its age in seconds, how often it failed in a row and when it is tried again, and the sink's last error.
    """
    errors = last_errors(folder)
    return [
        {
            **dict(zip(("sink", "seq", "id", "type"), row, strict=True)),
            "subject": _subject(body),
            "age_seconds": max(0, round(now.timestamp() - at)),
            "tries": tries,
            "next_try_at": next_try(due_at),
            "last_error": errors.get(row[0]),
        }
        for *row, at, body, tries, due_at in _rows(folder, "list-waiting", sink, limit)
    ]


def last_errors(folder: StateFolder) -> dict[str, str | None]:
    """Return the last error of each sink by the last status, if that is known."""
    status = folder.read_status()
    sinks = (status and status.sinks) or {}
    return {name: None if sink.last_error is None else str(sink.last_error) for name, sink in sinks.items()}


def next_try(due_at: float | None) -> str | None:
    """Return when an event is sent at the earliest, None if nothing but others keeps it back."""
    return None if due_at is None or math.isinf(due_at) else _time(due_at)


def dead_letters(folder: StateFolder, sink: str | None = None) -> list[dict[str, Any]]:
    """Return the dead letters, of one sink or all, without their bodies."""
    names = ("number", "sink", "id", "type", "reason", "detail", "dead_at", "retry")
    return [
        dict(zip(names, (*row, _time(dead_at), bool(retry)), strict=True))
        for *row, dead_at, retry in _rows(folder, "list-dead-letters")
        if sink in (None, row[1])
    ]


def waiting_counts(folder: StateFolder) -> dict[str, int]:
    """Return how many events wait for each sink that any wait for, configured or not."""
    return dict(_rows(folder, "count-waiting"))


def check_sink(folder: StateFolder, sink: str) -> None:
    """Refuse the name of a sink that is not configured and has nothing in the outbox.

    Raises:
        UsageError: with the names that there are.
    """
    with _open(folder, "read") as database:
        begun = database.record(STATE, SINKS) or ()
        known = sorted({*begun, *database.counts("count-waiting"), *database.counts("count-dead-letters")})
    if sink not in known:
        expected = ", ".join(known) or "none: no sink has had an event yet"
        raise UsageError(f"outbox: given --sink {sink}, expected {expected}{nearest(sink, known)}")


def show(folder: StateFolder, which: str) -> dict[str, Any]:
    """Return a stored event, by its CloudEvents id or its seq, as the CloudEvent that is sent."""
    seq = int(which) if re.fullmatch("[0-9]{1,18}", which) else -1
    found = _rows(folder, "event-body", which, seq) or _rows(folder, "dead-letter-body", which)
    if not found:
        raise UsageError(_UNKNOWN.format(which=which))
    try:
        event: dict[str, Any] = json.loads(found[0][0])
    except ValueError as error:
        raise StateError(f"{folder.database}: the event is damaged: {error}") from error
    return event


class Fate(NamedTuple):
    """What became of an event.

    Attributes:
        event: the event.
        waiting: for each sink that it waits for, how often it failed in a row, and when it is due (steady seconds).
        dead: why it is a dead letter, by sink.
        filters: since when each sink has its filter.
    """

    event: StoredEvent
    waiting: dict[str, list[Any]]
    dead: dict[str, str]
    filters: dict[str, tuple[str, int]]


def fates(folder: StateFolder, which: str) -> list[Fate]:
    """Return stored events and what became of them, the oldest first.

    Args:
        folder: the state folder.
        which: a CloudEvents id, a seq, or an EventId for everything about a Scheduled Event; "" for the newest.

    Raises:
        UsageError: no such event is stored.
    """
    with _open(folder, "read") as database:
        filters = database.record(STATE, FILTERS) or {}
        found = [
            Fate(
                event=event,
                waiting={sink: rest for sink, *rest in database.execute("tries-of", event.seq)},
                dead={
                    sink: f"{number}, {reason}: {detail}"
                    for sink, number, reason, detail in database.execute("dead-letters-of", event.id)
                },
                filters=filters,
            )
            for event in map(stored_event, database.execute("find-events", which).fetchall())
        ]
    if not found:
        raise UsageError(_UNKNOWN.format(which=which or "the newest event"))
    return found


def retry(folder: StateFolder, numbers: Sequence[int]) -> int:
    """Have dead letters sent again, by the process within a few seconds, or when it starts; return how many."""
    return _change(folder, _statement("mark-retry"), [(number,) for number in numbers])


def drop(folder: StateFolder, numbers: Sequence[int]) -> int:
    """Delete dead letters; return how many."""
    return _change(folder, _statement("delete-dead-letter"), [(number,) for number in numbers])


def drop_waiting(folder: StateFolder, sink: str) -> int:
    """Delete what waits for a sink; return how many events."""
    # What is behind another event first, so that it need not become the first of its key.
    rows = _rows(folder, "waiting-seqs", sink)[::-1]
    return _change(folder, _statement("delete-waiting"), [(sink, seq) for (seq,) in rows])


def move(folder: StateFolder, sink: str, target: str) -> int:
    """Let what waits for a sink wait for another one; return how many events."""
    rows = [(sink, target, seq) for (seq,) in _rows(folder, "waiting-seqs", sink)]
    return _change(folder, Ledger.move_waiting, rows)


def ask(folder: StateFolder, key: str, value: str) -> None:
    """Leave a record of the kind STATE for the process, which looks for it."""
    with _open(folder, "write") as database, database.transaction():
        database.save_record(STATE, key, value)


def _statement(name: str) -> Callable[..., int]:
    return lambda database, *row: database.execute(name, *row).rowcount


def _change(folder: StateFolder, change: Callable[..., int], rows: Sequence[tuple[Any, ...]]) -> int:
    """Change each row, some in each transaction; return what `change` returns in all."""
    changed = 0
    with _open(folder, "write") as database:
        for start in range(0, len(rows), CHANGED_ROWS):
            with database.transaction():
                changed += sum(change(database, *row) for row in rows[start : start + CHANGED_ROWS])
    return changed


def _subject(body: bytes) -> str:
    try:
        return str(json.loads(body).get("subject") or "")
    except (ValueError, AttributeError):
        return ""


def _time(seconds: float) -> str:
    return iso_utc(datetime.fromtimestamp(seconds, UTC))
