"""Find rows in the bytes of a damaged file and its log, wherever they are; a row's checksum proves that it is one.

Only SQLite's format of a record is needed, not its pages' headers, which may be damaged:
https://www.sqlite.org/fileformat2.html#record_format.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from bridge.outbox.image import CHECKED_LOG_BYTES, PAGE_BYTES, frame_places, is_of_last_use, read_log
from bridge.outbox.rows import DEAD_LETTER_UNCHECKED, verified
from bridge.outbox.sqlite import Damaged

Row = tuple[Any, ...]

BLOCK_BYTES = 1024 * 1024  # of the file are searched at a time

# How a record begins: the length of its header, then a code for each column.
_HEADER_LENGTH = rb"[\x04-\x28]"
_KEY = rb"\x00"  # a number that SQLite keeps before the record
_TEXT = _BLOB = rb"(?:[\x0c-\x7f]|[\x80-\xff]{1,3}[\x00-\x7f])"
_INTEGER = rb"[\x01-\x06\x08\x09]"
_REAL = rb"[\x01-\x09]"
_COLUMNS = {
    "meta": (_TEXT, _TEXT, _INTEGER),
    "done": (_TEXT, _INTEGER, _INTEGER, _INTEGER),
    "event": (_KEY, _TEXT, _TEXT, _REAL, _BLOB, _INTEGER),
    "occurrence": (_TEXT, _INTEGER, _REAL, _INTEGER),
    "record": (_TEXT, _TEXT, _TEXT, _REAL, _INTEGER),
    "dead_letter": (_KEY, _INTEGER, *[_TEXT] * 5, _REAL, rb"(?:\x00|" + _BLOB + rb")", _INTEGER),
}
_PATTERNS = {
    table: re.compile(_HEADER_LENGTH + rb"(?=" + b"".join(columns) + rb")", re.DOTALL)
    for table, columns in _COLUMNS.items()
}
# Of several versions of a row, the one with the greatest of these values is the newest.
_VERSIONS: Mapping[str, Callable[[Row], Any]] = {
    "occurrence": lambda row: row[1],
    "record": lambda row: row[3],
    "dead_letter": lambda row: (row[1], row[7]),
}
_INTEGER_BYTES = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)
_REAL_CODE, _ONE_CODE, _BLOB_CODE, _TEXT_CODE = 7, 9, 12, 13
# The format's rule for how much of a long record is in its own page; a chain of pages has the rest.
_LOCAL_MAX = PAGE_BYTES - 35
_LOCAL_MIN = (PAGE_BYTES - 12) * 32 // 255 - 23
_CHAINED_BYTES = PAGE_BYTES - 4
_KEY_BYTES = 13  # the longest numbers of a record's length and key


def salvage(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield every row that can be found, with its table; of several versions of a row, the newest comes last.

    Only the places and versions are kept in memory, not the rows.

    Raises:
        OSError: the file cannot be opened.
    """
    newest: dict[tuple[str, Any], Any] = {}
    with path.open("rb", buffering=0) as file:
        content = _Content(file, read_log(path, max_bytes=CHECKED_LOG_BYTES))
        for table, place in _candidates(content):
            row = _read_row(table, content, place)
            if row is None:
                continue
            if table in _VERSIONS:
                key, version = (table, row[:2] if table == "record" else row[0]), _VERSIONS[table](row)
                if version < newest.setdefault(key, version):
                    continue
                newest[key] = version
            yield table, row


