"""One real process: started again when it exits, as a supervisor does, and limited or measured from outside."""

from __future__ import annotations

import resource
import struct
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from tests.support.disk import SmallDisk
from tests.support.process import Forward
from tests.support.usage import Usage, usage
from tools.soak.truth import Span


class Member:
    """One real process, which is started again whenever it exits."""

    def __init__(self, process: Forward, name: str, clock: Path, disk: SmallDisk | None) -> None:
        self.name = name
        self.process = process
        self.disk = disk
        self.may_exit = False  # it has had too little memory
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.problems: list[str] = []
        self._clock = clock
        self._is_wanted = False
        self._lock = threading.RLock()
        self.set_clock(0)

    @property
    def pid(self) -> int:
        """Return the id of the process that runs now, or ran last."""
        assert self.process.process is not None
        return self.process.process.pid

    def start(self) -> None:
        """Start it, and from now on again when it exits."""
        with self._lock:
            self._is_wanted, self.may_exit = True, False
            self.starts.append(time.monotonic())
            self.process.start()

    def kill(self) -> None:
        """End it by SIGKILL."""
        with self._lock:
            self._is_wanted = False
            self.process.kill()
            self.ends.append(time.monotonic())

    def restart(self) -> None:
        """Stop it in order, and start it again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it by SIGTERM."""
        with self._lock:
            self._is_wanted = False
            with suppress(subprocess.TimeoutExpired):
                code = self.process.stop()
                self.ends.append(time.monotonic())
                if code == 0:
                    return
            self.problems.append(f"{self.name} does not stop")

    def supervise(self) -> None:
        """Start it again if it has exited."""
        with self._lock:
            running = self.process.process
            if self._is_wanted and running is not None and (code := running.poll()) is not None:
                self.ends.append(time.monotonic())
                if not self.may_exit:
                    self.problems.append(f"{self.name} exited with {code}")
                self.start()

    def set_clock(self, seconds: int) -> None:
        """Let its wall clock be wrong by so much."""
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))

    def limit(self, what: int, most: int | None) -> None:
        """Set a limit of the system for it, such as RLIMIT_FSIZE; None for no limit."""
        with suppress(ProcessLookupError):  # it has exited
            _, hard = resource.prlimit(self.pid, what)
            resource.prlimit(self.pid, what, (hard if most is None else most, hard))

    def usage(self) -> Usage:
        """Return what it holds now."""
        return usage(self.pid)

    def is_settled(self) -> bool:
        """Return whether it has written to its file and delivered everything."""
        status = self.process.current_status()
        return bool(status) and not status["storage_error"] and not self.process.backlog()

    def runs(self) -> list[Span]:
        """Return when it ran."""
        return [Span(start=start, end=end) for start, end in zip(self.starts, self.ends, strict=False)]
