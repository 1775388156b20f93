"""The port between the outbox and a receiver of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent

RETRY_BASE_SECONDS = 0.5
RETRY_LIMIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPreview:
    """What a sink sends for an event: the lines above the body, and the body; secrets are shown as ***."""

    head: tuple[str, ...]
    body: bytes


class Inconclusive(DeliveryError):
    """A check found nothing wrong, but does not show whether events are accepted."""


class Sink(Protocol):
    """A receiver of events; a sink is a subclass, and defines at least `send`, `check` and `preview`.

    Duties:
        - All methods are called from one thread, the sink's own; no two calls overlap.
        - Every call may block, but not longer than a time limit of its own.
        - What the receiver or the network does is raised as a DeliveryError, or as a Worker's HungError: Unavailable
          may be sent again later, Misconfigured needs another address or credential (`reload` is called before the
          next try), Rejected will never be accepted, Gone ends all deliveries.
        - No error and no log line contains a secret.
        - A receiver may get an event twice, but never in an order that `send` was not given.
    """

    max_batch: int = 1
    """How many events one `send` takes at most."""

    retry_limit_seconds: float = RETRY_LIMIT_SECONDS
    """The longest wait between two tries."""

    knows_duplicates: bool = False
    """Whether the receiver can answer 409 to an event that it has."""

    is_at_work: bool = False
    """Whether what waits does so for a program that runs within its limit, which is progress and no backlog."""

    @property
    def outdated(self) -> str:
        """Why checks refuse settings that a process obeys, so that an upgrade silences nobody; "" if they do not."""
        return ""

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Deliver `events` in their order, and return when the receiver has accepted them all.

        Args:
            events: at least one, at most `max_batch`; more only if the sink writes them as one digest.

        Raises:
            DeliveryError: with `delivered`, the number of events at the front that the receiver has; the error is
                about the next one. Rejected is about that event alone, or about a digest as a whole, the others about
                the receiver. `uncertain` tells how many behind those it may have: if it later answers 409 to one of
                them, that one has arrived.
        """

    def rest(self) -> float:
        """Let go of what only sending needs; called while nothing is to be sent. Never raises.

        Returns:
            After how many seconds to call it again.
        """
        return math.inf

    def reload(self) -> None:
        """Read secrets again before the next `send`; keep the previous ones if that fails. Never raises."""
        return

    def check(self) -> str:
        """Test what can be tested without sending an event; return the result for an operator.

        Raises:
            DeliveryError: the sink does not work, or it is Inconclusive whether it does; the text says why.
        """

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return what `send` would send for an event, without sending anything.

        Raises:
            Rejected: the event cannot be sent in this form.
        """

    def close(self) -> None:
        """Close connections; can be called at any time and more than once. Nothing is sent afterwards."""
        return
