"""What waits for one sink: what can be sent next, and what is noted of tries that failed.

Of an order key only the first event that waits, its head, can be sent; the next one becomes the head once that is
gone. So a query looks at heads alone, however much waits behind them.

I/O: the outbox.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge.events.model import StoredEvent
from bridge.events.urgency import RECEIPTS_LANE, REST_LANE, Now
from bridge.outbox.rows import READ_BYTES, Ledger, Wait, stored_event
from bridge.outbox.storage import Storage

# So many of the most urgent retries that are due are compared.
COMPARED_HEADS = 100
NEWEST_ROWS = 1000  # of all sinks: what came last is looked for among them


class Head(NamedTuple):
    """The first event that waits of an order key; the lower its `lane`, the more urgent it is (see Now.lanes)."""

    lane: int
    seq: int
    key: int
    urgency: float | None
    state: int
    tries: int

    @property
    def has_failed(self) -> bool:
        """Whether it has failed since it became the first of its key."""
        return self.state != Wait.NEW


class Ready(NamedTuple):
    """What can be sent next.

    Attributes:
        fresh: what was never tried, the most urgent first.
        again: retries that are due, the one to try before others first.
        is_kept_back: whether there is something for whose kind it is too early.
        due_at: when something else is due, in steady seconds, infinite for never.
    """

    fresh: Sequence[Head]
    again: Sequence[Head]
    is_kept_back: bool
    due_at: float


class Taken(NamedTuple):
    """Events to send, in their order.

    The receiver may have those in `sent`, by number, of an earlier try. `is_again`: one of them has failed before.
    """

    events: list[StoredEvent]
    sent: set[int]
    is_again: bool


@dataclass(frozen=True)
class Queue:
    """What waits for the sink called `sink`. For its thread; `failures` and `most_urgent_notice` are for any."""

    sink: str
    storage: Storage

    def ready(
        self,
        now: Now,
        limit: int,
        *,
        may_begin: bool = True,
        may_retry: bool = True,
        failures: int = 0,
        since: int = 0,
    ) -> Ready:
        """Return what can be sent next.

        Args:
            now: the time.
            limit: how many heads may be sent at once.
            may_begin: whether something may be tried for the first time.
            may_retry: whether something that has failed may be tried.
            failures: how many tries failed in a row. While any does, every second retry is one of what came after the
                number `since`, and of the others by turns what is due for longest and what is most urgent.
            since: the last number that was given when the receiver accepted something: what came later was never
                refused while others were accepted.
        """

        def work(database: Ledger) -> Ready:
            due_at = self._due_at(database)
            if due_at <= now.steady:
                with database.transaction(synced=False):
                    database.execute("promote", self.sink, now.steady)
                due_at = self._due_at(database)
            new = self._heads(database, (Wait.NEW,), now, limit if may_begin else 1)
            if failures % 4:
                row = None
                if failures % 2:
                    row = database.execute("newest-due", since, NEWEST_ROWS, self.sink).fetchone()
                row = row or database.execute("longest-due", self.sink).fetchone()
                again = [Head(now.lane(row[2]), *row)] if row else []
            else:
                again = self._heads(database, (Wait.DUE,), now, 1 if failures else COMPARED_HEADS)
                again.sort(key=lambda head: (head.lane, head.tries))
            is_kept_back = bool((new and not may_begin) or (again and not may_retry))
            return Ready(new if may_begin else (), again[:limit] if may_retry else (), is_kept_back, due_at)

        return self.storage.run(work)

    def _due_at(self, database: Ledger) -> float:
        (due_at,) = database.execute("next-due", self.sink).fetchone()
        return math.inf if due_at is None else due_at

    def _heads(self, database: Ledger, states: Sequence[int], now: Now, limit: int) -> list[Head]:
        """Return heads in these states by lane; what is urgent no more, or never was, comes last and by number."""
        found: list[Head] = []
        is_urgent = database.has_urgent(self.sink, states)
        lanes = now.lanes if is_urgent else ()
        for lane, bounds in enumerate(lanes):
            for state in states:
                rows = database.execute("heads", self.sink, state, *bounds, limit - len(found))
                found += [Head(lane, *row) for row in rows]
                if len(found) == limit:
                    return found
        for state in states:
            left = limit - len(found)
            rest = database.execute("heads-in-order", self.sink, state, left).fetchall()
            for bounds in now.aged if is_urgent else ():
                rest += database.execute("heads", self.sink, state, *bounds, left)
            found += [Head(REST_LANE, *row) for row in sorted(rest)[:left]]
        return found

    def take(self, heads: Sequence[Head], limit: int, *, is_noted: bool) -> Taken:
        """Return events to send, at most `limit`: these heads, and as many behind them as there is room for.

        With `is_noted` it is remembered that they were sent, also over a restart.
        """

        def work(database: Ledger) -> Taken:
            events: list[StoredEvent] = []
            sent: set[int] = set()
            # Nothing behind a retry goes with it: it would fail as a batch, and be tried as often as before.
            is_again = any(head.has_failed for head in heads)
            room, size = 0 if is_again else limit - len(heads), 0
            for head in heads:
                before = len(events)
                for *row, is_sent in database.execute("of-key", self.sink, head.key, room + 1):
                    events.append(stored_event(row))
                    sent |= {events[-1].seq} if is_sent else set()
                    size += len(events[-1].body)
                room -= len(events) - before - 1
                if size >= READ_BYTES:
                    break
            events.sort(key=lambda event: event.seq)
            for event in events if is_noted else ():
                if event.seq not in sent:
                    database.execute("note-sent", 1, self.sink, event.seq)
            return Taken(events, sent, is_again)

        return self.storage.run(work, synced=False if is_noted else None)

    def head(self, seq: int) -> Head | None:
        """Return the head with this number, None if it is none or does not wait any more; its lane is not known."""
        row = self._row("head", self.sink, seq)
        return Head(0, *row) if row else None

    def note_unsent(self, seqs: Iterable[int]) -> None:
        """Note that the receiver has clearly not got events."""
        for seq in seqs:
            self._write("note-sent", 0, self.sink, seq)

    def note_failure(self, head: Head, *, due_at: float, is_asked: bool) -> None:
        """Note that a head failed and is tried again at `due_at` (steady seconds).

        `is_asked`: the receiver has asked to wait until then.
        """
        state = Wait.HELD if is_asked else Wait.FAILED
        self._write("note-failure", state, head.tries + 1, due_at, self.sink, head.seq)

    def forgive(self, now: Now) -> bool:
        """Let all that waits for its retry be due at once; return whether anything did."""
        return self._write("forgive", self.sink, now.steady) > 0

    def release(self) -> bool:
        """Hold nothing that is held by now; return whether anything was."""
        return self._write("release", self.sink) > 0

    def failures(self) -> int:
        """Return how often the event failed that is tried again next, 0 if none waits for a retry."""
        found = self._row("longest-due", self.sink) or self._row("next-retry", self.sink)
        return int(found[-1]) if found else 0

    @property
    def last_seq(self) -> int:
        """The number that was given last."""
        return self.storage.last_seq

    def patience(self, now: Now) -> float:
        """Return how long the notice that starts next may wait for a retry, infinite if there is none."""
        found = (
            self._row("next-notice", self.sink, state, now.wall)
            for state in (Wait.NEW, Wait.FAILED, Wait.DUE)
        )
        starts = [at for (at,) in found if at is not None]
        return now.patience(min(starts, default=None), -math.inf)

    def most_urgent_notice(self, now: Now, before: float) -> StoredEvent | None:
        """Return the most urgent notice of those stored before `before` (steady seconds), None if none is urgent."""

        def work(database: Ledger) -> StoredEvent | None:
            for head in self._heads(database, range(Wait.HELD), now, COMPARED_HEADS):
                event = stored_event(database.execute("event", head.seq).fetchone())
                if head.lane < RECEIPTS_LANE and event.stored_at < before:
                    return event
            return None

        return self.storage.run(work)

    def _row(self, statement: str, *values: Any) -> Any:
        return self.storage.run(lambda database: database.execute(statement, *values).fetchone())

    def _write(self, statement: str, *values: Any) -> int:
        """Return how many rows a statement has changed."""
        return self.storage.run(lambda database: database.execute(statement, *values).rowcount, synced=False)
