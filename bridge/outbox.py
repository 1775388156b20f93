"""The outbox: everything that must not be lost, with a cursor for each sink.

What the process knows lives in memory and is written through: a change of the document and its events in one
synced transaction, before anything is sent. If the disk fails, the same goes on in memory, and all that was not
written is written when the disk is back.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from bridge.database import Database, is_damage
from bridge.delivery import Filter
from bridge.model import CloudEvent, StoredEvent
from bridge.runtime import Clock
from bridge.state import StateFolder

log = logging.getLogger(__name__)
T = TypeVar("T")

REJECTED, EXPIRED, OVERFLOW = "rejected", "expired", "overflow"

# A batch of events is read up to this many bytes, so that a backlog of huge documents costs no memory.
READ_BYTES = 4 * 1024 * 1024
# Without a disk, this many events are kept for it.
MEMORY_EVENTS = 10_000
# How often a transition was seen must be remembered for longer than any duplicate detection (7 days).
OCCURRENCE_SECONDS = 30 * 86_400.0
DEAD_LETTER_SECONDS = 30 * 86_400.0
PRUNE_ROWS = 200


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """An event that a sink did not get; `body` is None when it was given up for want of room."""

    number: int = 0
    sink: str
    id: str
    type: str
    reason: str
    detail: str
    dead_at: float
    body: bytes | None


@dataclass
class _Reader:
    """What the outbox knows of one sink.

    `ahead` are events that it had while older ones could not be read from the disk. `failing_since` is in
    steady seconds.
    """

    filter: Filter
    cursor: int = 0
    backlog: int = 0
    ahead: set[int] = field(default_factory=set)
    disk_hidden: bool = False
    looked_at: int = 0
    failing_since: float | None = None


@dataclass
class _Unsaved:
    """What is known in memory and not yet on the disk."""

    events: deque[StoredEvent] = field(default_factory=deque)
    dead: list[DeadLetter] = field(default_factory=list)
    meta: set[str] = field(default_factory=set)
    cursors: set[str] = field(default_factory=set)
    occurrences: dict[str, int] = field(default_factory=dict)
    shift_seconds: float = 0.0


class Outbox:
    """Snapshot, events, cursors and dead letters of one process; every method may be called from any thread.

    No method raises because of the disk: `trouble` says what is wrong with it, None when it is well.
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
        self._from_start = {name: from_start for name, (_, from_start) in sinks.items()}
        self._readers = {name: _Reader(filter=wanted) for name, (wanted, _) in sinks.items()}
        self._max_bytes = max_bytes
        self._retain_seconds = retain_seconds
        self._lock = threading.RLock()
        self._grown = threading.Condition(self._lock)
        self._database: Database | None = None
        self._writable = False
        self._known = False  # what an older process left has been read
        self._meta = _new_state()
        self._last_seq = 0
        self._unsaved = _Unsaved(meta=set(self._meta))
        self.trouble: str | None = None
        self.generation = 0
        with self._lock:
            self._open()

    # What is remembered between two documents

    def meta(self, key: str, default: str = "") -> str:
        """Return a remembered value."""
        with self._lock:
            return self._meta.get(key, default)

    def set_meta(self, values: Mapping[str, str], *, synced: bool = False) -> None:
        """Remember values; a process that dies keeps them, a VM that dies may lose those not `synced`."""
        with self._lock:
            self._remember(values)
            self._write(synced=synced)

    def count(self, key: str) -> int:
        """Count one further under `key`; the next commit stores it."""
        with self._lock:
            number = int(self._meta.get(key, "0")) + 1
            self._remember({key: str(number)})
            return number

    def seen_before(self, fingerprint: str) -> int:
        """Return how often a transition was seen."""
        with self._lock:
            if fingerprint in self._unsaved.occurrences:
                return self._unsaved.occurrences[fingerprint]
            row = self._ask(lambda database: database.execute("occurrences", fingerprint).fetchone())
            return int(row[0]) if row else 0

    def commit(
        self,
        events: Sequence[tuple[CloudEvent, bytes]],
        *,
        meta: Mapping[str, str],
        occurrences: Mapping[str, int] | None = None,
    ) -> bool:
        """Store what must not be parted: new events with their encoding, what is remembered, what was counted.

        The sinks can have the events when this returns; False means that only the memory holds them.
        """
        with self._lock:
            stored_at = self._clock.steady()
            for event, body in events:
                self._last_seq += 1
                stored = StoredEvent(
                    seq=self._last_seq, id=event.id, type=event.type, stored_at=stored_at, body=body
                )
                self._unsaved.events.append(stored)
                for reader in self._readers.values():
                    reader.backlog += reader.filter.takes(stored)
            self._remember({**meta, "last_seq": str(self._last_seq)})
            self._unsaved.occurrences.update(occurrences or {})
            durable = self._write(synced=True)
            self._bound()
            self._grown.notify_all()
            return durable

    # What a sink asks

    def pending(self, sink: str, limit: int) -> tuple[int, list[StoredEvent]]:
        """Return the oldest events that the sink is not done with, wanted or not, in their order.

        The number before them names the generation of the outbox: `acknowledge` takes it back, and what
        was read in an older `generation` must be read again.
        """
        with self._lock:
            reader = self._readers[sink]
            reader.looked_at = self._last_seq
            rows = self._ask(
                lambda database: _read_events(database, reader.cursor, limit + len(reader.ahead))
            )
            reader.disk_hidden = rows is None and self._folder_holds_more()
            events = [_shifted(event, self._unsaved.shift_seconds) for event in rows or []]
            # Once a limit cut the rows off, what is in memory comes after what was not read.
            cut = len(events) >= limit or sum(len(event.body) for event in events) >= READ_BYTES
            if not cut:
                events += [event for event in self._unsaved.events if event.seq > reader.cursor]
            return self.generation, [event for event in events if event.seq not in reader.ahead][:limit]

    def wait(self, sink: str, seconds: float) -> None:
        """Wait until there is more than `pending` last saw, at most `seconds`."""
        with self._grown:
            if self._readers[sink].looked_at == self._last_seq:
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
        buried: DeadLetter | None = None,
    ) -> None:
        """Note that the sink is done with `events`, which `pending` gave; `buried` becomes a dead letter.

        A VM that dies may lose the note, and the sink gets the events again, with the same ids.
        """
        with self._lock:
            if generation != self.generation:
                return
            reader = self._readers[sink]
            for event in events:
                reader.backlog -= reader.filter.takes(event)
            if reader.disk_hidden:
                reader.ahead.update(event.seq for event in events)
            elif events:
                self._move(sink, reader, events[-1].seq)
            if buried:
                self._unsaved.dead.append(buried)
            self._write(synced=buried is not None)

    def failing(self, sink: str, *, since: float | None) -> None:
        """Note since when (steady seconds) the sink fails; None: it does not."""
        with self._lock:
            self._readers[sink].failing_since = since

    def backlog(self, sink: str) -> tuple[int, float | None]:
        """Return how many events wait for the sink, and since when (steady seconds) the oldest does."""
        with self._lock:
            reader = self._readers[sink]
            if reader.cursor >= self._last_seq:
                reader.backlog = 0
            if not reader.backlog:
                return 0, None
            row = self._ask(lambda database: database.execute("oldest-stored-at", reader.cursor).fetchone())
            if row is None and self._unsaved.events:
                row = (self._unsaved.events[0].stored_at,)
            return reader.backlog, float(row[0]) if row else None

    # Dead letters

    def retries(self, sink: str, limit: int) -> list[tuple[int, StoredEvent]]:
        """Return the sink's dead letters that an operator wants sent again, with their numbers."""
        with self._lock:
            rows = self._ask(lambda database: database.execute("retries", sink, limit).fetchall()) or []
            return [
                (number, StoredEvent(seq=0, id=event_id, type=event_type, stored_at=dead_at, body=body))
                for number, event_id, event_type, dead_at, body in rows
            ]

    def settle_retry(self, number: int, *, detail: str | None = None) -> None:
        """Forget a dead letter that was delivered after all, or bury it again with a new `detail`."""

        def write(database: Database) -> bool:
            with database.transaction():
                if detail is None:
                    database.execute("drop-dead-letter", number)
                else:
                    database.execute("bury-again", REJECTED, detail, self._clock.steady(), number)
            return True

        with self._lock:
            self._ask(write)

    def dead_letter_counts(self) -> dict[str, int]:
        """Return the number of dead letters of each sink."""
        with self._lock:
            counts = dict(self._ask(lambda database: database.execute("count-dead-letters").fetchall()) or [])
            for letter in self._unsaved.dead:
                counts[letter.sink] = counts.get(letter.sink, 0) + 1
            return counts

    # House-keeping

    def heal(self) -> None:
        """Try a disk that failed again; call every second or two."""
        with self._lock:
            if self.trouble is not None:
                if self._database is None or not self._writable:
                    self._close()
                    self._open()
                self._unsaved.meta.add("epoch")  # so that there is something to try the disk with
                self._write(synced=True)

    def prune(self) -> None:
        """Forget what every sink has had and what is old; call now and then."""
        with self._lock:
            now = self._clock.steady()

            def write(database: Database) -> bool:
                with database.transaction(synced=False):
                    database.execute("prune-events", self._done_seq(), now - self._retain_seconds)
                    database.execute("prune-dead-letters", now - DEAD_LETTER_SECONDS)
                    database.execute("prune-occurrences", now - OCCURRENCE_SECONDS)
                return True

            if self.trouble is None:
                self._ask(write)

    def shift(self, seconds: float) -> None:
        """Keep every age after the wall clock has jumped by `seconds`: all that is stored is dated anew."""
        with self._lock:
            self.generation += 1
            self._clock.accept_jump(seconds)
            self._unsaved.events = deque(_shifted(event, seconds) for event in self._unsaved.events)
            for reader in self._readers.values():
                if reader.failing_since is not None:
                    reader.failing_since += seconds
            self._unsaved.shift_seconds += seconds
            self._write(synced=False)

    def set_aside(self, why: str) -> Path:
        """Put this state away and begin a new one; return where the old one lies."""
        with self._lock:
            self._close()
            target = self._folder.set_aside(why)
            self._begin_anew()
            self._open()
            return target

    def close(self) -> None:
        """Write what can be written and let the folder go."""
        with self._lock:
            self._write(synced=True)
            self._close()
            self._folder.release()

    # Below: the disk

    def _open(self) -> None:
        """Take hold of the folder and read what it holds; note the trouble where that fails."""
        try:
            self._folder.acquire()
            self._database, self._writable = Database(self._folder.database), True
            self._take_over(self._database)
        except OSError as error:
            self._fail(f"{self._folder.path}: {error.strerror}")
            self._open_to_read()
        except sqlite3.Error as error:
            self._recover(error)

    def _recover(self, error: sqlite3.Error) -> None:
        """Begin a new file after damage; after anything else, go on reading where that is possible."""
        self._close()
        if not is_damage(error):
            self._fail(f"{self._folder.database}: {error}")
            self._open_to_read()
            return
        waiting = sum(reader.backlog for reader in self._readers.values())
        target = self._folder.set_aside("damaged")
        log.error(
            "the outbox is damaged: begun anew, what waited in it must be taken from the old file",
            extra={"error": str(error), "kept_as": str(target), "waited": waiting},
        )
        self._unsaved.meta.update(self._meta)
        self._unsaved.cursors.update(self._readers)
        try:
            self._database, self._writable = Database(self._folder.database), True
            self._take_over(self._database)
        except sqlite3.Error as again:
            self._close()
            self._fail(f"{self._folder.database}: {again}")

    def _open_to_read(self) -> None:
        """Read what an older process left even where nothing can be written."""
        self._close()
        try:
            self._database = Database(self._folder.database, read_only=True)
            self._take_over(self._database)
        except (sqlite3.Error, OSError) as error:
            self._close()
            log.debug("the outbox cannot be read either: %s", error)

    def _take_over(self, database: Database) -> None:
        """Read what an older process left; once."""
        if self._known:
            return
        meta = dict(database.execute("load-meta").fetchall())
        cursors = dict(database.execute("load-cursors").fetchall())
        base = max(int(meta.get("last_seq", 0)), database.execute("last-seq").fetchone()[0])
        if "epoch" in meta and self._last_seq == 0:
            self._unsaved.meta -= _new_state().keys()
            self._meta = {**self._meta, **meta, **{key: self._meta[key] for key in self._unsaved.meta}}
        else:  # this process has begun without the disk: what it knows is newer
            self._meta = {**meta, **self._meta}
            self._renumber(base)
        self._last_seq += base
        self._meta["last_seq"] = str(self._last_seq)
        for name, reader in self._readers.items():
            self._take_over_cursor(database, name, reader, cursors.get(name), base)
        self._known = True

    def _take_over_cursor(
        self, database: Database, name: str, reader: _Reader, cursor: int | None, base: int
    ) -> None:
        if cursor is None:
            cursor = 0 if self._from_start[name] else base
        if reader.cursor:  # events of this process were delivered before the older ones could be read
            reader.ahead.update(range(base + 1, base + reader.cursor + 1))
        reader.cursor = cursor
        if cursor == base and reader.ahead:
            self._move(name, reader, cursor)
        self._unsaved.cursors.add(name)
        waiting = database.execute("backlog-by-type", cursor).fetchall()
        reader.backlog += sum(count for type_, count in waiting if reader.filter.takes_type(type_))

    def _renumber(self, base: int) -> None:
        """Put the events that only the memory holds behind those on the disk."""
        self.generation += 1
        self._unsaved.events = deque(
            StoredEvent(
                seq=event.seq + base, id=event.id, type=event.type, stored_at=event.stored_at, body=event.body
            )
            for event in self._unsaved.events
        )
        for reader in self._readers.values():
            reader.ahead = {seq + base for seq in reader.ahead}

    def _begin_anew(self) -> None:
        self.generation += 1
        self._meta = _new_state()
        self._last_seq = 0
        self._unsaved = _Unsaved(meta=set(self._meta))
        self._known = False
        for name, reader in self._readers.items():
            self._readers[name] = _Reader(filter=reader.filter, failing_since=reader.failing_since)

    def _move(self, name: str, reader: _Reader, seq: int) -> None:
        """Set a cursor to `seq`, and past what the sink has had already."""
        while seq + 1 in reader.ahead:
            seq += 1
        reader.cursor = seq
        reader.ahead = {ahead for ahead in reader.ahead if ahead > seq}
        self._unsaved.cursors.add(name)

    def _remember(self, values: Mapping[str, str]) -> None:
        self._meta.update(values)
        self._unsaved.meta.update(values)

    def _write(self, *, synced: bool) -> bool:
        """Write all that is unsaved in one transaction; tell whether the disk has it."""
        if self._database is None or not self._writable:
            return False
        unsaved = self._unsaved
        try:
            with self._database.transaction(synced=synced):
                self._write_all(self._database, unsaved)
        except sqlite3.Error as error:
            if is_damage(error):
                self._recover(error)
                return self._database is not None and self._write(synced=synced)
            self._fail(f"{self._folder.database}: {error}")
            return False
        self._unsaved = _Unsaved()
        if self.trouble is not None:
            log.warning(
                "the disk is back: everything that was kept in memory is written", extra={"was": self.trouble}
            )
            self.trouble = None
        return True

    def _write_all(self, database: Database, unsaved: _Unsaved) -> None:
        if unsaved.shift_seconds:
            for name in ("shift-events", "shift-dead-letters", "shift-occurrences"):
                database.execute(name, unsaved.shift_seconds)
        for event in unsaved.events:
            database.execute("save-event", event.seq, event.id, event.type, event.stored_at, event.body)
        for letter in unsaved.dead:
            database.execute(
                "save-dead-letter",
                *(
                    letter.sink,
                    letter.id,
                    letter.type,
                    letter.reason,
                    letter.detail,
                    letter.dead_at,
                    letter.body,
                ),
            )
        for key in unsaved.meta:
            database.execute("save-meta", key, self._meta[key])
        for name in unsaved.cursors:
            database.execute("save-cursor", name, self._readers[name].cursor)
        for fingerprint, count in unsaved.occurrences.items():
            database.execute("save-occurrence", fingerprint, count, self._clock.steady())

    def _ask(self, query: Callable[[Database], T]) -> T | None:
        """Ask the disk; None if it does not answer."""
        if self._database is None:
            return None
        try:
            return query(self._database)
        except sqlite3.Error as error:
            if is_damage(error):
                self._recover(error)
            else:
                self._fail(f"{self._folder.database}: {error}")
            return None

    def _fail(self, trouble: str) -> None:
        if self.trouble is None:
            log.error(
                "the disk fails: events go out from memory and would be lost with this process",
                extra={"disk": trouble},
            )
        self.trouble = trouble

    def _close(self) -> None:
        if self._database:
            self._database.close()
        self._database, self._writable = None, False

    def _folder_holds_more(self) -> bool:
        """Tell whether events may lie on the disk that cannot be read now."""
        return self._known or self._folder.database.exists()

    # Below: room

    def _done_seq(self) -> int:
        """Return the last event that every sink is done with."""
        return min((reader.cursor for reader in self._readers.values()), default=self._last_seq)

    def _bound(self) -> None:
        """Keep the file, or without one the memory, below its limit."""
        while len(self._unsaved.events) > MEMORY_EVENTS:
            self._overflow(self._unsaved.events.popleft())
        if self._database is None or not self._writable:
            return
        try:
            self._make_room(self._database)
        except sqlite3.Error as error:
            self._fail(f"{self._folder.database}: {error}")

    def _make_room(self, database: Database) -> None:
        """Delete delivered events, then dead letters' bodies, then what the longest-failing sink waits for."""
        while database.used_bytes() > self._max_bytes:
            with database.transaction(synced=False):
                deleted = database.execute("delete-oldest-events", self._done_seq(), PRUNE_ROWS).rowcount
                if not deleted:
                    deleted = database.execute("empty-oldest-dead-letters", PRUNE_ROWS).rowcount
            if not deleted and not self._give_up_oldest(database):
                return

    def _give_up_oldest(self, database: Database) -> bool:
        """Move the longest-failing sink past its oldest events; tell whether there were any."""
        waiting = [name for name, reader in self._readers.items() if reader.cursor < self._last_seq]
        if not waiting:
            return False
        now = self._clock.steady()
        name = min(
            waiting, key=lambda name: (self._readers[name].failing_since or now, self._readers[name].cursor)
        )
        events = _read_events(database, self._readers[name].cursor, PRUNE_ROWS)
        for event in events:
            self._overflow(event, only=name)
        return bool(events)

    def _overflow(self, event: StoredEvent, *, only: str | None = None) -> None:
        """Dead-letter an event without its body for each sink, or only one, that has not had it."""
        for name, reader in self._readers.items():
            if only not in (None, name) or event.seq <= reader.cursor or event.seq in reader.ahead:
                continue
            buried = None
            if reader.filter.takes(event):
                log.error("no room: an event is given up for a sink", extra={"sink": name, "event": event.id})
                buried = dead_letter(
                    name, event, OVERFLOW, "no room was left for it", self._clock.steady(), keep=False
                )
            self.acknowledge(name, self.generation, [event], buried=buried)


def _new_state() -> dict[str, str]:
    """Begin a state: an id that is made anew, and the counter over this VM's own events."""
    return {"epoch": uuid4().hex, "reporterseq": "0"}


def dead_letter(
    sink: str, event: StoredEvent, reason: str, detail: str, at: float, *, keep: bool = True
) -> DeadLetter:
    """Make the record of an event that a sink will not get; `keep` its body, so that it can be sent again."""
    return DeadLetter(
        sink=sink,
        id=event.id,
        type=event.type,
        reason=reason,
        detail=detail,
        dead_at=at,
        body=event.body if keep else None,
    )


def _read_events(database: Database, after: int, limit: int) -> list[StoredEvent]:
    events, size = [], 0
    for seq, event_id, event_type, stored_at, body in database.execute("pending", after, limit):
        events.append(StoredEvent(seq=seq, id=event_id, type=event_type, stored_at=stored_at, body=body))
        size += len(body)
        if size >= READ_BYTES:
            break
    return events


def _shifted(event: StoredEvent, seconds: float) -> StoredEvent:
    if not seconds:
        return event
    return StoredEvent(
        seq=event.seq, id=event.id, type=event.type, stored_at=event.stored_at + seconds, body=event.body
    )
