"""Programs on Windows: their jobs, and drains by `imds-bridge listen`; Wine runs these tests, too."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import Misconfigured, Unavailable
from bridge.runtime.program import Result, Run, find_fault
from bridge.sinks.exec import ExecSettings, ExecSink
from tests.support.imds_lab import ImdsLab
from tests.support.process import LIMIT_SECONDS, Forward, stored_event, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "win32", reason="only Windows has jobs and their handles")

BIG = b"x" * 3_000_000  # more than a pipe holds
CRASH = "import os; os._exit(0xC0000005 - 2**32)"
WRITE_PID = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
HANG = f"{WRITE_PID} time.sleep(3600)"
# A child, and one that has left the console and the process group.
FAMILY = f"""
import subprocess, sys, time
for name, flags in (("child", 0), ("detached", subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP)):
    subprocess.Popen([sys.executable, "-c", {HANG!r}, sys.argv[1] + name], creationflags=flags)
"""
# Stops a command in order when a file appears, as Ctrl-Break does, which Wine cannot send from outside.
STOPPABLE = """
import pathlib, signal, sys, threading, time
def stop():
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
    signal.raise_signal(signal.SIGBREAK)
threading.Thread(target=stop, daemon=True).start()
from bridge.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def python(code: str, *arguments: str | Path) -> list[str]:
    """Return the command of a program in Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def outcome(code: str, *arguments: str | Path, body: bytes = b"{}", seconds: float = LIMIT_SECONDS) -> Result:
    """Run a program to its end."""
    data = {"EventId": 'a "b" ü€%PATH%', "Resources": ["web-0"]}
    return Run(python(code, *arguments), body, data, timeout_seconds=seconds).finish()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.runtime.program.KILL_AFTER_SECONDS", 0.3)


def is_alive(file: Path) -> bool:
    """Return whether the process runs that has written its id."""
    if sys.platform == "win32":
        import _winapi  # noqa: PLC0415 - Windows alone has it

        try:
            handle = _winapi.OpenProcess(0x1000, False, int(file.read_text()))
        except OSError:
            return False
        try:
            return _winapi.GetExitCodeProcess(handle) == _winapi.STILL_ACTIVE
        finally:
            _winapi.CloseHandle(handle)
    raise AssertionError


def grant_everyone(file: Path) -> None:
    """Let every user change a file."""
    if sys.platform == "win32":
        descriptor = ctypes.c_void_p()
        security = ctypes.WinDLL("advapi32")
        security.ConvertStringSecurityDescriptorToSecurityDescriptorW(
            "D:(A;;FA;;;WD)", 1, ctypes.byref(descriptor), None
        )
        assert security.SetFileSecurityW(str(file), 4, descriptor)


def wait_for_all(files: list[Path]) -> None:
    """Wait until each process has written its id, and runs."""
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    assert all(map(is_alive, files))


# --- a program ---


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; print(sys.stdin.read())", Result(code=0, output="{}")),
        ("import sys; print(1, flush=True); sys.exit('err')", Result(code=1, output="1 err")),
        ("import sys; sys.exit(75)", Result(code=75)),
        (CRASH, Result(code=0xC0000005 - 2**32)),
        ("import os; print(os.path.normcase(os.getcwd()))", Result(code=0, output=r"c:\windows")),
    ],
)
def test_a_program_has_its_exit_code_and_output(code: str, expected: Result) -> None:
    assert outcome(code) == expected


def test_a_crash_is_described_and_retried() -> None:
    settings = ExecSettings(kind="exec", run=tuple(python(CRASH)))
    with pytest.raises(Unavailable, match="exit code 0xC0000005"):
        ExecSink(settings).send([stored_event(1)])


@pytest.mark.parametrize("code", ["", "import os; os.close(0)", "import sys; sys.stdin.buffer.read(1)"])
def test_a_program_need_not_read_its_input(code: str) -> None:
    assert outcome(code, body=BIG).fault == ""


def test_input_output_arguments_and_variables_of_any_kind_arrive(tmp_path: Path) -> None:
    code = """
