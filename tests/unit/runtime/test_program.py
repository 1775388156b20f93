"""What a program gets, how its end is described, and which programs `check` refuses."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.runtime.program import Result, environment, find_fault
from bridge.runtime.windows import grants_change

POSIX = pytest.mark.posix("signals, modes and scripts are of POSIX")

DATA = {
    "EventId": "A-1",
    "EventType": "Reboot",
    "EventStatus": "Scheduled",
    "NotBeforeUtc": "2026-11-22T10:00:00.000Z",
    "Resources": ["web-0", "web-1"],
}


def test_a_program_gets_the_event_and_no_secret_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("LANG", "C.UTF-8")
    of_the_pod = ("NODE_NAME", "DRAIN_FORCE", "DRAIN_CORDON_ONLY", "DRAIN_EXCLUDE_FROM_LOAD_BALANCERS")
    for name in of_the_pod:
        monkeypatch.setenv(name, "given")
    monkeypatch.setenv("STATE_DIRECTORY", "/state/programs")
    for name in ("AZURE_CLIENT_SECRET", "IMDS_BRIDGE__SINKS__OPS__URL", "NOTIFY_SOCKET", "LD_PRELOAD"):
        monkeypatch.setenv(name, "secret")
    got = environment(DATA, 600.0)
    assert "secret" not in got.values()
    assert {name: value for name, value in got.items() if name.startswith("IMDS_")} == {
        "IMDS_BRIDGE_EVENT_ID": "A-1",
        "IMDS_BRIDGE_EVENT_TYPE": "Reboot",
        "IMDS_BRIDGE_EVENT_STATUS": "Scheduled",
        "IMDS_BRIDGE_NOT_BEFORE": "2026-11-22T10:00:00.000Z",
        "IMDS_BRIDGE_SECONDS_LEFT": "0",  # NotBefore has passed
        "IMDS_BRIDGE_RESOURCES": "web-0,web-1",
    }
    assert [got[name] for name in ("PATH", "LANG", "STATE_DIRECTORY")] == [
        "/bin",
        "C.UTF-8",
        "/state/programs",
    ]
    assert {got[name] for name in of_the_pod} == {"given"}


def test_values_that_no_environment_can_have_are_left_out_or_shortened() -> None:
    given = {"EventId": "a\0b\x1b[31m\ud800", "EventType": 7, "Resources": ["v" * 50] * 10_000}
    got = environment(given, 30.0)
    assert got["IMDS_BRIDGE_EVENT_ID"] == "ab[31m"
    assert got["IMDS_BRIDGE_EVENT_TYPE"] == got["IMDS_BRIDGE_NOT_BEFORE"] == ""
    assert len(got["IMDS_BRIDGE_RESOURCES"]) == 32_000


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"EventStatus": "Scheduled", "NotBeforeUtc": "2026-11-22T10:00:20.500Z"}, "20"),
        ({"EventStatus": "Scheduled", "NotBeforeUtc": "2026-11-22T11:00:00.000Z"}, "60"),
        ({"EventStatus": "Scheduled", "NotBeforeUtc": None}, "60"),
        ({"EventStatus": "Ended", "NotBeforeUtc": "2026-11-22T10:00:20.500Z"}, "60"),
    ],
)
def test_a_program_is_told_how_long_it_has(
    monkeypatch: pytest.MonkeyPatch, data: dict[str, Any], expected: str
) -> None:
    now = datetime(2026, 11, 22, 10, tzinfo=UTC)
    monkeypatch.setattr("bridge.runtime.program.datetime", SimpleNamespace(now=lambda _: now))
    assert environment(data, 60.0)["IMDS_BRIDGE_SECONDS_LEFT"] == expected


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        (Result(code=0), ""),
        (Result(code=3), "exit code 3"),
        pytest.param(Result(code=-9), "it was ended by SIGKILL", marks=POSIX),
        pytest.param(Result(code=-99), "it was ended by signal 99", marks=POSIX),
        (Result(code=0, ended_by="timeout"), "it did not end in time"),
        (Result(code=-15, ended_by="stop"), "it was ended by imds-bridge"),
        (Result(error="No such file"), "it cannot be started: No such file"),
    ],
)
def test_each_end_but_exit_code_0_is_described(result: Result, fault: str) -> None:
    assert result.fault == fault


@POSIX
def test_a_program_that_cannot_be_started_or_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program"
    assert find_fault([str(program)]) == f"{program}: there is no such file"
    program.touch(0o600)
    assert "may not execute it" in find_fault([str(program)])
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_fault([str(program)]) == ""
    program.chmod(0o757)
    assert find_fault([str(program)]) == f"{program}: any user may change {program}"
    program.chmod(0o755)
    tmp_path.chmod(0o777)
    assert find_fault([str(program)]) == f"{program}: any user may change {tmp_path}"
    link = tmp_path.parent / "link"
    link.symlink_to(program)
    assert find_fault([str(link)]) == f"{link}: any user may change {tmp_path}"
    tmp_path.chmod(0o1777)
    assert find_fault([str(program)]) == ""


NO_LINE = "it has no first line #! with its interpreter"
NO_FILE = "its interpreter %r does not exist or may not be executed"


@POSIX
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"#!/bin/sh -e\n", ""),
        (b"#! /usr/bin/env -S sh -e\n", ""),
        (b"#!/usr/bin/env sh", ""),
        (b"\x7fELF\x02\x01\x01\0", ""),
        (b"#!/bin/absent\n", NO_FILE % "/bin/absent"),
        (b"#!/bin/sh\r\n", NO_FILE % "/bin/sh\r"),
        (b"#!sh\n", NO_FILE % "sh"),
        (b"#!/etc/passwd\n", NO_FILE % "/etc/passwd"),
        (b"#!/usr/bin/env pyhton3\n", "its interpreter 'pyhton3' is not in PATH"),
        (b"echo\n", NO_LINE),
        (b"", NO_LINE),
    ],
)
def test_a_script_without_its_interpreter_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    program = tmp_path / "program"
    program.write_bytes(content)
    program.chmod(0o755)
    assert find_fault([str(program)]) == (fault and f"{program}: {fault}")


@pytest.mark.parametrize(
    ("entries", "changed"),
    [
        ("(A;;FA;;;SY)(A;;0x1200a9;;;WD)(A;OICI;FA;;;BA)", []),
        ("(A;;FA;;;WD)", ["file", "ancestor"]),
        ("(A;ID;0x1301bf;;;AU)", ["file", "ancestor"]),  # what a folder made in C:\ inherits
        ("(A;;LC;;;AU)(A;OICIIO;SDGXGWGR;;;AU)", []),  # C:\ itself
        ("(A;CI;DCLCRPCR;;;BU)(A;OICI;0x1200a9;;;BU)", ["file"]),  # C:\ProgramData
        ("(A;;0x1301bf;;;S-1-5-21-1-2-3-513)", ["file", "ancestor"]),
        ("(A;;FA;;;S-1-5-21-1-2-3-1001)(D;;FA;;;WD)", []),
        ("(A;;WD;;;IU)", ["file", "ancestor"]),
        ("NO_ACCESS_CONTROL", ["file", "ancestor"]),
    ],
)
def test_an_access_list_of_windows_says_whether_any_user_may_change_a_file(
    entries: str, changed: list[str]
) -> None:
    found = {"file": grants_change(f"D:{entries}", is_ancestor=False)}
    found["ancestor"] = grants_change(f"D:PAI{entries}", is_ancestor=True)
    assert [name for name, is_changed in found.items() if is_changed] == changed
