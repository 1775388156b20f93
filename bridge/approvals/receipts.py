"""What a receipt says, in the short form that a command's record keeps: it is enough to write the receipt again."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.runtime.instants import iso_utc
from bridge.runtime.json import Json


class Answer(NamedTuple):
    """The decision about one EventId, with what identifies its receipt; a record has it as a JSON list."""

    outcome: str
    reason: str
    detail: str
    event_id: str
    event_type: Json
    not_before: str | None
    resources: list[str]
    epoch: str
    sequence: int
    at: str


def answer(decision: Decision, event_id: str, *, epoch: str, sequence: int, at: datetime) -> Answer:
    """Return what the receipt of a decision says.

    Args:
        decision: what was decided.
        event_id: the EventId as the command spells it, "" if there is none; IMDS's spelling replaces it.
        epoch: the `reporterepoch` of the receipt.
        sequence: its `reporterseq`.
        at: when it was decided.
    """
    event = decision.event
    return Answer(
        outcome=decision.outcome,
        reason=decision.reason,
        detail=decision.detail,
        event_id=event.event_id if event else event_id,
        event_type=event.raw.get("EventType") if event else None,
        not_before=iso_utc(event.not_before) if event and event.not_before else None,
        resources=list(event.resources) if event else [],
        epoch=epoch,
        sequence=sequence,
        at=iso_utc(at),
    )


def command_data(command: Command) -> dict[str, Json]:
    """Return what receipts repeat of their command."""
    return {
        "Id": command.id,
        "RequestedBy": command.requested_by,
        "Reason": command.reason,
        "Vm": command.vm,
        "ExpiresAt": iso_utc(command.expires_at) if command.expires_at else None,
    }
