"""The demonstration: a scenario on the simulators, with the real `forward` and `listen` as separate processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from azure.servicebus import ServiceBusClient, ServiceBusMessage

from bridge.http.signing import sign
from bridge.lab.eventgrid import EventGridLab
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.narrator import Narrator, Watcher
from bridge.lab.scenario import Scenario, Step, load_scenario, play
from bridge.lab.servicebus import ServiceBusLab
from bridge.outbox.inspect import newest
from bridge.outbox.state_dir import StateFolder

START_SECONDS = 30.0
WAIT_SECONDS = 20.0  # for events that are missing at the end of the scenario
STOP_SECONDS = 7.0
PREPARE_SECONDS = 1.0  # before the operator approves
ROLES = ("forward", "listen")
# On Windows an orderly stop is Ctrl-Break to a process group; `terminate` kills.
if sys.platform == "win32":
    _STOP, _OWN_GROUP = signal.CTRL_BREAK_EVENT, subprocess.CREATE_NEW_PROCESS_GROUP
else:
    _STOP, _OWN_GROUP = signal.SIGTERM, 0
BUS_FILE = Path(__file__).with_name("servicebus.json")
TOPIC, SUBSCRIPTION, QUEUE = "scheduled-events", "everything", "approvals"
SESSION = "lab.web-0"
GRID_PATH, CHAT_PATH = "/from-event-grid", "/chat"
SECRET = "whsec_ZGVtbyBkZW1vIGRlbW8gZGVtbyBkZW1vIGRlbW8h"  # noqa: S105 - only for the demonstration
FORGED_SECRET = "whsec_Zm9yZ2VkIGZvcmdlZCBmb3JnZWQgZm9yZ2VkIQ=="  # noqa: S105 - not a real secret

HEARTBEAT, DOCUMENT = "io.imdsbridge.bridge.heartbeat.v1", "io.imdsbridge.document.changed.v1"
READY = {"web-0/forward", "web-0/listen"}

# What must arrive: how often each type of event goes through each transition, and each outcome.
EXPECTED = Counter(
    {
        ("Freeze", "scheduled"): 1,
        ("Freeze", "started"): 1,
        ("Freeze", "completed"): 1,
        ("Reboot", "scheduled"): 1,
        ("Reboot", "started"): 1,
        ("Reboot", "completed"): 1,
        ("Redeploy", "scheduled"): 1,
        ("Redeploy", "canceled"): 1,
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
    accepted: int = 0
    rejected: int = 0
    faults: list[str] = field(default_factory=list)

    def last_line(self) -> str:
        """Return the last line of the output."""
        if self.faults:
            return f"demo: FAILED, {'; '.join(self.faults)}"
        return (
            f"demo: ok, {self.published} published, {self.delivered} delivered, 0 lost, "
            f"{self.accepted} approval accepted, {self.rejected} rejected"
        )


def demonstrate() -> int:
    """Run the demonstration; return 0 only if everything arrived."""
    with tempfile.TemporaryDirectory(prefix="imds-bridge-demo-") as folder:
        result = _Demo(load_scenario("demo"), Path(folder), Narrator()).play()
    print(result.last_line(), flush=True)
    return 1 if result.faults else 0


class _Demo:
    """One run of the scenario, with the simulators and processes."""

    def __init__(self, scenario: Scenario, folder: Path, narrate: Narrator) -> None:
        self._scenario = scenario
        self._folder = folder
        self._narrate = narrate
        self._config = folder / "config.toml"
        self._states = [StateFolder(folder / "state" / role) for role in ROLES]
        self._approver: threading.Thread | None = None

    def play(self) -> Result:
        """Start the processes, play the scenario, stop them, and check what arrived."""
        scenario, narrate = self._scenario, self._narrate
        narrate("STORY", f"{scenario.title} (one second here is {scenario.time_scale / 60:g} minutes)")
        with ExitStack() as stack:
            self._inbox = stack.enter_context(Inbox(strict=True))
            self._bus = stack.enter_context(ServiceBusLab(BUS_FILE))
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
            processes = [stack.enter_context(self._process(role)) for role in ROLES]
            pids = ", ".join(
                f"`imds-bridge {role}` as {p.pid}" for role, p in zip(ROLES, processes, strict=True)
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

[sinks.bus]
kind = "servicebus"
connection_string = "{self._bus.connection_string}"
topic = "{TOPIC}"

[sinks.grid]
kind = "eventgrid"
endpoint = "{self._grid.custom_endpoint}"
key = "{self._grid.keys[0]}"

[sinks.chat]
kind = "webhook"
format = "slack"
url = "{self._readers.base_url}{CHAT_PATH}"
time_zone = "UTC"

[approvals]
connection_string = "{self._bus.connection_string}"
queue = "{QUEUE}"
session = "{{resource_group}}.{{vm}}"
signing_secret = "{SECRET}"
receipts_topic = "{TOPIC}"
receipts_subscription = "receipts"

[approvals.policy]
allow = [{{ event_source = ["User"] }}]
""",
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
        if step.arguments.get("event") == "reboot":
            self._approver = threading.Thread(target=self._approve, daemon=True)
            self._approver.start()

    def _chat(self) -> list[str]:
        """Return the first line of each message in the chat channel."""
        posted = [one for one in self._readers.accepted if one.path == CHAT_PATH]
        return [one.json()["text"].partition("\n")[0] for one in posted]

    def _pushed(self) -> set[str]:
        """Return the ids of the events that Event Grid delivered to its webhook."""
        return {one.json()["id"] for one in self._readers.accepted if one.path == GRID_PATH}

    # Approvals

    def _approve(self) -> None:
        """Approve the reboot as an operator does, then send commands that must be refused."""
        event_id = next(event["EventId"] for event in self._imds.events if event["EventType"] == "Reboot")
        threading.Event().wait(PREPARE_SECONDS)
        self._narrate("APPROVE", f"$ imds-bridge approve {event_id} --reason drained --wait")
        command = [sys.executable, "-m", "bridge", "approve", event_id, "--reason", "drained", "--wait"]
        with subprocess.Popen(  # noqa: S603 - our own command
            [*command, "--config", str(self._config)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                self._narrate("APPROVE", line.rstrip())
        late = datetime.now(UTC) - timedelta(minutes=5)
        for what, data, secret in (
            ("a forged command", {}, FORGED_SECRET),
            ("an expired command", {"ExpiresAt": late.isoformat()}, SECRET),
            ("a command for another VM", {"Vm": self._scenario.vms[1]}, SECRET),
        ):
            self._narrate("APPROVE", f"sending {what}")
            self._send({"EventId": event_id, "Id": what, **data}, secret)

    def _send(self, command: Mapping[str, Any], secret: str) -> None:
        body = json.dumps(command).encode()
        properties: dict[str | bytes, Any] = {}
        properties.update(sign([secret], str(command["Id"]), datetime.now(UTC), body))
        message = ServiceBusMessage(
            body, message_id=str(command["Id"]), session_id=SESSION, application_properties=properties
        )
        with (
            ServiceBusClient.from_connection_string(self._bus.connection_string) as client,
            client.get_queue_sender(QUEUE) as sender,
        ):
            sender.send_messages(message, timeout=STOP_SECONDS)

    # The start and the end

    def _wait_for_the_start(self) -> None:
        """Wait until both processes have started and `forward` has polled; `_evaluate` reports what is missing."""
        with contextlib.suppress(AssertionError):
            self._inbox.wait_for(lambda: _is_ready(self._inbox.events()), timeout=START_SECONDS)

    def _wait_for_the_end(self) -> None:
        """Wait until the inbox has every expected event; `_evaluate` reports what is missing."""
        with contextlib.suppress(AssertionError):
            self._inbox.wait_for(lambda: not EXPECTED - _seen(self._inbox.events()), timeout=WAIT_SECONDS)

    def _wait_for_event_grid(self) -> None:
        """Wait until Event Grid has delivered the events that it accepted."""
        with contextlib.suppress(AssertionError):
            self._readers.wait_for(lambda: len(self._pushed()) >= len(self._stored()), timeout=WAIT_SECONDS)

    def _stored(self) -> set[str]:
        return {event["id"] for state in self._states for event in newest(state, 10_000)}

    def _evaluate(self, exit_codes: list[int | None]) -> Result:
        stored, pushed = self._stored(), self._pushed()
        arrived = {event["id"] for event in self._inbox.events()}
        on_bus = {
            message.message_id
            for message in self._bus.entity(f"{TOPIC}/Subscriptions/{SUBSCRIPTION}").messages
        }
        seen = _seen(self._inbox.events())
        result = Result(
            published=len(stored),
            delivered=len(stored & arrived & on_bus & pushed),
            accepted=sum(
                count for (kind, what), count in seen.items() if kind == "approval" and "accepted" in what
            ),
            rejected=sum(
                count for (kind, what), count in seen.items() if kind == "approval" and "rejected" in what
            ),
        )
        for place, there in (("inbox", arrived), ("bus", on_bus), ("webhook behind Event Grid", pushed)):
            if lost := len(stored - there):
                result.faults.append(f"{lost} of {len(stored)} events lost on the way to the {place}")
        for (kind, what), count in (EXPECTED - seen).items():
            result.faults.append(f"{kind} {what}: {count} missing")
        for (kind, what), count in (seen - EXPECTED).items():
            result.faults.append(f"{kind} {what}: {count} too many")
        if not self._chat():
            result.faults.append("no message arrived in the chat channel")
        result.faults += self._inbox.problems
        for role, exit_code in zip(ROLES, exit_codes, strict=True):
            if exit_code != 0:
                result.faults.append(f"the exit code of {role} was {exit_code}")
        if result.faults:
            for role in ROLES:
                print(
                    (self._folder / f"{role}.log").read_text(encoding="utf-8", errors="replace"),
                    file=sys.stderr,
                )
        return result


def _is_ready(events: list[dict[str, Any]]) -> bool:
    """Return whether both processes have started and the first document has been published."""
    started = {event["reporter"] for event in events if event["type"] == HEARTBEAT}
    return started >= READY and any(event["type"] == DOCUMENT for event in events)


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
