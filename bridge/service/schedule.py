"""What one sink is sent next: an event that keeps failing holds back only those with its order key."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bridge.events.model import StoredEvent
from bridge.events.ordering import order_key
from bridge.service.backlog import Backlog
from bridge.service.retries import FailedEvent, Failure, Pace, is_urgent_type

log = logging.getLogger(__name__)

NOTHING_WAITS = math.inf
MAX_FAILED = 1000  # after so many different ones, no further event is tried during an outage
TRIES = 2  # different events that are tried before the sink as a whole waits
# So many different events fail only while the receiver is unavailable for all.
MANY_FAILED = 8


class Schedule:
    """Chooses what is sent next, and decides after a failure what waits; for the sink's thread.

    After a failure another event is tried at once. If that fails, too, the sink as a whole waits, and then the oldest
    event comes first, so that an outage hardly changes the order. An event that fails again while others are accepted
    is isolated: it is retried on its own, and only later events with its order key wait.

    Args:
        backlog: what waits for the sink.
        max_batch: how many events the sink takes at most.

    Attributes:
        hold: the failure after which the sink as a whole waits; None while it does not.
        failures: how often in a row the sink as a whole failed.
        failing_since: when the oldest failure was (steady seconds); None if nothing fails.
    """

    def __init__(self, backlog: Backlog, *, max_batch: int) -> None:
        self._backlog = backlog
        self._max_batch = self._batch_limit = max_batch
        self._tried: set[str] = set()  # order keys that failed since the last wait
        self._is_turn_of_isolated = False
        self.hold: Failure | None = None
        self.failures = 0
        self.failing_since: float | None = None

    @property
    def failed(self) -> list[FailedEvent]:
        """What failed and is tried again."""
        return list(self._backlog.failed.values())

    def has_untried(self) -> bool:
        """Return whether a notice waits that may be accepted although other events are not."""
        return len(self._suspects()) < MANY_FAILED and any(map(is_urgent_type, self._backlog.page))

    def retry_at(self, pace: Pace) -> float:
        """Return when the sink, or else the first failed event, is tried again; NOTHING_WAITS if all is well."""
        if self.hold:
            return self.hold.retry_at(pace)
        return self.retry_failed_at(pace)

    def retry_failed_at(self, pace: Pace) -> float:
        """Return when the first failed event is tried again; NOTHING_WAITS if there is none."""
        return min((one.retry_at(pace) for one in self.failed), default=NOTHING_WAITS)

    def next_events(self, pace: Pace, now: float) -> list[StoredEvent]:
        """Choose what to send now; nothing if no event is due.

        Args:
            pace: what limits the waits.
            now: the time; a wait of the sink as a whole is over.
        """
        if self.hold or self._tried:
            if probe := self._probe(pace):
                return [probe]
            self._tried.clear()
        due = [one for one in self.failed if one.retry_at(pace) <= now]
        if suspects := [one.event for one in due if not one.is_isolated]:
            return [min(suspects, key=lambda event: event.seq)]
        if due and (self._is_turn_of_isolated or not self._backlog.page):
            return [due[0].event]
        return self._backlog.page[: self._batch_limit]

    def _suspects(self) -> list[FailedEvent]:
        """Return what failed, perhaps because the receiver is unavailable for all."""
        return [one for one in self.failed if not one.is_isolated]

    def _probe(self, pace: Pace) -> StoredEvent | None:
        """Choose an event whose order key has not failed since the last wait."""
        candidates = self._candidates(pace)
        return next((event for event in candidates if order_key(event.envelope) not in self._tried), None)

    def _candidates(self, pace: Pace) -> Iterator[StoredEvent]:
        """Name what may be tried while the sink fails: a new notice, the oldest event, a new one, the others."""
        suspects = sorted(self._suspects(), key=lambda one: one.event.seq)
        page = self._backlog.page
        # Without an answer all may fail: only a second try goes to a new notice, so that an outage keeps the order.
        may_pass = bool(self._tried) or (self.hold is not None and self.hold.is_answered)
        if pace.is_urgent and may_pass and 0 < len(suspects) < MANY_FAILED:
            first: dict[str, StoredEvent] = {}
            for event in page:
                key = order_key(event.envelope)
                first.setdefault(key, event)
                if is_urgent_type(event):
                    yield first[key]
        yield from (one.event for one in suspects[:1])
        yield from page[: len(suspects) < MAX_FAILED]
        yield from (one.event for one in sorted(suspects, key=lambda one: one.failure.at))

    def note_accepted(self) -> None:
        """Note that the receiver accepts events; what failed while it did not is due now."""
        for one in self.failed:
            one.is_passed = True
        self.hold = None
        self.failures = 0
        self._tried.clear()
        self._is_turn_of_isolated = True
        self._batch_limit = min(self._max_batch, 2 * self._batch_limit)
        self.failing_since = min((one.since for one in self.failed), default=None)

    def note_failure(
        self, failure: Failure, events: Sequence[StoredEvent], *, pace: Pace, since: float
    ) -> None:
        """Decide what waits after a failure: an event, the sink or both.

        Args:
            failure: what happened.
            events: what failed; nothing if it was a dead letter. In a batch, any event may be the cause.
            pace: what limits the waits.
            since: now, in steady seconds.
        """
        self.failing_since = self.failing_since or since
        failed = None
        if len(events) > 1:
            self._batch_limit = 1
            if failure.is_answered and failure.may_be_caused_by_event and not failure.must_wait(pace):
                return  # the first of them is tried alone
        elif events and failure.may_be_caused_by_event:
            failed = self._note_event(failure, events[0], since)
        if failed and failed.is_isolated:
            self._is_turn_of_isolated = False
        else:
            self._fail(failure, failed, pace)

    def _note_event(self, failure: Failure, event: StoredEvent, since: float) -> FailedEvent:
        failed = self._backlog.failed.get(order_key(event.envelope))
        if failed is None:
            failed = FailedEvent(event=event, failure=failure, since=since)
            self._backlog.add_failed(failed)
            return failed
        if failed.is_passed and not failed.is_isolated:
            failed.is_isolated = True
            log.warning(
                "sink %s: an event keeps failing while others are accepted; it is retried on its own",
                self._backlog.sink,
                extra={"event": event.id},
            )
        failed.failure = replace(failure, count=failed.failure.count + 1)
        return failed

    def _fail(self, failure: Failure, failed: FailedEvent | None, pace: Pace) -> None:
        """Let the sink as a whole wait, unless another event is to be tried at once.

        Args:
            failure: what happened.
            failed: the event that failed, if it may be the cause.
            pace: what limits the waits.
        """
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
