"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks.

`Dispatcher` sends what `Course` chooses, and `SinkHealth` notes what became of it.

I/O: the outbox, the sink, the log.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Literal

from bridge.contract.status import SinkStatus
from bridge.delivery.course import NOTHING_WAITS, PAGE_EVENTS, Course, Failure, Pace
from bridge.delivery.holding import HELD_EVENTS, Holding
from bridge.delivery.queue import Head, Queue, Ready, Taken
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.model import StoredEvent
from bridge.events.urgency import URGENT_LIMIT_SECONDS, Now, not_before
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.runtime.time import Clock, RepeatLimit, iso_utc
from bridge.sinks.base import Sink

log = logging.getLogger(__name__)

NOTICE_WAIT_SECONDS = 5.0  # the status shows one that has waited longer
IDLE_SECONDS = 30.0  # new events end the wait
EXPIRY_SECONDS = 60.0  # an operator may move what is older to a sink
GONE_SECONDS = 0.1
RELOAD_SECONDS = 0.5  # between two times that secrets are read, or a token is requested, again
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
    `holding` says how long events are held.
    `count` is called with what becomes of each event, and with how long one that is delivered has waited.
    """

    name: str
    sink: Sink
    _: KW_ONLY
    max_age_seconds: float
    outbox: Outbox
    clock: Clock
    max_per_second: float | None = None
    holding: Holding | None = None
    count: Callable[..., None] = lambda *_: None
    dead_lettered: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        is_digest = self.holding is not None and self.holding.is_digest
        batch = HELD_EVENTS if is_digest else min(self.sink.max_batch, PAGE_EVENTS)
        pause_until = -math.inf if is_digest else math.inf
        self._course = Course(max_batch=batch, batch=batch, is_digest=is_digest, pause_until=pause_until)
        self._queue = Queue(self.name, self.outbox.storage)
        self._interval_seconds = 1 / self.max_per_second if self.max_per_second else 0.0
        self._send_at = -math.inf  # as all times, in steady seconds
        self._health = SinkHealth(self.name, self.clock)
        self._seen = 0  # the outbox's `changes` when it was last read
        self._retry_at = NOTHING_WAITS
        self._expires_at = -math.inf  # when to look next whether something is too old
        self._held_until = -math.inf  # when what is held is or was to be sent
        self._reload_at = math.inf  # infinite: need not
        self._draining = Stop()
        self._stop_when_drained = False

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while not self._health.is_gone:
            report_progress()
            wait_seconds = self.step()
            is_empty = wait_seconds == NOTHING_WAITS
            if self._stop_when_drained and is_empty and self._seen == self.outbox.changes:
                break  # and nothing was committed since it looked
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

    def status(self, dead_letters: int = 0) -> SinkStatus:
        """Return how the sink is, for the status file; it does not count its dead letters itself."""
        backlog, since = self.outbox.backlog(self.name)
        failures = max(self._course.failures, self._queue.failures() if backlog else 0)
        # What is held, or what a program is busy with, does not wait.
        now, held_until = self.clock.steady(), self._held_until
        waits_from = now if self.sink.is_at_work else max(since or now, held_until)
        waits_seconds = since and max(0.0, round(now - waits_from, 1))
        is_retried = failures and not self._health.is_gone
        retry_at = self.clock.wall() - now + (self._retry_at if is_retried else math.inf)
        return SinkStatus(
            state=self._health.state(is_failing=failures > 0),
            backlog=backlog,
            oldest_waits_seconds=waits_seconds,
            is_held=now < held_until < math.inf,
            notice_until=self._notice_until() if (waits_seconds or 0) > NOTICE_WAIT_SECONDS else None,
            failures=failures,
            next_retry_at=iso_utc(datetime.fromtimestamp(retry_at, UTC)) if retry_at < math.inf else None,
            dead_letters=dead_letters,
            **self._health.last,
        )

    def _notice_until(self) -> str | None:
        """Return the NotBefore of the most urgent notice that has waited for longer than NOTICE_WAIT_SECONDS.

        One without a NotBefore, as of a started event, is due since it was published.
        """
        now = self.outbox.now()
        event = self._queue.most_urgent_notice(now, now.steady - NOTICE_WAIT_SECONDS)
        if not event:
            return None
        at = not_before(event, now.wall - now.steady + event.stored_at)
        return iso_utc(datetime.fromtimestamp(at, UTC))

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        self._seen = self.outbox.changes
        now = self.outbox.now()
        if self._dead_letter_expired(now):
            return None
        self._retry_at, heads = self._choose(now)
        if not heads or self._send_at > now.steady:  # nothing is due, or the rate limit allows no request yet
            wait_seconds = (self._send_at if heads else self._retry_at) - now.steady
            failure = self._course.blocked_by
            why = {"whole_sink": str(failure.error) if failure else None}
            log.debug("sink %s: waits up to %.2f s", self.name, wait_seconds, extra=why)
            return wait_seconds
        taken = self._queue.take(heads[: self._limit], self._limit, is_noted=self.sink.knows_duplicates)
        if not taken.events:  # the outbox reached its size limit
            return GONE_SECONDS
        self._deliver(taken)
        return None

    def _choose(self, now: Now) -> tuple[float, Sequence[Head]]:
        """Return the heads to send now, or when to ask again."""
        pace = self._pace(is_failing=self._course.blocked_by is not None)
        if (blocked_until := self._course.blocked_until(pace)) > now.steady:
            return blocked_until, []
        at, heads = self._course.choose(self._ready(now, pace), now.steady)
        if not heads:
            self._course = self._course.idle(is_empty=at == NOTHING_WAITS)
        return at, heads

    @property
    def _limit(self) -> int:
        """How many events are sent next; a sink may learn that it takes fewer."""
        limit = self._course.limit
        return limit if self._course.is_digest else min(limit, self.sink.max_batch)

    def _ready(self, now: Now, pace: Pace) -> Ready:
        """Return what can be sent next, and release what is held once something is sent or must not be held."""
        course, queue = self._course, self._queue
        kinds = course.kinds(now.steady)
        ready = queue.ready(now, self._limit, **kinds)
        if (course.blocked_by or pace.is_draining) and not ready.fresh and queue.forgive(now):
            ready = queue.ready(now, self._limit, **kinds)
        if not self.holding:
            return ready
        held_until = min(ready.due_at, course.pause_until)
        must_be_sent = pace.is_draining or not course.is_calm or self.outbox.storage_error is not None
        backlog = self.outbox.backlogs()[self.name]
        is_due = must_be_sent or backlog >= HELD_EVENTS or held_until <= now.steady
        is_sending = ready.fresh or (ready.again and not self.holding.is_digest)
        if not (is_sending or is_due):
            self._held_until = -math.inf if queue.failures() else held_until
            return ready._replace(due_at=held_until if backlog else NOTHING_WAITS)
        self._held_until = min(self._held_until, now.steady)
        return queue.ready(now, self._limit, **kinds) if queue.release() else ready

    def _deliver(self, taken: Taken) -> None:
        """Send events and note what became of them."""
        now = self.clock.steady()
        if now >= self._reload_at:
            self.sink.reload()
            self._reload_at = math.inf
        self._send_at = now + self._interval_seconds
        events = taken.events
        why = {"events": [event.id for event in events]}
        log.debug("sink %s: sends the most urgent of what is due", self.name, extra=why)
        try:
            self.sink.send(events)
        except DeliveryError as error:
            self._note_delivery(events[: error.delivered], is_again=taken.is_again)
            self._note_error(error, taken._replace(events=events[error.delivered :]), now)
        else:
            self._note_delivery(events, is_again=taken.is_again)

    def _dead_letter_expired(self, now: Now) -> bool:
        """Dead-letter the oldest event if it is too old; return whether it was."""
        if now.steady < self._expires_at:
            return False
        event = self.outbox.oldest(self.name)
        expires_at = event.stored_at + self.max_age_seconds if event else math.inf
        if event is None or expires_at >= now.steady:
            self._expires_at = min(expires_at, now.steady + EXPIRY_SECONDS)
            return False
        page = self.outbox.pending(self.name, PAGE_EVENTS)
        old = [one for one in page if one.stored_at + self.max_age_seconds < now.steady] or [event]
        for _ in old:
            self.count("expired")
        error = self._health.last["last_error"]
        why = f"older than max_age_seconds = {self.max_age_seconds:g}"
        self._dead_letter(old, EXPIRED, f"{why}; the last error: {error}" if error else why)
        return True

    def _dead_letter(self, events: Sequence[StoredEvent], reason: str, detail: str) -> None:
        self.outbox.acknowledge(self.name, events, dead=(reason, detail))
        self.dead_lettered += len(events)
        text = "sink %s: an event is dead-lettered as %s: %s"
        for event in events:
            log.error(text, self.name, reason, detail, extra={"event": event.id})

    def _note_delivery(self, events: Sequence[StoredEvent], *, is_again: bool) -> None:
        if not events:
            return
        log.info("sink %s: delivered", self.name, extra={"events": [event.id for event in events]})
        now = self.clock.steady()
        for event in events:
            self.count("delivered", max(0.0, now - event.stored_at))
        self.outbox.acknowledge(self.name, events)
        self._note_answer(is_again=is_again)
        course = self._course
        if self.holding:
            pause_until = now + self.holding.pause_seconds(events[0].stored_at, course.accepted_at)
            course = replace(course, pause_until=pause_until)
        self._course = replace(course, accepted_at=now, accepted_seq=self._queue.last_seq)
        self._health.note_success()

    def _note_answer(self, *, is_again: bool) -> None:
        """Note that the receiver takes events; after an outage, what failed is due."""
        if self._course.failures:
            self._health.note_recovery(self._course.failures)
            now = self.outbox.now()
            if self._course.is_after_outage(now.steady):
                self._queue.forgive(now)
        self._course = self._course.accepted(is_again=is_again)

    def _note_error(self, error: DeliveryError, taken: Taken, began_at: float) -> None:
        events = taken.events
        if self.sink.knows_duplicates:
            clear = [event.seq for event in events[error.uncertain :] if event.seq not in taken.sent]
            self._queue.note_unsent(clear)
        if not isinstance(error, Rejected):
            self.count("failed")
            self._note_failure(error, taken, began_at)
        elif error.status == HTTPStatus.CONFLICT and events[0].seq in taken.sent:
            self._note_delivery(events[:1], is_again=taken.is_again)
        elif self._course.is_digest and len(events) > 1:
            self._note_answer(is_again=False)
            self._course = self._course.split(len(events), parts=2)
            log.warning("sink %s: a digest is refused, it is sent in parts: %s", self.name, error)
        else:
            self.count("rejected")
            self._note_answer(is_again=taken.is_again)
            self._health.note_rejection(events[0], error)
            self._dead_letter(events[:1], REJECTED, str(error))

    def _note_failure(self, error: DeliveryError, taken: Taken, began_at: float) -> None:
        # They would keep the events in memory.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        now, count = self.outbox.now(), len(taken.events)
        if isinstance(error, Misconfigured):
            self._reload_at = min(self._reload_at, max(now.steady, began_at + RELOAD_SECONDS))
        pace, share = self._pace(is_failing=True), random.random()  # noqa: S311 - it spreads load
        failure = Failure(error=error, began_at=began_at, at=now.steady, share=share)
        head = None
        if count == 1 and failure.may_be_caused_by_event:
            head = self._queue.head(taken.events[0].seq)
        if head:
            self._note_failed(head, failure, taken.events[0], pace)
        is_again = head.has_failed if head else taken.is_again
        self._course = self._course.failed(failure, count=count, is_again=is_again, pace=pace)
        self._health.note_failure(error, self._course.failures)

    def _note_failed(self, head: Head, failure: Failure, event: StoredEvent, pace: Pace) -> None:
        """Let an event wait for its retry, and what is behind it."""
        # One without an answer may take long each time: it is tried as a young one only if it is alone.
        is_harmless = failure.is_answered or self.outbox.backlogs()[self.name] == 1
        urgent_seconds = self.outbox.now().patience(
            head.urgency, event.stored_at if is_harmless else -math.inf
        )
        retry_at = replace(failure, count=head.tries + 1).retry_at(
            replace(pace, urgent_seconds=urgent_seconds)
        )
        self._queue.note_failure(head, due_at=retry_at, is_asked=failure.must_wait(pace))
        extra = {"event": event.id, "seconds": retry_at - failure.at}
        log.debug("sink %s: a failed event waits, and what is behind it", self.name, extra=extra)

    def _pace(self, *, is_failing: bool) -> Pace:
        urgent_seconds = math.inf
        if is_failing:
            is_young = self.outbox.has_young(self.name)
            urgent_seconds = URGENT_LIMIT_SECONDS if is_young else self._queue.patience(self.outbox.now())
        return Pace(
            limit_seconds=self.sink.retry_limit_seconds,
            urgent_seconds=urgent_seconds,
            is_draining=bool(self._draining),
        )

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`; new events and the stop of the process end it early."""
        extend_deadline(IDLE_SECONDS)
        self.outbox.wait(self._seen, min(seconds, self.sink.rest(), IDLE_SECONDS))


class SinkHealth:
    """What the last deliveries of a sink showed; written by the sink's thread, read by any."""

    def __init__(self, sink: str, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._log_limit = RepeatLimit(clock)
        self._is_rejecting = False
        self._failed_as: SinkState = (
            "retrying"  # until it is known better: so failed what an earlier process left
        )
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
