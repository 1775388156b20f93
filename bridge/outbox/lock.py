"""The lock by which one process holds its state folder; who asks learns the process id."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from bridge.errors import StateError

LOCK = "lock"
# Who only looks whether the folder is held holds it for an instant.
LOCK_TRIES = 5
LOCK_PAUSE_SECONDS = 0.05


class FolderLock:
    """The lock of the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def take(self) -> None:
        """Hold the folder, which this process does not hold.

        Raises:
            StateError: another process holds it; the text names its process id.
            OSError: the disk does not allow it.
        """
        self._lock = self._take()
        with contextlib.suppress(OSError):  # without room for it the lock counts all the same
            os.lseek(self._lock, 0, os.SEEK_SET)
            os.write(self._lock, f"{f'{os.getpid()} {_pid_namespace()}':<20}".encode())

    def release(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def is_held(self) -> bool:
        """Return whether ours is the lock that other processes see: the folder may have been replaced."""
        try:
            return self._lock is not None and os.path.samestat(
                os.fstat(self._lock), (self.path / LOCK).stat()
            )
        except FileNotFoundError:
            return False

    def owner(self) -> str | None:
        """Return who holds the folder, None if no process does; who may not read the lock does not know."""
        try:
            lock = os.open(self.path / LOCK, os.O_RDONLY)
        except PermissionError:
            return "a process whose lock this user may not read"
        except OSError:
            return None
        try:
            _lock(lock)
            return None  # noqa: TRY300 - nobody else held it
        except OSError:
            return _read_owner(lock)
        finally:
            os.close(lock)

    def _take(self) -> int:
        path = self.path / LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            if not path.exists():
                raise
            lock = os.open(path, os.O_RDONLY)  # on a disk that can only be read
        for _ in range(LOCK_TRIES):
            with contextlib.suppress(BlockingIOError, PermissionError):
                _lock(lock)
                return lock
            time.sleep(LOCK_PAUSE_SECONDS)
        owner = _read_owner(lock)
        os.close(lock)
        raise StateError(
            f"{self.path} is held by {owner}: stop that process, or give this one its own state_dir"
        )


def _read_owner(lock: int) -> str:
    try:
        os.lseek(lock, 0, os.SEEK_SET)
        pid, _, namespace = os.read(lock, 32).decode("ascii", "replace").strip().partition(" ")
    except OSError:  # Windows lets no one read what is locked
        pid = namespace = ""
    if not pid.isdigit():
        return "another process"
    is_near = namespace in ("", _pid_namespace())  # the version before wrote none
    return f"process {pid}" if is_near else f"process {pid} of another container (PID namespace)"


def _pid_namespace() -> str:
    """Return a number that processes share whose process ids can be compared, "" where there is none."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    return ""


if sys.platform == "win32":
    import msvcrt

    def _lock(lock: int) -> None:
        # Beyond the text, so that others can read who holds it.
        os.lseek(lock, 4096, os.SEEK_SET)
        msvcrt.locking(lock, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(lock: int) -> None:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
