"""What `imds-bridge approve` sends: a command on the bus."""

from __future__ import annotations

import getpass
import re
import socket
from datetime import datetime

from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config
from bridge.errors import ImdsError, UsageError
from bridge.formats.text import format_relative
from bridge.imds.client import ImdsClient
from bridge.imds.document import SCHEDULED, ScheduledEvent, parse_document
from bridge.imds.instance import Vm
from bridge.runtime.time import Clock
from bridge.service.command_sender import ApproveCommand
from bridge.service.identity import approval_session

_DURATION = re.compile(r"(\d+)\s*(s|m|min|h)?")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, None: 60}


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


def user() -> str:
    """Name who sends a command."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # the user id has no name, as in some containers
        return socket.gethostname()


def session_of(config: Config, request: ApproveCommand) -> str:
    """Fill the session template with the given VM, or with this VM; return "" without sessions.

    Raises:
        UsageError: this VM's instance data is needed, and not available.
    """
    settings = settings_of(config)
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
