"""What `check` and `status` say of the systemd units; a command in the place of systemctl answers as systemd 252."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bridge.cli import units
from bridge.outbox.state_dir import StateFolder
from tests.support.cli import Cli

pytestmark = pytest.mark.posix("systemd is not there")


@pytest.fixture
def machine(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the machine's commands, where the state folder is that of the units."""
    commands = tmp_path / "bin"
    commands.mkdir()
    cli.write(imds={"endpoint": "http://127.0.0.1:9"})
    monkeypatch.setattr(units, "STATE_DIR", cli.state().parent)
    monkeypatch.setattr(units, "BOOTED", commands)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    return commands


def answer(
    machine: Path, load: str = "loaded", *, enabled: str = "", state: str = "dead", code: int = 0
) -> None:
    shown = f"LoadState={load}\\nSubState={state}\\nUnitFileState={enabled}\\n"
    (machine / "systemctl").write_text(f"#!/bin/sh\nprintf '{shown}'\nexit {code}\n")
    (machine / "systemctl").chmod(0o755)


START = "systemctl enable --now imds-bridge-forward"
LOG = "journalctl -u imds-bridge-forward -n 20"


@pytest.mark.parametrize(
    ("states", "result", "expected"),
    [
        ("enabled running", "ok", ("enabled and runs", "")),
        ("disabled running", "warn", ("not enabled and runs", START)),
        ("disabled dead", "warn", ("not enabled and does not run (dead)", START)),
        ("enabled dead", "FAIL", ("enabled and does not run (dead)", START)),
        (
            "disabled auto-restart",
            "FAIL",
            ("not enabled and does not run (auto-restart)", LOG),
        ),
        ("enabled failed", "FAIL", ("enabled and does not run (failed)", LOG)),
        ("disabled failed", "FAIL", ("not enabled and does not run (failed)", LOG)),
        ("enabled start", "FAIL", ("enabled and does not run (start)", LOG)),
    ],
)
def test_a_unit_is_named_with_what_to_do(
    machine: Path, cli: Cli, states: str, result: str, expected: tuple[str, str]
) -> None:
    enabled, state = states.split()
    answer(machine, enabled=enabled, state=state)
    row = cli.check().row(check="unit")
    text, remedy = f"imds-bridge-forward is {expected[0]}", expected[1]
    assert (row["result"], row["message"], row["remedy"]) == (result, text, remedy)
    line = f"{text}: {remedy}" if remedy else text
    assert cli("status").out.splitlines()[0] == line
    assert "imds-bridge-forward is" not in cli("status", "--check").out


def test_a_unit_that_runs_without_the_state_there_fails(machine: Path, cli: Cli) -> None:
    answer(machine, enabled="enabled", state="running")
    assert "does not hold this state" in cli.check().row(check="state forward", result="FAIL")["message"]
    folder = StateFolder(cli.state())
    folder.acquire()
    assert cli.check().row(check="state forward")["result"] == "ok"
    folder.release()


@pytest.mark.parametrize(
    "change", ["not installed", "systemctl fails", "no systemctl", "no systemd", "state"]
)
def test_where_no_unit_runs_the_process_nothing_is_said(
    machine: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    answer(machine, "not-found" if change == "not installed" else "loaded", code=change == "systemctl fails")
    if change == "no systemctl":
        monkeypatch.setenv("PATH", str(machine.parent))
    if change == "no systemd":
        monkeypatch.setattr(units, "BOOTED", machine / "nothing")
    if change == "state":
        monkeypatch.undo()
    assert "unit" not in {row["check"] for row in cli.check().json}
    assert cli("status").out == ""
