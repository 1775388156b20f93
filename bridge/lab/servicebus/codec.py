"""Read and write values of AMQP 1.0 (part 1, types), as far as messages need them."""

# ruff: noqa: PLR2004 - the numbers are AMQP's constructors, as the standard writes them
from __future__ import annotations

import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 128

LONG = 0x81
TIMESTAMP = 0x83
UUID = 0x98
STRING = 0xA1


class Malformed(ValueError):
    """The bytes are not valid AMQP."""


class Symbol(str):
    """Hold a symbol, as opposed to a string."""

    __slots__ = ()


class Timestamp(int):
    """Hold milliseconds since 1970."""

    __slots__ = ()


class Int(int):
    """Hold a 32-bit integer, as opposed to a long."""

    __slots__ = ()


@dataclass(frozen=True)
class Described:
    """Hold a value that carries a descriptor."""

    descriptor: Any
    value: Any


@dataclass(frozen=True)
class Array:
    """Hold values of one type, to be written as an array."""

    constructor: int
    values: Sequence[Any]


# --- reading ---

_FIXED = {
    0x50: struct.Struct(">B"),
    0x51: struct.Struct(">b"),
    0x52: struct.Struct(">B"),
    0x53: struct.Struct(">B"),
    0x54: struct.Struct(">b"),
    0x55: struct.Struct(">b"),
    0x60: struct.Struct(">H"),
    0x61: struct.Struct(">h"),
    0x70: struct.Struct(">I"),
    0x71: struct.Struct(">i"),
    0x72: struct.Struct(">f"),
    0x80: struct.Struct(">Q"),
    0x81: struct.Struct(">q"),
    0x82: struct.Struct(">d"),
}
_EMPTY: dict[int, Callable[[], Any]] = {
    0x40: lambda: None,
    0x41: lambda: True,
    0x42: lambda: False,
    0x43: lambda: 0,
    0x44: lambda: 0,
    0x45: list,
}
_RAW_WIDTH = {0x73: 4, 0x74: 4, 0x84: 8, 0x94: 16}  # char and decimals: kept as bytes
_UINT = struct.Struct(">I")
_LONG = struct.Struct(">q")
# A constructor's upper four bits give the width of its value (AMQP 1.0, part 1, section 1.2).
_WIDTHS = {0x4: 0, 0x5: 1, 0x6: 2, 0x7: 4, 0x8: 8, 0x9: 16}


