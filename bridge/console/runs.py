"""Which numbers of a process's run have arrived: what is missing, what is known, and whether two run at once."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from bridge.console.received import MAX_SEQUENCE, Received, clip, hash_text

OVERLAP_SECONDS = 60.0  # a clock may be set back a little between two runs of one process
MAX_RUNS = 100  # of one process are kept: the newest
_FIND = "SELECT vm, first, last, at, began_at FROM run WHERE id = ?"
_WRITE = """
INSERT INTO run (id, reporter, vm, first, last, at, began_at) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    vm = excluded.vm, first = excluded.first, last = excluded.last, at = excluded.at, began_at = excluded.began_at
"""
_FORGET = f"""
DELETE FROM run WHERE id IN (
    SELECT id FROM run WHERE vm = ? AND reporter = ? ORDER BY at DESC LIMIT -1 OFFSET {MAX_RUNS})
"""  # noqa: S608 - constants
_ADD_HOLE = "INSERT INTO hole VALUES (?, ?, ?)"
_FIND_HOLE = "SELECT first, last FROM hole WHERE run = ? AND first <= ? ORDER BY first DESC LIMIT 1"
# A run of which nothing has arrived does not say that a process was there. One may lie within the other.
_OVERLAP = f"""
SELECT max(min(at, ?5)) FROM run WHERE vm = ?1 AND reporter = ?2 AND at > ?4 + {OVERLAP_SECONDS} AND id <> ?3
AND first <= last
AND max(min(at, ?5) - max(began_at, ?4), min(at - ?5, ?4 - began_at), min(?5 - at, began_at - ?4)) > {OVERLAP_SECONDS}
"""  # noqa: S608 - constants
_DOUBLE = "UPDATE vm SET doubled_at = ?2 WHERE id = ?1 AND doubled_at < ?2"
_COUNT = """
UPDATE run SET missing = (SELECT ifnull(sum(last - first + 1), 0) FROM hole WHERE hole.run = run.id) + iif(
    first > 1 AND EXISTS (SELECT 1 FROM run AS earlier WHERE earlier.vm = run.vm AND earlier.reporter = run.reporter
        AND earlier.at < run.at AND earlier.first <= earlier.last)
    AND NOT EXISTS (SELECT 1 FROM vm WHERE vm.id = run.vm AND doubled_at > 0), first - 1, 0)
WHERE vm = ?1 AND reporter = ?2 AND (first > 1 OR id = ?3)
"""
_Number = tuple[int, Received, bool]  # with its event, and whether it is the event's own


def run_of(reporter: str, epoch: str) -> int:
    """Return a run's key."""
    return hash_text(f"{reporter}\n{epoch}")


def note(store: sqlite3.Connection, events: Iterable[Received]) -> list[Received]:
    """Note the numbers of events; return those events whose number is new.

    The first heartbeat of a run also names the last number of the run before.
    """
    runs: dict[int, list[_Number]] = defaultdict(list)
    for event in events:
        name, epoch, number = event.reporter
        if not event.vm or not name or number is None:
            continue
        runs[run_of(name, epoch)].append((number, event, True))
        before, last = event.data.get("PreviousEpoch"), event.data.get("PreviousLastReporterSeq")
        if isinstance(before, str) and isinstance(last, int) and 0 < last < MAX_SEQUENCE:
            runs[run_of(name, clip(before))].append((last, event, False))
    return [event for run, some in runs.items() for event in _note_run(store, run, some)]


def _note_run(store: sqlite3.Connection, run: int, some: Sequence[_Number]) -> Iterator[Received]:
    """Note numbers of one run; yield the events that are new."""
    number, event, is_own = some[0]
    row = store.execute(_FIND, (run,)).fetchone()
    vm, first, last, at, began_at = row or (0, number + (not is_own), number - is_own, event.at, event.at)
    is_counted = row is None
    for number, event, is_own in some:
        if event.vm and event.at >= at:
            vm, at = event.vm.id, event.at
        began_at = min(began_at, event.at)
        is_new, first_last, hole = _extend(first, last, number, is_own=is_own)
        is_filled = not is_new and is_own and _fill(store, run, number)
        is_counted |= is_filled or number < first or hole is not None
        first, last = first_last
        if hole:
            store.execute(_ADD_HOLE, (run, *hole))
        if is_own and (is_new or is_filled):
            yield event
    found, reporter = (vm, first, last, at, began_at), event.reporter[0]
    if found != row:
        store.execute(_WRITE, (run, reporter, *found))
        is_doubled = _note_overlap(store, vm, reporter, run, began_at, at)
        is_counted |= first > 1 or is_doubled
    if row is None:
        store.execute(_FORGET, (vm, reporter))
    if is_counted:
        store.execute(_COUNT, (vm, reporter, run))


def _extend(
    first: int, last: int, number: int, *, is_own: bool
) -> tuple[bool, tuple[int, int], tuple[int, int] | None]:
    """Add a number to those from `first` to `last`: whether it is outside, what they are then, and what is missing.

    A number that only the next run names has not arrived itself.
    """
    if number > last:
        if first > last and not is_own:
            return True, (number + 1, number), None
        hole = last + 1, number - is_own
        return True, (first, number), hole if hole[0] <= hole[1] else None
    if is_own and number < first:
        hole = number + 1, first - 1
        return True, (number, last), hole if hole[0] <= hole[1] else None
    return False, (first, last), None


def _note_overlap(store: sqlite3.Connection, *of_run: object) -> bool:
    """Note on its VM that two runs were there at once; return whether they were."""
    (doubled_at,) = store.execute(_OVERLAP, of_run).fetchone()
    if doubled_at is not None:
        store.execute(_DOUBLE, (of_run[0], doubled_at))
    return doubled_at is not None


def _fill(store: sqlite3.Connection, run: int, number: int) -> bool:
    """Take a number out of the hole that it is in; return whether there is one."""
    hole = store.execute(_FIND_HOLE, (run, number)).fetchone()
    if hole is None or hole[1] < number:
        return False
    store.execute("DELETE FROM hole WHERE run = ? AND first = ?", (run, hole[0]))
    parts = [
        (run, first, last) for first, last in ((hole[0], number - 1), (number + 1, hole[1])) if first <= last
    ]
    store.executemany(_ADD_HOLE, parts)
    return True


def note_starts(store: sqlite3.Connection, events: Iterable[Received]) -> None:
    """Note when forwarders started, by their first heartbeats."""
    starts = [
        (run_of(event.reporter[0], event.reporter[1]), event.at)
        for event in events
        if event.data.get("Reason") == "Started" and event.reporter[0].endswith("/forward")
    ]
    store.executemany("UPDATE run SET started_at = min(ifnull(started_at, ?2), ?2) WHERE id = ?1", starts)
