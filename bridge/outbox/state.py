"""What the process knows of its outbox beside the rows: what is remembered, and how far each sink has come."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from uuid import uuid4

from bridge.events.builder import renumber
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox.rows import read
from bridge.outbox.sqlite import Database

DAMAGE, SIZE_LIMIT, STATE_FOLDER_GONE = "Damage", "SizeLimit", "StateFolderGone"
OTHER_VM = "OtherVm"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Events that were lost, as far as that is known.

    Args:
        reason: why.
        count: how many; None: unknown.
        sink: the only sink that lost them; "": every one that had not had them.
        oldest: not later than the oldest was stored, in steady seconds; None: unknown.
        newest: not earlier than the newest was stored.
    """

    reason: str
    count: int | None
    sink: str = ""
    oldest: float | None = None
    newest: float | None = None


@dataclass(kw_only=True)
class Position:
    """How far one sink has come: it is done with everything up to `cursor`, and with the events in `ahead`.

    The backlog up to `estimated_to` was counted by type alone. `failing_since` is in steady seconds.
    """

    filter: Filter
    from_start: bool
    cursor: int = 0
    ahead: set[int] = field(default_factory=set)
    backlog: int = 0
    estimated_to: int = 0
    looked_at: int = 0
    failing_since: float | None = None

    def is_done_with(self, seq: int) -> bool:
        """Return whether the sink has had the event, or will never get it."""
        return seq <= self.cursor or seq in self.ahead

    def waits_for(self, event: StoredEvent) -> bool:
        """Return whether the sink still has to get the event."""
        return not self.is_done_with(event.seq) and self.filter.matches(event)

    def acknowledge(self, events: Iterable[StoredEvent]) -> None:
        """Note that the sink is done with these events."""
        for event in events:
            if not self.is_done_with(event.seq):
                estimated = event.seq <= self.estimated_to
                self.backlog -= (
                    self.filter.matches_type(event.type) if estimated else self.filter.matches(event)
                )
                self.ahead.add(event.seq)

    def advance(self, database: Database) -> None:
        """Move the cursor to the event before the first that the sink is not done with."""
        if not self.ahead:
            return
        with closing(database.execute("seqs-after", self.cursor)) as rows:
            first_open = next((seq for (seq,) in rows if seq not in self.ahead), None)
        before, self.cursor = self.cursor, (first_open or max(self.ahead) + 1) - 1
        self.ahead.difference_update(range(before + 1, self.cursor + 1))


