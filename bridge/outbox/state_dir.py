"""The folder in which one process keeps what it knows: held by a lock and readable only by its owner."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile

from bridge.contract.status import Status, from_json, to_json
from bridge.outbox.lock import FolderLock
from bridge.runtime.json import BoundedDecoder, Json, read_object

DATABASE = "outbox.db"
STATUS = "status.json"
# Files that are written in place, which a full disk allows: the time of the last usable answer, and numbers of
# events: the last one given, and the last one that must not be missing.
LAST_GOOD, LAST_NUMBER = "last-good", "last-number"
# What only memory knows of the state, compressed, is written in place as well; a document of 5,000 events has room.
KEPT, KEPT_BYTES = "kept-state", 512 * 1024
# A larger number is damage; SQLite has room for as many again.
MAX_NUMBER = 2**62
# What the name of a damaged file says: its rows are not in a new file yet, or they are.
DAMAGED_FILE, SALVAGED_FILE = "damaged", "salvaged"
OTHER_VM_FILE = "other-vm"

# The status file has room to spare, so that a full disk can still say that it is full.
STATUS_BLOCK_BYTES = 16 * 1024
# It has the whole document, of which IMDS sends far less.
MAX_STATUS_BYTES = 64 * 1024 * 1024
# As much as the changes of a large document need, with the log's pages.
TRIAL_BYTES = 1024 * 1024
_decoder = BoundedDecoder(max_depth=200)
_BINARY = getattr(os, "O_BINARY", 0)  # Windows changes line ends otherwise


class StateFolder:
    """One process's folder, `state_dir/<role>`: 0700, its files 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = path / DATABASE
        self.moved_to = self.database  # where the database was moved last
        self._lock = FolderLock(path)
        self._files: dict[str, int] = {}  # those that are written in place
        self._numbers: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Make the folder and hold it; again is harmless.

        Raises:
            StateError: another process holds it; the text names its process id.
            OSError: the disk does not allow it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & 0o077:
            with contextlib.suppress(OSError):
                self.path.chmod(0o700)
        if not self._lock.is_held():
            self.release()
            self._lock.take()

    def release(self) -> None:
        """Let another process have the folder."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        self._lock.release()
        self._numbers = None

    def owner(self) -> str | None:
        """Return who holds the folder, None if no process does; who may not read the lock does not know."""
        return self._lock.owner()

    def move_aside(self, why: str) -> Path:
        """Rename the database, so that a new one can be started; return its new place.

        Raises:
            OSError: the disk does not allow it.
        """
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        self.moved_to = self.path / f"{DATABASE}.{why}-{stamp}"
        _rename(self.database, self.moved_to)
        return self.moved_to

    def damaged(self) -> list[Path]:
        """Return the files that were moved aside as damaged, oldest first, whose rows are in no new file yet."""
        return sorted(self.path.glob(f"{DATABASE}.{DAMAGED_FILE}-*[0-9]"))  # without their logs

    def note_salvaged(self) -> None:
        """Give the damaged files the name under which they are kept."""
        for path in self.damaged():
            with contextlib.suppress(OSError):
                _rename(path, path.with_name(path.name.replace(DAMAGED_FILE, SALVAGED_FILE)))

    def write_status(self, status: Status) -> None:
        """Replace what the `status` command shows.

        Raises:
            OSError: the disk does not allow it.
        """
        body = json.dumps(status, default=to_json).encode()
        body += b" " * (-len(body) % STATUS_BLOCK_BYTES)
        path, temporary = self.path / STATUS, self.path / f"{STATUS}.new"
        try:
            temporary.write_bytes(body)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if path.stat().st_size < len(body):
                raise
            with path.open("r+b") as file:  # over the old one, which needs no new room
                file.write(body)
                file.truncate()

    def read_status(self) -> Status | None:
        """Return what was last written, None if nothing readable was."""
        try:
            return self.load_status()
        except (OSError, ValueError):
            return None

    def load_status(self) -> Status:
        """Return what was last written, by a process of any version.

        Raises:
            OSError: it cannot be read.
            ValueError: it is not a status.
        """
        body = (self.path / STATUS).read_bytes()
        return from_json(read_object(body, max_bytes=MAX_STATUS_BYTES, decoder=_decoder), self.path.name)

    def write_last_good(self, text: str) -> None:
        """Keep the time of the last usable answer; a text has always the same length."""
        self._write_in_place(LAST_GOOD, text.encode())

    def keep(self, values: Mapping[str, Json]) -> None:
        """Keep what only memory knows in place, if the file has room for it; without values, make room for it."""
        packed = zlib.compress(json.dumps(values).encode())
        if len(self._read(KEPT)) != KEPT_BYTES:
            packed = packed.ljust(KEPT_BYTES, b"\0")
        if len(packed) <= KEPT_BYTES:
            self._write_in_place(KEPT, packed)

    def read_kept(self) -> dict[str, Json]:
        """Return what was kept, empty if nothing was or it is damaged."""
        with contextlib.suppress(ValueError, zlib.error):
            kept: dict[str, Json] = json.loads(zlib.decompressobj().decompress(self._read(KEPT)))
            return kept
        return {}

    def forget(self) -> None:
        """Forget the time, the numbers and the status, which are another VM's."""
        self.write_last_good(" " * len("2026-01-01T00:00:00.000Z"))
        self.write_numbers(0, 0)
        self.keep({})
        with contextlib.suppress(OSError):
            (self.path / STATUS).unlink()

    def read_last_good(self) -> str:
        """Return what was last written, "" if nothing was."""
        return self._read_text(LAST_GOOD)

    def write_numbers(self, given: int, needed: int) -> None:
        """Keep the last number that was given, and the last one that the next start must find in the database."""
        if (given, needed) != self._numbers and self._write_in_place(
            LAST_NUMBER, f"{given:020d} {needed:020d}".encode()
        ):
            self._numbers = (given, needed)

    def read_numbers(self) -> tuple[int, int]:
        """Return what was last written, zeros if nothing was; a damaged number is needed, but was never given."""
        found = re.fullmatch("([0-9]{20}) ([0-9]{20})", self._read_text(LAST_NUMBER))
        given, needed = map(int, found.groups()) if found else (0, 0)
        return (given, needed) if given <= MAX_NUMBER else (0, given)

    def is_in_use(self) -> bool:
        """Return whether another program keeps the database from being opened, as Windows allows it."""
        try:
            os.close(os.open(self.database, os.O_RDWR))
        except OSError:
            return self.database.exists()
        return False

    def is_of_newer_format(self) -> bool:
        """Return whether the database's header forbids SQLite to write; it can be refused for other reasons, too."""
        with contextlib.suppress(OSError), self.database.open("rb") as file:
            return file.read(19)[18:] > b"\2"
        return False

    def is_emptied(self) -> bool:
        """Return whether a process has run here, and neither the database nor the numbers are left."""
        if any(self.read_numbers()) or (self.database.exists() and self.database.stat().st_size):
            return False
        return (self.path / STATUS).exists() or bool(self.read_last_good())

    def _write_in_place(self, name: str, body: bytes) -> bool:
        try:
            if name not in self._files:
                self._files[name] = os.open(self.path / name, os.O_WRONLY | os.O_CREAT | _BINARY, 0o600)
            os.lseek(self._files[name], 0, os.SEEK_SET)
            os.write(self._files[name], body)
        except OSError:
            return False
        return True

    def _read_text(self, name: str) -> str:
        return self._read(name).decode("ascii", "replace").strip()

    def _read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError:
            return b""


