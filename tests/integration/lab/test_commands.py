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
from bridge.config.models import Config
from bridge.lab import commands
from bridge.lab.imds import EVENTS_PATH
from bridge.lab.scenario import scenario_names
from tests.support.imds_lab import ImdsLab
from tests.support.paths import ROOT

LIMIT_SECONDS = 20
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
    ("arguments", "shown"),
    [
        (
            "--type Freeze",
            {"EventType": "Freeze", "Resources": ["web-0", "web-1"], "EventStatus": "Scheduled"},
        ),
        ("--type Reboot --vm web-0 --source User", {"Resources": ["web-0"], "EventSource": "User"}),
        ("--type Reboot --duration 5 --description soon", {"DurationInSeconds": 5, "Description": "soon"}),
        ("--type Reboot --status Started", {"EventStatus": "Started", "NotBefore": ""}),
        ("--type Reboot --no-vm", {"Resources": []}),
        ("--type Reboot --vm web-0 --other-vm db-0", {"Resources": ["web-0", "db-0"]}),
        ("--type Rebot", {"EventType": "Rebot"}),
    ],
)
def test_schedule_adds_the_event_and_prints_its_id(
    imds: ImdsLab, capsys: pytest.CaptureFixture[str], arguments: str, shown: dict[str, Any]
) -> None:
    assert drive(imds, "schedule", *arguments.split()) == 0
    (event,) = imds.events
    printed = capsys.readouterr()
    assert printed.out == event["EventId"] + "\n"
    assert ("note: --type Rebot is not one of Freeze" in printed.err) == ("Rebot " in f"{arguments} ")
    assert event | shown == event


@pytest.mark.parametrize(
    ("event_type", "seconds"),
    [("Freeze", 900), ("Reboot", 900), ("Redeploy", 600), ("Preempt", 30), ("Terminate", 300)],
)
def test_each_type_has_its_documented_minimum_notice_by_default(
    imds: ImdsLab, event_type: str, seconds: int
) -> None:
    earliest = time.time() + seconds - 1  # NotBefore has whole seconds
    assert drive(imds, "schedule", "--type", event_type) == 0
    not_before = parsedate_to_datetime(imds.events[0]["NotBefore"]).timestamp()
    assert earliest <= not_before <= time.time() + seconds


def test_an_event_can_complete_after_its_impact(imds: ImdsLab) -> None:
    assert drive(imds, "schedule", "--type", "Reboot", "--status", "Started", "--impact", "0") == 0
    imds.wait_for(lambda: imds.incarnation == 3)
    assert imds.events == []


def test_a_held_event_starts_after_its_approval_and_its_release(imds: ImdsLab) -> None:
    assert drive(imds, "schedule", "--type", "Reboot", "--hold") == 0
    event_id = imds.events[0]["EventId"]
    answer = requests.post(
        f"{imds.url('web-0')}{EVENTS_PATH}?api-version=2020-07-01",
        json={"StartRequests": [{"EventId": event_id}]},
        headers={"Metadata": "true"},
        timeout=LIMIT_SECONDS,
    )
    assert answer.status_code == 200
    assert imds.events[0]["EventStatus"] == "Scheduled"
    assert drive(imds, "release", event_id) == 0
    assert imds.events[0]["EventStatus"] == "Started"


def test_events_are_started_completed_and_canceled(imds: ImdsLab) -> None:
    first, second = (imds.schedule(event_type="Reboot", resources=["web-0"]) for _ in range(2))
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


def test_state_prints_json(imds: ImdsLab, capsys: pytest.CaptureFixture[str]) -> None:
    assert drive(imds, "state") == 0
    assert json.loads(capsys.readouterr().out)["vms"] == {vm: imds.url(vm) for vm in imds.vms}


