"""What systemd receives: over a socket of the test, from the class alone and from the real process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bridge.runtime import threads as runtime
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import (
    Stop,
    extend_deadline,
    progress_ages,
    report_progress,
    stalled_threads,
    start_thread,
)
from bridge.runtime.worker import Worker
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import LIMIT_SECONDS, Forward, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="systemd is not there")


class NotifySocket:
    """Stands in for systemd: keeps each line that it receives."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name[1:]}" if name.startswith("@") else name)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while datagram := self._socket.recv(65536):
            self.lines += datagram.decode().split("\n")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"", self._socket.getsockname())
        self._thread.join(LIMIT_SECONDS)
        self._socket.close()

    def count(self, line: str) -> int:
        return self.lines.count(line)

    def wait_for(self, line: str, *, count: int = 1) -> None:
        wait_until(lambda: self.count(line) >= count, describe=lambda: f"{line} among {self.lines}")


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotifySocket]:
    notify = NotifySocket(str(tmp_path / "notify"))
    yield notify
    notify.close()


# --- the protocol ---


@pytest.mark.parametrize("is_abstract", [False, True])
def test_what_the_process_does_reaches_the_socket_and_a_status_only_when_it_changed(
    tmp_path: Path, is_abstract: bool
) -> None:
    name = f"@imds-bridge-{os.getpid()}-{tmp_path.name}" if is_abstract else str(tmp_path / "notify")
    with closing(NotifySocket(name)) as notify:
        supervisor = Supervisor({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "120000000"})
        supervisor.ready()
        supervisor.alive()
        for status in ("web-0: no\nevents", "web-0: no events", "\ud800 Neustart f\xfcr", "x" * 100_000):
            supervisor.report_status(status)
        supervisor.stopping(5.5)
        notify.wait_for("EXTEND_TIMEOUT_USEC=5500000")
    expected = ["READY=1", "WATCHDOG=1", "STATUS=web-0: no events", "STATUS=\\ud800 Neustart f\xfcr"]
    assert notify.lines[:-3] == expected
    assert (len(notify.lines[-3]), notify.lines[-2]) == (407, "STOPPING=1")


@pytest.mark.parametrize("name", [None, "", "vsock:2:1", "/nowhere/absent"])
def test_without_a_supervisor_or_with_one_that_is_gone_nothing_happens(
    name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {} if name is None else {"NOTIFY_SOCKET": name}
    supervisor = Supervisor({**environ, "WATCHDOG_USEC": "1000000"})
    supervisor.ready()
    supervisor.alive()
    supervisor.stopping(1)
    is_gone = name == "/nowhere/absent"
    assert (supervisor.watchdog_seconds is None) is not is_gone
    assert ("READY cannot be reported to the supervisor" in caplog.text) is is_gone


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [
        ("120000000", "", 120.0),
        ("120000000", "its own", 120.0),
        ("120000000", "1", None),
        ("0", "", None),
        ("soon", "", None),
        ("", "", None),
    ],
)
def test_a_watchdog_counts_only_if_it_watches_this_process(
    microseconds: str, pid: str, seconds: float | None
) -> None:
    pid = pid.replace("its own", str(os.getpid()))
    given = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": microseconds, "WATCHDOG_PID": pid}
    assert Supervisor({name: value for name, value in given.items() if value}).watchdog_seconds == seconds


# --- stalled threads ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "STALL_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_loop_that_hangs_is_named_until_it_ends_and_no_other_thread() -> None:
    goes_on, stop, worker = threading.Event(), Stop(), Worker("blocking-call")

    def hang() -> None:
        report_progress()
        goes_on.wait(LIMIT_SECONDS)

    def wait(seconds: float | None) -> None:
        report_progress()
        stop.wait(seconds)

    def call() -> None:
        report_progress()
        worker.call(goes_on.wait, limit_seconds=LIMIT_SECONDS)

    loops = {
        "hangs": hang,
        "never reported": lambda: bool(stop.wait(None)),
        "announces an hour": lambda: wait(3600.0),
        "announces any time": lambda: wait(None),
        "calls with a limit": call,
    }
    threads = [start_thread(name, loop) for name, loop in loops.items()]
    report_progress()  # nor is the main thread, which is no loop
    extend_deadline(0.0)
    announced = {"announces an hour": 0.0, "calls with a limit": 0.0}

    def are_those_that_announce_their_waits_well() -> bool:
        ages = progress_ages()
        return ages.pop("hangs", 0.0) > 0 and ages == announced

    wait_until(are_those_that_announce_their_waits_well, describe=progress_ages)
    wait_until(lambda: stalled_threads() == ["hangs"], describe=stalled_threads)
    goes_on.set()
    wait_until(lambda: not stalled_threads())
    stop.set()
    for thread in threads:
        thread.join(LIMIT_SECONDS)


# --- the real process ---