def skip(data: bytes, at: int, depth: int = 0) -> int:
    """Return where a value ends.

    Args:
        data: encoded values.
        at: where the value starts.
        depth: the number of values around it, which is limited.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"a value lies deeper than {MAX_DEPTH} levels")
    constructor = data[at]
    if constructor == 0x00:
        return skip(data, skip(data, at + 1, depth + 1), depth + 1)
    width = constructor >> 4
    if width in _WIDTHS:
        end = at + 1 + _WIDTHS[width]
    elif width in (0xA, 0xC, 0xE):
        end = at + 2 + data[at + 1]
    elif width in (0xB, 0xD, 0xF):
        end = at + 5 + int(_UINT.unpack_from(data, at + 1)[0])
    else:
        raise Malformed(f"constructor given: 0x{constructor:02x}; expected: one of AMQP 1.0")
    if end > len(data):
        raise Malformed("a value ends after its message")
    return end


def read(data: bytes, at: int = 0, depth: int = 0) -> tuple[Any, int]:
    """Return a value, and where it ends.

    Args:
        data: encoded values.
        at: where the value starts.
        depth: the number of values around it, which is limited.
    """
    if depth > MAX_DEPTH:
        raise Malformed(f"a value lies deeper than {MAX_DEPTH} levels")
    constructor = data[at]
    if constructor == 0x00:
        descriptor, at = read(data, at + 1, depth + 1)
        value, at = read(data, at, depth + 1)
        return Described(descriptor, value), at
    return _read_value(constructor, data, at + 1, depth)


def _read_value(constructor: int, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if fixed := _FIXED.get(constructor):
        return fixed.unpack_from(data, at)[0], at + fixed.size
    if empty := _EMPTY.get(constructor):
        return empty(), at
    width = constructor >> 4
    if width in (0xA, 0xB):
        return _read_variable(constructor, data, at)
    if width >= 0xC:
        return _read_compound(constructor, data, at, depth)
    return _read_other(constructor, data, at)


def _read_other(constructor: int, data: bytes, at: int) -> tuple[Any, int]:
    if constructor == 0x56:
        return data[at] == 1, at + 1
    if constructor == TIMESTAMP:
        return Timestamp(_LONG.unpack_from(data, at)[0]), at + 8
    if constructor == UUID:
        return uuid.UUID(bytes=bytes(data[at : at + 16])), at + 16
    if width := _RAW_WIDTH.get(constructor):
        return bytes(data[at : at + width]), at + width
    raise Malformed(f"constructor given: 0x{constructor:02x}; expected: one of AMQP 1.0")


def _read_variable(constructor: int, data: bytes, at: int) -> tuple[Any, int]:
    if constructor >> 4 == 0xA:
        size, start = data[at], at + 1
    else:
        size, start = _UINT.unpack_from(data, at)[0], at + 4
    end = start + size
    if end > len(data):
        raise Malformed("a value ends after its message")
    content = bytes(data[start:end])
    kind = constructor & 0x0F
    if kind == 0x0:
        return content, end
    if kind == 0x1:
        return content.decode(), end
    if kind == 0x3:
        return Symbol(content.decode("ascii")), end
    raise Malformed(f"constructor given: 0x{constructor:02x}; expected: binary, string or symbol")


def _read_compound(constructor: int, data: bytes, at: int, depth: int) -> tuple[Any, int]:
    if constructor >> 4 in (0xC, 0xE):
        end, count, at = at + 1 + data[at], data[at + 1], at + 2
    else:
        end, count, at = at + 4 + _UINT.unpack_from(data, at)[0], _UINT.unpack_from(data, at + 4)[0], at + 8
    if end > len(data) or count > len(data):
        raise Malformed("a list, map or array ends after its message")
    if constructor >> 4 in (0xE, 0xF):
        return _read_array(data, at, count, depth), end
    items = []
    for _ in range(count):
        item, at = read(data, at, depth + 1)
        items.append(item)
    if constructor in (0xC1, 0xD1):
        return dict(zip(items[::2], items[1::2], strict=True)), end
    return items, end


def _read_array(data: bytes, at: int, count: int, depth: int) -> list[Any]:
    constructor, at = data[at], at + 1
    if constructor == 0x00:
        _, at = read(data, at, depth + 1)
        constructor, at = data[at], at + 1
    items = []
    for _ in range(count):
        item, at = _read_value(constructor, data, at, depth + 1)
        items.append(item)
    return items


# --- writing ---


def write(value: Any) -> bytes:
    """Return a value as bytes; its Python type decides the AMQP type, and an int is a long.

    A type that is not known here, such as proton's, is written as the known type that it derives from.
    """
    writer = _WRITERS.get(type(value))
    if writer is None:
        writer = next(_WRITERS[base] for base in type(value).__mro__ if base in _WRITERS)
    return writer(value)


def described(code: int, content: bytes) -> bytes:
    """Return content under a small numeric descriptor, as sections and performatives are."""
    return b"\x00\x53" + bytes((code,)) + content


def _write_sized(small: int, content: bytes) -> bytes:
    if len(content) < 256:
        return bytes((small, len(content))) + content
    return bytes((small + 0x10,)) + _UINT.pack(len(content)) + content


def write_compound(small: int, count: int, content: bytes) -> bytes:
    """Return an encoded list, map or array.

    Args:
        small: the constructor with one-byte sizes: 0xc0, 0xc1 or 0xe0.
        count: the number of items; keys and values of a map count separately.
        content: the encoded items.
    """
    if count < 256 and len(content) < 255:
        return bytes((small, len(content) + 1, count)) + content
    return bytes((small + 0x10,)) + _UINT.pack(len(content) + 4) + _UINT.pack(count) + content


def _write_int(value: int) -> bytes:
    return struct.pack(">Bb", 0x55, value) if -128 <= value < 128 else struct.pack(">Bq", LONG, value)


def _write_map(value: Mapping[Any, Any]) -> bytes:
    content = b"".join(write(key) + write(item) for key, item in value.items())
    return write_compound(0xC1, 2 * len(value), content)


_ARRAY_ITEMS: dict[int, Callable[[Any], bytes]] = {
    LONG: _LONG.pack,
    TIMESTAMP: _LONG.pack,
    UUID: lambda value: value.bytes,
    STRING: lambda value: bytes((len(value.encode()),)) + value.encode(),
}


def _write_array(array: Array) -> bytes:
    content = bytes((array.constructor,)) + b"".join(map(_ARRAY_ITEMS[array.constructor], array.values))
    return write_compound(0xE0, len(array.values), content)


def _write_list(items: Sequence[Any]) -> bytes:
    return write_compound(0xC0, len(items), b"".join(map(write, items)))


def _write_described(value: Described) -> bytes:
    return b"\x00" + struct.pack(">BQ", 0x80, value.descriptor) + write(value.value)


_WRITERS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"\x40",
    bool: lambda value: b"\x41" if value else b"\x42",
    int: _write_int,
    Int: lambda value: struct.pack(">Bi", 0x71, value),
    float: lambda value: struct.pack(">Bd", 0x82, value),
    str: lambda value: _write_sized(0xA1, value.encode()),
    Symbol: lambda value: _write_sized(0xA3, value.encode("ascii")),
    bytes: lambda value: _write_sized(0xA0, value),
    Timestamp: lambda value: struct.pack(">Bq", TIMESTAMP, value),
    uuid.UUID: lambda value: bytes((UUID,)) + value.bytes,
    dict: _write_map,
    list: _write_list,
    Array: _write_array,
    Described: _write_described,
}
