"""What systemd receives: over a socket of the test, from the class alone and from the real process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bridge.runtime import threads as runtime
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import Stop, extend_deadline, report_progress, stalled_threads, start_thread
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


@pytest.fixture(params=["a path", "an abstract name"])
def systemd_socket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NotifySocket]:
    name = (
        str(tmp_path / "notify")
        if request.param == "a path"
        else f"@imds-bridge-{os.getpid()}-{tmp_path.name}"
    )
    notify = NotifySocket(name)
    yield notify
    notify.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[NotifySocket]:
    notify = NotifySocket(str(tmp_path / "notify"))
    yield notify
    notify.close()


# --- the protocol ---


def test_what_the_process_does_reaches_the_socket(systemd_socket: NotifySocket) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": systemd_socket.name, "WATCHDOG_USEC": "120000000"})
    supervisor.ready()
    supervisor.alive()
    supervisor.report_status("web-0: no\nevents")
    supervisor.stopping(5.5)
    systemd_socket.wait_for("EXTEND_TIMEOUT_USEC=5500000")
    assert systemd_socket.lines[:4] == ["READY=1", "WATCHDOG=1", "STATUS=web-0: no events", "STOPPING=1"]


def test_a_status_is_reported_only_when_it_changed(systemd: NotifySocket) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": systemd.name})
    for status in ("one", "one", "two", "x" * 100_000):
        supervisor.report_status(status)
    supervisor.ready()
    systemd.wait_for("READY=1")
    assert [len(line) for line in systemd.lines] == [10, 10, 407, 7]


def test_a_status_with_any_characters_is_reported(systemd: NotifySocket) -> None:
    Supervisor({"NOTIFY_SOCKET": systemd.name}).report_status(
        "web-0: \ud800 Reb\N{LATIN SMALL LETTER O WITH DIAERESIS}t"
    )
    systemd.wait_for("STATUS=web-0: \\ud800 Reb\N{LATIN SMALL LETTER O WITH DIAERESIS}t")


def test_without_a_supervisor_nothing_is_reported() -> None:
    for environ in ({}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}):
        supervisor = Supervisor({**environ, "WATCHDOG_USEC": "1000000"})
        supervisor.ready()
        supervisor.alive()
        supervisor.stopping(1)
        assert supervisor.watchdog_seconds is None


def test_a_supervisor_that_is_gone_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Supervisor({"NOTIFY_SOCKET": str(tmp_path / "absent")}).ready()
    assert "READY cannot be reported to the supervisor" in caplog.text


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "120000000"}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": str(os.getpid())}, 120.0),
        ({"WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_a_watchdog_counts_only_if_it_watches_this_process(
    environ: dict[str, str], seconds: float | None
) -> None:
    assert Supervisor({"NOTIFY_SOCKET": "/nowhere", **environ}).watchdog_seconds == seconds


# --- stalled threads ---


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "STALL_SECONDS", 0.05)


@pytest.fixture
def stop() -> Iterator[Stop]:
    stop = Stop()
    yield stop
    stop.set()


def is_silent(thread: threading.Thread) -> bool:
    return thread.name in stalled_threads()


@pytest.mark.usefixtures("impatient")
def test_a_stalled_thread_is_named_until_it_ends() -> None:
    goes_on = threading.Event()

    def loop() -> None:
        report_progress()
        goes_on.wait(LIMIT_SECONDS)

    thread = start_thread("poll-that-hangs", loop)
    wait_until(lambda: is_silent(thread))
    goes_on.set()
    wait_until(lambda: not is_silent(thread))


@pytest.mark.usefixtures("impatient")
def test_a_thread_that_never_reported_progress_does_not_count_as_stalled(stop: Stop) -> None:
    thread = start_thread("worker", lambda: bool(stop.wait(None)))  # type: ignore[arg-type]
    other = start_thread("other", report_progress)
    wait_until(lambda: not other.is_alive())
    assert not is_silent(thread)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seconds", [3600.0, None])
def test_an_announced_wait_is_not_a_stall_however_long(stop: Stop, seconds: float | None) -> None:
    waits, hangs = threading.Event(), threading.Event()

    def patient() -> None:
        report_progress()
        waits.set()
        stop.wait(seconds)

    def hanging() -> None:
        report_progress()
        hangs.wait(LIMIT_SECONDS)

    thread, other = start_thread("patient", patient), start_thread("hanging", hanging)
    assert waits.wait(LIMIT_SECONDS)
    wait_until(lambda: is_silent(other))  # long enough for the patient one, too
    wait_until(lambda: not is_silent(thread))
    hangs.set()


@pytest.mark.usefixtures("impatient")
def test_a_call_may_last_as_long_as_its_limit_and_what_it_calls_is_not_watched() -> None:
    returns, hangs = threading.Event(), threading.Event()
    worker = Worker("blocking-call")

    def loop() -> None:
        report_progress()
        worker.call(lambda: returns.wait(LIMIT_SECONDS), limit_seconds=LIMIT_SECONDS)

    def hanging() -> None:
        report_progress()
        hangs.wait(LIMIT_SECONDS)

    thread, other = start_thread("caller", loop), start_thread("hanging", hanging)
    wait_until(lambda: is_silent(other))
    wait_until(lambda: not is_silent(thread))
    assert "blocking-call" not in stalled_threads()
    returns.set()
    hangs.set()


@pytest.mark.usefixtures("impatient")
def test_only_threads_of_loops_are_watched() -> None:
    report_progress()
    extend_deadline(0.0)
    assert threading.current_thread().name not in stalled_threads()


# --- the real process ---

# The process with a sink that blocks for ever while the file `blocked` is there, and little patience for it.
BLOCKING = """
import sys, time
from pathlib import Path
from bridge.runtime import threads
from bridge.cli.main import main
from bridge.sinks.stdout import StdoutSink

