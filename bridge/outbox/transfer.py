"""Copy what one database of the outbox has into another; the caller holds the transaction of the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from bridge.errors import StateError
from bridge.events.model import StoredEvent
from bridge.outbox.rows import (
    OCCURRENCE,
    STATE,
    read_record,
    save_dead_letter,
    save_event,
    save_record,
    stored_dead_letter,
    stored_event,
    stored_record,
)
from bridge.outbox.sqlite import ERRORS, Damaged, Database

log = logging.getLogger(__name__)
T = TypeVar("T")


def copy_missing(source: Database, file: Database, *, after: int) -> None:
    """Copy into a file what it lacks: events behind a number with what waits of them, dead letters and records."""
    for row in source.execute("events-after", after):
        save_event(file, stored_event(row))
    for sink, seq in source.execute("all-waiting", after):
        file.execute("save-waiting", sink, seq)
    for dead, number, retry in map(stored_dead_letter, source.rows("dead_letter")):
        # Memory has only its own dead letters, whose numbers may be those of others in the file.
        save_dead_letter(file, dead, number=None if source.is_memory else number, retry=retry)
    for kind, key, value, at in map(stored_record, source.rows("record")):
        # Memory may have counted from zero.
        counted = read_record(file, kind, key) or 0 if kind == OCCURRENCE else 0
        save_record(file, kind, key, max(value, counted) if counted else value, at=at)


def fill_memory(memory: Database, source: Database, *, max_bytes: int) -> None:
    """Copy the state, what waits, the oldest first, and other records, the newest first, each up to `max_bytes`.

    Raises:
        sqlite3.Error: the source cannot be read any further.
    """
    left = max_bytes
    for kind, key, value, at in map(stored_record, source.execute("records-by-age")):
        left -= len(str(value))
        if kind == STATE or left >= 0:
            save_record(memory, kind, key, value, at=at)
    left = max_bytes
    for event in map(stored_event, source.execute("waiting-events")):
        left -= len(event.body)
        if left < 0:
            break
        save_event(memory, event)
        for (sink,) in source.execute("sinks-waiting-for", event.seq):
            memory.execute("save-waiting", sink, event.seq)


def salvage(path: Path, file: Database, wanted_by: Callable[[StoredEvent], Iterable[str]]) -> None:
    """Copy the rows of a damaged file that plain SELECTs can read.

    Args:
        path: the damaged file.
        file: the one that takes its place.
        wanted_by: names the sinks that take an event: they all get it if it cannot be read who still waits.
    """
    try:
        damaged = Database(path, mode="read")
    except (OSError, StateError, *ERRORS) as error:
        log.debug("%s cannot be read at all: %s", path, error)
        return
    with closing(damaged):
        waiting = _Rows(damaged, "waiting")
        for sink, seq in waiting:
            file.execute("save-waiting", str(sink), seq)
        for event in _readable(damaged, "event", stored_event):
            save_event(file, event)
            for sink in () if waiting.are_complete else wanted_by(event):
                file.execute("save-waiting", sink, event.seq)
        for dead, number, retry in _readable(damaged, "dead_letter", stored_dead_letter):
            save_dead_letter(file, dead, number=number, retry=retry)
        for kind, key, value, at in _readable(damaged, "record", stored_record):
            save_record(file, kind, key, value, at=at)
    file.execute("delete-waiting-without-event")


class _Rows:
    """The rows of a damaged table: from the first one up to the damage, and from the last one back to it."""

    def __init__(self, database: Database, table: str) -> None:
        self._database, self._table = database, table
        self.are_complete = True

    def __iter__(self) -> Iterator[Any]:
        for backwards in (False, True):
            try:
                yield from self._database.rows(self._table, backwards=backwards)
            except ERRORS:
                self.are_complete = False
            else:
                return


def _readable(database: Database, table: str, make: Callable[[Sequence[Any]], T]) -> Iterator[T]:
    """Yield what the rows stand for that are as they were written."""
    for row in _Rows(database, table):
        with suppress(Damaged):
            yield make(row)
