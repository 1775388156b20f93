"""Commands in progress: what is not decided yet, and what is decided but not committed yet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.events.envelope import Envelope
from bridge.events.model import CloudEvent

REFUSED_RECEIPTS_PER_MINUTE = 10
REJECTED_RECEIPTS_PER_MINUTE = 100  # as many as one command may have EventIds
PASSED_ON_PER_MINUTE = 600
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
        receipts: those so far, as they were published.
        unanswered: rejections that have no receipt, because there were too many.
        is_recorded: whether there is a record of it.
        judged_by: when the document was read by which it was judged last, monotonic.
        intended: events that were POSTed or were about to be, with an outcome that is not known yet.
    """

    command: Command
    arrived_at: float
    grace_from: float
    messages: list[ReceivedMessage] = field(default_factory=list)
    is_auto: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict)
    receipts: dict[str, str] = field(default_factory=dict)
    unanswered: dict[str, Decision] = field(default_factory=dict)
    intended: set[str] = field(default_factory=set)
    is_recorded: bool = False
    judged_by: float = -math.inf

    @property
    def open_ids(self) -> list[str]:
        """The EventIds that are not decided yet, as the command spells them."""
        decided = self.receipts.keys() | self.unanswered.keys()
        return [event_id for event_id in self.command.event_ids if event_id.lower() not in decided]

    @property
    def record(self) -> dict[str, Any]:
        """What is stored of the command."""
        return {
            "receipts": self.receipts,
            "intended": sorted(self.intended - self.receipts.keys()),
            "done": not self.open_ids,
        }

    def continue_from(self, record: Mapping[str, Any] | None) -> None:
        """Take over what an earlier process, or an earlier delivery, has recorded."""
        if record:
            self.receipts = dict(record["receipts"])
            self.intended = set(record["intended"])
            self.is_recorded = True

    def add(self, message: ReceivedMessage) -> None:
        """Add another message with the same command; those of an earlier connection cannot be settled."""
        self.messages = [one for one in self.messages if one.generation == message.generation]
        self.messages.append(message)


@dataclass(kw_only=True)
class Batch:
    """What one pass has decided: committed in one transaction, and settled only after it."""

    events: list[tuple[CloudEvent | Envelope, bytes]] = field(default_factory=list)
    records: dict[tuple[str, str], Any] = field(default_factory=dict)
    settlements: list[tuple[ReceivedMessage, Settlement]] = field(default_factory=list)


class MinuteLimit:
    """Limits what is done within a minute, and counts what was not done by its reason."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._started_at = math.inf
        self._left = per_minute
        self._surplus: Counter[str] = Counter()

    def allows(self, reason: str, now: float) -> bool:
        """Return whether it may be done once more."""
        self._started_at = min(self._started_at, now)
        if self._left:
            self._left -= 1
            return True
        self._surplus[reason] += 1
        return False

    def surplus(self, now: float) -> Counter[str]:
        """Once the minute is over, return what was not done and start again; else return nothing."""
        if now - self._started_at < MINUTE_SECONDS:
            return Counter()
        surplus = self._surplus
        self._started_at, self._left, self._surplus = math.inf, self._per_minute, Counter()
        return surplus
