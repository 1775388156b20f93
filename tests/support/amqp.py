"""AMQP values as bytes, for messages that no client would send."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = (
    range(0x70, 0x79)
)


class Symbol(str):
    """A symbol, as opposed to a string."""

    __slots__ = ()


def described(code: int, content: bytes) -> bytes:
    """Return content under a small numeric descriptor, as sections are."""
    return b"\x00\x53" + bytes((code,)) + content


def write_compound(small: int, count: int, content: bytes) -> bytes:
    """Return an encoded list or map of so many items, with the constructor for one-byte sizes."""
    if count < 256 and len(content) < 255:
        return bytes((small, len(content) + 1, count)) + content
    return bytes((small + 0x10,)) + struct.pack(">II", len(content) + 4, count) + content


def write(value: Any) -> bytes:
    """Return a value as bytes; its Python type decides the AMQP type, and an int is a long."""
    match value:
        case None:
            return b"\x40"
        case bool():
            return b"\x41" if value else b"\x42"
        case int():
            small = -128 <= value < 128
            return struct.pack(">Bb", 0x55, value) if small else struct.pack(">Bq", 0x81, value)
        case Symbol():
            return _write_sized(0xA3, value.encode("ascii"))
        case str():
            return _write_sized(0xA1, value.encode())
        case bytes():
            return _write_sized(0xA0, value)
        case Mapping():
            pairs = b"".join(write(key) + write(item) for key, item in value.items())
            return write_compound(0xC1, 2 * len(value), pairs)
        case Sequence():
            return write_compound(0xC0, len(value), b"".join(map(write, value)))
    raise TypeError(value)


def _write_sized(small: int, content: bytes) -> bytes:
    if len(content) < 256:
        return bytes((small, len(content))) + content
    return bytes((small + 0x10,)) + struct.pack(">I", len(content)) + content