import os, pathlib, sys
body = sys.stdin.buffer.read()
sys.stdout.buffer.write(body + b"end")
got = [len(body), os.environ["IMDS_BRIDGE_EVENT_ID"], *sys.argv[2:]]
pathlib.Path(sys.argv[1]).write_text(repr(got), encoding="utf-8")
"""
    file = tmp_path / "a file with ü and €"
    arguments = ["a b", 'c"d', "e\\", "", "%PATH%", "&", "^", "ü€🟥"]
    result = outcome(code, file, *arguments, body=BIG)
    assert result.fault == ""
    assert result.output.endswith("xend")
    assert file.read_text(encoding="utf-8") == repr([len(BIG), 'a "b" ü€%PATH%', *arguments])


def test_what_cannot_be_started_is_a_fault_of_the_setup(tmp_path: Path) -> None:
    program = tmp_path / "drain.exe"
    sink = ExecSink(ExecSettings(kind="exec", run=(str(program),)))
    for _ in range(2):
        with pytest.raises(Misconfigured, match="cannot be started"):
            sink.send([stored_event(1)])
        program.write_text("no program")


@pytest.mark.usefixtures("short_patience")
def test_a_program_that_hangs_ends_in_time_with_its_children(tmp_path: Path) -> None:
    result = outcome(f"{FAMILY}\ntime.sleep(3600)", tmp_path / "pid-", seconds=5)
    assert result.ended_by == "timeout"
    files = [tmp_path / "pid-child", tmp_path / "pid-detached"]
    assert wait_until(lambda: not any(map(is_alive, files)))


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    files = [tmp_path / "pid-child", tmp_path / "pid-detached"]
    wait = f"while not all(os.path.exists(one) for one in {list(map(str, files))}): time.sleep(0.01)"
    assert outcome(f"import os\n{FAMILY}\n{wait}", tmp_path / "pid-").fault == ""
    assert wait_until(lambda: not any(map(is_alive, files)))


def test_what_any_user_may_change_is_refused(tmp_path: Path) -> None:
    program, script = tmp_path / "drain.exe", tmp_path / "drain.PS1"
    command = [str(program), "-File", str(script)]
    assert find_fault(command) == f"{program}: there is no such file"
    program.write_bytes(b"MZ\0")
    assert find_fault(command) == f"{script}: there is no such file"
    script.touch()
    for file in (program, script):
        assert find_fault(command) == ""
        grant_everyone(file)
        assert find_fault(command) == f"{program}: any user may change {file}"
        file.unlink()
        file.write_bytes(b"MZ\0")


# --- drains ---

VM = "web-0"


def settings(imds: ImdsLab, command: list[str], **rule: Any) -> dict[str, Any]:
    """Return the settings of a listener that runs a program before it approves."""
    return {
        "imds": {"endpoint": imds.url(VM), "poll_seconds": 0.2},
        "sinks": {"out": {"kind": "stdout", "types": ["io.imdsbridge.*"]}},
        "approvals": {"auto": [{"event_type": ["Reboot"], "run": command, **rule}]},
    }


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=[VM], notice_seconds=900)


def test_a_drain_that_succeeds_is_approved(imds: ImdsLab, tmp_path: Path) -> None:
    code = "import sys, json, pathlib; pathlib.Path(sys.argv[1]).write_text(json.load(sys.stdin)['type'])"
    file = tmp_path / "drained"
    with Forward(tmp_path, settings(imds, python(code, file)), role="listen"):
        event_id = schedule(imds)
        imds.wait_for(lambda: imds.approvals)
        assert [one.event_id for one in imds.approvals] == [event_id]
    assert file.read_text().startswith("io.imdsbridge.")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import sys; sys.exit('no route')", "exit code 1"),
        (CRASH, "exit code 0xC0000005"),
        (f"{FAMILY}\ntime.sleep(3600)", "it did not end in time"),
    ],
)
def test_a_drain_that_fails_or_hangs_is_not_approved(
    imds: ImdsLab, tmp_path: Path, code: str, fault: str
) -> None:
    files = [tmp_path / "pid-child", tmp_path / "pid-detached"] if code.startswith("\n") else []
    given = settings(imds, python(code, tmp_path / "pid-"), run_timeout_seconds=5)
    with Forward(tmp_path, given, role="listen") as listen:
        schedule(imds)
        wait_for_all(files)
        assert fault in listen.wait_for_log("has ended: ")["message"]
        assert not any(map(is_alive, files))
        assert imds.approvals == []


def test_a_kill_of_imds_bridge_ends_a_drain_and_the_next_start_drains_again(
    imds: ImdsLab, tmp_path: Path
) -> None:
    files = [tmp_path / f"pid-{name}" for name in ("own", "child", "detached")]
    again = tmp_path / "again"
    code = f"""
import os, sys
if os.path.exists({str(again)!r}):
    sys.exit(0)
{FAMILY}
open(sys.argv[1] + "own", "w").write(str(os.getpid()))
time.sleep(3600)
"""
    with Forward(tmp_path, settings(imds, python(code, tmp_path / "pid-")), role="listen") as listen:
        schedule(imds)
        wait_for_all(files)
        listen.kill()
        wait_until(lambda: not any(map(is_alive, files)))
        again.touch()
        listen.start()
        imds.wait_for(lambda: imds.approvals)


@pytest.mark.parametrize("is_slow", [False, True])
def test_at_an_orderly_stop_a_drain_has_its_time(imds: ImdsLab, tmp_path: Path, is_slow: bool) -> None:
    """A program that is about to end does so, another one is ended by force."""
    files, stop = [tmp_path / "pid-own"], tmp_path / "stop"
    code = f"""{WRITE_PID}
print("began", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
time.sleep({3600 if is_slow else 2})
print("cleaned")
"""
    listen = Forward(tmp_path, settings(imds, python(code, files[0], stop)), role="listen")
    listen._command = [sys.executable, "-c", STOPPABLE, str(stop), *listen._command[3:]]
    with listen:
        schedule(imds)
        wait_for_all(files)
        stop.touch()
        assert listen.wait() == 0, listen
        assert not is_alive(files[0])
        ended = listen.wait_for_log("has ended: it was ended by imds-bridge")
        assert ended["output"] == ("began" if is_slow else "began cleaned")
    assert imds.approvals == []
    assert json.loads((listen.state / "status.json").read_text())["running"] is False
