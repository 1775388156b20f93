"""The command `approve`: ask what to approve, send the command, print its receipts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime

from bridge.cli import approve
from bridge.cli.common import add_config, load_config
from bridge.cli.exit_codes import FAILED, OK
from bridge.cli.receipts import IgnoredReceipt, Receipt, open_receipts, receipts_settings
from bridge.config.models import Config
from bridge.errors import UsageError
from bridge.runtime.text import show
from bridge.service.command_sender import ApproveCommand, send_command

_EPILOG = """\
Without EVENT_ID, on a VM: lists the Scheduled events, names every VM that an approval releases, and asks.

examples:
  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --wait
  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --vm web-0 --resource-group shop --expires 10m
  imds-bridge approve
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `approve`."""
    command.epilog = _EPILOG
    add_config(command)
    command.add_argument("events", nargs="*", metavar="EVENT_ID", help="the EventId, in any letter case")
    command.add_argument(
        "--vm", default="", metavar="NAME", help="the VM whose listener gets it (default: this VM)"
    )
    command.add_argument(
        "--resource-group",
        default="",
        metavar="NAME",
        help="the VM's resource group, for the session id (default: this VM's)",
    )
    command.add_argument("--reason", default="", metavar="TEXT", help="repeated in the receipt")
    command.add_argument(
        "--expires",
        default="10m",
        metavar="TIME",
        help="when the command expires: 90s, 10m, 1h (default: %(default)s)",
    )
    command.add_argument("--wait", action="store_true", help="wait for the receipt")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    settings = approve.settings_of(config)
    if arguments.wait:
        receipts_settings(settings)
    try:
        expires_seconds = approve.parse_duration(arguments.expires)
    except ValueError as error:
        raise UsageError(f"approve: --expires: {error}") from None
    event_ids = arguments.events or _choose_events(config)
    if not event_ids:
        show("nothing approved")
        return OK
    request = ApproveCommand(
        event_ids=event_ids,
        vm=arguments.vm,
        resource_group=arguments.resource_group,
        reason=arguments.reason,
        expires_seconds=expires_seconds,
    )
    with open_receipts(settings) if arguments.wait else nullcontext() as receipts:
        session = approve.session_of(config, request)
        command_id = send_command(settings, request, session=session, requested_by=approve.user())
        to_session = f" to session {session}" if session else ""
        waiting = "" if receipts is None else "; waiting for the receipt"
        show(f"sent: command {command_id} for {', '.join(event_ids)}{to_session}{waiting}")
        if receipts is None:
            return OK
        found = receipts.wait(command_id, event_ids, limit_seconds=expires_seconds)
        return _report(found, len(event_ids), within=arguments.expires)


def _report(found: Iterator[Receipt | IgnoredReceipt], expected: int, *, within: str) -> int:
    """Print the receipts as they come; return the exit code."""
    receipts = []
    for one in found:
        if isinstance(one, Receipt):
            receipts.append(one)
            show(_describe(one))
        else:
            show(f"warning: receipt {one.message_id} is not believed: {one.fault}", stream=sys.stderr)
    is_whole = len(receipts) == expected or any(not one.event_id for one in receipts)
    if not is_whole:
        show(f"no receipt within {within}: is `imds-bridge listen` running on that VM?", stream=sys.stderr)
    if [one.outcome for one in receipts] != ["Accepted"] * expected:
        return FAILED
    show("IMDS accepted the approval; the start may still wait for other VMs on the host, or for NotBefore")
    return OK


def _describe(receipt: Receipt) -> str:
    is_released = receipt.outcome == "Accepted" and receipt.resources
    releases = f"; releases {', '.join(receipt.resources)}" if is_released else ""
    detail = f" ({receipt.detail})" if receipt.detail else ""
    return (
        f"{receipt.outcome.lower()}: {receipt.event_id or 'the command'}: {receipt.reason}{detail}{releases}"
    )


def _choose_events(config: Config) -> list[str]:
    """Show the Scheduled events, and ask which of them to approve."""
    events = approve.scheduled_here(config)
    if not events:
        show("nothing is Scheduled for this VM or its group")
        return []
    for number, event in enumerate(events, 1):
        show(f"  {number}  {approve.describe(event, datetime.now(UTC))}")
    if not sys.stdin.isatty():
        raise UsageError("approve: give the EventIds: without a terminal it cannot ask")
    answer = input("Approve which? Numbers, `all`, or nothing: ").split()
    if answer in (["n"], ["no"], ["none"]):
        return []
    if answer == ["all"]:
        return [event.event_id for event in events]
    known = {str(number): event.event_id for number, event in enumerate(events, 1)}
    if wrong := [one for one in answer if one not in known]:
        raise UsageError(f"approve: given {' '.join(wrong)}, expected numbers from 1 to {len(events)}")
    return [known[one] for one in answer]
