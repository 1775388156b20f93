"""Commands in progress, and how far each of their EventIds is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.azure.receiver import ReceivedMessage
from bridge.imds.document import ScheduledEvent

REFUSED_RECEIPTS_PER_MINUTE = 10
REPEATED_RECEIPTS_PER_MINUTE = 10
REJECTED_RECEIPTS_PER_MINUTE = 100  # as many as one command may have EventIds
MINUTE_SECONDS = 60.0


class Stage(Enum):
    """How far an EventId of a command is."""

    WAITING = "waiting"  # not judged yet, or the document does not have the event yet
    ALLOWED = "allowed"  # nothing was POSTed, or IMDS has refused it
    POSTED = "posted"  # or about to be: that is recorded, and the outcome is not known
    ANSWERED = "answered"


@dataclass(kw_only=True)
class Request:
    """One EventId of a command.

    Attributes:
        event_id: as the command spells it.
        decision: why it is allowed, or how it was answered.
        receipt: as it was published; "" for a rejection without one, of which there were too many.
    """

    event_id: str
    stage: Stage = Stage.WAITING
    decision: Decision | None = None
    receipt: str = ""

    @property
    def key(self) -> str:
        """The EventId in lower case."""
        return self.event_id.lower()

    @property
    def wanted(self) -> ScheduledEvent | None:
        """The event that is to be POSTed, None if none is."""
        return self.decision.event if self.decision and self.stage is not Stage.ANSWERED else None

    def allow(self, decision: Decision) -> None:
        """Have the event POSTed."""
        self.decision = decision
        self.stage = Stage.POSTED if self.stage is Stage.POSTED else Stage.ALLOWED

    def wait(self) -> None:
        """Have the event not POSTed yet."""
        self.decision = None
        self.stage = Stage.POSTED if self.stage is Stage.POSTED else Stage.WAITING


@dataclass(kw_only=True)
class Pending:
    """A command that is not fully decided yet, with every message that carried it.

    Attributes:
        command: what is to be approved.
        arrived_at: when this process received it, or its program still ran, monotonic.
        grace_from: when the broker accepted it, monotonic; an unknown event may appear for a while from then on.
        messages: what has to be settled once the command is decided.
        is_auto: an auto rule made it; there is no message.
        is_recorded: whether there is a record of it.
        judged_by: when the document was read by which it was judged last, monotonic.
    """

    command: Command
    arrived_at: float
    grace_from: float
    messages: list[ReceivedMessage] = field(default_factory=list)
    is_auto: bool = False
    is_recorded: bool = False
    judged_by: float = -math.inf

    def __post_init__(self) -> None:
        self.requests = [Request(event_id=event_id) for event_id in self.command.event_ids]

    def at(self, *stages: Stage) -> list[Request]:
        """Return the EventIds that are at one of these stages."""
        return [request for request in self.requests if request.stage in stages]

    @property
    def open(self) -> list[Request]:
        """The EventIds that are not decided yet."""
        return self.at(Stage.WAITING, Stage.ALLOWED, Stage.POSTED)

    @property
    def record(self) -> dict[str, Any]:
        """What is stored of the command."""
        return {
            "receipts": {request.key: request.receipt for request in self.requests if request.receipt},
            "intended": sorted(request.key for request in self.at(Stage.POSTED)),
            "done": not self.open,
        }

    def continue_from(self, record: Mapping[str, Any] | None) -> None:
        """Take over what an earlier process, or an earlier delivery, has recorded."""
        if not record:
            return
        self.is_recorded = True
        for request in self.requests:
            if receipt := record["receipts"].get(request.key):
                request.stage, request.receipt = Stage.ANSWERED, receipt
            elif request.key in record["intended"]:
                request.stage = Stage.POSTED

    def add(self, message: ReceivedMessage) -> None:
        """Add another message with the same command; those of an earlier connection cannot be settled."""
        self.messages = [one for one in self.messages if one.generation == message.generation]
        self.messages.append(message)


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
