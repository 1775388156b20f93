"""The contract with consumers: current schemas, real examples, and events that match both."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from bridge.approvals.command import COMMAND_APPROVE, parse_command
from bridge.contract.schemas import CLOUDEVENT, NAMES, STATUS, file_name
from bridge.contract.types import ATTRIBUTES, EVENT_NAMES, type_of
from bridge.events.builder import Reporter
from bridge.events.model import CloudEvent, StoredEvent, structured
from bridge.formats.samples import make_test_event, samples
from bridge.imds.diff import Observation, Watch, compare
from bridge.imds.document import Document, parse_document
from bridge.lab.servicebus.filters import Sql
from bridge.lab.servicebus.messages import Content
from bridge.sinks.servicebus import to_message
from tests.support.cli import Call
from tests.support.diff import FIRST, NOT_BEFORE, RECORDED, SECOND, VM, entry, envelope_of, thorough
from tests.support.only import only
from tests.support.samples import reporting
from tests.support.schemas import (
    BY_NAME,
    EXAMPLES,
    SCHEMAS,
    VALIDATORS,
    examples,
    faults,
    id_of,
    kept,
    name_of,
    paths,
    record,
)

AT = datetime(2022, 4, 11, 22, 20, tzinfo=UTC)
REPORTER = Reporter(
    name="web-0",
    role="forward",
    epoch="e1",
    at=AT,
    next_number=lambda: 1,
    vm=VM,
    session="{resource_group}.{vm}",
)
UNKNOWN_VM = replace(REPORTER, name="host 1", vm=None, session="")
COMMAND = VALIDATORS[COMMAND_APPROVE]


def build(documents: list[Document], reporter: Reporter = REPORTER) -> Iterator[CloudEvent]:
    """Build the events of the documents one after another, as the forwarder does."""
    watch = Watch()
    for sequence, document in enumerate(documents, start=1):
        before = watch.document
        watch, changes = compare(watch, document, Observation(at=400.0 * sequence, gap_seconds=1.0))
        built = [
            reporter.scheduled_event(change, seen_before=0, incarnation=document.incarnation)
            for change in changes
        ]
        yield from built
        ids = [event.id for event in built]
        by = reporting(reporter, AT, sequence)
        yield by.document(document, previous=before, event_ids=ids)


def faults_in(built: Iterator[CloudEvent]) -> list[str]:
    return [f"{event.type}: {fault}" for event in built for fault in faults(envelope_of(structured(event)))]


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


# --- the files ---


def test_the_files_are_what_the_command_writes(call: Call, tmp_path: Path) -> None:
    assert call("schema", "--write", tmp_path / "new").code == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    assert written == {path.name: path.read_bytes() for path in SCHEMAS.glob("*.json")}
    files = {file_name(name) for name in EVENT_NAMES}
    assert written.keys() == {*files, file_name(CLOUDEVENT), file_name(STATUS)}
    assert {path.name for path in EXAMPLES.iterdir()} == files


def test_the_command_prints_one_schema_or_the_names(call: Call) -> None:
    failed = (SCHEMAS / "approval.failed.v1.json").read_text()
    assert call("schema", "approval.failed").out == failed
    assert call("schema", "io.imdsbridge.approval.failed.v1").out == failed
    assert call("schema", "cloudevent").out == (SCHEMAS / "cloudevent.v1.json").read_text()
    assert call("schema").out.split() == [*NAMES]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nonsense",), "schema: given nonsense, expected one of scheduledevent.scheduled, "),
        (("approval.failed", "--write", "."), "schema: give NAME or --write, not both"),
        (("--write", "/proc/here"), "schema: cannot write to /proc/here: No such file or directory"),
    ],
)
def test_the_command_reports_what_it_cannot_do(call: Call, arguments: tuple[str, ...], error: str) -> None:
    done = call("schema", *arguments)
    assert done.code == 2
    assert error in done.err


# --- their content ---


def properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give all properties, those of properties and of items too."""
    for name, described in schema.get("properties", {}).items():
        yield name, described
        yield from properties(described)
        yield from properties(described.get("items", {}))


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_a_schema_is_valid_and_describes_every_property(name: str) -> None:
    schema = BY_NAME[name]
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:imds-bridge:schema:{name}:1"
    assert schema["description"]
    for property_name, described in properties(schema):
        assert "title" not in described, property_name  # generators of code make a type of each title
        assert "Source: " in described["description"], property_name
        kinds = (
            {described["type"]} if isinstance(described.get("type"), str) else set(described.get("type", ()))
        )
        if kinds & {"integer", "number"} or described.get("format") == "date-time":
            assert "Unit: " in described["description"], property_name
        assert described.get("examples") or described.get("properties"), property_name
        validator = Draft202012Validator(described, format_checker=Draft202012Validator.FORMAT_CHECKER)
        assert all(validator.is_valid(example) for example in described.get("examples", ())), property_name


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_a_schema_needs_no_other_file_and_lets_further_properties_pass(name: str) -> None:
    text = (SCHEMAS / file_name(name)).read_text()
    assert '"$ref"' not in text
    assert '"additionalProperties": false' not in text
    data = read(EXAMPLES / file_name(name))["data"]
    assert VALIDATORS[name].is_valid({**data, "SomethingNew": {"a": [None]}})


