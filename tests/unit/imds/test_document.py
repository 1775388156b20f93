"""IMDS is read leniently: whatever can be made out is used, the rest is kept as it came."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from bridge.events.model import StoredEvent
from bridge.imds.client import MAX_BODY_BYTES
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
    assert found.incarnation == 7
    assert found.invalid_entries == ()
    one = only(found)
    assert (one.event_id, one.key, one.status) == (FIRST, FIRST.lower(), "scheduled")
    assert one.not_before == INSTANT
    assert is_among("web-1", one.resources)
    assert found.raw == shown


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_document_is_read_without_an_unreadable_entry(path: Path) -> None:
    for recorded in json.loads(path.read_text())["documents"]:
        found = parse_document(json.dumps(recorded).encode())
        assert found.raw == recorded
        assert found.invalid_entries == ()
        assert len(found.events) == len(recorded["Events"])
        assert found.incarnation == int(recorded["DocumentIncarnation"])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (5, 5),
        (0, 0),
        (-1, -1),
        (2**63, 2**63),
        ("5", 5),
        (" 5 ", 5),
        ("-3", -3),
        ("five", None),
        ("", None),
        ("5.0", None),
        ("9" * 400, None),
        (5.0, None),
        (True, None),
        (None, None),
        ([5], None),
        ({}, None),
        (..., None),
    ],
)
def test_an_incarnation_is_a_number_or_a_string_with_one_else_unknown(given: Any, read: int | None) -> None:
    found = document(given, entry())
    assert found.incarnation == read
    assert list(found.events) == [FIRST.lower()]


@pytest.mark.parametrize(
    "prefix",
    [
        b"\xef\xbb\xbf",
        b"\r\n\t ",
        b"\x00junk ",
        b"\x00\x00\x00",
        b"\xff\xfe",
        b"1f4\r\n",
        b"\x01",
        b"[]",
        b"{}",
        b"{",
        b"}{",
        b'{"a": {',
        b'{"a": {}}',
        b"{" * 1000,
        b'{"a": [{"b": 1,' * 200,
        b'{"a": ' + b"[" * 200 + b"]" * 200 + b"} ",
        b'{"a": "' * 300,
    ],
    ids=repr,
)
def test_a_byte_order_mark_or_bytes_before_the_json_are_ignored(prefix: bytes) -> None:
    assert parse_document(prefix + body(5, entry())) == document(5, entry())


def test_a_truncated_document_is_not_read_as_one_of_its_parts() -> None:
    whole = body(5, entry(Extra={"a": {}}), entry(SECOND))
    for end in range(1, len(whole)):
        with pytest.raises(ValueError, match=r"Expecting|Unterminated|Invalid"):
            parse_document(whole[:end])


@pytest.mark.parametrize(
    "part", [b"{", b'{"a": ', b'{"a', b'{"a": [' + b"1," * 400, b'{"a": ' + b"[" * 90 + b"]" * 90 + b","]
)
def test_braces_that_begin_no_document_are_refused_in_bounded_time(part: bytes) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match=r"nested too deeply|Expecting|Unterminated"):
        parse_document(part * (MAX_BODY_BYTES // len(part)))
    assert time.process_time() - start < 5


def test_bytes_after_the_json_are_ignored() -> None:
    assert parse_document(body(5, entry()) + b"\r\n0\r\n\x00}") == document(5, entry())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "an empty answer"),
        (b" \r\n", "an empty answer"),
        (b"<html><body>Service busy</body></html>", "without a JSON object"),
        (b"null", "without a JSON object"),
        (b'"Events"', "without a JSON object"),
        (b"[1, 2]", "without a JSON object"),
        (b"{", "Expecting"),
        (body(5, entry())[:-1], "Expecting"),
        (b"{}", "without `Events`"),
        (b'{"error": "Bad request"}', "without `Events`"),
        (b'{"DocumentIncarnation": 5, "events": []}', "without `Events`"),
        (b'{"DocumentIncarnation": 5, "Events": {}}', "not a list"),
        (b'{"DocumentIncarnation": 5, "Events": "none"}', "not a list"),
        (b'{"DocumentIncarnation": 5, "Events": 0}', "not a list"),
        (b'{"Events": [' + b"[" * 200 + b"]" * 200 + b"]}", "nested too deeply"),
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


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 301, "9" * 5000])
def test_a_number_that_json_or_python_cannot_write_back_is_kept_as_text(number: str) -> None:
    answer = body(5, entry(DurationInSeconds="HERE"), entry(SECOND)).replace(b'"HERE"', number.encode())
    found = parse_document(answer)
    assert found.events[FIRST.lower()].raw["DurationInSeconds"] == number
    assert SECOND.lower() in found.events
    assert Watch.load(Watch(document=found).dump()).document == found


@pytest.mark.parametrize("number", ["12345678901234567890", "-" + "9" * 299, "1.5", "1e3", "0"])
def test_any_other_number_is_kept_as_the_number_that_it_is(number: str) -> None:
    answer = body(5, entry(DurationInSeconds="HERE")).replace(b'"HERE"', number.encode())
    assert only(parse_document(answer)).raw["DurationInSeconds"] == json.loads(number)


def test_a_lone_surrogate_is_kept() -> None:
    found = parse_document(rb'{"Events": [{"EventId": "a", "Description": "\ud800"}]}')
    assert only(found).raw["Description"] == "\ud800"
    assert Watch.load(Watch(document=found).dump()).document == found


def test_invalid_utf8_inside_the_json_does_not_hide_the_document() -> None:
    found = parse_document(body(5, entry(Description="HERE")).replace(b"HERE", b"\xff\xfe"))
    assert only(found).event_id == FIRST


def test_moderate_nesting_is_kept() -> None:
    deep: Any = []
    for _ in range(90):
        deep = [deep]
    found = document(5, entry(Extra=deep))
    assert only(found).raw["Extra"] == deep
    assert Watch.load(Watch(document=found).dump()).document == found


# One entry of Events


@pytest.mark.parametrize(
    "invalid_entries",
    [
        None,
        5,
        True,
        "text",
        [],
        {},
        {"EventStatus": "Scheduled"},
        entry(None),
        entry(""),
        entry(5),
        entry(["a"]),
        entry("two words"),
        entry("line\nbreak"),
        entry("\x00"),
        entry("é"),
        entry("\ud800"),
        entry("x" * 201),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_an_unreadable_entry_does_not_hide_the_others_and_is_kept(invalid_entries: Any) -> None:
    found = document(5, entry(FIRST), invalid_entries, entry(SECOND))
    assert [one.event_id for one in found.events.values()] == [FIRST, SECOND]
    assert found.invalid_entries == (invalid_entries,)
    assert found.raw["Events"][1] == invalid_entries


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
    whole = {**entry(), name: value}
    one = only(document(5, {key: given for key, given in whole.items() if given is not ...}))
    assert one.event_id == FIRST
    assert isinstance(one.status, str)
    assert isinstance(one.resources, tuple)
    assert one.content["EventId"] == FIRST.lower()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("Scheduled", "scheduled"),
        ("STARTED", "started"),
        ("Postponed", "postponed"),
        ("", ""),
        (None, ""),
        (..., ""),
        (5, ""),
        (True, ""),
        ({"b": 1, "a": 2}, ""),
    ],
)
def test_a_status_is_read_without_case_and_is_empty_if_it_is_not_a_text(given: Any, read: str) -> None:
    assert event(status=given).status == read


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (NOT_BEFORE, INSTANT),
        ("Fri, 11 Apr 2022 22:26:58 GMT", INSTANT),
        ("11 Apr 2022 22:26:58 GMT", INSTANT),
        ("Mon, 11 Apr 2022 22:26:58 +0000", INSTANT),
        ("Mon, 11 Apr 2022 22:26:58 -0000", INSTANT),
        ("Tue, 12 Apr 2022 00:26:58 +0200", INSTANT),
        ("Mon, 11 Apr 2022 22:26:58", INSTANT),
        ("2022-04-11T22:26:58Z", INSTANT),
        ("2022-04-11T22:26:58", INSTANT),
        ("2022-04-11 22:26:58", INSTANT),
        ("2022-04-11T22:26:58.000Z", INSTANT),
        ("2022-04-11T22:26:58.1234567Z", INSTANT + timedelta(microseconds=123_456)),
        ("2022-04-12T00:26:58+02:00", INSTANT),
        ("  2022-04-11T22:26:58Z\n", INSTANT),
        ("0001-01-01T00:00:00", datetime(1, 1, 1, tzinfo=UTC)),
        ("", None),
        ("   ", None),
        (None, None),
        (..., None),
        ("soon", None),
        ("2022", None),
        ("Mon, 31 Feb 2022 22:26:58 GMT", None),
        ("Mon, 11 Apr 2022 99:99:99 GMT", None),
        ("Mon, 11 Apr 2022 22:26:58 +9999", None),
        ("9999-12-31T23:59:59-05:00", None),
        ("9" * 5000, None),
        ("\ud800", None),
        (1649715000, None),
        (1649715000.5, None),
        (True, None),
        ([NOT_BEFORE], None),
        ({}, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_not_before_is_read_in_every_format_and_else_none(given: Any, read: datetime | None) -> None:
    assert event(NotBefore=given).not_before == read


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["a", "b"], ("a", "b")),
        ("a", ("a",)),
        ("", ()),
        ([], ()),
        (None, ()),
        (5, ()),
        ({"a": 1}, ()),
        (["a", 5, None, ["b"], "c"], ("a", "c")),
    ],
)
def test_names_are_read_from_a_list_or_a_single_text(given: Any, read: tuple[str, ...]) -> None:
    assert names(given) == read


@pytest.mark.parametrize("resource", ["web-0", "_web-0", "WEB-0", "_Web-0"])
def test_a_vm_is_among_resources_whatever_their_case_and_leading_underscore(resource: str) -> None:
    assert is_among("Web-0", ["db-1", resource])


@pytest.mark.parametrize("resource", ["web-01", "web", "web-0.internal", "__web-0", "web-0_", ""])
def test_a_vm_is_not_among_resources_that_merely_resemble_its_name(resource: str) -> None:
    assert not is_among("web-0", [resource])


def test_only_the_first_underscore_of_a_name_is_ignored() -> None:
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
        ({"EventType": "Reboot"}, {"EventType": "Defrost"}),
    ],
    ids=repr,
)
def test_different_contents_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert event(**one).content != event(**other).content


# What is written


@pytest.mark.parametrize(
    ("instant", "written"),
    [
        (INSTANT, "2022-04-11T22:26:58.000Z"),
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


def test_nothing_is_an_empty_watch() -> None:
    assert Watch.load(None) == Watch()
    assert Watch.load(Watch().dump()) == Watch()


def test_a_stored_event_parses_its_body() -> None:
    stored = StoredEvent(seq=1, id="a", type="t", stored_at=0.0, body=b'{"id": "a"}')
    assert stored.envelope == {"id": "a"}
