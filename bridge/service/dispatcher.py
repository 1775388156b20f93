"""Deliver from the outbox to one sink: in order, until it has been taken, and holding up no other sink."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox, dead_letter
from bridge.runtime.clock import Clock, full_jitter
from bridge.runtime.instants import iso_utc
from bridge.runtime.threads import Stop, report_progress
from bridge.sinks.base import RETRY_BASE_SECONDS, Sink

log = logging.getLogger(__name__)

PAGE_EVENTS = 64
IDLE_SECONDS = 2.0
NOTHING_WAITS = math.inf
REPEAT_LOG_SECONDS = 600.0
LAST_RETRY_SECONDS = 0.5  # how often a failing sink is tried while the process stops

SinkState = Literal["ok", "rejecting", "retrying", "misconfigured", "gone"]


@dataclass
class _Health:
    """How a sink does; written by its thread, read by any."""

    state: SinkState = "ok"
    failures: int = 0
    last_success: datetime | None = None
    last_error: str = ""
    last_error_at: datetime | None = None


class Dispatcher:
    """Delivers to one sink. `run` is for a thread of its own; the rest may be called from any thread."""

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
    ) -> None:
        self.name = name
        self._sink = sink
        self._wanted = wanted
        self._max_age_seconds = max_age_seconds
        self._outbox = outbox
        self._clock = clock
        self._apart_seconds = 1 / max_per_second if max_per_second else 0.0
        self._send_at = -math.inf
        self._health = _Health()
        self._page: list[StoredEvent] = []
        self._generation = -1
        self._logged_at = -math.inf
        self._draining = Stop()
        self._stop_when_drained = False

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while self._health.state != "gone":
            report_progress()
            wait_seconds = self._step()
            if wait_seconds is None:
                continue
            if self._stop_when_drained and wait_seconds == NOTHING_WAITS:
                break
            self._pause(wait_seconds)
        self._sink.close()
        if self._health.state == "gone":
            self._draining.wait(None)

    def begin_drain(self) -> None:
        """Try at once and often from now on: the process is about to stop."""
        self._draining.set()
        self._outbox.wake()

    def stop_when_drained(self) -> None:
        """End `run` once nothing waits: no event will come any more."""
        self._stop_when_drained = True
        self.begin_drain()

    def status(self) -> dict[str, Any]:
        """Tell how the sink does, for the status file."""
        health = self._health
        backlog, since = self._outbox.backlog(self.name)
        return {
            "state": health.state,
            "backlog": backlog,
            "oldest_waits_seconds": None
            if since is None
            else max(0.0, round(self._clock.steady() - since, 1)),
            "failures": health.failures,
            "last_success_at": iso_utc(health.last_success) if health.last_success else None,
            "last_error": health.last_error or None,
            "last_error_at": iso_utc(health.last_error_at) if health.last_error_at else None,
        }

    # One step

    def _step(self) -> float | None:
        """Deal with the next batch; return how long to wait: None after success, else seconds or NOTHING_WAITS."""
        self._turn_page()
        if not self._page:
            wait_seconds = self._retry_dead_letters()
            return NOTHING_WAITS if wait_seconds is None else wait_seconds
        passed, batch, expired = self._next_batch()
        if batch:
            return self._early_seconds() or self._deliver(passed, batch)
        self._done(passed)
        if expired:
            self._dead_letter(expired, EXPIRED, f"older than max_age_seconds = {self._max_age_seconds:g}")
        return None

    def _turn_page(self) -> None:
        """Read on where the page is used up or out of date."""
        if not self._page or self._generation != self._outbox.generation:
            self._generation, self._page = self._outbox.pending(self.name, PAGE_EVENTS)

    def _next_batch(self) -> tuple[list[StoredEvent], list[StoredEvent], StoredEvent | None]:
        """Choose what to send: everything passed on the way, what is wanted of it, and an expired one next."""
        passed: list[StoredEvent] = []
        batch: list[StoredEvent] = []
        now = self._clock.steady()
        for event in self._page:
            if self._wanted.matches(event):
                if now - event.stored_at > self._max_age_seconds:
                    return passed, batch, event
                batch.append(event)
            passed.append(event)
            if len(batch) == self._sink.max_batch:
                break
        return passed, batch, None

    def _early_seconds(self) -> float:
        """Return how long to wait before the rate limit lets something be sent."""
        return max(0.0, self._send_at - self._clock.monotonic())

    def _send(self, events: Sequence[StoredEvent]) -> None:
        if self._health.state == "misconfigured":
            self._sink.reload()
        self._send_at = self._clock.monotonic() + self._apart_seconds
        self._sink.send(events)

    def _deliver(self, passed: list[StoredEvent], batch: list[StoredEvent]) -> float | None:
        try:
            self._send(batch)
        except DeliveryError as error:
            delivered = batch[: error.delivered]
            if delivered:
                self._done(passed[: passed.index(delivered[-1]) + 1])
            failed = batch[error.delivered]
            if isinstance(error, Rejected):
                self._done(self._page[: self._page.index(failed)])
                self._note_rejection(failed, error)
                self._dead_letter(failed, REJECTED, str(error))
                return None
            return self._note_failure(error)
        self._note_success()
        self._done(passed)
        return None

    def _done(self, events: Sequence[StoredEvent]) -> None:
        if events:
            self._outbox.acknowledge(self.name, self._generation, events)
            del self._page[: len(events)]

    def _dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        letter = dead_letter(self.name, event, reason, detail, self._clock.steady())
        self._outbox.acknowledge(self.name, self._generation, [event], dead_lettered=letter)
        del self._page[:1]
        log.error(
            "sink %s: an event is dead-lettered as %s: %s",
            self.name,
            reason,
            detail,
            extra={"event": event.id},
        )

    def _retry_dead_letters(self) -> float | None:
        """Send again what an operator asked for; return how long to wait before the rest, else None."""
        for number, event in self._outbox.retries(self.name, PAGE_EVENTS):
            if self._outbox.backlog(self.name)[0]:
                return 0.0  # news goes first
            if early_seconds := self._early_seconds():
                return early_seconds
            try:
                self._send([event])
            except Rejected as error:
                self._note_rejection(event, error)
                self._outbox.settle_retry(number, detail=str(error))
            except DeliveryError as error:
                return self._note_failure(error)
            else:
                self._note_success()
                self._outbox.settle_retry(number)
                log.info("sink %s: a dead letter is delivered", self.name, extra={"event": event.id})
        return None

    def _pause(self, seconds: float) -> None:
        """Wait for events, or for `seconds` after a failure; both end early when the process stops."""
        if seconds == NOTHING_WAITS:
            self._rest()
            self._outbox.wait(self.name, IDLE_SECONDS)
        elif self._draining:
            Stop().wait(min(seconds, LAST_RETRY_SECONDS))
        else:
            self._draining.wait(seconds)

    def _rest(self) -> None:
        try:
            self._sink.keep_alive()
        except DeliveryError as error:  # nothing waits: the next event will show whether it matters
            log.debug("sink %s: %s", self.name, error)

    # How it goes

    def _note_success(self) -> None:
        self._note_answer()
        self._health.last_success = self._clock.now()

    def _note_rejection(self, event: StoredEvent, error: Rejected) -> None:
        """Remember the error; the receiver is there all the same."""
        self._note_answer()
        self._health.state = "rejecting"
        self._health.last_error, self._health.last_error_at = f"{event.id}: {error}", self._clock.now()

    def _note_answer(self) -> None:
        health = self._health
        if health.failures:
            log.info("sink %s: delivers again", self.name, extra={"failures": health.failures})
            self._outbox.failing(self.name, since=None)
        health.state, health.failures = "ok", 0

    def _note_failure(self, error: DeliveryError) -> float:
        """Say what is wrong, once and then rarely; return how long to wait."""
        health = self._health
        state = _state_of(error)
        if health.failures == 0:
            self._outbox.failing(self.name, since=self._clock.steady())
        health.failures += 1
        now = self._clock.monotonic()
        if state != health.state or now - self._logged_at >= REPEAT_LOG_SECONDS:
            self._logged_at = now
            _LOUD[state](
                f"sink %s: {_ADVICE[state]}: %s", self.name, error, extra={"failures": health.failures}
            )
        health.state, health.last_error, health.last_error_at = state, str(error), self._clock.now()
        if error.retry_after_seconds is not None:
            return max(RETRY_BASE_SECONDS, error.retry_after_seconds)
        return full_jitter(
            health.failures - 1, base_seconds=RETRY_BASE_SECONDS, limit_seconds=self._sink.retry_limit_seconds
        )


_LOUD = {"retrying": log.warning, "misconfigured": log.error, "gone": log.error}
_ADVICE = {
    "retrying": "not delivered, sending again",
    "misconfigured": "its address or credentials seem to be wrong; nothing is lost, mend them, secrets are read anew",
    "gone": "the receiver wants no more events (410 Gone); stopped until this process is restarted",
}


def _state_of(error: DeliveryError) -> SinkState:
    if isinstance(error, Gone):
        return "gone"
    return "misconfigured" if isinstance(error, Misconfigured) else "retrying"
