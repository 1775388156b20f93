"""`status`: what a process wrote, whether or not it still runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from bridge import __version__
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.text import UNSAFE
from tests.support.cli import Call, Cli
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward
from tests.support.status import process_status, sink_status

OPS = sink_status(
    state="retrying",
    backlog=3,
    oldest_waits_seconds=65.0,
    last_success_at=None,
    next_retry_at="2026-01-01T00:00:07.000Z",
    last_error="503",
    last_error_at="2026-01-01T00:00:00.000Z",
    dead_letters=2,
)
REBOOT = {
    "EventId": "4CAEA225",
    "EventType": "Reboot",
    "EventStatus": "Scheduled",
    "EventSource": "User",
    "Resources": ["web-0", "web-1"],
}
FREEZE = {"EventId": "C7061BAC", "EventType": "Freeze", "EventStatus": "Started", "NotBefore": ""}


class Process:
    """The state folder of a process that runs until `release`, and writes a status when it is told to."""

    def __init__(self, path: Path) -> None:
        self.folder = StateFolder(path)
        self.folder.acquire()
        self.release = self.folder.release

    def write(self, *, silent_seconds: float = 0, without: str = "", **changes: Any) -> None:
        """Write a status with an event that starts in a quarter of an hour."""
        now = datetime.now(UTC)
        soon = format_datetime(now + timedelta(minutes=15, seconds=30), usegmt=True)
        status = {
            **process_status(now),
            "version": __version__,
            "pid": os.getpid(),
            "running": True,
            "written_at": (now - timedelta(seconds=silent_seconds)).isoformat(),
            "vm": "web-0",
            "imds": "http://169.254.169.254",
            "document": {"DocumentIncarnation": 7, "Events": [{**REBOOT, "NotBefore": soon}, FREEZE]},
            "sinks": {"ops": OPS},
            **changes,
        }
        self.folder.write_status({name: value for name, value in status.items() if name != without})


@pytest.fixture
def process(cli: Cli) -> Iterator[Process]:
    made = Process(cli.state())
    yield made
    made.release()


def test_the_document_countdowns_and_sinks_are_shown(process: Process, cli: Cli) -> None:
    process.write()
    done = cli("status")
    assert done.code == 3
    for expected in (
        r"\n\nNEEDS A PERSON:\nsink ops has 2 dead letter\(s\); see `imds-bridge outbox list --sink ops --dead`\n$",
        rf"imds-bridge {re.escape(__version__)}, process {os.getpid()}, updated \d+ s ago",
        r"Document 7:",
        r"Reboot +Scheduled +in 15 min \d+ s +User +4CAEA225 +web-0, web-1",
        r"Freeze +Started +- +- +C7061BAC +-",
        r"ops +retrying +3 \(oldest 1 min 5 s\) +never +2 +2026-01-01T00:00:07.000Z +2026-01-01T00:00:00.000Z 503",
    ):
        assert re.search(expected, done.out)
    done = cli("status", "--json")
    assert (done.code, done.json["running"], len(done.json["urgent"])) == (3, True, 1)
    assert 900 < done.json["events"][0]["StartsInSeconds"] <= 930
    assert done.json["events"][1]["StartsInSeconds"] is None
    assert done.json["sinks"]["ops"]["backlog"] == 3


RECEIVING = {
    "from": "bus/approvals",
    "unsettled": 0,
    "rests": False,
    "looked_at": None,
    "last_error": "the SDK has closed its receiver",
}


def test_a_listener_says_whether_it_rests_and_when_it_last_looked(process: Process, cli: Cli) -> None:
    looked_at = (datetime.now(UTC) - timedelta(minutes=12)).isoformat()
    rests = {**RECEIVING, "rests": True, "looked_at": looked_at, "last_error": None}
    listens: dict[str, Any] = {"waiting_commands": 0, "dry_run": False, "sinks": {}}
    process.write(**listens, commands=rests)
    expected = (
        r"BUS   bus/approvals, rests while nothing can be approved, last look 12 min( \d+ s)? ago, 0 command"
    )
    assert re.search(expected, cli("status").out)
    process.write(**listens, commands={**rests, "rests": False})
    assert "bus/approvals, receives, 0 command(s) waiting" in cli("status").out


def test_what_the_auto_rules_make_of_an_event_is_shown_and_a_failed_program_needs_a_person(
    process: Process, cli: Cli
) -> None:
    waits = {
        "EventId": "E-1",
        "Why": "waits for its turn behind web-3 (Reboot, in 4 min)",
        "NeedsPerson": False,
    }
    failed = {"EventId": "E-2", "Why": "/drain has failed: exit code 1", "NeedsPerson": True}
    listens: dict[str, Any] = {"commands": None, "waiting_commands": 0, "dry_run": False, "sinks": {}}
    process.write(**listens, auto=[waits])
    assert cli("status").code == 0
    assert "E-1    waits for its turn behind web-3 (Reboot, in 4 min)" in cli("status").out
    process.write(**listens, auto=[waits, failed])
    done = cli("status", "--check")
    assert (done.code, done.out) == (3, "event E-2: /drain has failed: exit code 1\n")


def test_a_vm_that_is_out_of_work_is_shown_and_needs_a_person_once_that_was_told(
    process: Process, cli: Cli
) -> None:
    out = {"Since": "2026-11-20T12:15:00.000Z", "Why": "/recover runs", "IsHeld": True, "NeedsPerson": False}
    listens: dict[str, Any] = {"commands": None, "waiting_commands": 0, "dry_run": False, "sinks": {}}
    process.write(**listens, out_of_work=[out])
    assert "\nOUT OF WORK since 2026-11-20T12:15:00.000Z: /recover runs\n" in cli("status").out
    assert cli("status", "--check").code == 0
    process.write(**listens, out_of_work=[{**out, "Why": "/recover has failed", "NeedsPerson": True}])
    done = cli("status", "--check")
    assert (done.code, "out of work since 2026-11-20T12:15:00.000Z: /recover has failed" in done.out) == (
        3,
        True,
    )


@pytest.mark.parametrize(
    ("changes", "runs", "expected"),
    [
        ({"running": False}, False, r"^NOT RUNNING: stopped \d+ s ago"),
        ({"storage_error": "no space"}, False, "STORE UNAVAILABLE, events are buffered in memory: no space"),
        ({"kept_log": "x-wal has 73 MiB"}, False, "STATE STORE GROWS: x-wal has 73 MiB"),
        ({}, False, r"^NOT RESPONDING: the process is gone without a stop, last updated \d+ s ago"),
        (
            {"silent_seconds": 13},
            True,
            rf"^NOT RESPONDING: process {os.getpid()} .*has not written for 13 s",
        ),
        (
            {"commands": RECEIVING, "waiting_commands": 0, "dry_run": False},
            True,
            r"NOT RECEIVING: the SDK has closed its receiver, 0 command\(s\) waiting",
        ),
    ],
    ids=["stopped", "store unavailable", "log grows", "killed", "hangs", "receives nothing"],
)
def test_a_process_that_does_not_do_its_work_is_reported_with_exit_code_3(
    process: Process, cli: Cli, changes: dict[str, Any], runs: bool, expected: str
) -> None:
    process.write(**changes)
    if not runs:
        process.release()
    done = cli("status")
    assert done.code == 3
    assert re.search(expected, done.out)


@pytest.mark.parametrize(
    ("form", "damage"),
    [
        ((), {"without": "role"}),
        ((), {"sinks": {"ops": {}}}),
        (("--json",), {"document": 5}),
        (("--json",), {"sinks": []}),
        (("--check",), {"document": {"Events": 5}}),
    ],
)
def test_a_status_that_no_process_writes_exits_2_in_any_form(
    process: Process, cli: Cli, form: tuple[str, ...], damage: dict[str, Any]
) -> None:
    process.write(**damage)
    done = cli("status", *form)
    assert (done.code, "it is damaged" in done.err) == (2, True)


def test_the_status_of_a_relay_has_its_counts_and_no_imds(cli: Cli) -> None:
    process = Process(cli.state("relay"))
    counts = {"relayed": 3, "malformed": 1, "uncompleted": 2, "last_event_at": "2026-01-01T00:00:07.000Z"}
    relay = {"from": "bus/events", "last_error": None, **counts}
    process.write(role="relay", without="imds", document=None, relay=relay, sinks={})
    done = cli("status")  # no other role is there
    process.release()
    assert (done.code, "IMDS" in done.out) == (0, False)
    assert (
        "bus/events, 3 event(s) relayed, the last 2026-01-01T00:00:07.000Z; 1 message(s) dead-l" in done.out
    )
    assert "2 event(s) stay on the bus" in done.out
    cli.state("listen").mkdir()
    assert "`imds-bridge forward` has never run" in cli("status").err


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x00"])
def test_a_damaged_file_exits_2_with_the_reason(process: Process, cli: Cli, text: str) -> None:
    (process.folder.path / "status.json").write_text(text)
    done = cli("status")
    assert (done.code, "it cannot be read: " in done.err) == (2, True)


def test_without_a_status_it_exits_2_with_the_reason(process: Process, cli: Cli) -> None:
    done = cli("status")
    assert done.code == 2
    assert re.search(rf"process {os.getpid()}.* runs, but cannot write there", done.err)
    process.release()
    done = cli("status")
    assert done.code == 2
    assert "`imds-bridge forward` has never run with this state_dir" in done.err


def test_without_permission_it_exits_2_with_the_reason(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(13, "Permission denied")  # root may read everything
    monkeypatch.setattr(StateFolder, "load_status", lambda _: (_ for _ in ()).throw(denied))
    done = cli("status")
    assert (done.code, "this user may not read it; use sudo" in done.err) == (2, True)


def test_an_api_version_that_imds_does_not_know_is_shown(process: Process, cli: Cli) -> None:
    process.write(version_error="2020-07-01 is asked for")
    assert "\n      2020-07-01 is asked for\n" in cli("status").out


def test_text_from_outside_is_shown_with_escapes(process: Process, cli: Cli) -> None:
    forged = "\x1b[2J\nimds-bridge: all is well\u202e"
    document = {"DocumentIncarnation": forged, "Events": [{"EventId": forged, "EventType": forged}]}
    process.write(vm=forged, last_error=forged, document=document)
    texts = cli("status").out, cli("status", "--json").out
    for text in texts:
        assert not UNSAFE.search(text.replace("\n", ""))
        assert "\nimds-bridge: all is well" not in text
    assert r"VM    \u001b[2J\nimds-bridge: all is well\u202e" in texts[0]
    assert json.loads(texts[1])["vm"] == forged


def test_with_check_only_what_needs_a_person_is_printed(process: Process, cli: Cli) -> None:
    process.write(sinks={"ops": {**OPS, "dead_letters": 0}})
    done = cli("status", "--check")
    assert (done.code, done.out) == (0, "nothing needs a person\n")
    process.write(sinks={"ops": {**OPS, "dead_letters": 0, "oldest_waits_seconds": 301.0}})
    done = cli("status", "--check")
    assert done.code == 3
    assert done.out == "sink ops has 3 event(s) waiting, the oldest for 301 s: 503\n"
    process.release()
    done = cli("status", "--check")
    assert (done.code, done.out[:14]) == (3, "NOT RESPONDING")


def test_with_watch_it_is_shown_again_until_it_is_interrupted(
    process: Process, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([None, KeyboardInterrupt()])

    def wait(_: float) -> None:
        if interrupt := next(waits):
            raise interrupt

    monkeypatch.setattr("bridge.cli.status.time.sleep", wait)
    process.write()
    done = cli("status", "--watch")
    assert (done.code, done.out.count("Document 7:")) == (0, 2)
    assert "\x1b" not in done.out


def test_the_status_of_the_real_process_is_live(imds: ImdsLab, call: Call, tmp_path: Path) -> None:
    imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=900)
    with Forward(tmp_path, {"imds": {"endpoint": imds.url("web-0")}}) as forward:
        pid = forward.wait_for_status(lambda written: written["document"] and written["pid"])
        done = call("status", "--json", "--config", forward.config)
        assert (done.code, done.json["pid"], done.json["vm"]) == (0, pid, "web-0")
        assert (len(done.json["events"]), done.json["sinks"]["stdout"]["state"]) == (1, "ok")
        assert forward.stop() == 0, forward
    assert call("status", "--config", forward.config).code == 3


def test_the_state_is_read_whatever_is_wrong_with_sinks_and_secrets(cli: Cli) -> None:
    cli.sinks(a={"kind": "webhook", "url_file": cli.config.parent / "none"}, b={"kind": "unknown"})
    done = cli("status")
    assert (done.code, f"no status in {cli.state()}" in done.err) == (2, True)
    assert cli("check").code == 2
