"""Windows: a whole process without what only POSIX has, and what differs there.

That no line uses what Windows lacks is checked by mypy: `make types-windows`. None of this runs on Windows itself:
infra/windows/README.md says what was tried, and where.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bridge.outbox.state_dir import STATUS, StateFolder
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, environment, toml
from tests.support.windows import BREAK, ROOT

SIMULATED = [sys.executable, str(ROOT / "tests/support/windows.py")]
SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"


# --- a whole process without it ---


class SimulatedForward(Forward):
    """`imds-bridge forward` without what Windows lacks."""

    def __init__(self, folder: Path, imds: ImdsLab, inbox: Inbox) -> None:
        sink = {"kind": "webhook", "url": inbox.url, "from_start": True}
        given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
        super().__init__(folder, {"imds": given, "sinks": {"ops": sink}, "stop_seconds": LIMIT_SECONDS})
        self._command = [*SIMULATED, "forward", "--config", str(self.config)]


def simulated(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run a command without what Windows lacks."""
    return subprocess.run(
        [*SIMULATED, *arguments],
        env=environment(env),
        capture_output=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, BREAK])
def test_a_change_reaches_a_webhook_a_second_process_is_refused_and_ctrl_c_or_ctrl_break_ends_the_first(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path, number: signal.Signals
) -> None:
    with SimulatedForward(tmp_path, imds, inbox) as forward:
        forward.wait_for_status(lambda status: status["running"])
        imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
        inbox.wait_for(lambda: SCHEDULED in {event["type"] for event in inbox.events()}, LIMIT_SECONDS)
        assert forward.process is not None
        second = simulated("forward", "--config", str(forward.config))
        assert second.returncode == 3, second
        assert f"is held by process {forward.process.pid}:".encode() in second.stderr
        forward.wait_for_status(lambda status: status["last_good_at"])
        assert simulated("status", "--config", str(forward.config)).returncode == 0
        forward.signal(number)
        assert forward.wait() == 0, forward
        assert forward.status()["running"] is False
    assert simulated("status", "--config", str(forward.config)).returncode == 3


def test_the_configuration_is_looked_for_where_windows_keeps_it_and_output_is_utf_8(tmp_path: Path) -> None:
    shown = b"".join(simulated("forward", "--help").stdout.split())
    assert rb"C:\ProgramData\imds-bridge\config.toml" in shown
    config = tmp_path / "config.toml"
    sink = {"kind": "webhook", "url": "https://example.org/hook", "format": "slack"}
    config.write_text(toml({"state_dir": tmp_path, "sinks": {"ops": sink}}), encoding="utf-8")
    code_page = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    result = simulated("render", "--indent", "--config", str(config), env=code_page)
    assert result.returncode == 0, result.stderr.decode()
    assert "🟥" in result.stdout.decode("utf-8")


# --- what differs ---


def test_a_status_that_is_in_use_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder(tmp_path)
    folder.write_status({"number": 1})

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "The process cannot access the file because it is being used")

    monkeypatch.setattr(Path, "replace", refuse)
    with (tmp_path / STATUS).open():
        folder.write_status({"number": 2})
    assert folder.read_status() == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


# --- the services ---


@pytest.mark.parametrize("role", ["forward", "listen", "relay"])
def test_each_service_loads_the_configuration_of_its_role(role: str) -> None:
    folder = ROOT / "infra/windows"
    service = (folder / "imds-bridge.xml").read_text().replace("@ROLE@", role)
    (arguments,) = re.findall("<arguments>(.*)</arguments>", service)
    config = rf"C:\ProgramData\imds-bridge\{role}.toml"
    assert arguments.split()[3:] == [role, "--config", config]
    script = (folder / "install.ps1").read_text()
    assert r"$Data = 'C:\ProgramData\imds-bridge'" in script
    assert r'Copy-Item $Config "$Data\$Role.toml"' in script


def test_the_programs_that_the_page_shows_are_installed_beside_the_program() -> None:
    folder = ROOT / "infra/windows"
    shown = set(
        re.findall(r"'C:\\Program Files\\imds-bridge\\(\w+\.ps1)'", (folder / "README.md").read_text())
    )
    assert shown == {path.name for path in folder.glob("*.ps1")} - {"install.ps1"}
    (copied,) = re.findall(r"foreach \(\$Example in (.*)\) \{", (folder / "install.ps1").read_text())
    assert set(re.findall(r"\w+\.ps1", copied)) == shown
