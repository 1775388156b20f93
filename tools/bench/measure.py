"""What every row uses: its fields, statistics, pacing, memory, and facts about the machine."""

from __future__ import annotations

import multiprocessing
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.support.usage import KIB

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `limit` is None for a figure that is shown for comparison only; `at_least` makes it a lower limit. `measured`
    is None if nothing could be measured, and `how` then says why.
    """

    name: str
    measured: float | None
    unit: str
    how: str
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None if there is none, or nothing was measured."""
        if self.limit is None or self.measured is None:
            return None
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


class BenchError(Exception):
    """Something could not be measured."""


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value below which so many of a hundred are."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def apart(function: Callable[[Task], Result], task: Task, *, limit_seconds: float) -> Result:
    """Call a module's function in a new process, so that nothing else uses its memory, CPU or interpreter lock.

    Raises:
        multiprocessing.TimeoutError: it took longer than `limit_seconds` and a little.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, (task,)).get(limit_seconds + 30)


def paced(count: int, every_seconds: float) -> Iterator[int]:
    """Count up to `count` on a schedule; a late turn is not skipped, and the next ones do not catch up."""
    due = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, due - time.monotonic()))
        yield number
        due = max(due + every_seconds, time.monotonic())


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


def machine(folder: Path) -> dict[str, Any]:
    """Describe the machine, without its name."""
    return {
        "cores": os.cpu_count(),
        "cpu": _first_value("/proc/cpuinfo", "model name"),
        "memory_mib": round(int(_first_value("/proc/meminfo", "MemTotal").split()[0]) / KIB),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "sqlite": sqlite3.sqlite_version,
        "file_system": subprocess.check_output(
            ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", folder],  # noqa: S607
            text=True,
        ).strip(),
        "load": round(os.getloadavg()[0], 2),
    }


def _first_value(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return "0 unknown"
