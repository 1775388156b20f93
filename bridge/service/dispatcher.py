"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bridge.errors import DeliveryError, Misconfigured, Rejected
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox, dead_letter
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.service.backlog import PAGE_EVENTS, Backlog
from bridge.service.measured import NO_METER, NoMeter
from bridge.service.retries import URGENT_AGE_SECONDS, Failure, Pace, is_urgent_type
from bridge.service.schedule import NOTHING_WAITS, Schedule
from bridge.service.sink_health import SinkHealth
from bridge.sinks.base import Sink
from bridge.sinks.responses import CONFLICT

if TYPE_CHECKING:
    from bridge.service.metrics import Meter

log = logging.getLogger(__name__)

IDLE_SECONDS = 10.0  # new events end the wait
LONG_WAIT_SECONDS = 600.0  # a longer one is logged


class Dispatcher:
    """Delivers to one sink. `run` is for a thread of its own; the rest may be called from any thread.

    Args:
        name: the sink's name in the configuration.
        sink: the receiver.
        wanted: which events the sink takes.
        max_age_seconds: older events become dead letters.
        outbox: where the events come from.
        clock: the time.
        max_per_second: how many requests are sent in a second at most; None for no limit.
        meter: counts what becomes of the events.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        wanted: Filter,
        max_age_seconds: float,
        outbox: Outbox,
        clock: Clock,
        max_per_second: float | None = None,
        meter: Meter | NoMeter = NO_METER,
    ) -> None:
        self.name = name
        self._meter = meter
        self._sink = sink
        self._wanted = wanted
        self._max_age_seconds = max_age_seconds
        self._outbox = outbox
        self._clock = clock
        self._interval_seconds = 1 / max_per_second if max_per_second else 0.0
        self._send_at = -math.inf
        self._backlog = Backlog(name, wanted=wanted, outbox=outbox)
        self._schedule = Schedule(self._backlog, max_batch=sink.max_batch)
        self._health = SinkHealth(name, clock)
        self._retry_at = NOTHING_WAITS
        self._must_reload = False
        self.dead_lettered = 0
        self._draining = Stop()
        self._stop_when_drained = False

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while not self._health.is_gone:
            report_progress()
            wait_seconds = self.step()
            if wait_seconds is None:
                continue
            if self._stop_when_drained and wait_seconds == NOTHING_WAITS:
                break
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
        health, failed = self._health, self._schedule.failed
        backlog, since = self._outbox.backlog(self.name)
        failures = self._schedule.failures or max((one.failure.count for one in failed), default=0)
        age_seconds = None if since is None else max(0.0, round(self._clock.steady() - since, 1))
        return {
            "state": health.state(is_failing=failures > 0),
            "backlog": backlog,
            "oldest_waits_seconds": age_seconds,
            "failures": failures,
            "next_retry_at": self._wall_time(self._retry_at) if self._retry_at < math.inf else None,
            "last_success_at": iso_utc(health.last_success) if health.last_success else None,
            "last_error": health.last_error or None,
            "last_error_at": iso_utc(health.last_error_at) if health.last_error_at else None,
        }

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        self._backlog.read()
        if self._dead_letter_expired():
            return None
        pace, now = self._pace(), self._clock.monotonic()
        retry_at = self._retry_at = self._schedule.retry_at(pace)
        if self._schedule.hold and retry_at > now:
            return retry_at - now
        if events := self._schedule.next_events(pace, now):
            return self._early_seconds() or self._deliver(events)
        # the wait of the sink as a whole is over
        retry_at = self._retry_at = self._schedule.retry_failed_at(pace)
        return self._retry_dead_letters(until=retry_at)

    # Delivery

    def _deliver(self, events: list[StoredEvent]) -> float | None:
        """Send events and note what became of them; there is no need to wait."""
        try:
            self._send(events)
        except DeliveryError as error:
            if error.delivered:
                self._note_delivery(events[: error.delivered])
            rest = events[error.delivered :]
            if not isinstance(error, Rejected):
                self._note_failure(error, rest)
            elif error.status == CONFLICT and self._outbox.is_from_earlier(rest[0]):
                self._note_delivery(rest[:1])  # an earlier process sent it and was killed
            else:
                self._note_rejection(rest[0], error)
                self._dead_letter(rest[0], REJECTED, str(error))
        else:
            self._note_delivery(events)
        return None

    def _send(self, events: Sequence[StoredEvent]) -> None:
        if self._must_reload:
            self._sink.reload()
            self._must_reload = False
        self._send_at = self._clock.monotonic() + self._interval_seconds
        try:
            self._sink.send(events)
        except DeliveryError as error:
            self._count_delivered(events[: error.delivered])
            self._meter.sent(self.name, "rejected" if isinstance(error, Rejected) else "failed")
            raise
        self._count_delivered(events)

    def _count_delivered(self, events: Sequence[StoredEvent]) -> None:
        now = self._clock.steady()
        for event in events:
            self._meter.sent(self.name, "delivered")
            self._meter.delivered(self.name, max(0.0, now - event.stored_at))

    def _retry_dead_letters(self, *, until: float) -> float | None:
        """Send again what an operator asked for; return how long to wait, at most until then."""
        for number, event in self._outbox.retries(self.name, PAGE_EVENTS):
            if self._backlog.read():
                return None  # new events go first
            if early_seconds := self._early_seconds():
                return early_seconds
            try:
                self._send([event])
            except Rejected as error:
                self._note_rejection(event, error)
                self._outbox.settle_retry(number, detail=str(error))
            except DeliveryError as error:
                self._note_failure(error, [])
                return None
            else:
                self._note_delivery([])
                self._outbox.settle_retry(number)
                log.info("sink %s: a dead letter is delivered", self.name, extra={"event": event.id})
        return max(0.0, until - self._clock.monotonic())

    def _dead_letter_expired(self) -> bool:
        """Dead-letter an event that is next but too old; return whether there was one."""
        next_events = (*(one.event for one in self._schedule.failed), *self._backlog.page[:1])
        oldest = self._clock.steady() - self._max_age_seconds
        expired = next((event for event in next_events if event.stored_at < oldest), None)
        if expired:
            self._meter.sent(self.name, "expired")
            self._dead_letter(expired, EXPIRED, f"older than max_age_seconds = {self._max_age_seconds:g}")
        return expired is not None

    def _dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        dead = dead_letter(self.name, event, reason, detail, self._clock.steady())
        self._backlog.acknowledge([event], dead_lettered=dead)
        self.dead_lettered += 1
        log.error(
            "sink %s: an event is dead-lettered as %s: %s",
            self.name,
            reason,
            detail,
            extra={"event": event.id},
        )

    # What became of it

    def _note_delivery(self, events: Sequence[StoredEvent]) -> None:
        self._backlog.acknowledge(events)
        self._health.note_success()
        self._note_answer()

    def _note_rejection(self, event: StoredEvent, error: Rejected) -> None:
        self._note_answer()
        self._health.note_rejection(event, error)

    def _note_answer(self) -> None:
        if self._schedule.failures:
            self._health.note_recovery(self._schedule.failures)
        self._schedule.note_accepted()
        self._outbox.failing(self.name, since=self._schedule.failing_since)

    def _note_failure(self, error: DeliveryError, events: Sequence[StoredEvent]) -> None:
        self._must_reload = isinstance(error, Misconfigured)
        share = random.random()  # noqa: S311 - it spreads load
        failure = Failure(error=error, at=self._clock.monotonic(), share=share)
        self._schedule.note_failure(failure, events, pace=self._pace(), since=self._clock.steady())
        self._health.note_failure(error, self._schedule.failures)
        self._outbox.failing(self.name, since=self._schedule.failing_since)
        retry_at = self._schedule.retry_at(self._pace())
        if LONG_WAIT_SECONDS < retry_at - self._clock.monotonic() < math.inf:
            log.warning("sink %s: the next try is at %s", self.name, self._wall_time(retry_at))

    # Waits

    def _pace(self) -> Pace:
        is_urgent = False
        if self._schedule.hold or self._schedule.failed:
            since = self._clock.steady() - URGENT_AGE_SECONDS
            is_urgent = self._outbox.has_recent(
                self.name, since, lambda event: is_urgent_type(event) and self._wanted.matches(event)
            )
        return Pace(
            limit_seconds=self._sink.retry_limit_seconds,
            is_urgent=is_urgent,
            is_untried=is_urgent and self._schedule.has_untried(),
            is_draining=bool(self._draining),
        )

    def _early_seconds(self) -> float:
        """Return how long to wait until the rate limit allows a request."""
        return max(0.0, self._send_at - self._clock.monotonic())

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`; the stop of the process ends it early, and so do new events except at a rate limit."""
        if seconds == NOTHING_WAITS:
            self._keep_alive()
        elif not self._schedule.hold and not self._schedule.failed:
            (Stop() if self._draining else self._draining).wait(seconds)
            return
        extend_deadline(IDLE_SECONDS)
        self._outbox.wait(self.name, min(seconds, IDLE_SECONDS))

    def _keep_alive(self) -> None:
        try:
            self._sink.keep_alive()
        except DeliveryError as error:  # the next event will show whether it matters
            log.debug("sink %s: %s", self.name, error)

    def _wall_time(self, monotonic: float) -> str:
        return iso_utc(self._clock.now() + timedelta(seconds=monotonic - self._clock.monotonic()))
