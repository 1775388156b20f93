"""The command line `imds-bridge lab`: run the simulators, or drive running ones."""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from bridge.lab.eventgrid import EventGridLab
from bridge.lab.faults import FAULT_KINDS
from bridge.lab.httpd import LabError
from bridge.lab.imds import EVENT_TYPES, ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.scenario import Scenario, Step, load_scenario, play, scenario_names
from bridge.runtime.signals import STOP_SIGNALS

PORT_BASE = 8800
BUS_OFFSET = 5
GRID_OFFSET = 6
PUSH_PATH = "/eventgrid"  # of the inbox: Event Grid delivers there what it took
BUS_FILE = Path(__file__).with_name("servicebus.json")
CONTROL_OFFSET = 10  # the inbox has the port base, the control API this much above it, then the VMs
CONTROL_URL = f"http://127.0.0.1:{PORT_BASE + CONTROL_OFFSET}"
ANSWER_SECONDS = 10.0
EXIT_FINE = 0
EXIT_USAGE = 2

LAB_EXAMPLES = """\
examples:
  imds-bridge lab                                   one VM, web-0, in real time
  imds-bridge lab --vm web-0 --vm web-1 --time-scale 60
  imds-bridge lab --scenario user-reboot            a story; see: imds-bridge lab scenarios
  imds-bridge lab --scenario ./my-story.toml

drive a running lab from another terminal:
  imds-bridge lab schedule --type Reboot --vm web-0 --notice 60
  imds-bridge lab start EVENT_ID
  imds-bridge lab fault 503 --count 3
  imds-bridge lab state
"""

Subparsers = Any  # argparse's own type for what add_subparsers returns is private


def configure(parser: argparse.ArgumentParser) -> None:
    """Complete the parser of `lab` with its sub-commands."""
    parser.description = (
        "Run a simulated IMDS, Service Bus, Event Grid and webhook inbox on 127.0.0.1 until Ctrl-C."
    )
    parser.epilog = LAB_EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--vm", action="append", dest="lab_vms", metavar="NAME", default=[], help="a VM; may be repeated"
    )
    parser.add_argument(
        "--scenario", metavar="NAME_OR_FILE", help=f"play one of: {', '.join(scenario_names())}; or a file"
    )
    parser.add_argument(
        "--time-scale", type=float, metavar="N", help="lab seconds in a real one (1, or the scenario's)"
    )
    parser.add_argument(
        "--port-base",
        type=int,
        metavar="PORT",
        default=PORT_BASE,
        help=f"the inbox's port; {BUS_OFFSET} above it Service Bus, {GRID_OFFSET} above Event Grid, "
        f"{CONTROL_OFFSET} above control, then the VMs (%(default)s; 0: any free)",
    )
    parser.add_argument(
        "--bus-config",
        metavar="FILE",
        default=BUS_FILE,
        help="queues and topics, in the format of the official Service Bus emulator (default: a small set)",
    )
    parser.set_defaults(run=run, lab_command=None)
    _add_drivers(parser.add_subparsers(dest="lab_command", metavar="COMMAND", title="drive a running lab"))


def run(args: argparse.Namespace) -> int:
    """Do what was asked; return the exit code: 0 fine, 2 usage or no lab there."""
    commands: dict[str | None, Callable[[argparse.Namespace], int]] = {
        None: _serve,
        "schedule": _schedule,
        "start": _act_on_event,
        "cancel": _act_on_event,
        "complete": _act_on_event,
        "fault": _fault,
        "state": _state,
        "scenarios": _scenarios,
    }
    try:
        return commands[args.lab_command](args)
    except LabError as error:
        print(f"imds-bridge lab: {error}", file=sys.stderr)
        return EXIT_USAGE


# --- the command line of the drivers ---


def _add_drivers(subparsers: Subparsers) -> None:
    _add_schedule(subparsers)
    for name, help_text in (
        ("start", "start an event now, approved or not"),
        ("cancel", "take a Scheduled event away"),
        ("complete", "take a started event away"),
    ):
        driver = _driver(
            subparsers, name, help_text, f"imds-bridge lab {name} 4CAEA225-A741-474D-A72E-428C86FCD853"
        )
        driver.add_argument(
            "event_id", metavar="EVENT_ID", help="as `lab schedule` printed it, in any letter case"
        )
    _add_fault(subparsers)
    _driver(
        subparsers, "state", "show events, VMs, approvals and incarnation as JSON", "imds-bridge lab state"
    )
    subparsers.add_parser("scenarios", help="list the scenarios", description="List the scenarios.")


