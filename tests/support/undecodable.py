"""Messages that the Service Bus SDK cannot decode, and a sender of encoded messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import proton
import pytest
from azure.servicebus import ServiceBusMessage
from azure.servicebus._pyamqp import sender as sdk_sender
from hypothesis import strategies as st

from tests.support.bus import Sender
from tests.support.bus_messages import (
    APPLICATION,
    DATA,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    VALUE,
    section,
)


def nested_list(depth: int) -> list[Any]:
    """Put a list into a list in a list."""
    return [nested_list(depth - 1)] if depth > 1 else []


ARRAY: Any = proton.Array
CHAR: Any = proton.char("A")
VALUES: dict[str, Any] = {
    "a char": CHAR,
    "a decimal32": proton.decimal32(0),
    "a decimal64": proton.decimal64(0),
    "a decimal128": proton.decimal128(b"\x2f\xff" + b"\xff" * 14),
    "a list nested 65 deep": nested_list(65),
    "an array of chars": ARRAY(proton.UNDESCRIBED, proton.Data.CHAR, CHAR),
    "a described char": proton.Described(proton.symbol("x"), CHAR),
}

_plain = st.sampled_from([None, True, False, proton.uint(0), CHAR, proton.decimal32(0)])
_names = _plain | st.integers(-(2**31), 2**31 - 1) | st.text(max_size=5) | st.binary(max_size=5)
any_value = st.recursive(
    _names | st.sampled_from([[], *VALUES.values()]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_names, inner, max_size=3)
        | st.builds(proton.Described, inner, inner)
    ),
    max_leaves=12,
)
any_section = st.builds(section, st.sampled_from(range(0x70, 0x79)), any_value)


def with_property(
    value: Any, body: bytes, *, message_id: str = "bad", session_id: str | None = None
) -> bytes:
    """Encode a message with a value as an application property."""
    properties = section(APPLICATION, {"good": "text", "bad": value})
    return _properties(message_id, session_id) + properties + section(DATA, body)


def with_annotation(value: Any, body: bytes, *, session_id: str | None = None) -> bytes:
    """Encode a message with a value as an annotation of the sender's."""
    annotations = section(MESSAGE_ANNOTATIONS, {proton.symbol("own-marker"): value})
    return annotations + _properties("bad", session_id) + section(DATA, body)


def with_body(value: Any, *, message_id: str = "bad", session_id: str | None = None) -> bytes:
    """Encode a message whose body is a value."""
    return _properties(message_id, session_id) + section(VALUE, value)


def _properties(message_id: str, session_id: str | None) -> bytes:
    return section(PROPERTIES, [message_id, *[None] * 9, session_id])


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
