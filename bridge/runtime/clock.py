"""The wall clock, the monotonic clock, and retry delays."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime

CLOCK_JUMP_SECONDS = 60.0
# Linux has a clock that counts the time of a suspended machine, which time.monotonic leaves out.
_BOOT_TIME = getattr(time, "CLOCK_BOOTTIME", None)
_clock_gettime = getattr(time, "clock_gettime", None)


class Clock:
    """The wall clock and the monotonic clock; tests use a double that they move.

    Ages are counted on `steady`, which begins with the wall clock's date and never follows a jump of it.
    """

    def __init__(self) -> None:
        self._offset = self.wall() - self.monotonic()
        self._jumped_seconds = 0.0

    def wall(self) -> float:
        """Return the machine's time in seconds since 1970."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never jump, and that also pass while the machine is suspended."""
        if _clock_gettime is None or _BOOT_TIME is None:
            return time.monotonic()
        return float(_clock_gettime(_BOOT_TIME))

    def now(self) -> datetime:
        """Return the machine's time in UTC."""
        return datetime.fromtimestamp(self.wall(), UTC)

    def steady(self) -> float:
        """Return seconds since 1970 that advance as `monotonic` does."""
        return self.monotonic() + self._offset

    def jump_seconds(self) -> float:
        """Return how far the wall clock has jumped since the last call; `steady` follows a mere drift."""
        drift = self.wall() - self.steady() - self._jumped_seconds
        if abs(drift) < CLOCK_JUMP_SECONDS:
            self._offset += drift
            return 0.0
        self._jumped_seconds += drift
        return drift


def full_jitter(attempt: int, *, base_seconds: float, limit_seconds: float) -> float:
    """Return a random delay before a retry, below an exponentially growing limit.

    Args:
        attempt: the number of failures before this one.
        base_seconds: the limit after the first failure.
        limit_seconds: the highest limit.
    """
    ceiling = min(limit_seconds, base_seconds * 2 ** min(attempt, 32))
    return random.uniform(0.0, ceiling)  # noqa: S311 - it spreads load
