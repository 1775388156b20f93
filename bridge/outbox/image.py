"""The log beside an outbox file: what SQLite would leave out of it, and a copy that can be read without locks.

The formats are documented at https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import time
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

PAGE_BYTES = 4096  # what SQLite makes by default
TRIES = 50  # of which one should find that the log does not begin again meanwhile
PAUSE_SECONDS = 0.01
CHECKED_LOG_BYTES = 64 * 1024 * 1024
# In memory where there is such a folder: the disk of the outbox may be full.
_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - a folder that only its owner can read is made in it
_LOG_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_LITTLE_ENDIAN_LOG, _BIG_ENDIAN_LOG = 0x377F0682, 0x377F0683


def log_of(path: Path) -> Path:
    """Return where SQLite keeps the log of the file at `path`."""
    return path.with_name(path.name + "-wal")


def log_bytes(path: Path) -> int:
    """Return the size of the log of the file at `path`, 0 if there is none."""
    try:
        return log_of(path).stat().st_size
    except OSError:
        return 0


def read_log(path: Path, *, max_bytes: int = -1) -> bytes:
    """Return the log of the file at `path`, nothing if there is none."""
    try:
        with log_of(path).open("rb") as log:
            return log.read(max_bytes)
    except FileNotFoundError:
        return b""


def read_image(path: Path) -> bytes:
    """Return the database at `path` as its last commit left it, also while a process writes to it.

    Raises:
        OSError: it cannot be read or copied, or is written to all the time.
        sqlite3.Error: it is damaged.
    """
    with _temporary_folder() as folder:
        copy = Path(folder) / path.name
        _copy(path, copy)
        with closing(sqlite3.connect(copy)) as database:
            database.execute("PRAGMA journal_mode = DELETE")
        return copy.read_bytes()


def has_lost_commits(path: Path) -> bool:
    """Return whether the log ends, as SQLite reads it, before a commit that was written to it.

    A huge log is not read: a huge transaction that was not completed has left it.
    """
    log = read_log(path) if log_bytes(path) < CHECKED_LOG_BYTES else b""
    if not log:
        return False
    if path.stat().st_size < PAGE_BYTES or not _is_header_valid(log):
        return True
    if not all(is_of_last_use(log, start) for start in frame_starts(log)):
        return True  # a log is used once: its database empties it before it begins again
    commits = [
        number for number, start in enumerate(frame_starts(log), start=1) if any(log[start + 4 : start + 8])
    ]
    try:
        return bool(commits) and commits[-1] > _recovered_frames(path, log)
    except (OSError, sqlite3.OperationalError):
        return False  # there is no room for the copy, and a start does not depend on it


def _recovered_frames(path: Path, log: bytes) -> int:
    """Return how many frames of a log SQLite uses: it is asked on a copy, because it deletes what it has used."""
    with _temporary_folder() as folder:
        copy = Path(folder) / path.name
        with path.open("rb") as file:
            copy.write_bytes(file.read(PAGE_BYTES))
        os.truncate(copy, path.stat().st_size)  # SQLite refuses a log that is short for what the file lacks
        log_of(copy).write_bytes(log)
        with closing(sqlite3.connect(copy)) as database:
            return int(database.execute("PRAGMA wal_checkpoint").fetchone()[1])


def _temporary_folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory(dir=_MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None)


def _copy(path: Path, target: Path) -> None:
    """Copy the file and then its log, which has all that was written meanwhile, unless it began again."""
    for _ in range(TRIES):
        before = read_log(path)[:_LOG_HEADER_BYTES]
        shutil.copyfile(path, target)
        log_of(target).write_bytes(read_log(path))
        if read_log(path)[:_LOG_HEADER_BYTES] == before:
            return
        time.sleep(PAUSE_SECONDS)
    raise OSError("the process writes to it all the time")


def frame_starts(log: bytes) -> range:
    """Return where the frames of a log are, each a header and a page."""
    step = _FRAME_HEADER_BYTES + PAGE_BYTES
    return range(_LOG_HEADER_BYTES, len(log) - step + 1, step)


def frame_places(log: bytes) -> list[tuple[int, int]]:
    """Return the number and the place of each page in a log, valid or not; those of its last use come last."""
    places = sorted((is_of_last_use(log, start), start) for start in frame_starts(log))
    return [(int.from_bytes(log[start : start + 4]), start + _FRAME_HEADER_BYTES) for _, start in places]


def is_of_last_use(log: bytes, place: int) -> bool:
    """Return whether a place in a log was written since its header was: what is behind that is older."""
    start = place - (place - _LOG_HEADER_BYTES) % (_FRAME_HEADER_BYTES + PAGE_BYTES)
    return log[start + 8 : start + 16] == log[16:24]


def _is_header_valid(log: bytes) -> bool:
    """Return whether the header of a log has the first number and the checksum that its format demands."""
    if len(log) < _LOG_HEADER_BYTES or int.from_bytes(log[:4]) not in (_LITTLE_ENDIAN_LOG, _BIG_ENDIAN_LOG):
        return False  # without a look at the number, a header of zeros would be valid
    order = "<" if int.from_bytes(log[:4]) == _LITTLE_ENDIAN_LOG else ">"
    words = struct.unpack(f"{order}6I", log[:24])
    first = second = 0
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return struct.pack(">2I", first, second) == log[24:_LOG_HEADER_BYTES]
