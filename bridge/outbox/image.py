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


def _read_if_there(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def valid_frames(log: bytes) -> Iterator[Frame]:
    """Yield what SQLite itself would take from a log: each frame's checksum goes on from the one before it."""
    if len(log) < _LOG_HEADER.size:
        return
    magic, _, page_bytes, _, *salts, first, second = _LOG_HEADER.unpack_from(log)
    order = "<" if magic == _LITTLE_ENDIAN_LOG else ">"
    sums = _checksum(log[:24], (0, 0), order)
    if sums != (first, second) or page_bytes != PAGE_BYTES:
        return
    for number, pages, *salt, first, second, content in frames(log):
        head = struct.pack(">2I", number, pages)
        sums = _checksum(head + content, sums, order)
        if salt != salts or sums != (first, second):
            return
        yield Frame(number, pages, content)


def frames(log: bytes) -> Iterator[tuple[int, int, int, int, int, int, bytes]]:
    """Yield each frame with its header, valid or not."""
    step = _FRAME_HEADER.size + PAGE_BYTES
    for start in range(_LOG_HEADER.size, len(log) - step + 1, step):
        yield *_FRAME_HEADER.unpack_from(log, start), log[start + _FRAME_HEADER.size : start + step]


def _checksum(content: bytes, sums: tuple[int, int], order: str) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(content) // 4}I", content)
    for index in range(0, len(words), 2):
        first = (first + words[index] + second) & 0xFFFFFFFF
        second = (second + words[index + 1] + first) & 0xFFFFFFFF
    return first, second
