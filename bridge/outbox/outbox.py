"""The outbox: everything that must not be lost, and which sink still waits for what.

A change of the document and its events are one synced transaction, before anything is sent. While the file cannot
be used the same goes on in memory, and what the file lacks is written once it works again.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from bridge.config.base import DAY_SECONDS
from bridge.events.filters import Filter
from bridge.events.model import CloudEvent, StoredEvent, stored
from bridge.events.urgency import URGENT_TYPES, YOUNG_SECONDS, Now
from bridge.outbox import rows
from bridge.outbox.rows import Ledger, Loss, Wait, stored_dead_letter, stored_event
from bridge.outbox.sqlite import LOG_BYTES
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.storage import Storage, TurnedUp
from bridge.runtime.json import Json
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

REJECTED, EXPIRED = "rejected", "expired"

# How often a transition was seen must be remembered for longer than any duplicate detection (7 days).
RECORD_SECONDS = DEAD_LETTER_SECONDS = 30 * DAY_SECONDS
# How long events wait for a sink that is not configured any more.
LEFT_SECONDS = 7 * DAY_SECONDS
# This much is buffered in memory while the file cannot be used.
MEMORY_BYTES = 32 * 1024 * 1024
CHUNK_ROWS = 1000
FREED_ROWS = 200

Freed = tuple[float, Counter[str]]


@dataclass(eq=False)
class Outbox:
    """Events, what waits, dead letters and records of one process; every method may be called from any thread.

    To make one opens the outbox in `folder`, or starts one. Afterwards, no method raises because of the disk:
    `storage_error` says what is wrong with it, None when it works. Damage in the file in use raises StateError, which
    ends the process.

    Args:
        folder: where it is kept.
        clock: ages are counted on its steady time.
        sinks: for each sink its filter, and whether it starts at the oldest event instead of the next.
        max_bytes: how large the file and its log may become before the oldest waiting events are dropped.
        retain_seconds: for how long events are kept that every sink has had.
        count: is called with the events of each commit.
        held: for sinks that hold events, a function that returns until when one is held (steady seconds), None for
            not at all.

    Raises:
        StateError: another process holds the folder, or a newer version wrote it.

    Attributes:
        storage: where the rows are.
        epoch: the id of this run, in which the process counts its own events.
        previous_run: the epoch and the last committed number of the run before; (None, None) where there was none.
        changes: counts what ends a wait.
    """

    folder: StateFolder
    _: KW_ONLY
    clock: Clock
    sinks: Mapping[str, tuple[Filter, bool]]
    max_bytes: int
    retain_seconds: float
    count: Callable[[Sequence[CloudEvent | StoredEvent]], None] = lambda _: None
    held: Mapping[str, Callable[[StoredEvent], float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._waiting: Counter[str] = Counter()
        # For each sink the numbers of young urgent events, None for an earlier run's, and when they were stored.
        self._urgent: dict[str, deque[tuple[int | None, float]]] = {}
        self._delivered_from = 0.0  # no event before this number is one that no sink waits for
        self._drops = RepeatLimit(self.clock)
        self.changes = 0
        self.epoch = uuid4().hex
        self._number = 0
        self.storage = Storage(self.folder, self._changed, self.now, self._wanted_by)
        try:
            self.storage.open()
            self._begin()
        except BaseException:
            self.storage.close()
            self.folder.release()
            raise

    def _begin(self) -> None:
        """Begin this run with what is stored."""
        run = self.record(rows.STATE, rows.RUN) or {}
        self.previous_run: tuple[str | None, int | None] = (run.get("epoch"), run.get("reporterseq"))
        now = self.clock.steady()
        self.storage.run(lambda database: database.execute("resume", now), synced=False)
        self._load()
        for sink, count in self.left_sinks().items():
            log.warning(
                "%d event(s) wait for sink %s, which is not configured: `imds-bridge outbox move` hands them to "
                "another sink, `imds-bridge outbox drop --waiting` deletes them",
                *(count, sink),
            )

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

    @property
    def storage_errors(self) -> int:
        """How often the file could not be used; while it fails, each attempt counts."""
        return self.storage.errors

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

    def left_sinks(self) -> dict[str, int]:
        """Return how many events wait for sinks that are not configured."""
        with self._changed:
            return {sink: count for sink, count in (+self._waiting).items() if sink not in self.sinks}

    def dead_letter_counts(self) -> dict[str, int]:
        """Return the number of dead letters of each sink."""
        return self.storage.run(lambda database: database.counts("count-dead-letters"))

    def size_bytes(self) -> int:
        """Return how much disk the outbox takes up, or how much memory in its place."""
        return self.storage.size_bytes()

    # Whose the state is

    def replace(self, state: Mapping[str, Json]) -> Path:
        """Move the state of another VM aside and start a new one; return where the old one is now.

        What waited there is a loss. Nothing may have been committed before.

        Args:
            state: what the new one remembers for ever, by its names.
        """
        with self._changed:
            waiting = [
                Loss(reason=rows.OTHER_VM, count=count, sink=sink, oldest=self.backlog(sink)[1])
                for sink, count in (+self._waiting).items()
            ]
            target = self.storage.replace({**state, rows.LOSSES: list(map(asdict, waiting))})
            self._begin()
            return target

    # Maintenance

    def recover(self, *, may_end: bool = True) -> None:
        """Use a file again that failed, and notice what the command line has changed; call every few seconds.

        Raises:
            StateError: this process started without the state, which can be read now; only with `may_end`.
        """
        with self._changed:
            has_changed = self.storage.recover(may_end=may_end)
        while has_changed:
            has_changed = self._load() == CHUNK_ROWS

    def _load(self) -> int:
        """Count what waits, begin with new sinks, and let dead letters wait again; return how many of them."""
        now = self.clock.steady()

        def work(database: Ledger) -> tuple[int, Freed, Counter[str]]:
            appended = 0
            if not database.is_memory:
                self._begin_sinks(database)
                appended = self._append_retries(database, now)
            return appended, self._make_room(database), Counter(database.counts("count-waiting"))

        with self._changed:
            self._delivered_from = 0.0
            appended, freed, waiting = self.storage.run(work, synced=True)
            self._waiting = waiting + freed[1]
            self._note_freed(freed)
            self.storage.note_numbers()
            self.wake()
            return appended

    def _append_retries(self, database: Ledger, now: float) -> int:
        """Let dead letters that are to be sent again wait like new events; return how many.

        Their numbers count as given at once: if the transaction fails, it may be in the file all the same.
        """
        numbers = [number for (number,) in database.execute("retries", CHUNK_ROWS)]
        for number in numbers:
            self.storage.last_seq += 1
            (sink, id_, type_, *_, body), _ = stored_dead_letter(
                database.execute("dead-letter", number).fetchone()
            )
            event = StoredEvent(seq=self.storage.last_seq, id=id_, type=type_, stored_at=now, body=body)
            database.save_event(event)
            database.save_waiting(event, {sink: None}, wall=-math.inf)  # an old notice is not late news
            database.execute("delete-dead-letter", number)
        if numbers:
            database.note_seq(self.storage.last_seq)
        return len(numbers)

    def _begin_sinks(self, database: Ledger) -> None:
        """Let new sinks with `from_start` wait for what is stored, and note since when each filter decides."""
        known = database.record(rows.STATE, rows.SINKS) or []
        if new := [name for name in self.sinks if name not in known]:
            for name in new:
                wanted, from_start = self.sinks[name]
                for row in database.execute("events-after", 0) if from_start else ():
                    event = stored_event(row)
                    if wanted.matches(event):
                        database.save_waiting(event, {name: None})
            database.save_record(rows.STATE, rows.SINKS, [*known, *new])
        noted, kept = database.record(rows.STATE, rows.FILTERS) or {}, {}
        for name, (wanted, from_start) in self.sinks.items():
            since = 0 if from_start and name in new else self.storage.last_seq
            kept[name] = noted[name] if repr(wanted) in noted.get(name, ()) else [repr(wanted), since]
        if kept != noted:
            database.save_record(rows.STATE, rows.FILTERS, kept)

    def prune(self) -> None:
        """Forget what every sink has had and what is old; call every minute."""
        now = self.clock.steady()

        def work(database: Ledger) -> bool:
            database.execute("prune-dead-letters", now - DEAD_LETTER_SECONDS)
            database.execute("prune-records", now - RECORD_SECONDS)
            pruned = database.execute("prune-events", now - self.retain_seconds, CHUNK_ROWS)
            return pruned.rowcount == CHUNK_ROWS

        while self.storage.error is None and self.storage.run(work, synced=False):
            pass
        for sink in self.left_sinks():
            self._expire(sink, now - LEFT_SECONDS)

    def _expire(self, sink: str, before: float) -> None:
        """Let what has waited too long for a sink that is not configured become dead letters."""
        while old := [event for event in self.pending(sink, CHUNK_ROWS) if event.stored_at < before]:
            self.acknowledge(sink, old, dead=(EXPIRED, "the sink is not configured"))
            log.error("%d event(s) for sink %s, which is not configured, are dead-lettered", len(old), sink)

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

    def close(self) -> bool:
        """Write what can be written and let the folder go; return whether all that waits is stored."""
        with self._changed:
            is_stored = self._store()
            if not is_stored and (waiting := max(self._waiting.values(), default=0)):
                text = "the state store is still unavailable: %d event(s) that were not delivered are lost"
                log.error(text, waiting)
            self.storage.close()
            self.folder.release()
            return is_stored

    def _store(self) -> bool:
        try:
            self.storage.recover()
        except TurnedUp:
            return True
        return self.storage.error is None


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