@pytest.mark.parametrize("name", [name for name in EVENT_NAMES if name != COMMAND_APPROVE])
def test_a_schema_refuses_data_without_required_properties_or_with_other_types(name: str) -> None:
    data = read(EXAMPLES / file_name(name))["data"]
    for required in BY_NAME[name]["required"]:
        assert not VALIDATORS[name].is_valid({key: data[key] for key in data if key != required}), required
        assert not VALIDATORS[name].is_valid({**data, required: object()}), required
    if name.endswith(("completed", "canceled", "ended")):
        assert not VALIDATORS[name].is_valid({**data, "EventStatus": "Scheduled"})


@pytest.mark.parametrize("kind", ["completed", "canceled", "ended"])
def test_whether_the_vm_is_gone_is_optional_and_an_older_schema_lets_it_pass(kind: str) -> None:
    name = f"scheduledevent.{kind}"
    data, schema = read(EXAMPLES / file_name(name))["data"], BY_NAME[name]
    assert "VmIsGone" in data
    older = {key: value for key, value in schema["properties"].items() if key != "VmIsGone"}
    assert Draft202012Validator({**schema, "properties": older}).is_valid(data)
    assert VALIDATORS[name].is_valid({key: value for key, value in data.items() if key != "VmIsGone"})
    assert not VALIDATORS[name].is_valid({**data, "VmIsGone": "yes"})


@pytest.mark.parametrize("incarnation", [12, 1.5, "12", True, None, [1], {"a": 1}])
def test_a_document_may_have_any_incarnation_and_generators_get_one_type_list(incarnation: Any) -> None:
    data = read(EXAMPLES / "document.changed.v1.json")["data"]
    changed = {**data, "Document": {**data["Document"], "DocumentIncarnation": incarnation}}
    assert VALIDATORS["document.changed"].is_valid(changed)
    assert not [name for name in EVENT_NAMES if "anyOf" in (SCHEMAS / file_name(name)).read_text()]


# --- the schema of all CloudEvents ---


@pytest.mark.parametrize("name", EVENT_NAMES)
@pytest.mark.parametrize("draft", [Draft7Validator, Draft202012Validator])
def test_the_schema_of_all_cloudevents_matches_an_event_only_by_its_own_type(draft: Any, name: str) -> None:
    schema, envelope = BY_NAME[CLOUDEVENT], read(EXAMPLES / file_name(name))
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    assert list(validator.iter_errors(envelope)) == []
    assert validator.is_valid({**envelope, "somethingnew": "x"})
    assert not validator.is_valid({**envelope, "type": "io.imdsbridge.other.v1"})
    assert not validator.is_valid({**envelope, "dataschema": "urn:imds-bridge:schema:other:1"})
    assert not validator.is_valid({**envelope, "data": {}})


