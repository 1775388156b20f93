"""Remember message ids for a while."""

from __future__ import annotations

from collections.abc import Callable


class DuplicateWindow:
    """Remember the message ids of the duplicate detection window."""

    def __init__(self, window_seconds: float | None, clock: Callable[[], float]) -> None:
        self._window_seconds = window_seconds
        self._clock = clock
        self._until: dict[str, float] = {}  # in the order in which they end

    def seen(self, message_id: str) -> bool:
        """Return whether the id was seen, and remember it; without an id or a window always False."""
        if self._window_seconds is None or not message_id:
            return False
        now = self._clock()
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                break
            del self._until[oldest]
        if message_id in self._until:
            return True
        self._until[message_id] = now + self._window_seconds
        return False