def _add_schedule(subparsers: Subparsers) -> None:
    driver = _driver(
        subparsers,
        "schedule",
        "add an event and print its EventId",
        "imds-bridge lab schedule --type Reboot --vm web-0 --notice 60 --source User",
    )
    driver.add_argument("--type", required=True, dest="event_type", choices=EVENT_TYPES, help="EventType")
    driver.add_argument(
        "--vm",
        action="append",
        dest="resources",
        metavar="NAME",
        help="an affected VM; may be repeated (all)",
    )
    driver.add_argument(
        "--notice",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="lab seconds until NotBefore (%(default)g)",
    )
    driver.add_argument(
        "--source", choices=("Platform", "User"), default="Platform", help="EventSource (%(default)s)"
    )
    driver.add_argument(
        "--duration", type=int, default=-1, metavar="SECONDS", help="DurationInSeconds (%(default)s: unknown)"
    )
    driver.add_argument("--description", default="", metavar="TEXT", help="Description")


def _add_fault(subparsers: Subparsers) -> None:
    driver = _driver(
        subparsers,
        "fault",
        "answer the next GET requests wrongly",
        "imds-bridge lab fault 429 --count 3 --retry-after 5",
    )
    driver.add_argument(
        "kind",
        metavar="KIND",
        help=f"an HTTP status by number or name, or one of: {', '.join(FAULT_KINDS)}; or clear",
    )
    driver.add_argument(
        "--count", type=int, default=1, metavar="N", help="requests (%(default)s; 0: for ever)"
    )
    driver.add_argument("--seconds", type=float, metavar="S", help="real seconds before the answer")
    driver.add_argument("--retry-after", metavar="N", help="the header of an HTTP status")


def _driver(subparsers: Subparsers, name: str, help_text: str, example: str) -> argparse.ArgumentParser:
    driver: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    driver.add_argument(
        "--control", default=CONTROL_URL, metavar="URL", help="the lab's control address (%(default)s)"
    )
    return driver


# --- what the drivers do ---


def _schedule(args: argparse.Namespace) -> int:
    known = list(_call(args.control, "GET", "/state")["vms"])
    resources = args.resources or known
    strangers = [name for name in resources if name not in known]
    if strangers:
        raise LabError(
            f"--vm given: {', '.join(strangers)}; expected: {', '.join(known)}, which this lab has"
        )
    answer = _call(
        args.control,
        "POST",
        "/schedule",
        event_type=args.event_type,
        resources=resources,
        notice_seconds=args.notice,
        event_source=args.source,
        duration_seconds=args.duration,
        description=args.description,
    )
    print(answer["event_id"])
    return EXIT_FINE


def _act_on_event(args: argparse.Namespace) -> int:
    _call(args.control, "POST", f"/{args.lab_command}", event_id=args.event_id)
    return EXIT_FINE


def _fault(args: argparse.Namespace) -> int:
    if args.kind == "clear":
        _call(args.control, "POST", "/clear-faults")
        return EXIT_FINE
    _call(
        args.control,
        "POST",
        "/fault",
        kind=args.kind,
        count=args.count or None,
        seconds=args.seconds,
        retry_after=args.retry_after,
    )
    return EXIT_FINE


def _state(args: argparse.Namespace) -> int:
    print(json.dumps(_call(args.control, "GET", "/state"), indent=2))
    return EXIT_FINE


def _scenarios(_: argparse.Namespace) -> int:
    for name in scenario_names():
        print(f"{name:20} {load_scenario(name).title}")
    return EXIT_FINE


def _call(control_url: str, method: str, path: str, **values: Any) -> Any:
    """Return what the control API answers; raise LabError where it refuses or nobody is there."""
    host, port = _host_and_port(control_url)
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path, body=json.dumps(values) if method == "POST" else None)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise LabError(
            f"--control given: {control_url}, where no lab answers ({error}); "
            "expected: the control address of a running lab; start one with: imds-bridge lab"
        ) from error
    finally:
        connection.close()
    if not isinstance(answer, dict) or response.status != http.client.OK:
        reason = answer.get("error") if isinstance(answer, dict) else None
        raise LabError(
            reason or f"--control given: {control_url}, which answered {response.status}; expected: a lab"
        )
    return answer


