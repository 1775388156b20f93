"""What waits for one sink, what of it is sent next, and when a failed delivery is tried again.

An event that keeps failing holds back only its order key. Nothing here sends, and nothing reads a clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent, order_key
from bridge.outbox.outbox import Outbox
from bridge.sinks.base import RETRY_BASE_SECONDS

log = logging.getLogger(__name__)

NOTHING_WAITS = math.inf
PAGE_EVENTS = 64
MAX_FAILED = 1000  # after so many different ones, no further event is tried during an outage
TRIES = 2  # different events that are tried before the sink as a whole waits
# So many different events fail only while the receiver is unavailable for all.
MANY_FAILED = 8
_SEQ = attrgetter("seq")
# While a young notice or receipt waits, a sink is tried often.
URGENT_TYPES = ("io.imdsbridge.scheduledevent.", "io.imdsbridge.approval.")
URGENT_AGE_SECONDS = 900.0
URGENT_LIMIT_SECONDS = 2.0
# While the process stops, or a notice waits that the receiver may accept although it does not accept another event.
SOON_LIMIT_SECONDS = 0.5
_TOO_MANY_REQUESTS = 429
_MAX_EXPONENT = 32


def is_urgent_type(event: StoredEvent) -> bool:
    """Return whether an event is worth frequent retries while it is young."""
    return event.type.startswith(URGENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What limits the waits now.

    `limit_seconds` is the longest wait of the sink, `is_urgent` whether a young notice or receipt waits, `is_untried`
    whether one waits that has not failed, `is_draining` whether the process is about to stop.
    """

    limit_seconds: float
    is_urgent: bool = False
    is_untried: bool = False
    is_draining: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed try: the `count`-th in a row, at `at` (monotonic), for which the sink raised `error`.

    `share` is drawn between 0 and 1 and spreads the retries of a fleet ("full jitter").
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
        return not self.error.is_unreached and self.error.status != _TOO_MANY_REQUESTS

    def must_wait(self, pace: Pace) -> bool:
        """Return whether `Retry-After` is obeyed: other than with 429 it cannot delay an urgent event."""
        is_free = pace.is_urgent and not pace.is_draining and self.error.status != _TOO_MANY_REQUESTS
        return self.error.retry_after_seconds is not None and not is_free

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again, in monotonic seconds.

        The wait is what the receiver asked for, or drawn below a limit that doubles with each failure.
        """
        if self.must_wait(pace):
            return self.at + max(RETRY_BASE_SECONDS, self.error.retry_after_seconds or 0.0)
        limits = [pace.limit_seconds, RETRY_BASE_SECONDS * 2.0 ** min(self.count - 1, _MAX_EXPONENT)]
        if pace.is_urgent:
            limits.append(URGENT_LIMIT_SECONDS)
        if pace.is_draining or (pace.is_untried and self.is_answered and self.may_be_caused_by_event):
            limits.append(SOON_LIMIT_SECONDS)
        return self.at + self.share * min(limits)


@dataclass(kw_only=True)
class FailedEvent:
    """An event that failed; later events with its order key wait behind it.

    `is_passed`: the receiver has accepted others since then. `is_isolated`: after that the event failed again, so it
    is the cause.
    """

    event: StoredEvent
    failure: Failure
    is_passed: bool = False
    is_isolated: bool = False

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again: at once if others are accepted, but often only a notice that is answered."""
        if not self.is_isolated:
            is_due = self.is_passed and not self.failure.must_wait(pace)
            return self.failure.at if is_due else self.failure.retry_at(pace)
        is_urgent = pace.is_urgent and self.failure.is_answered and is_urgent_type(self.event)
        return self.failure.retry_at(replace(pace, is_urgent=is_urgent))


