"""What every row uses: its fields, statistics, pacing, memory, and facts about the machine."""

from __future__ import annotations

import os
import platform
import sqlite3
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    `limit` is None for a figure that is shown for comparison only; `at_least` makes it a lower limit. `measured`
    is None if nothing could be measured, and `how` then says why. `details` go into the JSON.
    """

    name: str
    measured: float | None
    unit: str = ""
    limit: float | None = None
    at_least: bool = False
    how: str
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None if there is none, or nothing was measured."""
        if self.limit is None or self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class BenchError(Exception):
    """Something could not be measured."""


def spread(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """Return count, median, and the 10th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return {
        "count": len(values),
        "median": round(statistics.median(values), digits),
        "p10": round(tenths[0], digits),
        "p90": round(tenths[-1], digits),
    }


def ratios(ours: Sequence[float], theirs: Sequence[float], *, blocks: int = 5) -> list[float]:
    """Return the ratio of the medians of each of some blocks, to show how far noise moves it."""
    size = len(ours) // blocks
    return [
        round(
            statistics.median(ours[at : at + size]) / statistics.median(theirs[at : at + size]),
            3,
        )
        for at in range(0, size * blocks, size)
    ]


def paced(count: int, every_seconds: float) -> Iterator[int]:
    """Count up to `count` on a schedule; a late turn is not skipped, and the next ones do not catch up."""
    due = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, due - time.monotonic()))
        yield number
        due = max(due + every_seconds, time.monotonic())


def wait_until(
    reached: Callable[[], bool], *, what: str, limit_seconds: float, every_seconds: float = 0.1
) -> None:
    """Wait until something holds.

    Raises:
        BenchError: it did not in time.
    """
    deadline = time.monotonic() + limit_seconds
    while not reached():
        if time.monotonic() > deadline:
            raise BenchError(f"{what} did not come within {limit_seconds:g} s")
        time.sleep(every_seconds)


def memory_mib(name: str = "VmRSS", pid: int | str = "self") -> float:
    """Return a figure of /proc/PID/status: VmRSS now, VmHWM its peak since `reset_peak`."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / KIB
    raise BenchError(f"/proc/{pid}/status has no {name}")


def reset_peak() -> None:
    """Reset VmHWM of this process to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Progress:
    """Print on stderr what is measured now, at most every two seconds unless something new begins."""

    def __init__(self) -> None:
        self._began_at = self._printed_at = time.monotonic()

    def begin(self, text: str) -> None:
        """Print that something begins."""
        self._printed_at = time.monotonic()
        print(f"[{self._printed_at - self._began_at:5.0f} s] {text}", file=sys.stderr, flush=True)

    def step(self, text: str) -> None:
        """Print how far it is, unless something was printed just now."""
        if time.monotonic() - self._printed_at >= 2:
            self.begin(f"  {text}")

    @property
    def seconds(self) -> float:
        """Return how long the run has taken so far."""
        return time.monotonic() - self._began_at


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine, without its name."""
    return {
        "cores": os.cpu_count(),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory_mib": round(int(_first_value("/proc/meminfo", "MemTotal").split()[0]) / KIB),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
        "file_system": file_system(folder),
    }


def load() -> float:
    """Return how many processes wanted the cores during the last minute."""
    return round(os.getloadavg()[0], 2)


def file_system(folder: Path) -> str:
    """Name the kind of file system that `folder` lies on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    holding = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(holding, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]


def _first_value(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "0 unknown"
