"""Commands on their way: what waits to be decided, and what is decided but not committed yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.events.model import CloudEvent

MALFORMED_RECEIPTS_PER_MINUTE = 10
MINUTE_SECONDS = 60.0


@dataclass(kw_only=True)
class Pending:
    """A command that is not decided yet, and every message that carried it.

    By EventId in lower case: `decisions` may still change, `receipts` are given, `intended` were POSTed or were
    about to be, and what became of it is not known. `by_rule`: nobody sent it.
    """

    command: Command
    arrived_at: float
    grace_from: float
    deliveries: list[ReceivedMessage] = field(default_factory=list)
    by_rule: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict)
    receipts: dict[str, str] = field(default_factory=dict)
    intended: set[str] = field(default_factory=set)

    @property
    def open_ids(self) -> list[str]:
        """The EventIds that have no receipt yet."""
        return [event_id for event_id in self.command.event_ids if event_id.lower() not in self.receipts]

    @property
    def record(self) -> dict[str, Any]:
        """What the ledger keeps of it."""
        return {
            "receipts": self.receipts,
            "intended": sorted(self.intended - self.receipts.keys()),
            "done": not self.open_ids,
        }

    def add(self, delivery: ReceivedMessage) -> None:
        """Note a further message with the same command; what an older connection brought cannot be settled."""
        self.deliveries = [one for one in self.deliveries if one.generation == delivery.generation]
        self.deliveries.append(delivery)


@dataclass(kw_only=True)
class Outgoing:
    """What one pass has decided: committed all in one, and settled only then."""

    told: list[tuple[CloudEvent, bytes]] = field(default_factory=list)
    repeated: list[bytes] = field(default_factory=list)
    records: dict[tuple[str, str], Any] = field(default_factory=dict)
    settled: list[tuple[ReceivedMessage, Settlement]] = field(default_factory=list)


class Window:
    """Counts within a minute, and tells afterwards how many were too many."""

    def __init__(self) -> None:
        self._began_at = -math.inf
        self._count = 0

    def count(self, now: float) -> int:
        """Count one; return how many there were within this minute."""
        if self._count == 0:
            self._began_at = now
        self._count += 1
        return self._count

    def left_out(self, now: float) -> int:
        """Return how many had no receipt once the minute is over, else 0; and begin anew."""
        if self._count == 0 or now - self._began_at < MINUTE_SECONDS:
            return 0
        count, self._count = self._count, 0
        return max(0, count - MALFORMED_RECEIPTS_PER_MINUTE)