class _Content:
    """The bytes of a file, and behind them those of its log; what the disk cannot read is zeros."""

    def __init__(self, file: FileIO, log: bytes) -> None:
        self.log = log
        self.file_bytes = os.fstat(file.fileno()).st_size
        self._file = file
        self._block, self._block_start = b"", 0
        places = frame_places(log)
        self._in_log = {number: self.file_bytes + place for number, place in places}

    def blocks(self) -> Iterator[tuple[int, bytes]]:
        """Yield the file in blocks with their places; each goes on into the next by the length of a header."""
        for start in range(0, self.file_bytes, BLOCK_BYTES):
            self._block = b"".join(
                self._read_page(place, min(PAGE_BYTES, self.file_bytes - place))
                for place in range(start, min(start + BLOCK_BYTES + PAGE_BYTES, self.file_bytes), PAGE_BYTES)
            )
            self._block_start = start
            yield start, self._block

    def read(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes, fewer at the end of the file or its log."""
        if start >= self.file_bytes:
            return self.log[start - self.file_bytes : start - self.file_bytes + size]
        first = start - self._block_start
        if first >= 0 and first + size <= len(self._block):
            return self._block[first : first + size]
        return self._read_page(start, min(size, self.file_bytes - start))

    def page(self, number: int, *, is_in_log: bool) -> int:
        """Return the place of a page, in the log if it is there and wanted.

        Raises:
            LookupError: there is no such page.
        """
        if is_in_log and number in self._in_log:
            return self._in_log[number]
        place = (number - 1) * PAGE_BYTES
        if not 0 <= place < self.file_bytes:
            raise LookupError("there is no such page")
        return place

    def _read_page(self, start: int, size: int) -> bytes:
        try:
            self._file.seek(start)
            return os.read(self._file.fileno(), size)
        except OSError:
            return bytes(size)


def _candidates(content: _Content) -> Iterator[tuple[str, int]]:
    """Yield where rows may begin, those of the newest versions last."""
    yield from _candidates_in_log(content, is_last_use=False)
    for start, block in content.blocks():
        for table, pattern in _PATTERNS.items():
            for match in pattern.finditer(block):
                if match.start() < BLOCK_BYTES:
                    yield table, start + match.start()
    yield from _candidates_in_log(content, is_last_use=True)


def _candidates_in_log(content: _Content, *, is_last_use: bool) -> Iterator[tuple[str, int]]:
    for table, pattern in _PATTERNS.items():
        for match in pattern.finditer(content.log):
            if is_of_last_use(content.log, match.start()) == is_last_use:
                yield table, content.file_bytes + match.start()


def _read_row(table: str, content: _Content, place: int) -> Row | None:
    """Return the row at a place, None if it only looks like one."""
    skip = DEAD_LETTER_UNCHECKED if table == "dead_letter" else 0
    for is_in_log in (True, False):
        with suppress(Damaged, ValueError, LookupError, struct.error):
            return verified(_decode(table, content, place, is_in_log=is_in_log), skip=skip)
    return None


def _decode(table: str, content: _Content, start: int, *, is_in_log: bool) -> Row:
    """Read the record at `start`.

    Raises:
        ValueError, LookupError, struct.error: there is none.
    """
    header_bytes = content.read(start, 1)[0]
    codes = _numbers(content.read(start + 1, header_bytes - 1))
    if len(codes) != len(_COLUMNS[table]):
        raise ValueError("it has other columns")
    sizes = [_size(code) for code in codes]
    total = header_bytes + sum(sizes)
    payload = _payload(content, start, total, is_in_log=is_in_log)
    values: list[Any] = []
    place = header_bytes
    for kind, code, size in zip(_COLUMNS[table], codes, sizes, strict=True):
        value = _value(code, payload[place : place + size])
        values.append(float(value) if kind is _REAL else value)
        place += size
    if _COLUMNS[table][0] is _KEY:
        before = min(start, _KEY_BYTES)
        values[0] = _key_in(content.read(start - before, before), total)
    return tuple(values)


def _payload(content: _Content, start: int, total: int, *, is_in_log: bool) -> bytes:
    """Return a record, whose end may be in other pages."""
    if total <= _LOCAL_MAX:
        return content.read(start, total)
    local = _LOCAL_MIN + (total - _LOCAL_MIN) % _CHAINED_BYTES
    if local > _LOCAL_MAX:
        local = _LOCAL_MIN
    parts = [content.read(start, local)]
    place, left = start + local, total - local
    chain: set[int] = set()
    while left > 0:
        place = content.page(struct.unpack(">I", content.read(place, 4))[0], is_in_log=is_in_log)
        if place in chain:
            raise ValueError("its pages are a circle")
        chain.add(place)
        parts.append(content.read(place + 4, min(left, _CHAINED_BYTES)))
        left -= _CHAINED_BYTES
    return b"".join(parts)


def _key_in(before: bytes, total: int) -> int:
    """Return the number that stands between the record's length and the record."""
    for length in range(2, len(before) + 1):
        numbers = _numbers(before[-length:])
        if len(numbers) == 2 and numbers[0] == total:  # noqa: PLR2004 - the length and the key
            return numbers[1]
    raise ValueError("its number is not there")


def _numbers(content: bytes) -> list[int]:
    """Read numbers of variable length: the highest bit says that another byte follows."""
    numbers, number = [], 0
    for byte in content:
        number = number << 7 | byte & 0x7F
        if byte < 0x80:  # noqa: PLR2004 - the highest bit
            numbers.append(number)
            number = 0
    return numbers


def _size(code: int) -> int:
    return _INTEGER_BYTES[code] if code < _BLOB_CODE else (code - _BLOB_CODE) // 2


def _value(code: int, content: bytes) -> Any:
    if code >= _BLOB_CODE:
        return content.decode() if code % 2 else content
    if code == _REAL_CODE:
        return struct.unpack(">d", content)[0]
    if code == 0:
        return None
    return code - _ONE_CODE + 1 if not content else int.from_bytes(content, signed=True)
