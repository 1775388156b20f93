"""The demonstration: a scenario on the simulators, with the real `forward` and `listen` as separate processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.lab.eventgrid import EventGridLab
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.narrator import Narrator, Watcher
from bridge.lab.scenario import Scenario, Step, load_scenario, play
from bridge.outbox.inspect import newest
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.terminal import show

if TYPE_CHECKING:
    from bridge.lab.demo_bus import DemoBus

START_SECONDS = 30.0
WAIT_SECONDS = 60.0  # for events that are missing at the end of the scenario
STOP_SECONDS = 20.0
REBOOT_NOTICE_SECONDS = 10_800
REBOOT_TEXT = "A user reboots web-0: it starts when it is approved, or in 3 hours"
PREPARE_SECONDS = 1.0  # before the operator approves
# On Windows an orderly stop is Ctrl-Break to a process group; `terminate` kills.
if sys.platform == "win32":
    _STOP, _OWN_GROUP = signal.CTRL_BREAK_EVENT, subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _STOP, _OWN_GROUP = signal.SIGTERM, 0
GRID_PATH, CHAT_PATH = "/from-event-grid", "/chat"
HEARTBEAT, DOCUMENT = "io.imdsbridge.bridge.heartbeat.v1", "io.imdsbridge.document.changed.v1"

# What must arrive: how often each type of event goes through each transition, and each outcome of a command.
TRANSITIONS = Counter(
    {
        ("Freeze", "scheduled"): 1,
        ("Freeze", "started"): 1,
        ("Freeze", "completed"): 1,
        ("Reboot", "scheduled"): 1,
        ("Reboot", "started"): 1,
        ("Reboot", "completed"): 1,
        ("Redeploy", "scheduled"): 1,
        ("Redeploy", "canceled"): 1,
    }
)
OUTCOMES = Counter(
    {
        ("approval", "accepted: approved"): 1,
        ("approval", "rejected: bad_signature"): 1,
        ("approval", "rejected: expired"): 1,
        ("approval", "rejected: other_vm"): 1,
    }
)


@dataclass
class Result:
    """The result of the demonstration; `faults` lists what is missing."""

    published: int = 0
    delivered: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def last_line(self) -> str:
        """Return the last line of the output."""
        if self.faults:
            return f"demo: FAILED, {'; '.join(self.faults)}"
        total = f"demo: ok, {self.published} published, {self.delivered} delivered, 0 lost"
        if not self.outcomes:
            return total
        accepted = sum(count for what, count in self.outcomes.items() if what.startswith("accepted"))
        rejected = sum(count for what, count in self.outcomes.items() if what.startswith("rejected"))
        return f"{total}, {accepted} approval accepted, {rejected} rejected"


def demonstrate(*, with_bus: bool) -> int:
    """Run the demonstration; return 0 only if everything arrived.

    Args:
        with_bus: whether to simulate a Service Bus and to approve over it.
    """
    with tempfile.TemporaryDirectory(prefix="imds-bridge-demo-") as folder, ExitStack() as stack:
        bus = None
        if with_bus:
            from bridge.lab.demo_bus import DemoBus  # noqa: PLC0415 - it needs the extra `lab`

            bus = stack.enter_context(DemoBus())
        result = _Demo(load_scenario("demo"), Path(folder), Narrator(), bus).play()
    show(result.last_line())
    return 1 if result.faults else 0


class _Demo:
    """One run of the scenario, with the simulators and processes."""

    def __init__(self, scenario: Scenario, folder: Path, narrate: Narrator, bus: DemoBus | None) -> None:
        self._scenario = _with_time_to_approve(scenario) if bus else scenario
        self._bus = bus
        self._roles = ("forward", "listen") if bus else ("forward",)
        self._expected = TRANSITIONS + OUTCOMES if bus else TRANSITIONS
        self._folder = folder
        self._narrate = narrate
        self._config = folder / "config.toml"
        self._states = [StateFolder(folder / "state" / role) for role in self._roles]
        self._approver: threading.Thread | None = None

    def play(self) -> Result:
        """Start the processes, play the scenario, stop them, and check what arrived."""
        scenario, narrate = self._scenario, self._narrate
        narrate("STORY", f"{scenario.title} (one second here is {scenario.time_scale / 60:g} minutes)")
        with ExitStack() as stack:
            self._inbox = stack.enter_context(Inbox(strict=True))
            # a chat channel, and a webhook that Event Grid delivers to
            self._readers = stack.enter_context(Inbox())
            self._grid = stack.enter_context(EventGridLab())
            self._grid.subscribe(f"{self._readers.base_url}{GRID_PATH}")
            self._imds = stack.enter_context(
                ImdsLab(
                    vms=scenario.vms, time_scale=scenario.time_scale, scale_set=scenario.scale_set, paced=True
                )
            )
            self._write_config()
            processes = [stack.enter_context(self._process(role)) for role in self._roles]
            pids = ", ".join(
                f"`imds-bridge {role}` as {p.pid}" for role, p in zip(self._roles, processes, strict=True)
            )
            narrate("STORY", f"{scenario.vms[0]} runs {pids}; IMDS is polled every second")
            with self._watching():
                self._wait_for_the_start()
                play(scenario, self._imds, threading.Event(), self._step)
                self._wait_for_the_end()
                exit_codes = [_end(process) for process in processes]
                if self._approver:
                    self._approver.join(STOP_SECONDS)
                self._wait_for_event_grid()
            return self._evaluate(exit_codes)

    def _write_config(self) -> None:
        self._config.write_text(
            f"""
