"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks.

`Dispatcher` sends what `Schedule` chooses, and `SinkHealth` notes what became of it. An event that keeps failing
holds back only its order key.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from operator import attrgetter
from typing import Any, Literal

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.model import StoredEvent, order_key
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.runtime.time import Clock, RepeatLimit, iso_utc, parse_iso
from bridge.sinks.base import RETRY_BASE_SECONDS, Sink

log = logging.getLogger(__name__)

NOTHING_WAITS = math.inf
PAGE_EVENTS = 64
MAX_FAILED = 1000  # after so many different ones, no further event is tried during an outage
TRIES = 2  # different events that are tried before the sink as a whole waits
# So many different events fail only while the receiver is unavailable for all.
MANY_FAILED = 8
_SEQ = attrgetter("seq")
NOTICES = "io.imdsbridge.scheduledevent.[su]*"  # scheduled, started and updated
LOOKED_AT = 200  # of what waits, the newest are enough to find a notice that is still urgent
NOTICE_WAIT_SECONDS = 5.0  # the status shows one that has waited longer
# While a young notice or receipt waits, a sink is tried often.
URGENT_TYPES = ("io.imdsbridge.scheduledevent.", "io.imdsbridge.approval.")
URGENT_AGE_SECONDS = 900.0
URGENT_LIMIT_SECONDS = 2.0
# While the process stops, or a notice waits that the receiver may accept although it does not accept another event.
SOON_LIMIT_SECONDS = 0.5
_MAX_EXPONENT = 32
IDLE_SECONDS = 10.0  # new events end the wait
_LOG = {"retrying": log.warning, "misconfigured": log.error, "gone": log.error}
_ADVICE = {
    "retrying": "not delivered, retrying",
    "misconfigured": (
        "its address or credentials seem to be wrong; nothing is lost: fix the URL or the credentials; "
        "secret files are read again on every retry"
    ),
    "gone": "the receiver wants no more events (410 Gone); stopped until this process is restarted",
}
SinkState = Literal["ok", "rejecting", "retrying", "misconfigured", "gone"]
_STATES: dict[type[DeliveryError], SinkState] = {Gone: "gone", Misconfigured: "misconfigured"}


