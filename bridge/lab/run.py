"""Run the simulators until a signal, and print how to use them."""

from __future__ import annotations

import argparse
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bridge.lab.eventgrid import EventGridLab
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.scenario import Scenario, load_scenario, play
from bridge.runtime.text import show
from bridge.runtime.threads import STOP_SIGNALS, Signals

PORT_BASE = 8800
# The inbox has the port base; the others are this much above it, and the VMs follow the control API.
BUS_OFFSET = 5
GRID_OFFSET = 6
CONTROL_OFFSET = 10
CONTROL_URL = f"http://127.0.0.1:{PORT_BASE + CONTROL_OFFSET}"
PUSH_PATH = "/eventgrid"  # the path of the inbox that Event Grid delivers to
BUS_FILE = Path(__file__).with_name("servicebus.json")
WAIT_SECONDS = 3600.0


def serve(args: argparse.Namespace) -> None:
    """Run the simulators until a signal; further signals change nothing, since the process is about to exit."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        with Signals() as signals:
            _serve(args, signals)
    except BaseException:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        raise


def _serve(args: argparse.Namespace, signals: Signals) -> None:
    scenario = load_scenario(args.scenario) if args.scenario else None
    with ExitStack() as stack:
        inbox = stack.enter_context(Inbox(port=args.port_base, report=_reporter("inbox")))
        lab = stack.enter_context(_imds(args, scenario))
        bus = _start_bus(stack, args)
        grid = stack.enter_context(EventGridLab(port=_port(args, GRID_OFFSET), report=_reporter("grid")))
        _print_addresses(lab, inbox, grid, bus)
        grid.subscribe(f"{inbox.base_url}{PUSH_PATH}")
        with ExitStack() as playing:
            if scenario is not None:
                _start_playing(playing, scenario, lab)
            while signals.wait(WAIT_SECONDS) is None:
                pass
        _report("lab", "stopping")


def _start_playing(stack: ExitStack, scenario: Scenario, lab: ImdsLab) -> None:
    """Play the scenario on a thread until the stack ends."""
    _report("scenario", scenario.title)
    stop = threading.Event()
    player = threading.Thread(
        target=play, args=(scenario, lab, stop, _reporter("scenario")), name="lab-scenario"
    )
    player.start()
    stack.callback(player.join)
    stack.callback(stop.set)


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


def _start_bus(stack: ExitStack, args: argparse.Namespace) -> str | None:
    """Start a Service Bus if its package is installed; return its connection string."""
    try:
        from bridge.lab.servicebus import ServiceBusLab  # noqa: PLC0415 - only the extra `lab` installs it
    except ImportError:
        return None
    return stack.enter_context(ServiceBusLab(args.bus_config, port=_port(args, BUS_OFFSET))).connection_string


def _port(args: argparse.Namespace, offset: int) -> int:
    return args.port_base + offset if args.port_base else 0


def _print_addresses(lab: ImdsLab, inbox: Inbox, grid: EventGridLab, bus: str | None) -> None:
    first = lab.vms[0]
    at = "" if lab.control_url == CONTROL_URL else f" --control {lab.control_url}"
    lines = ["A simulated IMDS for each VM of one group:"]
    lines += [f"  {name:12} {lab.url(name)}" for name in lab.vms]
    lines += [
        f"control API:   {lab.control_url}",
        f"webhook inbox: {inbox.url}",
        f"Event Grid:    {grid.custom_endpoint} or {grid.namespace_endpoint('maintenance')}",
        f"- its keys:    {' or '.join(grid.keys)}",
        f"- delivers to: {inbox.base_url}{PUSH_PATH}",
        f"Service Bus:   {bus or _NO_BUS}",
        "",
        f"To run as {first}, save this as lab.toml and run: imds-bridge forward --config lab.toml",
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
        "Create events and faults from another terminal:",
        f"  imds-bridge lab schedule --type Reboot --vm {first} --notice 60{at}",
        f"  imds-bridge lab start EVENT_ID{at}",
        f"  imds-bridge lab fault 503 --count 3{at}",
        f"  imds-bridge lab state{at}",
        *(["  imds-bridge approve EVENT_ID --wait --config lab.toml    # while listen runs"] if bus else ()),
        f"Show what arrived: curl {inbox.base_url}/lab/received",
        "",
        f"Lab seconds in a real second: {lab.time_scale:g}. Ctrl-C stops the lab. What happens:",
    ]
    show(*lines)


_NO_BUS = "not simulated: pip install 'imds-bridge[lab]'"

_BUS_SNIPPET = """
  [sinks.bus]
  kind = "servicebus"
  connection_string = "{bus}"
  topic = "scheduled-events"

  [approvals]                      # for imds-bridge listen --config lab.toml
  connection_string = "{bus}"
  queue = "approvals"
  session = "{{resource_group}}.{{vm}}"
  receipts_topic = "scheduled-events"
  receipts_subscription = "receipts"

  [approvals.policy]
  allow = [{{ event_type = ["Freeze", "Reboot"] }}]

For one message per event, save this as relay.toml and run: imds-bridge relay --config relay.toml

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


def _reporter(who: str) -> Callable[[str], None]:
    return lambda sentence: _report(who, sentence)


def _report(who: str, sentence: str) -> None:
    show(f"{time.strftime('%H:%M:%S')} {who:8} {sentence}")
