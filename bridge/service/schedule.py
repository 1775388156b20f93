"""Choose what one sink is sent next, and decide what waits after a failure.

While nothing fails, events are sent in their order and in batches. Once one fails, what waits is told apart by order
key: the head of a key is tried for the first time or again, and holds back only what is behind it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from heapq import heappop, heappush
from http import HTTPStatus
from typing import Protocol

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent, order_key
from bridge.outbox.outbox import Outbox
from bridge.runtime.time import Clock, parse_iso
from bridge.sinks.base import RETRY_BASE_SECONDS

log = logging.getLogger(__name__)

NOTHING_WAITS = math.inf
# Read at once: enough for a batch, few enough to cost no memory while large events wait.
PAGE_EVENTS = 64
# While something fails, so many of the oldest events are told apart, which takes at most about 10 MB.
KNOWN_EVENTS = 20_000
# A notice behind 40 events that fail is tried within 3 s, and a receiver that refuses everything is not flooded.
FIRST_TRY_SECONDS = 1 / 20
# Whatever the number of events that fail, they are a small load for a receiver that accepts others meanwhile.
RETRY_SECONDS = 1 / 4
NOTICES = "io.imdsbridge.scheduledevent.[su]*"  # scheduled, started and updated
# While a young notice or receipt waits, a sink is tried often: a notice may be of 30 s, and an approver waits.
URGENT_TYPES = ("io.imdsbridge.scheduledevent.", "io.imdsbridge.approval.")
URGENT_AGE_SECONDS = 900.0  # as long as IMDS's longest usual notice
URGENT_LIMIT_SECONDS = 2.0
HELD_EVENTS, HELD_BYTES = 500, 4_000_000  # at most, and in one digest
PROOFS = 3  # so that a receiver that fails now and then still gets digests
# While the process stops, which may take some seconds.
DRAIN_LIMIT_SECONDS = 0.5
_MAX_EXPONENT = 32  # of the doubling limit, so that no float overflows

Urgency = tuple[int, float]
_NOTICE, _URGENT, _REST = range(3)


def urgency(event: StoredEvent) -> Urgency:
    """Return what is tried first, the least value first: notices by their NotBefore, other urgent types, the rest."""
    if fnmatchcase(event.type, NOTICES):
        return _NOTICE, not_before(event).timestamp()
    return (_URGENT if event.type.startswith(URGENT_TYPES) else _REST), 0.0


def not_before(event: StoredEvent) -> datetime:
    """Return a notice's NotBefore; one without it, as of a started event, is due since it was published."""
    return parse_iso(event.data.get("NotBeforeUtc")) or datetime.fromtimestamp(event.stored_at, UTC)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What limits the waits now.

    `limit_seconds` is the longest wait of the sink, `is_urgent` whether a young notice or receipt waits,
    `is_draining` whether the process is about to stop.
    """

    limit_seconds: float
    is_urgent: bool = False
    is_draining: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed try: the `count`-th in a row, at `at` (monotonic), for which the sink raised `error`.

    None counts if the next try is due at once. `share` is drawn between 0 and 1 and spreads the retries of a fleet
    ("full jitter").
    """

    error: DeliveryError
    at: float
    share: float
    count: int = 1

    @property
    def is_answered(self) -> bool:
        """Whether there was an HTTP status."""
        return self.error.status is not None

    @property
    def may_be_caused_by_event(self) -> bool:
        """Whether another event may be accepted: the receiver got this one, and did not ask everybody to wait."""
        return not self.error.is_unreached and self.error.status != HTTPStatus.TOO_MANY_REQUESTS

    def must_wait(self, pace: Pace) -> bool:
        """Return whether `Retry-After` is obeyed: other than with 429 it cannot delay an urgent event."""
        is_free = (
            pace.is_urgent and not pace.is_draining and self.error.status != HTTPStatus.TOO_MANY_REQUESTS
        )
        return self.error.retry_after_seconds is not None and not is_free

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again, in monotonic seconds.

        The wait is what the receiver asked for, or drawn below a limit that doubles with each failure.
        """
        if self.must_wait(pace):
            return self.at + max(RETRY_BASE_SECONDS, self.error.retry_after_seconds or 0.0)
        if not self.count:
            return -math.inf
        limits = [pace.limit_seconds, RETRY_BASE_SECONDS * 2.0 ** min(self.count - 1, _MAX_EXPONENT)]
        limits += [URGENT_LIMIT_SECONDS] * pace.is_urgent + [DRAIN_LIMIT_SECONDS] * pace.is_draining
        return self.at + self.share * min(limits)


@dataclass(kw_only=True)
class KeyQueue:
    """What waits with one order key: the events' numbers in their order; the first is the head.

    `urgency` is that of the most urgent event that was in it. `failure` is the head's, None before its first try.
    `is_isolated`: the receiver has accepted other events since then, so that the head alone is the cause.
    """

    numbers: list[int] = field(default_factory=list)
    urgency: Urgency = (_REST + 1, 0.0)
    failure: Failure | None = None
    is_isolated: bool = False
    retry_at: float = -math.inf

    def fail(self, failure: Failure, pace: Pace) -> None:
        """Note that the head failed: it is tried often only if it is urgent and answered."""
        self.failure = replace(failure, count=self.failure.count + 1 if self.failure else 1)
        is_urgent = pace.is_urgent and self.urgency[0] < _REST and failure.is_answered
        self.retry_at = self.failure.retry_at(replace(pace, is_urgent=is_urgent))


def is_full(events: Sequence[StoredEvent]) -> bool:
    """Return whether no more events can be held."""
    return len(events) >= HELD_EVENTS or sum(len(event.body) for event in events) >= HELD_BYTES


class Holding(Protocol):
    """Decides how long what waits is held, in steady seconds; with `is_digest`, all of it is then one message."""

    is_digest: bool
    clock: Clock

    def due_at(self, events: Sequence[StoredEvent]) -> float:
        """Return when to send events that wait, which may be none; in the past for at once."""

    def note_sent(self, events: Sequence[StoredEvent]) -> None:
        """Note that the receiver has accepted events."""


class Schedule:
    """Reads what waits, chooses what is sent next, and decides what waits after a failure. For the sink's thread.

    - **In order**: while nothing fails, the next events of a page, in batches.
    - **By key**: an event that was answered, but not accepted, is retried by itself. Its retry comes before first
      tries of others, those with the most urgent heads first; both have a highest rate, as far as they fail.
    - **Held**, with a `holding`: what waits is sent once it is due, unless something fails or the process stops.
    - **As digests**, if that says so: all that waits is one message, once it is due. While it fails, it is tried
      in turn with an event alone. If those are accepted and the digest still is not, or if a digest is rejected,
      its events are sent alone, as above.
    - **As a whole**: without an answer, or if the receiver asks for time, the sink waits. Then the oldest event comes
      first, so that an outage does not change the order; if it fails again, one other is tried at once.

    Attributes:
        failed: the queues whose head failed, by order key; empty: events are sent in their order.
        page: the next events while nothing fails.
        hold: the failure after which the sink as a whole waits; None while it does not.
        failures: how many tries failed in a row, but for heads that fail while others are accepted.
        due_at: when what is held is or was to be sent, in steady seconds.
    """

    def __init__(self, sink: str, outbox: Outbox, *, max_batch: int, holding: Holding | None = None) -> None:
        self._sink = sink
        self._outbox = outbox
        self._max_batch = self._batch_limit = min(max_batch, PAGE_EVENTS)
        self._generation = -1
        self._first_try_at = self._next_retry_at = -math.inf
        self._holds = 0  # how often in a row the sink as a whole waited
        self._is_probe = False  # after this wait, it is the turn of another event than the oldest
        self.hold: Failure | None = None
        self.failures = 0
        self.due_at = -math.inf
        self._holding = holding
        self._alone_to = 0  # up to this number, events are sent alone
        self._doubts = 0  # how often in a row a digest, or an event instead of it, failed with an answer
        self._proofs = 0  # how often in a row that event was accepted, and the digest was not
        self._reset()

    def _reset(self) -> None:
        """Read again from the start."""
        self._read_to = self._known = 0
        self._queues: dict[str, KeyQueue] = {}
        # A heap of the heads to try first; it also has entries that are not true any more.
        self._untried_heads: list[tuple[Urgency, int, str]] = []
        self.failed: dict[str, KeyQueue] = {}
        self.page: list[StoredEvent] = []

    def read(self) -> None:
        """Read on: while something fails a page each time, so that new events are known, else when none is left.

        What may be held is read as far as it can be held.
        """
        if self._generation != self._outbox.generation:  # what waits was changed from outside
            self._generation = self._outbox.generation
            self._reset()
        while not (is_full(self.page) if self._holding else self.page) and self._known < KNOWN_EVENTS:
            events = self._outbox.pending(self._sink, PAGE_EVENTS, after=self._read_to)
            self._read_to = events[-1].seq if events else self._read_to
            if self.failed:
                self._tell_apart(events)
            else:
                self.page = [*self.page, *events]
            if self.failed or len(events) < PAGE_EVENTS:
                return

    def _tell_apart(self, events: Sequence[StoredEvent]) -> None:
        self._known += len(events)
        for event in events:
            key = order_key(event.envelope)
            queue = self._queues.setdefault(key, KeyQueue())
            queue.numbers.append(event.seq)
            if (found := urgency(event)) < queue.urgency:
                queue.urgency = found
                self._offer(key)

    def _offer(self, key: str) -> None:
        queue = self._queues[key]
        if not queue.failure:
            heappush(self._untried_heads, (queue.urgency, queue.numbers[0], key))

    def oldest(self) -> StoredEvent | None:
        """Return the oldest event that waits."""
        events = self._outbox.pending(self._sink, 1) if self.failed else self.page
        return events[0] if events else None

    def acknowledge(self, events: Sequence[StoredEvent], *, dead: tuple[str, str] | None = None) -> None:
        """Note in the outbox that the sink has had events, or will never get them, which is `dead` with a reason."""
        self._outbox.acknowledge(self._sink, events, dead=dead)
        if not self.failed:
            done = {event.seq for event in events}
            self.page = [event for event in self.page if event.seq not in done]
            return
        for event in events:
            key = order_key(event.envelope)
            queue = self._queues.get(key)
            if queue and event.seq == queue.numbers[0]:  # else it is not known yet
                self._known -= 1
                del queue.numbers[0]
                self.failed.pop(key, None)
                queue.failure, queue.is_isolated = None, False
                if queue.numbers:
                    self._offer(key)
                else:
                    del self._queues[key]
        if not self.failed:
            self._reset()

    def next_events(self, pace: Pace, now: float) -> tuple[float, list[StoredEvent]]:
        """Choose what to send now; if nothing, return when to ask again, NOTHING_WAITS if no event waits."""
        for queue in self.failed.values() if pace.is_draining else ():
            if queue.failure:
                queue.retry_at = min(queue.retry_at, queue.failure.retry_at(pace))
        if self.hold and (due_at := max(self.hold.retry_at(pace), self._next_retry_at)) > now:
            return due_at, []
        if not self.failed:
            due_at, why, events = self._next_in_order(pace, now)
        else:
            due_at, why, numbers = self._choose(now)
            events = self._events(numbers) if due_at <= now else []
        if events:
            log.debug("sink %s: sends %s", self._sink, why, extra={"events": [event.id for event in events]})
        else:
            self.hold = None
        return max(now, due_at) if self.failed or self.page else NOTHING_WAITS, events

    def _next_in_order(self, pace: Pace, now: float) -> tuple[float, str, list[StoredEvent]]:
        """Return what is sent while nothing is told apart, and when."""
        holding = self._holding
        if not holding or (self.page and self.page[0].seq <= self._alone_to):
            return now, "in their order", self.page[: self._batch_limit]
        # What only memory has is not held: a kill would lose it, and a relay completes its messages later.
        if not (pace.is_draining or self.hold or self._proofs or self._outbox.storage_error):
            self.due_at = -math.inf if is_full(self.page) else holding.due_at(self.page)
            if (wait_seconds := self.due_at - holding.clock.steady()) > 0:
                return now + wait_seconds, "what is held", []
        else:
            self.due_at = min(self.due_at, holding.clock.steady())
        if not holding.is_digest:
            return now, "what was held", self.page[: self._batch_limit]
        if self._doubts % 2 == 0 or not self.page:
            return now, "a digest", self.page
        heads = [*{order_key(event.envelope): event for event in reversed(self.page)}.values()]
        return now, "an event instead of the digest", [heads[self._doubts // 2 % len(heads)]]

    def send_alone(self, events: Sequence[StoredEvent]) -> None:
        """Send the events of a digest one by one from now on."""
        self._alone_to = events[-1].seq

    def _choose(self, now: float) -> tuple[float, str, list[int]]:
        """Return when it is whose turn, while something fails."""
        untried = self._untried(self._batch_limit)
        retry_at, failed = min((queue.retry_at, queue.numbers[0]) for queue in self.failed.values())
        if self.hold:
            suspects = [queue.numbers[0] for queue in self.failed.values() if not queue.is_isolated]
            if suspects and not self._is_probe:
                return now, "the oldest event that failed", [min(suspects)]
            return now, "another event, after the oldest failed again", untried[:1] or [failed]
        retry_at = max(retry_at, self._next_retry_at)
        if retry_at <= now or not untried or retry_at < self._first_try_at:
            return retry_at, "an event that failed, again", [failed]
        return self._first_try_at, "untried events, the most urgent first", untried

    def _untried(self, limit: int) -> list[int]:
        """Return numbers of the queues whose head has not failed, the most urgent queue first."""
        numbers: list[int] = []
        heads = []
        while self._untried_heads and len(numbers) < limit:
            head = heappop(self._untried_heads)
            queue = self._queues.get(head[2])
            if queue and not queue.failure and head[:2] == (queue.urgency, queue.numbers[0]):
                heads.append(head)
                numbers += queue.numbers[: limit - len(numbers)]
        for head in heads:
            heappush(self._untried_heads, head)
        return numbers

    def _events(self, numbers: Sequence[int]) -> list[StoredEvent]:
        """Read events; if one is gone, because the outbox reached its size limit, all is read again."""
        found = [event for seq in numbers for event in self._outbox.pending(self._sink, 1, after=seq - 1)]
        if [event.seq for event in found] != [*numbers]:
            self._generation = -1
            return []
        return found

    def note_accepted(self, events: Sequence[StoredEvent] = ()) -> None:
        """Note that the receiver accepts events; what failed while it did not is due now."""
        if self._holding and events:
            self._holding.note_sent(events)
        self._proofs, self._doubts = (self._proofs + 1) * (self._doubts % 2), 0
        for queue in self.failed.values() if self.failures else ():
            if queue.failure and not queue.is_isolated:
                queue.is_isolated, queue.failure = True, replace(queue.failure, count=0)
                if queue.failure.error.retry_after_seconds is None:
                    queue.retry_at = -math.inf
        self.hold, self.failures, self._holds, self._is_probe = None, 0, 0, False
        self._batch_limit = min(self._max_batch, 2 * self._batch_limit)

    def note_failure(
        self, failure: Failure, events: Sequence[StoredEvent], *, pace: Pace, began_at: float
    ) -> None:
        """Decide what waits after a failure of a try that began at `began_at` (monotonic).

        In a batch, any event may be the cause: if there was an answer, the first is tried alone.
        """
        is_about_events = (
            failure.is_answered and failure.may_be_caused_by_event and not failure.must_wait(pace)
        )
        is_digest = self._holding is not None and self._holding.is_digest
        if is_digest and not self.failed and events[0].seq > self._alone_to:
            if self._proofs >= PROOFS and is_about_events:
                self.send_alone(events)
            self._doubts += is_about_events
            self._wait(failure, None)
            return
        if len(events) > 1:
            self._batch_limit = 1
            self._first_try_at = began_at + FIRST_TRY_SECONDS
            if not is_about_events:
                self._wait(failure, None)
            return
        queue = (
            self._note_head(failure, events[0], pace, began_at) if failure.may_be_caused_by_event else None
        )
        if queue and queue.is_isolated:
            return
        if is_about_events:
            self.failures += 1
            self.hold, self._holds, self._is_probe = None, 0, False
        else:
            self._wait(failure, queue)

    def _note_head(self, failure: Failure, event: StoredEvent, pace: Pace, began_at: float) -> KeyQueue:
        if not self.failed:
            self._tell_apart(self.page)
            self.page = []
        key = order_key(event.envelope)
        queue = self._queues[key]
        if not queue.failure:
            self._first_try_at = began_at + FIRST_TRY_SECONDS
        elif failure.is_answered or queue.is_isolated:
            self._next_retry_at = failure.at + RETRY_SECONDS
        if queue.failure and not queue.failure.count:
            log.warning(
                "sink %s: an event keeps failing while others are accepted; it is retried on its own",
                self._sink,
                extra={"event": event.id},
            )
        queue.fail(failure, pace)
        self.failed[key] = queue
        behind = {"event": event.id, "behind": len(queue.numbers) - 1, "seconds": queue.retry_at - failure.at}
        log.debug("sink %s: a failed event waits, and what is behind it", self._sink, extra=behind)
        return queue

    def _wait(self, failure: Failure, queue: KeyQueue | None) -> None:
        """Let the sink as a whole wait, unless another event is to be tried at once."""
        self.failures += 1
        self._holds += not self._is_probe
        # Without an answer it is more likely that the receiver is unavailable for all.
        is_suspected = queue and queue.failure and (failure.is_answered or queue.failure.count > 1)
        has_other = len(self.failed) > 1 or bool(self._untried(1))
        self._is_probe = bool(is_suspected) and has_other and not self._is_probe
        self.hold = replace(failure, count=0 if self._is_probe else self._holds)
        text = "sink %s: waits as a whole, then it is the turn of %s"
        log.debug(text, self._sink, "another event" if self._is_probe else "the oldest")
