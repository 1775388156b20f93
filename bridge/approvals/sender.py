"""Send an approve command over the bus: for `imds-bridge approve` and for the console.

I/O: Service Bus.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from bridge.approvals.command import COMMAND_APPROVE, parse_command
from bridge.azure.servicebus import address_of, connect, mapped_errors, sender_of
from bridge.config.approvals import ApprovalSettings
from bridge.contract.types import type_of
from bridge.errors import UsageError
from bridge.events.model import StoredEvent
from bridge.http.signing import sign
from bridge.runtime.time import iso_utc
from bridge.sinks.servicebus import to_message

SEND_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class ApproveCommand:
    """What to approve, and what the command says about it.

    `vm` names the VM that it is for; "" for any.
    """

    event_ids: Sequence[str]
    vm: str = ""
    reason: str = ""
    expires_seconds: float = 600.0


def send_command(
    settings: ApprovalSettings, request: ApproveCommand, *, session: str, requested_by: str
) -> str:
    """Send a command; return its id.

    Args:
        settings: where it goes, and what signs it.
        request: what it says.
        session: the session of the VM, "" without sessions.
        requested_by: who sends it.

    Raises:
        UsageError: every listener would refuse the command.
        DeliveryError: the bus did not accept it.
    """
    now = datetime.now(UTC)
    envelope = _envelope(request, requested_by, now)
    body = json.dumps(envelope).encode("ascii")
    _check(body, request)
    secrets = settings.signing_secrets.read().split() if settings.signing_secrets else []
    event = StoredEvent(id=envelope["id"], type=envelope["type"], body=body)
    message = to_message(event, session, sign(secrets, event.id, now, body) if secrets else None)
    with (
        mapped_errors(address_of(settings)),
        connect(settings) as client,
        sender_of(client, settings) as sender,
    ):
        sender.send_messages(message, timeout=SEND_SECONDS)
    return event.id


def _check(body: bytes, request: ApproveCommand) -> None:
    """Refuse a command that the listener would refuse, while its sender can still read why."""
    try:
        command = parse_command(body, message_id="")
    except ValueError as error:
        raise UsageError(f"approve: {error}") from None
    if len(command.event_ids) < len(request.event_ids):
        raise UsageError("approve: an EVENT_ID is given twice")


def _envelope(request: ApproveCommand, requested_by: str, now: datetime) -> dict[str, Any]:
    data = {
        "EventIds": list(request.event_ids),
        "RequestedBy": requested_by,
        "ExpiresAt": iso_utc(now + timedelta(seconds=request.expires_seconds)),
        "Vm": request.vm,
        "Reason": request.reason,
    }
    return {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": f"urn:imds-bridge:approve:{socket.gethostname()}",
        "type": type_of(COMMAND_APPROVE),
        "time": iso_utc(now),
        "datacontenttype": "application/json",
        "data": {name: value for name, value in data.items() if value},
    }
