"""Messages as clients send them."""

from __future__ import annotations

from typing import Any

from bridge.lab.servicebus.messages import Content, parse
from tests.support.amqp import (
    APPLICATION,
    DATA,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    Symbol,
    described,
    write,
)


def encoded(
    body: bytes | str = b"body",
    *,
    message_id: str | None = None,
    session_id: str | None = None,
    subject: str | None = None,
    correlation_id: str | None = None,
    ttl_seconds: float | None = None,
    properties: dict[str, Any] | None = None,
    annotations: dict[str, Any] | None = None,
) -> bytes:
    """Return a message as bytes."""
    parts = []
    if ttl_seconds is not None:
        parts.append(described(HEADER, write([True, None, int(ttl_seconds * 1000)])))
    if annotations:
        named = {Symbol(name): value for name, value in annotations.items()}
        parts.append(described(MESSAGE_ANNOTATIONS, write(named)))
    values = [message_id, None, None, subject, None, correlation_id, None, None, None, None, session_id]
    parts.append(described(PROPERTIES, write(values)))
    if properties:
        parts.append(described(APPLICATION, write(properties)))
    parts.append(described(DATA, write(body.encode() if isinstance(body, str) else body)))
    return b"".join(parts)


def content(body: bytes | str = b"body", **options: Any) -> Content:
    """Return a message as the broker receives it."""
    return parse(encoded(body, **options))
