"""What the outbox knows: what is remembered, how far each sink has come, and what the disk does not have yet.

Nothing here waits for a disk. `take_over` and `write_to` raise sqlite3.Error and then have changed nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import uuid4

from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox.rows import DeadLetter, save_dead_letter, save_event
from bridge.outbox.sqlite import Damaged, Database


@dataclass(kw_only=True)
class Reader:
    """How far one sink has come.

    It is done with everything up to `cursor`, and with the events in `ahead`, which it had while older ones
    could not be read. The backlog up to `estimated_to` was counted by type alone. `blind` says that what it
    was given last came from memory while the disk could not be read. `failing_since` is in steady seconds.
    """

    filter: Filter
    from_start: bool
    cursor: int = 0
    ahead: set[int] = field(default_factory=set)
    backlog: int = 0
    estimated_to: int = 0
    looked_at: int = 0
    blind: bool = False
    failing_since: float | None = None

    def is_done_with(self, seq: int) -> bool:
        """Tell whether the sink has had the event, or will never get it."""
        return seq <= self.cursor or seq in self.ahead

    def waits_for(self, event: StoredEvent) -> bool:
        """Tell whether the sink still has to get the event."""
        return not self.is_done_with(event.seq) and self.filter.matches(event)

    def pass_over(self, events: Sequence[StoredEvent], *, in_turn: bool) -> None:
        """Note that the sink is done with events; `in_turn`: and so with everything before them."""
        for event in events:
            if not self.is_done_with(event.seq):
                guessed = event.seq <= self.estimated_to
                self.backlog -= (
                    (self.filter.matches_type(event.type)) if guessed else self.filter.matches(event)
                )
                self.ahead.add(event.seq)
        self.move(events[-1].seq if in_turn and events else self.cursor)

    def move(self, seq: int) -> None:
        """Advance to `seq`, and past what the sink has had already; never back."""
        seq = max(self.cursor, seq)
        while seq + 1 in self.ahead:
            seq += 1
        self.cursor = seq
        self.ahead = {ahead for ahead in self.ahead if ahead > seq}

    def renumber(self, base: int) -> None:
        """Let every event have a number higher by `base`; what comes before them is not done yet."""
        self.ahead = {seq + base for seq in (*range(1, self.cursor + 1), *self.ahead)}
        self.cursor = 0

    def join(self, cursor: int, ahead: set[int]) -> None:
        """Add what an older process was done with."""
        self.ahead |= ahead
        self.move(cursor)


@dataclass(kw_only=True)
class Unsaved:
    """What the disk does not have yet: `meta` and `cursors` by name, `settled` retries with their new detail."""

    events: deque[StoredEvent] = field(default_factory=deque)
    dead: list[DeadLetter] = field(default_factory=list)
    meta: set[str] = field(default_factory=set)
    cursors: set[str] = field(default_factory=set)
    occurrences: dict[str, int] = field(default_factory=dict)
    records: dict[tuple[str, str], str] = field(default_factory=dict)
    settled: dict[int, str | None] = field(default_factory=dict)
    shift_seconds: float = 0.0

    def __bool__(self) -> bool:
        return any(vars(self).values())


class Memory:
    """All of it. The caller takes care that one thread at a time uses it.

    `generation` counts how often events got other numbers or dates.
    """

    def __init__(self, readers: dict[str, Reader]) -> None:
        self.readers = readers
        self.generation = 0
        self.forget()

    def forget(self) -> None:
        """Begin a new state, which no file holds yet."""
        self.generation += 1
        self.meta = {"epoch": uuid4().hex, "reporterseq": "0"}
        self.last_seq = 0
        self.unsaved = Unsaved(meta=set(self.meta))
        self._known = {self.meta["epoch"]}  # whose files have been read
        for name, reader in self.readers.items():
            self.readers[name] = Reader(
                filter=reader.filter, from_start=reader.from_start, failing_since=reader.failing_since
            )

    def remember(self, values: Mapping[str, str]) -> None:
        """Remember values."""
        self.meta.update(values)
        self.unsaved.meta.update(values)

    def add(self, events: Iterable[tuple[str, str, bytes]], *, stored_at: float) -> None:
        """Put events, each with its id, type and encoding, behind all others."""
        for event_id, event_type, body in events:
            self.last_seq += 1
            stored = StoredEvent(
                seq=self.last_seq, id=event_id, type=event_type, stored_at=stored_at, body=body
            )
            self.unsaved.events.append(stored)
            for reader in self.readers.values():
                reader.backlog += reader.filter.matches(stored)
        self.remember({"last_seq": str(self.last_seq)})

    def pass_over(self, sink: str, events: Sequence[StoredEvent], *, in_turn: bool) -> None:
        """Note that a sink is done with events; `in_turn`: and so with everything before them."""
        self.readers[sink].pass_over(events, in_turn=in_turn)
        self.unsaved.cursors.add(sink)

    def done_seq(self) -> int:
        """Return the last event that every sink is done with."""
        return min((reader.cursor for reader in self.readers.values()), default=self.last_seq)

    def waiting(self) -> list[StoredEvent]:
        """Return the events which only the memory holds and some sink still has to get."""
        return [e for e in self.unsaved.events if any(r.waits_for(e) for r in self.readers.values())]

    def shift(self, seconds: float) -> None:
        """Date everything anew after the wall clock has jumped."""
        self.generation += 1
        unsaved = self.unsaved
        unsaved.shift_seconds += seconds
        unsaved.events = deque(shifted(event, seconds) for event in unsaved.events)
        unsaved.dead = [replace(letter, dead_at=letter.dead_at + seconds) for letter in unsaved.dead]
        for reader in self.readers.values():
            if reader.failing_since is not None:
                reader.failing_since += seconds

    # To and from the disk

    def write_to(self, database: Database, now: float) -> None:
        """Write all that is unsaved; the caller holds the transaction."""
        unsaved = self.unsaved
        if unsaved.shift_seconds:
            for name in ("shift-events", "shift-dead-letters", "shift-occurrences", "shift-records"):
                database.execute(name, unsaved.shift_seconds)
        for event in unsaved.events:
            save_event(database, event)
        for name in unsaved.cursors:
            reader = self.readers[name]
            database.execute("save-cursor", name, reader.cursor, json.dumps(sorted(reader.ahead)))
        self._write_dead_letters(database, now)
        for key in unsaved.meta:
            database.execute("save-meta", key, self.meta[key])
        for fingerprint, count in unsaved.occurrences.items():
            database.execute("save-occurrence", fingerprint, count, now)
        for (kind, key), value in unsaved.records.items():
            database.execute("save-record", kind, key, value, now)

    def _write_dead_letters(self, database: Database, now: float) -> None:
        for number, detail in self.unsaved.settled.items():
            if detail is None:
                database.execute("drop-dead-letter", number)
            else:
                database.execute("bury-again", detail, now, number)
        for letter in self.unsaved.dead:
            save_dead_letter(database, letter)

    def saved(self) -> None:
        """Note that the disk has it all."""
        self.unsaved = Unsaved()

    def take_over(self, database: Database) -> bool:
        """Read what a file holds that was just opened, unless it is known; False: it is another VM's."""
        meta: dict[str, str] = dict(database.execute("load-meta").fetchall())
        epoch = meta.get("epoch")
        if epoch is None:
            self._fill_new_file()
        elif epoch not in self._known:
            own, its = self.meta.get("vm_id"), meta.get("vm_id")
            if own and its and own.lower() != its.lower():
                return False
            self._join(database, epoch, meta)
        return True

    def _fill_new_file(self) -> None:
        """See to it that a file without anything gets all; what a lost one held is no backlog any more."""
        self.unsaved.meta.update(self.meta)
        self.unsaved.cursors.update(self.readers)
        lost = self.unsaved.events[0].seq - 1 if self.unsaved.events else self.last_seq
        for reader in self.readers.values():
            reader.move(lost)
            reader.backlog = sum(map(reader.waits_for, self.unsaved.events))

    def _join(self, database: Database, epoch: str, meta: dict[str, str]) -> None:
        """Take over what an older process left; what this one did meanwhile comes after it."""
        try:
            base = max(int(meta.get("last_seq", 0)), database.execute("last-seq").fetchone()[0])
            int(meta.get("reporterseq", 0))
            stored = {
                name: (seq, set(json.loads(ahead))) for name, seq, ahead in database.execute("load-cursors")
            }
        except (TypeError, ValueError) as error:
            raise Damaged(f"what must be a number is none: {error}") from error
        left = {
            name: stored.get(name, (0 if reader.from_start else base, set()))
            for name, reader in self.readers.items()
        }
        waiting: dict[str, list[tuple[str, int]]] = {
            name: database.execute("backlog-by-type", seq, json.dumps(sorted(ahead))).fetchall()
            for name, (seq, ahead) in left.items()
        }
        # From here on nothing can fail.
        if self.last_seq == 0:
            own = {key: self.meta[key] for key in self.unsaved.meta - {"epoch", "reporterseq"}}
            self.meta, self.unsaved.meta = {**meta, **own}, set(own)
        else:
            self.meta = {**meta, **self.meta}
            self._renumber(base)
        self.last_seq += base
        self.meta["last_seq"] = str(self.last_seq)
        for name, reader in self.readers.items():
            reader.backlog += sum(
                count for type_, count in waiting[name] if reader.filter.matches_type(type_)
            )
            reader.estimated_to = base
            reader.join(*left[name])
            if stored.get(name) != (reader.cursor, reader.ahead):
                self.unsaved.cursors.add(name)
        self._known.add(epoch)

    def _renumber(self, base: int) -> None:
        self.generation += 1
        self.unsaved.events = deque(replace(event, seq=event.seq + base) for event in self.unsaved.events)
        for reader in self.readers.values():
            reader.renumber(base)


def shifted(event: StoredEvent, seconds: float) -> StoredEvent:
    """Date an event anew."""
    return replace(event, stored_at=event.stored_at + seconds) if seconds else event
