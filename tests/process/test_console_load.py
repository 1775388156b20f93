"""The console while clients that nobody knows offer 10,000 requests a second."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
import requests

from tests.bench.measure import memory_mib
from tests.support.console import BATCH, TOKEN, ConsoleProcess, FleetVm, batch, behind_proxy, signed_in
from tests.support.process import LIMIT_SECONDS, wait_until

GENERATORS = 2
PER_SECOND = 10_000
SECONDS = 3
CONNECTIONS = 60
SLOW_SECONDS = 10.0  # on a machine that does much else; docs/benchmarks.md has figures of an idle one
NORMAL_SECONDS = 0.25
MAX_MIB = 120


class Loop(threading.Thread):
    """Does something again and again; keeps how long each time took."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._stopping = threading.Event()
        self.took: list[float] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                self._act()
                self.took.append(time.monotonic() - began)
        except (requests.RequestException, AssertionError) as error:
            self.error = error

    def end(self) -> None:
        self._stopping.set()
        self.join(LIMIT_SECONDS)
        assert self.error is None, self.error


@contextmanager
def flooded(url: str) -> Iterator[list[dict[str, int]]]:
    """Offer requests from processes of their own; the list has their counts after the block."""
    command = [sys.executable, "-m", "tests.support.flood", url, "GET /", "POST /ingest", "GET /livez"]
    options = {
        "--per-second": PER_SECOND / GENERATORS,
        "--seconds": SECONDS,
        "--connections": CONNECTIONS // GENERATORS,
    }
    command += [str(word) for option in options.items() for word in option]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(GENERATORS)]
    counts: list[dict[str, int]] = []
    try:
        yield counts
    finally:
        counts += [json.loads(one.communicate(timeout=LIMIT_SECONDS)[0]) for one in running]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_under_ten_thousand_requests_a_second_nothing_acknowledged_is_lost_and_people_get_answers(
    tmp_path: Path,
) -> None:
    with ConsoleProcess(tmp_path, **behind_proxy()) as console, requests.Session() as session:
        acknowledged: list[str] = []

        def send() -> None:
            name = f"web-{len(acknowledged)}"
            headers = {**BATCH, "Authorization": f"Bearer {TOKEN}"}
            answer = requests.post(
                f"{console.url}/ingest",
                batch([FleetVm(name).heartbeat()]),
                headers=headers,
                timeout=LIMIT_SECONDS,
            )
            if answer.status_code == HTTPStatus.OK:
                acknowledged.append(name)

        def get(path: str) -> None:
            answer = session.get(f"{console.url}{path}", headers=signed_in("ana"), timeout=LIMIT_SECONDS)
            assert answer.status_code == HTTPStatus.OK

        def probe() -> None:
            assert requests.get(f"{console.url}/livez", timeout=LIMIT_SECONDS).ok

        loops = [Loop(send), Loop(lambda: get("/")), Loop(probe)]
        with flooded(console.url) as counts:
            for loop in loops:
                loop.start()
        for loop in loops:
            loop.end()
        assert console.process
        peak = memory_mib("VmHWM", console.process.pid)
        offered, answered = (sum(one[name] for one in counts) for name in ("offered", "answered"))
        slowest = {name: max(loop.took) for name, loop in zip(("ingest", "Now", "livez"), loops, strict=True)}
        print(
            f"{offered=} {answered=} in {SECONDS} s, {len(acknowledged)} acknowledged, {slowest=}, {peak:.0f} MiB"
        )
        assert offered > 0.5 * PER_SECOND * SECONDS
        assert acknowledged
        assert max(slowest.values()) < SLOW_SECONDS
        assert peak < MAX_MIB

        def seconds_of(path: str) -> float:
            began = time.monotonic()
            get(path)
            return time.monotonic() - began

        wait_until(lambda: max(map(seconds_of, ("/", "/livez"))) < NORMAL_SECONDS)
        vms = session.get(
            f"{console.url}/api/v1/vms", headers=signed_in("ana"), timeout=LIMIT_SECONDS
        ).json()["vms"]
        assert {one["name"] for one in vms} >= {*acknowledged}
        assert len(console.log.read_text().splitlines()) < 20
