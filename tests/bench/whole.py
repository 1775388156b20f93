"""CPU of the real process while nothing changes, against a process that asks as the documentation's sample does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bridge.imds.client import EVENTS_PATH
from tests.bench import simulators
from tests.bench.measure import BenchError, Progress, Row, paced
from tests.bench.process import Bridge, settings

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
        url = imds("base_url") + EVENTS_PATH
        with (
            Bridge(folder / "ours", settings(imds, inbox, poll_seconds=1)) as ours,
            subprocess.Popen([sys.executable, "-c", SAMPLE, url]) as theirs,
        ):
            try:
                time.sleep(SETTLE_SECONDS)
                before: int = imds("count")
                mine, sample = _cost_of_a_second(ours.pid, theirs.pid, progress)
                ours.check_alive()
                polls = imds("count") - before
            finally:
                theirs.kill()
    if not 2 * SECONDS - 4 <= polls <= 2 * SECONDS + 4:
        raise BenchError(f"{polls} polls in {SECONDS} s of two processes that poll once a second")
    return [
        Row(
            name="an unchanged poll, whole process / the documentation's sample, CPU",
            measured=mine / sample,
            unit="x",
            limit=0.40,
            how=f"means {mine:.0f} and {sample:.0f} us of CPU a second: the real "
            f"command with one webhook sink and all its threads, and a process that asks as the sample does, each "
            f"polling once a second, side by side for {SECONDS} s",
        )
    ]


def _cost_of_a_second(ours: int, theirs: int, progress: Progress) -> tuple[float, float]:
    """Return the mean CPU microseconds that each process spends in a second."""
    totals = []
    for number in paced(SECONDS + 1, 1):
        totals.append((_cpu_us(ours), _cpu_us(theirs)))
        progress.step(f"second {number} of {SECONDS}")
    mine, sample = (spent[-1] - spent[0] for spent in zip(*totals, strict=True))
    return mine / SECONDS, sample / SECONDS


def _cpu_us(pid: int) -> float:
    """Return the CPU that the threads of a process have spent, the kernel's share included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1000
