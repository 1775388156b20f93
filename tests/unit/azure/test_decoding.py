"""Whatever a sender has encoded, a message can be received and settled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from hypothesis import given
from hypothesis import strategies as st

from bridge.azure.bus_receiver import convert
from bridge.azure.internals import _decode, fault_of
from tests.support.bus_messages import APPLICATION, DATA, PROPERTIES, SEQUENCE, VALUE, section
from tests.support.diff import steady
from tests.support.undecodable import (
    CHAR,
    VALUES,
    any_section,
    with_annotation,
    with_body,
    with_property,
)


def received(payload: bytes, *, tag: bytes | None = None) -> ServiceBusReceivedMessage:
    """Build a message as the SDK does when a transfer has arrived; `tag` is its delivery tag."""
    frame: Any = [None, None, tag, *[None] * 9]
    return ServiceBusReceivedMessage(
        _decode(memoryview(payload)), receiver=SimpleNamespace(session=None), frame=frame
    )


def test_a_message_that_the_sdk_can_decode_has_no_fault() -> None:
    message = convert(received(with_property("text", b"body", message_id="m")))
    assert (message.fault, message.body, message.message_id) == ("", b"body", "m")
    assert message.properties == {"good": "text", "bad": "text"}


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_a_message_that_the_sdk_cannot_decode_is_empty_and_says_so(value: Any) -> None:
    message = convert(received(with_property(value, b"body", message_id="m")))
    assert (message.body, message.properties, message.sequence_number) == (b"", {}, None)
    with pytest.raises(ValueError, match="cannot decode"):
        message.decoded_body()


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_a_body_that_the_sdk_cannot_decode_is_empty(value: Any) -> None:
    message = convert(received(with_body(value, message_id="m")))
    assert message.fault or message.body == b"" or value is VALUES["a decimal128"]


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        (VALUE, {"EventId": "A"}, "map"),
        (VALUE, ["A"], "list"),
        (VALUE, 7, "number"),
        (SEQUENCE, ["A"], "sequence"),
    ],
)
def test_a_body_that_is_no_text_is_named_by_its_kind_and_keeps_the_messages_id(
    kind: int, value: Any, name: str
) -> None:
    message = convert(received(section(PROPERTIES, ["m"]) + section(kind, value)))
    assert (message.message_id, message.fault) == (
        "m",
        f"its body is an AMQP {name}, expected a text or bytes",
    )


def test_each_delivery_of_such_a_message_has_an_id_of_its_own() -> None:
    tags = [bytes(range(16)), bytes(range(1, 17))]
    messages = [convert(received(with_property(CHAR, b"body"), tag=tag)) for tag in tags]
    assert all(message.fault for message in messages)
    assert [message.message_id for message in messages] == [f"delivery-{UUID(bytes_le=tag)}" for tag in tags]


def test_binary_properties_that_are_no_text_are_no_fault() -> None:
    message = convert(received(with_property(b"a\xff", b"body", message_id="m")))
    assert (message.fault, message.properties) == ("", {"good": "text", "bad": "a\N{REPLACEMENT CHARACTER}"})


def test_an_id_that_the_sdk_cannot_decode_is_replaced() -> None:
    message = convert(received(section(PROPERTIES, [CHAR, "user"]) + section(DATA, b"body")))
    assert message.message_id.startswith("delivery-")
    assert message.fault


def test_a_sender_cannot_claim_the_fault() -> None:
    payload = with_annotation("text", b"body")
    assert fault_of(received(payload.replace(b"own-marker", b"imds-bridg"))) == ""


@steady
@given(parts=st.lists(any_section, max_size=6))
def test_any_message_can_be_received(parts: list[bytes]) -> None:
    assert convert(received(b"".join(parts))).message_id


@steady
@given(payload=st.binary(max_size=60), at=st.integers(0, 200), junk=st.binary(max_size=4))
def test_bytes_that_are_no_message_can_be_received(payload: bytes, at: int, junk: bytes) -> None:
    whole = with_property(CHAR, b"body")
    for data in (payload, whole[:at] + junk + whole[at:], whole[:at]):
        assert convert(received(data)).message_id


def test_an_application_property_of_any_type_is_text() -> None:
    payload = section(APPLICATION, {"number": 7, "flag": True}) + section(DATA, b"")
    assert convert(received(payload)).properties == {"number": "7", "flag": "True"}
