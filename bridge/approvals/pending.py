"""Commands in progress, and what is known about each of their EventIds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.azure.receiver import ReceivedMessage

REFUSED_RECEIPTS_PER_MINUTE = 10
REPEATED_RECEIPTS_PER_MINUTE = 10
REJECTED_RECEIPTS_PER_MINUTE = 100  # as many as one command may have EventIds
MINUTE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A command that is not fully decided yet, with every message that carried it.

    Each of its EventIds is open, and perhaps POSTed, or answered.

    Attributes:
        command: what is to be approved.
        arrived_at: when this process received it, monotonic.
        grace_from: when the broker accepted it, monotonic; an unknown event may appear for a while from then on.
        messages: what has to be settled once the command is decided.
        may_have_waited: it may have been sent long before this process received it.
        intended: for each open EventId that may have been POSTed, in lower case, the id of the stay that was judged,
            which stands for one content, and since when, in steady seconds.
        receipts: of the answered EventIds, in lower case, as published; "" for a rejection without one.
        unanswered: a rejection that has no receipt, of which there were too many.
        judged_by: when the document was read by which it was judged last and has to wait, monotonic.
    """

    command: Command
    arrived_at: float
    grace_from: float
    messages: tuple[ReceivedMessage, ...] = ()
    may_have_waited: bool = False
    intended: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    receipts: Mapping[str, str] = field(default_factory=dict)
    unanswered: Decision | None = None
    judged_by: float = -math.inf

    @property
    def open(self) -> list[str]:
        """The EventIds that are not answered yet, as the command spells them."""
        return [event_id for event_id in self.command.event_ids if event_id.lower() not in self.receipts]

    @property
    def record(self) -> dict[str, Any]:
        """What is stored of the command."""
        receipts = {key: receipt for key, receipt in self.receipts.items() if receipt}
        return {"receipts": receipts, "intended": dict(self.intended)}

    def continued(self, record: Mapping[str, Any] | None) -> Pending:
        """Return the command with what an earlier process, or an earlier delivery, has recorded."""
        if not record:
            return self
        return replace(self, receipts=record["receipts"], intended=record["intended"])

    def has(self, message: ReceivedMessage) -> bool:
        """Return whether a message is one that carried it, delivered again."""
        return message.sequence_number in {one.sequence_number for one in self.messages}

    def with_message(self, message: ReceivedMessage) -> Pending:
        """Return the command with another message, or the same one again: its last delivery is settled."""
        others = [one for one in self.messages if one.sequence_number != message.sequence_number]
        return replace(self, messages=(*others, message))


class MinuteLimit:
    """Limits what is done within a minute, and counts what was not done by its reason."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._started_at = math.inf
        self._left = per_minute
        self._surplus: Counter[Any] = Counter()

    def allows(self, reason: str, now: float) -> bool:
        """Return whether it may be done once more."""
        self._started_at = min(self._started_at, now)
        if self._left:
            self._left -= 1
            return True
        self._surplus[reason] += 1
        return False

    def surplus(self, now: float) -> Counter[Any]:
        """Once the minute is over, return what was not done and start again; else return nothing."""
        if now - self._started_at < MINUTE_SECONDS:
            return Counter()
        surplus = self._surplus
        self._started_at, self._left, self._surplus = math.inf, self._per_minute, Counter()
        return surplus