def _host_and_port(control_url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(control_url)
        if parts.scheme == "http" and parts.hostname:
            return parts.hostname, parts.port or 80
    except ValueError:
        pass  # a port that is no number, or half an IPv6 address
    raise LabError(f"--control given: {control_url!r}; expected: a URL such as {CONTROL_URL}")


# --- the simulators ---


def _serve(args: argparse.Namespace) -> int:
    """Run the simulators until a signal."""
    scenario = load_scenario(args.scenario) if args.scenario else None
    stop = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(_stopped_by_signals(stop))
        inbox = stack.enter_context(Inbox(port=args.port_base, report=_reporter("inbox")))
        lab = stack.enter_context(_imds(args, scenario))
        bus = _start_bus(stack, args)
        grid = stack.enter_context(EventGridLab(port=_port(args, GRID_OFFSET), report=_reporter("grid")))
        _print_addresses(lab, inbox, grid, bus)
        grid.subscribe(f"{inbox.base_url}{PUSH_PATH}")
        # beside the main thread, which must never hold the flag's lock: its signal handlers set the flag
        story = threading.Thread(target=_play_until, args=(stop, scenario, lab), name="lab-story")
        story.start()
        while story.is_alive():
            story.join(0.5)  # a limit, since Windows handles no signal during an endless wait
        _report("lab", "stops")
    return EXIT_FINE


def _start_bus(stack: ExitStack, args: argparse.Namespace) -> str | None:
    """Start a Service Bus where its package is installed; return its connection string."""
    try:
        from bridge.lab.servicebus import ServiceBusLab  # noqa: PLC0415 - only the extra `lab` brings it
    except ImportError:
        return None
    return stack.enter_context(ServiceBusLab(args.bus_config, port=_port(args, BUS_OFFSET))).connection_string


def _port(args: argparse.Namespace, offset: int) -> int:
    return args.port_base + offset if args.port_base else 0


def _play_until(stop: threading.Event, scenario: Scenario | None, lab: ImdsLab) -> None:
    if scenario is not None:
        _report("scenario", scenario.title)
        play(scenario, lab, stop, _report_step)
    stop.wait()


def _imds(args: argparse.Namespace, scenario: Scenario | None) -> ImdsLab:
    names = [*(scenario.vms if scenario else ()), *args.lab_vms]
    default_scale = scenario.time_scale if scenario else 1.0
    return ImdsLab(
        vms=list(dict.fromkeys(names)) or ["web-0"],
        scale_set=scenario.scale_set if scenario else "web",
        time_scale=default_scale if args.time_scale is None else args.time_scale,
        port=_port(args, CONTROL_OFFSET),
        report=_reporter("imds"),
    )


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Let the signals that ask for a stop set the flag, and nothing else, for as long as the context lasts."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_addresses(lab: ImdsLab, inbox: Inbox, grid: EventGridLab, bus: str | None) -> None:
    first = lab.vms[0]
    at = "" if lab.control_url == CONTROL_URL else f" --control {lab.control_url}"
    lines = ["A simulated IMDS for each VM, one group:"]
    lines += [f"  {name:12} {lab.url(name)}" for name in lab.vms]
    lines += [
        f"control API:   {lab.control_url}",
        f"webhook inbox: {inbox.url}",
        f"Event Grid:    {grid.custom_endpoint} or {grid.namespace_endpoint('maintenance')}",
        f"its keys:      {' or '.join(grid.keys)}; it delivers to {inbox.base_url}{PUSH_PATH}",
        f"Service Bus:   {bus or 'not simulated: pip install imds-bridge[lab]'}",
        "",
        f"Be {first}: save this as lab.toml, then run imds-bridge forward --config lab.toml",
        "",
        '  state_dir = "lab-state"',
        "",
        "  [imds]",
        f'  endpoint = "{lab.url(first)}"',
        "",
        "  [sinks.inbox]",
        '  kind = "webhook"',
        f'  url = "{inbox.url}"',
        "",
        "  [sinks.grid]",
        '  kind = "eventgrid"',
        f'  endpoint = "{grid.custom_endpoint}"',
        f'  key = "{grid.keys[0]}"',
        *(_BUS_SNIPPET.format(bus=bus, chat=f"{inbox.base_url}/chat").splitlines() if bus else ()),
        "",
        "Make something happen, from another terminal:",
        f"  imds-bridge lab schedule --type Reboot --vm {first} --notice 60{at}",
        f"  imds-bridge lab start EVENT_ID{at}",
        f"  imds-bridge lab fault 503 --count 3{at}",
        f"  imds-bridge lab state{at}",
        f"What arrived: curl {inbox.base_url}/lab/received",
        "",
        f"A real second is {lab.time_scale:g} of the lab's. Ctrl-C ends it. What happens:",
    ]
    print("\n".join(lines), flush=True)


_BUS_SNIPPET = """
  [sinks.bus]
  kind = "servicebus"
  connection_string = "{bus}"
  topic = "scheduled-events"

  [approvals]                      # then run imds-bridge listen --config lab.toml, too
  connection_string = "{bus}"
  queue = "approvals"
  session = "{{resource_group}}.{{vm}}"
  receipts_topic = "scheduled-events"
  receipts_subscription = "receipts"

  [approvals.policy]
  allow = [{{ event_type = ["Freeze", "Reboot"] }}]

One voice for a fleet: save this as relay.toml, then run imds-bridge relay --config relay.toml

  state_dir = "lab-state"

  [relay]
  connection_string = "{bus}"
  topic = "scheduled-events"
  subscription = "chat"

  [sinks.chat]
  kind = "webhook"
  format = "slack"
  url = "{chat}"
"""


def _report_step(step: Step) -> None:
    _report("scenario", step.text)


def _reporter(who: str) -> Callable[[str], None]:
    return lambda sentence: _report(who, sentence)


def _report(who: str, sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {who:8} {sentence}", flush=True)
