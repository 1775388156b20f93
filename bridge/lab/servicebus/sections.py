"""Split messages into their sections, and assemble them for a receiver.

Properties and body are kept as the bytes that the client sent and leave the broker unchanged; only the header, the
annotations and, for a dead letter, two application properties are written by the broker.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bridge.lab.servicebus.codec import (
    UUID,
    Int,
    Malformed,
    Symbol,
    described,
    read,
    skip,
    write,
    write_compound,
)

HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = (
    range(0x70, 0x79)
)
BODIES = (DATA, SEQUENCE, VALUE)
SCHEDULED_TIME = "x-opt-scheduled-enqueue-time"
PARTITION_KEY = "x-opt-partition-key"
# The service sets these; values from a client are dropped.
OWN_ANNOTATIONS = frozenset(
    {
        "x-opt-enqueued-time",
        "x-opt-sequence-number",
        "x-opt-enqueue-sequence-number",
        "x-opt-locked-until",
        "x-opt-lock-token",
        "x-opt-message-state",
        "x-opt-deadletter-source",
    }
)
PROPERTY_NAMES = (
    "message_id",
    "user_id",
    "to",
    "subject",
    "reply_to",
    "correlation_id",
    "content_type",
    "content_encoding",
    "absolute_expiry_time",
    "creation_time",
    "session_id",
    "group_sequence",
    "reply_to_session_id",
)
SMALL_MAP = 0xC1
DESCRIPTOR_BYTES = 3  # of a section that this module has written
READ_ERRORS = (IndexError, OverflowError, struct.error, TypeError, ValueError)
_TTL = 2


@dataclass(frozen=True)
class Content:
    """Hold one message as received. Bytes are whole sections, or empty."""

    header: list[Any]
    annotations: dict[str, Any]
    properties: dict[str, Any]
    properties_bytes: bytes
    application_bytes: bytes
    body_bytes: bytes
    size_bytes: int
    message_id: str = field(default="")
    session_id: str | None = field(default=None)
    application_properties: dict[str, Any] = field(default_factory=dict)

    @property
    def ttl_seconds(self) -> float | None:
        """Return the message's time to live, or None."""
        ttl = self.header[_TTL] if len(self.header) > _TTL else None
        return None if ttl is None else ttl / 1000

    @property
    def scheduled_for(self) -> float | None:
        """Return the scheduled enqueue time in seconds since 1970, or None."""
        at = self.annotations.get(SCHEDULED_TIME)
        return None if at is None else at / 1000

    def with_properties(self, changes: Mapping[str, Any]) -> Content:
        """Return the message with some application properties set; the others keep their types."""
        if not changes:
            return self
        kept = [pair for name, pair in _pairs(self.application_bytes) if name not in changes]
        pairs = kept + [write(name) + write(value) for name, value in changes.items()]
        return replace(
            self,
            application_bytes=described(
                APPLICATION, write_compound(SMALL_MAP, 2 * len(pairs), b"".join(pairs))
            ),
            application_properties={**self.application_properties, **changes},
        )

    @cached_property
    def body(self) -> bytes:
        """Return the joined data sections; for another kind of body, the bytes of its sections."""
        parts = [_data(self.body_bytes, start) for code, start, _ in _split(self.body_bytes) if code == DATA]
        return b"".join(parts) if parts else self.body_bytes

    @cached_property
    def value(self) -> Any:
        """Return the value section of a request; raise Malformed if it cannot be read."""
        if self.body_bytes[2:3] != bytes((VALUE,)):
            return None
        try:
            return read(self.body_bytes, DESCRIPTOR_BYTES)[0]
        except READ_ERRORS as error:
            raise Malformed(f"request given: a body that is no AMQP value ({error})") from error


def parse(data: bytes) -> Content:
    """Return a message; raise Malformed if the bytes are not one."""
    try:
        return _parse(data)
    except READ_ERRORS as error:
        raise Malformed(f"message given: {len(data)} bytes that are no AMQP message ({error})") from error


def _parse(data: bytes) -> Content:
    header: list[Any] = []
    annotations: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    application: dict[str, Any] = {}
    properties_bytes = application_bytes = b""
    body = []
    for code, start, end in _split(data):
        if code == HEADER:
            header = _list(read(data, start)[0])
            if not isinstance(header[_TTL] if len(header) > _TTL else None, int | None):
                raise TypeError("its ttl is no number")
        elif code == MESSAGE_ANNOTATIONS:
            annotations = _map(read(data, start)[0])
            write(annotations)  # as `encode` will: a value that this codec cannot write is refused now
        elif code == PROPERTIES:
            properties_bytes = described(PROPERTIES, data[start:end])
            values = _list(read(data, start)[0])
            properties = {n: v for n, v in zip(PROPERTY_NAMES, values, strict=False) if v is not None}
        elif code == APPLICATION:
            application_bytes = described(APPLICATION, data[start:end])
            application = _map(read(data, start)[0])
        elif code in BODIES:
            body.append(described(code, data[start:end]))
    session_id = properties.get("session_id")
    return Content(
        header=header,
        annotations=annotations,
        properties=properties,
        properties_bytes=properties_bytes,
        application_bytes=application_bytes,
        body_bytes=b"".join(body),
        size_bytes=len(data),
        message_id=str(properties.get("message_id", "")),
        session_id=None if session_id is None else str(session_id),
        application_properties=application,
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"section given: {type(value).__name__}; expected: a list")
    return value


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"section given: {type(value).__name__}; expected: a map")
    return {str(name): item for name, item in value.items()}


