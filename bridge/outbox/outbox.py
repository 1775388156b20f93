"""The outbox: everything that must not be lost, with a cursor for each sink.

A change of the document and its events are one synced transaction, before anything is sent. While the file cannot
be used the same goes on in memory, and what the file lacks is written once it works again.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import retention
from bridge.outbox.retention import OVERFLOW
from bridge.outbox.rows import (
    DeadLetter,
    dead_letter,
    newest_events,
    read,
    read_events,
    read_one,
    read_retries,
    save_dead_letter,
    save_event,
    stored_event,
)
from bridge.outbox.sqlite import Database
from bridge.outbox.state import DAMAGE, OTHER_VM, Loss, Position, State
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.storage import OTHER_VM_FILE, Storage
from bridge.outbox.transfer import shift
from bridge.runtime.clock import Clock
from bridge.runtime.json import Json

__all__ = ["DAMAGE", "EXPIRED", "OVERFLOW", "REJECTED", "DeadLetter", "Loss", "Outbox", "dead_letter"]

log = logging.getLogger(__name__)

REJECTED, EXPIRED = "rejected", "expired"

# How often a transition was seen must be remembered for longer than any duplicate detection (7 days).
OCCURRENCE_SECONDS = 30 * 86_400.0
DEAD_LETTER_SECONDS = 30 * 86_400.0
RECORD_SECONDS = 30 * 86_400.0
# A longer time between the last event and the start is believed only after the clock has run for a while.
UNCERTAIN_GAP_SECONDS = 2 * 3600.0
CERTAIN_SECONDS = 600.0


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

    No method raises because of the disk: `storage_error` says what is wrong with it, None when it works.
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
        """Open the outbox in `folder`, or start one.

        Args:
            folder: where it is kept.
            clock: ages are counted on its steady time.
            sinks: for each sink its filter, and whether it starts at the oldest event instead of the next.
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
        self._opened_at = clock.steady()
        positions = {
            name: Position(filter=wanted, from_start=start) for name, (wanted, start) in sinks.items()
        }
        self._storage = Storage(folder, State(positions))
        try:
            self._storage.open()
        except BaseException:
            folder.release()
            raise
        self._uncertain_seconds = 0.0
        self._certain_at = clock.monotonic() + CERTAIN_SECONDS
        self._release_at = 0.0
        self._leave_out_downtime()

    @property
    def _state(self) -> State:
        return self._storage.state

    @property
    def storage_error(self) -> str | None:
        """What is wrong with the file; None while it has everything."""
        return self._storage.error

    @property
    def storage_errors(self) -> int:
        """How often the file could not be used; while it fails, each attempt counts."""
        return self._storage.errors

    @property
    def generation(self) -> int:
        """A number that changes when what `pending` gave must be read again."""
        return self._state.generation

    # What is remembered between two documents

    def meta(self, key: str, default: str = "") -> str:
        """Return a remembered value."""
        with self._lock:
            return {**self._state.meta, **self._state.counted}.get(key, default)

    def losses(self) -> list[Loss]:
        """Return the losses that are not published yet."""
        with self._lock:
            return self._state.losses()

    def committed(self) -> dict[str, str]:
        """Return the epoch and the last number of it that was committed: a restored file may have older ones."""
        with self._lock:
            return {key: self._state.meta[key] for key in ("epoch", "reporterseq")}

    def set_meta(self, values: Mapping[str, str], *, synced: bool = False) -> None:
        """Remember values; a process that dies keeps them, a VM that dies may lose those not `synced`."""
        with self._lock:
            self._state.meta.update(values)
            self._storage.run(lambda database: self._state.save_meta(database, values), synced=synced)

    def count(self, key: str) -> int:
        """Count one further under `key`; the next commit stores it, and nothing does so ahead of its event."""
        with self._lock:
            return self._state.count(key)

    def occurrences(self, fingerprint: str) -> int:
        """Return how often a transition was seen."""
        with self._lock:
            row = self._storage.run(lambda database: read_one(database, "occurrence", fingerprint))
            return row[1] if row else 0

    def record(self, kind: str, key: str) -> Json:
        """Return a value that was committed under `kind` and `key`, None if there is none."""
        with self._lock:
            row = self._storage.run(lambda database: read_one(database, "record", kind, key))
            return json.loads(row[2]) if row else None

    def commit(
        self,
        events: Sequence[tuple[Named, bytes]],
        *,
        meta: Mapping[str, str],
        occurrences: Mapping[str, int] | None = None,
        records: Mapping[tuple[str, str], Json] | None = None,
        published: Sequence[Loss] = (),
    ) -> bool:
        """Store in one transaction what belongs together; the sinks can have the events when this returns.

        Args:
            events: new events, each with its encoding.
            meta: what is remembered.
            occurrences: how often transitions were seen, by fingerprint.
            records: values by kind and key, which are kept for 30 days; at the size limit, those that are
                objects whose `done` is true are deleted before any event.
            published: losses that the events report.

        Returns:
            Whether the file has it all; False: only the memory has.
        """
        encoded = {name: json.dumps(value) for name, value in (records or {}).items()}

        def write(database: Database, now: float) -> None:
            self._state.save_meta(database, meta)
            for fingerprint, count in (occurrences or {}).items():
                database.execute("save-occurrence", fingerprint, count, now)
            for (kind, key), value in encoded.items():
                database.execute("save-record", kind, key, value, now)

        with self._lock, self._undone_on_failure():
            self._state.meta.update(meta)
            self._state.forget_losses(published)
            self._add(((event.id, event.type, body) for event, body in events), write)
            return self._storage.error is None

    def repeat(self, bodies: Sequence[bytes]) -> None:
        """Have every sink get events once more that were committed before: as they are stored, else as given."""
        with self._lock, self._undone_on_failure():
            events = [(event["id"], event["type"], body) for body in bodies for event in [json.loads(body)]]
            # An event has got another number if the file failed when it was committed.
            self._add(
                ((id_, type_, self._stored(type_, id_) or body) for id_, type_, body in events), are_new=False
            )

    def _stored(self, event_type: str, event_id: str) -> bytes | None:
        row = self._storage.run(lambda database: read_one(database, "first-event", event_type, event_id))
        return stored_event(*row).body if row else None

    @contextmanager
    def _undone_on_failure(self) -> Iterator[None]:
        """Forget what was counted for a transaction that another error than the disk's ends, such as MemoryError."""
        state, meta, last_seq = self._state, dict(self._state.meta), self._state.last_seq
        try:
            yield
        except BaseException:
            state.meta, state.last_seq = meta, last_seq
            raise

    def _add(
        self,
        events: Iterable[tuple[str, str, bytes]],
        write: Callable[[Database, float], None] = lambda *_: None,
        *,
        are_new: bool = True,
    ) -> None:
        now = self._clock.steady()
        counted = {*self._state.counted, "reporterseq", "last_seq"}
        added = self._state.add(events, stored_at=now)

        def work(database: Database) -> None:
            for event in added:
                save_event(database, self._state.renumbered(event) if are_new else event)
            self._state.save_meta(database, counted | {"losses"} & self._state.meta.keys())
            write(database, now)

        self._storage.run(work, synced=True)
        self._enforce_size_limit()
        self._grown.notify_all()

    # What a sink asks

    def pending(self, sink: str, limit: int, *, after: int = 0) -> tuple[int, list[StoredEvent]]:
        """Return the oldest events that the sink is not done with, wanted or not, in their order.

        The number before them names the generation of the outbox: `acknowledge` takes it back, and what
        was read in an older `generation` must be read again.

        Args:
            sink: the sink's name.
            limit: how many events to return at most.
            after: the number of the last event that need not be read again.
        """

        def work(database: Database) -> list[StoredEvent]:
            position = self._state.positions[sink]
            position.looked_at = self._state.last_seq
            first = max(after, self._state.read_from(sink))
            return read_events(database, after=first, but=position.ahead, limit=limit)

        with self._lock:
            events = self._storage.run(work)
            return self._state.generation, events

    def has_recent(self, sink: str, since: float, is_meant: Callable[[StoredEvent], bool]) -> bool:
        """Return whether an event that `is_meant` waits for the sink, stored after `since` (steady seconds)."""

        def work(database: Database) -> bool:
            position = self._state.positions[sink]
            position.looked_at = self._state.last_seq
            recent = takewhile(
                lambda event: event.stored_at > since, newest_events(database, self._state.read_from(sink))
            )
            return any(event.seq not in position.ahead and is_meant(event) for event in recent)

        with self._lock:
            return self._storage.run(work)

    def is_from_earlier(self, event: StoredEvent) -> bool:
        """Return whether an earlier process stored the event, and may have delivered it."""
        return event.seq <= self._state.kept_to

    def wait(self, sink: str, seconds: float) -> None:
        """Wait until there is more than `pending` or `has_recent` last saw, at most `seconds`."""
        with self._grown:
            if self._state.positions[sink].looked_at == self._state.last_seq:
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
        """Note that the sink is done with events, in whatever order.

        A VM that dies may lose the note, and the sink gets the events again, with the same ids.

        Args:
            sink: the sink's name.
            generation: what `pending` gave with the events; nothing is noted if it is an older one.
            events: what the sink has had, or does not want.
            dead_lettered: one of them that becomes a dead letter.
        """

        def work(database: Database) -> None:
            self._state.save_position(database, sink, [event.seq for event in events])
            if dead_lettered:
                save_dead_letter(database, dead_lettered)

        with self._lock:
            if generation == self._state.generation:
                self._state.positions[sink].acknowledge(events)
                self._storage.run(work, synced=dead_lettered is not None)

    def failing(self, sink: str, *, since: float | None) -> None:
        """Note since when (steady seconds) the sink fails; None: it does not."""
        with self._lock:
            self._state.positions[sink].failing_since = since

    def size_bytes(self) -> int:
        """Return how much the events, records and dead letters take up."""
        with self._lock:
            return self._storage.run(lambda database: database.used_bytes())

    def backlog(self, sink: str) -> tuple[int, float | None]:
        """Return how many events wait for the sink, and since when (steady seconds) the oldest does."""
        with self._lock:
            position = self._state.positions[sink]
            if position.cursor >= self._state.last_seq:
                position.backlog = 0
            if position.backlog <= 0:
                return 0, None
            row = self._storage.run(
                lambda database: database.execute("oldest-stored-at", position.cursor).fetchone()
            )
            return position.backlog, row[0] if row else None

    def backlogs(self) -> dict[str, int]:
        """Return how many events wait for each sink."""
        with self._lock:
            return {sink: self.backlog(sink)[0] for sink in self._state.positions}

    # Dead letters

    def retries(self, sink: str, limit: int) -> list[tuple[int, StoredEvent]]:
        """Return the sink's dead letters that an operator wants sent again, with their numbers."""
        with self._lock:
            if self._state.is_held:
                return []
            return self._storage.run(lambda database: read_retries(database, sink, limit))

    def settle_retry(self, number: int, *, detail: str | None = None) -> None:
        """Forget a dead letter that was delivered after all, or keep it with a new `detail`."""

        def work(database: Database) -> None:
            if detail is None:
                database.execute("drop-dead-letter", number)
            else:
                database.execute("dead-letter-again", number, detail, self._clock.steady())

        with self._lock:
            self._storage.run(work, synced=True)

    def dead_letter_counts(self) -> dict[str, int]:
        """Return the number of dead letters of each sink."""
        with self._lock:
            return dict(self._storage.run(lambda database: database.execute("count-dead-letters").fetchall()))

    # Whose the state is

    def hold_kept(self, seconds: float) -> None:
        """Keep the events of earlier processes from the sinks until `release_kept`, for so long at most."""
        with self._lock:
            self._state.is_held = True
            self._release_at = self._clock.monotonic() + seconds
            if waiting := max(self.backlogs().values(), default=0):
                log.info(
                    "waiting events are held until the VM's identity is confirmed", extra={"events": waiting}
                )

    def has_held(self) -> bool:
        """Return whether events wait that are held."""
        with self._lock:
            return self._state.is_held and self._state.done_seq() < self._state.kept_to

    def release_kept(self) -> None:
        """Let the sinks have what is held."""
        with self._lock:
            if self._state.is_held:
                self._state.is_held = False
                self._state.generation += 1
                self._grown.notify_all()

    def move_aside(self) -> Path:
        """Move the state of another VM aside and start a new one; return where the old one is now.

        What waits of the other VM is a loss; what waits of this process is in the new state.
        """

        def read_own(database: Database) -> list[StoredEvent]:
            found = (stored_event(*row) for row in read(database, "event", self._state.kept_to))
            return [e for e in found if any(p.waits_for(e) for p in self._state.positions.values())]

        with self._lock:
            own = self._storage.run(read_own)
            waiting = {sink: self.backlog(sink) for sink in self._state.positions}
            wanted = {sink: sum(p.waits_for(e) for e in own) for sink, p in self._state.positions.items()}
            target = self._storage.move_aside(OTHER_VM_FILE)
            for sink, (count, oldest) in waiting.items():
                if count > wanted[sink]:
                    self._state.note_loss(
                        Loss(reason=OTHER_VM, count=count - wanted[sink], sink=sink, oldest=oldest)
                    )
            self._add((event.id, event.type, event.body) for event in own)
            return target

    # Maintenance

    def _leave_out_downtime(self) -> None:
        """Count no long time without events into the ages yet: the clock may be wrong, as it can be after boot."""
        row = self._storage.run(lambda database: database.execute("newest-stored-at").fetchone())
        gap_seconds = self._opened_at - row[0] if row else 0.0
        if gap_seconds > UNCERTAIN_GAP_SECONDS:
            self._uncertain_seconds = gap_seconds - 1.0
            self._shift_older(self._uncertain_seconds)

    def _count_downtime(self) -> None:
        """Count that time into the ages, once the clock has not been corrected for a while."""
        if self._uncertain_seconds and self._clock.monotonic() >= self._certain_at:
            seconds, self._uncertain_seconds = self._uncertain_seconds, 0.0
            self._shift_older(-seconds)

    def _shift_older(self, seconds: float) -> None:
        before = self._opened_at
        self._storage.run(lambda database: shift(database, seconds, before=before), synced=False)
        self._state.generation += 1

    def recover(self) -> None:
        """Try a file again that could not be used, and do what operators asked for; call every second or two."""
        with self._lock:
            had_error = self._storage.error is not None
            may_have_changed = self._storage.recover()
            self._count_downtime()
            if self._clock.monotonic() >= self._release_at:
                self.release_kept()
            if not may_have_changed:
                return
            for action, number in self._folder.requests():
                self._storage.run(partial(_execute, action, number), synced=True)
                self._folder.forget_request(action, number)
            if had_error and self._storage.error is None:
                self._enforce_size_limit()
            self._grown.notify_all()

    def prune(self) -> None:
        """Forget what every sink has had and what is old; call now and then."""
        with self._lock:
            now = self._clock.steady()

            def work(database: Database) -> None:
                database.execute("prune-events", self._state.done_seq(), now - self._retain_seconds)
                database.execute("prune-dead-letters", now - DEAD_LETTER_SECONDS)
                database.execute("prune-occurrences", now - OCCURRENCE_SECONDS)
                database.execute("prune-records", now - RECORD_SECONDS)

            if self._storage.error is None:
                self._storage.run(work, synced=False)

    def shift(self, seconds: float) -> None:
        """Keep every age after the wall clock has jumped by `seconds`: all that is stored gets a new date."""
        with self._lock:
            self._clock.accept_jump(seconds)
            self._opened_at += seconds
            self._uncertain_seconds = max(0.0, self._uncertain_seconds + seconds)
            self._storage.run(lambda database: shift(database, seconds), synced=False)
            self._state.shift(seconds)

    def close(self) -> None:
        """Write what can be written and let the folder go."""
        with self._lock:
            self._storage.recover()
            if self._storage.error and (waiting := max(self.backlogs().values(), default=0)):
                log.error(
                    "the state store is still unavailable: %d event(s) that were not delivered are lost",
                    waiting,
                )
            self._storage.close()
            self._folder.release()

    def _enforce_size_limit(self) -> None:
        """Keep the file, or the memory in its place, below its limit."""
        now = self._clock.steady()

        def free(database: Database) -> bool:
            return retention.free(database, self._state, max_bytes=self._max_bytes, now=now)

        while self._storage.run(lambda database: retention.is_too_large(database, self._max_bytes)):
            if not self._storage.run(free, synced=False):
                break


def _execute(name: str, number: int, database: Database) -> None:
    database.execute(name, number)
