"""The folder in which one process keeps what it knows: held by a lock and readable only by its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bridge.errors import StateError
from bridge.runtime.json import BoundedDecoder, read_object

DATABASE = "outbox.db"
STATUS = "status.json"
LAST_GOOD = "last-good"
LOCK = "lock"
REQUEST_SUFFIX = ".request"
# What the name of a damaged file says: its rows are not in a new file yet, or they are.
UNSALVAGED, DAMAGED = "unsalvaged", "damaged"
REQUESTS = ("mark-retry", "drop-dead-letter")

# Who only looks whether the folder is held holds it for an instant.
LOCK_TRIES = 5
LOCK_PAUSE_SECONDS = 0.05
# The status file has room to spare, so that a full disk can still say that it is full.
STATUS_BLOCK_BYTES = 16 * 1024
# It has the whole document, of which IMDS sends far less.
MAX_STATUS_BYTES = 64 * 1024 * 1024
_decoder = BoundedDecoder(max_depth=200)


FolderStamp = tuple[int, int] | None


class StateFolder:
    """One process's folder, `state_dir/<role>`: 0700, its files 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / DATABASE
        self._lock: int | None = None
        self._last_good: int | None = None

    def acquire(self) -> None:
        """Make the folder and hold it; again is harmless.

        Raises:
            StateError: another process holds it; the text names its process id.
            OSError: the disk does not allow it.
        """
        for folder in (self.path.parent, self.path):
            _refuse_foreign_link(folder)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            with contextlib.suppress(OSError):
                self.path.chmod(0o700)
        if self._lock is None or not self._is_still_there(self._lock):
            self.release()
            self._lock = self._take()
            _sign(self._lock)

    def release(self) -> None:
        """Let another process have the folder."""
        for descriptor in (self._lock, self._last_good):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._last_good = None

    def stamp(self) -> FolderStamp:
        """Return what changes when a file in the folder is made or removed; None if the folder is gone."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def holder(self) -> str | None:
        """Return who holds the folder, None if no process does."""
        try:
            lock = open_file(self.path / LOCK, os.O_RDONLY)
        except OSError:
            return None
        try:
            _lock(lock)
        except OSError:
            return _read_holder(lock)
        else:
            return None
        finally:
            os.close(lock)

    def move_aside(self, why: str) -> Path:
        """Rename the database, so that a new one can be started; return its new place.

        Raises:
            OSError: the disk does not allow it.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        target = self.path / f"{DATABASE}.{why}-{stamp}"
        _rename(self.database, target)
        return target

    def unsalvaged(self) -> list[Path]:
        """Return the damaged files, oldest first, whose rows are in no new file yet.

        Raises:
            OSError: a move that a kill has interrupted cannot be completed.
        """
        names = {file.name for file in self.path.glob(f"{DATABASE}.{UNSALVAGED}-*")}
        found = sorted({self.path / re.sub(r"-(wal|shm)$", "", name) for name in names})
        for path in found:
            if not path.exists():  # the log was moved first
                self.database.replace(path)
        return found

    def note_salvaged(self) -> None:
        """Give the damaged files the name under which they are kept."""
        with contextlib.suppress(OSError):  # the next start does it
            for path in self.unsalvaged():
                _rename(path, self.kept_as(path))

    def kept_as(self, path: Path) -> Path:
        """Return the name under which a damaged file is kept once its rows are in a new one."""
        return path.with_name(path.name.replace(UNSALVAGED, DAMAGED))

    def request(self, action: str, number: int) -> None:
        """Ask the process that holds the folder to run a statement for a dead letter.

        Raises:
            OSError: the disk does not allow it.
        """
        # The name says it all: no owner or mode matters.
        os.close(open_file(self.path / f"{action}.{number}{REQUEST_SUFFIX}", os.O_WRONLY | os.O_CREAT))

    def requests(self) -> list[tuple[str, int]]:
        """Return what is requested."""
        found = []
        with contextlib.suppress(OSError):  # a later look finds them
            for name in (file.name.split(".") for file in self.path.glob(f"*.*{REQUEST_SUFFIX}")):
                if (
                    name[0] in REQUESTS
                    and re.fullmatch("[0-9]{1,18}", name[1])  # what SQLite takes
                    and len(name) == len(("action", "number", "request"))
                ):
                    found.append((name[0], int(name[1])))
        return found

    def forget_request(self, action: str, number: int) -> None:
        """Forget what was requested."""
        with contextlib.suppress(OSError):
            (self.path / f"{action}.{number}{REQUEST_SUFFIX}").unlink()

    def write_status(self, status: dict[str, Any]) -> None:
        """Replace what the `status` command shows.

        Raises:
            OSError: the disk does not allow it.
        """
        body = json.dumps(status).encode()
        body += b" " * (-len(body) % STATUS_BLOCK_BYTES)
        path, temporary = self.path / STATUS, self.path / f"{STATUS}.new"
        try:
            _write_private(temporary, body)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if path.stat().st_size < len(body):
                raise
            _write_private(path, body)  # over the old one, which needs no new room

    def read_status(self) -> dict[str, Any] | None:
        """Return what was last written, None if nothing readable was."""
        try:
            return self.load_status()
        except (OSError, ValueError):
            return None

    def load_status(self) -> dict[str, Any]:
        """Return what was last written.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a status.
        """
        return read_object(_read(self.path / STATUS), max_bytes=MAX_STATUS_BYTES, decoder=_decoder)

    def write_last_good(self, text: str) -> None:
        """Keep the time of the last usable answer, over the one before; a text has always the same length."""
        with contextlib.suppress(OSError):
            if self._last_good is None:
                self._last_good = open_file(self.path / LAST_GOOD, os.O_WRONLY | os.O_CREAT)
            os.lseek(self._last_good, 0, os.SEEK_SET)
            os.write(self._last_good, text.encode())

    def read_last_good(self) -> str:
        """Return what was last written, "" if nothing was."""
        try:
            return _read(self.path / LAST_GOOD).decode("ascii", "replace")
        except OSError:
            return ""

    def _take(self) -> int:
        lock = _open_lock(self.path / LOCK)
        try:
            _lock_patiently(lock)
        except OSError as error:
            holder = _read_holder(lock)
            os.close(lock)
            if not _is_held(error):
                raise
            raise StateError(
                f"{self.path} is held by {holder}: stop that process, or give this one its own state_dir"
            ) from None
        return lock

    def _is_still_there(self, lock: int) -> bool:
        """Return whether the lock is the one that other processes see: the folder may have been replaced."""
        try:
            return os.path.samestat(os.fstat(lock), (self.path / LOCK).stat())
        except FileNotFoundError:
            return False


