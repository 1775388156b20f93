"""Log what comes again and again only now and then."""

from __future__ import annotations

import math

from bridge.runtime.clock import Clock

REPEAT_LOG_SECONDS = 600.0


class RepeatLimit:
    """Decides whether a message that may come again and again is logged: when it is new, and then rarely."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._subject: object = None
        self._logged_at = -math.inf

    def is_due(self, subject: object = None) -> bool:
        """Return whether to log now: what the message is about has changed, or the last time is long ago."""
        now = self._clock.monotonic()
        if subject == self._subject and now - self._logged_at < REPEAT_LOG_SECONDS:
            return False
        self._subject, self._logged_at = subject, now
        return True

    def reset(self) -> None:
        """Log the next message in any case."""
        self._logged_at = -math.inf