def try_to_write(folder: Path) -> None:
    """Write what needs as much new room as a notice, and wait for the disk; nothing of it stays.

    SQLite overwrites its log, and so it notices a full disk only when it needs more of it.

    Raises:
        OSError: there is no such room, or the disk does not work.
    """
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < 2 * TRIAL_BYTES:  # meanwhile, as much is left for a notice
        raise OSError(errno.ENOSPC, f"only {disk.free // 1024} KiB are free, expected {TRIAL_BYTES // 512}")
    with TemporaryFile(dir=folder) as file:
        file.write(bytes(TRIAL_BYTES))
        file.truncate(0)  # the file system had the room; to write it all to the disk would wear it out
        file.seek(0)
        file.write(b"\n")
        file.flush()
        os.fsync(file)


def _rename(path: Path, target: Path) -> None:
    """Rename a database with its log, or nothing: without its log it lacks what was committed last.

    The file comes last, so that a log without a file shows an interrupted move.

    Raises:
        OSError: the disk does not allow it, or another program uses one of them.
    """
    with contextlib.ExitStack() as undo:
        for suffix in ("-wal", "-shm", ""):
            one, renamed = path.with_name(path.name + suffix), target.with_name(target.name + suffix)
            with contextlib.suppress(FileNotFoundError):
                one.replace(renamed)
                undo.callback(renamed.replace, one)
        undo.pop_all()
