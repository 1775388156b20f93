"""Deliver from the outbox to one sink: in order for each subject, until accepted, independent of other sinks."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any, Literal

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.events.ordering import order_key
from bridge.outbox.outbox import EXPIRED, REJECTED, Outbox, dead_letter
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.repeat_limit import RepeatLimit
from bridge.runtime.threads import Stop, extend_deadline, report_progress
from bridge.service.retries import TOO_MANY_REQUESTS, URGENT_AGE_SECONDS, Failure, Pace, is_urgent_type
from bridge.sinks.base import Sink
from bridge.sinks.responses import CONFLICT

log = logging.getLogger(__name__)

PAGE_EVENTS = 64
IDLE_SECONDS = 2.0
NOTHING_WAITS = math.inf
LONG_WAIT_SECONDS = 600.0  # a longer one is logged
MAX_BLOCKED = 1000  # events that later ones can wait behind
# How often an event fails in a row before another one is tried: more often without a status, because then it is more
# likely that the receiver is unavailable for all.
PROBE_FAILURES = 4
PROBE_FAILURES_UNANSWERED = 8

SinkState = Literal["ok", "rejecting", "retrying", "misconfigured", "gone"]


@dataclass
class _Health:
    """How a sink is; written by its thread, read by any. `failures` are in a row, `retry_at` is monotonic."""

    state: SinkState = "ok"
    failures: int = 0
    retry_at: float = math.inf
    last_success: datetime | None = None
    last_error: str = ""
    last_error_at: datetime | None = None


@dataclass(kw_only=True)
class _Blocked:
    """An event that failed; later events with its order key wait behind it.

    `accepted` is how many events the receiver had accepted when this one failed. `is_isolated`: it accepted others
    between two failures, so that the event is the cause.
    """

    event: StoredEvent
    failure: Failure
    since: float
    accepted: int
    is_isolated: bool = False

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again; an event that makes the receiver hang must not do so every other second."""
        if self.is_isolated and not self.failure.is_answered:
            pace = replace(pace, is_urgent=False)
        return self.failure.retry_at(pace)


