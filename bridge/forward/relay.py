"""The relay's loop: receive events from the bus, commit them for the same sinks, and only then complete them.

A fleet publishes to a topic, and one relay sends one message per event for all VMs, even for one that is gone.
"""

from __future__ import annotations

import logging
from datetime import datetime
from itertools import islice

from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.contract.status import RelayBus
from bridge.events.envelope import EXPECTED, event_key, read_event
from bridge.events.model import StoredEvent
from bridge.outbox.rows import DONE
from bridge.process.bridge_events import BridgeEvents
from bridge.process.parts import Parts
from bridge.runtime.json import Json
from bridge.runtime.threads import Stop, report_progress
from bridge.runtime.time import Clock, RepeatLimit, iso_utc

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25  # how long a pass waits for messages
BATCH_EVENTS = 50
RELAYED = "relayed"  # the kind of the records that recognise a repeated event


class Relay:
    """Commits events from the bus. `run` and `run_once` are for one thread; `status` may be called from any.

    Of its own events it publishes only losses; status and health show that it runs. It never asks IMDS, so it may
    run anywhere.
    """

    def __init__(self, parts: Parts, receiver: Receiver, settled: Stop) -> None:
        """Prepare to relay.

        Args:
            parts: of the process; its stop ends `run`.
            receiver: where the events come from.
            settled: `run` sets it at its end, when it will settle nothing more.
        """
        self._receiver = receiver
        self._outbox = parts.outbox
        self._clock = parts.clock
        self._stop = parts.stop
        self._settled = settled
        self._bridge_events = BridgeEvents(parts.identity)
        # Committed, perhaps to memory only; by sequence number, so that a redelivery replaces the earlier delivery.
        self._uncompleted: dict[int | None, ReceivedMessage] = {}
        self._relayed = 0
        self._repeated = 0
        self._refusals = Refusals(receiver, parts.clock)
        self._last_event_at: datetime | None = None

    def run(self) -> None:
        """Relay until the stop; messages that are not committed by then are delivered again."""
        try:
            while not self._stop:
                report_progress()
                self.run_once(PASS_SECONDS)
        finally:
            self._settled.set()

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, commit their events, complete what is safe."""
        self._bridge_events.emit_losses()
        self._commit(list(islice(self._receiver.messages(wait_seconds), BATCH_EVENTS)))
        self._complete()

    def status(self) -> RelayBus:
        """Return what the status file shows of the relay."""
        return RelayBus(
            **vars(self._receiver.status()),
            relayed=self._relayed,
            repeated=self._repeated,
            malformed=self._refusals.count,
            uncompleted=len(self._uncompleted),
            last_event_at=iso_utc(self._last_event_at) if self._last_event_at else None,
        )

    def _commit(self, messages: list[ReceivedMessage]) -> None:
        """Commit the new events, count the repeated ones, and dead-letter messages that are not events."""
        events: list[StoredEvent] = []
        records: dict[tuple[str, str], Json] = {}
        for message in messages:
            try:
                event = read_event(message.decoded_body())
            except ValueError as error:
                self._refusals.refuse(message, str(error))
                continue
            name = (RELAYED, event_key(event))
            if name in records or self._outbox.record(*name) is not None:
                self._repeated += 1
            else:
                events.append(event)
                records[name] = {"at": iso_utc(self._clock.now()), DONE: True}
            self._uncompleted[message.sequence_number] = message
        if events:
            self._outbox.commit(events, records=records)
            self._relayed += len(events)
            self._last_event_at = self._clock.now()

    def _complete(self) -> None:
        """Complete messages once a kill cannot lose their events: the disk or every sink has them."""
        if not self._uncompleted or (self._outbox.storage_error and any(self._outbox.backlogs().values())):
            return
        for message in self._uncompleted.values():
            self._receiver.settle(message, Settlement())
        self._uncompleted.clear()


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
