"""Run callbacks when they are due, by a clock that is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

COMPACT_FROM = 10_000


class Target(Protocol):
    """What a timer is for; `gone` once it no longer exists."""

    gone: bool


class Timers:
    """Keep timers. They are never cancelled: the callback checks whether it still applies."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._numbers = count()
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._compact_at = COMPACT_FROM

    def now(self) -> float:
        """Return the clock's time."""
        return self.clock()

    def at(self, when: float, call: Callable[[Any], None], target: Any) -> None:
        """Set a timer.

        Args:
            when: by the clock.
            call: the callback.
            target: its argument.
        """
        heapq.heappush(self._heap, (when, next(self._numbers), call, target))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def next_at(self) -> float | None:
        """Return when the next callback is due, or None."""
        return self._heap[0][0] if self._heap else None

    def run(self) -> None:
        """Run the callbacks that are due."""
        while self._heap and self._heap[0][0] <= self.clock():
            _, _, call, target = heapq.heappop(self._heap)
            call(target)

    def _compact(self) -> None:
        # A message expires after an hour by default but is mostly gone within milliseconds: drop its timers.
        self._heap = [entry for entry in self._heap if not getattr(entry[3], "gone", False)]
        heapq.heapify(self._heap)
        self._compact_at = max(COMPACT_FROM, 2 * len(self._heap))
