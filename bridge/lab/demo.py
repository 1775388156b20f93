"""The demonstration: simulators, the real `imds-bridge forward` as its own process, and a story told live."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from bridge.errors import BridgeError
from bridge.lab.imds import ImdsLab
from bridge.lab.inbox import Inbox
from bridge.lab.scenario import Scenario, load_scenario, play
from bridge.ledger import newest, show
from bridge.state import StateFolder

LIMIT_SECONDS = 25.0  # however badly it goes, the demonstration ends
STOP_SECONDS = 6.0
LOOK_SECONDS = 0.1
COLUMN = 10

# What the story must bring: how often each kind of event goes through each transition.
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
    }
)
_COLOURS = {"STORY": "1", "IMDS": "33", "PUBLISHED": "36", "ARRIVED": "32", "COUNTDOWN": "2"}


class Teller:
    """Prints one line for everything that happens, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, who: str, what: str) -> None:
        """Print that `who` did `what`."""
        name = who.ljust(COLUMN)
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            name = f"\033[{_COLOURS.get(who, '0')}m{name}\033[0m"
        with self._lock:
            print(f"{time.monotonic() - self._began_at:5.1f} s  {name} {what}", flush=True)


@dataclass
class Result:
    """What came of the demonstration; `faults` says what is missing."""

    published: int = 0
    delivered: int = 0
    faults: list[str] = field(default_factory=list)

    def last_line(self) -> str:
        """Sum up, the last line that is printed."""
        if self.faults:
            return f"demo: FAILED, {'; '.join(self.faults)}"
        return f"demo: ok, {self.published} events published, {self.delivered} delivered, 0 lost"


