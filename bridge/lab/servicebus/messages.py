"""The messages of a queue: split into their sections, checked, and assembled for a receiver.

Properties and body are kept as the bytes that the client sent and leave the broker unchanged; only the header, the
annotations and the application properties of a message that was changed are written by the broker.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from bridge.lab.servicebus.amqp import proton

# The error conditions of the service.
NOT_FOUND = "amqp:not-found"
NOT_ALLOWED = "amqp:not-allowed"
UNAUTHORIZED = "amqp:unauthorized-access"
DECODE = "amqp:decode-error"
TOO_LARGE = "amqp:link:message-size-exceeded"
NOT_IMPLEMENTED = "amqp:not-implemented"

ARGUMENT = "com.microsoft:argument-error"
BUSY = "com.microsoft:server-busy"
LOCK_LOST = "com.microsoft:message-lock-lost"
SESSION_LOCKED = "com.microsoft:session-cannot-be-locked"
SESSION_LOST = "com.microsoft:session-lock-lost"
TIMEOUT = "com.microsoft:timeout"

_STATUS_CODES = {
    NOT_FOUND: 404,
    NOT_ALLOWED: 400,
    ARGUMENT: 400,
    UNAUTHORIZED: 401,
    LOCK_LOST: 410,
    SESSION_LOST: 410,
    BUSY: 503,
    NOT_IMPLEMENTED: 501,
}

HEADER, DELIVERY_ANNOTATIONS, ANNOTATIONS, PROPERTIES, APPLICATION, DATA, SEQUENCE, VALUE, FOOTER = range(
    0x70, 0x79
)
BODIES = (DATA, SEQUENCE, VALUE)
SCHEDULED_TIME = "x-opt-scheduled-enqueue-time"
PARTITION_KEY = "x-opt-partition-key"
# The service sets the annotations that begin so, and drops a client's except for the partition key.
OWN_PREFIX = "x-opt-"
_PROPERTY_NAMES = (
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
_TTL = 2
# learn.microsoft.com/azure/service-bus-messaging/service-bus-quotas
MAX_ID_CHARACTERS = 128
MAX_PROPERTY_BYTES, MAX_PROPERTIES_BYTES = 32 * 1024, 64 * 1024
_MAX_UINT = 2**32 - 1


class Refused(Exception):
    """A request of a client is refused, with the condition that the service would send."""

    def __init__(self, condition: str, description: str) -> None:
        super().__init__(f"{condition}: {description}")
        self.condition = condition
        self.description = description
        self.status_code = _STATUS_CODES.get(condition, 500)  # of a management node


@dataclass(frozen=True, kw_only=True)
class Content:
    """Hold one message as received. Bytes are whole sections, or empty."""

    ttl_seconds: float | None = None
    annotations: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    properties_bytes: bytes = b""
    application_properties: dict[Any, Any] = field(default_factory=dict)
    application_bytes: bytes = b""
    body_bytes: bytes = b""

    @property
    def message_id(self) -> str:
        """Return the message's id as a text, which may be empty."""
        return str(self.properties.get("message_id", ""))

    @property
    def session_id(self) -> str | None:
        """Return the session, or None."""
        found = self.properties.get("session_id")
        return None if found is None else str(found)

    @property
    def partition_key(self) -> str | None:
        """Return what its sender wants to decide the partition, None to leave it to the broker."""
        key = self.annotations.get(PARTITION_KEY)
        return self.session_id if key is None else str(key)

    @cached_property
    def body(self) -> bytes:
        """Return the joined data sections; for another kind of body, the bytes of its sections."""
        parts = [section.data() for section in _sections(self.body_bytes) if section.code == DATA]
        return b"".join(parts) if parts else self.body_bytes

    def with_properties(self, changes: Mapping[str, Any]) -> Content:
        """Return the message with some application properties set; the others keep their types."""
        if not changes:
            return self
        merged = {**self.application_properties, **changes}
        return replace(self, application_properties=merged, application_bytes=encode(APPLICATION, merged))

    def check(self) -> None:
        """Raise Refused for what Service Bus refuses, or the lab does not have."""
        if SCHEDULED_TIME in self.annotations:
            raise Refused(NOT_IMPLEMENTED, "The lab has no scheduled messages.")
        ids = (self.message_id, self.session_id or "", self.partition_key or "")
        if max(map(len, ids)) > MAX_ID_CHARACTERS:
            raise Refused(ARGUMENT, f"An id has more than {MAX_ID_CHARACTERS} characters.")
        if self.session_id is not None and self.partition_key != self.session_id:
            raise Refused(ARGUMENT, "The PartitionKey differs from the SessionId.")
        texts = [one for one in self.application_properties.values() if isinstance(one, str | memoryview)]
        if any(len(one) > MAX_PROPERTY_BYTES for one in texts):
            raise Refused(ARGUMENT, f"A property has more than {MAX_PROPERTY_BYTES} bytes.")
        if len(self.properties_bytes) + len(self.application_bytes) > MAX_PROPERTIES_BYTES:
            raise Refused(ARGUMENT, f"The properties have more than {MAX_PROPERTIES_BYTES} bytes.")