class State:
    """The values and positions as they are in the database, or will be with its next transaction.

    `generation` counts how often events got other numbers or dates. `is_partial` says that the database lacks
    events that the file has, so that no cursor may move past what cannot be seen. Events up to `copied_to` are
    in the file as well. Events up to `kept_to` are of earlier processes; while `is_held`, no sink gets them.
    """

    def __init__(self, positions: dict[str, Position]) -> None:
        self.positions = positions
        self.generation = 0
        self.forget()

    def forget(self) -> None:
        """Start a new state, which no file holds yet."""
        self.generation += 1
        self.meta: dict[str, str] = {}
        self.retired_epochs: set[str] = set()
        self.begin_epoch()
        self.last_seq = self.kept_to = 0
        self.is_held = False
        self.is_partial = False
        self.copied_to = 0
        self.shift_seconds = 0.0  # which the file's dates lack
        self.files: set[int] = set()  # whose content is known here
        for name, old in self.positions.items():
            self.positions[name] = Position(
                filter=old.filter, from_start=old.from_start, failing_since=old.failing_since
            )

    def begin_epoch(self) -> None:
        """Count the events of this process from 1 under a new id."""
        self.retired_epochs |= {epoch for epoch in [self.meta.get("epoch")] if epoch}
        self.meta |= {"epoch": uuid4().hex, "reporterseq": "0"}
        self.counted: dict[str, str] = {}

    def losses(self) -> list[Loss]:
        """Return the losses that are not published yet."""
        text = self.meta.get("losses", "")
        return [Loss(**loss) for loss in json.loads(text)] if text not in ("", "[]") else []

    def note_loss(self, loss: Loss) -> None:
        """Remember a loss, together with others of its reason and sink."""
        losses = self.losses()
        for index, known in enumerate(losses):
            if (known.reason, known.sink) == (loss.reason, loss.sink):
                losses[index] = _sum(known, loss)
                break
        else:
            losses.append(loss)
        self.meta["losses"] = json.dumps([asdict(one) for one in losses])

    def forget_losses(self, published: Sequence[Loss]) -> None:
        """Forget losses that were published."""
        if published:
            self.meta["losses"] = json.dumps([asdict(one) for one in self.losses() if one not in published])

    def count(self, key: str) -> int:
        """Count one further under `key`; `meta` has it once the next event is added."""
        number = int(self.counted.get(key, self.meta.get(key, "0"))) + 1
        self.counted[key] = str(number)
        return number

    def add(self, events: Iterable[tuple[str, str, bytes]], *, stored_at: float) -> list[StoredEvent]:
        """Give events, each with its id, type and encoding, the next numbers."""
        added = []
        for event_id, event_type, body in events:
            self.last_seq += 1
            event = StoredEvent(
                seq=self.last_seq, id=event_id, type=event_type, stored_at=stored_at, body=body
            )
            for position in self.positions.values():
                position.backlog += position.filter.matches(event)
            added.append(event)
        self.meta |= {"last_seq": str(self.last_seq), **self.counted}
        self.counted.clear()
        return added

    def renumbered(self, event: StoredEvent) -> StoredEvent:
        """Return an event of this process with a number of the current epoch, if it has one of an earlier epoch."""
        is_retired = any(epoch.encode() in event.body for epoch in self.retired_epochs)
        if not is_retired or event.envelope.get("reporterepoch") not in self.retired_epochs:
            return event
        sequence = self.count("reporterseq")
        self.meta |= self.counted
        envelope = renumber(event.envelope, epoch=self.meta["epoch"], sequence=sequence)
        body = json.dumps(envelope, separators=(",", ":")).encode()
        return replace(event, id=str(envelope["id"]), body=body)

    def read_from(self, sink: str) -> int:
        """Return the last event that the sink need not read."""
        return max(self.positions[sink].cursor, self.kept_to if self.is_held else 0)

    def done_seq(self) -> int:
        """Return the last event that every sink is done with."""
        return min((position.cursor for position in self.positions.values()), default=self.last_seq)

    def shift(self, seconds: float) -> None:
        """Keep what is dated as old as it was after the wall clock has jumped."""
        self.generation += 1
        self.shift_seconds += seconds
        for position in self.positions.values():
            if position.failing_since is not None:
                position.failing_since += seconds

    def save_meta(self, database: Database, keys: Iterable[str]) -> None:
        """Write what is remembered under these keys; the caller holds the transaction."""
        for key in keys:
            database.execute("save-meta", key, self.meta[key])

    def save_position(self, database: Database, sink: str, done: Iterable[int]) -> None:
        """Write how far a sink has come, and which events it is done with since; the caller holds the transaction."""
        position = self.positions[sink]
        if not self.is_partial:
            position.advance(database)
        database.execute("delete-done", sink, position.cursor)
        database.execute("save-done", sink, position.cursor, 1)
        for seq in done:
            if seq > position.cursor:
                database.execute("save-done", sink, seq, 0)

    def save(self, database: Database) -> None:
        """Write all of it; the caller holds the transaction."""
        self.save_meta(database, self.meta)
        for sink, position in self.positions.items():
            self.save_position(database, sink, [*position.ahead])

    def recount(self, database: Database) -> None:
        """Count what waits for each sink in a database that has all of it: by type alone, which reads no body."""
        for sink, position in self.positions.items():
            counts = database.execute("backlog-by-type", position.cursor, sink).fetchall()
            position.backlog = sum(count for type_, count in counts if position.filter.matches_type(type_))
            position.estimated_to = self.last_seq

    def join(self, database: Database, *, first_seq: int = 1, is_start: bool = False) -> None:
        """Take over what an older process left; the events of this one get numbers behind it.

        Args:
            database: what has it.
            first_seq: the number of the first event of this process.
            is_start: whether the epoch goes on, because this process has published nothing yet.
        """
        meta: dict[str, str] = dict(read(database, "meta"))
        last_seq = max(int(meta.get("last_seq", 0)), database.execute("last-seq").fetchone()[0])
        int(meta.get("reporterseq", 0))
        rows = [*read(database, "done")]
        for name, position in self.positions.items():
            done = (*range(first_seq, position.cursor + 1), *position.ahead)
            cursors = [seq for sink, seq, is_cursor in rows if sink == name and is_cursor]
            position.cursor = max(cursors, default=0 if position.from_start else last_seq)
            position.ahead = {seq for sink, seq, is_cursor in rows if sink == name and not is_cursor}
            position.ahead |= {seq + last_seq for seq in done}
        self.generation += bool(self.last_seq)
        self.kept_to = last_seq
        self.last_seq += last_seq
        own = {} if is_start and "epoch" in meta else self.meta
        self.meta = {**meta, **own, "last_seq": str(self.last_seq)}


def _sum(one: Loss, other: Loss) -> Loss:
    counts = [loss.count for loss in (one, other) if loss.count is not None]
    oldest = [loss.oldest for loss in (one, other) if loss.oldest is not None]
    newest = [loss.newest for loss in (one, other) if loss.newest is not None]
    return replace(
        one,
        count=sum(counts) if counts else None,
        oldest=min(oldest, default=None),
        newest=max(newest, default=None),
    )
