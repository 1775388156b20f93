"""`python -m tools.incidents [WORD...]`: play every incident, or those with a word in their title.

It prints when what noticed each, for docs/metrics.md. A real Prometheus with our rules scrapes a process for each,
all at once, for 13 minutes. Needs Debian's package prometheus and the right to mount.
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
from functools import partial
from http import HTTPStatus
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

import requests

from bridge.cli.main import main as command_line
from bridge.events.filters import Filter
from bridge.outbox.rows import STATE, VM
from bridge.runtime.time import Clock
from infra.monitoring.generate import RULES
from tests.support.bus import QUEUE, SECRET, Sender, bus_config, command
from tests.support.console import STRUCTURED, ConsoleProcess, FleetVm, event
from tests.support.disk import small_disk
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import open_outbox
from tests.support.ports import free_port
from tests.support.process import Forward
from tests.support.prometheus import Prometheus, Target, prometheus
from tests.support.servicebus import ServiceBusLab

SECONDS = 780
SCRAPE_SECONDS = 15
LOOK_SECONDS = 3
VM_NAME, OTHER_NAME = "web-0", "web-1"


class Incident:
    """A VM with its IMDS, a receiver and a process, and what noticed that something is wrong."""

    def __init__(self, folder: Path, role: str) -> None:
        folder.mkdir()
        self.folder, self.role, self.port = folder, role, free_port()
        self.stack = ExitStack()
        self.imds = self.stack.enter_context(ImdsLab(vms=[VM_NAME, OTHER_NAME]))
        self.inbox = self.stack.enter_context(Inbox())
        for simulator in (self.imds, self.inbox):
            self.stack.callback(simulator.clear_faults)
        self.process = self.make()
        self.began_at = 0.0
        self.prometheus: Prometheus | None = None
        self.alerts: dict[str, float] = {}
        self.health: dict[str, float] = {}
        self.status: dict[str, float] = {}

    def make(self, name: str = "", port: int = 0, **settings: Any) -> Forward:
        """Prepare the process; `settings` change its configuration, `name` and `port` make another one."""
        folder, metrics = self.folder / name, f"127.0.0.1:{port or self.port}"
        if self.role == "console":
            return ConsoleProcess(folder, metrics=metrics)
        given = {
            "imds": {"endpoint": self.imds.url(VM_NAME)},
            "metrics": {"listen": metrics},
            "sinks": {"ops": {"kind": "webhook", "url": self.inbox.url}},
            **settings,
        }
        return Forward(folder, given, role=self.role)  # type: ignore[arg-type] # of the table

    def start(self, process: Forward | None = None) -> None:
        """Start the process, and wait until it works."""
        self.process = process or self.process
        self.stack.callback(self.process.kill)
        self.process.start()
        self.process.wait_for_status(lambda status: status.get("last_good_at") or self.role != "forward")

    def stop_with_events_waiting(self, **settings: Any) -> None:
        """Run the process beside a receiver that fails for as long as it runs."""
        self.inbox.fault(503, count=None)
        self.start(self.make(stop_seconds=0, **settings))
        self.process.wait_for_status(lambda status: any(one["backlog"] for one in status["sinks"].values()))
        self.process.stop()
        self.inbox.clear_faults()

    def listen(self, **approvals: Any) -> ServiceBusLab:
        """Start a listener on a bus of its own."""
        bus = self.stack.enter_context(ServiceBusLab(bus_config()))
        given = {"connection_string": bus.connection_string, "queue": QUEUE, "policy": {"allow": [{}]}}
        self.start(self.make(approvals={**given, **approvals}))
        return bus

    def announce(self, event_type: str, seconds: float, vm: str = VM_NAME, **more: Any) -> str:
        """Let IMDS show an event with so much notice."""
        return self.imds.schedule(event_type=event_type, resources=[vm], notice_seconds=seconds, **more)

    def scrape(self, *targets: Target) -> None:
        """Let Prometheus scrape these from now on in place of the process."""
        assert self.prometheus
        self.prometheus.scrape(self.folder.name, *targets)

    def look(self, firing: set[str]) -> None:
        """Note what is noticed now for the first time."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            words = ["status", "--check", "--role", self.role, "--config", str(self.process.config)]
            code = command_line(words)
        seen = ((self.alerts, firing), (self.health, self._health()), (self.status, {code} - {0}))
        for noted, now in seen:
            for one in now:
                noted.setdefault(str(one).removeprefix("ImdsBridge"), time.monotonic() - self.began_at)

    def _health(self) -> set[str]:
        try:
            for path in ("livez", "readyz"):
                answer = requests.get(f"http://127.0.0.1:{self.port}/{path}", timeout=1)
                if answer.status_code != HTTPStatus.OK:
                    return {f"`/{path}` 503"}
        except requests.RequestException:
            return {"no answer"}
        return set()

    def cells(self) -> str:
        """Return what noticed the incident, as cells of a table."""
        found = ((self.alerts, "none"), (self.health, "200"), (self.status, "0"))
        return " | ".join(
            ", ".join(f"{what} {_after(seconds)}" for what, seconds in noted.items()) or nothing
            for noted, nothing in found
        )


