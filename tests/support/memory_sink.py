"""A sink that keeps events in memory: the double of the port, with failures on demand."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent
from bridge.sinks.base import RequestPreview, Sink


class MemorySink(Sink):
    """Puts events into `received`, unless `failures` has an error for the call, or `refuse` one for an event.

    `calls` has "send" and "reload" in their order, `batches` the ids of what was accepted at once. With
    `is_digest`, of several events all are accepted or none.
    """

    knows_duplicates = True

    def __init__(self, *, max_batch: int = 1) -> None:
        self.max_batch = max_batch
        self.received: list[StoredEvent] = []
        self.failures: deque[DeliveryError] = deque()
        self.refuse: Callable[[StoredEvent], DeliveryError | None] = lambda _: None
        self.calls: list[str] = []
        self.batches: list[list[str]] = []
        self.is_digest = False
        self.is_closed = False
        self._changed = threading.Condition()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Keep the events, or those before the next failure."""
        self.calls.append("send")
        with self._changed:
            failure = self.failures.popleft() if self.failures else self._refusal(events)
            accepted = events if failure is None else events[: failure.delivered]
            self.received += accepted
            self.batches += [[event.id for event in accepted]] if accepted else []
            self._changed.notify_all()
        if failure:
            raise failure

    def _refusal(self, events: Sequence[StoredEvent]) -> DeliveryError | None:
        for number, event in enumerate(events):
            if error := self.refuse(event):
                error.delivered = 0 if self.is_digest else number
                return error
        return None

    def ids(self) -> list[str]:
        """Return the ids of what came."""
        return [event.id for event in self.received]

    def wait_for(self, count: int, *, timeout_seconds: float = 60.0) -> list[StoredEvent]:
        """Return the received events once there are `count` of them.

        Raises:
            TimeoutError: fewer came in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.received) >= count, timeout_seconds):
                raise TimeoutError(f"{len(self.received)} of {count} events came in {timeout_seconds:g} s")
            return list(self.received)

    def rest(self) -> float:
        """Do nothing."""
        return math.inf

    def reload(self) -> None:
        """Note the call."""
        self.calls.append("reload")

    def check(self) -> str:
        """Return how many events came."""
        return f"{len(self.received)} events"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the event as it is."""
        return RequestPreview(head=(), body=event.body)

    def close(self) -> None:
        """Note the call."""
        self.is_closed = True
