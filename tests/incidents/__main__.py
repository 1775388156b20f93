"""`python -m tests.incidents`: play every incident, and print what noticed it and when, for docs/operations.md.

A real Prometheus with our rules scrapes a process for each incident, all at once, for 13 minutes. Needs Debian's
package prometheus and the right to mount.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, redirect_stderr, redirect_stdout
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from io import StringIO
from pathlib import Path
from typing import Any

import requests

from bridge.cli.main import main as command_line
from bridge.events.filters import Filter
from bridge.outbox.rows import STATE
from bridge.runtime.time import Clock
from bridge.service.identity import VM
from infra.monitoring.generate import RULES
from tests.support.bus import QUEUE, SECRET, Sender, bus_config, command
from tests.support.console import ConsoleProcess, FleetVm
from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import open_outbox
from tests.support.process import Forward
from tests.support.prometheus import Prometheus, free_port, prometheus
from tests.support.servicebus import ServiceBusLab

SECONDS = 780
SCRAPE_SECONDS = 15
LOOK_SECONDS = 3
VM_NAME = "web-0"


class Incident:
    """A VM with its IMDS, a receiver and a process, and what noticed that something is wrong."""

    def __init__(self, folder: Path, title: str, play: Callable[[Incident], None], role: str) -> None:
        self.folder, self.title, self.play, self.role = folder / play.__name__, title, play, role
        self.name = play.__name__.replace("_", "-")
        self.port = free_port()
        self.stack = ExitStack()
        self.imds = self.stack.enter_context(ImdsLab(vms=[VM_NAME]))
        self.inbox = self.stack.enter_context(Inbox())
        self.process = self.make()
        self.began_at = 0.0
        self.alerts: dict[str, float] = {}
        self.health: dict[str, float] = {}
        self.status: dict[str, float] = {}

    def make(self, **settings: Any) -> Forward:
        """Prepare the process; `settings` change its configuration."""
        metrics = f"127.0.0.1:{self.port}"
        if self.role == "console":
            return ConsoleProcess(self.folder, metrics=metrics)
        given = {
            "imds": {"endpoint": self.imds.url(VM_NAME)},
            "metrics": {"listen": metrics},
            "sinks": {"ops": {"kind": "webhook", "url": self.inbox.url}},
            **settings,
        }
        return Forward(self.folder, given, role=self.role)  # type: ignore[arg-type] # of the decorator

    def start(self, process: Forward | None = None) -> None:
        """Start the process, and wait until it works."""
        self.process = process or self.process
        self.stack.callback(self.process.kill)
        self.process.start()
        self.process.wait_for_status(lambda status: status.get("last_good_at") or self.role != "forward")

    def listen(self, **approvals: Any) -> ServiceBusLab:
        """Start a listener on a bus of its own."""
        bus = self.stack.enter_context(ServiceBusLab(bus_config()))
        given = {"connection_string": bus.connection_string, "queue": QUEUE, "policy": {"allow": [{}]}}
        self.start(self.make(approvals={**given, **approvals}))
        return bus

    def announce(self, event_type: str, *, seconds: float, **more: Any) -> str:
        """Let IMDS show an event with so much notice."""
        return self.imds.schedule(event_type=event_type, resources=[VM_NAME], notice_seconds=seconds, **more)

    def look(self, firing: set[str]) -> None:
        """Note what is noticed now for the first time."""
        seconds = time.monotonic() - self.began_at
        for alert in firing:
            self.alerts.setdefault(alert, seconds)
        if health := self._health():
            self.health.setdefault(health, seconds)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            code = command_line(
                ["status", "--check", "--role", self.role, "--config", str(self.process.config)]
            )
        if code:
            self.status.setdefault(str(code), seconds)

    def _health(self) -> str:
        for path in ("livez", "readyz"):
            try:
                answer = requests.get(f"http://127.0.0.1:{self.port}/{path}", timeout=1)
            except requests.RequestException:
                return "no answer"
            if answer.status_code != HTTPStatus.OK:
                return f"`/{path}` 503"
        return ""

    def row(self) -> str:
        """Return the incident's row."""
        cells = [self.title]
        for found, nothing in ((self.alerts, "none"), (self.health, "200"), (self.status, "0")):
            cells.append(", ".join(f"{what} {_after(seconds)}" for what, seconds in found.items()) or nothing)
        return f"| {' | '.join(cells)} |"


