"""The console as a process: killed under load, stopped in order, refused where it would be open to everybody."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import requests

from bridge.console import rows
from tests.support.console import BATCH, STRUCTURED, ConsoleProcess, FleetVm, batch, shown
from tests.support.process import run, wait_until

SENDERS = 4


class Sender(threading.Thread):
    """Sends events, alone and in batches, again until they are acknowledged, as a webhook sink does."""

    def __init__(self, console: ConsoleProcess, number: int, stop: threading.Event) -> None:
        super().__init__()
        self._console = console
        self._vm = FleetVm(f"web-{number}")
        self._stopping = stop
        self.acknowledged: list[str] = []

    def run(self) -> None:
        while not self._stopping.is_set():
            bodies = [self._vm.loss() for _ in range(1 + self._vm.sequence % 3)]
            while not self._send(bodies) and not self._stopping.is_set():
                self._stopping.wait(0.02)

    def _send(self, bodies: list[bytes]) -> bool:
        try:
            body, headers = (bodies[0], STRUCTURED) if len(bodies) == 1 else (batch(bodies), BATCH)
            answer = requests.post(f"{self._console.url}/ingest", body, headers=headers, timeout=10)
        except requests.RequestException:
            return False
        if answer.status_code == 200:
            self.acknowledged += [json.loads(body)["id"] for body in bodies]
        return answer.status_code == 200


def end_beside_a_page(console: ConsoleProcess) -> None:
    """Have the console stop beside a page that reads nothing."""
    host, _, port = console.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 10) as page:
        page.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert page.recv(1)
        assert console.stop() == 0


def test_after_kill_9_and_sigterm_under_load_nothing_acknowledged_is_missing_and_nothing_is_doubled(
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    with ConsoleProcess(tmp_path) as console:
        senders = [Sender(console, number, stop) for number in range(SENDERS)]
        for sender in senders:
            sender.start()
        for number, end in enumerate((console.kill, lambda: end_beside_a_page(console), console.kill), 1):
            wait_until(lambda: min(len(sender.acknowledged) for sender in senders) >= 20 * number)  # noqa: B023 - called at once
            end()
            console.start()
        stop.set()
        for sender in senders:
            sender.join(30)
        acknowledged = {one for sender in senders for one in sender.acknowledged}
        assert console.stop() == 0
    with shown(console.state) as seen:
        ids = seen.read(
            lambda store: [json.loads(body)["id"] for (body,) in store.execute("SELECT body FROM event")]
        )
        assert seen.read(rows.notes).get("damaged") is None
        assert [vm.missing for vm in seen.vms()] == [0] * SENDERS
    assert acknowledged <= set(ids)
    assert len(ids) == len(set(ids))


def test_a_second_console_on_the_same_state_is_refused_and_the_status_says_whether_one_runs(
    tmp_path: Path,
) -> None:
    with ConsoleProcess(tmp_path) as console:
        console.wait_for_status(lambda status: status["running"])
        result = run("console", "--config", console.config)
        status = run("status", "--role", "console", "--config", console.config)
        assert console.stop() == 0
        assert console.status()["running"] is False
    assert (result.returncode, "is held by process" in result.stderr) == (3, True)
    assert status.returncode == 0, status.stderr
    assert f"WEB   {console.url}, 0 event(s) received, the last never" in status.stdout
