"""When a delivery that failed is tried again: pure decisions of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent
from bridge.sinks.base import RETRY_BASE_SECONDS

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
