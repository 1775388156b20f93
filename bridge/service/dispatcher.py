"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.runtime.time import Clock, RepeatLimit, iso_utc
from bridge.service.schedule import NOTHING_WAITS, URGENT_AGE_SECONDS, URGENT_TYPES, Failure, Pace, Schedule
from bridge.sinks.base import Sink

log = logging.getLogger(__name__)

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


class Dispatcher:
    """Delivers to one sink. `run` is for a thread of its own; the rest may be called from any thread.

    Events that are older than `max_age_seconds` become dead letters; at most `max_per_second` requests are sent.
    `count` is called with what becomes of each event, and with how long one that is delivered has waited.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        max_age_seconds: float,
        outbox: Outbox,
        clock: Clock,
        max_per_second: float | None = None,
        count: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.name = name
        self._sink = sink
        self._max_age_seconds = max_age_seconds
        self._outbox = outbox
        self._clock = clock
        self._count = count
        self._interval_seconds = 1 / max_per_second if max_per_second else 0.0
        self._send_at = -math.inf
        self._schedule = Schedule(name, outbox, max_batch=sink.max_batch)
        self._health = SinkHealth(name, clock)
        self._seen = 0  # the outbox's `changes` when it was last read
        self._retry_at = NOTHING_WAITS
        self._must_reload = False
        self._uncertain: set[int] = (
            set()
        )  # the numbers of events that the receiver may have, although a try failed
        self._draining = Stop()
        self._stop_when_drained = False
        self.dead_lettered = 0

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while not self._health.is_gone:
            report_progress()
            wait_seconds = self.step()
            if self._stop_when_drained and wait_seconds == NOTHING_WAITS:
                break
            if wait_seconds is not None:
                self._pause(wait_seconds)
        self._sink.close()
        if self._health.is_gone:
            self._draining.wait(None)

    def begin_drain(self) -> None:
        """Retry at once and often from now on: the process is about to stop."""
        self._draining.set()
        self._outbox.wake()

    def stop_when_drained(self) -> None:
        """End `run` once nothing waits: no event will come any more."""
        self._stop_when_drained = True
        self.begin_drain()

    def status(self) -> dict[str, Any]:
        """Return how the sink is, for the status file."""
        counts = [one.failure.count for one in list(self._schedule.failed.values())]
        failures = self._schedule.failures or max(counts, default=0)
        backlog, since = self._outbox.backlog(self.name)
        retry_at = self._clock.wall() - self._clock.monotonic() + self._retry_at
        return {
            "state": self._health.state(is_failing=failures > 0),
            "backlog": backlog,
            "oldest_waits_seconds": since and max(0.0, round(self._clock.steady() - since, 1)),
            "failures": failures,
            "next_retry_at": iso_utc(datetime.fromtimestamp(retry_at, UTC)) if retry_at < math.inf else None,
            **self._health.last,
        }

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        self._seen = self._outbox.changes
        self._schedule.read()
        if self._dead_letter_expired():
            return None
        pace, now = self._pace(), self._clock.monotonic()
        retry_at = self._retry_at = self._schedule.retry_at(pace)
        if self._schedule.hold and retry_at > now:
            return retry_at - now
        if events := self._schedule.next_events(pace, now):
            if self._send_at > now:  # the rate limit allows no request yet
                return self._send_at - now
            self._deliver(events)
            return None
        retry_at = self._retry_at = self._schedule.retry_at(pace)
        return max(0.0, retry_at - now)

    def _deliver(self, events: list[StoredEvent]) -> None:
        """Send events and note what became of them."""
        if self._must_reload:
            self._sink.reload()
            self._must_reload = False
        self._send_at = self._clock.monotonic() + self._interval_seconds
        try:
            self._sink.send(events)
        except DeliveryError as error:
            self._note_delivery(events[: error.delivered])
            self._note_error(error, events[error.delivered :])
        else:
            self._note_delivery(events)

    def _dead_letter_expired(self) -> bool:
        """Dead-letter an event that is next but too old; return whether there was one."""
        next_events = (*(one.event for one in self._schedule.failed.values()), *self._schedule.page[:1])
        oldest = self._clock.steady() - self._max_age_seconds
        expired = next((event for event in next_events if event.stored_at < oldest), None)
        if expired:
            self._count("expired")
            self._dead_letter(expired, EXPIRED, f"older than max_age_seconds = {self._max_age_seconds:g}")
        return expired is not None

    def _dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        self._acknowledge([event], dead=(reason, detail))
        self.dead_lettered += 1
        text = "sink %s: an event is dead-lettered as %s: %s"
        log.error(text, self.name, reason, detail, extra={"event": event.id})

    def _note_delivery(self, events: Sequence[StoredEvent]) -> None:
        if not events:
            return
        now = self._clock.steady()
        for event in events:
            self._count("delivered", max(0.0, now - event.stored_at))
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
            self._count("failed")
            self._note_failure(error, events)
        elif error.status == HTTPStatus.CONFLICT and self._may_have_arrived(events[0]):
            self._note_delivery(events[:1])
        else:
            self._count("rejected")
            self._note_answer()
            self._health.note_rejection(events[0], error)
            self._dead_letter(events[0], REJECTED, str(error))

    def _may_have_arrived(self, event: StoredEvent) -> bool:
        """Return whether an event was sent before, perhaps by an earlier process that was killed."""
        return event.seq in self._uncertain or event.seq <= self._outbox.earlier_seq

    def _note_failure(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        if not error.is_unreached:
            self._uncertain |= {event.seq for event in events}
        self._must_reload = isinstance(error, Misconfigured)
        share = random.random()  # noqa: S311 - it spreads load
        failure = Failure(error=error, at=self._clock.monotonic(), share=share)
        self._schedule.note_failure(failure, events, pace=self._pace())
        self._health.note_failure(error, self._schedule.failures)

    def _pace(self) -> Pace:
        is_urgent = False
        if self._schedule.hold or self._schedule.failed:
            since = self._clock.steady() - URGENT_AGE_SECONDS
            is_urgent = self._outbox.has_waiting(self.name, since=since, types=URGENT_TYPES)
        return Pace(
            limit_seconds=self._sink.retry_limit_seconds,
            is_urgent=is_urgent,
            is_untried=is_urgent and self._schedule.has_untried(),
            is_draining=bool(self._draining),
        )

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`; the stop of the process ends it early, and so do new events except at a rate limit."""
        if seconds == NOTHING_WAITS:
            with suppress(DeliveryError):  # the next event will show whether it matters
                self._sink.keep_alive()
        elif not self._schedule.hold and not self._schedule.failed:
            (Stop() if self._draining else self._draining).wait(seconds)
            return
        extend_deadline(IDLE_SECONDS)
        self._outbox.wait(self._seen, min(seconds, IDLE_SECONDS))


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
