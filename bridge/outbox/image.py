"""Read an outbox file without SQLite's locks: while its process runs, or where nothing can be written.

The file's format and that of its log are documented at https://www.sqlite.org/fileformat2.html.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 4096  # what SQLite makes by default
TRIES = 50  # of which one should find the process at rest between two commits
PAUSE_SECONDS = 0.01
_LOG_HEADER = struct.Struct(">8I")
_FRAME_HEADER = struct.Struct(">6I")
_NUMBER_AND_PAGES = struct.Struct(">2I")
_LITTLE_ENDIAN_LOG = 0x377F0682


class Frame(NamedTuple):
    """A page in the log: `pages` is the file's size where a commit ends with it, else 0."""

    number: int
    pages: int
    content: bytes


def log_of(path: Path) -> Path:
    """Return where SQLite keeps the log of the file at `path`."""
    return path.with_name(path.name + "-wal")


def read_image(path: Path) -> bytes:
    """Return the database at `path` as its last commit left it.

    Raises:
        OSError: it cannot be read.
    """
    file, log = read_files(path)
    image = bytearray(file)
    commit: list[Frame] = []
    for frame in valid_frames(log):
        commit.append(frame)
        if frame.pages:
            _apply(image, commit)
            commit.clear()
    image[18:20] = b"\1\1"  # nothing of it is in a log any more
    return bytes(image)


def _apply(image: bytearray, commit: list[Frame]) -> None:
    end = commit[-1].pages * PAGE_BYTES
    image.extend(bytes(max(0, end - len(image))))
    for frame in commit:
        image[(frame.number - 1) * PAGE_BYTES : frame.number * PAGE_BYTES] = frame.content
    del image[end:]


def read_files(path: Path) -> tuple[bytes, bytes]:
    """Return the file and its log as they were at one moment, unless the process never rests."""
    log = log_of(path)
    for _ in range(TRIES):
        before = stamp(path)
        content = path.read_bytes(), _read_if_there(log)
        if stamp(path) == before:
            break
        time.sleep(PAUSE_SECONDS)
    return content


def stamp(path: Path) -> list[tuple[int, int]]:
    """Return the sizes and times of the file and its log, which every write changes."""
    found = []
    for file in (path, log_of(path)):
        with contextlib.suppress(FileNotFoundError):
            stat = file.stat()
            found.append((stat.st_size, stat.st_mtime_ns))
    return found


def inode(path: Path) -> int | None:
    """Return what a name stands for, None if it stands for nothing."""
    try:
        return path.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None


def _read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def frame_places(log: bytes) -> list[tuple[int, int]]:
    """Return the number and the place of each page in a log, valid or not; those of its last use come last."""
    places = sorted((is_of_last_use(log, start), start) for start in _frame_starts(log))
    return [(int.from_bytes(log[start : start + 4]), start + _FRAME_HEADER.size) for _, start in places]


def is_of_last_use(log: bytes, place: int) -> bool:
    """Return whether a place in a log was written since its header was: what is behind that is older."""
    start = place - (place - _LOG_HEADER.size) % (_FRAME_HEADER.size + PAGE_BYTES)
    return log[start + 8 : start + 16] == log[16:24]


def has_lost_commits(path: Path) -> bool:
    """Return whether the log ends, as SQLite reads it, before a commit that was written to it."""
    log = _read_if_there(log_of(path))
    if not log:
        return False
    if len(log) < _LOG_HEADER.size or _checksum(log[:24], (0, 0), _order(log)) != _sums(log, 24):
        return True
    lost = [*_frame_starts(log)][sum(1 for _ in valid_frames(log)) :]
    return any(is_of_last_use(log, start) and any(log[start + 4 : start + 8]) for start in lost)


def valid_frames(log: bytes) -> Iterator[Frame]:
    """Yield what SQLite itself would take from a log: each frame's checksum goes on from the one before it."""
    if len(log) < _LOG_HEADER.size:
        return
    order = _order(log)
    sums = _checksum(log[:24], (0, 0), order)
    if sums != _sums(log, 24):
        return
    for start in _frame_starts(log):
        place = start + _FRAME_HEADER.size
        content = log[place : place + PAGE_BYTES]
        sums = _checksum(log[start : start + 8] + content, sums, order)
        if not is_of_last_use(log, start) or sums != _sums(log, start + 16):
            return
        number, pages = _NUMBER_AND_PAGES.unpack_from(log, start)
        yield Frame(number, pages, content)


def _frame_starts(log: bytes) -> range:
    step = _FRAME_HEADER.size + PAGE_BYTES
    return range(_LOG_HEADER.size, len(log) - step + 1, step)


def _order(log: bytes) -> str:
    return "<" if int.from_bytes(log[:4]) == _LITTLE_ENDIAN_LOG else ">"


def _sums(log: bytes, place: int) -> tuple[int, ...]:
    return struct.unpack_from(">2I", log, place)


def _checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second
