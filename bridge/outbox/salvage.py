"""Find rows in the bytes of a damaged file and its log, wherever they are; a row's checksum proves that it is one.

Only SQLite's format of a record is needed, not its pages' headers, which may be damaged:
https://www.sqlite.org/fileformat2.html#record_format.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bridge.outbox.image import PAGE_BYTES, frame_places, is_of_last_use, read_log
from bridge.outbox.rows import DEAD_LETTER_UNCHECKED, verified
from bridge.outbox.sqlite import Damaged

Row = tuple[Any, ...]
Tables = dict[str, dict[Any, Row]]

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


def salvage(path: Path) -> Tables:
    """Return every row that can be found, by table and key.

    Raises:
        OSError: the file cannot be read.
    """
    file, log = path.read_bytes(), read_log(path)
    in_file = {place // PAGE_BYTES + 1: place for place in range(0, len(file), PAGE_BYTES)}
    in_log = {number: len(file) + place for number, place in frame_places(log)}
    content = file + log

    def version(table: str, row: Row, place: int) -> tuple[Any, int]:
        age = int(place < len(file)) or 2 * is_of_last_use(log, place - len(file))
        return _VERSIONS[table](row) if table in _VERSIONS else 0, age

    found: dict[str, dict[Any, tuple[tuple[Any, int], Row]]] = {table: {} for table in _COLUMNS}
    for table, rows in found.items():
        for place, row in _rows(table, content, [{**in_file, **in_log}, in_file]):
            key = row[:2] if table in ("record", "done") else row[0]
            candidate = version(table, row, place), row
            if key not in rows or candidate[0] >= rows[key][0]:
                rows[key] = candidate
    return {table: {key: row for key, (_, row) in rows.items()} for table, rows in found.items()}


def _rows(table: str, content: bytes, page_maps: list[dict[int, int]]) -> Iterator[tuple[int, Row]]:
    """Yield each row that is found, with its place."""
    skip = DEAD_LETTER_UNCHECKED if table == "dead_letter" else 0
    for match in _PATTERNS[table].finditer(content):
        for places in page_maps:
            try:
                row = verified(_decode(table, content, match.start(), places), skip=skip)
            except (Damaged, ValueError, LookupError, struct.error):
                continue  # it only looked like a row
            yield match.start(), row
            break


def _decode(table: str, content: bytes, start: int, places: Mapping[int, int]) -> Row:
    """Read the record at `start`.

    Raises:
        ValueError, LookupError, struct.error: there is none.
    """
    header_bytes = content[start]
    codes = _numbers(content[start + 1 : start + header_bytes])
    if len(codes) != len(_COLUMNS[table]):
        raise ValueError("it has other columns")
    sizes = [_size(code) for code in codes]
    total = header_bytes + sum(sizes)
    payload = _payload(content, start, total, places)
    values: list[Any] = []
    place = header_bytes
    for kind, code, size in zip(_COLUMNS[table], codes, sizes, strict=True):
        value = _value(code, payload[place : place + size])
        values.append(float(value) if kind is _REAL else value)
        place += size
    if _COLUMNS[table][0] is _KEY:
        values[0] = _key_before(content, start, total)
    return tuple(values)


def _payload(content: bytes, start: int, total: int, places: Mapping[int, int]) -> bytes:
    """Return a record, whose end may be in other pages."""
    if total <= _LOCAL_MAX:
        return content[start : start + total]
    local = _LOCAL_MIN + (total - _LOCAL_MIN) % _CHAINED_BYTES
    if local > _LOCAL_MAX:
        local = _LOCAL_MIN
    parts = [content[start : start + local]]
    place, left = start + local, total - local
    while left > 0:
        page = places[struct.unpack_from(">I", content, place)[0]]
        parts.append(content[page + 4 : page + 4 + min(left, _CHAINED_BYTES)])
        place, left = page, left - _CHAINED_BYTES
    return b"".join(parts)


def _key_before(content: bytes, start: int, total: int) -> int:
    """Return the number that stands between the record's length and the record."""
    for length in range(2, 14):
        numbers = _numbers(content[max(0, start - length) : start])
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
