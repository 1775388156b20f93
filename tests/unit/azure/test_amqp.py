"""Whatever a sender has encoded, a message can be read as far as that goes, and settled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from azure.servicebus import ServiceBusReceivedMessage
from hypothesis import given
from hypothesis import strategies as st

from bridge.azure import amqp
from bridge.azure.bus_receiver import convert
from bridge.azure.internals import _decode, fault_of
from tests.support.amqp import (
    APPLICATION,
    DATA,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    described,
    write,
    write_compound,
)
from tests.support.undecodable import (
    CHAR,
    VALUES,
    any_section,
    any_value,
    with_annotation,
    with_body,
    with_property,
)


def received(payload: bytes) -> ServiceBusReceivedMessage:
    """Build a message as the SDK does when a transfer has arrived."""
    frame: Any = [None] * 12
    return ServiceBusReceivedMessage(
        _decode(memoryview(payload)), receiver=SimpleNamespace(session=None), frame=frame
    )


def test_a_message_that_the_sdk_can_decode_has_no_fault() -> None:
    message = convert(received(with_property(write("text"), b"body", message_id="m")), 0)
    assert (message.fault, message.body, message.message_id) == ("", b"body", "m")
    assert message.properties == {"good": "text", "bad": "text"}


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_a_property_that_the_sdk_cannot_decode_leaves_the_id_the_body_and_the_other_properties(
    value: bytes,
) -> None:
    message = convert(received(with_property(value, b"body", message_id="m")), 0)
    assert (message.body, message.message_id) == (b"body", "m")
    assert message.properties["good"] == "text"
    with pytest.raises(ValueError, match="cannot decode"):
        message.decoded_body()


def test_binary_properties_that_are_no_text_are_no_fault() -> None:
    message = convert(received(with_property(write(b"a\xff"), b"body", message_id="m")), 0)
    assert (message.fault, message.properties) == ("", {"good": "text", "bad": "a\N{REPLACEMENT CHARACTER}"})


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_a_body_that_the_sdk_cannot_decode_is_empty(value: bytes) -> None:
    message = convert(received(with_body(value, message_id="m")), 0)
    assert message.message_id == "m"
    assert message.fault or message.body == b"" or value == VALUES["a decimal128"]


def test_an_annotation_that_the_sdk_cannot_decode_leaves_the_others() -> None:
    annotations = write_compound(
        0xC1, 4, write("x-opt-sequence-number") + write(7) + write("x-opt-mine") + CHAR
    )
    payload = described(MESSAGE_ANNOTATIONS, annotations) + with_body(write("body"))
    message = convert(received(payload), 0)
    assert message.sequence_number == 7
    assert message.fault


def test_an_id_that_the_sdk_cannot_decode_is_replaced() -> None:
    properties = write_compound(0xC0, 2, CHAR + write("user"))
    message = convert(received(described(PROPERTIES, properties) + described(DATA, write(b"body"))), 0)
    assert message.message_id.startswith("sequence-number-")
    assert message.body == b"body"
    assert message.fault


def test_a_sender_cannot_claim_the_fault() -> None:
    payload = with_annotation(write("text"), b"body")
    assert fault_of(received(payload.replace(b"x-opt-mine", b"imds-bridg"))) == ""


@given(parts=st.lists(any_section, max_size=6))
def test_any_message_can_be_received_and_the_properties_section_behind_it_is_found(
    parts: list[bytes],
) -> None:
    payload = b"".join(parts)
    message = convert(received(payload), 0)
    assert message.message_id
    codes = [code for code, _ in amqp.sections(memoryview(payload))]
    assert len(codes) == len(parts)


@given(payload=st.binary(max_size=60), at=st.integers(0, 200), junk=st.binary(max_size=4))
def test_bytes_that_are_no_message_can_be_received(payload: bytes, at: int, junk: bytes) -> None:
    whole = with_property(CHAR, b"body")
    for data in (payload, whole[:at] + junk + whole[at:], whole[:at]):
        assert convert(received(data), 0).message_id


@given(value=any_value)
def test_the_end_of_a_value_is_where_the_next_one_starts(value: bytes) -> None:
    assert amqp.end_of_value(memoryview(value + b"\x40"), 0) == len(value)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xa1\x05abc", b"\x10", b"\xb1\xff\xff\xff\xff", b"\x00" * 100_000]
)
def test_a_value_that_does_not_end_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"ends after its message|constructor"):
        amqp.end_of_value(memoryview(data), 0)


def test_only_a_list_or_a_map_has_items() -> None:
    assert list(amqp.items(memoryview(b"\x45"))) == []
    assert [bytes(item) for item in amqp.items(memoryview(write(["a", None])))] == [write("a"), b"\x40"]
    with pytest.raises(ValueError, match="neither a list nor a map"):
        list(amqp.items(memoryview(write("text"))))


def test_an_application_property_of_any_type_is_text() -> None:
    payload = described(APPLICATION, write({"number": 7, "flag": True})) + described(DATA, write(b""))
    assert convert(received(payload), 0).properties == {"number": "7", "flag": "True"}