class Schedule:
    """Reads what waits page by page, chooses what is sent next, and decides what waits after a failure.

    After a failure another event is tried at once. If that fails, too, the sink as a whole waits, and then the oldest
    event comes first, so that an outage hardly changes the order. An event that fails again while others are accepted
    is isolated: it is retried on its own, and only later events with its order key wait. For the sink's thread.

    Attributes:
        failed: events that failed, by order key.
        page: the next of the other events, in their order.
        hold: the failure after which the sink as a whole waits; None while it does not.
        failures: how often in a row the sink as a whole failed.
    """

    def __init__(self, sink: str, outbox: Outbox, *, max_batch: int) -> None:
        self._sink = sink
        self._outbox = outbox
        self._max_batch = self._batch_limit = max_batch
        self._tried: set[str] = set()  # order keys that failed since the last wait
        self._is_turn_of_isolated = False
        self._generation = -1
        self._read_to = 0
        self.failed: dict[str, FailedEvent] = {}
        self.page: list[StoredEvent] = []
        self.hold: Failure | None = None
        self.failures = 0

    def read(self) -> None:
        """Read on until there is an event in the page; from the start if what waits was changed from outside."""
        if self._generation != self._outbox.generation:
            self._generation, self._read_to = self._outbox.generation, 0
            self.failed, self.page = {}, []
        while not self.page:
            events = self._outbox.pending(self._sink, PAGE_EVENTS, after=self._read_to)
            if not events:
                return
            self._read_to = events[-1].seq
            self.page = [
                one for one in events if not self.failed or order_key(one.envelope) not in self.failed
            ]

    def acknowledge(self, events: Sequence[StoredEvent], *, dead: tuple[str, str] | None = None) -> None:
        """Note in the outbox that the sink has had events, or will never get them, which is `dead` with a reason."""
        self._outbox.acknowledge(self._sink, events, dead=dead)
        done = {event.seq for event in events}
        self.page = [event for event in self.page if event.seq not in done]
        for key in [key for key, one in self.failed.items() if one.event.seq in done]:
            del self.failed[key]
            self.page, self._read_to = [], 0  # events may wait behind it

    def retry_at(self, pace: Pace) -> float:
        """Return when the sink, or else the first failed event, is tried again; NOTHING_WAITS if all is well."""
        if self.hold:
            return self.hold.retry_at(pace)
        return min((one.retry_at(pace) for one in self.failed.values()), default=NOTHING_WAITS)

    def has_untried(self) -> bool:
        """Return whether a notice waits that may be accepted although other events are not."""
        return len(self._suspects()) < MANY_FAILED and any(map(is_urgent_type, self.page))

    def next_events(self, pace: Pace, now: float) -> list[StoredEvent]:
        """Choose what to send now that a wait of the sink as a whole is over; nothing if no event is due."""
        if self.hold or self._tried:
            if probe := self._probe(pace):
                return [probe]
            self._tried.clear()
            self.hold = None
        due = [one for one in self.failed.values() if one.retry_at(pace) <= now]
        if suspects := [one.event for one in due if not one.is_isolated]:
            return [min(suspects, key=_SEQ)]
        if due and (self._is_turn_of_isolated or not self.page):
            return [due[0].event]
        return self.page[: self._batch_limit]

    def _suspects(self) -> list[FailedEvent]:  # perhaps because the receiver is unavailable for all
        return [one for one in self.failed.values() if not one.is_isolated]

    def _probe(self, pace: Pace) -> StoredEvent | None:
        """Choose an event whose order key has not failed since the last wait."""
        candidates = self._candidates(pace)
        return next((event for event in candidates if order_key(event.envelope) not in self._tried), None)

    def _candidates(self, pace: Pace) -> Iterator[StoredEvent]:
        """Name what may be tried while the sink fails: a new notice, the oldest event, a new one, the others."""
        suspects = self._suspects()
        # Without an answer all may fail: only a second try goes to a new notice, so that an outage keeps the order.
        may_pass = bool(self._tried) or (self.hold is not None and self.hold.is_answered)
        if pace.is_urgent and may_pass and 0 < len(suspects) < MANY_FAILED:
            first: dict[str, StoredEvent] = {}
            for event in self.page:
                key = order_key(event.envelope)
                first.setdefault(key, event)
                if is_urgent_type(event):
                    yield first[key]
        if suspects:
            yield min((one.event for one in suspects), key=_SEQ)
        yield from self.page[: len(suspects) < MAX_FAILED]
        yield from (one.event for one in sorted(suspects, key=lambda one: one.failure.at))

    def note_accepted(self) -> None:
        """Note that the receiver accepts events; what failed while it did not is due now."""
        for one in self.failed.values():
            one.is_passed = True
        self.hold = None
        self.failures = 0
        self._tried.clear()
        self._is_turn_of_isolated = True
        self._batch_limit = min(self._max_batch, 2 * self._batch_limit)

    def note_failure(self, failure: Failure, events: Sequence[StoredEvent], *, pace: Pace) -> None:
        """Decide what waits after a failure: an event, the sink or both. In a batch, any event may be the cause."""
        failed = None
        if len(events) > 1:
            self._batch_limit = 1
            if failure.is_answered and failure.may_be_caused_by_event and not failure.must_wait(pace):
                return  # the first of them is tried alone
        elif failure.may_be_caused_by_event:
            failed = self._note_event(failure, events[0])
        if failed and failed.is_isolated:
            self._is_turn_of_isolated = False
        else:
            self._fail(failure, failed, pace)

    def _note_event(self, failure: Failure, event: StoredEvent) -> FailedEvent:
        key = order_key(event.envelope)
        failed = self.failed.get(key)
        if failed is None:
            failed = self.failed[key] = FailedEvent(event=event, failure=failure)
            self.page = [other for other in self.page if order_key(other.envelope) != key]
            return failed
        if failed.is_passed and not failed.is_isolated:
            failed.is_isolated = True
            log.warning(
                "sink %s: an event keeps failing while others are accepted; it is retried on its own",
                self._sink,
                extra={"event": event.id},
            )
        failed.failure = replace(failure, count=failed.failure.count + 1)
        return failed

    def _fail(self, failure: Failure, failed: FailedEvent | None, pace: Pace) -> None:
        """Let the sink as a whole wait, unless another event is to be tried at once."""
        self.failures += not self._tried
        if failed:
            self._tried.add(order_key(failed.event.envelope))
        # Without an answer it is more likely that the receiver is unavailable for all.
        is_suspected = failed is not None and (failure.is_answered or failed.failure.count > 1)
        must_probe = is_suspected and len(self._tried) < TRIES and self._probe(pace) is not None
        if not must_probe:
            self._tried.clear()
        is_hold = failure.must_wait(pace) or not must_probe
        self.hold = replace(failure, count=self.failures) if is_hold else None