def test_scenarios_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(parse("scenarios")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == scenario_names()
    assert all(len(line.split()) > 3 for line in lines)


# --- errors ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["start", "nobody"], "nobody"),
        (["schedule", "--type", "Reboot", "--vm", "web-9"], "--vm given: web-9; expected: web-0, web-1"),
        (["schedule", "--type", "Reboot", "--notice", "-1"], "notice_seconds given: -1"),
        (["fault", "wobble"], "wobble"),
        (["fault", "503", "--count", "-1"], "count given: -1"),
    ],
)
def test_a_wrong_argument_is_reported_with_exit_code_2(
    imds: ImdsLab, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drive(imds, *arguments) == 2
    assert words in capsys.readouterr().err


def test_without_a_running_lab_the_error_says_how_to_start_one(capsys: pytest.CaptureFixture[str]) -> None:
    with ImdsLab() as gone:
        address = gone.control_url
    assert commands.run(parse("state", "--control", address)) == 2
    error = capsys.readouterr().err
    assert address in error
    assert "start one with: imds-bridge lab" in error


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:port"])
def test_an_invalid_address_is_reported(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(parse("state", "--control", address)) == 2
    assert "--control given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "nowhere", "--port-base", "0"], "live-migration"),
        (["--port-base", "70000"], "70000"),
        (["--port-base", "-5"], "-5"),
        (["--port-base", "0", "--bus-config", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_lab_that_cannot_start_exits_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.run(parse(*arguments)) == 2
    assert words in capsys.readouterr().err


def test_a_taken_port_exits_2(imds: ImdsLab, capsys: pytest.CaptureFixture[str]) -> None:
    taken = imds.control_url.rpartition(":")[2]
    assert commands.run(parse("--port-base", taken)) == 2
    assert taken in capsys.readouterr().err


# --- running one ---


def test_the_configurations_that_the_lab_prints_are_good_ones(tmp_path: Path) -> None:
    with subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = list(iter(process.stdout.readline, "Create events and faults from another terminal:\n"))
        process.terminate()
        process.stdout.read()
    second = next(number for number, line in enumerate(lines) if line.startswith("For one message"))
    vm, relay = (_saved(tmp_path / "lab.toml", part) for part in (lines[:second], lines[second:]))
    assert sorted(vm.sinks) == ["bus", "grid", "inbox"]
    assert vm.approvals is not None
    assert sorted(relay.sinks) == ["chat"]
    assert relay.relay is not None


def _saved(file: Path, lines: list[str]) -> Config:
    file.write_text("".join(line[2:] for line in lines if line.startswith("  ") and "web-0 " not in line))
    return load(file, {})


def test_the_lab_prints_its_addresses_and_the_scenario_until_a_signal() -> None:
    arguments = ["--vm", "extra", "--scenario", "host-failure", "--time-scale", "1000"]
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if "is completed" in line:
                process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECONDS) == 0
    text = "".join(lines)
    assert re.search(r"^  db-2 +http://127\.0\.0\.1:\d+$", text, re.MULTILINE)
    assert re.search(r"^  extra +http://127\.0\.0\.1:\d+$", text, re.MULTILINE)
    assert re.search(r'endpoint = "http://127\.0\.0\.1:\d+"\n', text)
    assert re.search(r'url = "http://127\.0\.0\.1:\d+/hook"\n', text)
    grid = r"http://127\.0\.0\.1:\d+"
    assert re.search(
        rf"^Event Grid: +{grid}/api/events or {grid}/topics/maintenance:publish$", text, re.MULTILINE
    )
    assert re.search(r"OPTIONS /eventgrid .* -> 200\n", text)
    assert re.search(r"^Service Bus: +Endpoint=sb://127\.0\.0\.1:\d+;", text, re.MULTILINE)
    assert "The host of db-2 fails" in text
    assert "--control http://127.0.0.1:" in text
    assert lines[-1].endswith("stopping\n")


def test_the_lab_stops_however_often_it_is_signalled() -> None:
    labs = [subprocess.Popen(COMMAND, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for process in labs:
            assert process.stdout is not None
            next(line for line in process.stdout if "What happens" in line)
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(process.poll() is None for process in labs) and time.monotonic() < deadline:
            for process in labs:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGTERM)
        assert [process.poll() for process in labs] == [0, 0, 0, 0]
    finally:
        for process in labs:
            process.kill()
            process.communicate()
