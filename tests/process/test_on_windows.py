"""On Windows, or Wine: programs and their jobs, drains by `imds-bridge listen`, files that others hold open."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import Unavailable
from bridge.runtime.program import Result, Run, find_fault
from bridge.sinks.exec import ExecSettings, ExecSink
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.paths import ROOT
from tests.support.process import LIMIT_SECONDS, Forward, stored_event, wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "win32", reason="only Windows has jobs, and keeps files from being opened"
)

CRASH = "import os; os._exit(0xC0000005 - 2**32)"
WRITE_PID = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); "
HANG = f"{WRITE_PID} time.sleep(3600)"
# A child, and one that has left the console and the process group.
FAMILY = f"""
import subprocess, sys, time
for name, flags in (("child", 0), ("detached", subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP)):
    subprocess.Popen([sys.executable, "-c", {HANG!r}, sys.argv[1] + name], creationflags=flags)
"""


def python(code: str, *arguments: str | Path) -> list[str]:
    """Return the command of a program in Python."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def finish(code: str, *arguments: str | Path, seconds: float = LIMIT_SECONDS) -> Result:
    """Run a program to its end."""
    return Run(python(code, *arguments), b"{}", {}, timeout_seconds=seconds).finish()


@pytest.fixture
def family(tmp_path: Path) -> list[Path]:
    """Return where the children of FAMILY write their ids, if its argument is `pid-` in the test's folder."""
    return [tmp_path / "pid-child", tmp_path / "pid-detached"]


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


def wait_for_the_end(files: list[Path]) -> None:
    wait_until(lambda: not any(map(is_alive, files)))


# --- programs beyond what tests/process/test_program.py shows of every system ---


def test_a_crash_is_described_and_retried() -> None:
    settings = ExecSettings(kind="exec", run=tuple(python(CRASH)))
    with pytest.raises(Unavailable, match="exit code 0xC0000005"):
        ExecSink(settings).send([stored_event(1)])


def test_a_program_that_hangs_ends_in_time_with_its_children(
    tmp_path: Path, family: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.runtime.program.KILL_AFTER_SECONDS", 0.3)
    result = finish(f"{FAMILY}\ntime.sleep(3600)", tmp_path / "pid-", seconds=5)
    assert result.ended_by == "timeout"
    wait_for_the_end(family)


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path, family: list[Path]) -> None:
    wait = f"while not all(os.path.exists(one) for one in {list(map(str, family))}): time.sleep(0.01)"
    assert finish(f"import os\n{FAMILY}\n{wait}", tmp_path / "pid-").fault == ""
    wait_for_the_end(family)


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


def settings(imds: ImdsLab, sink: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"imds": {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}, "sinks": {"out": sink}, **more}


def draining(imds: ImdsLab, command: list[str], **rule: Any) -> dict[str, Any]:
    """Return the settings of a listener that runs a program before it approves."""
    auto = [{"event_type": ["Reboot"], "run": command, **rule}]
    return settings(imds, {"kind": "stdout", "types": ["io.imdsbridge.*"]}, approvals={"auto": auto})


def schedule(imds: ImdsLab, event_type: str = "Reboot") -> str:
    return imds.schedule(event_type=event_type, resources=["web-0"], notice_seconds=900)


def test_a_drain_that_succeeds_is_approved(imds: ImdsLab, tmp_path: Path) -> None:
    code = "import sys, json, pathlib; pathlib.Path(sys.argv[1]).write_text(json.load(sys.stdin)['type'])"
    file = tmp_path / "drained"
    with Forward(tmp_path, draining(imds, python(code, file)), role="listen"):
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
    imds: ImdsLab, tmp_path: Path, family: list[Path], code: str, fault: str
) -> None:
    files = family if code.startswith(FAMILY) else []
    given = draining(imds, python(code, tmp_path / "pid-"), run_timeout_seconds=5)
    with Forward(tmp_path, given, role="listen") as listen:
        schedule(imds)
        wait_for_all(files)
        assert fault in listen.wait_for_log("has ended: ")["message"]
        assert not any(map(is_alive, files))
        assert imds.approvals == []