def _split(data: bytes) -> list[tuple[int, int, int]]:
    """Return for each section its code, and where its value starts and ends."""
    found = []
    at = 0
    while at < len(data):
        if data[at] != 0x00:
            raise Malformed(f"section given: 0x{data[at]:02x}; expected: 0x00")
        start = skip(data, at + 1)
        code = read(data, at + 1)[0]
        if not isinstance(code, int) or not HEADER <= code <= FOOTER:
            raise Malformed(f"section given: {code!r}; expected: one of a message")
        end = skip(data, start)
        found.append((code, start, end))
        at = end
    return found


def _data(data: bytes, start: int) -> bytes:
    value = read(data, start)[0]
    if not isinstance(value, bytes):
        raise Malformed("a data section holds no binary")
    return value


def parse_transfer(data: bytes) -> list[Content]:
    """Return the messages of one transfer: one, or those of a batch.

    A batch is recognised by its shape, since proton hides its message format 0x80013700: it has only data sections,
    and each of them is a whole message. Clients give the batch the properties and application properties of its
    first message.
    """
    outer = parse(data)
    if outer.body_bytes[:3] != bytes((0x00, 0x53, DATA)):
        return [outer]
    inner = []
    for code, start, _ in _split(outer.body_bytes):
        if code != DATA:
            return [outer]
        try:
            part = _data(outer.body_bytes, start)
        except READ_ERRORS as error:
            raise Malformed(f"message given: a data section that cannot be read ({error})") from error
        if part[:2] not in (b"\x00\x53", b"\x00\x80"):
            return [outer]
        try:
            inner.append(parse(part))
        except Malformed:
            return [outer]
    return inner if all(content.body_bytes for content in inner) else [outer]


# --- for receivers ---


def _symbol(name: str) -> bytes:
    return write(Symbol(name))


_ENQUEUED = _symbol("x-opt-enqueued-time")
_SEQUENCE = _symbol("x-opt-sequence-number")
_LOCKED = _symbol("x-opt-locked-until")
_STATE = _symbol("x-opt-message-state")
_SOURCE = _symbol("x-opt-deadletter-source")
# The delivery annotations with the lock token as their only entry; the 16 bytes of the token follow.
_TOKEN_NAME = _symbol("x-opt-lock-token")
_LOCK_TOKEN = described(
    DELIVERY_ANNOTATIONS, bytes((SMALL_MAP, len(_TOKEN_NAME) + 18, 2)) + _TOKEN_NAME + bytes((UUID,))
)
_TIMESTAMP = struct.Struct(">Bq")
_MAX_UINT = 2**32 - 1


def compose(
    content: Content,
    *,
    sequence_number: int,
    enqueued_at: float,
    delivery_count: int,
    locked_until: float | None = None,
    state: int = 0,
    ttl_seconds: float | None = None,
    dead_letter_source: str | None = None,
    lock_token: uuid.UUID | None = None,
) -> bytes:
    """Return a message as it is sent to a receiver.

    Args:
        content: what the client sent.
        sequence_number: its number in the queue.
        enqueued_at: in seconds since 1970.
        delivery_count: the deliveries so far.
        locked_until: in seconds since 1970; None for a message without a lock.
        state: the value of x-opt-message-state.
        ttl_seconds: its time to live; None for no limit.
        dead_letter_source: the entity it was dead-lettered from, or None.
        lock_token: of a message with a lock; sent as a delivery annotation, where Go's client looks for it.
    """
    parts = [
        _ENQUEUED + _TIMESTAMP.pack(0x83, int(enqueued_at * 1000)),
        _SEQUENCE + _TIMESTAMP.pack(0x81, sequence_number),
        _STATE + write(Int(state)),
    ]
    if locked_until is not None:
        parts.append(_LOCKED + _TIMESTAMP.pack(0x83, int(locked_until * 1000)))
    if dead_letter_source is not None:
        parts.append(_SOURCE + write(dead_letter_source))
    for name, value in content.annotations.items():
        if name not in OWN_ANNOTATIONS:
            parts.append(_symbol(name) + write(value))
    annotations = write_compound(SMALL_MAP, 2 * len(parts), b"".join(parts))
    return b"".join(
        (
            _header(delivery_count, ttl_seconds),
            b"" if lock_token is None else _LOCK_TOKEN + lock_token.bytes,
            described(MESSAGE_ANNOTATIONS, annotations),
            content.properties_bytes,
            content.application_bytes,
            content.body_bytes,
        )
    )


def _header(delivery_count: int, ttl_seconds: float | None) -> bytes:
    ttl = b"\x40"
    if ttl_seconds is not None:
        ttl = struct.pack(">BI", 0x70, min(int(ttl_seconds * 1000), _MAX_UINT))
    content = b"\x41\x50\x04" + ttl + b"\x42" + struct.pack(">BI", 0x70, delivery_count)
    return described(HEADER, write_compound(0xC0, 5, content))


def _pairs(application: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the encoding of each application property in a section, which may be empty."""
    at = 6 if application[DESCRIPTOR_BYTES : DESCRIPTOR_BYTES + 1] == bytes((SMALL_MAP,)) else 12
    while at < len(application):
        name, value_at = read(application, at)
        end = skip(application, value_at)
        yield str(name), application[at:end]
        at = end


def reply(correlation_id: Any, application_properties: dict[str, Any], value: Any = None) -> bytes:
    """Return the answer of a node such as $cbs to a request.

    Args:
        correlation_id: the message id of the request.
        application_properties: the status.
        value: the body.
    """
    properties = write([None, None, None, None, None, correlation_id])
    return b"".join(
        (
            described(PROPERTIES, properties),
            described(APPLICATION, write(application_properties)),
            described(VALUE, write(value)),
        )
    )
