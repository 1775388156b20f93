"""The rows of the outbox's tables; what was written has a checksum, which is compared when it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from bridge.events.model import StoredEvent
from bridge.events.urgency import HAS_STARTED, URGENT_LIMIT_SECONDS, YOUNG_SECONDS, Now, key_number, urgency
from bridge.outbox.sqlite import VERSION, Damaged, Database, checksum
from bridge.runtime.json import Json

# A batch of events is read up to this many bytes, so that a backlog of huge documents costs no memory.
READ_BYTES = 4 * 1024 * 1024

# The kind of the records that are kept for ever, and keys of it: the last run of a process, losses that are not
# published yet, sinks that are not new, and since which event each has its filter.
STATE = "state"
RUN, LOSSES, SINKS, FILTERS = "run", "losses", "sinks", "filters"
OWN = (RUN, LOSSES, SINKS, FILTERS)
# What the last document showed, and that the next one is published as a whole.
WATCH, AGAIN = "watch", "again"
VM = "vm"  # who the VM is, and the boot in which that was learned
LOST = "lost"  # that records were lost, which the listener has not acted on
OWED = "owed"  # which programs have to put the VM back to work
REQUEST = "recover-request"  # what `imds-bridge recover` asks for
# A record that is an object and true here only recognises what comes again: the first to go at the size limit.
DONE = "done"
OCCURRENCE = "occurrence"  # the kind of how often a transition was seen, by its fingerprint

DAMAGE, SIZE_LIMIT, STATE_FOLDER_GONE, OTHER_VM = "Damage", "SizeLimit", "StateFolderGone", "OtherVm"
NOT_WRITTEN = "NotWritten"
# After these, it is unknown which events were lost: what is current is published again.
UNKNOWN_LOSSES = (DAMAGE, STATE_FOLDER_GONE, NOT_WRITTEN)


class Wait(IntEnum):
    """The state of what waits; outbox.sql has the numbers.

    NEW: not tried yet; FAILED: it waits for its retry; DUE: its retry is due; HELD: until it is due, whatever else
    is accepted; BEHIND: another event with its order key goes first.
    """

    NEW, FAILED, DUE, HELD, BEHIND = range(5)


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

    def joined(self, other: Loss, count: Callable[[list[int]], int]) -> Loss:
        """Return one loss for two of the same reason and sink, whose count is made of those that are known."""
        counts = [loss.count for loss in (self, other) if loss.count is not None]
        return replace(
            self,
            count=count(counts) if counts else None,
            oldest=min(filter(None, (self.oldest, other.oldest)), default=None),
            newest=max(filter(None, (self.newest, other.newest)), default=None),
        )


def sinks_of(waiting: Iterable[Sequence[Any]]) -> dict[int, dict[str, int]]:
    """Return which sinks wait for each event, by rows of any version, and whether each was sent it (1) or not."""
    found: dict[int, dict[str, int]] = {}
    for sink, seq, *rest in waiting:
        found.setdefault(seq, {})[str(sink)] = rest[-1] if rest else 0
    return found


def vm_id_of(record: Any) -> str:
    """Return the id of the VM of a record, in lower case; "" while it is unknown."""
    return str(record["vm"]["vm_id"]).lower() if record else ""


class Ledger(Database):
    """A database with the outbox's rows as values; whoever writes holds the transaction. Reads raise Damaged."""

    def save_event(self, event: StoredEvent) -> None:
        """Write an event."""
        values = (event.id, event.type, event.stored_at, event.body)
        self.execute("save-event", event.seq, *values, checksum(*values))

    def upgrade(self, waiting: Iterable[Sequence[Any]]) -> None:
        """Let what waits in a file of an earlier version wait as in this one."""
        for seq, sinks in sorted(sinks_of(waiting).items()):
            for row in self.execute("event", seq).fetchall():
                self.save_waiting(stored_event(row), dict.fromkeys(sinks), sent=sinks)

    def save_waiting(
        self,
        event: StoredEvent,
        held: Mapping[str, float | None],
        *,
        wall: float | None = None,
        sent: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Let sinks wait for an event that is stored at `wall` (by the wall clock).

        For each sink, `held` has until when it holds the event (steady seconds), None for not at all, and `sent`
        whether it was sent the event without a clear answer.
        """
        now = Now(wall=event.stored_at if wall is None else wall, steady=event.stored_at)
        urgent, key = urgency(event, now.wall), key_number(event.envelope)
        for sink, due_at in held.items():
            state = Wait.NEW if due_at is None else Wait.HELD
            self.copy_waiting(sink, event.seq, key, urgent, state, 0, due_at, sent.get(sink, 0), now=now)

    def copy_waiting(
        self, sink: str, seq: int, key: int, urgent: float | None, *rest: Any, now: Now | None = None
    ) -> None:
        """Write a row as another database has it, or a new one; what is the first of its key is found out here."""
        self.execute("save-waiting", sink, seq, key, urgent, *rest)
        due_at = rest[2]
        if urgent is not None or due_at is not None:
            until, notices, started = math.inf, 0.0, HAS_STARTED
            if now:
                until = now.steady + URGENT_LIMIT_SECONDS
                notices, started = now.wall - YOUNG_SECONDS, HAS_STARTED + now.steady - YOUNG_SECONDS
            self.execute("hasten", sink, key, urgent, due_at, until, notices, started, seq)

    def move_waiting(self, sink: str, target: str, seq: int) -> int:
        """Let an event that waits for a sink wait for another one as a new one; return how many did."""
        if self.format < VERSION:
            return self.execute("move-waiting-of-an-earlier-version", target, sink, seq).rowcount
        for key, urgent in self.execute("key-and-urgency", sink, seq).fetchall():
            self.copy_waiting(target, seq, key, urgent, Wait.NEW, 0, None, 0)
            self.execute("order-key", target, key)
        return self.execute("delete-waiting", sink, seq).rowcount

    def pending(self, sink: str, *, after: int, limit: int) -> list[StoredEvent]:
        """Return up to `limit` events that wait for a sink behind a number, and fewer if they are large."""
        events: list[StoredEvent] = []
        size = 0
        for row in self.execute("pending", sink, after):
            events.append(stored_event(row))
            size += len(events[-1].body)
            if len(events) == limit or size >= READ_BYTES:
                break
        return events

    def save_dead_letter(self, *values: Any, retry: int = 0) -> None:
        """Write a dead letter: its sink, id, type, reason, detail, time and body."""
        self.execute("save-dead-letter", *values, checksum(*values), retry)

    def record(self, kind: str, key: str) -> Any:
        """Return a record's value, None if there is none."""
        row = self.execute("record", kind, key).fetchone()
        return stored_record(row)[2] if row else None

    def save_record(self, kind: str, key: str, value: Json, *, at: float = 0.0) -> None:
        """Write a record."""
        text = json.dumps(value)
        self.execute("save-record", kind, key, text, at, checksum(kind, key, text))

    def state(self) -> dict[str, Any]:
        """Return what is remembered for ever, but for what the outbox itself remembers."""
        records = map(stored_record, self.execute("records-of", STATE))
        return {key: value for _, key, value, _ in records if key not in OWN}

    def save_state(self, values: Mapping[str, Json]) -> None:
        """Write what another database remembers for ever."""
        for key, value in values.items():
            self.save_record(STATE, key, value)

    def vm_id(self) -> str:
        """Return the id of the VM whose state this is, in lower case; "" while it is unknown."""
        return vm_id_of(self.record(STATE, VM))

    def losses(self) -> list[Loss]:
        """Return the losses that are not published yet."""
        return [Loss(**loss) for loss in self.record(STATE, LOSSES) or ()]

    def forget_losses(self, published: Sequence[Loss]) -> None:
        """Forget losses that are published."""
        self._save_losses(loss for loss in self.losses() if loss not in published)

    def note_losses(self, new: Iterable[Loss], *, count: Callable[[list[int]], int] = sum) -> None:
        """Remember losses, together with others of their reason and sink, whose counts `count` joins."""
        known = {(loss.reason, loss.sink): loss for loss in self.losses()}
        for loss in new:
            key = (loss.reason, loss.sink)
            known[key] = known[key].joined(loss, count) if key in known else loss
        self._save_losses(known.values())

    def _save_losses(self, losses: Iterable[Loss]) -> None:
        self.save_record(STATE, LOSSES, [asdict(loss) for loss in losses])

    def last_seq(self) -> int:
        """Return the last number that was given in this database."""
        run = self.record(STATE, RUN) or {}
        return max(int(run.get("seq", 0)), int(self.execute("last-seq").fetchone()[0]))

    def note_seq(self, seq: int) -> None:
        """Remember the last number that was given, also where its event is deleted."""
        self.save_record(STATE, RUN, {**(self.record(STATE, RUN) or {}), "seq": seq})

    def has_urgent(self, sink: str, states: Iterable[int]) -> bool:
        """Return whether an event that is or was urgent waits for a sink in one of these states."""
        return any(self.execute("has-urgent", sink, state).fetchone() for state in states)

    def counts(self, statement: str) -> dict[str, int]:
        """Return what a statement counts for each sink."""
        return dict(self.execute(statement).fetchall())


def stored_event(row: Sequence[Any]) -> StoredEvent:
    """Make an event of a row.

    Raises:
        Damaged: it is not as it was written.
    """
    seq, *values, expected = row
    event_id, event_type, stored_at, body = _verified(values, expected)
    return StoredEvent(seq=seq, id=event_id, type=event_type, stored_at=stored_at, body=body)


def stored_dead_letter(row: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Return the values of a dead letter as they are written, and whether it is to be sent again.

    Raises:
        Damaged: it is not as it was written.
    """
    _, *values, expected, retry = row
    return _verified(values, expected), retry


def stored_record(row: Sequence[Any]) -> tuple[str, str, Any, float]:
    """Return the kind, key and value of a row, and when it was saved.

    Raises:
        Damaged: it is not as it was written.
    """
    *values, saved_at, expected = row
    kind, key, text = _verified(values, expected)
    return kind, key, json.loads(text), saved_at


def _verified(values: Sequence[Any], expected: int) -> Sequence[Any]:
    if checksum(*values) != expected:
        raise Damaged("a row is not as it was written")
    return values