def send(self, events):
    while Path(sys.argv[1]).exists():
        time.sleep(0.01)

threads.STALL_SECONDS = 5.0
StdoutSink.send = send
sys.exit(main(sys.argv[2:]))
"""


def settings(lab: ImdsLab, **sinks: Any) -> dict[str, Any]:
    return {"imds": {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}, "stop_seconds": 5.0, "sinks": sinks}


def under(systemd: NotifySocket, *, watchdog_seconds: float) -> dict[str, str]:
    return {"NOTIFY_SOCKET": systemd.name, "WATCHDOG_USEC": str(int(watchdog_seconds * 1e6))}


def test_the_process_reports_ready_alive_and_stopping(
    lab: ImdsLab, systemd: NotifySocket, tmp_path: Path
) -> None:
    with Inbox() as inbox:
        given = settings(lab, inbox={"kind": "webhook", "url": inbox.url})
        with Forward(tmp_path, given, env=under(systemd, watchdog_seconds=4)) as forward:
            systemd.wait_for("WATCHDOG=1", count=3)
            systemd.wait_for("STATUS=web-0: no events")
            lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
            wait_until(lambda: any("Reboot scheduled, not before" in line for line in systemd.lines))
            assert forward.stop() == 0, forward
    systemd.wait_for("EXTEND_TIMEOUT_USEC=35000000")
    assert systemd.lines[0] == "READY=1"
    assert systemd.count("READY=1") == systemd.count("STOPPING=1") == 1
    last_alive = len(systemd.lines) - 1 - systemd.lines[::-1].index("WATCHDOG=1")
    assert last_alive < systemd.lines.index("STOPPING=1")


def blocking(folder: Path, given: dict[str, Any], env: dict[str, str]) -> Forward:
    """Return the process with the sink that blocks while `folder` has a file `blocked`."""
    forward = Forward(folder, given, env=env)
    forward._command[1:3] = ["-c", BLOCKING, str(folder / "blocked")]
    return forward


def test_it_is_ready_before_imds_has_answered_and_survives_a_slow_first_call(
    lab: ImdsLab, systemd: NotifySocket, tmp_path: Path
) -> None:
    lab.fault("slow", seconds=130, count=None)
    with blocking(tmp_path, settings(lab), under(systemd, watchdog_seconds=4)) as forward:
        systemd.wait_for("WATCHDOG=1", count=8)  # for longer than a loop may be silent without a word
        assert systemd.lines[0] == "READY=1"
        silent = [line for line in forward.lines() if "threads are stalled" in line["message"]]
        assert not [line for line in silent if "poll" in line["message"]], forward


def test_a_wrong_configuration_is_never_ready(systemd: NotifySocket, tmp_path: Path) -> None:
    wrong = {"sinks": {"ops": {"kind": "webhook"}}}
    with Forward(tmp_path, wrong, env=under(systemd, watchdog_seconds=4)) as forward:
        assert forward.wait() == 2
        assert "sinks.ops.url: is missing (or url_file)" in forward.log.read_text()
    assert systemd.lines == []
    assert not forward.state.exists()


def test_a_loop_that_hangs_keeps_the_watchdog_from_being_fed_until_it_goes_on(
    lab: ImdsLab, systemd: NotifySocket, tmp_path: Path
) -> None:
    blocked = tmp_path / "blocked"
    blocked.touch()
    with blocking(tmp_path, settings(lab), under(systemd, watchdog_seconds=4)) as forward:
        stalled = forward.wait_for_log("threads are stalled: sink-stdout")
        assert stalled["level"] == "critical"
        main_thread_goes_round(lab, forward)
        fed = systemd.count("WATCHDOG=1")
        main_thread_goes_round(lab, forward)
        assert systemd.count("WATCHDOG=1") == fed
        blocked.unlink()
        systemd.wait_for("WATCHDOG=1", count=fed + 1)
        forward.wait_for_log("all threads are responding again")
        assert forward.stop() == 0, forward


def shows(event_id: str, status: Mapping[str, Any]) -> bool:
    return event_id in json.dumps(status["document"])


def main_thread_goes_round(lab: ImdsLab, forward: Forward) -> None:
    """Wait until the process has written its status twice from now on."""
    for _ in range(2):
        event_id = lab.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)
        forward.wait_for_status(partial(shows, event_id))
