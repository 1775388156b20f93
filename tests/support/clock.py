"""A clock for tests, which stands still until the test moves it."""

from __future__ import annotations

from bridge.runtime.time import Clock


class MovedClock(Clock):
    """A clock that `advance` moves; `jump` sets the wall clock alone."""

    def __init__(self, wall: float = 1_800_000_000.0) -> None:
        self._wall = wall
        self._monotonic = 1_000.0
        super().__init__()

    def wall(self) -> float:
        return self._wall

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._wall += seconds
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back."""
        self._wall += seconds

    def reboot(self) -> None:
        """Be the clock of a process after a reboot, whose monotonic time starts elsewhere."""
        self._monotonic = 17.0
        super().__init__()
