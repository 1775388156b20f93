"""What a process does with the outbox all day: commit events with what belongs to them, and acknowledge.

A change of the document and its events are one synced transaction, before anything is sent.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from uuid import uuid4

from bridge.events.filters import Filter
from bridge.events.model import CloudEvent, StoredEvent, stored
from bridge.events.urgency import URGENT_TYPES, YOUNG_SECONDS, Now
from bridge.outbox import rows
from bridge.outbox.room import Freed, make_room
from bridge.outbox.rows import Ledger, Loss, Wait, stored_event
from bridge.outbox.sqlite import LOG_BYTES
from bridge.outbox.storage import Storage
from bridge.runtime.json import Json
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

REJECTED, EXPIRED = "rejected", "expired"
# This much is buffered in memory while the file cannot be used.
MEMORY_BYTES = 32 * 1024 * 1024


@dataclass(eq=False)
class Outbox:
    """Events, what waits, dead letters and records of one process; every method may be called from any thread.

    `KeptOutbox` opens it. No method raises because of the disk: `storage_error` says what is wrong with it, None when
    it works. Damage in the file in use raises StateError, which ends the process.

    Args:
        clock: ages are counted on its steady time.
        sinks: for each sink its filter, and whether it starts at the oldest event instead of the next.
        max_bytes: how large the file and its log may become before the oldest waiting events are dropped.
        count: is called with the events of each commit.
        held: for sinks that hold events, a function that returns until when one is held (steady seconds), None for
            not at all.

    Attributes:
        storage: where the rows are.
        epoch: the id of this run, in which the process counts its own events.
        previous_run: the epoch and the last committed number of the run before; (None, None) where there was none.
        changes: counts what ends a wait.
    """

    _: KW_ONLY
    clock: Clock
    sinks: Mapping[str, tuple[Filter, bool]]
    max_bytes: int
    count: Callable[[Sequence[CloudEvent | StoredEvent]], None] = lambda _: None
    held: Mapping[str, Callable[[StoredEvent], float | None]] = field(default_factory=dict)
    storage: Storage = field(init=False)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._waiting: Counter[str] = Counter()
        # For each sink the numbers of young urgent events, None for an earlier run's, and when they were stored.
        self._urgent: dict[str, deque[tuple[int | None, float]]] = {}
        self._delivered_from = 0.0  # no event before this number is one that no sink waits for
        self._drops = RepeatLimit(self.clock)
        self.changes = 0
        self.epoch = uuid4().hex
        self.previous_run: tuple[str | None, int | None] = (None, None)
        self._number = 0

    def _wanted_by(self, event: StoredEvent) -> list[str]:
        return [name for name, (wanted, _) in self.sinks.items() if wanted.matches(event)]

    def _held_by(self, event: StoredEvent) -> dict[str, float | None]:
        """Return the sinks that take an event, and until when each holds it."""
        # What only memory has is not held: a kill would lose it, and a relay completes its messages later.
        held = self.held if self.storage.error is None else {}
        return {name: held[name](event) if name in held else None for name in self._wanted_by(event)}

    @property
    def storage_error(self) -> str | None:
        """What is wrong with the file; None while it has everything."""
        return self.storage.error

    # What is remembered between two documents

    def record(self, kind: str, key: str) -> Any:
        """Return a value that was committed under `kind` and `key`, None if there is none."""
        return self.storage.run(lambda database: database.record(kind, key))

    def losses(self) -> list[Loss]:
        """Return the losses that are not published yet."""
        return self.storage.run(Ledger.losses)

    def next_number(self) -> int:
        """Return the number of the next event that this process counts; it counts once the event is committed."""
        self._number += 1
        return self._number

    def commit(
        self,
        events: Sequence[CloudEvent | StoredEvent],
        *,
        records: Mapping[tuple[str, str], Json] | None = None,
        published: Sequence[Loss] = (),
    ) -> bool:
        """Store in one transaction what belongs together; the sinks can have the events when this returns.

        Args:
            events: new events, and some that are given byte for byte.
            records: values by kind and key. They are kept for 30 days, those of the kind STATE for ever; at the size
                limit, those that are objects whose DONE is true are deleted before any event.
            published: losses that the events report.

        Returns:
            Whether the file has it all; False: only the memory has.
        """
        now, wall = self.clock.steady(), self.clock.wall()
        with self._changed:
            added = [
                stored(event, seq=seq, at=now) for seq, event in enumerate(events, self.storage.last_seq + 1)
            ]
            waiting = [(event, self._held_by(event)) for event in added]
            values = dict(records or {})
            if added:
                run = {"epoch": self.epoch, "reporterseq": self._number, "seq": added[-1].seq}
                values[rows.STATE, rows.RUN] = run

            def work(database: Ledger) -> Freed:
                for event in added:
                    database.save_event(event)
                for event, held in waiting:
                    database.save_waiting(event, held, wall=wall)
                for (kind, key), value in values.items():
                    database.save_record(kind, key, value, at=now)
                if published:
                    database.forget_losses(published)
                return self._make_room(database)

            unwanted = (event.seq for event, held in waiting if not held)
            self._delivered_from = min(self._delivered_from, *unwanted, math.inf)
            freed = self.storage.run(work, synced=True)
            self.storage.last_seq += len(added)
            self.storage.note_published(published)
            self._waiting.update(sink for _, held in waiting for sink in held)
            for event, held in waiting:
                for sink in held if event.type.startswith(URGENT_TYPES) else ():
                    self._young(sink, now).append((event.seq, now))
            self._note_freed(freed)
            self.storage.note_numbers()
            self.storage.keep_state()
            self.wake()
            self.count(events)
            return self.storage.error is None

    # What a sink asks

    def pending(self, sink: str, limit: int, *, after: int = 0) -> list[StoredEvent]:
        """Return the oldest events that wait for the sink behind the number `after`, in their order."""
        return self.storage.run(lambda database: database.pending(sink, after=after, limit=limit))

    def now(self) -> Now:
        """Return the time by both clocks."""
        return Now(wall=self.clock.wall(), steady=self.clock.steady())

    def has_young(self, sink: str) -> bool:
        """Return whether a notice or receipt waits that was stored lately; one of an earlier run counts as new."""
        with self._changed:
            young = self._young(sink, self.clock.steady())
            while young and not self._has_urgent(sink, young[-1][0]):
                young.pop()
            return bool(young)

    def _young(self, sink: str, now: float) -> deque[tuple[int | None, float]]:
        """Return the urgent events for a sink that are young now and may wait, the newest last."""
        young = self._urgent.setdefault(sink, deque([(None, now)]))
        while young and young[0][1] <= now - YOUNG_SECONDS:
            young.popleft()
        return young

    def _has_urgent(self, sink: str, seq: int | None) -> bool:
        """Return whether a certain notice or receipt waits; None: whether any does."""

        def work(database: Ledger) -> bool:
            if seq is None:
                return database.has_urgent(sink, range(Wait.BEHIND))
            return database.execute("key-and-urgency", sink, seq).fetchone() is not None

        return self.storage.run(work)

    def wait(self, seen: int, seconds: float) -> None:
        """Wait until `changes` is another number than the one that was seen, at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.changes != seen, max(0.0, seconds))

    def wake(self) -> None:
        """End every wait now."""
        with self._changed:
            self.changes += 1
            self._changed.notify_all()

    def acknowledge(
        self, sink: str, events: Sequence[StoredEvent], *, dead: tuple[str, str] | None = None
    ) -> None:
        """Note that the sink has had events, in whatever order.

        A VM that dies may lose the note, and the sink gets the events again, with the same ids.

        Args:
            sink: the sink's name.
            events: what it has had.
            dead: why it will never get them: the reason, and a text for a person; then they become dead letters.
        """
        now = self.clock.steady()

        def work(database: Ledger) -> int:
            for one in events if dead else ():
                database.save_dead_letter(sink, one.id, one.type, *(dead or ()), now, one.body)
            # What is behind another one first, so that it need not become the first of its key.
            return sum(database.execute("delete-waiting", sink, one.seq).rowcount for one in reversed(events))

        def delivered(database: Ledger) -> list[int]:
            seqs = [one.seq for one in events if one.seq < self._delivered_from]
            return [seq for seq in seqs if database.execute("sinks-waiting-for", seq).fetchone() is None]

        with self._changed:
            self._waiting[sink] -= self.storage.run(work, synced=dead is not None)
            self._delivered_from = min(self._delivered_from, *self.storage.run(delivered), math.inf)
            self.storage.note_done(sink, (event.seq for event in events))
            self.storage.note_numbers()

    def backlog(self, sink: str) -> tuple[int, float | None]:
        """Return how many events wait for the sink, and since when (steady seconds) the oldest does."""
        with self._changed:
            if not (count := self._waiting[sink]):
                return 0, None
            oldest = self.oldest(sink)
            return count, oldest.stored_at if oldest else None

    def oldest(self, sink: str) -> StoredEvent | None:
        """Return the oldest event that waits for the sink."""
        row = self.storage.run(lambda database: database.execute("oldest-waiting", sink).fetchone())
        return stored_event(row) if row else None

    def backlogs(self) -> dict[str, int]:
        """Return how many events wait for each sink."""
        with self._changed:
            return {sink: self._waiting[sink] for sink in self.sinks}

    def _make_room(self, database: Ledger) -> Freed:
        """Keep the file, or the memory in its place, below its limit."""
        limit = min(self.max_bytes, MEMORY_BYTES) if database.is_memory else self.max_bytes - LOG_BYTES
        return make_room(database, limit, start=self._delivered_from, is_stored=self.storage.has_stored)

    def _note_freed(self, freed: Freed) -> None:
        self._delivered_from, lost = freed
        self._waiting -= lost
        if lost and self._drops.is_due():
            text = "the outbox reached its size limit: the oldest waiting events are dropped"
            log.error(text, extra={"dropped": lost})
