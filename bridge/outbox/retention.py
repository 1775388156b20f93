"""What is deleted first when the file, or the memory in its place, grows beyond its limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from bridge.outbox.rows import SIZE_LIMIT, Loss, note_losses
from bridge.outbox.sqlite import Database

FREED_ROWS = 200


@dataclass(kw_only=True)
class Freed:
    """What was deleted for want of room.

    Attributes:
        has_delivered: whether there may be events left that no sink waits for.
        dead: how many dead letters of each sink.
        losses: what sinks waited for, one loss for each sink.
    """

    has_delivered: bool
    dead: Counter[str] = field(default_factory=Counter)
    losses: dict[str, Loss] = field(default_factory=dict)


def make_room(
    database: Database, *, max_bytes: int, has_delivered: bool, is_stored: Callable[[int], bool]
) -> Freed:
    """Delete what is needed least until the limit holds; the caller holds the transaction.

    Delivered events go first, then records of work that is done, then dead letters, and at last the oldest waiting
    event, for every sink that waits for it.

    Args:
        database: the file, or memory.
        max_bytes: the limit.
        has_delivered: whether it is worth while to search for delivered events.
        is_stored: tells of an event's number whether the file has the event as well, so that it is not lost.
    """
    freed = Freed(has_delivered=has_delivered)
    while database.used_bytes() > max_bytes:
        if freed.has_delivered:
            freed.has_delivered = database.execute("delete-delivered", FREED_ROWS).rowcount > 0
        elif not (_delete_unneeded(database, freed) or _drop_oldest(database, freed, is_stored)):
            break
    if freed.losses:
        note_losses(database, freed.losses.values())
    return freed


def _delete_unneeded(database: Database, freed: Freed) -> bool:
    if database.execute("delete-done-records", FREED_ROWS).rowcount:
        return True
    dead = Counter(sink for (sink,) in database.execute("delete-oldest-dead-letters", FREED_ROWS).fetchall())
    freed.dead.update(dead)
    return bool(dead)


def _drop_oldest(database: Database, freed: Freed, is_stored: Callable[[int], bool]) -> bool:
    found = database.execute("oldest-event").fetchone()
    if found is None:
        return False
    seq, stored_at = found
    sinks = [sink for (sink,) in database.execute("delete-waiting-for", seq).fetchall()]
    database.execute("delete-event", seq)
    for sink in () if is_stored(seq) else sinks:
        loss = Loss(reason=SIZE_LIMIT, count=1, sink=sink, oldest=stored_at, newest=stored_at)
        freed.losses[sink] = freed.losses[sink] + loss if sink in freed.losses else loss
    return True
