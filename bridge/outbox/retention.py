"""What is deleted first when the file, or the memory in its place, grows beyond its limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from bridge.outbox.rows import SIZE_LIMIT, Ledger, Loss

FREED_ROWS = 200


Freed = tuple[bool, Counter[str]]


def make_room(database: Ledger, max_bytes: int, *, search: bool, is_stored: Callable[[int], bool]) -> Freed:
    """Delete what is needed least until the limit holds; the caller holds the transaction.

    Delivered events go first, then records of work that is done, then dead letters, and at last the oldest waiting
    event, for every sink that waits for it.

    Args:
        database: the file, or memory.
        max_bytes: the limit.
        search: whether there may be events that no sink waits for.
        is_stored: tells of an event's number whether the file has the event as well, so that it is not lost.

    Returns:
        Whether there may be such events left, and how many events each sink has lost.
    """
    lost: Counter[str] = Counter()
    while database.used_bytes() > max_bytes:
        if search:
            search = database.execute("delete-delivered", FREED_ROWS).rowcount > 0
        elif not (
            database.execute("delete-done-records", FREED_ROWS).rowcount
            or database.execute("delete-oldest-dead-letters", FREED_ROWS).rowcount
        ):
            found = database.execute("oldest-event").fetchone()
            if found is None:
                break
            lost.update(_drop(database, *found, is_stored=is_stored(found[0])))
    return search, lost


def _drop(database: Ledger, seq: int, stored_at: float, *, is_stored: bool) -> list[str]:
    """Delete an event that sinks wait for; return those that have lost it."""
    sinks = [sink for (sink,) in database.execute("delete-waiting-for", seq).fetchall() if not is_stored]
    database.execute("delete-event", seq)
    database.note_losses(
        Loss(reason=SIZE_LIMIT, count=1, sink=sink, oldest=stored_at, newest=stored_at) for sink in sinks
    )
    return sinks
