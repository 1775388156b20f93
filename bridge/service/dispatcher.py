"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks.

`Dispatcher` sends what `Schedule` chooses, and `SinkHealth` notes what became of it.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.runtime.time import Clock, RepeatLimit, iso_utc
from bridge.service.schedule import (
    NOTHING_WAITS,
    NOTICES,
    URGENT_AGE_SECONDS,
    URGENT_TYPES,
    Failure,
    Holding,
    Pace,
    Schedule,
    not_before,
)
from bridge.sinks.base import Sink

log = logging.getLogger(__name__)

LOOKED_AT = 200  # of what waits, the newest are enough to find a notice that is still urgent
NOTICE_WAIT_SECONDS = 5.0  # the status shows one that has waited longer
IDLE_SECONDS = 10.0  # new events end the wait
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
# Which events were sent is not remembered over a restart: sending one twice is better than dropping it unseen.
_SENT_EARLIER = " (the receiver may have it, if an earlier run of this process sent it)"
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
        self._interval_seconds = 1 / self.max_per_second if self.max_per_second else 0.0
        self._send_at = -math.inf
        self._schedule = Schedule(self.name, self.outbox, max_batch=self.sink.max_batch, holding=self.holding)
        self._health = SinkHealth(self.name, self.clock)
        self._seen = 0  # the outbox's `changes` when it was last read
        self._retry_at = NOTHING_WAITS
        self._asked = (-1, 0)  # when it was last asked whether a young notice or receipt waits
        self._has_urgent = False
        self._must_reload, self._reload_at = False, -math.inf
        # The numbers of events that the receiver may have, although a try of this run failed.
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
        failed = [failure for one in list(self._schedule.failed.values()) if (failure := one.failure)]
        failures = self._schedule.failures or max((failure.count for failure in failed), default=0)
        backlog, since = self.outbox.backlog(self.name)
        # What is held, or what a program is busy with, does not wait.
        now, due_at = self.clock.steady(), self._schedule.due_at
        waits_from = now if self.sink.is_at_work else max(since or now, due_at)
        waits_seconds = since and max(0.0, round(now - waits_from, 1))
        retry_at = self.clock.wall() - self.clock.monotonic() + (self._retry_at if failures else math.inf)
        return {
            "state": self._health.state(is_failing=failures > 0),
            "backlog": backlog,
            "oldest_waits_seconds": waits_seconds,
            "is_held": now < due_at < math.inf,
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
        return min((iso_utc(not_before(event)) for event in found), default=None)

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        self._seen = self.outbox.changes
        self._schedule.read()
        if self._dead_letter_expired():
            return None
        pace, now = self._pace(), self.clock.monotonic()
        self._retry_at, events = self._schedule.next_events(pace, now)
        if not events or self._send_at > now:  # nothing is due, or the rate limit allows no request yet
            wait_seconds = (self._send_at if events else self._retry_at) - now
            hold = self._schedule.hold
            why = {"failed": len(self._schedule.failed), "whole_sink": str(hold.error) if hold else None}
            log.debug("sink %s: waits up to %.2f s", self.name, wait_seconds, extra=why)
            return wait_seconds
        self._deliver(events)
        return None

    def _deliver(self, events: list[StoredEvent]) -> None:
        """Send events and note what became of them."""
        now = self.clock.monotonic()
        if self._must_reload and now >= self._reload_at:
            self.sink.reload()
            self._must_reload, self._reload_at = False, now + RELOAD_SECONDS
        self._send_at = now + self._interval_seconds
        try:
            self.sink.send(events)
        except DeliveryError as error:
            self._note_delivery(events[: error.delivered])
            self._note_error(error, events[error.delivered :])
        else:
            self._note_delivery(events)

    def _dead_letter_expired(self) -> bool:
        """Dead-letter the oldest event if it is too old; return whether it was."""
        event = self._schedule.oldest()
        if event is None or event.stored_at >= self.clock.steady() - self.max_age_seconds:
            return False
        self.count("expired")
        error = self._health.last["last_error"]
        why = f"older than max_age_seconds = {self.max_age_seconds:g}"
        self._dead_letter(event, EXPIRED, f"{why}; the last error: {error}" if error else why)
        return True

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
        self._note_answer(events)
        self._health.note_success()

    def _acknowledge(self, events: Sequence[StoredEvent], **how: Any) -> None:
        self._schedule.acknowledge(events, **how)
        self._uncertain -= {event.seq for event in events}

    def _note_answer(self, delivered: Sequence[StoredEvent] = ()) -> None:
        if self._schedule.failures:
            self._health.note_recovery(self._schedule.failures)
        self._schedule.note_accepted(delivered)

    def _note_error(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        if not isinstance(error, Rejected):
            self.count("failed")
            self._note_failure(error, events)
        elif error.status == HTTPStatus.CONFLICT and events[0].seq in self._uncertain:
            self._note_delivery(events[:1])
        elif self.holding and self.holding.is_digest and len(events) > 1:
            self._note_answer()
            self._schedule.send_alone(events)
            log.warning("sink %s: a digest is refused, its events are sent one by one: %s", self.name, error)
        else:
            self.count("rejected")
            self._note_answer()
            self._health.note_rejection(events[0], error)
            advice = _SENT_EARLIER if error.status == HTTPStatus.CONFLICT else ""
            self._dead_letter(events[0], REJECTED, f"{error}{advice}")

    def _note_failure(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        self._uncertain |= {event.seq for event in events[: error.uncertain]}
        # They would keep the events in memory.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        self._must_reload = isinstance(error, Misconfigured)
        share = random.random()  # noqa: S311 - it spreads load
        failure = Failure(error=error, at=self.clock.monotonic(), share=share)
        began_at = self._send_at - self._interval_seconds
        self._schedule.note_failure(failure, events, pace=self._pace(), began_at=began_at)
        self._health.note_failure(error, self._schedule.failures)

    def _pace(self) -> Pace:
        is_failing = bool(self._schedule.hold or self._schedule.failed)
        asked = self.outbox.changes, int(self.clock.monotonic())
        if is_failing and asked != self._asked:  # at most once a second: thousands of events may wait
            since = self.clock.steady() - URGENT_AGE_SECONDS
            is_urgent = self.outbox.has_waiting(self.name, since=since, types=URGENT_TYPES)
            self._asked, self._has_urgent = asked, is_urgent
        return Pace(
            limit_seconds=self.sink.retry_limit_seconds,
            is_urgent=is_failing and self._has_urgent,
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
