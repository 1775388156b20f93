"""The simulated IMDS, the listeners and the real processes of the demo, and a check of what arrived."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError
from bridge.imds.diff import CONTINUOUS_SECONDS
from bridge.lab.demo.listeners import Listeners, name_of
from bridge.lab.demo.narrator import LOOK_SECONDS, Narrator
from bridge.lab.imds import ImdsLab
from bridge.outbox.inspect import newest
from bridge.outbox.state_dir import StateFolder

if TYPE_CHECKING:
    from bridge.lab.demo.bus import DemoBus

VMS = ("web-0", "web-1")
WAIT_SECONDS = 60.0  # for the events of a step
STOP_SECONDS = 20.0
MARGIN_SECONDS = 1.0
GAP = ("imds.unreachable", "imds.recovered")  # published together once it is over
# Ctrl-C in the terminal must not reach the processes. On Windows an orderly stop is Ctrl-Break to a process group.
_GROUP: dict[str, Any]
if sys.platform == "win32":
    from bridge.runtime.windows import send_break

    _GROUP = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
else:
    _GROUP = {"process_group": 0}


class NotArrived(Exception):
    """The story cannot go on, or events did not arrive in time; the message names the chapter or what is missing."""


class Stage:
    """The story calls one method after the other; `faults` lists what went wrong."""

    def __init__(self, stack: ExitStack, folder: Path, narrate: Narrator, bus: DemoBus | None) -> None:
        """Start the simulators.

        Args:
            stack: ends everything.
            folder: for the configuration, logs and state.
            narrate: prints what happens.
            bus: the Service Bus, if there is one.
        """
        self.faults: list[str] = []
        self.listeners = Listeners(stack, bus)
        self._stack = stack
        self._folder = folder
        self._narrate = narrate
        self._bus = bus
        self._imds = stack.enter_context(ImdsLab(vms=VMS))
        self._incarnation = 0
        self.expected: Counter[str] = Counter()
        self._number = 0
        self._event_ids: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._killed_at = 0.0
        self._config = folder / "config.toml"
        self._config.write_text(
            f'state_dir = "{(folder / "state").as_posix()}"\nlog_format = "text"\n'
            f'[imds]\nendpoint = "{self._imds.url(VMS[0])}"\n{self.listeners.config()}',
            encoding="utf-8",
        )

    # What happens to events

    def schedule(self, event_type: str, *resources: str, notice_seconds: float) -> None:
        """Let Azure announce an event."""
        self._event_ids[event_type] = self._imds.schedule(
            event_type=event_type, resources=resources, notice_seconds=notice_seconds
        )

    def do(self, what: str, event_type: str) -> None:
        """Let Azure start, cancel or complete the event."""
        getattr(self._imds, what)(self._event_ids[event_type])

    # What happens to the audit log and to the processes

    def fail_audit(self) -> None:
        """Let the audit log answer with errors."""
        self.listeners.is_audit_up = False
        self.listeners.audit.fault(503, count=None)

    def repair_audit(self) -> None:
        """Let the audit log answer again."""
        self.listeners.is_audit_up = True
        self.listeners.audit.clear_faults()

    def start(self, role: str) -> None:
        """Start a process; after a kill, only once the gap is long enough to be published."""
        self._wait(lambda: time.monotonic() > self._killed_at + CONTINUOUS_SECONDS + MARGIN_SECONDS)
        with (self._folder / f"{role}.log").open("ab") as log:
            process = self._processes[role] = self._run(role, stdout=log)
        self._narrate.line("PROCESS", f"imds-bridge {role} starts as process {process.pid}")

    def kill_forward(self) -> None:
        """Kill the forwarder: SIGKILL, which is -9."""
        process = self._processes["forward"]
        process.kill()
        process.wait()
        self._killed_at = time.monotonic()
        self._narrate.line("PROCESS", f"imds-bridge forward, process {process.pid}, is killed with -9")

    def stop(self, role: str) -> None:
        """Stop a process as a supervisor does."""
        process = self._processes[role]
        if sys.platform == "win32":
            if not send_break(process.pid):
                raise NotArrived(
                    "Ctrl-Break cannot be sent: on Windows the demo needs a console, such as a terminal"
                )
        else:
            process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        self._narrate.line("PROCESS", f"imds-bridge {role} ends with exit code {process.returncode}")
        if process.returncode != 0:
            self.faults.append(f"the exit code of {role} was {process.returncode}")

    # Commands

    def forge(self, event_type: str) -> None:
        """Send a command for the event with a wrong signature."""
        if self._bus:
            self._narrate.line("COMMAND", f"a forged command is sent: approve the {event_type}")
            self._bus.forge(self._event_ids[event_type])

    def approve(self, event_type: str) -> None:
        """Approve the event as an operator does."""
        arguments = ["approve", self._event_ids[event_type], "--reason", "drained", "--wait"]
        self._narrate.line("COMMAND", f"$ imds-bridge {' '.join(arguments)}")
        process = self._run(*arguments, stdout=subprocess.PIPE)
        for line in process.stdout or ():
            self._narrate.line("COMMAND", line.decode().rstrip())
        process.wait()

    def _run(self, *arguments: str, stdout: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bridge", *arguments, "--config", str(self._config)]
        process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=stdout, stderr=subprocess.STDOUT, **_GROUP
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    # What arrives

    def look(self) -> None:
        """Narrate what is new."""
        incarnation, events = self._imds.incarnation, self._imds.events
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            content = "; ".join(map(_describe, events)) or "no events"
            self._narrate.line("IMDS", f"document {incarnation}: {content}")
        self.listeners.narrate(self._narrate)

    def chapter(self, title: str) -> None:
        """Begin a chapter."""
        self._number += 1
        self._narrate.heading(f"{self._number}. {title}")

    def say(self, text: str) -> None:
        """Print a paragraph, and leave time to read it."""
        self._narrate.paragraphs(text)
        self._narrate.pause(self.look)

    def expect(self, *names: str) -> None:
        """Wait until the listeners have events of these types and all before; raise NotArrived after a while."""
        self.expected.update(names)

        def is_all_there() -> bool:
            seen = Counter(map(name_of, self.listeners.events().values()))
            return not self.expected - seen and self.listeners.have_all()

        if not self._wait(is_all_there):
            raise NotArrived(f"chapter {self._number}: not every event arrived within {WAIT_SECONDS:g} s")
        self._narrate.pause(self.look)

    def _wait(self, is_done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            done = is_done()
            self.look()
            if done or time.monotonic() > deadline:
                return done
            time.sleep(LOOK_SECONDS)

    def published(self) -> dict[str, str]:
        """Return the type of each event that the processes have published, by id."""
        rows: list[dict[str, Any]] = []
        for role in self._processes:
            with suppress(BridgeError):  # it has not even made its outbox
                rows += newest(StateFolder(self._folder / "state" / role), 10_000)
        return {row["id"]: name_of(row) for row in rows}

    def logs(self) -> list[str]:
        """Return the lines that the processes have logged."""
        texts = [file.read_text("utf-8", "replace") for file in sorted(self._folder.glob("*.log"))]
        return "\n".join(texts).split("\n")


def _describe(event: Mapping[str, Any]) -> str:
    return f"{event['EventType']} of {' and '.join(event['Resources'])} is {event['EventStatus']}"


def find_faults(
    expected: Counter[str], published: Mapping[str, str], arrived: Mapping[str, Collection[str]]
) -> list[str]:
    """Describe what is missing or too much.

    Args:
        expected: how many events of each type the story causes.
        published: the type of each event by id.
        arrived: the ids that each listener has got.
    """
    seen = Counter(published.values())
    surplus = seen - expected
    pauses = min(surplus[name] for name in GAP)  # a machine that was held up meanwhile is no fault
    surplus -= Counter(dict.fromkeys(GAP, pauses))
    return [
        *(f"{name}: {count} missing" for name, count in (expected - seen).items()),
        *(f"{name}: {count} too many" for name, count in surplus.items()),
        *(
            f"{count} of {len(published)} events lost on the way to {place}"
            for place, ids in arrived.items()
            if (count := len(published.keys() - set(ids)))
        ),
    ]