state_dir = "{(self._folder / "state").as_posix()}"
log_format = "text"

[imds]
endpoint = "{self._imds.url(self._scenario.vms[0])}"

[sinks.inbox]
kind = "webhook"
url = "{self._inbox.url}"

[sinks.grid]
kind = "eventgrid"
endpoint = "{self._grid.custom_endpoint}"
key = "{self._grid.keys[0]}"

[sinks.chat]
kind = "webhook"
format = "slack"
url = "{self._readers.base_url}{CHAT_PATH}"
time_zone = "UTC"
{self._bus.config() if self._bus else ""}""",
            encoding="utf-8",
        )

    @contextlib.contextmanager
    def _process(self, role: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the real command, its log in a file."""
        command = [sys.executable, "-m", "bridge", role, "--config", str(self._config)]
        with (self._folder / f"{role}.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - our own command
                command, stdout=log, stderr=log, creationflags=_OWN_GROUP
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        stop = threading.Event()
        watcher = Watcher(self._imds, self._states, self._inbox, self._chat, self._narrate)
        thread = threading.Thread(target=watcher.run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _step(self, step: Step) -> None:
        self._narrate("STORY", step.text)
        if self._bus and step.arguments.get("event") == "reboot":
            self._approver = threading.Thread(target=self._approve, args=(self._bus,), daemon=True)
            self._approver.start()

    def _chat(self) -> list[str]:
        """Return the first line of each message in the chat channel."""
        posted = [one for one in self._readers.accepted if one.path == CHAT_PATH]
        return [one.json()["text"].partition("\n")[0] for one in posted]

    def _pushed(self) -> set[str]:
        """Return the ids of the events that Event Grid delivered to its webhook."""
        return {one.json()["id"] for one in self._readers.accepted if one.path == GRID_PATH}

    # Approvals

    def _approve(self, bus: DemoBus) -> None:
        """Approve the reboot."""
        event_id = next(event["EventId"] for event in self._imds.events if event["EventType"] == "Reboot")
        threading.Event().wait(PREPARE_SECONDS)
        bus.approve(
            event_id, self._scenario.vms[1], self._config, lambda line: self._narrate("APPROVE", line)
        )

    # The start and the end

    def _wait_for_the_start(self) -> None:
        """Wait until the processes have started and `forward` has polled; `_evaluate` reports what is missing."""
        with contextlib.suppress(AssertionError):
            self._inbox.wait_for(self._is_ready, timeout=START_SECONDS)

    def _is_ready(self) -> bool:
        """Return whether the processes have started and the first document has been published."""
        events = self._inbox.events()
        started = {event["reporter"] for event in events if event["type"] == HEARTBEAT}
        wanted = {f"{self._scenario.vms[0]}/{role}" for role in self._roles}
        return started >= wanted and any(event["type"] == DOCUMENT for event in events)

    def _wait_for_the_end(self) -> None:
        """Wait until the inbox has every expected event; `_evaluate` reports what is missing."""
        with contextlib.suppress(AssertionError):
            self._inbox.wait_for(
                lambda: not self._expected - _seen(self._inbox.events()), timeout=WAIT_SECONDS
            )

    def _wait_for_event_grid(self) -> None:
        """Wait until Event Grid has delivered the events that it accepted."""
        with contextlib.suppress(AssertionError):
            self._readers.wait_for(lambda: len(self._pushed()) >= len(self._stored()), timeout=WAIT_SECONDS)

    def _stored(self) -> set[str]:
        return {event["id"] for state in self._states for event in newest(state, 10_000)}

    def _evaluate(self, exit_codes: list[int | None]) -> Result:
        stored, seen, places = self._stored(), _seen(self._inbox.events()), self._arrived()
        faults = [
            *_lost(stored, places),
            *(f"{kind} {what}: {count} missing" for (kind, what), count in (self._expected - seen).items()),
            *(f"{kind} {what}: {count} too many" for (kind, what), count in (seen - self._expected).items()),
            *([] if self._chat() else ["no message arrived in the chat channel"]),
            *self._inbox.problems,
            *(
                f"the exit code of {role} was {exit_code}"
                for role, exit_code in zip(self._roles, exit_codes, strict=True)
                if exit_code != 0
            ),
        ]
        if faults:
            self._print_logs()
        return Result(
            published=len(stored),
            delivered=len(stored.intersection(*places.values())),
            outcomes=Counter({what: count for (kind, what), count in seen.items() if kind == "approval"}),
            faults=faults,
        )

    def _arrived(self) -> dict[str, set[str]]:
        """Return the ids of the events that have arrived, by place."""
        places = {
            "inbox": {event["id"] for event in self._inbox.events()},
            "webhook behind Event Grid": self._pushed(),
        }
        if self._bus:
            places["bus"] = self._bus.received_ids()
        return places

    def _print_logs(self) -> None:
        for role in self._roles:
            log = self._folder / f"{role}.log"
            show(*log.read_text(encoding="utf-8", errors="replace").split("\n"), stream=sys.stderr)


def _with_time_to_approve(scenario: Scenario) -> Scenario:
    """Return the scenario with a reboot that even a slow machine approves before it starts on its own."""
    steps = [
        replace(step, text=REBOOT_TEXT, arguments={**step.arguments, "notice_seconds": REBOOT_NOTICE_SECONDS})
        if step.arguments.get("event") == "reboot"
        else step
        for step in scenario.steps
    ]
    return replace(scenario, steps=tuple(steps))


def _lost(stored: set[str], places: dict[str, set[str]]) -> list[str]:
    return [
        f"{lost} of {len(stored)} events lost on the way to the {place}"
        for place, arrived in places.items()
        if (lost := len(stored - arrived))
    ]


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Stop a process as a supervisor does; return its exit code, None if it did not exit."""
    process.send_signal(_STOP)
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _seen(events: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Count transitions and outcomes, without duplicates."""
    seen: Counter[tuple[str, str]] = Counter()
    for event in {event["id"]: event for event in events}.values():
        family, what = event["type"].split(".")[2:4]
        if family == "scheduledevent":
            seen[event["data"]["EventType"], what] += 1
        elif family == "approval":
            seen[family, f"{what}: {event['data']['Reason']}"] += 1
    return seen
