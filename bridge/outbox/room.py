"""Keep the outbox below its limit: what is needed least goes first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from bridge.outbox import rows
from bridge.outbox.rows import Ledger, Loss

FREED_ROWS = 200

Freed = tuple[float, Counter[str]]


def make_room(database: Ledger, max_bytes: int, *, start: float, is_stored: Callable[[int], bool]) -> Freed:
    """Delete what is needed least until the limit holds; the caller holds the transaction.

    Delivered events go first, then records of work that is done, then dead letters, and at last the oldest waiting
    event, for every sink that waits for it.

    Args:
        database: the file, or memory.
        max_bytes: the limit.
        start: the number from which on there may be events that no sink waits for, infinite for none.
        is_stored: tells of an event's number whether the file has the event as well, so that it is not lost.

    Returns:
        From which number on there may be such events now, and how many events each sink has lost.
    """
    lost: Counter[str] = Counter()
    while database.used_bytes() > max_bytes:
        if start < math.inf:
            start = _delete_delivered(database, start)
        elif not (
            database.execute("delete-done-records", f"$.{rows.DONE}", FREED_ROWS).rowcount
            or _drop_dead_letters(database)
        ):
            found = database.execute("oldest-event").fetchone()
            if found is None:
                break
            lost.update(_drop(database, *found, is_stored=is_stored(found[0])))
    return start, lost


def _delete_delivered(database: Ledger, start: float) -> float:
    """Delete some events that no sink waits for, from the number `start` on; return where there may be more."""
    seqs = [seq for (seq,) in database.execute("delivered", start, FREED_ROWS)]
    for seq in seqs:
        database.execute("delete-event", seq)
    return max(seqs, default=math.inf)


def _drop_dead_letters(database: Ledger) -> bool:
    """Delete some dead letters, the oldest first, and note them as lost; return whether there were any."""
    found = database.execute("oldest-dead-letters", FREED_ROWS).fetchall()
    for number, *_ in found:
        database.execute("delete-dead-letter", number)
    database.note_losses(
        Loss(reason=rows.SIZE_LIMIT, count=1, sink=sink, oldest=dead_at, newest=dead_at)
        for _, sink, dead_at in found
    )
    return bool(found)


def _drop(database: Ledger, seq: int, stored_at: float, *, is_stored: bool) -> list[str]:
    """Delete an event that sinks wait for; return those that have lost it."""
    waiting = [sink for (sink,) in database.execute("sinks-waiting-for", seq)]
    for sink in waiting:
        database.execute("delete-waiting", sink, seq)
    database.execute("delete-event", seq)
    sinks = [] if is_stored else waiting
    database.note_losses(
        Loss(reason=rows.SIZE_LIMIT, count=1, sink=sink, oldest=stored_at, newest=stored_at) for sink in sinks
    )
    return sinks
