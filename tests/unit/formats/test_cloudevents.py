"""Every event that is produced is a CloudEvent 1.0, in the eyes of two independent judges."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary_event, from_structured_event
from cloudevents.core.formats.json import JSONFormat

from bridge.contract.types import EVENT_TYPES
from bridge.events.model import CloudEvent, structured
from bridge.formats.cloudevents import CONTENT_TYPE, binary
from bridge.formats.samples import samples
from bridge.runtime.time import iso_utc
from tests.support.diff import envelope_of, faults_of
from tests.support.samples import EVENT_ID, REPORTER, events

AT = datetime(2022, 4, 11, 22, 11, 58, 123_456, tzinfo=UTC)
LATER = datetime(2031, 5, 6, 7, 8, 9, 125_000, tzinfo=UTC)
OTHERS = {"io.imdsbridge.bridge.test.v1", "io.imdsbridge.command.approve.v1"}
UNKNOWN_VM = replace(REPORTER, name="hôst 1%", epoch="0123456789abcdef", vm=None, session="")
# Everything that IMDS may send in a text, none of which may get into an attribute.
NASTY = 'line\r\nbreak, \x00, \x7f, "quoted", 100 %, ümlaut, 雲, \ud800, <b>'
PROPERTIES = {"Description": NASTY, "Resources": ["web-0", NASTY], "Extra": {NASTY: [1.5, None, True]}}
STRUCTURED = {"content-type": CONTENT_TYPE}
REQUIRED = {"specversion", "id", "source", "type"}
PRODUCED = {
    f"{event.type} by {by.name}": event
    for by in (REPORTER, UNKNOWN_VM)
    for event in events(AT, by=by, reason=NASTY, **PROPERTIES)
}
every_event = pytest.mark.parametrize("event", PRODUCED.values(), ids=PRODUCED.keys())


def attributes_of(event: CloudEvent) -> dict[str, str]:
    """Spell out what the envelope must hold beside the data."""
    own = {name: getattr(event, name) for name in ("id", "source", "type", "subject", "dataschema")}
    fixed = {"specversion": "1.0", "time": "2022-04-11T22:11:58.123Z", "datacontenttype": "application/json"}
    return {**own, **fixed, **event.extensions}


def judged(attributes: dict[str, Any]) -> dict[str, Any]:
    """Write what the library read in the form in which it was sent."""
    return {
        name: iso_utc(value) if isinstance(value, datetime) else value for name, value in attributes.items()
    }


def test_every_type_that_is_produced_is_judged_here() -> None:
    assert {event.type for event in PRODUCED.values()} == set(EVENT_TYPES) - OTHERS


@every_event
def test_a_structured_event_keeps_the_rules_and_holds_everything_in_ascii(event: CloudEvent) -> None:
    assert structured(event).isascii()  # so that a lone surrogate survives
    assert b"\n" not in structured(event)
    envelope = envelope_of(structured(event))
    assert faults_of(envelope) == []
    assert envelope.keys() >= REQUIRED
    assert envelope.pop("data") == event.data
    assert envelope == attributes_of(event)


@every_event
def test_a_library_reads_both_forms_and_binary_headers_are_printable_ascii(event: CloudEvent) -> None:
    headers, body = binary(envelope_of(structured(event)))
    for read in (
        from_structured_event(HTTPMessage(headers=STRUCTURED, body=structured(event)), JSONFormat()),
        from_binary_event(HTTPMessage(headers=headers, body=body), JSONFormat()),
    ):
        assert judged(read.get_attributes()) == attributes_of(event)
        assert read.get_data() == event.data == json.loads(body)
    assert headers.pop("Content-Type") == "application/json"
    assert not {"ce-datacontenttype", "ce-data"} & set(headers)
    for value in headers.values():
        assert all(0x21 <= ord(letter) <= 0x7E and letter != '"' for letter in value)


def test_the_data_carries_what_imds_sent_letter_by_letter() -> None:
    envelope = envelope_of(structured(PRODUCED["io.imdsbridge.scheduledevent.scheduled.v1 by web-0"]))
    assert envelope["data"].items() >= PROPERTIES.items()
    assert envelope["subject"] == EVENT_ID


def test_headers_are_percent_encoded_and_spell_numbers_and_truth_values_as_json_does() -> None:
    source = "a b%c\"ü雲!~'"
    headers, _ = binary(
        {"source": source, "a": True, "b": 5, "datacontenttype": "application/json", "data": {}}
    )
    assert headers["ce-source"] == "a%20b%25c%22%C3%BC%E9%9B%B2!~'"
    assert (headers["ce-a"], headers["ce-b"]) == ("true", "5")


@pytest.mark.parametrize(
    ("rest", "content_type", "body"),
    [
        ({}, "application/json", b""),
        ({"data_base64": "AAH/"}, "application/json", b"\x00\x01\xff"),
        ({"datacontenttype": "text/plain", "data": "\u00fcber"}, "text/plain", "\u00fcber".encode()),
        ({"datacontenttype": "application/x+json", "data": "a"}, "application/x+json", b'"a"'),
        ({"datacontenttype": None, "data": [1], "subject": None}, "application/json", b"[1]"),
    ],
)
def test_any_event_of_a_relay_has_a_binary_form(rest: dict[str, Any], content_type: str, body: bytes) -> None:
    headers, written = binary({"id": "1", **rest})
    assert (headers, written) == ({"ce-id": "1", "Content-Type": content_type}, body)


# The events that `render` and the check of a format at the start show


def test_there_is_a_sample_of_every_type_but_the_test_event_and_the_command() -> None:
    assert [event.type for event in samples(LATER)] == [one for one in EVENT_TYPES if one not in OTHERS]


def test_samples_are_seen_now_and_their_times_are_as_far_away_as_in_the_examples() -> None:
    events = {event.type.split(".")[-2]: event.envelope for event in samples(LATER)}
    assert {event["time"] for event in events.values()} == {"2031-05-06T07:08:09.125Z"}
    data = events["updated"]["data"]
    assert data["NotBeforeUtc"].startswith("2031-05-06T07:28:")
    assert data["NotBefore"].startswith("Tue, 06 May 2031 07:28:")
    assert data["Previous"]["NotBefore"].startswith("Tue, 06 May 2031 07:23:")