def _after(seconds: float) -> str:
    return f"({seconds:.0f} s)" if seconds < 100 else f"({seconds / 60:.0f} min)"


PLAYS: list[tuple[str, Callable[[Incident], None], str]] = []
PREEMPT: dict[str, Any] = {"fault": "timeout", "event_type": "Preempt", "seconds": 30}
Play = TypeVar("Play", bound=Callable[..., None])


def incident(title: str, role: str = "forward", **given: Any) -> Callable[[Play], Play]:
    """Add an incident: its title, and a function that prepares it and returns once it has begun."""

    def add(play: Play) -> Play:
        PLAYS.append((title, partial(play, **given), role))
        return play

    return add


@incident("IMDS has never answered, on a new VM")
def never_answers(rig: Incident) -> None:
    rig.imds.fault("timeout", count=None)
    rig.stack.callback(rig.process.kill)
    rig.process.start()


@incident("IMDS needs 9 s for each answer", kind="slow", seconds=9)
@incident("IMDS answers no more", kind=503)
def imds_fails(rig: Incident, **fault: Any) -> None:
    rig.start()
    rig.imds.fault(**fault, count=None)


@incident("IMDS answers 429 to nine of ten requests")
def throttled(rig: Incident) -> None:
    rig.start()

    def throttle() -> None:
        while rig.process.process and rig.process.process.poll() is None:
            rig.imds.fault(429, count=9)
            time.sleep(10)

    threading.Thread(target=throttle, daemon=True).start()


@incident("instance data fails on a new VM, for `listen`", "listen")
@incident("instance data fails on a new VM")
def no_instance_data(rig: Incident) -> None:
    rig.imds.fault(500, path="/metadata/instance", count=None)
    if rig.role == "listen":
        rig.listen()
    else:
        rig.start()


@incident("all sinks are missing from the file")
def no_sinks(rig: Incident) -> None:
    rig.start(rig.make(sinks={}))


@incident("a Reboot with a minute of notice starts, and the VM is away for 5 min", back=300)
def rebooted(rig: Incident, back: float) -> None:
    rig.start()
    rig.announce("Reboot", 60)

    def reboot() -> None:
        time.sleep(90)
        rig.process.kill()
        time.sleep(back)
        rig.process.start()

    threading.Thread(target=reboot, daemon=True).start()


@incident("an operator restarts the process five times within 10 min")
def restarted_orderly(rig: Incident) -> None:
    rig.start()

    def restart() -> None:
        for _ in range(5):
            time.sleep(100)
            rig.process.stop()
            rig.process.start()

    threading.Thread(target=restart, daemon=True).start()


@incident("another VM of the group gets a Reboot with a minute of notice")
def other_vms_notice(rig: Incident) -> None:
    rig.start()
    rig.announce("Reboot", 60, OTHER_NAME)


