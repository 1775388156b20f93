"""IMDS is read leniently: whatever can be made out is used, the rest is kept as it came."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.imds.diff import Watch
from bridge.imds.document import Document, ScheduledEvent, fold_name, is_among, names, parse_document
from bridge.lab.imds import EVENT_VERSIONS, render_document
from tests.support.diff import FIRST, NOT_BEFORE, RECORDED, SECOND, body, document, entry
from tests.support.only import only

INSTANT = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


def event(**fields: Any) -> ScheduledEvent:
    return ScheduledEvent(raw=entry(**fields))


def only_event(found: Document) -> ScheduledEvent:
    return only(found.events.values())


# The document


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_the_document_of_every_api_version_is_read(version: str) -> None:
    shown = render_document(7, [entry(Resources=["web-0", "web-1"])], version)
    found = parse_document(json.dumps(shown).encode())
    one = only_event(found)
    assert (found.raw, found.incarnation, found.invalid_entries) == (shown, 7, ())
    assert (one.event_id, one.key, one.status) == (FIRST, FIRST.lower(), "scheduled")
    assert one.not_before == INSTANT
    assert is_among("web-1", one.resources)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_document_is_read_without_an_unreadable_entry(path: Path) -> None:
    for recorded in json.loads(path.read_text())["documents"]:
        found = parse_document(json.dumps(recorded).encode())
        assert (found.raw, found.invalid_entries) == (recorded, ())
        assert len(found.events) == len(recorded["Events"])
        assert found.incarnation == int(recorded["DocumentIncarnation"])


NO_NUMBERS = ["five", "", "5.0", "9" * 400, 5.0, True, None, [5], {}, ...]


@pytest.mark.parametrize("given", [5, 0, -1, 2**63, "5", " 5 ", "-3", *NO_NUMBERS], ids=repr)
def test_an_incarnation_is_a_number_or_a_string_with_one_or_unknown(given: Any) -> None:
    found = document(given, entry())
    assert found.incarnation == (None if any(given is one for one in NO_NUMBERS) else int(given))
    assert list(found.events) == [FIRST.lower()]


@pytest.mark.parametrize(
    "before", [b"\xef\xbb\xbf", b"\r\n\t ", b"\x00junk ", b"\xff\xfe", b"1f4\r\n", b"[]"]
)
@pytest.mark.parametrize("after", [b"", b"\r\n0\r\n\x00}"])
def test_a_byte_order_mark_and_bytes_around_the_json_are_ignored(before: bytes, after: bytes) -> None:
    assert parse_document(before + body(5, entry()) + after) == document(5, entry())


def test_a_truncated_document_is_not_read_as_one_of_its_parts() -> None:
    whole = body(5, entry(Extra={"a": {}}), entry(SECOND))
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
            parse_document(whole[:end])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b" \r\n", "an empty answer"),
        (b"<html><body>Service busy</body></html>", "without a JSON object"),
        (b"[1, 2]", "without a JSON object"),
        (b'{"DocumentIncarnation": 5, "events": []}', "without `Events`"),
        (b'{"DocumentIncarnation": 5, "Events": {}}', "not a list"),
        (b'{"DocumentIncarnation": 5, "Events": "none"}', "not a list"),
        (b'{"DocumentIncarnation": 5, "Events": 0}', "not a list"),
        (b'{"Events": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
@pytest.mark.usefixtures("without_collection")
def test_an_invalid_document_is_refused_with_a_reason(answer: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_document(answer)


def test_events_that_are_null_are_none_and_unknown_fields_of_the_document_are_kept() -> None:
    found = parse_document(b'{"DocumentIncarnation": 5, "Events": null, "Region": {"a": [1]}}')
    assert (found.events, found.raw["Region"]) == ({}, {"a": [1]})


DEEP = b"[" * 90 + b"]" * 90
NOT_WRITTEN_BACK = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 301, "9" * 5000)
WRITTEN_BACK = (b"12345678901234567890", b"-" + b"9" * 299, b"1.5", b"1e3", b"0", DEEP, rb'"\ud800"')


@pytest.mark.parametrize(
    ("written", "value"),
    [
        *((number.encode(), number) for number in NOT_WRITTEN_BACK),
        *((written, json.loads(written)) for written in WRITTEN_BACK),
        (b'"\xff\xfe"', "\ufffd" * 2),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_value_is_kept_as_a_text_where_json_or_python_cannot_write_it_back(
    written: bytes, value: Any
) -> None:
    found = parse_document(body(5, entry(Extra="HERE"), entry(SECOND)).replace(b'"HERE"', written))
    assert found.events[FIRST.lower()].raw["Extra"] == value
    assert SECOND.lower() in found.events
    assert Watch.load(Watch(document=found).dump()).document == found


# One entry of Events

NO_IDS = [None, "", 5, ["a"], "two words", "line\nbreak", "\x00", "é", "\ud800", "x" * 201]
UNREADABLE: list[Any] = [None, 5, "text", [], {}, {"EventStatus": "Scheduled"}, *map(entry, NO_IDS)]


@pytest.mark.parametrize("unreadable", UNREADABLE, ids=lambda value: json.dumps(value)[:40])
def test_an_unreadable_entry_does_not_hide_the_others_and_is_kept(unreadable: Any) -> None:
    found = document(5, entry(FIRST), unreadable, entry(SECOND))
    assert [one.event_id for one in found.events.values()] == [FIRST, SECOND]
    assert found.invalid_entries == (unreadable,)
    assert found.raw["Events"][1] == unreadable


def test_an_event_id_is_compared_without_case_and_kept_as_received() -> None:
    for spelled in (FIRST, FIRST.lower(), FIRST.title()):
        one = event(event_id=spelled)
        assert (one.key, one.event_id) == (FIRST.lower(), spelled)
        assert one.content == event(event_id=FIRST).content
    twin = entry(FIRST.lower(), "Started")
    found = document(5, entry(FIRST), twin)
    assert only_event(found).event_id == FIRST
    assert found.invalid_entries == (twin,)


@pytest.mark.parametrize("name", [name for name in entry() if name != "EventId"])
@pytest.mark.parametrize("value", [..., None, "", [], {}, 5, "nonsense"], ids=repr)
def test_any_other_field_may_be_missing_null_empty_or_invalid(name: str, value: Any) -> None:
    given = {key: value for key, value in {**entry(), name: value}.items() if value is not ...}
    one = only_event(document(5, given))
    assert (type(one.status), type(one.resources), one.event_id) == (str, tuple, FIRST)
    assert one.content["EventId"] == FIRST.lower()


@pytest.mark.parametrize("given", ["Scheduled", "STARTED", "Postponed", "", None, ..., 5, {"b": 1}], ids=repr)
def test_a_status_is_read_without_case_and_empty_if_it_is_not_a_text(given: Any) -> None:
    assert event(status=given).status == (given.lower() if isinstance(given, str) else "")


def test_a_not_before_is_an_instant_or_none() -> None:
    assert event(NotBefore=NOT_BEFORE).not_before == INSTANT
    assert event(NotBefore="2022-04-11T22:26:58.1234567Z").not_before == INSTANT.replace(microsecond=123_456)
    assert event(NotBefore="soon").not_before is event(NotBefore=...).not_before is None


def test_names_are_read_from_a_list_or_a_single_text() -> None:
    assert names(["a", 5, None, ["b"], "c"]) == ("a", "c")
    assert names("a") == ("a",)
    nothing: list[Any] = ["", [], None, 5, {"a": 1}]
    assert [*map(names, nothing)] == [()] * 5


def test_a_vm_is_among_resources_whatever_their_case_and_leading_underscore() -> None:
    for resource in ("web-0", "_web-0", "WEB-0", "_Web-0"):
        assert is_among("Web-0", ["db-1", resource])
    for resource in ("web-01", "web", "web-0.internal", "__web-0", "web-0_", ""):
        assert not is_among("web-0", [resource])
    assert fold_name("__X_1") == "_x_1"


SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"NotBefore": NOT_BEFORE}, {"NotBefore": "2022-04-11T22:26:58Z"}),
    ({"NotBefore": ""}, {"NotBefore": None}),
    ({"NotBefore": ""}, {"NotBefore": ...}),
    ({"Description": ""}, {"Description": None}),
    ({"Description": ""}, {"Description": ...}),
    ({"status": "Scheduled"}, {"status": "SCHEDULED"}),
    ({"Resources": ["a", "B"]}, {"Resources": ["_b", "A"]}),
    ({"Resources": ["a"]}, {"Resources": "a"}),
]
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"NotBefore": NOT_BEFORE}, {"NotBefore": "2022-04-11T22:26:59Z"}),
    ({"NotBefore": "soon"}, {"NotBefore": "later"}),
    ({"Resources": ["a"]}, {"Resources": ["a", "b"]}),
    ({"Description": "a"}, {"Description": "A"}),
    ({"DurationInSeconds": 0}, {"DurationInSeconds": ...}),
    ({"Extra": False}, {"Extra": None}),
]


@pytest.mark.parametrize(("one", "other"), [*SAME, *DIFFERENT], ids=repr)
def test_spelling_does_not_change_the_content(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (event(**one).content == event(**other).content) is ((one, other) in SAME)
