"""Enforce the size limit: what is deleted first when the file, or the memory in its place, grows beyond it."""

from __future__ import annotations

import logging
import sys

from bridge.events.model import StoredEvent
from bridge.outbox.rows import dead_letter, read_events, save_dead_letter
from bridge.outbox.sqlite import Database
from bridge.outbox.state import SIZE_LIMIT, Loss, State

log = logging.getLogger(__name__)

OVERFLOW = "overflow"

# This much is buffered in memory while the file cannot be used.
MEMORY_BYTES = 32 * 1024 * 1024
DELETE_ROWS = 200
EVICT_ROWS = 20
# One dead letter is kept for this much of the limit, so that their list cannot fill the file.
BYTES_PER_DEAD_LETTER = 2048


def is_too_large(database: Database, max_bytes: int) -> bool:
    """Return whether the database is beyond its limit."""
    return database.used_bytes() > _limit(database, max_bytes)


def _limit(database: Database, max_bytes: int) -> int:
    return min(max_bytes, MEMORY_BYTES) if database.is_memory else max_bytes


def free(database: Database, state: State, *, max_bytes: int, now: float) -> bool:
    """Delete a little of what is needed least; return False if there was nothing. The caller holds the transaction.

    What no sink waits for goes first, then records of work that is done, then bodies of dead letters, then what the
    file has as well, and at last the oldest events of the sink that has been failing for longest.
    """
    newest = _limit(database, max_bytes) // BYTES_PER_DEAD_LETTER
    return bool(
        database.execute("delete-oldest-events", state.done_seq(), DELETE_ROWS).rowcount
        or _delete_unwanted(database, state)
        or database.execute("delete-oldest-records", DELETE_ROWS).rowcount
        or database.execute("empty-oldest-dead-letters", DELETE_ROWS).rowcount
        or database.execute("delete-dead-letters-but-newest", newest).rowcount
        or (database.is_memory and _delete_copies(database, state))
        or _evict(database, state, now=now)
    )


def _delete_unwanted(database: Database, state: State) -> bool:
    """Delete events that lie between others which a sink waits for."""
    oldest = read_events(database, after=state.done_seq(), but=(), limit=sys.maxsize)
    unwanted = [e.seq for e in oldest if not any(p.waits_for(e) for p in state.positions.values())]
    for seq in unwanted:
        database.execute("delete-event", seq)
    return bool(unwanted)


def _delete_copies(database: Database, state: State) -> bool:
    """Delete from memory events that the file has: the sinks get them once it works again."""
    state.is_partial = True
    return database.execute("delete-oldest-events", state.copied_to, DELETE_ROWS).rowcount > 0


def _evict(database: Database, state: State, *, now: float) -> bool:
    """Move the longest-failing sink past its oldest events, which become dead letters without a body."""
    for sink in _longest_failing_first(state, now=now):
        position = state.positions[sink]
        if events := read_events(database, after=position.cursor, but=position.ahead, limit=EVICT_ROWS):
            _drop(database, state, sink, events, now=now)
            return True
    return False


def _drop(database: Database, state: State, sink: str, events: list[StoredEvent], *, now: float) -> None:
    position = state.positions[sink]
    lost = [event for event in events if position.filter.matches(event)]
    position.acknowledge(events)
    state.save_position(database, sink, [event.seq for event in events])
    for event in lost:
        save_dead_letter(
            database, dead_letter(sink, event, OVERFLOW, "the outbox reached its size limit", now, keep=False)
        )
    if lost:
        oldest, newest = lost[0].stored_at, lost[-1].stored_at
        state.note_loss(Loss(reason=SIZE_LIMIT, count=len(lost), sink=sink, oldest=oldest, newest=newest))
        state.save_meta(database, ["losses"])
        log.error(
            "the outbox reached its size limit: %d event(s) for sink %s are dropped",
            *(len(lost), sink),
            extra={"oldest": lost[0].id, "newest": lost[-1].id},
        )


def _longest_failing_first(state: State, *, now: float) -> list[str]:
    def failing_since(name: str) -> tuple[float, int]:
        position = state.positions[name]
        return now if position.failing_since is None else position.failing_since, position.cursor

    return sorted(state.positions, key=failing_since)
