"""Commands in progress: what is not decided yet, and what is decided but not committed yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.events.model import CloudEvent

REFUSAL_RECEIPTS_PER_MINUTE = 10
MINUTE_SECONDS = 60.0


@dataclass(kw_only=True)
class Pending:
    """A command that is not fully decided yet, with every message that carried it.

    The mappings and the set have EventIds in lower case.

    Attributes:
        command: what is to be approved.
        arrived_at: when this process received it, monotonic.
        grace_from: when the broker accepted it, monotonic; an unknown event may appear for a while from then on.
        messages: what has to be settled once the command is decided.
        is_auto: an auto rule made it; there is no message.
        decisions: what may still change.
        receipts: the receipts that are final, as sent.
        intended: events that were POSTed or were about to be, with an outcome that is not known yet.
    """

    command: Command
    arrived_at: float
    grace_from: float
    messages: list[ReceivedMessage] = field(default_factory=list)
    is_auto: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict)
    receipts: dict[str, str] = field(default_factory=dict)
    intended: set[str] = field(default_factory=set)

    @property
    def open_ids(self) -> list[str]:
        """The EventIds without a receipt, as the command spells them."""
        return [event_id for event_id in self.command.event_ids if event_id.lower() not in self.receipts]

    @property
    def record(self) -> dict[str, Any]:
        """What is stored of the command."""
        return {
            "receipts": self.receipts,
            "intended": sorted(self.intended - self.receipts.keys()),
            "done": not self.open_ids,
        }

    def add(self, message: ReceivedMessage) -> None:
        """Add another message with the same command; those of an earlier connection cannot be settled."""
        self.messages = [one for one in self.messages if one.generation == message.generation]
        self.messages.append(message)


@dataclass(kw_only=True)
class Batch:
    """What one pass has decided: committed in one transaction, and settled only after it."""

    events: list[tuple[CloudEvent, bytes]] = field(default_factory=list)
    repeated: list[bytes] = field(default_factory=list)
    records: dict[tuple[str, str], Any] = field(default_factory=dict)
    settlements: list[tuple[ReceivedMessage, Settlement]] = field(default_factory=list)


class MinuteCounter:
    """Counts refusals minute by minute, so that the number of their receipts can be limited."""

    def __init__(self) -> None:
        self._started_at = -math.inf
        self._count = 0

    def count(self, now: float) -> int:
        """Count one; return how many there were within this minute."""
        if self._count == 0:
            self._started_at = now
        self._count += 1
        return self._count

    def surplus(self, now: float) -> int:
        """Once the minute is over, return how many were above the limit and start again; else return 0."""
        if self._count == 0 or now - self._started_at < MINUTE_SECONDS:
            return 0
        count, self._count = self._count, 0
        return max(0, count - REFUSAL_RECEIPTS_PER_MINUTE)
