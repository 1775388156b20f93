"""How a sink is: for the status file, and as log lines that do not repeat."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Literal

from bridge.errors import DeliveryError, Gone, Misconfigured
from bridge.events.model import StoredEvent
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.repeat_limit import RepeatLimit

log = logging.getLogger(__name__)

SinkState = Literal["ok", "rejecting", "retrying", "misconfigured", "gone"]

LONG_WAIT_SECONDS = 600.0
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
    """What the last deliveries of a sink showed; written by the sink's thread, read by any."""

    def __init__(self, sink: str, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self._log_limit = RepeatLimit(clock)
        self._is_rejecting = False
        self._failed_as: SinkState = "ok"
        # The last success and the last error, as the status file shows them.
        self.last: dict[str, str | None] = dict.fromkeys(("last_success_at", "last_error", "last_error_at"))

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
        self.last["last_success_at"] = iso_utc(self._clock.now())

    def note_rejection(self, event: StoredEvent, error: DeliveryError) -> None:
        """Remember why an event was rejected."""
        self._is_rejecting = True
        self._note_error(f"{event.id}: {error}")

    def note_dead_letter(self, event: StoredEvent, reason: str, detail: str) -> None:
        """Log that an event is dead-lettered."""
        text = "sink %s: an event is dead-lettered as %s: %s"
        log.error(text, self._sink, reason, detail, extra={"event": event.id})

    def note_recovery(self, failures: int) -> None:
        """Log that the receiver answers again."""
        log.info("sink %s: delivering again", self._sink, extra={"failures": failures})
        self._log_limit.reset()

    def note_failure(self, error: DeliveryError, failures: int, *, wait_seconds: float) -> None:
        """Log what is wrong after `failures` in a row, once and then rarely, and a long wait for the next try."""
        state = self._failed_as = _state_of(error)
        self._note_error(str(error))
        if self._log_limit.is_due(state):
            _LOG[state](f"sink %s: {_ADVICE[state]}: %s", self._sink, error, extra={"failures": failures})
        if LONG_WAIT_SECONDS < wait_seconds < math.inf:
            at = self._clock.now() + timedelta(seconds=wait_seconds)
            log.warning("sink %s: the next try is at %s", self._sink, iso_utc(at))

    def _note_error(self, text: str) -> None:
        self.last |= {"last_error": text, "last_error_at": iso_utc(self._clock.now())}


def _state_of(error: DeliveryError) -> SinkState:
    if isinstance(error, Gone):
        return "gone"
    return "misconfigured" if isinstance(error, Misconfigured) else "retrying"
