"""The outbox: everything that must not be lost, with a cursor for each sink.

What the process knows lives in memory and is written through: a change of the document and its events in one
synced transaction, before anything is sent. If the disk fails, the same goes on in memory, and all that was not
written is written when the disk is back.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import retention as room
from bridge.outbox.buffer import Memory, Reader, shifted
from bridge.outbox.retention import OVERFLOW
from bridge.outbox.rows import DeadLetter, dead_letter, read_events, read_retries
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.storage import Disk
from bridge.runtime.clock import Clock
from bridge.runtime.json import Json

__all__ = ["EXPIRED", "OVERFLOW", "REJECTED", "DeadLetter", "Outbox", "dead_letter"]

log = logging.getLogger(__name__)

REJECTED, EXPIRED = "rejected", "expired"

# How often a transition was seen must be remembered for longer than any duplicate detection (7 days).
OCCURRENCE_SECONDS = 30 * 86_400.0
DEAD_LETTER_SECONDS = 30 * 86_400.0
RECORD_SECONDS = 30 * 86_400.0


class Named(Protocol):
    """What is kept of an event beside its encoding."""

    @property
    def id(self) -> str:
        """The CloudEvent's id."""

    @property
    def type(self) -> str:
        """The CloudEvent's type."""


class Outbox:
    """Snapshot, events, cursors and dead letters of one process; every method may be called from any thread.

    No method raises because of the disk: `storage_error` says what is wrong with it, None when it is well.
    """

    def __init__(
        self,
        folder: StateFolder,
        *,
        clock: Clock,
        sinks: Mapping[str, tuple[Filter, bool]],
        max_bytes: int,
        retain_seconds: float,
    ) -> None:
        """Open the outbox in `folder`, or begin one.

        Args:
            folder: where it is kept.
            clock: ages are counted on its steady time.
            sinks: for each sink its filter, and whether it begins at the oldest event instead of the next.
            max_bytes: how large the file may become before the longest-failing sink loses events.
            retain_seconds: for how long events are kept that every sink has had.

        Raises:
            StateError: another process holds the folder, or a newer version wrote it.
        """
        self._folder = folder
        self._clock = clock
        self._max_bytes = max_bytes
        self._retain_seconds = retain_seconds
        self._lock = threading.RLock()
        self._grown = threading.Condition(self._lock)
        self._counted: set[str] = set()
        self._memory = Memory(
            {name: Reader(filter=wanted, from_start=start) for name, (wanted, start) in sinks.items()}
        )
        self._disk = Disk(folder, take_over=self._memory.take_over)
        try:
            self._disk.open()
        except BaseException:
            folder.release()
            raise
        self._write(synced=True)

    @property
    def storage_error(self) -> str | None:
        """What is wrong with the disk; None when it has everything."""
        return self._disk.storage_error

    @property
    def generation(self) -> int:
        """A number that changes when what `pending` gave must be read again."""
        return self._memory.generation

    # What is remembered between two documents

    def meta(self, key: str, default: str = "") -> str:
        """Return a remembered value."""
        with self._lock:
            return self._memory.meta.get(key, default)

    def set_meta(self, values: Mapping[str, str], *, synced: bool = False) -> None:
        """Remember values; a process that dies keeps them, a VM that dies may lose those not `synced`."""
        with self._lock:
            self._memory.remember(values)
            self._write(synced=synced)

    def count(self, key: str) -> int:
        """Count one further under `key`; the next commit stores it, and nothing does so ahead of its event."""
        with self._lock:
            number = int(self._memory.meta.get(key, "0")) + 1
            self._memory.meta[key] = str(number)
            self._counted.add(key)
            return number

    def occurrences(self, fingerprint: str) -> int:
        """Return how often a transition was seen."""
        with self._lock:
            if fingerprint in self._memory.unsaved.occurrences:
                return self._memory.unsaved.occurrences[fingerprint]
            row = self._disk.ask(lambda database: database.execute("occurrences", fingerprint).fetchone())
            return int(row[0]) if row else 0

    def record(self, kind: str, key: str) -> Json:
        """Return a value that was committed under `kind` and `key`, None if there is none."""
        with self._lock:
            text = self._memory.unsaved.records.get((kind, key))
            if text is None:
                row = self._disk.ask(lambda database: database.execute("record", kind, key).fetchone())
                text = row[0] if row else None
            return None if text is None else json.loads(text)

    def commit(
        self,
        events: Sequence[tuple[Named, bytes]],
        *,
        meta: Mapping[str, str],
        occurrences: Mapping[str, int] | None = None,
        records: Mapping[tuple[str, str], Json] | None = None,
    ) -> bool:
        """Store what must not be parted: new events with their encoding, what is remembered, what was counted.

        `records` are values by kind and key, kept for 30 days. The sinks can have the events when this
        returns; False means that only the memory holds them.
        """
        with self._lock:
            told = ((event.id, event.type, body) for event, body in events)
            self._memory.add(told, stored_at=self._clock.steady())
            self._memory.remember(meta)
            self._memory.unsaved.meta |= self._counted
            self._memory.unsaved.occurrences.update(occurrences or {})
            self._memory.unsaved.records.update(
                {name: json.dumps(value) for name, value in (records or {}).items()}
            )
            durable = self._write(synced=True)
            self._make_room()
            self._grown.notify_all()
            return durable

    def repeat(self, bodies: Sequence[bytes]) -> None:
        """Have every sink get events once more that were committed before, unchanged."""
        with self._lock:
            told = ((event["id"], event["type"], body) for body in bodies for event in [json.loads(body)])
            self._memory.add(told, stored_at=self._clock.steady())
            self._write(synced=True)
            self._make_room()
            self._grown.notify_all()

    # What a sink asks

    def pending(self, sink: str, limit: int) -> tuple[int, list[StoredEvent]]:
        """Return the oldest events that the sink is not done with, wanted or not, in their order.

        The number before them names the generation of the outbox: `acknowledge` takes it back, and what
        was read in an older `generation` must be read again.
        """
        with self._lock:
            reader, unsaved = self._memory.readers[sink], self._memory.unsaved
            reader.looked_at = self._memory.last_seq
            found = self._disk.ask(
                lambda database: read_events(database, after=reader.cursor, but=reader.ahead, limit=limit)
            )
            reader.blind = found is None
            events, there_is_more = found or ([], False)
            events = [shifted(event, unsaved.shift_seconds) for event in events]
            if not there_is_more:
                waiting = (event for event in unsaved.events if not reader.is_done_with(event.seq))
                events += islice(waiting, limit - len(events))
            return self._memory.generation, events

    def wait(self, sink: str, seconds: float) -> None:
        """Wait until there is more than `pending` last saw, at most `seconds`."""
        with self._grown:
            if self._memory.readers[sink].looked_at == self._memory.last_seq:
                self._grown.wait(max(0.0, seconds))

    def wake(self) -> None:
        """End every wait now."""
        with self._grown:
            self._grown.notify_all()

    def acknowledge(
        self,
        sink: str,
        generation: int,
        events: Sequence[StoredEvent],
        *,
        dead_lettered: DeadLetter | None = None,
    ) -> None:
        """Note that the sink is done with `events`, which `pending` gave; `dead_lettered` becomes a dead letter.

        A VM that dies may lose the note, and the sink gets the events again, with the same ids.
        """
        with self._lock:
            if generation != self._memory.generation:
                return
            self._memory.pass_over(sink, events, in_turn=not self._memory.readers[sink].blind)
            if dead_lettered:
                self._memory.unsaved.dead.append(dead_lettered)
            self._write(synced=dead_lettered is not None)

    def failing(self, sink: str, *, since: float | None) -> None:
        """Note since when (steady seconds) the sink fails; None: it does not."""
        with self._lock:
            self._memory.readers[sink].failing_since = since

    def backlog(self, sink: str) -> tuple[int, float | None]:
        """Return how many events wait for the sink, and since when (steady seconds) the oldest does."""
        with self._lock:
            reader, unsaved = self._memory.readers[sink], self._memory.unsaved
            if reader.cursor >= self._memory.last_seq:
                reader.backlog = 0
            if reader.backlog <= 0:
                return 0, None
            row = self._disk.ask(
                lambda database: database.execute("oldest-stored-at", reader.cursor).fetchone()
            )
            if row:
                return reader.backlog, float(row[0]) + unsaved.shift_seconds
            return reader.backlog, next(
                (event.stored_at for event in unsaved.events if not reader.is_done_with(event.seq)), None
            )

    def backlogs(self) -> dict[str, int]:
        """Return how many events wait for each sink."""
        with self._lock:
            return {sink: self.backlog(sink)[0] for sink in self._memory.readers}

    # Dead letters

    def retries(self, sink: str, limit: int) -> list[tuple[int, StoredEvent]]:
        """Return the sink's dead letters that an operator wants sent again, with their numbers."""
        with self._lock:
            settled = self._memory.unsaved.settled
            found = self._disk.ask(lambda database: read_retries(database, sink, limit + len(settled)))
            return [(number, event) for number, event in found or [] if number not in settled][:limit]

    def settle_retry(self, number: int, *, detail: str | None = None) -> None:
        """Forget a dead letter that was delivered after all, or bury it again with a new `detail`."""
        with self._lock:
            self._memory.unsaved.settled[number] = detail
            self._write(synced=True)

    def dead_letter_counts(self) -> dict[str, int]:
        """Return the number of dead letters of each sink."""
        with self._lock:
            rows = self._disk.ask(lambda database: database.execute("count-dead-letters").fetchall())
            counts: dict[str, int] = dict(rows or [])
            for letter in self._memory.unsaved.dead:
                counts[letter.sink] = counts.get(letter.sink, 0) + 1
            return counts

    # House-keeping

    def recover(self) -> None:
        """Try a disk that failed again; call every second or two."""
        with self._lock:
            if self._disk.storage_error is None:
                return
            self._disk.mend()
            self._memory.unsaved.meta.add("epoch")  # so that there is something to try the disk with
            if self._write(synced=True):
                self._make_room()
                self._grown.notify_all()

    def prune(self) -> None:
        """Forget what every sink has had and what is old; call now and then."""
        with self._lock:
            now = self._clock.steady()

            def write(database: Database) -> None:
                database.execute("prune-events", self._memory.done_seq(), now - self._retain_seconds)
                database.execute("prune-dead-letters", now - DEAD_LETTER_SECONDS)
                database.execute("prune-occurrences", now - OCCURRENCE_SECONDS)
                database.execute("prune-records", now - RECORD_SECONDS)

            if self._disk.storage_error is None:
                self._disk.write(write, synced=False)

    def shift(self, seconds: float) -> None:
        """Keep every age after the wall clock has jumped by `seconds`: all that is stored is dated anew."""
        with self._lock:
            self._clock.accept_jump(seconds)
            self._memory.shift(seconds)
            self._write(synced=False)

    def move_aside(self, why: str) -> Path:
        """Put this state away and begin a new one; return where the old one lies."""
        with self._lock:
            self._memory.forget()
            target = self._disk.move_aside(why)
            self._write(synced=True)
            return target

    def close(self) -> None:
        """Write what can be written and let the folder go."""
        with self._lock:
            if not self._write(synced=True) and (lost := self._memory.waiting()):
                log.error(
                    "the disk still fails: %d event(s) that were not delivered are lost with this process",
                    len(lost),
                    extra={"oldest": lost[0].id},
                )
            self._disk.close()
            self._folder.release()

    def _write(self, *, synced: bool) -> bool:
        """Write all that is unsaved; tell whether the disk has it."""
        memory = self._memory
        if not memory.unsaved:
            return self._disk.storage_error is None
        now = self._clock.steady()
        written = self._disk.write(lambda database: memory.write_to(database, now), synced=synced)
        if written:
            memory.saved()
        return written

    def _make_room(self) -> None:
        """Keep the file, or without one the memory, below its limit."""
        room.trim_memory(self._memory, now=self._clock.steady())
        while self._disk.storage_error is None and self._disk.ask(self._make_some_room):
            self._write(synced=True)

    def _make_some_room(self, database: Database) -> bool:
        """Make some room if there is too little; tell whether to look again."""
        if database.used_bytes() <= self._max_bytes:
            return False
        if room.free(database, done_seq=self._memory.done_seq(), max_bytes=self._max_bytes):
            return True
        now = self._clock.steady()
        sink = room.longest_failing(self._memory, now=now)
        if sink is None:
            return False
        reader = self._memory.readers[sink]
        events, _ = read_events(database, after=reader.cursor, but=reader.ahead, limit=room.GIVE_UP_ROWS)
        room.give_up_oldest(self._memory, sink, events, now=now)
        return bool(events)
