"""Messages are read and written like in an independent AMQP library, proton."""

from __future__ import annotations

import uuid
from typing import Any

import proton
import pytest

from bridge.lab.servicebus.codec import (
    LONG,
    STRING,
    TIMESTAMP,
    UUID,
    Array,
    Int,
    Malformed,
    Symbol,
    Timestamp,
    described,
    read,
    write,
)
from bridge.lab.servicebus.sections import DATA, compose, parse, parse_transfer, reply
from tests.support.bus_messages import content, encoded

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    127,
    -128,
    2**40,
    -(2**40),
    1.5,
    "",
    "text",
    "ü" * 300,
    b"",
    b"x" * 300,
    uuid.UUID(int=5),
    {"a": 1, "b": {"c": [1, 2, "3"]}},
    [],
    ["x"] * 300,
    {str(number): number for number in range(200)},
]


def decoded(data: bytes) -> Any:
    message = proton.Message()
    message.decode(data)
    return message


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}-{str(value)[:12]}")
def test_a_value_that_is_written_is_read_back_here_and_by_proton(value: Any) -> None:
    data = write(value)
    assert read(data) == (value, len(data))
    assert decoded(reply("id", {}, value)).body == value


@pytest.mark.parametrize("value", [v for v in VALUES if v is not None], ids=lambda v: f"{str(v)[:12]}")
def test_a_value_that_proton_writes_is_read(value: Any) -> None:
    message = proton.Message(body=value)
    message.inferred = False
    assert parse(message.encode()).value == value


def test_arrays_and_special_numbers_are_as_proton_reads_them() -> None:
    value = {
        "tokens": Array(UUID, [uuid.UUID(int=1), uuid.UUID(int=2)]),
        "times": Array(TIMESTAMP, [1, 2]),
        "numbers": Array(LONG, list(range(100))),
        "names": Array(STRING, ["a", "b"]),
        "code": Int(200),
        "at": Timestamp(5),
        "symbol": Symbol("s"),
    }
    body = decoded(reply("id", {}, value)).body
    assert list(body["tokens"].elements) == [uuid.UUID(int=1), uuid.UUID(int=2)]
    assert list(body["times"].elements) == [1, 2]
    assert list(body["numbers"].elements) == list(range(100))
    assert list(body["names"].elements) == ["a", "b"]
    assert (body["code"], body["at"], body["symbol"]) == (200, 5, "s")
    assert read(write(value))[0]["tokens"] == [uuid.UUID(int=1), uuid.UUID(int=2)]


def test_a_message_keeps_its_properties_and_body_on_the_way_to_a_receiver() -> None:
    given = proton.Message(
        body=b"\x00body",
        id="m1",
        subject="s",
        correlation_id="c",
        content_type="application/json",
        group_id="g",
        properties={"text": "t", "number": 5, "small": proton.int32(7), "flag": True},
        annotations={"x-opt-partition-key": "p"},
    )
    given.inferred = True
    taken = parse(given.encode())
    assert (taken.message_id, taken.session_id, taken.body) == ("m1", "g", b"\x00body")
    assert taken.application_properties == {"text": "t", "number": 5, "small": 7, "flag": True}
    sent = decoded(
        compose(
            taken, sequence_number=9, enqueued_at=1.5, delivery_count=2, locked_until=61.5, ttl_seconds=60
        )
    )
    assert (sent.id, sent.subject, sent.correlation_id, sent.group_id) == ("m1", "s", "c", "g")
    assert sent.properties == given.properties
    assert type(sent.properties["small"]) is proton.int32
    assert (sent.delivery_count, sent.ttl, bytes(sent.body)) == (2, 60, b"\x00body")
    annotations = {str(name): value for name, value in sent.annotations.items()}
    assert annotations == {
        "x-opt-enqueued-time": 1500,
        "x-opt-sequence-number": 9,
        "x-opt-message-state": 0,
        "x-opt-locked-until": 61500,
        "x-opt-partition-key": "p",
    }


@pytest.mark.parametrize("count", [0, 1, 200])
def test_a_dead_letter_has_two_application_properties_more(count: int) -> None:
    properties = {f"name{number}": f"value{number}" for number in range(count)}
    more = {"DeadLetterReason": "r", "DeadLetterErrorDescription": "d"}
    data = compose(
        content(properties=properties).with_properties(more),
        sequence_number=1,
        enqueued_at=1,
        delivery_count=0,
        dead_letter_source="q",
    )
    sent = decoded(data)
    assert sent.properties == {**properties, **more}
    assert {str(n): v for n, v in sent.annotations.items()}["x-opt-deadletter-source"] == "q"


def test_a_property_that_is_set_replaces_that_of_the_sender_and_the_others_keep_their_types() -> None:
    given = content(properties={"small": Int(5), "name": "old"})
    data = compose(
        given.with_properties({"name": proton.symbol("new"), "more": proton.int32(7)}),
        sequence_number=1,
        enqueued_at=1,
        delivery_count=0,
    )
    sent = decoded(data).properties
    assert sent == {"small": 5, "name": "new", "more": 7}
    assert type(sent["small"]) is proton.int32


def test_the_lock_token_of_a_message_is_a_delivery_annotation() -> None:
    token = uuid.uuid4()
    data = compose(content("1"), sequence_number=1, enqueued_at=1, delivery_count=0, lock_token=token)
    assert decoded(data).instructions == {"x-opt-lock-token": token}
    assert not decoded(compose(content("1"), sequence_number=1, enqueued_at=1, delivery_count=0)).instructions


def test_a_batch_is_taken_apart() -> None:
    batch = b"".join(described(DATA, write(encoded(str(number)))) for number in range(300))
    assert [one.body for one in parse_transfer(batch)] == [str(number).encode() for number in range(300)]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x00", b"\x00\x53", b"\x00Spdata", b"\x00\x53\x75\xa0\x09short", b"\x00\x80"]
)
def test_a_single_message_is_not_a_batch_whatever_its_body(body: bytes) -> None:
    data = described(DATA, write(body))
    (only,) = parse_transfer(data)
    assert only.body == body


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        b"\x00",
        b"\x00\x53",
        b"\x00\x53\x75",
        b"\x00\x53\x75\xb0\xff\xff\xff\xff",
        b"\x00\x53\x73\xa0\x01x",
        b"\x00\x53\x10\x45",
        b"\x00\xa3\x01x\x45",
        b"\x00\x53\x73\xc0\x03\x01\xa1\xff",
        b"\x00\x53\x72\xd1\x00\x00\x00\x08\x00\x00\x00\x03\x40\x40\x40\x40",
        b"\x00\x53\x73" + b"\xc0\x02\x01" * 100,
        b"\x00" * 5000,
    ],
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data)
