"""What the message of an event has for filters and sessions, within Azure's limits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bridge.config.values import check_template
from bridge.contract.types import MAX_SESSION_CHARACTERS, session_id
from bridge.events.model import StoredEvent
from bridge.sinks.servicebus import to_message
from tests.support.process import stored_event


def properties_of(event: StoredEvent) -> dict[str | bytes, Any]:
    return {**(to_message(event).application_properties or {})}


def resources(*names: object) -> str:
    """Return the property `Resources` of a message."""
    return str(properties_of(stored_event(1, Resources=list(names)))["Resources"])


def test_the_names_stand_between_commas() -> None:
    assert (resources("web-0", "db-1"), resources()) == (",web-0,db-1,", ",")
    assert properties_of(stored_event(1, Resources=None))["Resources"] == ","


@pytest.mark.parametrize("letter", ["v", "é"])
def test_names_beyond_what_service_bus_takes_are_cut_as_a_whole_with_a_sign_for_filters(letter: str) -> None:
    names = [f"{letter * 20}{number:04}" for number in range(3_000)]
    text = resources(*names)
    assert len(text.encode()) <= 32 * 1024
    *kept, sign = text.strip(",").split(",")
    assert (kept, sign) == (names[: len(kept)], "*")
    assert len(f"{text}{names[len(kept)]}".encode()) > 30_000


def test_a_session_id_that_is_too_long_ends_with_a_hash_of_the_whole() -> None:
    ids = {session_id("{group}.{vm}", group="g" * 90, vm=f"{'v' * 60}-{number}") for number in range(3)}
    assert {len(one) for one in ids} == {MAX_SESSION_CHARACTERS}
    assert len(ids) == 3
    assert session_id("{group}.{vm}", group="g" * 63, vm="v" * 64) == f"{'g' * 63}.{'v' * 64}"


def test_a_template_that_no_value_fits_is_refused() -> None:
    assert check_template("x" * 127 + "{vm}", ("vm",))
    for text, expected in (
        ("x" * 128 + "{vm}", "less than 128 characters beside the placeholders"),
        ("{other}", "only the placeholders {vm}"),
        ("{vm", "only the placeholders {vm}"),
    ):
        with pytest.raises(ValueError, match=f"expected {expected}"):
            check_template(text, ("vm",))


EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
VM = {"Name": "VM1", "ResourceId": "/subscriptions/s/resourceGroups/RG/providers/x"}


@pytest.mark.parametrize(
    ("template", "data", "expected"),
    [
        ("{event}", {}, "correlated"),
        ("{resource_group}.{vm}", {"Vm": VM}, "rg.vm1"),
        ("{type}", {}, "io.imdsbridge.scheduledevent.scheduled.v1"),
        ("all", {}, "all"),
        ("{vm}", {}, EVENT_ID),  # the subject, because the entity needs a session
        ("", {}, None),
    ],
)
def test_the_session_id_is_made_of_the_template(
    template: str, data: dict[str, Any], expected: str | None
) -> None:
    event = stored_event(1, **data)
    body = json.dumps({**event.envelope, "correlationid": "correlated"}).encode()
    assert to_message(replace(event, body=body), template).session_id == expected


def test_an_event_of_the_vm_itself_has_no_properties_of_scheduled_events() -> None:
    event = stored_event(1, type_="io.imdsbridge.bridge.heartbeat.v1", EventType=None)
    assert to_message(event).correlation_id is None
    assert not {"EventType", "EventStatus", "EventSource", "Resources"} & set(properties_of(event))


def test_what_a_relay_brings_need_not_have_all_that_our_own_events_have() -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "com.x", "data_base64": "AAH/"}
    body = json.dumps({**envelope, "answer": True, "nothing": None}).encode()
    event = replace(stored_event(1), id="1", body=body)
    assert to_message(event, session="{event}").session_id == "1"
    properties = properties_of(event)
    assert properties["cloudEvents_answer"] == "true"
    assert not {"cloudEvents_nothing", "cloudEvents_data_base64"} & set(properties)
