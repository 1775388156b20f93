"""Copy what one database of the outbox has into another."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from bridge.outbox.rows import read
from bridge.outbox.salvage import salvage
from bridge.outbox.sqlite import ERRORS, Database
from bridge.outbox.state import DAMAGE, Loss, State

log = logging.getLogger(__name__)

_OTHER_TABLES = ("dead_letter", "occurrence", "record")


def fill_file(file: Database, source: Database | None, state: State, *, damaged: Sequence[Path] = ()) -> None:
    """Take over what the file has, and write what it lacks; the caller holds the transaction.

    Args:
        file: the file, as it was opened.
        source: the database used until now, if there is one.
        state: what is known; it is changed, so let it be a copy that is dropped if this fails.
        damaged: the files that this one replaces, oldest first.
    """
    is_known = file.identity() in state.files or bool(damaged and state.files)
    before = state.last_seq
    if damaged:
        restore(file, damaged, state, is_known=is_known)
    if not is_known and (damaged or not is_new(file)):
        state.join(file, first_seq=_first_seq(source), is_start=source is None)
    elif is_known:
        shift(file, state.shift_seconds)
    if source:
        offset = state.last_seq - before
        for seq, *event in read(source, "event", state.copied_to if is_known and not damaged else 0):
            file.execute("save-event", seq + offset, *event)
        for table in _OTHER_TABLES:
            _copy(source, file, table, keep_numbers=is_known)
    if damaged:
        note_damage(file, state, was_running=is_known)
    state.is_partial, state.copied_to, state.shift_seconds = False, 0, 0.0
    state.files.add(file.identity())
    state.save(file)
    state.recount(file)


def restore(file: Database, damaged: Sequence[Path], state: State, *, is_known: bool) -> None:
    """Write the rows of damaged files; where no cursor is found, its sink gets everything again."""
    left_out = ("meta", "done") if is_known else ()
    for path in damaged:
        for table, row in salvage(path):
            if table not in left_out:
                file.execute(f"save-{table}", *row)
    if not is_known:
        first_seq = next((seq for (seq,) in file.execute("seqs-after", 0)), 1)
        for sink in state.positions.keys() - {sink for sink, _, is_cursor in read(file, "done") if is_cursor}:
            file.execute("save-done", sink, first_seq - 1, 1)


def note_damage(file: Database, state: State, *, was_running: bool) -> None:
    """Note what the damage has cost, as far as that can be known."""
    there = {seq for (seq,) in file.execute("seqs-after", state.done_seq())}
    missing = [
        seq
        for seq in range(state.done_seq() + 1, state.last_seq + 1)
        if seq not in there and not all(p.is_done_with(seq) for p in state.positions.values())
    ]
    oldest = newest = None
    if missing:
        oldest = file.execute("stored-before", missing[0]).fetchone()[0]
        newest = file.execute("stored-after", missing[-1]).fetchone()[0]
    # What was committed last may be gone without a trace, but not what this process knows itself.
    count = len(missing) or (0 if was_running else None)
    state.note_loss(Loss(reason=DAMAGE, count=count, oldest=oldest, newest=newest))
    state.begin_epoch()


def fill_memory(memory: Database, source: Database | None, state: State, *, max_bytes: int) -> None:
    """Copy into memory what can be read and waits, the oldest first, up to `max_bytes` of events."""
    state.is_partial, state.copied_to, state.shift_seconds = bool(state.files), 0, 0.0
    state.begin_epoch()  # a process that is killed now leaves a file that does not know these events
    try:
        if source:
            _copy_waiting(memory, source, state, max_bytes)
            for table in _OTHER_TABLES:
                _copy(source, memory, table)
    except ERRORS as error:
        log.debug("the state store cannot be read either: %s", error)
    state.save(memory)


def _copy_waiting(memory: Database, source: Database, state: State, max_bytes: int) -> None:
    size = 0
    for seq, *event, body in read(source, "event", state.done_seq()):
        size += len(body)
        if size > max_bytes:
            return
        memory.execute("save-event", seq, *event, body)
        state.copied_to = seq
    state.is_partial = False


def _copy(source: Database, target: Database, table: str, *, keep_numbers: bool = True) -> None:
    for first, *rest in read(source, table):
        number = first if keep_numbers or table != "dead_letter" else None
        target.execute(f"save-{table}", number, *rest)


def shift(database: Database, seconds: float, *, before: float = math.inf) -> None:
    """Add seconds to every date in a database that is before another one."""
    if seconds:
        for table in ("event", *_OTHER_TABLES):
            database.execute(f"shift-{table}", seconds, before)


def _first_seq(database: Database | None) -> int:
    return next((seq for seq, *_ in read(database, "event", 0)), 1) if database else 1


def is_new(database: Database) -> bool:
    """Return whether a file has never been used."""
    return next(read(database, "meta"), None) is None
