"""The real process, and what measurements ask of it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.bench.measure import BenchError, memory_mib
from tests.bench.simulators import Remote
from tests.support.process import Forward, wait_until

REAL_POLL_SECONDS = 0.2  # the shortest that a configuration may ask for
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


def settings(
    imds: Remote, inbox: Remote, *, poll_seconds: float = REAL_POLL_SECONDS, **more: Any
) -> Mapping[str, Any]:
    """Return settings with one webhook sink, and more tables."""
    sink = {"kind": "webhook", "url": inbox("hook_url", "/hook")}
    return {
        "imds": {"endpoint": imds("base_url"), "poll_seconds": poll_seconds},
        "sinks": {"bench": sink},
        **more,
    }


def bare_imports_mib(imports: str) -> float:
    """Return the RSS of a process that imports and does nothing else."""
    code = f"{imports}; print(open('/proc/self/statm').read().split()[1])"
    return int(subprocess.check_output([sys.executable, "-c", code], timeout=20)) * PAGE_BYTES / 2**20
