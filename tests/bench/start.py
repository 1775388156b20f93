"""The real process: how soon its first poll comes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench import simulators
from tests.bench.measure import Progress, Row
from tests.bench.process import Bridge, settings

STARTS = 15
METRICS: dict[str, Any] = {"metrics": {"listen": "127.0.0.1:0"}}
IMPORTS = "import pydantic, requests, sqlite3"


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Start the process again and again, and see when its first request comes."""
    progress.begin(
        f"start: {STARTS} starts, as many with the metrics port, and {STARTS} bare imports, in turn"
    )
    took: list[tuple[float, float, float]] = []
    with simulators.imds() as imds, simulators.inbox() as inbox:
        alone, metrics = settings(imds, inbox), settings(imds, inbox, **METRICS)
        for number in range(STARTS + 1):
            took.append(
                (
                    _first_poll_ms(folder / f"start{number}", imds, alone),
                    _first_poll_ms(folder / f"metrics{number}", imds, metrics),
                    _bare_ms(),
                )
            )
            progress.step(f"{number} of {STARTS}")
    # The first warms the file cache and compiles.
    start_ms, metrics_ms, bare_ms = map(median, zip(*took[1:], strict=True))
    return [
        Row(
            name="start to first poll / bare imports of pydantic, requests, sqlite3, time",
            measured=start_ms / bare_ms,
            unit="x",
            limit=1.4,
            how=f"medians {start_ms:.0f} and {bare_ms:.0f} ms, {STARTS} each, from exec of `imds-bridge forward` "
            "with a new state to the request at the simulator, and of a process that does nothing from exec to exit",
        ),
        Row(
            name="  the metrics port adds to the start",
            measured=metrics_ms - start_ms,
            unit="ms",
            how=f"the difference of the medians, {metrics_ms:.0f} ms with the port, {STARTS} each",
        ),
    ]


def _bare_ms() -> float:
    began_at = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=20)
    return (time.monotonic() - began_at) * 1000


def _first_poll_ms(folder: Path, imds: simulators.Remote, chosen: Mapping[str, Any]) -> float:
    """Start the process; return the time from its exec to its first request."""
    process = Bridge(folder, chosen)
    began_at = time.monotonic()
    with process:
        process.until(lambda: imds("polls_after", began_at), apart_seconds=0.05)
    first: float = imds("polls_after", began_at)[0]
    return (first - began_at) * 1000
