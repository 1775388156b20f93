"""Send an approve command over the bus: for `imds-bridge approve` and for the console."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from azure.servicebus import ServiceBusMessage

from bridge.approvals.command import COMMAND_APPROVE, parse_command
from bridge.azure.servicebus import address_of, connect, delivery_error
from bridge.config.approvals import ApprovalSettings
from bridge.contract.types import type_of
from bridge.errors import DeliveryError, UsageError
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.http.signing import sign
from bridge.runtime.time import iso_utc

SEND_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class ApproveCommand:
    """What to approve, and what the command says about it.

    `vm` and `resource_group` name the VM whose session gets the command; "" for this VM.
    """

    event_ids: Sequence[str]
    vm: str = ""
    resource_group: str = ""
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
    properties: dict[str | bytes, Any] = {
        "cloudEvents_type": envelope["type"],
        "cloudEvents_id": envelope["id"],
    }
    if settings.signing_secrets:
        properties.update(sign(settings.signing_secrets.read().split(), envelope["id"], now, body))
    message = ServiceBusMessage(
        body,
        content_type=CONTENT_TYPE,
        message_id=envelope["id"],
        subject=envelope["type"],
        session_id=session or None,
        time_to_live=timedelta(seconds=request.expires_seconds),
        application_properties=properties,
    )
    try:
        with connect(settings) as client:
            get = client.get_topic_sender if settings.topic else client.get_queue_sender
            with get(settings.entity) as sender:
                sender.send_messages(message, timeout=SEND_SECONDS)
    except DeliveryError:
        raise
    except Exception as error:
        raise delivery_error(error, address_of(settings)) from error
    return str(envelope["id"])


def _check(body: bytes, request: ApproveCommand) -> None:
    """Refuse a command that the listener would refuse, while its sender can still read why."""
    try:
        command = parse_command(body, message_id="")
    except ValueError as error:
        raise UsageError(f"approve: {error}") from None
    if len(command.event_ids) < len(request.event_ids):
        raise UsageError("approve: an EVENT_ID is given twice")


def _envelope(request: ApproveCommand, requested_by: str, now: datetime) -> dict[str, Any]:
    data: dict[str, Any] = {
        "EventIds": list(request.event_ids),
        "RequestedBy": requested_by,
        "ExpiresAt": iso_utc(now + timedelta(seconds=request.expires_seconds)),
    }
    if request.vm:
        data["Vm"] = request.vm
    if request.reason:
        data["Reason"] = request.reason
    return {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": f"urn:imds-bridge:approve:{socket.gethostname()}",
        "type": type_of(COMMAND_APPROVE),
        "time": iso_utc(now),
        "datacontenttype": "application/json",
        "data": data,
    }
