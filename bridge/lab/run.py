"""Run the simulators until a signal, and print how to use them."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from textwrap import indent

from bridge.lab.eventgrid import EventGridLab
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.scenario import Scenario, load_scenario, play
from bridge.runtime.text import show
from bridge.runtime.threads import Signals

PORT_BASE = 8800
# The inbox has the port base; the others are this much above it, and the VMs follow the control API.
BUS_OFFSET = 5
GRID_OFFSET = 6
CONTROL_OFFSET = 10
CONTROL_URL = f"http://127.0.0.1:{PORT_BASE + CONTROL_OFFSET}"
BUS_FILE = Path(__file__).with_name("servicebus.json")
WAIT_SECONDS = 3600.0


def serve(args: argparse.Namespace) -> None:
    """Run the simulators until a signal."""
    scenario = load_scenario(args.scenario) if args.scenario else None
    with Signals() as signals, ExitStack() as stack:
        inbox = stack.enter_context(Inbox(port=args.port_base, report=_reporter("inbox")))
        lab = stack.enter_context(_imds(args, scenario))
        bus = _start_bus(stack, args)
        grid = stack.enter_context(EventGridLab(port=_port(args, GRID_OFFSET), report=_reporter("grid")))
        _print_addresses(lab, inbox, grid, bus, args.write)
        stack.callback(_reporter("lab"), "stopping")
        if scenario is not None:
            _start_playing(stack, scenario, lab)
        while signals.wait(WAIT_SECONDS) is None:
            pass


def _start_playing(stack: ExitStack, scenario: Scenario, lab: ImdsLab) -> None:
    """Play the scenario on a thread until the stack ends."""
    report, stop = _reporter("scenario"), threading.Event()
    report(scenario.title)
    player = threading.Thread(target=play, args=(scenario, lab, stop, report), name="lab-scenario")
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


def _print_addresses(
    lab: ImdsLab, inbox: Inbox, grid: EventGridLab, bus: str | None, file: Path | None
) -> None:
    config = _CONFIG.format(
        imds=lab.url(lab.vms[0]),
        inbox=inbox.url,
        grid=grid.custom_endpoint,
        key=grid.keys[0],
        with_bus=_WITH_BUS.format(bus=bus) if bus else "",
    )
    if file:
        file.write_text(config, encoding="utf-8")
    show(
        *_TEXT.format(
            vms="\n".join(f"  {name:12} {lab.url(name)}" for name in lab.vms),
            vm=lab.vms[0],
            config=indent(config, "  "),
            save=f"use {file}," if file else "save this as lab.toml",
            file=file or "lab.toml",
            control=lab.control_url,
            at="" if lab.control_url == CONTROL_URL else f" --control {lab.control_url}",
            inbox=inbox.url,
            received=f"{inbox.base_url}/lab/received",
            grid=grid.custom_endpoint,
            namespace=grid.namespace_endpoint("maintenance"),
            bus=bus or "not simulated: pip install 'imds-bridge[lab]'",
            time_scale=lab.time_scale,
        ).splitlines()
    )


_TEXT = """\
A simulated IMDS for each VM of one group:
{vms}
control API:   {control}
webhook inbox: {inbox}
Event Grid:    {grid} or {namespace}
Service Bus:   {bus}

To run as {vm}, {save} and run: imds-bridge forward --config {file}

{config}
Create events and faults from another terminal, and show what arrived:
  imds-bridge lab schedule --type Reboot --vm {vm} --notice 60{at}
  imds-bridge lab start EVENT_ID{at}
  imds-bridge lab fault 503 --count 3{at}
  imds-bridge lab state{at}
  curl {received}

Lab seconds in a real second: {time_scale:g}. Ctrl-C stops the lab. What happens:"""

_CONFIG = """\
state_dir = "lab-state"

[imds]
endpoint = "{imds}"

[sinks.inbox]
kind = "webhook"
url = "{inbox}"

[sinks.grid]
kind = "eventgrid"
endpoint = "{grid}"
key = "{key}"
{with_bus}"""

_WITH_BUS = """
[sinks.bus]
kind = "servicebus"
connection_string = "{bus}"
topic = "scheduled-events"

[approvals]    # imds-bridge listen --config lab.toml; then imds-bridge approve EVENT_ID --wait --config lab.toml
connection_string = "{bus}"
queue = "approvals"
session = "{{resource_group}}.{{vm}}"
receipts_topic = "scheduled-events"
receipts_subscription = "receipts"

[approvals.policy]
allow = [{{ event_type = ["Freeze", "Reboot"] }}]
"""


def _reporter(who: str) -> Callable[[str], None]:
    return lambda sentence: show(f"{time.strftime('%H:%M:%S')} {who:8} {sentence}")
