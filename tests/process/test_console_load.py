"""The console while clients that nobody knows offer 10,000 requests a second; `.ci/run` asks for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.support.console import BATCH, TOKEN, ConsoleProcess, FleetVm, batch, behind_proxy, signed_in
from tests.support.process import LIMIT_SECONDS
from tests.support.usage import memory_mib

GENERATORS, PER_SECOND, SECONDS, CONNECTIONS = 2, 10_000, 3, 60
MAX_MIB = 120
FLOOD = map(str, (PER_SECOND // GENERATORS, SECONDS, CONNECTIONS // GENERATORS))


@pytest.mark.flood
def test_under_ten_thousand_requests_a_second_nothing_acknowledged_is_lost_and_people_get_answers(
    tmp_path: Path,
) -> None:
    """Answers within the limit; docs/benchmarks.md has how long they take."""
    acknowledged: list[str] = []
    with ConsoleProcess(tmp_path, **behind_proxy()) as console, requests.Session() as session:

        def send() -> None:
            name = f"web-{len(acknowledged)}"
            headers = {**BATCH, "Authorization": f"Bearer {TOKEN}"}
            body = batch([FleetVm(name).heartbeat()])
            if requests.post(f"{console.url}/ingest", body, headers=headers, timeout=LIMIT_SECONDS).ok:
                acknowledged.append(name)

        def get(path: str) -> requests.Response:
            answer = session.get(f"{console.url}{path}", headers=signed_in("ana"), timeout=LIMIT_SECONDS)
            assert answer.ok
            return answer

        def probe() -> None:
            assert requests.get(f"{console.url}/livez", timeout=LIMIT_SECONDS).ok

        def slowest(act: Callable[[], object]) -> float:
            """Do something again and again during the flood; return how long it took at most."""
            took = [0.0]
            while any(one.poll() is None for one in generators):
                began = time.monotonic()
                act()
                took.append(time.monotonic() - began)
            return max(took)

        command = [sys.executable, "-m", "tests.support.flood", console.url, *FLOOD]
        generators = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(GENERATORS)]
        with ThreadPoolExecutor() as pool:
            loops = [pool.submit(slowest, act) for act in (send, lambda: get("/"), probe)]
        offered = sum(int(one.communicate()[0]) for one in generators)
        assert console.process
        peak = memory_mib("VmHWM", console.process.pid)
        seconds = max(loop.result() for loop in loops)
        print(f"{offered} offered, {len(acknowledged)} acknowledged, {seconds:.2f} s, {peak:.0f} MiB")
        assert offered > 0.5 * PER_SECOND * SECONDS
        assert acknowledged
        assert peak < MAX_MIB
        assert {one["name"] for one in get("/api/v1/vms").json()["vms"]} >= {*acknowledged}
        assert len(console.log.read_text().splitlines()) < 20
