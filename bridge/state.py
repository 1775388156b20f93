"""The folder in which one process keeps what it knows: held by a lock, readable by nobody else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from bridge.errors import StateError

DATABASE = "outbox.db"
STATUS = "status.json"
LOCK = "lock"


class StateFolder:
    """One process's folder, `state_dir/<role>`: 0700, its files 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / DATABASE
        self._lock: IO[str] | None = None

    def acquire(self) -> None:
        """Make the folder and hold it; again is harmless.

        Raises:
            StateError: another process holds it; the text names its process id.
            OSError: the disk does not allow it.
        """
        if self._lock:
            return
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _open_private(self.path / LOCK)
        try:
            _lock(file)
        except OSError as error:
            holder = _read_holder(file)
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                raise
            raise StateError(
                f"{self.path} is held by {holder}: stop that process, or give this one its own state_dir"
            ) from None
        self._lock = file
        with contextlib.suppress(OSError):  # the lock counts; on a full disk it stays without a name
            file.seek(0)
            file.truncate()
            file.write(f"{os.getpid()}\n")
            file.flush()

    def release(self) -> None:
        """Let another process have the folder."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def holder(self) -> str | None:
        """Tell who holds the folder, None if nobody does."""
        try:
            file = (self.path / LOCK).open("r+", encoding="utf-8")
        except OSError:
            return None
        with file:
            try:
                _lock(file)
            except OSError:
                return _read_holder(file)
        return None

    def set_aside(self, why: str) -> Path:
        """Rename the database, so that a new one can be begun; return its new place."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        target = self.path / f"{DATABASE}.{why}-{stamp}"
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                (self.path / f"{DATABASE}{suffix}").replace(f"{target}{suffix}")
        return target

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace what the `status` command shows.

        Raises:
            OSError: the disk does not allow it.
        """
        temporary = self.path / f"{STATUS}.new"
        with _open_private(temporary) as file:
            file.truncate()
            json.dump(status, file)
        temporary.replace(self.path / STATUS)

    def read_status(self) -> dict[str, Any] | None:
        """Return what was last written, None if nothing readable was."""
        try:
            status = json.loads((self.path / STATUS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return status if isinstance(status, dict) else None


def _open_private(path: Path) -> IO[str]:
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+", encoding="utf-8")


def _read_holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        pid = file.read(32).strip()
    except OSError:  # Windows lets nobody read what is locked
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[str]) -> None:
        # Beyond the text, so that others can read who holds it.
        file.seek(4096)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
