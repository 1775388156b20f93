"""`imds-bridge lab` runs the simulators, and controls running ones."""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from bridge.cli import main
from bridge.config.loader import load
from bridge.lab import commands
from bridge.lab.imds import EVENTS_PATH
from bridge.lab.scenario import scenario_names
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.paths import ROOT

LIMIT_SECONDS = 30
COMMAND = [sys.executable, "-m", "bridge", "lab", "--port-base", "0"]


def parse(*arguments: str) -> argparse.Namespace:
    return main.parse(["lab", *arguments])


def drive(imds: ImdsLab, name: str, *arguments: str) -> int:
    return commands.run(parse(name, "--control", imds.control_url, *arguments))


def get_status(imds: ImdsLab) -> int:
    url = f"{imds.url('web-0')}{EVENTS_PATH}?api-version=2020-07-01"
    return requests.get(url, headers={"Metadata": "true"}, timeout=LIMIT_SECONDS).status_code


# --- controlling a running lab ---


@pytest.mark.parametrize(
    ("arguments", "notice_seconds", "shown"),
    [
        ("--type Freeze", 900, {"Resources": ["web-0", "web-1"], "EventStatus": "Scheduled"}),
        ("--type Reboot --vm web-0 --source User", 900, {"Resources": ["web-0"], "EventSource": "User"}),
        ("--type Redeploy --no-vm", 600, {"Resources": []}),
        ("--type Preempt --vm web-0 --other-vm db-0", 30, {"Resources": ["web-0", "db-0"]}),
        ("--type Terminate --duration 5 --description x", 300, {"DurationInSeconds": 5, "Description": "x"}),
        ("--type Rebot --notice 60", 60, {"EventType": "Rebot"}),
        ("--type Reboot --status Started", None, {"EventStatus": "Started", "NotBefore": ""}),
    ],
)
def test_schedule_adds_the_event_with_the_documented_minimum_notice_and_prints_its_id(
    imds: ImdsLab,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    notice_seconds: int | None,
    shown: dict[str, Any],
) -> None:
    before = time.time()
    assert drive(imds, "schedule", *arguments.split()) == 0
    event, printed = only(imds.events), capsys.readouterr()
    assert printed.out == event["EventId"] + "\n"
    assert ("note: --type Rebot is not one of Freeze" in printed.err) == ("Rebot " in arguments)
    assert event | shown | {"EventType": arguments.split()[1]} == event
    if notice_seconds is not None:
        earliest = parsedate_to_datetime(event["NotBefore"]).timestamp() - notice_seconds
        assert before - 1 <= earliest <= time.time()  # NotBefore has whole seconds


def test_an_event_can_complete_after_its_impact(imds: ImdsLab) -> None:
    assert drive(imds, "schedule", "--type", "Reboot", "--status", "Started", "--impact", "0") == 0
    imds.wait_for(lambda: imds.incarnation == 3)
    assert imds.events == []


def test_events_are_held_released_started_completed_and_canceled(imds: ImdsLab) -> None:
    assert drive(imds, "schedule", "--type", "Reboot", "--hold") == 0
    first, second = imds.events[0]["EventId"], imds.schedule(event_type="Reboot", resources=["web-0"])
    assert [event["released"] for event in imds.state()["events"]] == [False, True]
    assert drive(imds, "release", first) == 0
    assert [event["released"] for event in imds.state()["events"]] == [True, True]
    assert drive(imds, "start", first.lower()) == 0
    assert [event["EventStatus"] for event in imds.events] == ["Started", "Scheduled"]
    assert drive(imds, "complete", first) == 0
    assert drive(imds, "cancel", second) == 0
    assert imds.events == []


def test_faults_are_set_counted_and_cleared(imds: ImdsLab) -> None:
    assert drive(imds, "fault", "gone", "--count", "2", "--retry-after", "5", "--seconds", "0") == 0
    assert [get_status(imds) for _ in range(3)] == [410, 410, 200]
    assert drive(imds, "fault", "503", "--count", "0") == 0
    assert {get_status(imds) for _ in range(5)} == {503}
    assert drive(imds, "fault", "clear") == 0
    assert get_status(imds) == 200


def test_state_and_scenarios_are_shown(imds: ImdsLab, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(imds, "state") == 0
    assert json.loads(capsys.readouterr().out)["vms"] == {vm: imds.url(vm) for vm in imds.vms}
    assert commands.run(parse("scenarios")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == scenario_names()
    assert all(len(line.split()) > 3 for line in lines)


# --- errors ---

RUNNING = "CONTROL"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"start nobody --control {RUNNING}", "nobody"),
        (f"schedule --type X --vm web-9 --control {RUNNING}", "--vm given: web-9; expected: web-0, web-1"),
        (f"schedule --type X --notice -1 --control {RUNNING}", "notice_seconds given: -1"),
        (f"fault wobble --control {RUNNING}", "wobble"),
        (f"fault 503 --count -1 --control {RUNNING}", "count given: -1"),
        ("state --control http://127.0.0.1:1", "http://127.0.0.1:1, where no lab answers"),
        ("state --control http://127.0.0.1:1", "start one with: imds-bridge lab"),
        ("state --control nonsense", "--control given"),
        ("state --control http://127.0.0.1:port", "--control given"),
        ("--scenario nowhere --port-base 0", "live-migration"),
        ("--port-base 70000", "70000"),
        ("--port-base -5", "-5"),
        (f"--port-base {RUNNING}", "--port-base chooses others"),
        ("--port-base 0 --bus-config nowhere.json", "nowhere.json"),
    ],
)
def test_what_cannot_be_done_is_reported_with_exit_code_2(
    imds: ImdsLab, arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = imds.control_url.rpartition(":")[2]
    running = port if "--port-base" in arguments else imds.control_url
    assert commands.run(parse(*arguments.replace(RUNNING, running).split())) == 2
    assert words in capsys.readouterr().err


# --- running one ---


def test_the_lab_prints_addresses_and_a_good_configuration_and_plays_until_sigint(tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    arguments = ["--vm", "extra", "--scenario", "host-failure", "--time-scale", "1000", "--write", str(file)]
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "is completed" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 0
    text, here = "".join(lines), r"http://127\.0\.0\.1:\d+"
    for pattern in (
        rf"^  db-2 +{here}$",
        rf"^  extra +{here}$",
        rf"^control API: +{here}$",
        rf"^webhook inbox: +{here}/hook$",
        rf"^Event Grid: +{here}/api/events or {here}/topics/maintenance:publish$",
        r"^Service Bus: +Endpoint=sb://127\.0\.0\.1:\d+;",
        rf"--control {here}$",
        "The host of db-2 fails",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern
    assert lines[-1].endswith("stopping\n")
    _, _, given = text.partition(f"imds-bridge forward --config {file}")
    shown = [line[2:] for line in given.partition("Create events")[0].splitlines() if line.startswith("  ")]
    assert [line for line in shown if line] == [line for line in file.read_text().splitlines() if line]
    config = load(file, {})
    assert sorted(config.sinks) == ["bus", "grid", "inbox"]
    assert config.approvals is not None


def test_the_lab_stops_at_sigterm() -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if "What happens" in line)
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0
