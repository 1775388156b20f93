"""CPU of the real process while nothing changes, against a process that asks as the documentation's sample does."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from bridge.imds.client import EVENTS_PATH
from tests.bench import process, simulators
from tests.bench.measure import BenchError, Progress, Row, ratios, spread

SETTLE_SECONDS = 6
SECONDS = 30
SAMPLE = """
import requests, sys, time
due = time.monotonic()
while True:
    requests.get(sys.argv[1], headers={"Metadata": "true"}, params={"api-version": "2020-07-01"}).json()
    due += 1
    time.sleep(max(0, due - time.monotonic()))
"""


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Let both poll once a second for a while, and compare the CPU of each second."""
    progress.begin(f"whole: the real process and the sample beside it, {SETTLE_SECONDS + SECONDS} s")
    with simulators.imds() as imds, simulators.inbox() as inbox:
        state = folder / "whole"
        config = process.write_config(state, imds, inbox, poll_seconds=1)
        url = imds("base_url") + EVENTS_PATH
        with (
            process.running("forward", config, state) as ours,
            process.started([sys.executable, "-c", SAMPLE, url], folder / "sample") as theirs,
        ):
            time.sleep(SETTLE_SECONDS)
            before = _request_counts(imds)
            mine, sample = _cost_of_each_second(ours, theirs, progress)
            process.check_alive(ours, state)
            process.check_alive(theirs, folder / "sample")
            polls = _request_counts(imds) - before
    if not 2 * SECONDS - 4 <= polls <= 2 * SECONDS + 4:
        raise BenchError(f"{polls} polls in {SECONDS} s of two processes that poll once a second")
    return [
        Row(
            name="an unchanged poll, whole process / the documentation's sample, CPU",
            measured=statistics.mean(mine) / statistics.mean(sample),
            unit="x",
            limit=0.30,
            how=f"means {statistics.mean(mine):.0f} and {statistics.mean(sample):.0f} us of CPU a second: the real "
            f"command with one webhook sink and all its threads, and a process that asks as the sample does, each "
            f"polling once a second, side by side for {SECONDS} s",
            details={
                "ours_us": spread(mine),
                "sample_us": spread(sample),
                "ratio_by_block": ratios(mine, sample),
            },
        )
    ]


def _request_counts(imds: simulators.Remote) -> int:
    count: int = imds("count")
    return count


def _cost_of_each_second(
    ours: subprocess.Popen[bytes], theirs: subprocess.Popen[bytes], progress: Progress
) -> tuple[list[float], list[float]]:
    """Return the CPU microseconds that each process spent in each second."""
    spent: tuple[list[float], list[float]] = ([], [])
    before = [_cpu_us(one.pid) for one in (ours, theirs)]
    due = time.monotonic()
    for number in range(SECONDS):
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
        now = [_cpu_us(one.pid) for one in (ours, theirs)]
        for costs, later, earlier in zip(spent, now, before, strict=True):
            costs.append(later - earlier)
        before = now
        progress.step(f"second {number} of {SECONDS}")
    return spent


def _cpu_us(pid: int) -> float:
    """Return the CPU that the threads of a process have spent, the kernel's share included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1000