@dataclass(frozen=True)
class _Section:
    code: int
    encoded: bytes
    decoded: Any  # proton's decoder, at the value

    def value(self, kind: type[Any]) -> Any:
        found = self.decoded.get_object()
        if not isinstance(found, kind):
            raise ValueError(f"section given: {type(found).__name__}; expected: {kind.__name__}")
        return found

    def data(self) -> bytes:
        return bytes(self.decoded.get_binary())


def _sections(data: bytes) -> Iterator[_Section]:
    """Yield the sections of a message; raise ValueError or a ProtonException if it is not one."""
    at = 0
    while at < len(data):
        decoder = proton.Data()
        end = at + decoder.decode(data[at:])
        decoder.rewind()
        if decoder.next() != proton.Data.DESCRIBED:
            raise ValueError("no section")
        decoder.enter()
        decoder.next()
        code = decoder.get_object()
        kind = decoder.next()
        if code not in range(HEADER, FOOTER + 1) or (code == DATA and kind != proton.Data.BINARY):
            raise ValueError(f"section given: {code!r}; expected: one of a message")
        yield _Section(code, data[at:end], decoder)
        at = end


def parse(data: bytes) -> Content:
    """Return a message; raise Refused if the bytes are not one."""
    try:
        return _parse(data)
    except (ValueError, TypeError, LookupError, ArithmeticError, proton.ProtonException) as error:
        raise Refused(DECODE, f"{len(data)} bytes are no AMQP message ({error})") from error


def _parse(data: bytes) -> Content:
    found: dict[str, Any] = {}
    body = []
    for section in _sections(data):
        if section.code == HEADER:
            ttl = dict(enumerate(section.value(list))).get(_TTL)
            found["ttl_seconds"] = None if ttl is None else int(ttl) / 1000
        elif section.code == ANNOTATIONS:
            found["annotations"] = {str(name): value for name, value in section.value(dict).items()}
        elif section.code == PROPERTIES:
            pairs = zip(_PROPERTY_NAMES, section.value(list), strict=False)
            found["properties"] = {name: value for name, value in pairs if value is not None}
            found["properties_bytes"] = section.encoded
        elif section.code == APPLICATION:
            found["application_properties"] = section.value(dict)
            found["application_bytes"] = section.encoded
        elif section.code in BODIES:
            body.append(section.encoded)
    content = Content(**found, body_bytes=b"".join(body))
    encode(ANNOTATIONS, content.annotations)  # as for a receiver: what cannot be written is refused now
    return content


def parse_transfer(data: bytes) -> list[Content]:
    """Return the messages of one transfer: one, or those of a batch; raise Refused for an invalid one.

    A batch is recognised by its shape, since proton hides its message format 0x80013700: it has only data sections,
    and each of them is a whole message. Clients give the batch the properties and application properties of its
    first message.
    """
    outer = parse(data)
    sections = list(_sections(outer.body_bytes))
    try:
        inner = [parse(section.data()) for section in sections if section.code == DATA]
    except Refused:
        inner = []
    if not inner or len(inner) < len(sections) or not all(content.body_bytes for content in inner):
        inner = [outer]
    for content in inner:
        content.check()
    return inner


def encode(code: int, value: Any) -> bytes:
    """Return a section."""
    data = proton.Data()
    data.put_object(proton.Described(proton.ulong(code), value))
    return bytes(data.encode())


@dataclass(slots=True, kw_only=True, eq=False)
class Message:
    """Hold one message of a queue. Times are seconds since 1970."""

    content: Content
    sequence_number: int
    enqueued_at: float
    expires_at: float | None = None
    delivery_count: int = 0
    lock_token: uuid.UUID | None = None
    locked_until: float = 0.0
    dead_letter_source: str | None = None

    def encode(self) -> bytes:
        """Return the message as it is sent to a receiver."""
        content, token = self.content, self.lock_token
        own = {
            "x-opt-enqueued-time": proton.timestamp(int(self.enqueued_at * 1000)),
            "x-opt-sequence-number": self.sequence_number,
            "x-opt-message-state": proton.int32(0),
        }
        if token is not None:
            own["x-opt-locked-until"] = proton.timestamp(int(self.locked_until * 1000))
        if self.dead_letter_source is not None:
            own["x-opt-deadletter-source"] = self.dead_letter_source
        given = content.annotations.items()
        kept = {name: one for name, one in given if name == PARTITION_KEY or not name.startswith(OWN_PREFIX)}
        annotations = {proton.symbol(name): value for name, value in (kept | own).items()}
        # Go's client looks for the lock token among the delivery annotations.
        instructions = {proton.symbol("x-opt-lock-token"): token}
        return b"".join(
            (
                encode(HEADER, [True, proton.ubyte(4), self._ttl(), False, proton.uint(self.delivery_count)]),
                b"" if token is None else encode(DELIVERY_ANNOTATIONS, instructions),
                encode(ANNOTATIONS, annotations),
                content.properties_bytes,
                content.application_bytes,
                content.body_bytes,
            )
        )

    def _ttl(self) -> Any:
        if self.expires_at is None:
            return None
        return proton.uint(min(int((self.expires_at - self.enqueued_at) * 1000), _MAX_UINT))
