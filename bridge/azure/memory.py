"""A queue in memory and a receiver of it: the double of Service Bus for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.runtime.threads import Stop


@dataclass(kw_only=True)
class QueuedMessage:
    """A message as the queue holds it; `locked_by` is the receiver that it was delivered to."""

    body: bytes
    message_id: str = ""
    properties: dict[str, str] = field(default_factory=dict)
    enqueued_at: datetime | None
    sequence_number: int
    delivery_count: int = 0
    locked_by: MemoryReceiver | None = None
    settlement: Settlement | None = None


class MemoryQueue:
    """A queue with locks, redelivery and dead letters; any thread may use it."""

    def __init__(self, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Make an empty queue; `now` dates what is enqueued."""
        self._now = now
        self._next_number = 1
        self.changed = threading.Condition()
        self.messages: list[QueuedMessage] = []
        self.completed: list[QueuedMessage] = []
        self.dead_letters: list[QueuedMessage] = []

    def send(
        self,
        body: bytes,
        *,
        message_id: str = "",
        properties: dict[str, str] | None = None,
        enqueued_at: datetime | None = None,
    ) -> None:
        """Enqueue a message.

        Args:
            body: its body.
            message_id: its id; may be left out, as on the bus.
            properties: its application properties.
            enqueued_at: when the broker accepted it; now by default.
        """
        with self.changed:
            self.messages.append(
                QueuedMessage(
                    body=body,
                    message_id=message_id,
                    properties=properties or {},
                    enqueued_at=enqueued_at or self._now(),
                    sequence_number=self._next_number,
                )
            )
            self._next_number += 1
            self.changed.notify_all()

    def lock_next(self, receiver: MemoryReceiver, wait_seconds: float) -> QueuedMessage | None:
        """Wait up to `wait_seconds` for a message that is free, and lock it for a receiver."""
        with self.changed:
            self.changed.wait_for(self._first_free, wait_seconds)
            message = self._first_free()
            if message is not None:
                message.locked_by = receiver
            return message

    def unlock_all(self, receiver: MemoryReceiver) -> None:
        """Make what a receiver has not settled available again."""
        with self.changed:
            for message in self.messages:
                if message.locked_by is receiver:
                    message.locked_by = None
                    message.delivery_count += 1
            self.changed.notify_all()

    def settle(self, message: QueuedMessage, settlement: Settlement) -> None:
        """Complete or dead-letter a message."""
        message.settlement = settlement
        self.messages.remove(message)
        (self.dead_letters if settlement.dead_letter_reason else self.completed).append(message)
        self.changed.notify_all()

    def _first_free(self) -> QueuedMessage | None:
        return next((message for message in self.messages if message.locked_by is None), None)


class MemoryReceiver:
    """Receives from a `MemoryQueue`; messages are locked when `messages` yields them.

    `settled` records the settlements in their order, those that came too late included.
    """

    def __init__(self, queue: MemoryQueue, *, stop: Stop) -> None:
        """Connect to `queue`; `stop` ends `run`."""
        self._queue = queue
        self._stop = stop
        self._generation = 0
        self.last_error = ""
        self.settled: list[tuple[ReceivedMessage, Settlement]] = []

    def status(self) -> dict[str, Any]:
        """Return what the status file shows."""
        with self._queue.changed:
            unsettled = sum(message.locked_by is self for message in self._queue.messages)
        return {"from": "memory", "unsettled": unsettled, "last_error": self.last_error or None}

    def messages(self, wait_seconds: float) -> Iterator[ReceivedMessage]:
        """Wait up to `wait_seconds` for a message, then yield every message that is free."""
        while (message := self._queue.lock_next(self, wait_seconds)) is not None:
            yield self._deliver(message)
            wait_seconds = 0.0

    def settle(self, message: ReceivedMessage, settlement: Settlement) -> None:
        """Settle a message at once; a delivery of an earlier connection is left as it is."""
        with self._queue.changed:
            self.settled.append((message, settlement))
            if message.generation == self._generation and message.handle in self._queue.messages:
                self._queue.settle(message.handle, settlement)

    def run(self) -> None:
        """Wait for the stop, then abandon what is not settled."""
        self._stop.wait(None)
        self.disconnect()

    def disconnect(self) -> None:
        """Lose the connection: what is not settled is delivered again."""
        self._generation += 1
        self._queue.unlock_all(self)

    def _deliver(self, message: QueuedMessage) -> ReceivedMessage:
        return ReceivedMessage(
            body=message.body,
            message_id=message.message_id or f"sequence-number-{message.sequence_number}",
            properties=message.properties,
            enqueued_at=message.enqueued_at,
            sequence_number=message.sequence_number,
            generation=self._generation,
            handle=message,
        )
