"""CloudEvents that others have written: what identifies them, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.events.envelope import MAX_BODY_BYTES, MAX_DEPTH, MAX_TEXT_CHARACTERS, event_key, read_event
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent, order_key
from tests.support.diff import json_values, steady, thorough
from tests.support.process import stored_event
from tests.support.relay import TYPE, body_of
from tests.support.samples import EVENT_ID, samples

REQUIRED = ("specversion", "id", "source", "type")
NO_IDS: list[Any] = ["", 7, "x" * 129, "größe", " x"]

# What is no JSON at all is tested in tests/unit/runtime/test_text.py.
FAULTY: dict[str, tuple[bytes, str]] = {
    "a byte order mark": (b"\xef\xbb\xbf{}", "not JSON"),
    "NaN": (body_of("x").replace(b'"E"', b"NaN"), "NaN"),
    "infinity": (body_of("x").replace(b'"E"', b"-Infinity"), "-Infinity"),
    "a number beyond all": (body_of("x").replace(b'"E"', b"1e999"), "too large"),
    "too deep to be carried": (b'{"data":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "too deeply"),
    "too large": (b" " * MAX_BODY_BYTES + b"{}", "bytes"),
    **{f"no {name}": (body_of("x", **{name: None}), f"{name} is missing") for name in REQUIRED},
    "another specversion": (body_of("x", specversion="0.3"), "specversion is not"),
    **{f"the id {name!r:.9}": (body_of("x", id=name), "id is not 1 to 128") for name in NO_IDS},
    "an empty source": (body_of("x", source=""), "source is not a text"),
    "a type with a line": (body_of("x", type="a\r\nb"), "attribute type"),
    "a content type that no header can hold": (body_of("x", datacontenttype="größe"), "datacontenttype"),
    "a content type that is no text": (body_of("x", datacontenttype=7), "datacontenttype"),
    "a number as subject": (body_of("x", subject=7), "subject is not a text"),
    "half a pair": (body_of("x").replace(b'"E"', b'"\\ud800"'), "attribute subject"),
    "an object as attribute": (body_of("x", subject={}), "attribute subject"),
    "a fraction as attribute": (body_of("x", extra=0.5), "attribute extra"),
    "an invalid name": (body_of("x", Extra_1="x"), "'Extra_1'"),
    "an endless attribute": (body_of("x", subject="s" * (MAX_TEXT_CHARACTERS + 1)), "attribute subject"),
}


@pytest.mark.parametrize(("body", "why"), FAULTY.values(), ids=list(FAULTY))
def test_an_invalid_event_is_refused_with_a_short_reason(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        read_event(body)
    assert len(str(raised.value)) < 300


def test_an_event_may_be_nested_deeper_than_a_document_of_imds_and_have_long_attributes() -> None:
    texts = {"flag": True, "number": 7, "nothing": None, "subject": "s" * MAX_TEXT_CHARACTERS}
    data = b'{"data": ' + b"[" * 150 + b"]" * 150
    body = body_of("x" * 128, **texts).replace(b"{", data + b",", 1)
    assert read_event(body) == StoredEvent(id="x" * 128, type=TYPE, body=body)


def test_every_event_of_imds_bridge_can_be_relayed() -> None:
    for event in samples(datetime(2026, 1, 1, tzinfo=UTC)):
        assert read_event(event.body).id == event.id


def test_the_same_id_of_another_source_is_another_event() -> None:
    keys = {
        event_key(read_event(body_of(name, source=where))) for name in ("a", "b") for where in ("/s", "/t")
    }
    assert len(keys) == 4


attributes = st.sampled_from(["specversion", "id", "source", "type", "subject", "time", "data", "extra", "Ä"])


@steady
@given(
    changes=st.dictionaries(attributes, json_values()), cut=st.integers(0, 400), junk=st.binary(max_size=3)
)
def test_any_body_can_be_stored_or_is_refused(changes: dict[str, Any], cut: int, junk: bytes) -> None:
    whole = json.dumps(json.loads(body_of("x")) | changes).encode()
    for body in (whole, whole[:cut] + junk + whole[cut:]):
        try:
            event = read_event(body)
        except ValueError:
            continue
        assert f"{event.id}{event.envelope['source']}{event.type}".encode()
        assert len(event.id) <= 128


# What the order of events is promised for

SAMPLES = {
    event.type.removeprefix("io.imdsbridge.").removesuffix(".v1"): event.envelope
    for event in samples(datetime(2026, 1, 1, tzinfo=UTC))
}


def test_events_and_receipts_about_a_scheduled_event_belong_together() -> None:
    kinds = [kind for kind in SAMPLES if kind.startswith(("scheduledevent.", "approval."))]
    assert {order_key(SAMPLES[kind]) for kind in kinds} == {f"event {EVENT_ID}"}


def test_the_letter_case_of_an_event_id_does_not_matter() -> None:
    assert order_key({"correlationid": "ABC"}) == order_key({"correlationid": "abc"})


def test_the_vms_own_events_belong_to_their_reporter() -> None:
    kinds = ["document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat"]
    assert len({order_key(SAMPLES[kind]) for kind in kinds}) == 1
    other = {**SAMPLES["bridge.heartbeat"], "reporter": "web-1/forward"}
    assert order_key(other) != order_key(SAMPLES["bridge.heartbeat"])


def test_events_of_other_programs_belong_to_their_subject() -> None:
    event = {"id": "1", "source": "/a", "subject": "s"}
    assert order_key(event) == order_key({**event, "id": "2"})
    assert len({order_key(one) for one in (event, {**event, "subject": "t"}, {**event, "source": "/b"})}) == 3
    assert order_key({"id": "1"}) != order_key({"id": "2"})


# Which events a sink takes

SCHEDULED = "io.imdsbridge.scheduledevent.scheduled.v1"
DATA = {
    "EventType": "Reboot",
    "Resources": ["web-0", "web-1"],
    "DurationInSeconds": 0,
    "AffectsThisVm": True,
    "Description": "",
    "Extra": None,
    "Vm": {"Name": "web-0", "Tags": {"env": "test"}},
    "type": "data's own",
    "data": "inner",
}


def stored(event_type: str = SCHEDULED, **data: Any) -> StoredEvent:
    return stored_event(1, type_=event_type, subject="an-event", **{**DATA, **data})


WHOLE = ["*", SCHEDULED, "io.imdsbridge.scheduledevent.*", "io.imdsbridge.*.v1", "*.scheduled.*", "**"]
PARTS = ["io.imdsbridge.scheduledevent", "scheduledevent.*", "io.imdsbridge.imds.*", "io.*started*.v1", ""]
NO_WILDCARDS = ["io.imdsbridge.scheduledevent.SCHEDULED.v1", "io?imdsbridge?*", "[a-z.0-9]+"]


@pytest.mark.parametrize("pattern", WHOLE + PARTS + NO_WILDCARDS)
def test_a_pattern_matches_a_whole_type_and_only_the_star_is_a_wildcard(pattern: str) -> None:
    for types in ([pattern], ["io.imdsbridge.imds.*", pattern]):  # one of several is enough
        assert Filter(types=types).matches(stored()) is (pattern in WHOLE)
        assert Filter(types=types).matches_type(SCHEDULED) is (pattern in WHOLE)
    assert not Filter(types=["io.imdsbridge.*"]).matches_type("ioximdsbridge.x")
    assert Filter().matches(stored("anything at all"))


def test_a_pattern_with_many_stars_takes_no_longer() -> None:
    assert not Filter(types=["*a" * 60 + "b"]).matches_type("a" * 2000)
    assert Filter(types=["*.*e*" * 20]).matches_type("e." * 40 + "e")


# What each attribute or property of the event matches, and what it does not.
MATCHES: dict[str, tuple[list[Any], list[Any]]] = {
    "EventType": (["Reboot", ["Freeze", "Reboot"], ("Freeze", "Reboot")], ["reboot", "Freeze", []]),
    "type": ([SCHEDULED], ["data's own"]),
    "data": (["inner"], []),
    "Resources": (["web-1", ["db-1", "web-1"]], ["db-1"]),
    "Vm.Name": (["web-0"], []),
    "Vm.Tags.env": (["test"], []),
    "Vm.Tags.env.deeper": ([], ["test"]),
    "EventType.Name": ([], ["Reboot"]),
    "Missing": ([], ["x", ""]),
    "Missing.Deeper": ([], ["x"]),
    "Description": ([""], []),
    "Extra": ([], [""]),
    "DurationInSeconds": ([0, 0.0], [False, "0"]),
    "AffectsThisVm": ([True], [1, False]),
}


@pytest.mark.parametrize(("name", "values"), MATCHES.items(), ids=MATCHES)
def test_where_matches_if_each_has_one_of_its_values(name: str, values: tuple[list[Any], list[Any]]) -> None:
    for value in values[0]:
        assert Filter(where={name: value}).matches(stored())
        assert Filter(where={name: value, "subject": "an-event"}).matches(stored())
        assert not Filter(where={name: value, "subject": "another"}).matches(stored())
    assert not any(Filter(where={name: value}).matches(stored()) for value in values[1])


def test_a_sink_receives_what_matches_both_types_and_where() -> None:
    wanted = Filter(types=["*.scheduled.v1"], where={"EventType": "Reboot"})
    assert wanted.matches(stored())
    assert not wanted.matches(stored(EventType="Freeze"))
    assert not wanted.matches(stored("io.imdsbridge.scheduledevent.started.v1"))


@thorough
@given(
    st.dictionaries(st.text(max_size=5), st.text() | st.booleans() | st.integers(), max_size=3),
    json_values(),
)
def test_no_filter_fails_whatever_an_event_contains(where: dict[str, Any], data: Any) -> None:
    event = replace(stored(), body=json.dumps({"type": "t", "data": data}).encode())
    assert Filter(where=where).matches(event) in (True, False)


OWN = {"Name": "web-0", "VmId": "1"}
UNKNOWN = {"Name": "web-0", "VmId": ""}


@pytest.mark.parametrize(
    ("data", "by_self", "by_first"),
    [
        ({"Resources": ["web-0"], "Vm": OWN}, True, True),
        ({"Resources": ["_WEB-0", "web-1"], "Vm": OWN}, True, True),
        ({"Resources": [], "Vm": OWN}, True, True),
        ({"Resources": ["web-1", "web-2"], "Vm": OWN}, False, False),
        ({"Resources": ["web-1", "web-0"], "Vm": OWN}, True, False),
        ({"Resources": ["web-1"], "Vm": UNKNOWN, "AffectsThisVm": None}, True, True),
        # A VM that the settings name is known without an id.
        ({"Resources": ["web-1"], "Vm": {**UNKNOWN, "Name": "web-1"}, "AffectsThisVm": True}, True, True),
        ({"Resources": ["web-1"], "Vm": UNKNOWN, "AffectsThisVm": False}, False, False),
    ],
)
def test_a_scope_matches_events_that_list_this_vm_or_none_or_list_it_first(
    data: dict[str, Any], by_self: bool, by_first: bool
) -> None:
    event = stored(**data)
    taken = [Filter(scope=scope).matches(event) for scope in ("all", "self", "first")]
    assert taken == [True, by_self, by_first]


@pytest.mark.parametrize("scope", ["self", "first"])
def test_a_receipt_is_published_by_its_vm_whatever_it_affects(scope: str) -> None:
    event = stored(Resources=["web-7"], Vm=OWN)
    own = {**event.envelope, "reporter": "web-0/listen"}
    assert Filter(scope=scope).matches(replace(event, body=json.dumps(own).encode()))
