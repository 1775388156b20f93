"""The command `approve`: ask what to approve, send the command, print its receipts."""

from __future__ import annotations

import argparse
import getpass
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from bridge.approvals.pending import REJECTED_RECEIPTS_PER_MINUTE
from bridge.approvals.sender import ApproveCommand, send_command
from bridge.arguments import DRY_RUN, FAILED, OK, add_flag, add_text, complete, load_config
from bridge.azure.bus_receiver import convert
from bridge.azure.receiver import ReceivedMessage
from bridge.azure.servicebus import address_of, connect, mapped_errors
from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config
from bridge.contract.types import KNOWN_VALUES, type_of
from bridge.errors import ImdsError, UsageError
from bridge.events.envelope import decode_event
from bridge.formats.text import format_relative
from bridge.http.signing import signature_fault
from bridge.imds.client import ImdsClient
from bridge.imds.document import SCHEDULED, ScheduledEvent, parse_document
from bridge.imds.instance import Vm, approval_session
from bridge.runtime.text import show
from bridge.runtime.time import Clock

_EPILOG = """\
Without EVENT_ID, on a VM: lists the Scheduled events, names every VM that an approval releases, and asks.

examples:
  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --wait
  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --vm web-0 --resource-group shop --expires 10m
  imds-bridge approve
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `approve`."""
    complete(command, _run, epilog=_EPILOG)
    command.add_argument("events", nargs="*", metavar="EVENT_ID", help="the EventId, in any letter case")
    add_text(command, "--vm", "NAME", "the VM whose listener gets it (default: this VM)")
    text = "the VM's resource group, for the session id (default: this VM's)"
    add_text(command, "--resource-group", "NAME", text)
    add_text(command, "--subscription", "ID", "its subscription, likewise (default: this VM's)")
    add_text(command, "--reason", "TEXT", "repeated in the receipt")
    text = "when the command expires: 90s, 10m, 1h (default: %(default)s)"
    add_text(command, "--expires", "TIME", text, default="10m")
    add_flag(command, "--wait", "wait for the receipt; exit 4 if it is of a dry run")


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    settings = settings_of(config)
    source = receipts_settings(settings) if arguments.wait else None
    try:
        expires_seconds = parse_duration(arguments.expires)
    except ValueError as error:
        raise UsageError(f"approve: --expires: {error}") from None
    event_ids = arguments.events or _choose_events(config)
    if not event_ids:
        show("nothing approved")
        return OK
    request = ApproveCommand(
        event_ids=event_ids,
        vm=arguments.vm,
        reason=arguments.reason,
        expires_seconds=expires_seconds,
    )
    vm = Vm(
        name=arguments.vm,
        resource_group=arguments.resource_group,
        subscription_id=arguments.subscription,
    )
    with open_receipts(source) if source else nullcontext() as receiver:
        session = session_of(config, settings, vm)
        command_id = send_command(settings, request, session=session, requested_by=user())
        to_session = f" to session {session}" if session else ""
        waiting = "; waiting for the receipt" if receiver else ""
        show(f"sent: command {command_id} for {', '.join(event_ids)}{to_session}{waiting}")
        if receiver is None:
            return OK
        messages = _messages(receiver, time.monotonic() + expires_seconds)
        found = believed(messages, settings, command_id, event_ids)
        return _report(found, len(event_ids), within=arguments.expires)


def _report(found: Iterator[Receipt], expected: int, *, within: str) -> int:
    """Print the receipts as they come; return the exit code."""
    receipts = []
    for receipt in found:
        show(receipt.text)
        receipts.append(receipt)
    if len(receipts) < expected and all(receipt.event_id for receipt in receipts):
        few = f"only {len(receipts)} of {expected} receipts within {within}: of rejections, at most"
        show(
            f"{few} {REJECTED_RECEIPTS_PER_MINUTE} a minute have one"
            if receipts
            else f"no receipt within {within}: that VM shows no such event, which its listener answers within the "
            "hour, or `imds-bridge listen` does not run there",
            stream=sys.stderr,
        )
    if any(receipt.is_dry_run for receipt in receipts):
        show("nothing was POSTed to IMDS: the listener runs with --dry-run", stream=sys.stderr)
        return DRY_RUN
    if [receipt.outcome for receipt in receipts] != ["Accepted"] * expected:
        return FAILED
    show("nothing is left to approve; the start may still wait for other VMs on the host, or for NotBefore")
    return OK


def _choose_events(config: Config) -> list[str]:
    """Show the Scheduled events, and ask which of them to approve."""
    events = {str(number): event for number, event in enumerate(scheduled_here(config), 1)}
    if not events:
        show("nothing is Scheduled for this VM or its group")
        return []
    for number, event in events.items():
        show(f"  {number}  {describe(event, datetime.now(UTC))}")
    if not sys.stdin.isatty():
        raise UsageError("approve: give the EventIds: without a terminal it cannot ask")
    answer = input("Approve which? Numbers, `all`, or nothing: ").split()
    if answer in (["n"], ["no"], ["none"]):
        return []
    if answer == ["all"]:
        answer = [*events]
    if wrong := [one for one in answer if one not in events]:
        raise UsageError(f"approve: given {' '.join(wrong)}, expected numbers from 1 to {len(events)}")
    return [events[one].event_id for one in answer]


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
    try:
        with closing(ImdsClient(config.imds, clock=Clock())) as client:
            document = parse_document(client.document())
    except (ImdsError, ValueError) as error:
        raise UsageError(f"{error}; away from the VM, give the EventIds and --vm") from error
    return [event for event in document.events.values() if event.status == SCHEDULED]


