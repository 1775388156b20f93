"""Call back when a time has come, by a clock that is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

COMPACT_FROM = 10_000


class Target(Protocol):
    """Be something that a timer is about, and that may go before its time comes."""

    gone: bool


class Timers:
    """Keep what is to be called. A timer is never cancelled: what it calls checks whether it still holds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._numbers = count()
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._compact_at = COMPACT_FROM

    def now(self) -> float:
        """Return the clock's time."""
        return self.clock()

    def at(self, when: float, call: Callable[[Any], None], target: Any) -> None:
        """Call with the target when the time has come."""
        heapq.heappush(self._heap, (when, next(self._numbers), call, target))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def next_at(self) -> float | None:
        """Return when the next call is due, or None."""
        return self._heap[0][0] if self._heap else None

    def run(self) -> None:
        """Make the calls that are due."""
        while self._heap and self._heap[0][0] <= self.clock():
            _, _, call, target = heapq.heappop(self._heap)
            call(target)

    def _compact(self) -> None:
        # A message lives for an hour by default and mostly goes within milliseconds; its timers go with it.
        self._heap = [entry for entry in self._heap if not getattr(entry[3], "gone", False)]
        heapq.heapify(self._heap)
        self._compact_at = max(COMPACT_FROM, 2 * len(self._heap))
