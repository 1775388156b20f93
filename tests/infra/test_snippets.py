"""The snippets for consumers approve an event over the bus, with the real `forward` and `listen`."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import go_program
from tests.support.consumers import APPROVER, TOPIC, bridge
from tests.support.npm import node_modules
from tests.support.paths import ROOT
from tests.support.process import completed, wait_until
from tests.support.programs import tool

pytestmark = pytest.mark.timeout(900)  # the first run downloads the clients

PAGE = ROOT / "schemas" / "README.md"
SNIPPETS = ROOT / "schemas" / "snippets"
NAMES = sorted(path.name for path in SNIPPETS.glob("approve.*"))
# Without .NET, which CI lacks, the job `dotnet` of .github/workflows/test.yml builds the one in C#.
RUN = [name for name in NAMES if not name.endswith(".cs") or shutil.which("dotnet")]
STORY = runpy.run_path(str(SNIPPETS / "story.py"))


# Longer than LockDuration of the subscription.
SLEEPS = {
    ".py": "__import__('time').sleep(6)  #",
    ".js": "await new Promise((go) => setTimeout(go, 6000)); //",
    ".go": "time.Sleep(6 * time.Second) //",
    ".cs": "await Task.Delay(6000); //",
}
BUILD_SECONDS = 300


def with_a_long_drain(snippet: Path, folder: Path) -> Path:
    """Copy a snippet whose drain takes longer than the lock of its message."""
    copy = folder / snippet.name
    text = snippet.read_text()
    assert text.count("Drain here.") == 1
    copy.write_text(re.sub(r"(#|//) Drain here\.", SLEEPS[snippet.suffix], text))
    return copy


def command_of(snippet: Path) -> tuple[list[str], dict[str, str]]:
    """Return how to run a snippet, and the variables that it needs."""
    if snippet.suffix == ".go":
        return [str(go_program(snippet))], {}
    if snippet.suffix == ".cs":
        subprocess.run([tool("dotnet"), "build", snippet], check=True, timeout=BUILD_SECONDS)
        return [tool("dotnet"), "run", "--no-build", str(snippet)], {}
    if snippet.suffix == ".js":
        return [tool("node"), str(snippet)], {"NODE_PATH": str(node_modules("@azure/service-bus"))}
    return [sys.executable, str(snippet)], {}


@pytest.mark.parametrize(
    "name",
    [name if name.endswith(".py") else pytest.param(name, marks=pytest.mark.clients) for name in RUN],
)
def test_it_approves_the_event_after_a_drain_longer_than_its_lock_and_prints_the_receipt(
    tmp_path: Path, name: str
) -> None:
    command, variables = command_of(with_a_long_drain(SNIPPETS / name, tmp_path))
    with bridge(tmp_path, vms=("web-0", "web-1")) as (imds, bus):
        entity = bus.entity(f"{TOPIC}/Subscriptions/{APPROVER}")
        wait_until(lambda: entity.counts.enqueued >= 1, describe=lambda: entity.messages)
        event = imds.schedule(event_type="Reboot", resources=["web-0", "web-1"])
        variables["SERVICEBUS_CONNECTION_STRING"] = bus.connection_string
        done = completed(*command, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    assert re.sub(r"\W+", " ", done.stdout).strip() == "Accepted approved web 0 web 1"
    assert [one.event_id for one in imds.approvals] == [event]


def told(*messages: tuple[str, dict[str, Any]], again: int = 1) -> list[str]:
    """Return the lines of web-0's story; each message comes so many times, and what was told is stored."""
    story: dict[str, Any] = {}
    lines = []
    for number, (kind, more) in enumerate(messages):
        data = {"EventType": "Reboot", "EventStatus": kind.capitalize(), "Resources": ["WEB-0"], **more}
        event = {
            "type": f"io.imdsbridge.scheduledevent.{kind}.v1",
            "source": "/Group",
            "id": str(number),
            "time": f"2026-11-20T12:{number:02}:00.000Z",
            "correlationid": more.get("of", "E1" if number % 2 else "e1"),
            "data": {"NotBeforeUtc": "2026-11-20T13:00:00.000Z", **data},
        }
        for _ in range(again):
            story = json.loads(json.dumps(story))
            lines.append(STORY["tell"](story, "web-0", event))
    lines += STORY["lost"](story, "web-0", "2026-11-21T12:00:00.000Z")
    return [" ".join(line.replace("2026-11-20T", "").split()) for line in lines if line]


