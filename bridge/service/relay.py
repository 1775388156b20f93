"""The third flow's loop: take events off the bus, commit them for the same sinks, and only then complete them.

A fleet publishes to a topic, and one relay speaks for all of it: also for a VM that is gone.
"""

from __future__ import annotations

import logging
import math
from datetime import datetime
from itertools import islice
from typing import Any

from bridge.azure.receiver import BusReceiver, ReceivedMessage, Settlement
from bridge.events.envelope import EXPECTED, Envelope, read_event
from bridge.outbox.outbox import Outbox
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.json import Json
from bridge.runtime.threads import Stop, report_progress
from bridge.service.identity import follow_clock

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # how often what is held is looked at again
BATCH_EVENTS = 50
REPEAT_LOG_SECONDS = 600.0
RELAYED = "relayed"  # the kind of the records by which an event that comes again is known


class Relay:
    """Commits what the bus brings. `run` is for one thread; `status` may be called from any.

    It tells no event of its own, not even a heartbeat: it has no voice beside the fleet's, and its life shows in
    its status and health. It never asks IMDS, so it may run anywhere.
    """

    def __init__(
        self, *, receiver: BusReceiver, outbox: Outbox, clock: Clock, stop: Stop, settled: Stop
    ) -> None:
        """Prepare to relay.

        Args:
            receiver: where the events come from.
            outbox: where they are kept for the sinks.
            clock: for what is told about times.
            stop: ends `run`.
            settled: is set when `run` has ended: nothing will be settled any more.
        """
        self._receiver = receiver
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._settled = settled
        # By sequence number, so that one that comes again takes its own place: committed, perhaps only to memory.
        self._held: dict[int | None, ReceivedMessage] = {}
        self._relayed = 0
        self._repeated = 0
        self._malformed = 0
        self._malformed_told = 0
        self._malformed_logged_at = -math.inf
        self._last_event_at: datetime | None = None

    def run(self) -> None:
        """Relay until the stop; what is not committed then goes back to the bus."""
        try:
            while not self._stop:
                report_progress()
                follow_clock(self._clock, self._outbox)
                self._take(list(islice(self._receiver.deliveries(LOOK_SECONDS), BATCH_EVENTS)))
                self._complete()
        finally:
            self._settled.set()

    def status(self) -> dict[str, Any]:
        """Tell how it goes, for the status file."""
        return {
            **self._receiver.status(),
            "relayed": self._relayed,
            "repeated": self._repeated,
            "malformed": self._malformed,
            "held": len(self._held),
            "last_event_at": iso_utc(self._last_event_at) if self._last_event_at else None,
        }

    def _take(self, deliveries: list[ReceivedMessage]) -> None:
        """Commit the events among the deliveries that were not before, and have what is none dead-lettered."""
        told: list[tuple[Envelope, bytes]] = []
        records: dict[tuple[str, str], Json] = {}
        for delivery in deliveries:
            try:
                envelope = read_event(delivery.body)
            except ValueError as error:
                self._refuse(delivery, str(error))
                continue
            name = (RELAYED, envelope.key)
            if name in records or self._outbox.record(*name) is not None:
                self._repeated += 1
            else:
                told.append((envelope, delivery.body))
                records[name] = iso_utc(self._clock.now())
            self._held[delivery.message.sequence_number] = delivery
        if told:
            self._outbox.commit(told, meta={}, records=records)
            self._relayed += len(told)
            self._last_event_at = self._clock.now()

    def _complete(self) -> None:
        """Complete what a kill cannot take any more: the disk has it all, or else every sink had it."""
        if not self._held or (self._outbox.storage_error and any(self._outbox.backlogs().values())):
            return
        for delivery in self._held.values():
            self._receiver.settle(delivery, Settlement())
        self._held.clear()

    def _refuse(self, delivery: ReceivedMessage, fault: str) -> None:
        """Dead-letter what is no event; say so once and then rarely."""
        self._receiver.settle(
            delivery, Settlement(dead_letter_reason="malformed", description=f"{fault}; expected {EXPECTED}")
        )
        self._malformed += 1
        now = self._clock.monotonic()
        if now - self._malformed_logged_at >= REPEAT_LOG_SECONDS:
            new, self._malformed_told = self._malformed - self._malformed_told, self._malformed
            self._malformed_logged_at = now
            log.warning(
                "what is no event is dead-lettered: %s",
                fault,
                extra={"message_id": delivery.message_id[:128], "count": new},
            )
