"""A program's processes, and who may change a file, by what POSIX has for it."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    APART: dict[str, Any] = {"cwd": "/", "start_new_session": True}
    """How a program is started that is to be the first of a group."""

    class Group:
        """A program in a session of its own, whose processes get its signals."""

        def __init__(self, process: subprocess.Popen[bytes]) -> None:
            self.process = process

        def ask(self) -> None:
            """Ask every process to end."""
            self._signal(signal.SIGTERM)

        def end(self) -> None:
            """End every process."""
            self._signal(signal.SIGKILL)

        def close(self) -> None:
            """End what is left."""
            self.end()

        def _signal(self, number: signal.Signals) -> None:
            with contextlib.suppress(OSError):  # it has ended, or has changed its user
                os.killpg(self.process.pid, number)

    def may_anyone_change(path: Path, *, is_ancestor: bool) -> bool:  # noqa: ARG001 - what Windows distinguishes
        """Return whether any user may write a file, or put another one into a folder."""
        mode = path.stat().st_mode
        return bool(mode & stat.S_IWOTH) and not (path.is_dir() and mode & stat.S_ISVTX)