DOWN = "DOWN web-0 at 13:00:00.000Z: Reboot e1"
LOST, ENDED = "LOST web-0: Reboot e1 lost", "BACK web-0: Reboot e1 ended"
CANCELED = "BACK web-0: Reboot e1 canceled"
SECOND_DOWN, SECOND_CANCELED = (line.replace("e1", "e2") for line in (DOWN, CANCELED))
OTHER = {"Resources": ["web-1"]}
MOVED = {"NotBeforeUtc": "2026-11-20T14:00:00.000Z"}
SCHEDULED: tuple[str, dict[str, Any]] = ("scheduled", {})


@pytest.mark.parametrize("again", [1, 3])
@pytest.mark.parametrize(
    ("messages", "lines"),
    [
        (
            [SCHEDULED, ("started", {}), ("completed", {"VmIsGone": False})],
            [DOWN, "BACK web-0: Reboot e1 completed"],
        ),
        (
            [("started", {"EventType": "Preempt"}), ("completed", {"VmIsGone": True})],
            ["DOWN web-0 now: Preempt e1", "GONE web-0: Preempt e1 completed"],
        ),
        (
            [SCHEDULED, ("updated", MOVED), ("canceled", {})],
            [DOWN, "MOVED web-0 at 14:00:00.000Z: Reboot e1", CANCELED],
        ),
        (
            [SCHEDULED, ("ended", {}), ("completed", {}), ("ended", {"x": 1})],
            [DOWN, ENDED, "CORRECTION web-0: Reboot e1 completed"],
        ),
        (
            [SCHEDULED, ("canceled", {}), SCHEDULED, ("completed", {})],
            [DOWN, CANCELED, DOWN, "BACK web-0: Reboot e1 completed"],
        ),
        *(
            ([("scheduled", {"Resources": one}), ("ended", {"Resources": one})], [f"{DOWN} (perhaps)", ENDED])
            for one in (None, [], [5, "web-1"], 5)
        ),
        (
            [SCHEDULED, ("updated", OTHER), ("updated", {}), ("updated", OTHER)],
            [DOWN, "BACK web-0: Reboot e1 removed", DOWN, "BACK web-0: Reboot e1 removed"],
        ),
        ([("scheduled", OTHER), ("completed", OTHER)], []),
        ([SCHEDULED], [DOWN, LOST]),
        ([("canceled", {})], []),
        ([("completed", {})], ["BACK web-0: Reboot e1 completed"]),
        (
            [SCHEDULED, ("scheduled", {"of": "e2"}), ("canceled", {"of": "e1"}), ("canceled", {"of": "e2"})],
            [DOWN, SECOND_DOWN, f"{CANCELED}, but 1 other event(s) are not over", SECOND_CANCELED],
        ),
    ],
)
def test_the_story_of_a_vm_says_once_when_it_is_down_and_once_when_it_is_back(
    messages: list[tuple[str, dict[str, Any]]], lines: list[str], again: int
) -> None:
    assert told(*messages, again=again) == lines


def test_news_of_a_lost_event_begin_its_story_again() -> None:
    story: dict[str, Any] = {}
    event: dict[str, Any] = {"type": "io.imdsbridge.scheduledevent.started.v1", "source": "s", "id": "1"}
    event |= {"time": "2026-11-20", "correlationid": "e1"}
    event["data"] = {"Resources": ["web-0"], "NotBeforeUtc": None}
    assert STORY["tell"](story, "web-0", event) == "DOWN web-0 at an unknown time: None e1"
    assert STORY["lost"](story, "web-0", "2026-11-21") == ["LOST web-0: None e1 lost"]
    later = {**event, "id": "2", "time": "2026-11-22"}
    assert STORY["tell"](story, "web-0", later) == "DOWN web-0 at an unknown time: None e1"
    completed = {**later, "id": "3", "type": "io.imdsbridge.scheduledevent.completed.v1"}
    assert STORY["tell"](story, "web-0", completed) == "BACK web-0: None e1 completed"


@pytest.mark.parametrize("name", [*NAMES, "story.py"])
def test_the_page_shows_the_snippet_as_it_is(name: str) -> None:
    assert f"\n{(SNIPPETS / name).read_text()}```\n" in PAGE.read_text()