def _after(seconds: float) -> str:
    return f"({seconds:.0f} s)" if seconds < 100 else f"({seconds / 60:.0f} min)"


PLAYS: list[tuple[str, Callable[[Incident], None], str]] = []


def incident(
    title: str, role: str = "forward"
) -> Callable[[Callable[[Incident], None]], Callable[[Incident], None]]:
    """Add an incident: its title, and a function that prepares it and returns once it has begun."""

    def add(play: Callable[[Incident], None]) -> Callable[[Incident], None]:
        PLAYS.append((title, play, role))
        return play

    return add


@incident("nothing is wrong: a Freeze with 15 min of notice is delivered")
def nothing_wrong(rig: Incident) -> None:
    rig.start()
    rig.announce("Freeze", seconds=900)


@incident("IMDS has never answered, on a new VM")
def never_answers(rig: Incident) -> None:
    rig.imds.fault("timeout", count=None)
    rig.stack.callback(rig.imds.clear_faults)
    rig.stack.callback(rig.process.kill)
    rig.process.start()


@incident("IMDS answers no more")
def stops_answering(rig: Incident) -> None:
    rig.start()
    rig.imds.fault(503, count=None)


@incident("IMDS needs 9 s for each answer")
def slow_imds(rig: Incident) -> None:
    rig.start()
    rig.imds.fault("slow", seconds=9, count=None)
    rig.stack.callback(rig.imds.clear_faults)


@incident("the process is killed, and nothing starts it again")
def killed(rig: Incident) -> None:
    rig.start()
    rig.process.kill()


@incident("the process hangs")
def hangs(rig: Incident) -> None:
    rig.start()
    rig.process.signal(signal.SIGSTOP)


@incident("the process is killed and started again every 20 s, four times")
def restarts(rig: Incident) -> None:
    rig.start()

    def restart() -> None:
        for _ in range(4):
            time.sleep(20)
            rig.process.kill()
            rig.process.start()

    threading.Thread(target=restart, daemon=True).start()


@incident("the receiver (or the console) is down, and a Redeploy with 10 min of notice comes")
def receiver_down(rig: Incident) -> None:
    rig.start()
    rig.inbox.close()
    rig.announce("Redeploy", seconds=600)


@incident("the receiver hangs, and a Preempt with 30 s of notice comes")
def receiver_hangs(rig: Incident) -> None:
    rig.start()
    rig.inbox.fault("timeout", count=None)
    rig.stack.callback(rig.inbox.clear_faults)
    rig.announce("Preempt", seconds=30)


@incident("the receiver answers 401, and a Freeze with 15 min of notice comes")
def unauthorized(rig: Incident) -> None:
    rig.start()
    rig.inbox.fault(401, count=None)
    rig.announce("Freeze", seconds=900)


@incident("the receiver answers 400 to an event")
def refused(rig: Incident) -> None:
    rig.start()
    rig.inbox.fault(400, count=None)
    rig.announce("Freeze", seconds=900)


@incident("the receiver answers 410, and a Freeze with 15 min of notice comes")
def gone(rig: Incident) -> None:
    rig.start()
    rig.inbox.fault(410, count=None)
    rig.announce("Freeze", seconds=900)


@incident("a sink leaves the configuration while events wait for it")
def sink_left(rig: Incident) -> None:
    rig.inbox.fault(503, count=None)
    rig.start(rig.make(sinks={"old": {"kind": "webhook", "url": rig.inbox.url}}, stop_seconds=0))
    rig.process.wait_for_status(lambda status: status["sinks"]["old"]["backlog"])
    rig.process.stop()
    rig.inbox.clear_faults()
    rig.start(rig.make())


@incident("a Reboot was announced while the process was down; 2 min are left at its start")
def late(rig: Incident) -> None:
    rig.start()
    rig.process.stop()
    rig.announce("Reboot", seconds=120)
    rig.start()


