"""Windows: a whole process without what only POSIX has, and what differs there.

That no line uses what Windows lacks is checked by mypy: `make types-windows`. None of this runs on Windows itself:
infra/windows/README.md says what was tried, and where.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bridge.outbox.state_dir import STATUS, StateFolder
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, Forward, environment, toml
from tests.support.status import read_raw, write_raw
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


def test_a_change_reaches_a_webhook_a_second_process_is_refused_and_ctrl_c_or_ctrl_break_ends_the_first(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
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
        forward.signal(signal.SIGINT)
        assert forward.wait() == 0, forward
        assert forward.status()["running"] is False
    assert simulated("status", "--config", str(forward.config)).returncode == 3
    with forward:
        forward.wait_for_status(lambda status: status["running"])
        forward.signal(BREAK)
        assert forward.wait() == 0, forward


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
    write_raw(folder, {"number": 1})

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "The process cannot access the file because it is being used")

    monkeypatch.setattr(Path, "replace", refuse)
    with (tmp_path / STATUS).open():
        write_raw(folder, {"number": 2})
    assert read_raw(folder) == {"number": 2}
    assert [path.name for path in tmp_path.iterdir()] == [STATUS]


# --- the services and their scripts, as far as they can be checked without PowerShell ---

FOLDER = ROOT / "infra/windows"
SCRIPTS = [*FOLDER.glob("*.ps1"), ROOT / "tests/windows/services.ps1"]
README, INSTALL, DRAIN, RECOVER = (
    (FOLDER / name).read_text() for name in ("README.md", "install.ps1", "drain.ps1", "recover.ps1")
)


@pytest.mark.parametrize("role", ["forward", "listen", "relay"])
def test_each_service_loads_the_configuration_of_its_role(role: str) -> None:
    service = (FOLDER / "imds-bridge.xml").read_text().replace("@ROLE@", role)
    arguments = only(re.findall("<arguments>(.*)</arguments>", service))
    config = rf"C:\ProgramData\imds-bridge\{role}.toml"
    assert arguments.split()[3:] == [role, "--config", config]
    assert r"$Data = 'C:\ProgramData\imds-bridge'" in INSTALL
    assert r'Copy-Item -LiteralPath $Config "$Data\$Role.toml"' in INSTALL


def test_the_programs_that_the_page_shows_are_installed_and_one_rule_runs_both() -> None:
    shown = map(tomllib.loads, re.findall("```toml\n(.*?)```", README, re.DOTALL))
    rule = only(rule for one in shown for rule in one.get("approvals", {}).get("auto", []))
    for name, script in (("run", DRAIN), ("recover", RECOVER)):
        assert tomllib.loads(only(re.findall(r"\.EXAMPLE\n(.*)", script))) == {name: rule[name]}
        assert rule[name][1] == "-NoProfile"  # a profile can redefine what a script calls
    programs = {Path(rule[name][-2].replace("\\", "/")).name for name in ("run", "recover")}
    assert programs == {path.name for path in FOLDER.glob("*.ps1")} - {"install.ps1"}
    copied = only(re.findall(r"foreach \(\$Example in (.*)\) \{", INSTALL))
    assert set(re.findall(r"\w+\.ps1", copied)) == programs
    assert "sinks.recover" not in README


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_of_windows_powershell_5_and_takes_paths_as_they_are(script: Path) -> None:
    text = script.read_text(encoding="ascii")  # 5.1 takes what has no byte order mark for the code page
    code = re.sub(r"<#.*?#>|(?m:(?<!\w)#.*$)|'[^'\n]*'|\"[^\"\n]*\"", "", text, flags=re.DOTALL)
    assert re.findall(r"\?\?|\?\.|&&|\|\||\s\? .* : |-Parallel", code) == []
    for line in text.splitlines():  # [ and ] in a path are a pattern without it
        if re.search(r"Copy-Item|Get-Item |Get-Content -Raw|Get-FileHash", line):
            assert "-LiteralPath" in line, line
    assert "powershell.exe', '-NonInteractive" not in text + README


@pytest.mark.parametrize(("script", "act"), [(DRAIN, "Stop-Service"), (RECOVER, "Start-Service")])
def test_a_drain_and_its_recovery_take_the_name_of_a_service_and_may_run_while_it_stops(
    script: str, act: str
) -> None:
    checked, _, rest = script.partition(f"{act} $Service")
    assert "if ($Found.Name -ne $Service) { throw" in checked  # a pattern that matches none is no error
    assert "StopPending" in checked
    limit = "[TimeSpan]::FromSeconds($Seconds)" if script is DRAIN else "'00:00:30'"
    assert f"$Found.WaitForStatus('Stopped', {limit})" in script
    assert ("Stop-Service $Service -NoWait }" in script) is (script is DRAIN)  # else it waits without a limit
    assert re.findall(r"exit (\d+)", rest) == (["1", "0"] if script is DRAIN else ["75", "0"])


def test_a_failed_upgrade_starts_the_service_again_and_a_failed_installation_leaves_none_that_starts() -> (
    None
):
    before, _, after = INSTALL.partition("if ($Known) { Stop-Service $Service }")
    for given in ("$Wheel, $WinSW", "$Config", "(Get-Service $Name).Name -ne $Name"):
        assert given in before  # what can be mistyped is looked at before anything is stopped
    assert "trap { if ($IsInUse) { Start-Service $Service -ErrorAction Continue }; break }" in before
    assert "<startmode>Manual</startmode>" in (FOLDER / "imds-bridge.xml").read_text()
    configured, _, _ = after.partition("start= auto")
    assert configured.index("install") < configured.index("sc.exe config $Service obj= $Account")
    native = {line.strip() for line in after.splitlines() if re.search(r"(?:sc\.exe|icacls|-m pip) ", line)}
    assert [line for line in native if "Invoke-Checked" not in line] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("D:(A;;CC;;;SY)S:(AU;FA;CC;;;WD)", "D:ENTRY(A;;CC;;;SY)S:(AU;FA;CC;;;WD)"),
        ("D:PAI(A;;CC;;;SY)", "D:PAIENTRY(A;;CC;;;SY)"),
        ("O:SYG:SYD:(A;;CC;;;SY)", ""),  # refused
        ("D:NO_ACCESS_CONTROL", ""),
    ],
)
def test_a_managed_service_gets_an_entry_in_its_access_list_or_the_installation_says_why_not(
    given: str, expected: str
) -> None:
    pattern = only(re.findall(r"\$List -replace '(.*?)', \"`\$&\$Entry\"", INSTALL))
    found = re.sub(pattern, lambda one: f"{one[0]}ENTRY", given)
    assert found == (expected or given)
    assert "if ($New -eq $List) { throw" in INSTALL


def test_an_upgrade_keeps_the_account_and_a_powershell_of_32_bits_installs_in_the_same_place() -> None:
    account, _, _ = INSTALL.partition('"NT SERVICE\\$Service" }')
    assert "if (-not $Account) { $Account = (Get-CimInstance Win32_Service" in account
    assert "Join-Path $env:ProgramW6432 'imds-bridge'" in INSTALL