@pytest.mark.parametrize(
    "name", [name for name in EVENT_NAMES if not name.startswith(("approval.", "command."))]
)
def test_the_schema_of_all_cloudevents_requires_every_attribute_that_a_type_has(name: str) -> None:
    envelope = read(EXAMPLES / file_name(name))
    for attribute in envelope:
        without = {key: value for key, value in envelope.items() if key != attribute}
        assert not VALIDATORS[CLOUDEVENT].is_valid(without), attribute


def test_the_attributes_of_the_schema_are_those_that_filters_know() -> None:
    definitions = BY_NAME[CLOUDEVENT]["definitions"].values()
    events = [one["properties"] for one in definitions if "specversion" in one["properties"]]
    assert len(events) == len(EVENT_NAMES)
    assert {name for properties in events for name in properties} == {*ATTRIBUTES, "data"}


# --- what README.md says ---


def test_readme_links_every_schema() -> None:
    text = (SCHEMAS / "README.md").read_text()
    assert [path.name for path in SCHEMAS.glob("*.json") if f"]({path.name})" not in text] == []


def sql_filters() -> list[str]:
    blocks = re.findall(r"```sql\n(.*?)```", (SCHEMAS / "README.md").read_text(), re.DOTALL)
    return list(only(blocks).splitlines())


@pytest.mark.parametrize("expression", sql_filters())
def test_a_filter_of_readme_matches_some_events_and_not_others(expression: str) -> None:
    matches, taken = Sql(expression), set()
    for path in EXAMPLES.iterdir():
        envelope, body = read(path), path.read_bytes()
        event = StoredEvent(seq=1, id=envelope["id"], type=envelope["type"], stored_at=0.0, body=body)
        message = to_message(event)
        content = Content(
            properties={"subject": message.subject, "correlation_id": message.correlation_id},
            application_properties={
                str(key): one for key, one in (message.application_properties or {}).items()
            },
        )
        taken.add(bool(matches(content)))
    assert taken == {True, False}


# --- what is published ---


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_an_example_is_a_valid_event_of_its_type_with_the_id_of_its_content(name: str) -> None:
    envelope, command = (read(EXAMPLES / file_name(one)) for one in (name, COMMAND_APPROVE))
    assert faults(envelope) == []
    assert envelope["type"] == type_of(name)
    assert envelope["id"] == id_of(envelope, command)
    if name != COMMAND_APPROVE:  # a command need not say it
        assert envelope["dataschema"] == BY_NAME[name]["$id"]


def test_the_samples_of_every_type_match_the_schemas() -> None:
    built = [event.envelope for event in (*samples(AT), make_test_event(AT, vm="web-0"))]
    assert [fault for envelope in built for fault in faults(envelope)] == []
    assert {envelope["dataschema"] for envelope in built} == {
        schema["$id"] for name, schema in BY_NAME.items() if name not in (COMMAND_APPROVE, CLOUDEVENT, STATUS)
    }


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
@pytest.mark.parametrize("reporter", [REPORTER, UNKNOWN_VM], ids=["known", "unknown"])
def test_events_of_recorded_documents_match_the_schemas(path: Path, reporter: Reporter) -> None:
    documents = [parse_document(json.dumps(raw).encode()) for raw in read(path)["documents"]]
    assert faults_in(build(documents, reporter)) == []


some = settings(
    thorough, max_examples=50
)  # of many events each, which the schema of all types is slow to check
texts = st.text(max_size=8) | st.none()
documented = st.fixed_dictionaries(
    {
        "EventId": st.sampled_from([FIRST, FIRST.lower(), SECOND, "third"]),
        "EventStatus": st.sampled_from(["Scheduled", "Started", "scheduled", "Postponed"]) | texts,
    },
    optional={
        "EventType": st.sampled_from(["Reboot", "Defrost"]) | texts,
        "ResourceType": texts,
        "Resources": st.lists(st.sampled_from(["web-0", "_WEB-0", "web-1", ""]), max_size=3) | st.none(),
        "NotBefore": st.sampled_from([NOT_BEFORE, "2022-04-11T22:26:58Z", "0001-01-01T00:00:00Z"]) | texts,
        "Description": texts,
        "EventSource": st.sampled_from(["Platform", "User"]) | texts,
        "DurationInSeconds": st.integers() | st.none(),
        "SomethingNew": st.lists(st.floats(allow_nan=False, allow_infinity=False) | texts, max_size=2),
        "Vm": st.just("whatever"),
    },
)
documents = st.builds(
    lambda incarnation, events: parse_document(
        json.dumps({"DocumentIncarnation": incarnation, "Events": events}).encode()
    ),
    st.integers() | st.integers().map(str) | st.none(),
    st.lists(documented, max_size=4) | st.none(),
)


