"""How a sink is: for the status file, and as log lines that do not repeat."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Literal

from bridge.errors import DeliveryError, Gone, Misconfigured
from bridge.events.model import StoredEvent
from bridge.runtime.clock import Clock
from bridge.runtime.repeat_limit import RepeatLimit

log = logging.getLogger(__name__)

SinkState = Literal["ok", "rejecting", "retrying", "misconfigured", "gone"]

_LOG = {"retrying": log.warning, "misconfigured": log.error, "gone": log.error}
_ADVICE = {
    "retrying": "not delivered, retrying",
    "misconfigured": (
        "its address or credentials seem to be wrong; nothing is lost: fix the URL or the credentials; "
        "secret files are read again on every retry"
    ),
    "gone": "the receiver wants no more events (410 Gone); stopped until this process is restarted",
}


class SinkHealth:
    """What the last deliveries of a sink showed; written by the sink's thread, read by any.

    Args:
        sink: the sink's name.
        clock: the time.
    """

    def __init__(self, sink: str, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._log_limit = RepeatLimit(clock)
        self._is_rejecting = False
        self._failed_as: SinkState = "ok"
        self.last_success: datetime | None = None
        self.last_error = ""
        self.last_error_at: datetime | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the receiver wants nothing more."""
        return self._failed_as == "gone"

    def state(self, *, is_failing: bool) -> SinkState:
        """Return how the sink is, given whether something fails now."""
        if is_failing or self.is_gone:
            return self._failed_as
        return "rejecting" if self._is_rejecting else "ok"

    def note_success(self) -> None:
        """Note that events were accepted."""
        self._is_rejecting = False
        self.last_success = self._clock.now()

    def note_rejection(self, event: StoredEvent, error: DeliveryError) -> None:
        """Remember why an event was rejected."""
        self._is_rejecting = True
        self._note_error(f"{event.id}: {error}")

    def note_recovery(self, failures: int) -> None:
        """Log that the receiver answers again."""
        log.info("sink %s: delivering again", self._sink, extra={"failures": failures})
        self._log_limit.reset()

    def note_failure(self, error: DeliveryError, failures: int) -> None:
        """Log what is wrong, once and then rarely.

        Args:
            error: what the sink raised.
            failures: how often in a row.
        """
        state = self._failed_as = _state_of(error)
        self._note_error(str(error))
        if self._log_limit.is_due(state):
            _LOG[state](f"sink %s: {_ADVICE[state]}: %s", self._sink, error, extra={"failures": failures})

    def _note_error(self, text: str) -> None:
        self.last_error, self.last_error_at = text, self._clock.now()


def _state_of(error: DeliveryError) -> SinkState:
    if isinstance(error, Gone):
        return "gone"
    return "misconfigured" if isinstance(error, Misconfigured) else "retrying"
