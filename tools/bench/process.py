"""The real process, and what measurements ask of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

from tests.support.process import Forward, wait_until
from tests.support.usage import memory_mib
from tools.bench.measure import BenchError, Row
from tools.bench.simulators import VM, Remote

REAL_POLL_SECONDS = 0.2  # the shortest that a configuration may ask for
BARE_RUNS = 5
PAGE_BYTES = resource.getpagesize()
INSTALLED = (str(Path(sys.executable).with_name("imds-bridge")),)


class Bridge(Forward):
    """The installed command, or another one that takes its arguments."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        role: Literal["forward", "listen", "relay"] = "forward",
        command: Sequence[str] = INSTALLED,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Name its files, as Forward does."""
        # An installed program is compiled, too.
        super().__init__(folder, settings, role=role, env={"PYTHONDONTWRITEBYTECODE": "", **(env or {})})
        self._command = [*command, role, "--config", str(self.config)]

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        assert self.process is not None
        return self.process.pid

    def until(
        self, reached: Callable[[], object], *, limit_seconds: float = 20, apart_seconds: float = 0.1
    ) -> None:
        """Wait until something holds; fail if that takes too long, or the process ends."""

        def reached_alive() -> object:
            self.check_alive()
            return reached()

        wait_until(
            reached_alive, timeout_seconds=limit_seconds, describe=lambda: self, apart_seconds=apart_seconds
        )

    def check_alive(self) -> None:
        """Raise BenchError if the process has ended."""
        if self.process is None or self.process.poll() is not None:
            raise BenchError(f"it has ended: {self!r}")

    def memory(self) -> tuple[float, float]:
        """Return what is resident now, and the most that was, in MiB."""
        self.check_alive()
        return memory_mib("VmRSS", self.pid), memory_mib("VmHWM", self.pid)


def settings(imds: Remote, inbox: Remote, *, poll_seconds: float = REAL_POLL_SECONDS) -> Mapping[str, Any]:
    """Return settings with one webhook sink."""
    return {
        "imds": {"endpoint": imds("url", VM), "poll_seconds": poll_seconds},
        "sinks": {"bench": {"kind": "webhook", "url": inbox("base_url") + "/hook"}},
    }


def bare_mib(what: str, code: str) -> Row:
    """Measure processes that only import, or run other code."""
    command = [sys.executable, "-c", f"{code}; print(open('/proc/self/statm').read().split()[1])"]
    sizes = [int(subprocess.check_output(command, timeout=20)) * PAGE_BYTES / 2**20 for _ in range(BARE_RUNS)]
    how = f"median of {BARE_RUNS} processes that do nothing else"
    return Row(f"  beside it: {what}, RSS", median(sizes), "MiB", how)
