"""The command `approve`: ask what to approve, send the command, print its receipts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bridge.cli import approve
from bridge.cli.common import add_config, load_config
from bridge.cli.exit_codes import FAILED, OK
from bridge.config.models import Config
from bridge.errors import UsageError

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
        "--resource-group", default="", metavar="NAME", help="the VM's resource group, for the session id"
    )
    command.add_argument("--reason", default="", metavar="TEXT", help="repeated in the receipt")
    command.add_argument("--expires", default="10m", metavar="TIME", help="10m, 90s, 1h (default: 10m)")
    command.add_argument("--wait", action="store_true", help="wait for the receipt")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments)
    approve.settings_of(config)
    try:
        expires_seconds = approve.parse_duration(arguments.expires)
    except ValueError as error:
        raise UsageError(f"approve: --expires: {error}") from None
    event_ids = arguments.events or _choose_events(config)
    if not event_ids:
        print("nothing approved")
        return OK
    request = approve.ApproveCommand(
        event_ids=event_ids,
        vm=arguments.vm,
        resource_group=arguments.resource_group,
        reason=arguments.reason,
        expires_seconds=expires_seconds,
    )
    command_id = approve.send(config, request)
    print(f"sent: command {command_id} for {', '.join(event_ids)}")
    if not arguments.wait:
        return OK
    receipts = approve.wait_for_receipts(
        config, command_id, len(event_ids), limit_seconds=expires_seconds, on_receipt=_print_receipt
    )
    if len(receipts) < len(event_ids):
        print(
            f"no receipt within {arguments.expires}: is `imds-bridge listen` running on that VM?",
            file=sys.stderr,
        )
    return _result(receipts, expected=len(event_ids))


def _result(receipts: Sequence[dict[str, Any]], *, expected: int) -> int:
    accepted = [receipt for receipt in receipts if receipt["data"]["Outcome"] == "Accepted"]
    if len(accepted) < expected:
        return FAILED
    print("IMDS accepted the approval; the start may still wait for other VMs on the host, or for NotBefore")
    return OK


def _print_receipt(receipt: dict[str, Any]) -> None:
    data = receipt["data"]
    is_released = data["Outcome"] == "Accepted" and data["Resources"]
    releases = f"; releases {', '.join(data['Resources'])}" if is_released else ""
    detail = f" ({data['Detail']})" if data["Detail"] else ""
    print(f"{data['Outcome'].lower()}: {data['EventId']}: {data['Reason']}{detail}{releases}")


def _choose_events(config: Config) -> list[str]:
    """Show the Scheduled events, and ask which of them to approve."""
    events = approve.scheduled_here(config)
    if not events:
        print("nothing is Scheduled for this VM or its group")
        return []
    for number, event in enumerate(events, 1):
        print(f"  {number}  {approve.describe(event, datetime.now(UTC))}")
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
