"""Commands are read leniently in form and strictly in meaning."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.approvals.command import (
    MAX_BODY_BYTES,
    MAX_EVENT_IDS,
    NO_PROPERTIES,
    Command,
    parse_command,
    unwrap,
)
from tests.support.diff import steady

TYPE = "io.imdsbridge.command.approve.v1"


BINARY = {"cloudEvents_type": TYPE, "cloudEvents_id": "c-1", "cloudEvents_source": "urn:ops"}


def read(
    content: Any,
    *,
    message_id: str = "m-1",
    properties: Mapping[str, str] = NO_PROPERTIES,
    signed_id: str = "",
) -> Command:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return parse_command(body, message_id=message_id, properties=properties, signed_id=signed_id)


def envelope(**data: Any) -> dict[str, Any]:
    return {"specversion": "1.0", "id": "c-1", "source": "urn:ops", "type": TYPE, "data": data}


def test_a_cloud_event_is_read() -> None:
    command = read(
        envelope(
            EventIds=["A", "B"], Vm="web-0", RequestedBy="jo", Reason="now", ExpiresAt="2026-01-31T12:00:00Z"
        )
    )
    assert (command.id, command.event_ids, command.vm) == ("c-1", ("A", "B"), "web-0")
    assert (command.requested_by, command.reason, command.source) == ("jo", "now", "urn:ops")
    assert command.expires_at == datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_its_data_as_plain_json_is_read() -> None:
    assert read({"EventId": "A", "Id": "mine"}).id == "mine"


def in_base64(**changes: Any) -> dict[str, Any]:
    """Make a command whose data stands in Base64, with `changes`."""
    event = envelope(EventId="A")
    encoded = b64encode(json.dumps(event.pop("data")).encode()).decode()
    return {**event, "data_base64": encoded, **changes}


def test_the_data_of_a_cloud_event_may_stand_in_base64() -> None:
    assert read(in_base64()) == read(envelope(EventId="A"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_base64": "e30"}, "not Base64"),
        ({"data_base64": 7}, "no text"),
        ({"data": {"EventId": "B"}}, "beside data"),
        ({"data_base64": "W10="}, "object"),
    ],
)
def test_data_in_base64_that_is_none_is_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read(in_base64(**changes))


def test_a_command_without_an_id_has_that_of_its_message() -> None:
    assert read({"EventId": "A"}, message_id="m-7").id == "m-7"


def test_a_body_as_imds_accepts_it_is_read() -> None:
    assert read({"StartRequests": [{"EventId": "A"}, {"EventId": "B"}]}).event_ids == ("A", "B")


# CloudEvents in binary mode, and text in text


@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:", "cloudevents_"])
def test_in_binary_mode_the_attributes_are_application_properties(prefix: str) -> None:
    properties = {name.replace("cloudEvents_", prefix): value for name, value in BINARY.items()}
    command = read({"EventId": "A", "Vm": "web-0"}, properties=properties | {"priority": "1"})
    assert (command.id, command.source, command.event_ids, command.vm) == ("c-1", "urn:ops", ("A",), "web-0")


def test_a_command_is_the_same_in_structured_and_in_binary_mode() -> None:
    assert read({"EventId": "A"}, properties=BINARY) == read(envelope(EventId="A"))


def test_the_id_of_an_event_in_binary_mode_goes_before_that_of_data_and_message() -> None:
    assert read({"EventId": "A", "Id": "mine"}, message_id="m-7", properties=BINARY).id == "c-1"


def test_a_structured_event_may_repeat_its_attributes_as_properties() -> None:
    repeated = BINARY | {"cloudEvents_id": "outside"}
    assert read(envelope(EventId="A"), properties=repeated) == read(envelope(EventId="A"))


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        (BINARY | {"cloudEvents_type": "io.imdsbridge.bridge.test.v1"}, "CloudEvent of type"),
        (BINARY | {"cloudEvents_type": ""}, "CloudEvent of type"),
        ({"cloudEvents_id": "c-1"}, "CloudEvent of type"),
        ({"cloudEvents_type": TYPE}, "CloudEvent without an id"),
        (BINARY | {"cloudEvents:type": "other"}, "given twice"),
    ],
)
def test_another_event_in_binary_mode_is_refused(properties: dict[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        read({"EventId": "A"}, properties=properties)


def test_properties_of_another_type_make_a_structured_event_refused() -> None:
    with pytest.raises(ValueError, match="CloudEvent of type"):
        read(envelope(EventId="A"), properties=BINARY | {"cloudEvents_type": "other"})


@pytest.mark.parametrize("data", [{"EventId": "A"}, {"EventId": "A", "Id": "mine"}])
def test_a_signed_command_has_one_key_whatever_stands_outside_its_body(data: dict[str, str]) -> None:
    keys = {
        read(data, signed_id="s-1", message_id=message_id, properties=properties).key
        for message_id in ("m-1", "m-2")
        for properties in (NO_PROPERTIES, BINARY, BINARY | {"cloudEvents_id": "d", "cloudEvents_source": "x"})
    }
    assert len(keys) == 1


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \r\n"])
def test_a_json_string_is_unwrapped_once(before: bytes) -> None:
    text = '{"EventId": "A\u00e9"}'
    once = json.dumps(text)
    assert unwrap(before + once.encode()) == text.encode()
    assert unwrap(json.dumps(once).encode()) == once.encode()


@pytest.mark.parametrize("body", [b"", b'{"EventId": "A"}', b'"open', b'"a" "b"', b'"\xff"', b"[]"])
def test_a_body_that_is_not_a_json_string_stays_as_it_is(body: bytes) -> None:
    assert unwrap(body) is body


def test_a_body_that_is_too_large_is_not_unwrapped() -> None:
    body = b'"' + b" " * MAX_BODY_BYTES + b'"'
    assert unwrap(body) is body


def test_a_byte_order_mark_is_ignored() -> None:
    assert read(b'\xef\xbb\xbf{"EventId": "A"}').event_ids == ("A",)


def test_an_event_named_twice_in_different_letter_case_counts_once() -> None:
    assert len(read({"EventIds": ["abc", "ABC"]}).event_ids) == 1


@pytest.fixture
def in_tokyo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="only POSIX has time.tzset")
@pytest.mark.usefixtures("in_tokyo")
def test_an_expiry_without_a_zone_is_utc_whatever_the_local_zone_is() -> None:
    assert read({"EventId": "A", "ExpiresAt": "2026-01-31T12:00:00"}).expires_at == datetime(
        2026, 1, 31, 12, tzinfo=UTC
    )


def test_the_key_is_the_same_for_the_same_command_in_any_letter_case_and_order() -> None:
    one, other = (
        read(envelope(EventIds=["a", "B"], Vm="WEB-0")),
        read(envelope(EventIds=["b", "A"], Vm="web-0")),
    )
    assert one.key == other.key


@pytest.mark.parametrize("change", [{"id": "c-2"}, {"source": "urn:other"}, {"data": {"EventIds": ["B"]}}])
def test_the_key_differs_with_id_source_and_events(change: dict[str, Any]) -> None:
    given = envelope(EventIds=["A"])
    assert read(given).key != read({**given, **change}).key


def test_the_key_differs_with_the_vm() -> None:
    assert read(envelope(EventId="A", Vm="web-0")).key != read(envelope(EventId="A")).key


def test_texts_that_are_repeated_in_the_receipt_are_printable_and_bounded() -> None:
    command = read({"EventId": "A", "Reason": "line\nbreak\x00\ud800" + "x" * 5000})
    assert command.reason.startswith("linebreakx")
    assert len(command.reason) == 1000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not UTF-8"),
        ('{"EventId":"A"}'.encode("utf-16-le"), "not JSON"),
        ('{"EventId":"A"}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"EventId":' * 20_000 + b"1" + b"}" * 20_000, "nested too deeply"),
        (b"9" * 10_000, "not JSON"),
        (b'"text"', "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "EventId that is not 1 to 200"),
        (b" " * (MAX_BODY_BYTES + 1), "at most"),
        ({"EventId": ""}, "EventId that is not 1 to 200"),
        ({"EventId": 5}, "EventId that is not 1 to 200"),
        ({"EventId": "a b"}, "EventId that is not 1 to 200"),
        ({"EventId": "x" * 201}, "EventId that is not 1 to 200"),
        ({"EventId": "\ud800"}, "EventId that is not 1 to 200"),
        ({"EventIds": []}, "0 EventIds"),
        ({"EventId": "A", "EventIds": ["B"]}, "EventIds and EventId together"),
        ({"EventId": "A", "StartRequests": [{"EventId": "B"}]}, "StartRequests and EventId together"),
        ({"EventIds": ["A"] * (MAX_EVENT_IDS + 1)}, "EventIds"),
        ({"EventIds": "A"}, "is not a list"),
        ({"EventIds": {"A": 1}}, "is not a list"),
        ({"EventIds": [["A"]]}, "EventId that is not 1 to 200"),
        ({"StartRequests": {"EventId": "A"}}, "is not a list"),
        ({"StartRequests": ["A"]}, "EventId that is not 1 to 200"),
        ({"EventId": "A", "ExpiresAt": "soon"}, "ExpiresAt"),
        ({"EventId": "A", "ExpiresAt": 5}, "ExpiresAt"),
        ({"EventId": "A", "ExpiresAt": [["x"] * 1000]}, "ExpiresAt"),
        ({"EventId": "A", "ExpiresAt": "0001-01-01T00:00:00+14:00"}, "ExpiresAt"),
        ({"EventId": "A", "Vm": 5}, "Vm"),
        ({"EventId": "A", "Vm": ["web-0"]}, "Vm"),
        ({"EventId": "A", "Vm": "\u200b"}, "Vm"),
        ({"EventId": "A", "Vm": "web\x000"}, "Vm"),
        ({**envelope(EventId="A"), "type": "other"}, "type"),
        ({**envelope(EventId="A"), "type": ["x"] * 10_000}, "type"),
        ({**envelope(EventId="A"), "type": "x" * 10_000}, "type"),
        ({**envelope(EventId="A"), "data": "A"}, "data"),
        ({**envelope(EventId="A"), "id": ""}, "without an id"),
        ({**envelope(EventId="A"), "id": 5}, "without an id"),
    ],
)
def test_a_body_that_is_not_a_command_is_refused_with_a_short_reason(content: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        read(content)
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
KEYS = [
    "EventId",
    "EventIds",
    "StartRequests",
    "Vm",
    "Id",
    "Reason",
    "ExpiresAt",
    "specversion",
    "type",
    "data",
    "id",
]


@steady
@given(
    st.binary() | JSON | st.dictionaries(st.sampled_from(KEYS), JSON | st.just(TYPE)),
    st.dictionaries(
        st.sampled_from(["cloudEvents_type", "cloudEvents:id", "cloudEvents_"]) | st.text(), st.text()
    ),
)
def test_no_message_raises_anything_but_value_error(content: Any, properties: dict[str, str]) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        command = read(unwrap(body), properties=properties)
    except ValueError:
        return
    assert 1 <= len(command.event_ids) <= MAX_EVENT_IDS
