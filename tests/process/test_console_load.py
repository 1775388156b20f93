"""The console while clients that nobody knows offer 10,000 requests a second; `.ci/run` asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from tests.bench.measure import memory_mib
from tests.support.console import BATCH, TOKEN, ConsoleProcess, FleetVm, batch, behind_proxy, signed_in
from tests.support.process import LIMIT_SECONDS

GENERATORS = 2
PER_SECOND = 10_000
SECONDS = 3
CONNECTIONS = 60
MAX_MIB = 120


@contextmanager
def flooded(url: str) -> Iterator[list[int]]:
    """Offer requests from processes of their own; the list has how many each has offered after the block."""
    command = [sys.executable, "-m", "tests.support.flood", url, "GET /", "POST /ingest", "GET /livez"]
    for option, value in (("per-second", PER_SECOND), ("connections", CONNECTIONS)):
        command += [f"--{option}", str(value // GENERATORS)]
    command += ["--seconds", str(SECONDS)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(GENERATORS)]
    offered: list[int] = []
    try:
        yield offered
    finally:
        offered += [json.loads(one.communicate(timeout=LIMIT_SECONDS)[0])["offered"] for one in running]


@pytest.mark.skipif("TEST_FLOOD" not in os.environ, reason="TEST_FLOOD=1 asks for it, as .ci/run does")
def test_under_ten_thousand_requests_a_second_nothing_acknowledged_is_lost_and_people_get_answers(
    tmp_path: Path,
) -> None:
    """Answers within the limit; docs/benchmarks.md has how long they take."""
    with ConsoleProcess(tmp_path, **behind_proxy()) as console, requests.Session() as session:
        acknowledged: list[str] = []
        has_ended = threading.Event()

        def send() -> None:
            body = batch([FleetVm(f"web-{len(acknowledged)}").heartbeat()])
            headers = {**BATCH, "Authorization": f"Bearer {TOKEN}"}
            url = f"{console.url}/ingest"
            if requests.post(url, body, headers=headers, timeout=LIMIT_SECONDS).ok:
                acknowledged.append(f"web-{len(acknowledged)}")

        def get(path: str) -> requests.Response:
            answer = session.get(f"{console.url}{path}", headers=signed_in("ana"), timeout=LIMIT_SECONDS)
            assert answer.ok
            return answer

        def probe() -> None:
            assert requests.get(f"{console.url}/livez", timeout=LIMIT_SECONDS).ok

        def slowest(act: Callable[[], object]) -> float:
            """Do something again and again; return how long it took at most."""
            took = [0.0]
            while not has_ended.is_set():
                began = time.monotonic()
                act()
                took.append(time.monotonic() - began)
            return max(took)

        acts = {"ingest": send, "Now": lambda: get("/"), "livez": probe}
        with ThreadPoolExecutor() as pool:
            try:
                with flooded(console.url) as offered:
                    loops = {name: pool.submit(slowest, act) for name, act in acts.items()}
            finally:
                has_ended.set()
        assert console.process
        peak = memory_mib("VmHWM", console.process.pid)
        seconds = {name: round(loop.result(), 2) for name, loop in loops.items()}
        print(
            f"{sum(offered)} offered in {SECONDS} s, {len(acknowledged)} acknowledged, {seconds}, {peak:.0f} MiB"
        )
        assert sum(offered) > 0.5 * PER_SECOND * SECONDS
        assert acknowledged
        assert peak < MAX_MIB
        assert {one["name"] for one in get("/api/v1/vms").json()["vms"]} >= {*acknowledged}
        assert len(console.log.read_text().splitlines()) < 20