@some
@given(st.lists(documents, min_size=1, max_size=4), st.sampled_from([REPORTER, UNKNOWN_VM]))
def test_events_of_any_document_with_documented_types_match_the_schemas(
    life: list[Document], reporter: Reporter
) -> None:
    assert faults_in(build(life, reporter)) == []


@some
@given(
    st.dictionaries(st.sampled_from(["EventType", "Resources", "NotBefore"]), st.none() | st.integers()),
    st.text(max_size=5),
)
def test_any_document_is_published_whole_by_an_event_that_matches_the_schema(
    odd: dict[str, Any], name: str
) -> None:
    raw = {"DocumentIncarnation": [name], "Events": [entry(**odd), 5, None], name: odd}
    built = [*build([parse_document(json.dumps(raw).encode())])][-1]
    assert faults_in(iter([built])) == []
    assert built.data["Document"] == raw


# --- what really runs ---


def test_the_processes_publish_the_types_of_the_examples_and_all_match_the_schemas(tmp_path: Path) -> None:
    built = record(tmp_path)
    assert [(name_of(envelope), fault) for envelope in built for fault in faults(envelope)] == []
    found = examples(built)
    for name, envelope in found.items():
        assert envelope["id"] == id_of(envelope, found[COMMAND_APPROVE]), name
        assert paths(envelope) == paths(read(EXAMPLES / file_name(name))), name
    reasons = Counter(envelope["data"].get("Reason") for envelope in built)
    assert {"approved", "denied", "imds_refused", "malformed", "Started", "Stopping"} <= reasons.keys()
    assert [e["data"]["Count"] for e in built if "Count" in e["data"]] == [None, 2]


def test_an_example_that_is_still_right_is_kept_as_it_is(tmp_path: Path) -> None:
    file = EXAMPLES / "bridge.loss.v1.json"
    known = read(file)
    later = {**known, "id": "another", "time": "2030-01-01T00:00:00.000Z"}
    assert kept(file, later) == known
    assert kept(tmp_path / "missing.json", later) == later
    with_more = {**later, "data": {**known["data"], "More": 1}}
    assert kept(file, with_more) == with_more
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({**known, "data": {**known["data"], "Count": "three"}}))
    assert kept(wrong, later) == later


# --- commands ---


def is_accepted(body: Any) -> bool:
    with suppress(ValueError):
        parse_command(json.dumps(body).encode(), message_id="m")
        return True
    return False


def accepts(data: Any) -> bool:
    """Return whether the listener accepts the data, alone and as a CloudEvent's."""
    kind = type_of(COMMAND_APPROVE)
    envelope = {"specversion": "1.0", "id": "c", "source": "/s", "type": kind, "data": data}
    assert is_accepted(data) == is_accepted(envelope), data
    return is_accepted(data)


VALID_COMMANDS: list[dict[str, Any]] = [
    {"EventId": FIRST},
    {"EventIds": [FIRST, SECOND.lower()]},
    {"EventIds": [f"e{number}" for number in range(100)]},
    {"StartRequests": [{"EventId": FIRST}, {"EventId": SECOND, "Further": 1}]},
    {"DocumentIncarnation": 5, "StartRequests": [{"EventId": FIRST}]},
    {"EventId": "!" * 200, "Id": "order-17", "Vm": "größe 1", "RequestedBy": "", "Reason": "drained"},
    {"EventId": FIRST, "Id": None, "Vm": None, "RequestedBy": None, "Reason": None, "ExpiresAt": None},
    {"EventId": FIRST, "Vm": "", "ExpiresAt": "2026-11-20T12:00:00.123Z"},
    {"EventId": FIRST, "ExpiresAt": "2026-11-20T12:00:00+02:00", "Further": {}},
    {"EventId": FIRST, "EventIds": None, "StartRequests": None},  # as a class of this schema writes it
]


