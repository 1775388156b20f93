"""`status`: what a process wrote, whether or not it still runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from bridge import __version__
from bridge.arguments import json_lines
from bridge.contract.schemas import STATUS, schema
from bridge.outbox.state_dir import StateFolder
from bridge.process.status import read_report, render
from bridge.runtime.text import UNSAFE
from tests.support.cli import Call, Cli
from tests.support.imds_lab import ImdsLab
from tests.support.process import Forward
from tests.support.status import OLDER, bus_status, raw_status, sink_status, write_raw

SCHEMA = Draft202012Validator(json.loads(schema(STATUS)), format_checker=Draft202012Validator.FORMAT_CHECKER)
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
FREEZE = {
    "EventId": "C7061BAC",
    "EventType": "Freeze",
    "EventStatus": "Started",
    "NotBefore": "",
    "Resources": 5,
}


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
            **raw_status(now, self.folder.path.name),
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
        write_raw(self.folder, {name: value for name, value in status.items() if name != without})


@pytest.fixture
def process(cli: Cli) -> Iterator[Process]:
    made = Process(cli.state())
    yield made
    made.release()


@pytest.fixture
def listener(cli: Cli) -> Iterator[Process]:
    made = Process(cli.state("listen"))
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


LOOKED_AT = "twelve minutes ago"  # when the test runs, which is long after this file is read
WAITS = {"EventId": "E-1", "Why": "waits for its turn behind web-3 (Reboot, in 4 min)", "NeedsPerson": False}
HAS_FAILED = {"EventId": "E-2", "Why": "run /drain has failed: exit code 1", "NeedsPerson": True}
OUT = {"Since": "2026-11-20T12:15:00.000Z", "Why": "/recover runs", "IsHeld": True, "NeedsPerson": False}


@pytest.mark.parametrize(
    ("written", "code", "expected"),
    [
        (
            {"commands": bus_status(rests=True, looked_at=LOOKED_AT)},
            0,
            r"sb://bus/q, rests while nothing can be approved, last look 1\d min( \d+ s)? ago, 0 command",
        ),
        ({"commands": bus_status(looked_at=LOOKED_AT)}, 0, r"sb://bus/q, receives, 0 command\(s\) waiting"),
        ({"commands": bus_status(last_error="closed")}, 3, r"NOT RECEIVING: closed, 0 command\(s\) waiting"),
        ({"auto": [WAITS]}, 0, r"E-1    waits for its turn behind web-3 \(Reboot, in 4 min\)"),
        ({"out_of_work": [OUT]}, 0, r"\nOUT OF WORK since 2026-11-20T12:15:00.000Z: /recover runs\n"),
        ({"version_error": "2020-07-01 is asked for"}, 0, r"\n      2020-07-01 is asked for\n"),
    ],
    ids=["rests", "receives", "receives nothing", "event waits", "out of work", "api_version"],
)
def test_what_a_listener_has_written_is_shown(
    listener: Process, cli: Cli, written: dict[str, Any], code: int, expected: str
) -> None:
    looked_at = (datetime.now(UTC) - timedelta(minutes=12)).isoformat()
    written = json.loads(json.dumps(written).replace(LOOKED_AT, looked_at))
    listener.write(**{"commands": None, "sinks": {}, **written})
    done = cli("status", "--role", "listen")
    assert done.code == code
    assert re.search(expected, done.out)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({"commands": bus_status(last_error="closed")}, "nothing is received from sb://bus/q: closed"),
        ({"auto": [WAITS, HAS_FAILED]}, "event E-2: run /drain has failed: exit code 1"),
        (
            {"out_of_work": [{**OUT, "Why": "recover /recover has failed", "NeedsPerson": True}]},
            "out of work since 2026-11-20T12:15:00.000Z: recover /recover has failed",
        ),
    ],
    ids=["receives nothing", "program has failed", "out of work"],
)
def test_what_a_listener_needs_a_person_for_is_the_only_line_of_check(
    listener: Process, cli: Cli, written: dict[str, Any], expected: str
) -> None:
    listener.write(**{"commands": None, "sinks": {}, **written})
    done = cli("status", "--role", "listen", "--check")
    assert (done.code, len(done.out.splitlines())) == (3, 1)
    assert expected in done.out


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (True, "this VM stays out of work, nothing was changed: /recover runs"),
        (False, "`imds-bridge listen` does not run"),  # whatever held it back when that ended
    ],
)
def test_recover_says_what_keeps_the_listener_from_it(
    listener: Process, cli: Cli, runs: bool, expected: str
) -> None:
    cli.sinks(ops={"kind": "webhook", "url_file": "missing"})  # whatever is wrong with sinks and secrets
    listener.write(out_of_work=[OUT])
    if not runs:
        listener.release()
    done = cli("recover")
    assert (done.code, expected in done.err) == (2, True), done.err


@pytest.mark.parametrize("given", [[], ["--done"]])
def test_recover_asks_for_nothing_that_a_listener_without_its_file_cannot_read(
    listener: Process, cli: Cli, given: list[str]
) -> None:
    listener.write(out_of_work=[{**OUT, "IsHeld": False}], storage_error="no space")
    done = cli("recover", *given)
    assert (done.code, "nothing was changed: no space" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("changes", "runs", "expected"),
    [
        ({"running": False}, False, r"^NOT RUNNING: stopped \d+ s ago"),
        (
            {"storage_error": "no space"},
            False,
            "STORE UNAVAILABLE, new events may be in memory only: no space",
        ),
        ({"kept_log": "x-wal has 73 MiB"}, False, "STATE STORE GROWS: x-wal has 73 MiB"),
        ({}, False, r"^NOT RESPONDING: the process is gone without a stop, last updated \d+ s ago"),
        (
            {"silent_seconds": 13},
            True,
            rf"^NOT RESPONDING: process {os.getpid()} .*last wrote (1[3-9]|[2-9]\d) s ago",
        ),
    ],
    ids=["stopped", "store unavailable", "log grows", "killed", "hangs"],
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


@pytest.mark.parametrize("role", ["forward", "listen", "relay", "console"])
def test_what_an_older_process_has_written_is_read_and_what_it_lacks_is_not_known(
    cli: Cli, role: str
) -> None:
    raw = json.loads((OLDER / f"{role}.json").read_bytes())
    folder = StateFolder(cli.state(role))
    folder.acquire()
    write_raw(folder, {**raw, "written_at": datetime.now(UTC).isoformat()})
    shown, report = cli("status", "--role", role), cli("status", "--role", role, "--json").json
    folder.release()
    assert [*SCHEMA.iter_errors(report)] == []
    assert report.keys() <= json.loads(schema(STATUS))["properties"].keys()
    first = rf"imds-bridge {re.escape(raw['version'])}, process {raw['pid']}, updated \d+ s ago\n"
    assert re.match(first, shown.out)
    changed = {"written_at", "running"}
    assert {name: report[name] for name in raw.keys() - changed} == {
        name: raw[name] for name in raw.keys() - changed
    }
    lacking = ", ".join(report["not_known"])
    assert (
        f"\nNOT KNOWN, as a process of another version wrote the status: {lacking}\n" in shown.out
    ) == bool(lacking)


def paths_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where each field of a status is, but for those of IMDS's document."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, name)
        yield from paths_of(inner if name != "document" else None, (*path, name))


@pytest.mark.parametrize("damage", [None, [5], float("inf")])
@pytest.mark.parametrize("role", ["forward", "listen", "relay", "console"])
def test_each_field_that_is_missing_or_of_another_type_is_not_known_and_nothing_else(
    cli: Cli, role: str, damage: Any
) -> None:
    folder = StateFolder(cli.state(role))
    folder.path.mkdir(parents=True)
    now = datetime.now(UTC)
    whole = raw_status(now, role)
    for path in paths_of(whole):
        if path in {("role",), ("sinks", "ops")}:  # the folder has its name; a sink that is not there
            continue
        raw = json.loads(json.dumps(whole))
        part = raw
        for name in path[:-1]:
            part = part[name]
        part.pop(path[-1])
        if damage and path[-1] not in ("missing", "auto", "out_of_work"):
            part[path[-1]] = damage
        write_raw(folder, raw)
        report = read_report(folder, now)
        assert report.not_known == [".".join(path)]
        assert [*SCHEMA.iter_errors(json.loads("\n".join(json_lines(report))))] == []
        lines = render(report)
        assert f"NOT KNOWN, as a process of another version wrote the status: {'.'.join(path)}" in lines
        assert lines[0].startswith("NOT R")
        assert not [reason for reason in report.urgent if "not known" in reason]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x00", '{"document": {"Events": 5}}'])
@pytest.mark.parametrize("form", [(), ("--json",), ("--check",)])
def test_a_damaged_file_exits_2_with_the_reason_in_any_form(
    process: Process, cli: Cli, form: tuple[str, ...], text: str
) -> None:
    (process.folder.path / "status.json").write_text(text)
    done = cli("status", *form)
    assert (done.code, "it cannot be read: " in done.err) == (2, True)


def test_an_error_of_the_renderer_is_not_told_as_damage(
    process: Process, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.write()
    monkeypatch.setattr("bridge.process.status.table", lambda *_: 1 / 0)
    done = cli("status")
    assert (done.code, "damaged" in done.err) == (1, False)


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

    monkeypatch.setattr("bridge.cli.status.time", SimpleNamespace(sleep=wait))  # threads of others sleep on
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
        assert [*SCHEMA.iter_errors(done.json)] == []
        assert done.json["not_known"] == []
        assert (len(done.json["events"]), done.json["sinks"]["stdout"]["state"]) == (1, "ok")
        assert forward.stop() == 0, forward
    assert call("status", "--config", forward.config).code == 3


def test_the_state_is_read_whatever_is_wrong_with_sinks_and_secrets(cli: Cli) -> None:
    cli.sinks(a={"kind": "webhook", "url_file": cli.config.parent / "none"}, b={"kind": "unknown"})
    done = cli("status")
    assert (done.code, f"no status in {cli.state()}" in done.err) == (2, True)
    assert cli("check").code == 2