def test_a_kill_of_imds_bridge_ends_a_drain_and_the_next_start_drains_again(
    imds: ImdsLab, tmp_path: Path, family: list[Path]
) -> None:
    files = [tmp_path / "pid-own", *family]
    again = tmp_path / "again"
    code = f"""
import os, sys
if os.path.exists({str(again)!r}):
    sys.exit(0)
{FAMILY}
open(sys.argv[1] + "own", "w").write(str(os.getpid()))
time.sleep(3600)
"""
    with Forward(tmp_path, draining(imds, python(code, tmp_path / "pid-")), role="listen") as listen:
        schedule(imds)
        wait_for_all(files)
        listen.kill()
        wait_for_the_end(files)
        again.touch()
        listen.start()
        imds.wait_for(lambda: imds.approvals)


@pytest.mark.parametrize("is_slow", [False, True])
def test_at_an_orderly_stop_a_drain_has_its_time(imds: ImdsLab, tmp_path: Path, is_slow: bool) -> None:
    """A program that is about to end does so, another one is ended by force."""
    files, stop = [tmp_path / "pid-own"], tmp_path / "stop-asked"
    code = f"""{WRITE_PID}
print("began", flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
time.sleep({3600 if is_slow else 2})
print("cleaned")
"""
    given = draining(imds, python(code, files[0], stop))
    listen = Forward(tmp_path, given, role="listen", env={"TEST_STOPPABLE": str(tmp_path)})
    listen._command[1:3] = [str(ROOT / "tests/windows/stoppable.py")]
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


# --- files ---


def forwarding(imds: ImdsLab, inbox: Inbox, **more: Any) -> dict[str, Any]:
    sink = {"kind": "webhook", "url": inbox.url, "types": ["io.imdsbridge.*"], "from_start": True}
    return settings(imds, sink, **more)


def types(inbox: Inbox) -> list[str]:
    return [event["type"].removeprefix("io.imdsbridge.").removesuffix(".v1") for event in inbox.events()]


@contextmanager
def held(file: Path, share: int) -> Iterator[None]:
    """Hold a file open, and allow others only what `share` says: 0 nothing, 1 to read."""
    if sys.platform == "win32":
        import _winapi  # noqa: PLC0415 - Windows alone has it

        kernel = ctypes.WinDLL("kernel32")
        kernel.CreateFileW.restype = ctypes.c_void_p
        handle = kernel.CreateFileW(str(file), 0x80000000, share, None, 3, 0, None)
        assert handle is not None
        try:
            yield
        finally:
            _winapi.CloseHandle(handle)
    else:
        raise AssertionError


@pytest.mark.parametrize("share", [0, 1])
def test_a_file_that_is_held_while_the_service_starts_loses_no_end_and_is_not_damaged(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path, share: int
) -> None:
    with Forward(tmp_path, forwarding(imds, inbox)) as forward:
        gone = schedule(imds)
        inbox.wait_for(lambda: "scheduledevent.scheduled" in types(inbox), LIMIT_SECONDS)
        forward.kill()
        imds.cancel(gone)
        with held(forward.state / "outbox.db", share):
            forward.start()
            threading.Event().wait(4)
        inbox.wait_for(lambda: "scheduledevent.ended" in types(inbox), LIMIT_SECONDS)
        schedule(imds, "Freeze")
        inbox.wait_for(lambda: types(inbox).count("scheduledevent.scheduled") == 2, LIMIT_SECONDS)
    assert "bridge.loss" not in types(inbox)
    assert "damaged" not in forward.log.read_text(encoding="utf-8")
    assert not [*forward.state.glob("outbox.db.*")]


def test_a_state_folder_may_have_the_prefix_of_long_paths(
    imds: ImdsLab, inbox: Inbox, tmp_path: Path
) -> None:
    folder = Path(rf"\\?\{tmp_path}") / ("long" * 30) / ("path" * 30)
    forward = Forward(tmp_path, forwarding(imds, inbox, state_dir=folder))
    forward.state = folder / "forward"
    with forward:
        schedule(imds)
        inbox.wait_for(lambda: "scheduledevent.scheduled" in types(inbox), LIMIT_SECONDS)
        assert forward.wait_for_status(lambda status: status)["storage_error"] is None
    assert (forward.state / "outbox.db").stat().st_size