# The process shows its status often, and has little patience with its sink, which blocks while `blocked` is there.
PROCESS = """
import sys, time
from pathlib import Path
from bridge.runtime import threads
from bridge.process import process
from bridge.cli.main import main
from bridge.sinks.stdout import StdoutSink

def send(self, events):
    while Path(sys.argv[1]).exists():
        time.sleep(0.01)

threads.STALL_SECONDS, process.TICK_SECONDS = 3.0, 0.2
StdoutSink.send = send
sys.exit(main(sys.argv[2:]))
"""


def supervised(systemd: NotifySocket, folder: Path, imds: ImdsLab, **more: Any) -> Forward:
    """Return the process under systemd with a watchdog of a second; its stdout blocks while there is `blocked`."""
    given = {"endpoint": imds.url("web-0"), "poll_seconds": 0.2}
    env = {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": "1000000"}
    forward = Forward(folder, {"imds": given, "stop_seconds": 5.0, **more}, env=env)
    forward._command[1:3] = ["-c", PROCESS, str(folder / "blocked")]
    return forward


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)


def test_the_process_reports_ready_alive_and_stopping(
    imds: ImdsLab, inbox: Inbox, systemd: NotifySocket, tmp_path: Path
) -> None:
    sinks = {"inbox": {"kind": "webhook", "url": inbox.url}}
    with supervised(systemd, tmp_path, imds, sinks=sinks) as forward:
        systemd.wait_for("WATCHDOG=1", count=3)
        systemd.wait_for("STATUS=web-0: no events")
        schedule(imds)
        wait_until(lambda: any("Reboot scheduled, not before" in line for line in systemd.lines))
        assert forward.stop() == 0, forward
    systemd.wait_for("EXTEND_TIMEOUT_USEC=35000000")
    assert systemd.lines[0] == "READY=1"
    assert systemd.count("READY=1") == systemd.count("STOPPING=1") == 1
    assert "WATCHDOG=1" not in systemd.lines[systemd.lines.index("STOPPING=1") :]


def test_a_silent_imds_holds_up_neither_ready_nor_the_watchdog_nor_the_backlog_nor_the_end(
    imds: ImdsLab, inbox: Inbox, systemd: NotifySocket, tmp_path: Path
) -> None:
    sinks = {"inbox": {"kind": "webhook", "url": inbox.url, "from_start": True}}
    inbox.fault(503, count=None)
    event_id = schedule(imds)
    with supervised(systemd, tmp_path, imds, sinks=sinks, stop_seconds=0.5) as forward:
        forward.wait_for_status(lambda status: status["sinks"]["inbox"]["backlog"] >= 2)
        assert forward.stop() == 0, forward
    inbox.clear()
    systemd.lines.clear()
    imds.fault("slow", seconds=130, count=None)
    with forward:
        inbox.wait_for(lambda: event_id in [event["subject"] for event in inbox.events()], LIMIT_SECONDS)
        systemd.wait_for("WATCHDOG=1", count=8)  # for longer than a loop may be silent without a word
        assert systemd.lines[0] == "READY=1"
        silent = [line for line in forward.lines() if "threads are stalled" in line["message"]]
        assert not [line for line in silent if "poll" in line["message"]], forward
        assert forward.stop() == 0, forward


def test_a_wrong_configuration_is_never_ready(imds: ImdsLab, systemd: NotifySocket, tmp_path: Path) -> None:
    with supervised(systemd, tmp_path, imds, sinks={"ops": {"kind": "webhook"}}) as forward:
        assert forward.wait() == 2
        assert "sinks.ops.url: is missing (or url_file)" in forward.log.read_text()
    assert systemd.lines == []
    assert not forward.state.exists()


def test_a_loop_that_hangs_keeps_the_watchdog_from_being_fed_until_it_goes_on(
    imds: ImdsLab, systemd: NotifySocket, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()
    with supervised(systemd, tmp_path, imds) as forward:

        def main_thread_goes_round() -> None:
            """Wait until the process has written its status twice from now on."""
            for _ in range(2):
                event_id = schedule(imds)
                forward.wait_for_status(lambda status: event_id in json.dumps(status["document"]))  # noqa: B023 - called at once

        stalled = forward.wait_for_log("threads are stalled: sink-stdout")
        assert stalled["level"] == "critical"
        main_thread_goes_round()
        fed = systemd.count("WATCHDOG=1")
        main_thread_goes_round()
        assert systemd.count("WATCHDOG=1") == fed
        blocked.unlink()
        systemd.wait_for("WATCHDOG=1", count=fed + 1)
        forward.wait_for_log("all threads are responding again")
        assert forward.stop() == 0, forward


def test_the_journal_gets_a_refused_configuration_as_an_error(tmp_path: Path) -> None:
    forward = Forward(tmp_path, {"nonsense": 1}, env={"JOURNAL_STREAM": "0:0"})
    assert forward.start().wait() == 2
    assert forward.log.read_text().startswith("imds-bridge: ")
    status = forward.log.stat()
    with Forward(
        tmp_path, {"nonsense": 1}, env={"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
    ) as again:
        assert again.wait() == 2
    lines = forward.log.read_text().splitlines()
    assert lines[len(lines) // 2 :] == [f"<3>{line}" for line in lines[: len(lines) // 2]]
