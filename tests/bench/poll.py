"""CPU of a poll that finds nothing new, against the documentation's sample."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import requests

from bridge.imds.client import EVENTS_PATH
from tests.bench import parts, simulators
from tests.bench.measure import BenchError, Progress, Row, paced

POLLS = 500
WARM_UP = 25
PACE_SECONDS = 0.02


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Poll and ask as the sample does, in turn."""
    progress.begin(f"poll: {POLLS} polls and {POLLS} requests of the sample, in turn")
    with simulators.imds() as imds:
        url = imds("base_url")
        with parts.forwarder(folder / "poll", url) as (forwarder, _):

            def poll() -> None:
                if forwarder.poll() is not None:
                    raise BenchError(f"a poll failed: {forwarder.status()['last_error']}")

            for _ in paced(WARM_UP, PACE_SECONDS):
                poll()
                _sample(url)
            ours: list[float] = []
            theirs: list[float] = []
            turns = ((poll, ours), (lambda: _sample(url), theirs))
            for number in paced(2 * POLLS, PACE_SECONDS):
                call, costs = turns[number % 2]
                costs.append(_cpu_us(call))
                progress.step(f"{number} of {2 * POLLS}")
    return [
        Row(
            name="an unchanged poll / the documentation's sample, CPU",
            measured=statistics.median(ours) / statistics.median(theirs),
            unit="x",
            limit=0.6,
            how=f"medians {statistics.median(ours):.0f} and {statistics.median(theirs):.0f} us of CPU, "
            f"{POLLS} each, "
            "in turn, 20 ms apart; no event in the document",
        )
    ]


def _sample(url: str) -> object:
    """Ask as Microsoft's Python sample does."""
    response = requests.get(  # noqa: S113 - the sample has no time limit
        url + EVENTS_PATH, headers={"Metadata": "true"}, params={"api-version": "2020-07-01"}
    )
    return response.json()


def _cpu_us(call: Callable[[], object]) -> float:
    """Return the CPU that the whole process spent on a call, the kernel's share included."""
    began = time.process_time_ns()
    call()
    return (time.process_time_ns() - began) / 1000