@dataclass(eq=False)
class Dispatcher:
    """Delivers to one sink. `run` is for a thread of its own; the rest may be called from any thread.

    Events that are older than `max_age_seconds` become dead letters; at most `max_per_second` requests are sent.
    `count` is called with what becomes of each event, and with how long one that is delivered has waited.
    """

    name: str
    sink: Sink
    _: KW_ONLY
    max_age_seconds: float
    outbox: Outbox
    clock: Clock
    max_per_second: float | None = None
    count: Callable[..., None] = lambda *_: None
    dead_lettered: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._interval_seconds = 1 / self.max_per_second if self.max_per_second else 0.0
        self._send_at = -math.inf
        self._schedule = Schedule(self.name, self.outbox, max_batch=self.sink.max_batch)
        self._health = SinkHealth(self.name, self.clock)
        self._seen = 0  # the outbox's `changes` when it was last read
        self._retry_at = NOTHING_WAITS
        self._must_reload = False
        # The numbers of events that the receiver may have, although a try failed.
        self._uncertain: set[int] = set()
        self._draining = Stop()
        self._stop_when_drained = False

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while not self._health.is_gone:
            report_progress()
            wait_seconds = self.step()
            if self._stop_when_drained and wait_seconds == NOTHING_WAITS:
                break
            if wait_seconds is not None:
                self._pause(wait_seconds)
        self.sink.close()
        if self._health.is_gone:
            self._draining.wait(None)

    def begin_drain(self) -> None:
        """Retry at once and often from now on: the process is about to stop."""
        self._draining.set()
        self.outbox.wake()

    def stop_when_drained(self) -> None:
        """End `run` once nothing waits: no event will come any more."""
        self._stop_when_drained = True
        self.begin_drain()

    def status(self) -> dict[str, Any]:
        """Return how the sink is, for the status file."""
        counts = [one.failure.count for one in list(self._schedule.failed.values())]
        failures = self._schedule.failures or max(counts, default=0)
        backlog, since = self.outbox.backlog(self.name)
        waits_seconds = since and max(0.0, round(self.clock.steady() - since, 1))
        retry_at = self.clock.wall() - self.clock.monotonic() + self._retry_at
        return {
            "state": self._health.state(is_failing=failures > 0),
            "backlog": backlog,
            "oldest_waits_seconds": waits_seconds,
            "notice_until": self._notice_until() if (waits_seconds or 0) > NOTICE_WAIT_SECONDS else None,
            "failures": failures,
            "next_retry_at": iso_utc(datetime.fromtimestamp(retry_at, UTC)) if retry_at < math.inf else None,
            **self._health.last,
        }

    def _notice_until(self) -> str | None:
        """Return the earliest NotBefore of the notices that have waited for longer than NOTICE_WAIT_SECONDS.

        One without a NotBefore, as of a started event, is due since it was published.
        """
        before = self.clock.steady() - NOTICE_WAIT_SECONDS
        found = self.outbox.newest_waiting(self.name, LOOKED_AT, before=before, pattern=NOTICES)
        return min((iso_utc(_not_before(event)) for event in found), default=None)

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        self._seen = self.outbox.changes
        self._schedule.read()
        if self._dead_letter_expired():
            return None
        pace, now = self._pace(), self.clock.monotonic()
        events = self._schedule.next_events(pace, now)
        self._retry_at = self._schedule.retry_at(pace)
        if not events:
            return max(0.0, self._retry_at - now)
        if self._send_at > now:  # the rate limit allows no request yet
            return self._send_at - now
        self._deliver(events)
        return None

    def _deliver(self, events: list[StoredEvent]) -> None:
        """Send events and note what became of them."""
        if self._must_reload:
            self.sink.reload()
            self._must_reload = False
        self._send_at = self.clock.monotonic() + self._interval_seconds
        try:
            self.sink.send(events)
        except DeliveryError as error:
            self._note_delivery(events[: error.delivered])
            self._note_error(error, events[error.delivered :])
        else:
            self._note_delivery(events)

    def _dead_letter_expired(self) -> bool:
        """Dead-letter an event that is next but too old; return whether there was one."""
        next_events = (*(one.event for one in self._schedule.failed.values()), *self._schedule.page[:1])
        oldest = self.clock.steady() - self.max_age_seconds
        expired = next((event for event in next_events if event.stored_at < oldest), None)
        if expired:
            self.count("expired")
            self._dead_letter(expired, EXPIRED, f"older than max_age_seconds = {self.max_age_seconds:g}")
        return expired is not None

    def _dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        self._acknowledge([event], dead=(reason, detail))
        self.dead_lettered += 1
        text = "sink %s: an event is dead-lettered as %s: %s"
        log.error(text, self.name, reason, detail, extra={"event": event.id})

    def _note_delivery(self, events: Sequence[StoredEvent]) -> None:
        if not events:
            return
        log.info("sink %s: delivered", self.name, extra={"events": [event.id for event in events]})
        now = self.clock.steady()
        for event in events:
            self.count("delivered", max(0.0, now - event.stored_at))
        self._acknowledge(events)
        self._note_answer()
        self._health.note_success()

    def _acknowledge(self, events: Sequence[StoredEvent], **how: Any) -> None:
        self._schedule.acknowledge(events, **how)
        self._uncertain -= {event.seq for event in events}

    def _note_answer(self) -> None:
        if self._schedule.failures:
            self._health.note_recovery(self._schedule.failures)
        self._schedule.note_accepted()

    def _note_error(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        if not isinstance(error, Rejected):
            self.count("failed")
            self._note_failure(error, events)
        elif error.status == HTTPStatus.CONFLICT and self._may_have_arrived(events[0]):
            self._note_delivery(events[:1])
        else:
            self.count("rejected")
            self._note_answer()
            self._health.note_rejection(events[0], error)
            self._dead_letter(events[0], REJECTED, str(error))

    def _may_have_arrived(self, event: StoredEvent) -> bool:
        """Return whether an event was sent before, perhaps by an earlier process that was killed."""
        return event.seq in self._uncertain or event.seq <= self.outbox.earlier_seq

    def _note_failure(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        if not error.is_unreached:
            self._uncertain |= {event.seq for event in events}
        self._must_reload = isinstance(error, Misconfigured)
        share = random.random()  # noqa: S311 - it spreads load
        failure = Failure(error=error, at=self.clock.monotonic(), share=share)
        self._schedule.note_failure(failure, events, pace=self._pace())
        self._health.note_failure(error, self._schedule.failures)

    def _pace(self) -> Pace:
        is_urgent = False
        if self._schedule.hold or self._schedule.failed:
            since = self.clock.steady() - URGENT_AGE_SECONDS
            is_urgent = self.outbox.has_waiting(self.name, since=since, types=URGENT_TYPES)
        return Pace(
            limit_seconds=self.sink.retry_limit_seconds,
            is_urgent=is_urgent,
            is_untried=is_urgent and self._schedule.has_untried(),
            is_draining=bool(self._draining),
        )

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`; new events and the stop of the process end it early."""
        if seconds == NOTHING_WAITS:
            with suppress(DeliveryError):  # the next event will show whether it matters
                self.sink.keep_alive()
        extend_deadline(IDLE_SECONDS)
        self.outbox.wait(self._seen, min(seconds, IDLE_SECONDS))


def _not_before(event: StoredEvent) -> datetime:
    data = event.envelope.get("data")
    found = parse_iso(data.get("NotBeforeUtc")) if isinstance(data, dict) else None
    return found or datetime.fromtimestamp(event.stored_at, UTC)


class SinkHealth:
    """What the last deliveries of a sink showed; written by the sink's thread, read by any."""

    def __init__(self, sink: str, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._log_limit = RepeatLimit(clock)
        self._is_rejecting = False
        self._failed_as: SinkState = "ok"
        # The last success and the last error, as the status file shows them.
        self.last: dict[str, str | None] = dict.fromkeys(("last_success_at", "last_error", "last_error_at"))

    @property
    def is_gone(self) -> bool:
        """Whether the receiver wants nothing more."""
        return self._failed_as == "gone"

    def state(self, *, is_failing: bool) -> SinkState:
        """Return how the sink is, given whether something fails now."""
        if is_failing or self.is_gone:
            return self._failed_as
        return "rejecting" if self._is_rejecting else "ok"

    def note_success(self) -> None:
        """Note that events were accepted."""
        self._is_rejecting = False
        self.last["last_success_at"] = iso_utc(self._clock.now())

    def note_rejection(self, event: StoredEvent, error: DeliveryError) -> None:
        """Remember why an event was rejected."""
        self._is_rejecting = True
        self._note_error(f"{event.id}: {error}")

    def note_recovery(self, failures: int) -> None:
        """Log that the receiver answers again."""
        log.info("sink %s: delivering again", self._sink, extra={"failures": failures})
        self._log_limit.reset()

    def note_failure(self, error: DeliveryError, failures: int) -> None:
        """Log what is wrong after `failures` in a row, once and then rarely."""
        state = self._failed_as = _STATES.get(type(error), "retrying")
        self._note_error(str(error))
        if self._log_limit.is_due(state):
            _LOG[state](f"sink %s: {_ADVICE[state]}: %s", self._sink, error, extra={"failures": failures})

    def _note_error(self, text: str) -> None:
        self.last |= {"last_error": text, "last_error_at": iso_utc(self._clock.now())}


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

    None counts once the receiver has accepted other events: the next try is due then.
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
            return self.at
        limits = [pace.limit_seconds, RETRY_BASE_SECONDS * 2.0 ** min(self.count - 1, _MAX_EXPONENT)]
        if pace.is_urgent:
            limits.append(URGENT_LIMIT_SECONDS)
        if pace.is_draining or (pace.is_untried and self.is_answered and self.may_be_caused_by_event):
            limits.append(SOON_LIMIT_SECONDS)
        return self.at + self.share * min(limits)


@dataclass(kw_only=True)
class FailedEvent:
    """An event that failed; later events with its order key wait behind it.

    `is_isolated`: the receiver has accepted others since then. It is tried again at once, and then on its own.
    """

    event: StoredEvent
    failure: Failure
    is_isolated: bool = False

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again: while others are accepted, often only a notice that is answered."""
        if not self.is_isolated:
            return self.failure.retry_at(pace)
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
        """Choose what to send now; nothing while the sink as a whole waits, or if no event is due."""
        if self.hold and self.hold.retry_at(pace) > now:
            return []
        if self.hold or self._tried:
            if probe := self._probe(pace):
                return [probe]
            self._tried.clear()
            self.hold = None
        due = [one for one in self.failed.values() if one.retry_at(pace) <= now]
        if passed := [one.event for one in due if not one.failure.count]:
            return [min(passed, key=_SEQ)]
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
        for one in self._suspects():
            one.is_isolated, one.failure = True, replace(one.failure, count=0)
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
        if not failed.failure.count:
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
