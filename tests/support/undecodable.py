"""Messages that the Service Bus SDK cannot decode, and a sender of encoded messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus._pyamqp import sender as sdk_sender
from hypothesis import strategies as st

from tests.support.amqp import (
    APPLICATION,
    DATA,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    VALUE,
    Symbol,
    described,
    write,
    write_compound,
)
from tests.support.bus import Sender

CHAR = b"\x73\x00\x00\x00\x41"
DECIMALS = {32: b"\x74" + bytes(4), 64: b"\x84" + bytes(8), 128: b"\x94\x2f\xff" + b"\xff" * 14}
ARRAY_OF_CHARS = b"\xe0\x06\x01\x73\x00\x00\x00\x41"


def nested_list(depth: int) -> bytes:
    """Encode a list in a list in a list."""
    value = b"\x45"
    for _ in range(depth - 1):
        value = write_compound(0xC0, 1, value)
    return value


VALUES = {
    "a char": CHAR,
    "a decimal32": DECIMALS[32],
    "a decimal64": DECIMALS[64],
    "a decimal128": DECIMALS[128],
    "a list nested 65 deep": nested_list(65),
    "an array of chars": ARRAY_OF_CHARS,
    "a described char": b"\x00\xa3\x01x" + CHAR,
}


simple_values = st.sampled_from([b"\x40", b"\x41", b"\x43", b"\x45", CHAR, *VALUES.values()]) | st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(write),
    st.text(max_size=5).map(write),
    st.binary(max_size=5).map(write),
)


def _lists(items: list[bytes]) -> bytes:
    return write_compound(0xC0, len(items), b"".join(items))


def _maps(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return write_compound(0xC1, 2 * len(pairs), b"".join(key + value for key, value in pairs))


any_value = st.recursive(
    simple_values,
    lambda inner: (
        st.lists(inner, max_size=4).map(_lists)
        | st.lists(st.tuples(inner, inner), max_size=3).map(_maps)
        | st.tuples(inner, inner).map(lambda pair: b"\x00" + pair[0] + pair[1])
    ),
    max_leaves=12,
)
any_section = st.tuples(st.sampled_from(range(0x70, 0x79)), any_value).map(lambda one: described(*one))


def with_property(
    value: bytes, body: bytes, *, message_id: str = "bad", session_id: str | None = None
) -> bytes:
    """Encode a message with a value as an application property."""
    return (
        _properties(message_id, session_id)
        + described(
            APPLICATION, write_compound(0xC1, 4, write("good") + write("text") + write("bad") + value)
        )
        + described(DATA, write(body))
    )


def with_annotation(
    value: bytes, body: bytes, *, message_id: str = "bad", session_id: str | None = None
) -> bytes:
    """Encode a message with a value as an annotation of the sender's."""
    annotations = write_compound(0xC1, 2, write(Symbol("own-marker")) + value)
    return (
        described(MESSAGE_ANNOTATIONS, annotations)
        + _properties(message_id, session_id)
        + described(DATA, write(body))
    )


def with_body(value: bytes, *, message_id: str = "bad", session_id: str | None = None) -> bytes:
    """Encode a message whose body is a value."""
    return _properties(message_id, session_id) + described(VALUE, value)


def _properties(message_id: str, session_id: str | None) -> bytes:
    return described(PROPERTIES, write([message_id, *[None] * 9, session_id]))


@contextmanager
def _encoded_as(payload: bytes) -> Iterator[None]:
    """Let the SDK's sender put these bytes on the wire instead of the message that it is given."""

    def encode(output: bytearray, _: Any) -> bytearray:
        output += payload
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sdk_sender, "encode_payload", encode)
        yield


def send_encoded(sender: Sender, payload: bytes, *, session_id: str | None = None) -> None:
    """Send a message as encoded."""
    sender.open()  # which sends messages of its own
    with _encoded_as(payload):
        sender.send_one(ServiceBusMessage(b"replaced", session_id=session_id))
