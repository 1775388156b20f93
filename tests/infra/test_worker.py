"""The worker as a process, with the real `forward` and `listen` on the lab's bus and IMDS."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infra.consumers.worker.worker import Worker
from tests.support.bus import SECRET
from tests.support.consumers import APPROVALS, CONSUMERS, OWN, OWN_FILTER, TOPIC, Script, bridge, run_script
from tests.support.process import wait_until

PLACE = ["--topic", TOPIC, "--subscription", OWN, "--vm", "web-0"]
COMMAND = """#!/bin/sh
cd "$(dirname "$0")" && env >> env && echo "$1 $EVENT_TYPE $EVENT_STATUS $RESOURCES" >> runs
"""


def finish(worker: Worker, phase: str, story: str | None = None) -> None:
    """Let the command of a phase, of the event's story as it is now or of another one, end with success."""
    event = worker.events["e1"]
    ended: Any = SimpleNamespace(poll=lambda: 0)
    worker.jobs["e1"] = (ended, phase, 0.0, event.get("came_back", "") if story is None else story)
    worker.check("e1", event)


def noted(tmp_path: Path, *messages: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what the worker of web-0 makes of messages about one event."""
    options = Namespace(vm="Web-0", types=["reboot"], state=tmp_path / "state.json", secret="")
    worker = Worker(options)
    for minute, (kind, more) in enumerate(messages):
        data: dict[str, Any] = {"EventId": "E1", "EventType": "Reboot", "EventStatus": "Scheduled"}
        data |= {"Resources": ["web-0"], "NotBeforeUtc": None, "Vm": {"Name": "web-7"}, **more}
        data = {name: value for name, value in data.items() if value != "(missing)"}
        at = f"2026-11-20T12:{minute:02}:00.000Z"
        event = {"type": f"io.imdsbridge.scheduledevent.{kind}.v1", "time": at, "id": str(minute)}
        message = SimpleNamespace(body=[json.dumps({**event, "data": data}).encode()], message_id="m")
        assert worker.read(message) == "e1"
        if worker.events.get("e1", {}).get("phase") == "ended":  # the command has run
            finish(worker, "ended")
    return worker.events.get("e1", {})


@pytest.mark.parametrize(
    ("more", "phase"),
    [
        *(({"Resources": one}, "announced") for one in (["WEB-0"], ["_web-0"], "web-0", [5, "web-0"])),
        *(({"Resources": one}, "announced") for one in (None, "(missing)", [], "", [5], ["web-1", None], 5)),
        *(({"Resources": one}, None) for one in (["web-1"], "web-1", ["web-00"])),
        *(({"EventType": one}, "announced") for one in (None, "(missing)", "", ["Freeze"], "REBOOT")),
        ({"EventType": "Freeze"}, None),
        ({"EventStatus": "(missing)"}, "announced"),
    ],
    ids=str,
)
def test_an_event_is_dropped_only_if_it_surely_concerns_another_vm_or_type(
    tmp_path: Path, more: dict[str, Any], phase: str | None
) -> None:
    assert noted(tmp_path, ("scheduled", more)).get("phase") == phase


def test_a_vm_that_an_event_no_longer_names_recovers_and_is_prepared_when_it_is_named_again(
    tmp_path: Path,
) -> None:
    first: tuple[str, Any] = ("scheduled", {})
    removed = ("updated", {"Resources": ["web-1"]})
    assert noted(tmp_path, first, removed)["phase"] == "over"
    assert noted(tmp_path, first, removed, ("updated", {}))["phase"] == "announced"
    assert noted(tmp_path, first, removed, ("completed", {"Resources": ["web-1"]}))["phase"] == "over"
    assert noted(tmp_path, first, ("canceled", {}), ("updated", {}))["phase"] == "announced"


def test_what_a_command_of_the_story_before_has_done_counts_for_nothing(tmp_path: Path) -> None:
    again: list[tuple[str, dict[str, Any]]] = [("scheduled", {}), ("canceled", {}), ("scheduled", {})]
    worker = Worker(Namespace(vm="web-0", types=["reboot"], state=tmp_path / "state.json", secret=""))
    worker.events["e1"] = noted(tmp_path, *again)
    finish(worker, "ended", "")
    assert worker.events["e1"]["phase"] == "announced"
    finish(worker, "announced", "")
    assert worker.events["e1"]["phase"] == "announced"
    finish(worker, "announced")
    assert (worker.events["e1"]["phase"], worker.events["e1"]["drained"]) == ("prepared", True)


@pytest.mark.parametrize("at", ["2026-11-20T12:00:00.000Z", None])
def test_an_event_that_was_over_in_an_earlier_versions_state_stays_so_for_what_is_older(
    tmp_path: Path, at: str | None
) -> None:
    state = tmp_path / "state.json"
    state.write_text(
        json.dumps({"e1": {"phase": "over"} | ({"time": at, "was_removed": True} if at else {})})
    )
    assert noted(tmp_path, ("scheduled", {}))["phase"] == ("announced" if at else "over")


def test_a_recovery_that_an_earlier_versions_state_left_open_ends_once(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"e1": {"phase": "ended", "time": "2026-11-20T12:00:00.000Z"}}))
    worker = Worker(Namespace(vm="web-0", types=["reboot"], state=state, secret=""))
    finish(worker, "ended")
    assert (worker.events["e1"]["phase"], worker.jobs) == ("over", {})


@pytest.mark.parametrize("resources", [None, [5, "web-0"], []])
def test_what_does_not_name_every_vm_is_not_approved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, resources: Any
) -> None:
    event = noted(tmp_path, ("scheduled", {"Resources": resources, "ApprovalSession": "s"}))
    options = Namespace(vm="web-0", group=True, approvals="q", state=tmp_path / "state.json")
    assert Worker(options).approve("e1", event)
    assert "it does not say which VMs it would release" in caplog.text


def test_the_page_has_the_filter_of_this_trial() -> None:
    assert OWN_FILTER in (CONSUMERS / "worker" / "README.md").read_text(encoding="utf-8")


def test_it_prepares_approves_with_a_signature_and_recovers(tmp_path: Path) -> None:
    program, runs = tmp_path / "program", tmp_path / "runs"
    program.write_text(COMMAND)
    program.chmod(0o755)
    arguments = [*PLACE, "--approvals", APPROVALS, "--state", str(tmp_path / "worker.json")]
    arguments += ["--prepare", f"{program} prepare", "--recover", f"{program} recover"]
    with bridge(tmp_path, signing_secret=SECRET) as (imds, bus):
        secrets = {"SERVICEBUS_CONNECTION_STRING": bus.connection_string, "SIGNING_SECRET": SECRET}
        with Script(tmp_path / "worker", "worker/worker.py", arguments, env=secrets) as worker:
            event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
            worker.wait_for_text("approval accepted: approved")
            assert [one.event_id for one in imds.approvals] == [event]
            imds.complete(event)
            wait_until(lambda: "recover" in runs.read_text(), describe=worker.__repr__)
            assert worker.stop() == 0, worker
    assert runs.read_text() == "prepare Reboot Scheduled web-0\nrecover Reboot Completed web-0\n"
    assert SECRET not in (tmp_path / "env").read_text()


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        ([], {}, "give either --namespace or"),
        (["--prepare", "/no/such/command"], {"SERVICEBUS_CONNECTION_STRING": "x"}, "'/no/such/command'"),
    ],
)
def test_an_invalid_option_is_reported_with_exit_code_2(
    arguments: list[str], env: dict[str, str], expected: str
) -> None:
    done = run_script(
        "worker/worker.py", *PLACE, "--prepare", "true", "--recover", "true", *arguments, env=env
    )
    assert done.returncode == 2
    assert expected in done.stderr
