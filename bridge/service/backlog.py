"""What waits for one sink, read from the outbox page by page."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.events.ordering import order_key
from bridge.outbox.outbox import DeadLetter, Outbox
from bridge.service.retries import FailedEvent

PAGE_EVENTS = 64


class Backlog:
    """The events that wait for one sink, in their order; for the sink's thread.

    Args:
        sink: the sink's name.
        wanted: which events it takes; the others are passed over.
        outbox: where the events come from.

    Attributes:
        failed: events that failed, by order key.
        page: the next of the other events; those with the order key of one that failed are left out.
    """

    def __init__(self, sink: str, *, wanted: Filter, outbox: Outbox) -> None:
        self.sink = sink
        self._wanted = wanted
        self._outbox = outbox
        self._generation = -1
        self.failed: dict[str, FailedEvent] = {}
        self._rewind()

    def _rewind(self) -> None:
        """Read again from the oldest event."""
        self.page: list[StoredEvent] = []
        self._unwanted: list[StoredEvent] = []
        self._read_to = 0

    def read(self) -> bool:
        """Read on until there is an event in the page; return whether there is one."""
        if self._generation != self._outbox.generation:  # events have got other numbers or dates
            self.failed.clear()
            self._rewind()
        while not self.page:
            generation, events = self._outbox.pending(self.sink, PAGE_EVENTS, after=self._read_to)
            if self._read_to and generation != self._generation:
                return False  # the next call reads again
            self._generation = generation
            if events:
                self._read_to = events[-1].seq
                self._sort(events)
            if not self.page:
                self.acknowledge([])
            if not events:
                return False
        return True

    def _sort(self, events: Sequence[StoredEvent]) -> None:
        for event in events:
            if not self._wanted.matches(event):
                self._unwanted.append(event)
            elif not self.failed or order_key(event.envelope) not in self.failed:
                self.page.append(event)

    def add_failed(self, failed: FailedEvent) -> None:
        """Let later events with the same order key wait behind one that failed."""
        key = order_key(failed.event.envelope)
        self.failed[key] = failed
        self.page = [other for other in self.page if order_key(other.envelope) != key]

    def acknowledge(self, events: Sequence[StoredEvent], *, dead_lettered: DeadLetter | None = None) -> None:
        """Note in the outbox that the sink is done with events, and with those that it does not want.

        Args:
            events: what is done; events behind one that had failed are read again.
            dead_lettered: one of them that becomes a dead letter.
        """
        done = [*self._unwanted, *events]
        if done:
            self._outbox.acknowledge(self.sink, self._generation, done, dead_lettered=dead_lettered)
        self._unwanted = []
        numbers = {event.seq for event in events}
        self.page = [event for event in self.page if event.seq not in numbers]
        for key, failed in list(self.failed.items()):
            if failed.event.seq in numbers:
                del self.failed[key]
                self._rewind()
