"""A queue in memory and a receiver of it: the double of Service Bus for tests."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.contract.status import BusStatus
from bridge.runtime.threads import Stop
from bridge.runtime.time import iso_utc


@dataclass(kw_only=True)
class QueuedMessage:
    """A message as the queue holds it; `locked_by` is the receiver that it was delivered to."""

    body: bytes
    message_id: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    enqueued_at: datetime | None
    sequence_number: int
    fault: str = ""
    locked_by: MemoryReceiver | None = None
    settlement: Settlement | None = None


class MemoryQueue:
    """A queue with locks, redelivery and dead letters; any thread may use it."""

    def __init__(self, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Make an empty queue; `now` dates what is enqueued."""
        self.now = now
        self._next_number = 1
        self._free: dict[int, QueuedMessage] = {}
        self._locked: dict[int, QueuedMessage] = {}
        self._changed = threading.Condition()
        self.completed: list[QueuedMessage] = []
        self.dead_letters: list[QueuedMessage] = []

    @property
    def messages(self) -> list[QueuedMessage]:
        """The messages that are neither completed nor dead-lettered, locked or not, in their order."""
        with self._changed:
            return [message for _, message in sorted({**self._free, **self._locked}.items())]

    def send(
        self,
        body: bytes,
        *,
        message_id: str = "",
        properties: dict[str, str] | None = None,
        enqueued_at: datetime | None = None,
        fault: str = "",
    ) -> None:
        """Enqueue a message.

        Args:
            body: its body.
            message_id: its id; may be left out, as on the bus.
            properties: its application properties.
            enqueued_at: when the broker accepted it; now by default.
            fault: why it cannot be decoded.
        """
        with self._changed:
            self._free[self._next_number] = QueuedMessage(
                body=body,
                message_id=message_id,
                properties=properties or {},
                enqueued_at=enqueued_at or self.now(),
                sequence_number=self._next_number,
                fault=fault,
            )
            self._next_number += 1
            self._changed.notify_all()

    def lock_next(self, receiver: MemoryReceiver, wait_seconds: float) -> QueuedMessage | None:
        """Wait up to `wait_seconds` for a message that is free, and lock it for a receiver."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, wait_seconds):
                return None
            number = next(iter(self._free))
            message = self._locked[number] = self._free.pop(number)
            message.locked_by = receiver
            return message

    def locked_by(self, receiver: MemoryReceiver) -> list[QueuedMessage]:
        """Return the messages that a receiver has not settled yet."""
        with self._changed:
            return [message for message in self._locked.values() if message.locked_by is receiver]

    def release(self, messages: Iterable[QueuedMessage]) -> None:
        """Make locked messages available again, in their order."""
        with self._changed:
            for message in messages:
                message.locked_by = None
                self._free[message.sequence_number] = self._locked.pop(message.sequence_number)
            self._free = dict(sorted(self._free.items()))
            self._changed.notify_all()

    def settle(self, message: QueuedMessage, settlement: Settlement) -> None:
        """Complete or dead-letter a locked message."""
        with self._changed:
            message.settlement = settlement
            del self._locked[message.sequence_number]
            (self.dead_letters if settlement.dead_letter_reason else self.completed).append(message)


class MemoryReceiver:
    """Receives from a `MemoryQueue`; messages are locked when `messages` yields them.

    `settled` records the settlements in their order, those that came too late included.
    """

    def __init__(
        self, queue: MemoryQueue, *, stop: Stop, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect to `queue`; `stop` ends `run`."""
        self._queue = queue
        self._stop = stop
        self._monotonic = monotonic
        self._rest_from = math.inf
        self._must_look = True
        self._is_drained = False
        self._looked_at: datetime | None = None
        self._delivered: set[ReceivedMessage] = set()
        self._is_paused = False
        self.last_error = ""
        self.settled: list[tuple[ReceivedMessage, Settlement]] = []

    def status(self) -> BusStatus:
        """Return what the status file shows."""
        unsettled = len(self._queue.locked_by(self))
        return BusStatus(
            from_="memory",
            unsettled=unsettled,
            rests=self.rests,
            looked_at=iso_utc(self._looked_at) if self._looked_at else None,
            last_error=self.last_error or None,
        )

    def receive_until(self, at: float) -> None:
        """Look once more, and rest from `at` on."""
        self._rest_from, self._must_look = at, True

    @property
    def rests(self) -> bool:
        """Whether no connection is held."""
        is_asked = self._must_look or self._monotonic() < self._rest_from
        return not is_asked and not self._queue.locked_by(self)

    def messages(self, wait_seconds: float) -> Iterator[ReceivedMessage]:
        """Wait up to `wait_seconds` for a message, then yield every message that is free; after a release, none."""
        is_paused, self._is_paused = self._is_paused, False
        if self.last_error:
            return
        if self.rests:
            self._is_drained = False
            self._stop.wait(wait_seconds)
            return
        self._looked_at = self._queue.now()
        while not is_paused and (message := self._queue.lock_next(self, wait_seconds)):
            yield self._deliver(message)
            wait_seconds = 0.0
        self._must_look, self._is_drained = is_paused, not is_paused

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Settle a message at once; a delivery of an earlier connection is left as it is."""
        self.settled.append((message, settlement))
        if message not in self._delivered or message.handle.settlement is not None:
            return
        if settlement.is_released:
            self._queue.release([message.handle])
            self._is_paused = True
        else:
            self._queue.settle(message.handle, settlement)

    def run(self) -> None:
        """Wait for the stop, then release what is not settled."""
        self._stop.wait(None)
        self.disconnect()

    def disconnect(self) -> None:
        """Lose the connection: what is not settled is delivered again."""
        self._delivered.clear()
        self._is_drained = False
        self._queue.release(self._queue.locked_by(self))

    def _deliver(self, message: QueuedMessage) -> ReceivedMessage:
        delivered = ReceivedMessage(
            body=message.body,
            message_id=message.message_id or f"sequence-number-{message.sequence_number}",
            properties=message.properties,
            enqueued_at=message.enqueued_at,
            sequence_number=message.sequence_number,
            may_have_waited=not self._is_drained,
            fault=message.fault,
            handle=message,
        )
        self._delivered.add(delivered)
        return delivered