@incident("the outbox is damaged, which the start finds")
def damaged(rig: Incident) -> None:
    rig.inbox.fault(503, count=None)
    rig.start(rig.make(stop_seconds=0))
    rig.process.stop()
    with (rig.process.state / "outbox.db").open("r+b") as file:
        file.write(bytes(100_000))
    rig.inbox.clear_faults()
    rig.start()


@incident("the state is another VM's, which the start finds")
def other_vm(rig: Incident) -> None:
    rig.inbox.fault(503, count=None)
    rig.start(rig.make(stop_seconds=0))
    rig.process.stop()
    with closing(open_outbox(rig.process.state, sinks={"ops": (Filter(), True)}, clock=Clock())) as outbox:
        vm = {**outbox.record(STATE, VM)["vm"], "vm_id": "another's"}
        outbox.commit([], records={(STATE, VM): {"boot_id": "another's", "vm": vm}})
    rig.inbox.clear_faults()
    rig.start()


@incident("the disk is full")
def disk_full(rig: Incident) -> None:
    disk = rig.stack.enter_context(small_disk(rig.folder.parent / "disk"))
    process = rig.make(state_dir=disk.state)
    process.state = disk.state / "forward"
    rig.start(process)
    disk.fill()
    rig.announce("Freeze", seconds=900, description="x" * 20_000)


@incident("the state folder is deleted")
def folder_deleted(rig: Incident) -> None:
    rig.start()
    shutil.rmtree(rig.process.state.parent)


@incident("IMDS refuses an approval", "listen")
def approval_fails(rig: Incident) -> None:
    bus = rig.listen()
    event_id = rig.announce("Reboot", seconds=900, hold=True)
    rig.imds.fault(400, method="POST", count=None)
    with Sender(bus) as sender:
        sender.send(command(event_id, Vm=VM_NAME))


@incident("a forged command arrives", "listen")
def forged_command(rig: Incident) -> None:
    secret = rig.folder.parent / "secret"
    secret.write_text(SECRET)
    bus = rig.listen(signing_secrets_file=secret)
    event_id = rig.announce("Reboot", seconds=900, hold=True)
    with Sender(bus) as sender:
        sender.send(command(event_id, Vm=VM_NAME, properties={"webhook-signature": "v1,forged"}))


@incident("Service Bus cannot be reached", "listen")
def bus_down(rig: Incident) -> None:
    rig.listen().stop_listening()


@incident("the console has heard nothing of a VM for two hours", "console")
def vm_silent(rig: Incident) -> None:
    rig.start()
    assert isinstance(rig.process, ConsoleProcess)
    long_ago = datetime.now(UTC) - timedelta(hours=2)
    headers = {"Content-Type": "application/cloudevents+json"}
    body = FleetVm(VM_NAME).heartbeat(long_ago)
    requests.post(f"{rig.process.url}/ingest", data=body, headers=headers, timeout=30).raise_for_status()


def firing(running: Prometheus) -> dict[str, set[str]]:
    """Return the names of the alerts that fire, by instance."""
    found: dict[str, set[str]] = {}
    for one in running.ask("query", query='ALERTS{alertstate="firing"}'):
        found.setdefault(one["metric"]["instance"], set()).add(one["metric"]["alertname"])
    return found


def main(names: list[str]) -> None:
    """Play all incidents, or those that are named, and print the table."""
    with tempfile.TemporaryDirectory(prefix="imds-bridge-incidents-") as place, ExitStack() as stack:
        folder = Path(place)
        chosen = [one for one in PLAYS if not names or one[1].__name__ in names]
        rigs = [Incident(folder, *one) for one in chosen]
        for rig in rigs:
            stack.enter_context(rig.stack)
        targets = {rig.name: rig.port for rig in rigs}
        running = stack.enter_context(
            prometheus(folder, targets, every_seconds=SCRAPE_SECONDS, rules=str(RULES))
        )
        for rig in rigs:
            rig.play(rig)
            rig.began_at = time.monotonic()
            print(f"{rig.name} has begun", file=sys.stderr, flush=True)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            alerts = firing(running)
            for rig in rigs:
                rig.look(alerts.get(rig.name, set()))
            time.sleep(LOOK_SECONDS)
        print(
            "| incident | alerts, after | health, after | exit code of `status`, after |\n| --- | --- | --- | --- |"
        )
        print(*(rig.row() for rig in rigs), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
