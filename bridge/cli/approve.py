"""What `imds-bridge approve` sends: a command on the bus."""

from __future__ import annotations

import getpass
import json
import re
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
from bridge.config.models import Config
from bridge.contract.types import type_of
from bridge.errors import DeliveryError, ImdsError, UsageError
from bridge.formats.cloudevents import CONTENT_TYPE
from bridge.formats.text import format_relative
from bridge.http.signing import sign
from bridge.imds.client import ImdsClient
from bridge.imds.document import SCHEDULED, ScheduledEvent, parse_document
from bridge.imds.instance import Vm
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.service.identity import approval_session

SEND_SECONDS = 15.0
_DURATION = re.compile(r"(\d+)\s*(s|m|min|h)?")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, None: 60}


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


def parse_duration(text: str) -> float:
    """Read `10m`, `90s`, `1h`; a bare number counts minutes.

    Raises:
        ValueError: it is not a duration.
    """
    match = _DURATION.fullmatch(text.strip().lower())
    if not match or not int(match.group(1)):
        raise ValueError(f"given {text!r}, expected a time such as 10m, 90s or 1h")
    return float(int(match.group(1)) * _SECONDS[match.group(2)])


def settings_of(config: Config) -> ApprovalSettings:
    """Return the settings of the approvals.

    Raises:
        UsageError: the configuration has none, or none with a bus.
    """
    if config.approvals is None or not config.approvals.has_bus:
        raise UsageError(
            "there is no [approvals] with a Service Bus in the configuration; see docs/configuration.md"
        )
    return config.approvals


def scheduled_here(config: Config) -> list[ScheduledEvent]:
    """Return the Scheduled events of this VM's IMDS.

    Raises:
        UsageError: this is not an Azure VM, or IMDS does not answer.
    """
    client = ImdsClient(config.imds, clock=Clock())
    try:
        document = parse_document(client.document())
    except (ImdsError, ValueError) as error:
        raise UsageError(f"{error}; away from the VM, give the EventIds and --vm") from error
    finally:
        client.close()
    return [event for event in document.events.values() if event.status == SCHEDULED]


def describe(event: ScheduledEvent, now: datetime) -> str:
    """Describe what an approval starts, when it starts without one, and every VM that it releases."""
    when = (
        f", starts anyway {format_relative((event.not_before - now).total_seconds(), exact=True)}"
        if event.not_before
        else ""
    )
    names = ", ".join(event.resources) or "no VM is named"
    kind, source = event.raw.get("EventType"), event.raw.get("EventSource")
    return f"{kind} by {source}{when}; releases: {names}  ({event.event_id})"


def send(config: Config, request: ApproveCommand) -> str:
    """Send the command; return its id.

    Raises:
        UsageError: every listener would refuse the command, or its session cannot be determined.
        DeliveryError: the bus did not accept it.
    """
    settings = settings_of(config)
    now = datetime.now(UTC)
    session = _session(config, settings, request)
    envelope = _envelope(request, now)
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


def _envelope(request: ApproveCommand, now: datetime) -> dict[str, Any]:
    user = _user()
    data: dict[str, Any] = {
        "EventIds": list(request.event_ids),
        "RequestedBy": user,
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


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # the user id has no name, as in some containers
        return socket.gethostname()


def _session(config: Config, settings: ApprovalSettings, request: ApproveCommand) -> str:
    """Fill the session template with the given VM, or with this VM."""
    if not settings.session:
        return ""
    vm = Vm(name=request.vm, resource_group=request.resource_group)
    if not vm.name or ("{resource_group}" in settings.session and not vm.resource_group):
        client = ImdsClient(config.imds, clock=Clock())
        try:
            here = client.instance()
        except ImdsError as error:
            raise UsageError(
                f"approve: the session {settings.session} needs a VM and its resource group; "
                f"give --vm and --resource-group ({error})"
            ) from error
        finally:
            client.close()
        vm = Vm(name=request.vm or here.name, resource_group=request.resource_group or here.resource_group)
    return approval_session(settings.session, vm) or ""
