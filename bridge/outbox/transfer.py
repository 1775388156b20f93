"""Copy what one database of the outbox has into another; the caller holds the transaction of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from bridge.errors import StateError
from bridge.events.model import StoredEvent
from bridge.events.urgency import Now
from bridge.outbox import rows
from bridge.outbox.rows import Ledger, sinks_of, stored_dead_letter, stored_event, stored_record
from bridge.outbox.sqlite import ERRORS, VERSION, Damaged

WantedBy = Callable[[StoredEvent], Iterable[str]]
LEAST_BYTES = 1000  # a row counts as so many at least: to copy many small ones would take long


def copy_back(memory: Ledger, file: Ledger, *, after: int, with_records: bool) -> None:
    """Copy what a file may lack: events behind a number with what waits of them, tries, dead letters and records."""
    for row in memory.execute("events-after", after):
        file.save_event(stored_event(row))
    for row in memory.execute("all-waiting", 0):
        sink, seq, _, _, *tries = row
        if seq > after:
            file.copy_waiting(*row)
        else:
            file.execute("note-tries", sink, seq, *tries)
    for values, retry in map(stored_dead_letter, memory.rows("dead_letter")):
        file.save_dead_letter(*values, retry=retry)
    for kind, key, value, at in map(stored_record, memory.rows("record") if with_records else ()):
        if (kind, key) == (rows.STATE, rows.LOSSES):
            # Both may know of the same loss: at least the larger count is lost.
            file.note_losses(memory.losses(), count=max)
            continue
        # Memory may have counted from zero.
        counted = file.record(kind, key) or 0 if kind == rows.OCCURRENCE else 0
        file.save_record(kind, key, max(value, counted) if counted else value, at=at)


def fill_memory(memory: Ledger, source: Ledger, *, now: Now, max_bytes: int) -> None:
    """Copy the state, other records, the newest first, and what waits, each up to `max_bytes`.

    Of what waits, what is urgent or was goes first, with all of its key, and then the oldest.

    Raises:
        sqlite3.Error: the source cannot be read any further.
    """
    left = max_bytes
    records = chain(source.execute("records-of", rows.STATE), source.execute("records-by-age"))
    for kind, key, value, at in map(stored_record, records):
        left -= max(LEAST_BYTES, len(str(value)))
        if left < 0 and kind != rows.STATE:
            break
        memory.save_record(kind, key, value, at=at)
    left = max_bytes
    copied: set[int] = set()
    old = sinks_of(source.rows("main.waiting")) if source.format < VERSION else None
    for event in chain(_urgent_events(source, now), map(stored_event, source.execute("waiting-events"))):
        if event.seq in copied:
            continue
        left -= max(LEAST_BYTES, len(event.body))
        if left < 0:
            break
        copied.add(event.seq)
        memory.save_event(event)
        if old:
            memory.save_waiting(event, dict.fromkeys(old[event.seq]), sent=old[event.seq])
        else:
            for row in source.execute("waiting-for", event.seq):
                memory.copy_waiting(*row)


def _urgent_events(source: Ledger, now: Now) -> Iterator[StoredEvent]:
    """Yield what waits with the keys of events that are urgent or were."""
    heads = source.execute("urgent-keys").fetchall() if source.format == VERSION else []
    ranked = sorted((now.lane(head[0]), *head) for head in heads)
    for key in dict.fromkeys(key for *_, key in ranked):
        yield from map(stored_event, source.execute("events-of-key", key))


def salvage(path: Path, file: Ledger, wanted_by: WantedBy) -> None:
    """Copy the rows of a damaged file that plain SELECTs can read.

    Args:
        path: the damaged file.
        file: the one that takes its place.
        wanted_by: names the sinks that take an event: they all get it if it cannot be read who still waits.
    """
    try:
        damaged = Ledger(path, mode="read")
    except (StateError, *ERRORS):
        return  # nothing of it can be read
    with closing(damaged):
        faults: list[Exception] = []
        waiting = sinks_of(_rows(damaged, "main.waiting", faults))
        for event in _readable(damaged, "event", stored_event):
            file.save_event(event)
            if faults:
                waiting[event.seq] = dict.fromkeys(wanted_by(event), 0) | waiting.get(event.seq, {})
        for event in map(stored_event, file.execute("events-after", 0)):
            # In their order, which what is behind the damage is not read in.
            sinks = waiting.get(event.seq, {})
            file.save_waiting(event, dict.fromkeys(sorted(sinks)), sent=sinks)
        for values, retry in _readable(damaged, "dead_letter", stored_dead_letter):
            file.save_dead_letter(*values, retry=retry)
        for kind, key, value, at in _readable(damaged, "record", stored_record):
            file.save_record(kind, key, value, at=at)


def _rows(database: Ledger, table: str, faults: list[Exception]) -> Iterator[Any]:
    """Yield a damaged table's rows: from the first one up to the damage, and from the last one back to it."""
    for backwards in (False, True):
        try:
            yield from database.rows(table, backwards=backwards)
        except ERRORS as error:
            faults.append(error)
        else:
            return


def _readable(database: Ledger, table: str, make: Callable[[Sequence[Any]], Any]) -> Iterator[Any]:
    """Yield what the rows stand for that are as they were written."""
    for row in _rows(database, table, []):
        with suppress(Damaged):
            yield make(row)
