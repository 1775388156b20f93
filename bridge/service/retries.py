"""When a delivery that failed is tried again: pure decisions of the dispatcher."""

from __future__ import annotations

from dataclasses import dataclass

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent
from bridge.sinks.base import RETRY_BASE_SECONDS

# While a young notice or receipt waits, a sink is tried often.
URGENT_TYPES = ("io.imdsbridge.scheduledevent.", "io.imdsbridge.approval.")
URGENT_AGE_SECONDS = 900.0
URGENT_LIMIT_SECONDS = 2.0
# How often a failing sink is tried while the process stops.
DRAIN_LIMIT_SECONDS = 0.5

TOO_MANY_REQUESTS = 429
_MAX_EXPONENT = 32


def is_urgent_type(event: StoredEvent) -> bool:
    """Return whether an event is worth frequent retries while it is young."""
    return event.type.startswith(URGENT_TYPES)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What limits the waits now.

    `limit_seconds` is the longest wait of the sink, `is_urgent` whether a young notice or receipt waits,
    `is_draining` whether the process is about to stop.
    """

    limit_seconds: float
    is_urgent: bool = False
    is_draining: bool = False

    @property
    def longest_seconds(self) -> float:
        """The longest wait between two tries."""
        limits = [self.limit_seconds]
        if self.is_urgent:
            limits.append(URGENT_LIMIT_SECONDS)
        if self.is_draining:
            limits.append(DRAIN_LIMIT_SECONDS)
        return min(limits)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A failed try: the `count`-th in a row, at `at` (monotonic).

    `share` is drawn between 0 and 1 and spreads the retries of a fleet ("full jitter"). `retry_after_seconds` is what
    the receiver asked for, if it did; `is_strict` says that it holds for urgent events, too. `is_answered` says
    whether there was an HTTP status.
    """

    count: int
    at: float
    share: float
    retry_after_seconds: float | None = None
    is_strict: bool = False
    is_answered: bool = False

    @classmethod
    def of(cls, error: DeliveryError, *, count: int, at: float, share: float) -> Failure:
        """Make the record of a failed try.

        Args:
            error: what was raised.
            count: of failures in a row.
            at: when, in monotonic seconds.
            share: between 0 and 1, at random.
        """
        return cls(
            count=count,
            at=at,
            share=share,
            retry_after_seconds=error.retry_after_seconds,
            is_strict=error.status == TOO_MANY_REQUESTS,
            is_answered=error.status is not None,
        )

    def must_wait(self, pace: Pace) -> bool:
        """Return whether `Retry-After` is obeyed: other than with 429 it cannot delay an urgent event."""
        is_free = pace.is_urgent and not pace.is_draining and not self.is_strict
        return self.retry_after_seconds is not None and not is_free

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again, in monotonic seconds.

        The wait is what the receiver asked for, or drawn below a limit that doubles with each failure.
        """
        if self.must_wait(pace):
            return self.at + max(RETRY_BASE_SECONDS, self.retry_after_seconds or 0.0)
        doubled: float = RETRY_BASE_SECONDS * 2 ** min(self.count - 1, _MAX_EXPONENT)
        return self.at + self.share * min(pace.longest_seconds, doubled)
