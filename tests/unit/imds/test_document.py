"""IMDS is read leniently: whatever can be made out is used, the rest is kept as it came."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bridge.imds.diff import Watch
from bridge.imds.document import Document, ScheduledEvent, fold_name, is_among, names, parse_document
from bridge.lab.imds import EVENT_VERSIONS, render_document
from bridge.runtime.time import iso_utc, parse_instant
from tests.support.diff import FIRST, NOT_BEFORE, RECORDED, SECOND, Watcher, body, document, entry

INSTANT = datetime(2022, 4, 11, 22, 26, 58, tzinfo=UTC)


def event(**fields: Any) -> ScheduledEvent:
    return ScheduledEvent(raw=entry(**fields))


def only(found: Document) -> ScheduledEvent:
    (one,) = found.events.values()
    return one


# The document


@pytest.mark.parametrize("version", EVENT_VERSIONS)
def test_the_document_of_every_api_version_is_read(version: str) -> None:
    shown = render_document(7, [entry(Resources=["web-0", "web-1"])], version)
    found = parse_document(json.dumps(shown).encode())
    one = only(found)
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


@pytest.mark.parametrize("given", [5, 0, -1, 2**63, "5", " 5 ", "-3"])
def test_an_incarnation_is_a_number_or_a_string_with_one(given: Any) -> None:
    assert document(given, entry()).incarnation == int(given)


@pytest.mark.parametrize("given", ["five", "", "5.0", "9" * 400, 5.0, True, None, [5], {}, ...], ids=repr)
def test_any_other_incarnation_is_unknown(given: Any) -> None:
    found = document(given, entry())
    assert found.incarnation is None
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
def test_an_invalid_document_is_refused_with_a_reason(answer: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_document(answer)


def test_events_that_are_null_are_none() -> None:
    assert parse_document(b'{"DocumentIncarnation": 5, "Events": null}').events == {}


def test_unknown_fields_of_the_document_are_kept() -> None:
    assert document(5, Region={"a": [1]}).raw["Region"] == {"a": [1]}


def assert_kept(answer: bytes, name: str, value: Any) -> None:
    """Check that a property is read, and is the same after it was saved."""
    found = parse_document(answer)
    assert next(iter(found.events.values())).raw[name] == value
    assert Watch.load(Watch(document=found).dump()).document == found


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 301, "9" * 5000])
def test_a_number_that_json_or_python_cannot_write_back_is_kept_as_text(number: str) -> None:
    answer = body(5, entry(Extra="HERE"), entry(SECOND)).replace(b'"HERE"', number.encode())
    assert_kept(answer, "Extra", number)
    assert SECOND.lower() in parse_document(answer).events


@pytest.mark.parametrize("number", ["12345678901234567890", "-" + "9" * 299, "1.5", "1e3", "0"])
def test_any_other_number_is_kept_as_the_number_that_it_is(number: str) -> None:
    assert_kept(body(5, entry(Extra="HERE")).replace(b'"HERE"', number.encode()), "Extra", json.loads(number))


def test_a_lone_surrogate_and_deep_values_are_kept() -> None:
    assert_kept(rb'{"Events": [{"EventId": "a", "Extra": "\ud800"}]}', "Extra", "\ud800")
    deep = json.loads("[" * 90 + "]" * 90)
    assert_kept(body(5, entry(Extra=deep)), "Extra", deep)


def test_invalid_utf8_inside_the_json_does_not_hide_the_document() -> None:
    found = parse_document(body(5, entry(Description="HERE")).replace(b"HERE", b"\xff\xfe"))
    assert only(found).event_id == FIRST


# One entry of Events

NO_IDS = [None, "", 5, ["a"], "two words", "line\nbreak", "\x00", "é", "\ud800", "x" * 201]
UNREADABLE: list[Any] = [None, 5, "text", [], {}, {"EventStatus": "Scheduled"}, *map(entry, NO_IDS)]


@pytest.mark.parametrize("unreadable", UNREADABLE, ids=lambda value: json.dumps(value)[:40])
def test_an_unreadable_entry_does_not_hide_the_others_and_is_kept(unreadable: Any) -> None:
    found = document(5, entry(FIRST), unreadable, entry(SECOND))
    assert [one.event_id for one in found.events.values()] == [FIRST, SECOND]
    assert found.invalid_entries == (unreadable,)
    assert found.raw["Events"][1] == unreadable


def test_a_second_entry_with_the_same_event_id_is_invalid_whatever_its_letter_case() -> None:
    twin = entry(FIRST.lower(), "Started")
    found = document(5, entry(FIRST), twin)
    assert only(found).event_id == FIRST
    assert found.invalid_entries == (twin,)


@pytest.mark.parametrize("spelled", [FIRST, FIRST.lower(), FIRST.title()])
def test_an_event_id_is_compared_without_case_and_kept_as_received(spelled: str) -> None:
    one = event(event_id=spelled)
    assert (one.key, one.event_id) == (FIRST.lower(), spelled)
    assert one.content == event(event_id=FIRST).content


@pytest.mark.parametrize("name", [name for name in entry() if name != "EventId"])
@pytest.mark.parametrize("value", [..., None, "", [], {}, 5, "nonsense"], ids=repr)
def test_any_other_field_may_be_missing_null_empty_or_invalid(name: str, value: Any) -> None:
    given = {key: value for key, value in {**entry(), name: value}.items() if value is not ...}
    one = only(document(5, given))
    assert (type(one.status), type(one.resources), one.event_id) == (str, tuple, FIRST)
    assert one.content["EventId"] == FIRST.lower()


@pytest.mark.parametrize("given", ["Scheduled", "STARTED", "Postponed", ""])
def test_a_status_is_read_without_case(given: str) -> None:
    assert event(status=given).status == given.lower()


@pytest.mark.parametrize("given", [None, ..., 5, True, {"b": 1, "a": 2}], ids=repr)
def test_a_status_that_is_not_a_text_is_empty(given: Any) -> None:
    assert event(status=given).status == ""


@pytest.mark.parametrize(
    "given",
    [
        NOT_BEFORE,
        "Fri, 11 Apr 2022 22:26:58 GMT",
        "11 Apr 2022 22:26:58 GMT",
        "Mon, 11 Apr 2022 22:26:58 -0000",
        "Tue, 12 Apr 2022 00:26:58 +0200",
        "Mon, 11 Apr 2022 22:26:58",
        "2022-04-11T22:26:58Z",
        "2022-04-11 22:26:58",
        "2022-04-11T22:26:58.000Z",
        "2022-04-12T00:26:58+02:00",
        "  2022-04-11T22:26:58Z\n",
    ],
)
def test_a_not_before_is_read_in_every_format(given: str) -> None:
    assert event(NotBefore=given).not_before == INSTANT


def test_a_not_before_may_have_a_fraction_and_be_the_first_instant_of_all() -> None:
    exact = INSTANT + timedelta(microseconds=123_456)
    assert event(NotBefore="2022-04-11T22:26:58.1234567Z").not_before == exact
    assert event(NotBefore="0001-01-01T00:00:00").not_before == datetime(1, 1, 1, tzinfo=UTC)


NO_DATES = [
    "Mon, 31 Feb 2022 22:26:58 GMT",
    "Mon, 11 Apr 2022 99:99:99 GMT",
    "Mon, 11 Apr 2022 22:26:58 +9999",
]
NO_INSTANTS = ["", "   ", "soon", "2022", "9999-12-31T23:59:59-05:00", "9" * 5000, "\ud800", *NO_DATES]


@pytest.mark.parametrize(
    "given", [*NO_INSTANTS, None, ..., 1649715000, 0.5, True, [NOT_BEFORE], {}], ids=ascii
)
def test_any_other_not_before_is_none(given: Any) -> None:
    assert event(NotBefore=given).not_before is None


def test_names_are_read_from_a_list_or_a_single_text() -> None:
    assert names(["a", 5, None, ["b"], "c"]) == ("a", "c")
    assert names("a") == ("a",)
    nothing: list[Any] = ["", [], None, 5, {"a": 1}]
    assert [*map(names, nothing)] == [()] * 5


@pytest.mark.parametrize("resource", ["web-0", "_web-0", "WEB-0", "_Web-0"])
def test_a_vm_is_among_resources_whatever_their_case_and_leading_underscore(resource: str) -> None:
    assert is_among("Web-0", ["db-1", resource])


@pytest.mark.parametrize("resource", ["web-01", "web", "web-0.internal", "__web-0", "web-0_", ""])
def test_a_vm_is_not_among_resources_that_merely_resemble_its_name(resource: str) -> None:
    assert not is_among("web-0", [resource])
    assert fold_name("__X_1") == "_x_1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"NotBefore": NOT_BEFORE}, {"NotBefore": "2022-04-11T22:26:58Z"}),
        ({"NotBefore": ""}, {"NotBefore": None}),
        ({"NotBefore": ""}, {"NotBefore": ...}),
        ({"Description": ""}, {"Description": None}),
        ({"Description": ""}, {"Description": ...}),
        ({"status": "Scheduled"}, {"status": "SCHEDULED"}),
        ({"Resources": ["a", "B"]}, {"Resources": ["_b", "A"]}),
        ({"Resources": ["a"]}, {"Resources": "a"}),
    ],
    ids=repr,
)
def test_different_spellings_have_the_same_content(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert event(**one).content == event(**other).content


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"NotBefore": NOT_BEFORE}, {"NotBefore": "2022-04-11T22:26:59Z"}),
        ({"NotBefore": "soon"}, {"NotBefore": "later"}),
        ({"Resources": ["a"]}, {"Resources": ["a", "b"]}),
        ({"Description": "a"}, {"Description": "A"}),
        ({"DurationInSeconds": 0}, {"DurationInSeconds": ...}),
        ({"Extra": False}, {"Extra": None}),
    ],
    ids=repr,
)
def test_different_contents_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert event(**one).content != event(**other).content


# What is written


@pytest.mark.parametrize(
    ("instant", "written"),
    [
        (INSTANT + timedelta(microseconds=999_999), "2022-04-11T22:26:58.999Z"),
        (datetime(2022, 4, 12, 0, 0, tzinfo=timezone(timedelta(hours=2))), "2022-04-11T22:00:00.000Z"),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00.000Z"),
        (datetime.max.replace(tzinfo=UTC), "9999-12-31T23:59:59.999Z"),
    ],
)
def test_an_instant_is_written_as_rfc_3339_in_utc_with_milliseconds(instant: datetime, written: str) -> None:
    assert iso_utc(instant) == written
    assert parse_instant(written) == instant.replace(microsecond=instant.microsecond // 1000 * 1000)


def test_a_watch_is_the_same_after_it_was_written_and_read() -> None:
    watcher = Watcher(document(9, entry(), entry(SECOND)))
    watcher.see(document(1, entry(SECOND, "Started"), "strange"))
    assert watcher.watch.missing
    assert Watch.load(watcher.watch.dump()) == watcher.watch
    assert Watch.load(None) == Watch() == Watch.load(Watch().dump())
