"""Commands are read leniently in form and strictly in meaning."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.approvals.command import (
    MAX_BODY_BYTES,
    MAX_EVENT_IDS,
    Command,
    find_id,
    parse_command,
    unwrap,
)
from tests.support.diff import json_values, steady

TYPE = "io.imdsbridge.command.approve.v1"
BINARY = {"cloudEvents_type": TYPE, "cloudEvents_id": "c-1", "cloudEvents_source": "urn:ops"}
PLAIN = {"EventId": "A"}
NO_PROPERTIES: dict[str, str] = {}


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


def in_base64(**changes: Any) -> dict[str, Any]:
    """Make a command whose data stands in Base64, with `changes`."""
    event = envelope(**PLAIN)
    encoded = b64encode(json.dumps(event.pop("data")).encode()).decode()
    return {**event, "data_base64": encoded, **changes}


def test_a_cloud_event_is_read() -> None:
    texts = {"Vm": "web-0", "RequestedBy": "jo", "Reason": "now", "ExpiresAt": "2026-01-31T12:00:00Z"}
    command = read(envelope(EventIds=["A", "B"], **texts))
    assert (command.id, command.event_ids, command.vm) == ("c-1", ("A", "B"), "web-0")
    assert (command.requested_by, command.reason) == ("jo", "now")
    assert command.expires_at == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("content", "event_ids"),
    [
        ({"StartRequests": [{"EventId": "A"}, {"EventId": "B"}]}, ("A", "B")),  # as IMDS accepts it
        (b'\xef\xbb\xbf{"EventId": "A"}', ("A",)),
        ({"EventIds": ["abc", "X", "ABC"]}, ("ABC", "X")),
        (
            {"EventId": "A", "EventIds": None, "StartRequests": None},
            ("A",),
        ),  # as classes of our schema write it
        (
            {"EventIds": [f"{number}" for number in range(MAX_EVENT_IDS)]},
            tuple(map(str, range(MAX_EVENT_IDS))),
        ),
    ],
)
def test_a_command_names_each_event_once(content: Any, event_ids: tuple[str, ...]) -> None:
    assert read(content).event_ids == event_ids


OTHER_PREFIXES = [
    {name.replace("cloudEvents_", prefix): value for name, value in BINARY.items()} | {"priority": "1"}
    for prefix in ("cloudEvents:", "cloudevents_")
]


@pytest.mark.parametrize(
    ("content", "properties"),
    [
        (in_base64(), NO_PROPERTIES),
        (PLAIN, BINARY),  # binary mode: the attributes are application properties
        *((PLAIN, properties) for properties in OTHER_PREFIXES),
        (envelope(**PLAIN), BINARY | {"cloudEvents_id": "outside"}),  # a structured event may repeat them
    ],
)
def test_a_command_is_the_same_in_every_form_of_an_event(content: Any, properties: Mapping[str, str]) -> None:
    assert read(content, properties=properties) == read(envelope(**PLAIN))


def test_the_id_is_that_of_the_event_else_of_the_data_else_of_the_message() -> None:
    named = PLAIN | {"Id": "mine"}
    assert read(named, message_id="m-7", properties=BINARY).id == "c-1"
    assert read(named, message_id="m-7").id == "mine"
    assert read(PLAIN, message_id="m-7").id == "m-7"


@pytest.mark.parametrize("data", [PLAIN, PLAIN | {"Id": "mine"}])
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


TOO_LARGE = b'"' + b" " * MAX_BODY_BYTES + b'"'


@pytest.mark.parametrize(
    "body", [b"", b'{"EventId": "A"}', b'"open', b'"a" "b"', b'"\xff"', b"[]", TOO_LARGE], ids=range(7)
)
def test_a_body_that_is_not_a_json_string_within_the_limit_stays_as_it_is(body: bytes) -> None:
    assert unwrap(body) is body


NET = b"@\x06string\x083http://schemas.microsoft.com/2003/10/Serialization/"
LONG_TEXT = b'{"EventId": "A", "Reason": "' + b"x" * 300 + b'"}'


@pytest.mark.parametrize(
    ("rest", "text"),
    [
        (b'\x99\x10{"EventId": "A"}', b'{"EventId": "A"}'),
        (b'\x98\x08{"EventI\x98\x08d": "A"}\x01', b'{"EventId": "A"}'),
        (b"\x9b" + len(LONG_TEXT).to_bytes(2, "little") + LONG_TEXT, LONG_TEXT),
        (b"\x9d" + len(LONG_TEXT).to_bytes(4, "little") + LONG_TEXT, LONG_TEXT),
        (b"\x9d\xfb\xff\xff\xffA", b"A"),  # -5, if the length were read as a signed number
        (b"\x99", b""),
        (b"\x85", b""),
    ],
)
def test_a_text_of_dotnets_serializer_is_read_as_what_it_holds(rest: bytes, text: bytes) -> None:
    assert unwrap(NET + rest) == (text or NET + rest)


@pytest.mark.parametrize(
    ("body", "properties", "expected"),
    [
        (b'{"Id": "order-17"}', NO_PROPERTIES, "order-17"),
        (b'{"Id": "order-17", "Vm": "a", "Vm": "b"}', NO_PROPERTIES, "order-17"),
        (b'{"specversion": "1.0", "id": "c-1", "data": 7}', NO_PROPERTIES, "c-1"),
        (b'{"Id": "other"}', BINARY, "c-1"),
        (b"{}", NO_PROPERTIES, ""),
        (b"nonsense", BINARY, ""),
    ],
)
def test_the_id_of_what_is_no_command_is_found(
    body: bytes, properties: Mapping[str, str], expected: str
) -> None:
    assert find_id(body, properties) == expected


def test_the_key_is_of_id_source_vm_and_events_in_any_letter_case_and_order() -> None:
    event = envelope(EventIds=["a", "B"], Vm="WEB-0")
    assert read(event).key == read(envelope(EventIds=["b", "A"], Vm="web-0")).key
    others = [
        event | {"id": "c-2"},
        event | {"source": "urn:other"},
        envelope(EventIds=["B"], Vm="WEB-0"),
        envelope(EventIds=["a", "B"]),
    ]
    assert len({read(one).key for one in (event, *others)}) == 5


def test_texts_that_are_repeated_in_the_receipt_are_printable_and_bounded() -> None:
    command = read({"EventId": "A", "Reason": "line\nbreak\x00\ud800" + "x" * 5000})
    assert command.reason.startswith("linebreakx")
    assert len(command.reason) == 1000


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
        read(PLAIN, properties=properties)
    if "of type" in expected and "cloudEvents_type" in properties:
        with pytest.raises(ValueError, match=expected):
            read(envelope(**PLAIN), properties=properties)


NO_IDS: list[Any] = ["", 5, "a b", "x" * 201, "\ud800"]
NO_TIMES: list[Any] = ["soon", 5, [["x"] * 1000], "0001-01-01T00:00:00+14:00"]
# What the schema refuses, too: no zone (a C# DateTime of kind Unspecified), no time, a week, no T, small letters.
NO_TIMES += ["2026-01-31T12:00:00", "2026-01-31", "2026-W05-6T12:00:00Z", "2026-01-31 12:00:00Z"]
NO_TIMES += ["2026-01-31t12:00:00z", "20260131T120000Z", "2026-01-31T12:00Z", "2026-01-31T12:00:00+0100"]
NO_NAMES: list[Any] = [5, ["web-0"], "\u200b", "web\x000"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff\xfe\x00", "not UTF-8"),
        ('{"EventId":"A"}'.encode("utf-16-le"), "not JSON"),
        (b'{"EventId":' * 20_000 + b"1" + b"}" * 20_000, "nested too deeply"),
        (b'"text"', "not a JSON object"),
        *(
            (f'{{"EventId":"A","Note":{one}}}'.encode(), "not JSON")
            for one in ("NaN", "Infinity", "-Infinity")
        ),
        (b" " * (MAX_BODY_BYTES + 1), "at most"),
        *(({"EventId": event_id}, "expected 1 to 200 printable") for event_id in NO_IDS),
        *(({"EventIds": [event_id]}, "expected 1 to 200 printable") for event_id in (["A"], "a b", None)),
        ({"StartRequests": ["A"]}, "expected 1 to 200 printable"),
        *((none, "no EventId, EventIds or StartRequests, expected") for none in (b"{}", {"EventId": None})),
        *((PLAIN | {name: "x"}, f"{name!r}, expected .*: letter case") for name in ("vm", "expiresAt", "id")),
        ({"eventId": "A"}, "'eventId', expected EventId: letter case matters"),
        ({"StartRequests": [{"eventid": "A"}]}, "'eventid', expected EventId: letter case matters"),
        *((twice, "'Vm' is given twice") for twice in (b'{"EventId":"A","Vm":"a","Vm":"b"}',)),
        (
            b'{"specversion":"1.0","id":"c","type":"T","data":{"EventId":"A","Vm":"a","Vm":"a"}}',
            "given twice",
        ),
        ({"EventIds": []}, "0 EventIds"),
        ({"EventIds": ["A"] * (MAX_EVENT_IDS + 1)}, f"{MAX_EVENT_IDS + 1} EventIds"),
        ({"EventId": "A", "EventIds": ["B"]}, "EventIds and EventId together, expected one"),
        ({"EventId": "A", "StartRequests": [{"EventId": "B"}]}, "StartRequests and EventId together"),
        *(({name: {"EventId": "A"}}, "is not a list") for name in ("EventIds", "StartRequests")),
        ({"EventIds": "A"}, "is not a list"),
        *((PLAIN | {"ExpiresAt": text}, "ExpiresAt") for text in NO_TIMES),
        *((PLAIN | {"Vm": name}, "Vm is not a name") for name in NO_NAMES),
        *(
            (envelope(**PLAIN) | {"type": text}, "of type")
            for text in ("other", ["x"] * 10_000, "x" * 10_000)
        ),
        *((envelope(**PLAIN) | {"id": text}, "without an id") for text in ("", 5)),
        (envelope(**PLAIN) | {"data": "A"}, "without an object as data"),
        (in_base64(data_base64="e30"), "not Base64"),
        (in_base64(data_base64=7), "no text"),
        (in_base64(data=PLAIN), "beside data"),
        (in_base64(data_base64="W10="), "not a JSON object"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value)[:40],
)
def test_a_body_that_is_not_a_command_is_refused_with_a_short_reason(content: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=expected) as caught:
        read(content)
    assert len(str(caught.value)) < 300


KEYS = ["EventId", "EventIds", "StartRequests", "Vm", "Id", "Reason", "ExpiresAt"]
ATTRIBUTES = ["specversion", "type", "data", "id"]
PREFIXED = st.sampled_from(["cloudEvents_type", "cloudEvents:id", "cloudEvents_"]) | st.text()


@steady
@given(
    st.binary()
    | json_values()
    | st.dictionaries(st.sampled_from(KEYS + ATTRIBUTES), json_values() | st.just(TYPE)),
    st.dictionaries(PREFIXED, st.text()),
)
def test_no_message_raises_anything_but_value_error(content: Any, properties: dict[str, str]) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        command = read(unwrap(body), properties=properties)
    except ValueError:
        return
    assert 1 <= len(command.event_ids) <= MAX_EVENT_IDS
