"""What really happened: every document that the simulated IMDS had, what it answered, and who ran when."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.usage import Usage

Event = Mapping[str, Any]
Envelope = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Document:
    """One state of IMDS's document, from `since` (monotonic) until the next one; its events by EventId."""

    incarnation: int
    since: float
    events: Mapping[str, Event]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A time, from `start` to `end`, both monotonic: in which a process ran, or a fault lasted."""

    start: float
    end: float
    kind: str = ""

    def overlaps(self, start: float, end: float) -> bool:
        """Return whether it has an instant in common with another span."""
        return self.start <= end and start <= self.end


@dataclass(frozen=True, kw_only=True)
class Poll:
    """One request for the document: when it came, and whether its answer was the document, whole and at once."""

    at: float  # monotonic
    wall: float  # the same in seconds since 1970
    is_clean: bool


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that was sent; `event_id` is "" for one that cannot be read."""

    id: str
    vm: str
    event_id: str


@dataclass(frozen=True, kw_only=True)
class Observer:
    """A `forward` process: what it was answered, when it ran, and when its clock or IMDS was wrong.

    `sinks` has what each receiver accepted from it, in order, repeated events too.
    """

    name: str
    sinks: Mapping[str, Sequence[Envelope]]
    polls: Sequence[Poll] = ()
    runs: Sequence[Span] = ()
    unclear: Sequence[Span] = ()


class History:
    """Every document of the lab, in order. `record` is called whenever it has changed."""

    def __init__(self) -> None:
        self.documents: list[Document] = []
        self._lock = threading.Lock()

    def record(self, incarnation: int, events: Sequence[Event], at: float) -> None:
        """Keep a document, unless it is the last one."""
        with self._lock:
            if not self.documents or incarnation > self.documents[-1].incarnation:
                by_id = {str(event["EventId"]): event for event in events}
                self.documents.append(Document(incarnation=incarnation, since=at, events=by_id))


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the checks look at.

    Attributes:
        documents: IMDS's documents in order.
        observers: the `forward` processes.
        topic: what the Service Bus topic has stored, in order.
        relayed: what the relay has delivered.
        receipts: what each `listen` process has delivered, by VM.
        commands: what was sent.
        approvals: (VM, EventId) of each approval that IMDS has accepted.
        dead_letters: the ids of the commands that were moved to the dead-letter queue.
        before, after: what each process held when all ran, and at the end.
        problems: what went wrong with a process meanwhile.
    """

    documents: Sequence[Document]
    observers: Sequence[Observer] = ()
    topic: Sequence[Envelope] = ()
    relayed: Sequence[Envelope] = ()
    receipts: Mapping[str, Sequence[Envelope]] = field(default_factory=dict)
    commands: Sequence[Command] = ()
    approvals: Sequence[tuple[str, str]] = ()
    dead_letters: frozenset[str] = frozenset()
    before: Mapping[str, Usage] = field(default_factory=dict)
    after: Mapping[str, Usage] = field(default_factory=dict)
    problems: Sequence[str] = ()