def describe(event: ScheduledEvent, now: datetime) -> str:
    """Describe what an approval starts, when it starts without one, and every VM that it releases."""
    when = ""
    if event.not_before:
        when = f", starts anyway {format_relative((event.not_before - now).total_seconds(), exact=True)}"
    names = ", ".join(event.resources) or "no VM is named"
    kind, source = event.raw.get("EventType"), event.raw.get("EventSource")
    return f"{kind} by {source}{when}; releases: {names}  ({event.event_id})"


def user() -> str:
    """Name who sends a command."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # the user id has no name, as in some containers
        return socket.gethostname()


def session_of(config: Config, settings: ApprovalSettings, vm: Vm) -> str:
    """Fill the session template with what is given of a VM, and else with this VM; return "" without sessions.

    Raises:
        UsageError: this VM's instance data is needed, and not available.
    """
    session = approval_session(settings.session, vm)
    if session is None:
        try:
            with closing(ImdsClient(config.imds, clock=Clock())) as client:
                here = client.instance()
        except ImdsError as error:
            raise UsageError(
                f"approve: the session {settings.session} needs a VM, and its resource group or subscription; "
                f"give --vm, --resource-group and --subscription as it names them ({error})"
            ) from error
        given = {name: value for name, value in asdict(vm).items() if value}
        session = approval_session(settings.session, replace(here, **given))
    if session is None:
        raise UsageError(f"approve: IMDS answers with a part of what the session {settings.session} needs")
    return session


ANSWER_SECONDS = 15.0
PEEK_SECONDS = 0.5
PEEK_MESSAGES = 100


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a receipt says about one EventId; "" stands for all of a command that could not be read."""

    event_id: str
    outcome: str
    text: str
    is_dry_run: bool = False


def parse_receipt(body: bytes, command_id: str) -> Receipt | None:
    """Read a receipt of a command; None if the message is anything else."""
    try:
        envelope = decode_event(body)
    except ValueError:
        return None
    data = envelope.get("data")
    if envelope.get("causationid") != command_id or not isinstance(data, dict):
        return None
    outcome, event_id, reason, detail = (
        str(data.get(name) or "") for name in ("Outcome", "EventId", "Reason", "Detail")
    )
    if outcome not in KNOWN_VALUES["Outcome"] or envelope.get("type") != type_of(
        f"approval.{outcome.lower()}"
    ):
        return None
    text = f"{outcome.lower()}: {event_id or 'the command'}: {reason}{f' ({detail})' if detail else ''}"
    resources = data.get("Resources")
    if outcome == "Accepted" and resources and isinstance(resources, list):
        text = f"{text}; releases {', '.join(map(str, resources))}"
    is_dry_run = data.get("DryRun") is True
    return Receipt(event_id=event_id, outcome=outcome, text=text, is_dry_run=is_dry_run)


def receipts_settings(settings: ApprovalSettings) -> ApprovalSettings:
    """Return the settings of the subscription that receipts arrive in.

    Raises:
        UsageError: the configuration names none.
    """
    topic, subscription = settings.receipts_topic, settings.receipts_subscription
    if not topic or not subscription:
        raise UsageError("approve: --wait needs receipts_topic and receipts_subscription in [approvals]")
    return settings.model_copy(update={"queue": "", "topic": topic, "subscription": subscription})


@contextmanager
def open_receipts(source: ApprovalSettings) -> Iterator[Any]:
    """Open the subscription that receipts arrive in and look into it: it must work before a command is sent.

    Raises:
        DeliveryError: it cannot be read.
    """
    with (
        mapped_errors(f"{address_of(source)}/{source.subscription}"),
        connect(source) as client,
        client.get_subscription_receiver(source.topic, source.subscription) as receiver,
    ):
        receiver.peek_messages(1, timeout=ANSWER_SECONDS)
        yield receiver


def believed(
    messages: Iterable[ReceivedMessage], settings: ApprovalSettings, command_id: str, event_ids: Sequence[str]
) -> Iterator[Receipt]:
    """Yield the command's receipts until each EventId has one; with signing secrets, only those that are signed."""
    secrets = settings.signing_secrets.read().split() if settings.signing_secrets else []
    missing = {event_id.lower() for event_id in event_ids}
    for message in messages:
        receipt = parse_receipt(message.body, command_id)
        if receipt is None or (receipt.event_id and receipt.event_id.lower() not in missing):
            continue
        if secrets and (
            fault := signature_fault(
                secrets, message.properties, message.body, signed_near=message.enqueued_at
            )
        ):
            show(f"warning: receipt {message.message_id} is not believed: {fault}", stream=sys.stderr)
            continue
        yield receipt
        missing -= {receipt.event_id.lower()} if receipt.event_id else missing
        if not missing:
            return


def _messages(receiver: Any, deadline: float) -> Iterator[ReceivedMessage]:
    """Yield all messages that can be decoded, and new ones until the deadline; they are left where they are."""
    number = 1
    while True:
        page = receiver.peek_messages(PEEK_MESSAGES, sequence_number=number, timeout=ANSWER_SECONDS)
        messages = [convert(message) for message in page]
        yield from (message for message in messages if not message.fault)
        if time.monotonic() >= deadline:
            return
        # Messages that cannot be decoded have no number, and must not be peeked at again and again.
        number = max([number + len(messages), *(1 + (one.sequence_number or 0) for one in messages)])
        if not messages:
            time.sleep(PEEK_SECONDS)  # Ctrl-C ends it
