"""The time of day, the time that only passes, and waits that grow."""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime

CLOCK_JUMP_SECONDS = 60.0


class Clock:
    """The time of day and the time that only passes; tests give a double that they move.

    Ages inside the process are counted on `steady`, which follows the wall clock's date but not its jumps.
    """

    def __init__(self) -> None:
        self._offset = self.wall() - self.monotonic()

    def wall(self) -> float:
        """Return the time of day in seconds since 1970, as the machine believes it to be."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds that never jump."""
        return time.monotonic()

    def now(self) -> datetime:
        """Return the time of day in UTC."""
        return datetime.fromtimestamp(self.wall(), UTC)

    def steady(self) -> float:
        """Return seconds since 1970 that pass as `monotonic` does, whatever happens to the wall clock."""
        return self.monotonic() + self._offset

    def jump_seconds(self) -> float:
        """Tell by how much the wall clock has left the steady one; follow it unless that is a jump."""
        drift = self.wall() - self.steady()
        if abs(drift) < CLOCK_JUMP_SECONDS:
            self._offset += drift
            return 0.0
        return drift

    def accept_jump(self, seconds: float) -> None:
        """Let `steady` show the new time of day from now on."""
        self._offset += seconds


def full_jitter(attempt: int, *, base_seconds: float, limit_seconds: float) -> float:
    """Choose a wait after failure number `attempt` (from 0): anywhere below an exponentially growing limit."""
    ceiling = min(limit_seconds, base_seconds * 2 ** min(attempt, 32))
    return random.uniform(0.0, ceiling)  # noqa: S311 - it spreads load, it guards nothing
