"""Which events a sink takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from tests.support.diff import json_values, thorough
from tests.support.process import stored_event

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
