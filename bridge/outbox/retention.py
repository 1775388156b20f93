"""Make room: what goes first when the file, or without a disk the memory, grows beyond its limit."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from bridge.events.model import StoredEvent
from bridge.outbox.buffer import Memory
from bridge.outbox.rows import dead_letter
from bridge.outbox.sqlite import Database

log = logging.getLogger(__name__)

OVERFLOW = "overflow"

# Without a disk, this much is kept for it.
MEMORY_EVENTS = 10_000
MEMORY_BYTES = 32 * 1024 * 1024
MEMORY_DEAD_LETTERS = 1_000
PRUNE_ROWS = 200
GIVE_UP_ROWS = 20
# One dead letter is kept for this much of the limit, so that their list cannot fill the file.
BYTES_PER_DEAD_LETTER = 2048


def trim_memory(memory: Memory, *, now: float) -> None:
    """Keep what waits for the disk below its limit: what everybody had goes first, then the oldest."""
    unsaved = memory.unsaved
    if len(unsaved.dead) > MEMORY_DEAD_LETTERS:
        del unsaved.dead[:-MEMORY_DEAD_LETTERS]
    if not _is_too_much(unsaved.events):
        return
    unsaved.events = deque(memory.waiting())
    lost = []
    while _is_too_much(unsaved.events):
        lost.append(unsaved.events.popleft())
    for sink in memory.readers:
        _give_up(memory, sink, lost, in_turn=False, now=now)


def _is_too_much(events: Sequence[StoredEvent]) -> bool:
    return len(events) > MEMORY_EVENTS or sum(len(event.body) for event in events) > MEMORY_BYTES


def free(database: Database, *, done_seq: int, max_bytes: int) -> bool:
    """Delete the oldest events that every sink is done with, else dead letters' bodies; tell if there were any."""
    with database.transaction(synced=False):
        return bool(
            database.execute("delete-oldest-events", done_seq, PRUNE_ROWS).rowcount
            or database.execute("empty-oldest-dead-letters", PRUNE_ROWS).rowcount
            or database.execute("delete-dead-letters-but-newest", max_bytes // BYTES_PER_DEAD_LETTER).rowcount
        )


def longest_failing(memory: Memory, *, now: float) -> str | None:
    """Choose the sink that loses its oldest events: of those that events wait for, the longest-failing one."""
    waiting = [name for name, reader in memory.readers.items() if reader.cursor < memory.last_seq]

    def failing_since(name: str) -> tuple[float, int]:
        reader = memory.readers[name]
        return now if reader.failing_since is None else reader.failing_since, reader.cursor

    return min(waiting, key=failing_since, default=None)


def give_up_oldest(memory: Memory, sink: str, events: Sequence[StoredEvent], *, now: float) -> None:
    """Move a sink past its oldest events, which are dead letters from then on."""
    _give_up(memory, sink, events, in_turn=True, now=now)


def _give_up(memory: Memory, sink: str, events: Sequence[StoredEvent], *, in_turn: bool, now: float) -> None:
    lost = [event for event in events if memory.readers[sink].waits_for(event)]
    memory.pass_over(sink, events, in_turn=in_turn)
    if not lost:
        return
    memory.unsaved.dead += [
        dead_letter(sink, event, OVERFLOW, "no room was left for it", now, keep=False) for event in lost
    ]
    log.error(
        "no room: %d event(s) are given up for sink %s",
        *(len(lost), sink),
        extra={"oldest": lost[0].id, "newest": lost[-1].id},
    )
