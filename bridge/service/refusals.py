"""Messages of the bus that are not events."""

from __future__ import annotations

import logging

from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.events.envelope import EXPECTED
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)


class Refusals:
    """Dead-letters messages that are not events; the first is logged, and then rarely one. For one thread."""

    def __init__(self, receiver: Receiver, clock: Clock) -> None:
        self.count = 0
        self._receiver = receiver
        self._logged = 0
        self._log_limit = RepeatLimit(clock)

    def refuse(self, message: ReceivedMessage, fault: str) -> None:
        """Dead-letter a message; `fault` says what is wrong with it."""
        self._receiver.settle(
            message, Settlement(dead_letter_reason="malformed", description=f"{fault}; expected {EXPECTED}")
        )
        self.count += 1
        if self._log_limit.is_due():
            new, self._logged = self.count - self._logged, self.count
            log.warning(
                "messages that are not events are dead-lettered: %s",
                fault,
                extra={"message_id": message.message_id[:128], "count": new},
            )
