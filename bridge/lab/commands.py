"""The command line `imds-bridge lab`: run the simulators, or control running ones over their control API."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from bridge.lab.httpd import Fault, LabError
from bridge.lab.rendering import EVENT_TYPES
from bridge.lab.run import (
    BUS_FILE,
    BUS_OFFSET,
    CONTROL_OFFSET,
    CONTROL_URL,
    GRID_OFFSET,
    PORT_BASE,
    serve,
)
from bridge.lab.scenario import load_scenario, scenario_names
from bridge.runtime.text import show

EXIT_OK = 0
EXIT_USAGE = 2

LAB_EXAMPLES = """\
examples:
  imds-bridge lab                                   one VM, web-0, in real time
  imds-bridge lab --vm web-0 --vm web-1 --time-scale 60
  imds-bridge lab --scenario user-reboot            play a scenario; imds-bridge lab scenarios lists them
  imds-bridge lab --scenario ./my-scenario.toml

Microsoft's clients for Python, Node, Java, Go and .NET connect to its Service Bus by the string that it prints. It
has no receive-and-delete mode, deferred or scheduled messages, session state, transactions, administration over HTTP,
TLS or WebSockets. Its Event Grid takes keys, but neither SAS nor Entra tokens.
"""
SCHEDULE_EXAMPLES = (
    "imds-bridge lab schedule --type Reboot --vm web-0 --notice 60 --source User",
    "imds-bridge lab schedule --type Reboot --vm web-0 --status Started    a host failure",
    "imds-bridge lab schedule --type Redeploy --hold    an approval does not start it before: lab release",
)
DESCRIBE_EXAMPLES = (
    "imds-bridge lab describe web-0 resourceGroupName=other    it has moved",
    "imds-bridge lab describe web-0 vmId resourceGroupName subscriptionId resourceId    a part of it",
    """imds-bridge lab describe web-0 'tagsList=[{"name":"env","value":"test"}]'""",
)
EVENT_COMMANDS = (
    ("start", "start an event now, approved or not"),
    ("cancel", "cancel a Scheduled event"),
    ("complete", "complete an event"),
    ("release", "let a held event start when it is approved"),
)

TIMEOUT_SECONDS = 10.0
# The minimum notice of each type (Microsoft Learn, "Scheduled Events"). The user sets that of Terminate, from 300 up.
MINIMUM_NOTICE_SECONDS = {"Redeploy": 600.0, "Preempt": 30.0, "Terminate": 300.0}
DEFAULT_NOTICE_SECONDS = 900.0

Subparsers = Any  # argparse has no public type for what add_subparsers returns


def configure(parser: argparse.ArgumentParser) -> None:
    """Complete the parser of `lab` with its sub-commands."""
    parser.description = (
        "Run a simulated IMDS, Service Bus, Event Grid and webhook inbox on 127.0.0.1 until Ctrl-C."
    )
    parser.epilog = LAB_EXAMPLES
    add = parser.add_argument
    vm = "a VM; can be repeated (default: web-0, or the scenario's)"
    add("--vm", action="append", dest="lab_vms", metavar="NAME", default=[], help=vm)
    scenario = f"play one of: {', '.join(scenario_names())}; or a file"
    add("--scenario", metavar="NAME_OR_FILE", help=scenario)
    time_scale = "how many lab seconds pass in one second (default: 1, or the scenario's)"
    add("--time-scale", type=float, metavar="N", help=time_scale)
    port_base = (
        f"the inbox's port; Service Bus has this port + {BUS_OFFSET}, Event Grid + {GRID_OFFSET}, the control API "
        f"+ {CONTROL_OFFSET}, and the VMs the ports after it (default: %(default)s; 0: any free ports)"
    )
    add("--port-base", type=int, metavar="PORT", default=PORT_BASE, help=port_base)
    bus = "queues and topics, in the format of the official Service Bus emulator (default: a small set)"
    add("--bus-config", metavar="FILE", default=BUS_FILE, help=bus)
    add("--write", metavar="FILE", type=Path, help="also write the configuration that is printed to FILE")
    parser.set_defaults(run=run, lab_command=None)
    _add_commands(parser.add_subparsers(dest="lab_command", metavar="COMMAND", title="control a running lab"))


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit code: 0 success, 2 wrong usage or no running lab."""
    try:
        match args.lab_command:
            case None:
                serve(args)
            case "scenarios":
                show(*(f"{name:20} {load_scenario(name).title}" for name in scenario_names()))
            case "schedule":
                _schedule(args)
            case "fault":
                _fault(args)
            case "describe":
                _call(args, "POST", "/describe", vm=args.vm, properties=_properties(args.properties))
            case "state":
                show(*json.dumps(_call(args, "GET", "/state"), indent=2).split("\n"))
            case name:
                _call(args, "POST", f"/{name}", event_id=args.event_id)
    except LabError as error:
        show(f"imds-bridge lab: {error}", stream=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _schedule(args: argparse.Namespace) -> None:
    if args.event_type not in EVENT_TYPES:
        expected = ", ".join(EVENT_TYPES)
        show(f"note: --type {args.event_type} is not one of {expected}", stream=sys.stderr)
    names = ("event_type", "event_source", "event_status", "duration_seconds", "description", "hold")
    event = {name: getattr(args, name) for name in names}
    if args.impact_seconds is not None:
        event |= {"completes": True, "impact_seconds": args.impact_seconds}
    if args.notice_seconds is None:
        args.notice_seconds = MINIMUM_NOTICE_SECONDS.get(args.event_type, DEFAULT_NOTICE_SECONDS)
    event |= {"resources": _resources(args), "notice_seconds": args.notice_seconds}
    show(_call(args, "POST", "/schedule", **event)["event_id"])


def _resources(args: argparse.Namespace) -> list[str]:
    if args.no_vm:
        return []
    known = list(_call(args, "GET", "/state")["vms"])
    if unknown := [name for name in args.resources if name not in known]:
        raise LabError(
            f"--vm given: {', '.join(unknown)}; expected: {', '.join(known)}, the VMs of this lab "
            "(--other-vm names others)"
        )
    return [*args.resources, *args.other_vms] or known


def _fault(args: argparse.Namespace) -> None:
    if args.kind == "clear":
        _call(args, "POST", "/clear-faults")
    else:
        values = {name: getattr(args, name) for name in ("kind", "seconds", "retry_after")}
        _call(args, "POST", "/fault", count=args.count or None, **values)


def _properties(given: Sequence[str]) -> dict[str, Any]:
    pairs = (text.partition("=") for text in given)
    return {
        name: (json.loads(value) if value[:1] == "[" else value) if is_given else None
        for name, is_given, value in pairs
    }


def _call(args: argparse.Namespace, method: str, path: str, **values: Any) -> Any:
    """Return the answer of the control API; raise LabError if it refuses or does not answer."""
    session = requests.Session()
    session.trust_env = False  # no proxy of the environment stands before this machine
    try:
        response = session.request(method, args.control + path, json=values, timeout=TIMEOUT_SECONDS)
        answer = dict(response.json())
    except (requests.RequestException, ValueError, TypeError) as error:
        raise LabError(
            f"--control given: {args.control}, where no lab answers ({error}); "
            "expected: the control address of a running lab; start one with: imds-bridge lab"
        ) from error
    if not response.ok:
        status = f"--control given: {args.control}, which answered {response.status_code}; expected: a lab"
        raise LabError(answer.get("error") or status)
    return answer


def _add_commands(subparsers: Subparsers) -> None:
    _add_schedule(subparsers)
    for name, help_text in EVENT_COMMANDS:
        example = f"imds-bridge lab {name} 4CAEA225-A741-474D-A72E-428C86FCD853"
        event_id = "as printed by `lab schedule`, in any letter case"
        command = _add_command(subparsers, name, help_text, example)
        command.add_argument("event_id", metavar="EVENT_ID", help=event_id)
    _add_fault(subparsers)
    described = "change a VM's instance data: name, resourceGroupName, tagsList; no property: as it was"
    command = _add_command(subparsers, "describe", described, *DESCRIBE_EXAMPLES)
    command.add_argument("vm", metavar="VM")
    one = "its new value, a list as JSON; NAME alone: leave it out"
    command.add_argument("properties", nargs="*", metavar="NAME[=VALUE]", help=one)
    state = "show events, VMs, approvals and incarnation as JSON"
    _add_command(subparsers, "state", state, "imds-bridge lab state")
    _add_command(subparsers, "scenarios", "list the scenarios", "imds-bridge lab scenarios", control=False)


def _add_schedule(subparsers: Subparsers) -> None:
    command = _add_command(subparsers, "schedule", "add an event and print its EventId", *SCHEDULE_EXAMPLES)
    add = command.add_argument
    types = f"EventType: {', '.join(EVENT_TYPES)}, or another text to test an unknown type"
    add("--type", required=True, dest="event_type", metavar="TYPE", help=types)
    vm = "an affected VM of this lab; can be repeated (default: all)"
    add("--vm", action="append", dest="resources", metavar="NAME", default=[], help=vm)
    other = "an affected VM that this lab does not have; can be repeated"
    add("--other-vm", action="append", dest="other_vms", metavar="NAME", default=[], help=other)
    add("--no-vm", action="store_true", help="leave Resources empty")
    notice = (
        "lab seconds until NotBefore (default: the documented minimum: Freeze and Reboot 900, Redeploy 600, "
        "Terminate 300, Preempt 30)"
    )
    add("--notice", dest="notice_seconds", type=float, metavar="SECONDS", help=notice)
    source = "EventSource (default: %(default)s)"
    add("--source", dest="event_source", choices=("Platform", "User"), default="Platform", help=source)
    status = "EventStatus (default: %(default)s); Started: an event without notice"
    add(
        "--status",
        dest="event_status",
        choices=("Scheduled", "Started", "Advisory"),
        default="Scheduled",
        help=status,
    )
    duration = "DurationInSeconds (default: -1, unknown)"
    add("--duration", dest="duration_seconds", type=int, default=-1, metavar="SECONDS", help=duration)
    impact = "complete it this long after its start, in lab seconds (default: by `lab complete`)"
    add("--impact", dest="impact_seconds", type=float, metavar="SECONDS", help=impact)
    hold = "do not start it when it is approved, but at NotBefore or `release`"
    add("--hold", action="store_true", help=hold)
    add("--description", default="", metavar="TEXT", help="Description (default: empty)")


def _add_fault(subparsers: Subparsers) -> None:
    example = "imds-bridge lab fault 429 --count 3 --retry-after 5"
    add = _add_command(subparsers, "fault", "answer the next GET requests with a fault", example).add_argument
    kinds = f"an HTTP status by number or name, or one of: {', '.join(Fault.kinds)}; clear removes all faults"
    add("kind", metavar="KIND", help=kinds)
    count = "number of requests (default: %(default)s; 0: no limit)"
    add("--count", type=int, default=1, metavar="N", help=count)
    seconds = "real seconds before the answer (default: 5 for slow, else 0)"
    add("--seconds", type=float, metavar="S", help=seconds)
    add("--retry-after", metavar="N", help="the Retry-After header of an HTTP status (default: none)")


def _add_command(
    subparsers: Subparsers, name: str, help_text: str, *examples: str, control: bool = True
) -> argparse.ArgumentParser:
    epilog = "\n  ".join([f"example{'s' if examples[1:] else ''}:", *examples])
    description = f"{help_text[0].upper()}{help_text[1:]}."
    command: argparse.ArgumentParser
    command = subparsers.add_parser(name, help=help_text, description=description, epilog=epilog)
    if control:
        address = "the lab's control address (default: %(default)s)"
        command.add_argument("--control", default=CONTROL_URL, metavar="URL", help=address)
    return command
