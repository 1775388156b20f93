"""What a sink is: the port between the outbox and a receiver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.events.model import StoredEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a sink sends for an event, for a person to read: lines above the body, secrets shown as ***."""

    head: tuple[str, ...]
    body: bytes


class Sink(Protocol):
    """A receiver of events.

    Duties: all methods are called from one thread of the sink's own, never two at a time; `send` may block,
    but not beyond a time limit of its own; no call changes the outbox; nothing that is raised or logged holds
    a secret. Only DeliveryError may be raised for what the receiver or the network does.
    """

    max_batch: int
    """How many events one `send` takes at the most."""

    retry_limit_seconds: float
    """The longest wait between two tries of what failed."""

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Hand over `events` in their order, and return when the receiver has them all.

        Raises:
            DeliveryError: with `delivered`, the number at the front that the receiver has; the error is about
                the next one. Rejected is about that one alone, the others about the receiver.
        """

    def keep_alive(self) -> None:
        """Do what keeps the way open while nothing is sent; called every few seconds.

        Raises:
            DeliveryError: it could not be done; the next `send` tries by itself.
        """

    def reload(self) -> None:
        """Read secrets again before the next `send`; keep the old ones where that fails."""

    def check(self) -> str:
        """Try what can be tried without sending an event; return what was found, for an operator.

        Raises:
            DeliveryError: it does not work; the text says why.
        """

    def show(self, event: StoredEvent) -> Request:
        """Return what `send` would hand over for an event; nothing is sent.

        Raises:
            Rejected: the event cannot be sent in this form.
        """

    def close(self) -> None:
        """Give up connections; nothing is sent afterwards."""


RETRY_BASE_SECONDS = 0.5

RETRY_LIMIT_SECONDS = 60.0