def _rename(path: Path, target: Path) -> None:
    """Rename a database with its log; the file comes last, so that a log without a file shows an interrupted move."""
    for suffix in ("-wal", "-shm", ""):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(f"{target}{suffix}")


def open_file(path: Path, flags: int) -> int:
    """Open a file of the folder, but no symbolic link: it could lead a privileged process to any file.

    Raises:
        OSError: the file cannot be opened, or is a link.
    """
    # A pipe in the file's place must not be waited for.
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a symbolic link, which is not followed") from None
        raise


def _read(path: Path) -> bytes:
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(MAX_STATUS_BYTES + 1)


def _refuse_foreign_link(folder: Path) -> None:
    """Refuse a symbolic link that neither this user nor root has made.

    Raises:
        OSError: it is one.
    """
    if sys.platform != "win32" and folder.is_symlink() and folder.lstat().st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, f"{folder} is another user's symbolic link, which is not followed")


def _open_lock(path: Path) -> int:
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        try:
            return open_file(path, os.O_RDONLY)  # on a disk that can only be read
        except OSError:
            pass
        raise


def _lock_patiently(lock: int) -> None:
    for _ in range(LOCK_TRIES - 1):
        try:
            return _lock(lock)
        except OSError as error:
            if not _is_held(error):
                raise
            time.sleep(LOCK_PAUSE_SECONDS)
    return _lock(lock)


def _is_held(error: OSError) -> bool:
    return error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


def _sign(lock: int) -> None:
    """Write our process id over the last one's; without room for it the lock counts all the same."""
    text = f"{os.getpid()}\n".encode()
    with contextlib.suppress(OSError):
        os.lseek(lock, 0, os.SEEK_SET)
        os.write(lock, text)
        os.truncate(lock, len(text))


def _read_holder(lock: int) -> str:
    try:
        os.lseek(lock, 0, os.SEEK_SET)
        pid = os.read(lock, 32).decode("ascii", "replace").strip()
    except OSError:  # Windows lets no one read what is locked
        pid = ""
    return f"process {pid}" if pid.isdigit() else "another process"


def _write_private(path: Path, body: bytes) -> None:
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
        file.flush()
        file.truncate()


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
