"""Messages keep what their senders wrote, and what Service Bus refuses is refused."""

from __future__ import annotations

import sys
import uuid
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("posix: proton has no wheel for Windows", allow_module_level=True)

import proton

from bridge.lab.servicebus.messages import (
    ARGUMENT,
    DECODE,
    NOT_IMPLEMENTED,
    Message,
    Refused,
    parse,
    parse_transfer,
)
from tests.support.bus_messages import DATA, content, encoded, section


def decoded(message: Message) -> Any:
    found = proton.Message()
    found.decode(message.encode())
    return found


def stored(**options: Any) -> Message:
    return Message(**{"content": content("1"), "sequence_number": 9, "enqueued_at": 1.5, **options})


def test_a_message_keeps_its_properties_and_body_on_the_way_to_a_receiver() -> None:
    given = proton.Message(
        body=b"\x00body",
        id="m1",
        subject="s",
        correlation_id="c",
        content_type="application/json",
        group_id="g",
        properties={"text": "t", "number": 5, "small": proton.int32(7), "flag": True},
        annotations={"x-opt-partition-key": "g", "x-opt-sequence-number": 1},
    )
    given.inferred = True
    taken = parse(given.encode())
    assert (taken.message_id, taken.session_id, taken.body) == ("m1", "g", b"\x00body")
    assert taken.application_properties == {"text": "t", "number": 5, "small": 7, "flag": True}
    token = uuid.uuid4()
    message = stored(content=taken, delivery_count=2, lock_token=token, locked_until=61.5, expires_at=61.5)
    sent = decoded(message)
    assert (sent.id, sent.subject, sent.correlation_id, sent.group_id) == ("m1", "s", "c", "g")
    assert sent.properties == given.properties
    assert type(sent.properties["small"]) is proton.int32
    assert (sent.delivery_count, sent.ttl, bytes(sent.body)) == (2, 60, b"\x00body")
    assert sent.instructions == {"x-opt-lock-token": token}
    assert {str(name): value for name, value in sent.annotations.items()} == {
        "x-opt-enqueued-time": 1500,
        "x-opt-sequence-number": 9,
        "x-opt-message-state": 0,
        "x-opt-locked-until": 61500,
        "x-opt-partition-key": "g",
    }


def test_properties_that_are_set_replace_those_of_the_sender_and_the_others_keep_their_types() -> None:
    properties = {f"name{number}": f"value{number}" for number in range(200)}
    given = proton.Message(body=b"1", properties={**properties, "small": proton.int32(5), "name": "old"})
    more = {"name": "new", "DeadLetterReason": "r"}
    changed = parse(given.encode()).with_properties(more)
    sent = decoded(stored(content=changed, dead_letter_source="q"))
    assert sent.properties == {**properties, "small": 5, **more}
    assert type(sent.properties["small"]) is proton.int32
    assert {str(n): v for n, v in sent.annotations.items()}["x-opt-deadletter-source"] == "q"
    assert not sent.instructions


def test_a_batch_is_taken_apart() -> None:
    batch = b"".join(section(DATA, encoded(str(number) * 300)) for number in range(9))
    assert [one.body for one in parse_transfer(batch)] == [str(number).encode() * 300 for number in range(9)]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x00", b"\x00\x53", b"\x00Spdata", b"\x00\x53\x75\xa0\x09short", b"\x00\x80"]
)
def test_a_single_message_is_not_a_batch_whatever_its_body(body: bytes) -> None:
    (only,) = parse_transfer(section(DATA, body))
    assert only.body == body


@pytest.mark.parametrize(
    "data",
    [b"x", b"\x00", b"\x00\x53\x10\x45", b"\x00\x53\x75\xa0\x09short", encoded()[:-3], b"\x00" * 100_000],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(Refused) as caught:
        parse_transfer(data)
    assert caught.value.condition == DECODE


def refusal(**options: Any) -> str:
    try:
        parse_transfer(encoded(**options))
    except Refused as refused:
        return refused.condition
    return ""


def test_what_service_bus_refuses_is_refused_and_what_it_accepts_is_not() -> None:
    for name in ("message_id", "session_id"):
        assert refusal(**{name: "x" * 128}) == ""
        assert refusal(**{name: "x" * 129}) == ARGUMENT
    assert refusal(properties={"a": "x" * 32_768}) == ""
    assert refusal(properties={"a": "x" * 32_769}) == ARGUMENT
    assert refusal(properties={"a": "x" * 32_000, "b": "x" * 32_000}) == ""
    assert refusal(properties={"a": "x" * 32_000, "b": "x" * 32_000, "c": "x" * 2_000}) == ARGUMENT
    assert refusal(session_id="s", annotations={"x-opt-partition-key": "s"}) == ""
    assert refusal(session_id="s", annotations={"x-opt-partition-key": "t"}) == ARGUMENT
    assert refusal(annotations={"x-opt-scheduled-enqueue-time": 1}) == NOT_IMPLEMENTED
