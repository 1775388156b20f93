"""What a receipt says."""

from __future__ import annotations

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc


def receipt_data(decision: Decision, command: Json, *, dry_run: bool, count: int = 0) -> dict[str, Json]:
    """Return the data of a receipt.

    Args:
        decision: what was decided.
        command: what the receipt repeats of the command.
        dry_run: whether nothing was POSTed.
        count: how many messages it answers, if they are several.
    """
    event = decision.event
    data: dict[str, Json] = {
        "Reason": decision.reason,
        "Detail": decision.detail,
        "Command": command,
        "EventType": event.raw.get("EventType") if event else None,
        "NotBeforeUtc": iso_utc(event.not_before) if event and event.not_before else None,
        "DryRun": dry_run,
    }
    return {**data, "Count": count} if count else data


def command_data(command: Command) -> dict[str, Json]:
    """Return what receipts repeat of their command."""
    return {
        "Id": command.id,
        "RequestedBy": command.requested_by,
        "Reason": command.reason,
        "Vm": command.vm,
        "ExpiresAt": iso_utc(command.expires_at) if command.expires_at else None,
    }