def each(name: str, *values: Any, **more: Any) -> list[dict[str, Any]]:
    return [{**more, name: value} for value in values]


INVALID_COMMANDS = [
    *each("Vm", "web-0"),
    *each("EventId", "", None, 5, "two words", "x" * 201, "é"),
    *each("EventIds", [], FIRST, [FIRST, None], [f"e{number}" for number in range(101)]),
    *each("StartRequests", [], [FIRST], {"EventId": FIRST}, [{}]),
    *each("EventIds", [], EventId=FIRST),
    *each("Vm", " ", 5, ["web-0"], "x" * 1001, EventId=FIRST),
    *each("ExpiresAt", "soon", "", 1_795_000_000, "2026-11-20t12:00:00z", EventId=FIRST),
    *each(
        "ExpiresAt", "2026-11-20", "2026-11-20T12:00:00", "2026-W47-5", "2026-11-20 12:00:00Z", EventId=FIRST
    ),
    {},
]


@pytest.mark.parametrize("data", VALID_COMMANDS, ids=str)
def test_a_command_that_matches_the_schema_is_accepted(data: dict[str, Any]) -> None:
    assert list(COMMAND.iter_errors(data)) == []
    assert accepts(data)


@pytest.mark.parametrize("data", INVALID_COMMANDS, ids=str)
def test_an_invalid_command_is_refused_by_the_schema_and_by_the_listener(data: dict[str, Any]) -> None:
    assert not COMMAND.is_valid(data)
    assert not accepts(data)


def test_the_listener_also_accepts_what_the_schema_does_not_promise_and_refuses_what_it_cannot_say() -> None:
    texts = {"EventId": FIRST, "Reason": 5}
    assert (COMMAND.is_valid(texts), accepts(texts)) == (False, True)
    misspelt = {"EventId": FIRST, "vm": "web-9"}
    assert (COMMAND.is_valid(misspelt), accepts(misspelt)) == (True, False)


printable = st.text(st.characters(exclude_categories=("C", "Zl", "Zp", "Zs")), max_size=9)


@thorough
@given(
    st.one_of(
        st.fixed_dictionaries({"EventId": st.text("!aZ0-~", max_size=3)}),
        st.fixed_dictionaries({"EventIds": st.lists(st.text("!a-~ ", max_size=3), max_size=3)}),
        st.fixed_dictionaries({"StartRequests": st.lists(st.fixed_dictionaries({"EventId": printable}))}),
    ),
    st.fixed_dictionaries(
        {},
        optional={
            "Id": texts,
            "Vm": printable | st.none(),
            "RequestedBy": texts,
            "Reason": texts,
            "ExpiresAt": st.none()
            | st.datetimes(datetime(2, 1, 1), timezones=st.just(UTC)).map(datetime.isoformat),
        },
    ),
)
def test_the_listener_accepts_whatever_the_schema_accepts(
    which: dict[str, Any], more: dict[str, Any]
) -> None:
    data = {**which, **more}
    assert accepts(data) or not COMMAND.is_valid(data)


def test_a_receipt_without_a_known_event_matches_the_schema() -> None:
    named = {"Reason": "malformed", "Detail": "no JSON", "Command": {"Id": ""}, "DryRun": True}
    built = replace(REPORTER, role="listen").receipt(
        outcome="rejected",
        key="k",
        command_id="",
        event_id="",
        resources=(),
        data={**named, "EventType": None, "NotBeforeUtc": None},
    )
    assert faults_in(iter([built])) == []


@pytest.mark.parametrize(
    ("epoch", "number", "is_valid"),
    [
        (None, None, True),
        ("e1", 17, True),
        ("e1", None, False),
        ("e1", "17", False),
        ("e1", -1, False),
        (None, 17, False),
    ],
)
def test_a_start_names_the_run_before_with_its_last_number_or_not_at_all(
    epoch: str | None, number: Any, is_valid: bool
) -> None:
    event = REPORTER.heartbeat(reason="Started", version="1", backlog={}, previous=(epoch, number))
    assert (faults(envelope_of(structured(event))) == []) is is_valid