@incident("two VMs' agents write the same `instance`, with a label of their own")
def shared_instance(rig: Incident) -> None:
    rig.start()
    port = free_port()
    other = rig.stack.enter_context(rig.make("other", port))
    other.wait_for_status(lambda status: status.get("last_good_at"))
    rig.scrape(
        Target(port=rig.port, instance="127.0.0.1:9464", labels={"vm": "a"}),
        Target(port=port, instance="127.0.0.1:9464", labels={"vm": "b"}),
    )


@incident("Prometheus' configuration loses a VM", gone=False)
@incident("a VM is deleted without an event (a scale-in), and discovery drops it a minute later", gone=True)
def target_leaves(rig: Incident, gone: bool) -> None:
    rig.start()

    def leave() -> None:
        time.sleep(2 * SCRAPE_SECONDS)
        if gone:
            rig.process.kill()
            time.sleep(4 * SCRAPE_SECONDS)
        rig.scrape()

    threading.Thread(target=leave, daemon=True).start()


@incident("a pod of a rollout, or of a relay, moves to another address")
def target_moves(rig: Incident) -> None:
    rig.start()

    def move() -> None:
        time.sleep(2 * SCRAPE_SECONDS)
        rig.scrape(Target(port=rig.port, instance="10.0.0.9:9464"))

    threading.Thread(target=move, daemon=True).start()


@incident("a listener alone drains and approves by rules, without sinks and bus", "listen")
def alone(rig: Incident) -> None:
    rules = {"auto": [{"run": ["/bin/true"]}]}
    rig.start(rig.make(approvals=rules, sinks={}))


@incident("the process is killed, and nothing starts it again")
def killed(rig: Incident) -> None:
    rig.start()
    rig.process.kill()


@incident("the process is killed during a Freeze, and nothing starts it again")
def killed_in_a_freeze(rig: Incident) -> None:
    rig.start()
    rig.announce("Freeze", 60)
    time.sleep(2 * SCRAPE_SECONDS)
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
    rig.announce("Redeploy", 600)


@incident("the receiver answers 410, and a Freeze with 15 min of notice comes", fault=410)
@incident("the receiver answers 400 to an event", fault=400)
@incident("the receiver answers 401, and a Freeze with 15 min of notice comes", fault=401)
@incident("the receiver hangs, and a Preempt with 30 s of notice comes", **PREEMPT)
@incident("nothing is wrong: a Freeze with 15 min of notice is delivered", fault=None)
def receiver_fails(
    rig: Incident, fault: str | int | None, event_type: str = "Freeze", seconds: float = 900
) -> None:
    rig.start()
    if fault:
        rig.inbox.fault(fault, count=None)
    rig.announce(event_type, seconds)


@incident(
    "a program of an `exec` sink needs 4 min of its limit of 10, and a Reboot with 4 min of notice comes"
)
def long_program(rig: Incident) -> None:
    run = ["/bin/sleep", "240"]
    events = {"types": ["*.scheduledevent.*"], "run": run, "timeout_seconds": 600}
    rig.start(rig.make(sinks={"drain": {"kind": "exec", **events}}))
    rig.announce("Reboot", 240, hold=True)


@incident("a sink leaves the configuration while events wait for it")
def sink_left(rig: Incident) -> None:
    rig.stop_with_events_waiting(sinks={"old": {"kind": "webhook", "url": rig.inbox.url}})
    rig.start(rig.make())


@incident("a Reboot was announced while the process was down; 2 min are left at its start")
def late(rig: Incident) -> None:
    rig.start()
    rig.process.stop()
    rig.announce("Reboot", 120)
    rig.start()


@incident("the outbox is damaged, which the start finds")
def damaged(rig: Incident) -> None:
    rig.stop_with_events_waiting()
    with (rig.process.state / "outbox.db").open("r+b") as file:
        file.write(bytes(100_000))
    rig.start()


@incident("the state is another VM's, which the start finds")
def other_vm(rig: Incident) -> None:
    rig.stop_with_events_waiting()
    with closing(open_outbox(rig.process.state, sinks={"ops": (Filter(), True)}, clock=Clock())) as outbox:
        vm = {**outbox.record(STATE, VM)["vm"], "vm_id": "another's"}
        outbox.commit([], records={(STATE, VM): {"boot_id": "another's", "vm": vm}})
    rig.start()


