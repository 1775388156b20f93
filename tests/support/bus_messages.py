"""Messages as clients send them, and sections of AMQP with any values, for messages that no client would send."""

from __future__ import annotations

import sys
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

import proton

from bridge.lab.servicebus.messages import Content, parse

NAMES = {"message_id": "id", "session_id": "group_id", "ttl_seconds": "ttl"}
HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = (
    range(0x70, 0x79)
)


def encoded(body: bytes | str = b"body", **options: Any) -> bytes:
    """Return a message as bytes, with proton's names for its properties or those of the lab."""
    data = body.encode() if isinstance(body, str) else body
    message: Any = proton.Message(data, **{NAMES.get(name, name): one for name, one in options.items()})
    message.inferred = True
    return bytes(message.encode())


def content(body: bytes | str = b"body", **options: Any) -> Content:
    """Return a message as the broker receives it."""
    return parse(encoded(body, **options))


def section(code: int, value: Any) -> bytes:
    """Return a section of a message; the value's Python type, or proton's, decides the AMQP type."""
    data: Any = proton.Data()
    data.put_object(proton.Described(proton.ulong(code), value))
    return bytes(data.encode())