class Dispatcher:
    """Delivers to one sink. `run` is for a thread of its own; the rest may be called from any thread.

    After a failure the sink as a whole waits, and the same event is tried again, so that an outage does not change
    the order. If it fails several times, an event with another order key is tried as a probe. An event that fails
    again while others are accepted is isolated: it is retried on its own, and only later events with its key wait.

    Args:
        name: the sink's name in the configuration.
        sink: the receiver.
        wanted: which events the sink takes.
        max_age_seconds: older events become dead letters.
        outbox: where the events come from.
        clock: the time.
        max_per_second: how many requests are sent in a second at most; None for no limit.
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
    ) -> None:
        self.name = name
        self._sink = sink
        self._wanted = wanted
        self._max_age_seconds = max_age_seconds
        self._outbox = outbox
        self._clock = clock
        self._interval_seconds = 1 / max_per_second if max_per_second else 0.0
        self._send_at = -math.inf
        self._health = _Health()
        self._log_limit = RepeatLimit(clock)
        self._generation = -1
        self._blocked: dict[str, _Blocked] = {}
        self._rewind()
        self._hold: Failure | None = None  # the sink as a whole waits
        self._failing_since: float | None = None
        self._accepted = 0
        self._batch_limit = sink.max_batch
        self._is_turn_of_isolated = False
        self._probe_next = False
        self._must_reload = False
        self._draining = Stop()
        self._stop_when_drained = False

    def run(self) -> None:
        """Deliver until `stop_when_drained`, and then what is left; a sink that is gone only waits for that."""
        while self._health.state != "gone":
            report_progress()
            wait_seconds = self.step()
            if wait_seconds is None:
                continue
            if self._stop_when_drained and wait_seconds == NOTHING_WAITS:
                break
            self._pause(wait_seconds)
        self._sink.close()
        if self._health.state == "gone":
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
        health = self._health
        backlog, since = self._outbox.backlog(self.name)
        blocked = list(self._blocked.values())
        is_well = health.state in ("retrying", "misconfigured") and not blocked and not health.failures
        age_seconds = None if since is None else max(0.0, round(self._clock.steady() - since, 1))
        return {
            "state": "ok" if is_well else health.state,
            "backlog": backlog,
            "oldest_waits_seconds": age_seconds,
            "failures": health.failures or max((one.failure.count for one in blocked), default=0),
            "next_retry_at": iso_utc(self._wall(health.retry_at)) if health.retry_at < math.inf else None,
            "last_success_at": iso_utc(health.last_success) if health.last_success else None,
            "last_error": health.last_error or None,
            "last_error_at": iso_utc(health.last_error_at) if health.last_error_at else None,
        }

    # One step

    def step(self) -> float | None:
        """Do what is due; return how long to wait: None for not at all, NOTHING_WAITS if there is nothing to do."""
        has_new = self._read()
        if self._dead_letter_expired():
            return None
        pace = self._pace()
        retry_at = self._health.retry_at = self._next_retry(pace)
        if self._hold and retry_at > self._clock.monotonic():
            return retry_at - self._clock.monotonic()
        if events := self._next_events(pace, has_new=has_new):
            return self._early_seconds() or self._deliver(events)
        if not self._blocked:
            retry_at = self._health.retry_at = NOTHING_WAITS
        return self._retry_dead_letters(until=retry_at)

    def _rewind(self) -> None:
        """Read again from the oldest event."""
        self._page: list[StoredEvent] = []
        self._unwanted: list[StoredEvent] = []
        self._read_to = 0

    def _read(self) -> bool:
        """Read on until there is a new event to send; return whether there is one."""
        if self._generation != self._outbox.generation:  # events have got other numbers or dates
            self._blocked.clear()
            self._rewind()
        while not self._page:
            generation, events = self._outbox.pending(self.name, PAGE_EVENTS, after=self._read_to)
            if self._read_to and generation != self._generation:
                return False  # the next step reads again
            self._generation = generation
            if not events:
                self._acknowledge([])
                return False
            self._read_to = events[-1].seq
            for event in events:
                if not self._wanted.matches(event):
                    self._unwanted.append(event)
                elif not self._is_behind_blocked(event):
                    self._page.append(event)
            if not self._page:
                self._acknowledge([])
        return True

    def _is_behind_blocked(self, event: StoredEvent) -> bool:
        return bool(self._blocked) and order_key(event.envelope) in self._blocked

    def _next_events(self, pace: Pace, *, has_new: bool) -> list[StoredEvent]:
        """Choose what to send: an event that failed and is due, the oldest first, or else a batch of new events.

        Isolated events take turns with new ones. A probe is another event than the one that has just failed.
        """
        now = self._clock.monotonic()
        due = [one for one in self._blocked.values() if self._is_due(one, pace, now)]
        suspects = [one.event for one in due if not one.is_isolated]
        isolated = [one.event for one in due if one.is_isolated]
        if self._probe_next:
            if probe := self._choose_probe(pace):
                return [probe]
            self._probe_next = False
        if suspects:
            return [min(suspects, key=lambda event: event.seq)]
        if isolated and (self._is_turn_of_isolated or not has_new):
            self._is_turn_of_isolated = False
            return isolated[:1]
        self._is_turn_of_isolated = True
        return list(takewhile(lambda event: not self._is_expired(event), self._page[: self._batch_limit]))

    def _is_due(self, blocked: _Blocked, pace: Pace, now: float) -> bool:
        if self._hold and not blocked.is_isolated:
            return True  # the wait of the whole sink is over
        return blocked.retry_at(pace) <= now

    def _choose_probe(self, pace: Pace) -> StoredEvent | None:
        """Choose another event than the oldest that failed: an urgent or new one, or the one that failed first."""
        if pace.is_urgent and (urgent := next(filter(is_urgent_type, self._page), None)):
            key = order_key(urgent.envelope)
            return next(event for event in self._page if order_key(event.envelope) == key)
        if self._page:
            return self._page[0]
        suspects = [one for one in self._blocked.values() if not one.is_isolated]
        others = sorted(suspects, key=lambda one: one.event.seq)[1:]
        return min(others, key=lambda one: one.failure.at).event if others else None

    def _is_expired(self, event: StoredEvent) -> bool:
        return self._clock.steady() - event.stored_at > self._max_age_seconds

    def _dead_letter_expired(self) -> bool:
        """Dead-letter an event that is next but too old; return whether there was one."""
        next_events = (*(one.event for one in self._blocked.values()), *self._page[:1])
        expired = next(filter(self._is_expired, next_events), None)
        if expired:
            self._dead_letter(expired, EXPIRED, f"older than max_age_seconds = {self._max_age_seconds:g}")
        return expired is not None

    def _early_seconds(self) -> float:
        """Return how long to wait until the rate limit allows a request."""
        return max(0.0, self._send_at - self._clock.monotonic())

    # Delivery

    def _send(self, events: Sequence[StoredEvent]) -> None:
        if self._must_reload:
            self._sink.reload()
            self._must_reload = False
        self._send_at = self._clock.monotonic() + self._interval_seconds
        self._sink.send(events)

    def _deliver(self, events: list[StoredEvent]) -> float | None:
        """Send events and note what became of them; there is no need to wait."""
        try:
            self._send(events)
        except DeliveryError as error:
            if error.delivered:
                self._acknowledge(events[: error.delivered])
                self._note_success()
            failed = events[error.delivered]
            if isinstance(error, Rejected) and self._was_delivered(failed, error):
                self._acknowledge([failed])
                self._note_success()
            elif isinstance(error, Rejected):
                self._note_rejection(failed, error)
                self._dead_letter(failed, REJECTED, str(error))
            else:
                self._note_failure(error, failed if len(events) == 1 else None)
        else:
            self._acknowledge(events)
            self._note_success()
        return None

    def _was_delivered(self, event: StoredEvent, error: Rejected) -> bool:
        """Return whether the receiver has the event already, from an earlier process that was killed."""
        return error.status == CONFLICT and self._outbox.is_from_earlier(event)

    def _acknowledge(self, events: Sequence[StoredEvent]) -> None:
        """Acknowledge events that are done, and those that are not wanted."""
        done = [*self._unwanted, *events]
        if done:
            self._outbox.acknowledge(self.name, self._generation, done)
        self._unwanted = []
        self._forget(events)

    def _dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        dead = dead_letter(self.name, event, reason, detail, self._clock.steady())
        self._outbox.acknowledge(self.name, self._generation, [event], dead_lettered=dead)
        self._forget([event])
        log.error(
            "sink %s: an event is dead-lettered as %s: %s",
            self.name,
            reason,
            detail,
            extra={"event": event.id},
        )

    def _forget(self, events: Sequence[StoredEvent]) -> None:
        """Take events out of what waits; those behind one that was blocked are read again."""
        done = {event.seq for event in events}
        self._page = [event for event in self._page if event.seq not in done]
        for key, blocked in list(self._blocked.items()):
            if blocked.event.seq in done:
                del self._blocked[key]
                self._rewind()

    def _retry_dead_letters(self, *, until: float) -> float | None:
        """Send again what an operator asked for; return how long to wait, at most until then."""
        for number, event in self._outbox.retries(self.name, PAGE_EVENTS):
            if self._read():
                return None  # new events go first
            if early_seconds := self._early_seconds():
                return early_seconds
            try:
                self._send([event])
            except Rejected as error:
                self._note_rejection(event, error)
                self._outbox.settle_retry(number, detail=str(error))
            except DeliveryError as error:
                self._note_failure(error, None)
                return None
            else:
                self._note_success()
                self._outbox.settle_retry(number)
                log.info("sink %s: a dead letter is delivered", self.name, extra={"event": event.id})
        return max(0.0, until - self._clock.monotonic())

    # Waits

    def _pace(self) -> Pace:
        is_urgent = False
        if self._hold or self._blocked:
            since = self._clock.steady() - URGENT_AGE_SECONDS
            is_urgent = self._outbox.has_recent(self.name, since, self._is_urgent)
        return Pace(
            limit_seconds=self._sink.retry_limit_seconds,
            is_urgent=is_urgent,
            is_draining=bool(self._draining),
        )

    def _is_urgent(self, event: StoredEvent) -> bool:
        return is_urgent_type(event) and self._wanted.matches(event)

    def _next_retry(self, pace: Pace) -> float:
        """Return when the sink, or else the first blocked event, is tried again; NOTHING_WAITS if all is well."""
        if self._hold:
            return self._hold.retry_at(pace)
        return min((one.retry_at(pace) for one in self._blocked.values()), default=NOTHING_WAITS)

    def _pause(self, seconds: float) -> None:
        """Wait for `seconds`; the stop of the process ends it early, and so do new events except at a rate limit."""
        if seconds == NOTHING_WAITS:
            self._keep_alive()
        elif not self._hold and not self._blocked:
            (Stop() if self._draining else self._draining).wait(seconds)
            return
        extend_deadline(IDLE_SECONDS)
        self._outbox.wait(self.name, min(seconds, IDLE_SECONDS))

    def _keep_alive(self) -> None:
        try:
            self._sink.keep_alive()
        except DeliveryError as error:  # the next event will show whether it matters
            log.debug("sink %s: %s", self.name, error)

    def _wall(self, monotonic: float) -> datetime:
        return self._clock.now() + timedelta(seconds=monotonic - self._clock.monotonic())

    # Health

    def _note_success(self) -> None:
        self._note_answer()
        self._health.last_success = self._clock.now()

    def _note_rejection(self, event: StoredEvent, error: Rejected) -> None:
        """Remember the error; the receiver answers all the same."""
        self._note_answer()
        self._health.state = "rejecting"
        self._health.last_error, self._health.last_error_at = f"{event.id}: {error}", self._clock.now()

    def _note_answer(self) -> None:
        """Note that the receiver accepts events; what failed while it did not is due now."""
        health = self._health
        if health.failures:
            log.info("sink %s: delivering again", self.name, extra={"failures": health.failures})
            self._log_limit.reset()
        if health.failures > 1:
            for blocked in self._blocked.values():
                if not blocked.is_isolated:
                    blocked.failure = replace(blocked.failure, share=0.0, retry_after_seconds=None)
        self._note_failing(min((blocked.since for blocked in self._blocked.values()), default=None))
        self._hold = None
        self._probe_next = False
        self._accepted += 1
        self._batch_limit = min(self._sink.max_batch, 2 * self._batch_limit)
        health.failures = 0
        if not self._blocked:
            health.state = "ok"

    def _note_failing(self, since: float | None) -> None:
        """Record since when deliveries fail: the outbox drops the events of the sink that fails longest."""
        if since != self._failing_since:
            self._failing_since = since
            self._outbox.failing(self.name, since=since)

    def _note_failure(self, error: DeliveryError, event: StoredEvent | None) -> None:
        """Log what is wrong, once and then rarely, and decide what waits: the event, the sink or both.

        Args:
            error: what the sink raised.
            event: what it is about; None if that is not known, because a batch or a dead letter failed.
        """
        health = self._health
        self._note_failing(self._failing_since or self._clock.steady())
        self._must_reload = isinstance(error, Misconfigured)
        health.state, health.last_error, health.last_error_at = (
            _state_of(error),
            str(error),
            self._clock.now(),
        )
        if self._log_limit.is_due(health.state):
            _LOG[health.state](
                f"sink %s: {_ADVICE[health.state]}: %s",
                self.name,
                error,
                extra={"failures": health.failures + 1},
            )
        if event is None:
            self._batch_limit = 1
        blocked = self._block(event, error) if event and _may_be_caused_by_event(error) else None
        if not blocked or not blocked.is_isolated:
            self._fail_sink(error, blocked)
        self._log_long_wait()

    def _fail_sink(self, error: DeliveryError, blocked: _Blocked | None) -> None:
        """Let the sink as a whole wait, unless another event is to be tried at once.

        Args:
            error: what the sink raised.
            blocked: the event that failed, if it may be the cause.
        """
        pace = self._pace()
        was_probe, self._probe_next = self._probe_next, False
        if not was_probe:
            self._health.failures += 1
            self._probe_next = _needs_probe(blocked, pace) and self._choose_probe(pace) is not None
        failure = self._failure(error, self._health.failures)
        if not self._probe_next or failure.must_wait(pace):
            self._hold = failure

    def _block(self, event: StoredEvent, error: DeliveryError) -> _Blocked | None:
        """Let later events with the same order key wait behind an event that failed; None if too many are blocked."""
        key = order_key(event.envelope)
        blocked = self._blocked.get(key)
        if blocked:
            if self._accepted > blocked.accepted and not blocked.is_isolated:
                blocked.is_isolated = True
                log.warning(
                    "sink %s: an event keeps failing while others are accepted; it is retried on its own",
                    self.name,
                    extra={"event": event.id},
                )
            blocked.failure = self._failure(error, blocked.failure.count + 1)
            blocked.accepted = self._accepted
        elif len(self._blocked) < MAX_BLOCKED:
            blocked = self._blocked[key] = _Blocked(
                event=event,
                failure=self._failure(error, 1),
                since=self._clock.steady(),
                accepted=self._accepted,
            )
            self._page = [other for other in self._page if order_key(other.envelope) != key]
        return blocked

    def _failure(self, error: DeliveryError, count: int) -> Failure:
        share = random.random()  # noqa: S311 - it spreads load
        return Failure.of(error, count=count, at=self._clock.monotonic(), share=share)

    def _log_long_wait(self) -> None:
        retry_at = self._next_retry(self._pace())
        if LONG_WAIT_SECONDS < retry_at - self._clock.monotonic() < math.inf:
            log.warning("sink %s: the next try is at %s", self.name, iso_utc(self._wall(retry_at)))


_LOG = {"retrying": log.warning, "misconfigured": log.error, "gone": log.error}
_ADVICE = {
    "retrying": "not delivered, retrying",
    "misconfigured": (
        "its address or credentials seem to be wrong; nothing is lost: fix the URL or the credentials; "
        "secret files are read again on every retry"
    ),
    "gone": "the receiver wants no more events (410 Gone); stopped until this process is restarted",
}


def _state_of(error: DeliveryError) -> SinkState:
    if isinstance(error, Gone):
        return "gone"
    return "misconfigured" if isinstance(error, Misconfigured) else "retrying"


def _may_be_caused_by_event(error: DeliveryError) -> bool:
    """Return whether another event may be accepted: the receiver got this one, and did not ask everybody to wait."""
    return not error.is_unreached and error.status != TOO_MANY_REQUESTS


def _needs_probe(blocked: _Blocked | None, pace: Pace) -> bool:
    """Return whether another event is to be tried; if the receiver asks to wait, later than otherwise."""
    if blocked is None:
        return False
    failures = PROBE_FAILURES if blocked.failure.is_answered else PROBE_FAILURES_UNANSWERED
    return blocked.failure.count >= failures * (2 if blocked.failure.must_wait(pace) else 1)