def add_parser(commands: Any) -> None:
    """Add the command `demo` to the command line."""
    command = commands.add_parser(
        "demo",
        help="see it all work, on simulators",
        description="Plays a live migration, a reboot by the user and a cancellation on a simulated IMDS, forwards\n"
        "them with the real `imds-bridge forward` and tells what happens. Ends by itself, within 30 seconds.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=lambda _: run())


def run() -> int:
    """Run the demonstration; return 0 only if everything arrived."""
    tell = Teller()
    scenario = load_scenario("demo")
    with tempfile.TemporaryDirectory(prefix="imds-bridge-demo-") as folder:
        result = _play(scenario, Path(folder), tell)
    print(result.last_line(), flush=True)
    return 1 if result.faults else 0


def _play(scenario: Scenario, folder: Path, tell: Teller) -> Result:
    stop = threading.Event()
    tell("STORY", f"{scenario.title} (one second here is {scenario.time_scale / 60:g} minutes)")
    with (
        Inbox(strict=True) as inbox,
        ImdsLab(vms=scenario.vms, time_scale=scenario.time_scale, scale_set=scenario.scale_set) as lab,
        _forwarder(lab.url(scenario.vms[0]), inbox.url, folder) as process,
    ):
        state = StateFolder(folder / "state" / "forward")
        tell(
            "STORY",
            f"`imds-bridge forward` runs as process {process.pid} on {scenario.vms[0]}, polling every second",
        )
        watcher = threading.Thread(target=_Watcher(lab, state, inbox, tell).run, args=(stop,))
        watcher.start()
        try:
            play(scenario, lab, stop, lambda step: tell("STORY", step.tell))
            _wait_for_the_end(inbox)
        finally:
            exit_code = _end(process)
            stop.set()
            watcher.join()
        return _judge(state, inbox, exit_code, folder)


@contextlib.contextmanager
def _forwarder(imds_url: str, inbox_url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the real command, its log in a file."""
    config = folder / "config.toml"
    config.write_text(
        f'state_dir = "{(folder / "state").as_posix()}"\nlog_format = "text"\n\n'
        f'[imds]\nendpoint = "{imds_url}"\n\n'
        f'[sinks.inbox]\nkind = "webhook"\nurl = "{inbox_url}"\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "bridge", "forward", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: S603 - our own command
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Stop the forwarder as a supervisor does; return its exit code, None if it did not end."""
    process.terminate()
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _wait_for_the_end(inbox: Inbox) -> None:
    """Wait until the inbox has all that the story must bring; `_judge` says what is missing after the limit."""
    with contextlib.suppress(AssertionError):
        inbox.wait_for(lambda: not EXPECTED - _transitions(inbox.events()), timeout=LIMIT_SECONDS - 10)


def _transitions(events: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    told = {event["id"]: event for event in events if ".scheduledevent." in event["type"]}
    return Counter((event["data"]["EventType"], event["type"].split(".")[3]) for event in told.values())


def _judge(state: StateFolder, inbox: Inbox, exit_code: int | None, folder: Path) -> Result:
    stored = {event["id"] for event in newest(state, 10_000)}
    arrived = {event["id"] for event in inbox.events()}
    result = Result(published=len(stored), delivered=len(stored & arrived))
    if lost := len(stored - arrived):
        result.faults.append(f"{lost} of {len(stored)} events lost")
    seen = _transitions(inbox.events())
    for (kind, transition), count in (EXPECTED - seen).items():
        result.faults.append(f"{kind} {transition}: {count} missing")
    for (kind, transition), count in (seen - EXPECTED).items():
        result.faults.append(f"{kind} {transition}: {count} too many")
    result.faults += inbox.problems
    if exit_code != 0:
        result.faults.append(f"the forwarder's exit code was {exit_code}")
    if result.faults:
        print((folder / "log").read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    return result


class _Watcher:
    """Tells what IMDS says, what the outbox holds and what has arrived, in this order, as soon as it is so."""

    def __init__(self, lab: ImdsLab, state: StateFolder, inbox: Inbox, tell: Teller) -> None:
        self._lab = lab
        self._state = state
        self._inbox = inbox
        self._tell = tell
        self._incarnation = 0
        self._counted = ""
        self._stored = 0
        self._arrived = 0

    def run(self, stop: threading.Event) -> None:
        """Look around until `stop`, and a last time then."""
        stopped = False
        while not stopped:
            stopped = stop.wait(LOOK_SECONDS)
            self._look_at_imds()
            self._look_at_outbox()
            self._look_at_inbox()

    def _look_at_imds(self) -> None:
        incarnation, events = self._lab.incarnation, self._lab.events
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            said = "; ".join(map(_short, events)) or "no events"
            self._tell("IMDS", f"document {incarnation}: {said}")
        left = [(event, _seconds_left(event)) for event in events]
        countdown = ", ".join(
            f"{event['EventType']} of {'+'.join(event['Resources'])} in {seconds} s"
            for event, seconds in left
            if seconds is not None
        )
        if countdown and countdown != self._counted:
            self._tell("COUNTDOWN", countdown)
        self._counted = countdown

    def _look_at_outbox(self) -> None:
        with contextlib.suppress(BridgeError):  # there is no outbox yet
            for row in newest(self._state, 100):
                if row["seq"] > self._stored:
                    self._stored = row["seq"]
                    self._tell("PUBLISHED", _about(show(self._state, row["id"])))

    def _look_at_inbox(self) -> None:
        events = self._inbox.events()
        for event in events[self._arrived :]:
            self._tell("ARRIVED", _about(event))
        self._arrived = len(events)


def _seconds_left(event: Mapping[str, Any]) -> int | None:
    if not event["NotBefore"]:
        return None
    left = (parsedate_to_datetime(event["NotBefore"]) - datetime.now(UTC)).total_seconds()
    return max(0, round(left))


def _short(event: Mapping[str, Any]) -> str:
    return f"{event['EventType']} of {'+'.join(event['Resources'])} {event['EventStatus']}"


def _about(event: Mapping[str, Any]) -> str:
    """Say what a CloudEvent is about, in a few words."""
    name = event["type"].removeprefix("io.imdsbridge.").removesuffix(".v1")
    data = event["data"]
    if "EventId" not in data:
        return f"{name} (incarnation {data.get('DocumentIncarnation')})"
    notice = data["NoticeSeconds"]
    when = f", {notice} s notice" if notice is not None and notice > 0 else ""
    return f"{name} ({data['EventType']} of {'+'.join(data['Resources'])} by {data['EventSource']}{when})"