@incident("the disk is full, and nothing happens", quiet=True)
@incident("the disk is full, and a Freeze with 15 min of notice comes", quiet=False)
def disk_full(rig: Incident, quiet: bool) -> None:
    disk = rig.stack.enter_context(small_disk(rig.folder / "disk"))
    process = rig.make(state_dir=disk.state)
    process.state = disk.state / "forward"
    rig.start(process)
    disk.fill()
    if not quiet:
        rig.announce("Freeze", 900, description="x" * 20_000)


@incident("the state folder is deleted")
def folder_deleted(rig: Incident) -> None:
    rig.start()
    shutil.rmtree(rig.process.state.parent)


@incident("IMDS refuses an approval", "listen", refusal=400)
@incident("a forged command arrives", "listen", properties={"webhook-signature": "v1,forged"})
def approval_fails(rig: Incident, refusal: int = 0, **more: Any) -> None:
    secret = rig.folder / "secret"
    secret.write_text(SECRET)
    bus = rig.listen(**({"signing_secrets_file": secret} if more else {}))
    if refusal:
        rig.imds.fault(refusal, method="POST", count=None)
    event_id = rig.announce("Reboot", 900, hold=True)
    with Sender(bus) as sender:
        sender.send(command(event_id, Vm=VM_NAME, **more))


@incident("Service Bus cannot be reached", "listen")
def bus_down(rig: Incident) -> None:
    rig.listen().stop_listening()


@incident("the console has heard nothing of a VM for two hours", "console")
def vm_silent(rig: Incident) -> None:
    rig.start()
    assert isinstance(rig.process, ConsoleProcess)
    body = FleetVm(VM_NAME).heartbeat(datetime.now(UTC) - timedelta(hours=2))
    requests.post(f"{rig.process.url}/ingest", body, headers=STRUCTURED, timeout=30).raise_for_status()


@incident("an event names a VM without imds-bridge", "console")
def vm_unknown(rig: Incident) -> None:
    rig.start()
    assert isinstance(rig.process, ConsoleProcess)
    at = datetime.now(UTC)
    body = FleetVm(VM_NAME).change("scheduled", event(at=at, minutes=30, vms=[OTHER_NAME]), at)
    requests.post(f"{rig.process.url}/ingest", body, headers=STRUCTURED, timeout=30).raise_for_status()


def main(words: list[str]) -> None:
    """Play all incidents, or those whose title has one of the words, and print the table."""
    chosen = [one for one in PLAYS if not words or any(word in one[0] for word in words)]
    with tempfile.TemporaryDirectory(prefix="imds-bridge-incidents-") as place, ExitStack() as stack:
        rigs = {
            title: Incident(Path(place) / str(number), role) for number, (title, _, role) in enumerate(chosen)
        }
        for rig in rigs.values():
            stack.enter_context(rig.stack)
        targets = {rig.folder.name: rig.port for rig in rigs.values()}
        running = stack.enter_context(
            prometheus(Path(place), targets, every_seconds=SCRAPE_SECONDS, rules=str(RULES))
        )
        for title, play, _ in chosen:
            rigs[title].prometheus = running
            play(rigs[title])
            rigs[title].began_at = time.monotonic()
            print(f"has begun: {title}", file=sys.stderr, flush=True)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            alerts = [one["metric"] for one in running.ask("query", query='ALERTS{alertstate="firing"}')]
            for rig in rigs.values():
                job = f"imds-bridge-{rig.folder.name}"
                rig.look({one["alertname"] for one in alerts if one.get("job") == job})
            time.sleep(LOOK_SECONDS)
    print(
        "| incident | alerts, after | health, after | exit code of `status`, after |\n| --- | --- | --- | --- |"
    )
    for title, rig in rigs.items():
        print(f"| {title} | {rig.cells()} |")


if __name__ == "__main__":
    main(sys.argv[1:])
