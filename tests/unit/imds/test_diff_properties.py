"""What holds for all documents: nothing is lost between them, ids are the contract, and no input stops it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bridge.events import builder as events
from bridge.events.model import CloudEvent, structured
from bridge.formats.cloudevents import binary
from bridge.imds.diff import Change, Observation, Watch, compare
from bridge.imds.document import Document, ScheduledEvent, parse_document, read_document
from bridge.imds.instance import Vm
from tests.support.diff import FIRST, NOT_BEFORE, SECOND, VM, envelope_of, faults_of, json_values, thorough

AT = datetime(2022, 4, 11, 22, 20, tzinfo=UTC)
REPORTER = events.Reporter(name="web-0", role="forward", epoch="e1", at=AT, next_number=lambda: 1, vm=VM)

event_ids = st.sampled_from([FIRST, FIRST.lower(), SECOND, SECOND.lower(), "third"])
statuses = st.sampled_from(["Scheduled", "Started", "scheduled", "Postponed", "", None])
entries = st.fixed_dictionaries(
    {"EventId": event_ids, "EventStatus": statuses},
    optional={
        "EventType": st.sampled_from(["Reboot", "Freeze", "Defrost"]),
        "Resources": st.lists(st.sampled_from(["web-0", "_WEB-0", "web-1"]), max_size=3),
        "NotBefore": st.sampled_from([NOT_BEFORE, "2022-04-11T22:26:58Z", "2022-04-11T23:00:00Z", "", None]),
        "Description": st.sampled_from(["", None, "moved"]),
        "DurationInSeconds": st.integers(-1, 2),
    },
)
documents = st.builds(
    lambda incarnation, entries: read_document({"DocumentIncarnation": incarnation, "Events": entries}),
    st.integers(0, 6) | st.none(),
    st.lists(entries, max_size=4),
)
sightings = st.tuples(st.sampled_from([0.2, 1.0, 5.0, 6.0, 200.0, 400.0]), st.booleans(), st.booleans())
Step = tuple[Document, tuple[float, bool, bool]]
lives = st.lists(st.tuples(documents, sightings), min_size=1, max_size=8)


def walk(life: Sequence[Step]) -> list[tuple[Watch, Watch, Document, tuple[Change, ...]]]:
    """Compare the documents of a life one after another."""
    watch, at, steps = Watch(), 0.0, []
    for document, (after, restarted, service_was_off) in life:
        at += after
        gap_seconds = None if restarted else after
        observation = Observation(at=at, gap_seconds=gap_seconds, service_was_off=service_was_off)
        now, changes = compare(watch, document, observation)
        steps.append((watch, now, document, changes))
        watch = Watch.load(now.dump()) if restarted else now
    return steps


def publish(life: Sequence[Step], reporter: events.Reporter) -> Iterator[CloudEvent]:
    """Build the events of a life as the forwarder does, counting earlier occurrences."""
    seen: Counter[str] = Counter()
    for _, _, document, changes in walk(life):
        for change in changes:
            count, incarnation = seen[change.fingerprint], document.incarnation
            yield reporter.scheduled_event(change, seen_before=count, incarnation=incarnation)
            seen[change.fingerprint] += 1


def said(known: Mapping[str, ScheduledEvent]) -> dict[str, Mapping[str, Any]]:
    return {key: event.content for key, event in known.items()}


def apply(known: Mapping[str, ScheduledEvent], changes: Sequence[Change]) -> dict[str, ScheduledEvent]:
    """Do to the known events what the changes say."""
    gone = {change.event.key for change in changes if change.kind in events.END_STATUS}
    result = {**known, **{change.event.key: change.event for change in changes}}
    return {key: event for key, event in result.items() if key not in gone}


@thorough
@given(lives)
def test_each_step_of_a_life_leads_from_what_was_known_to_what_is_known_now(life: list[Step]) -> None:
    for (before, now, document, changes), (_, circumstances) in zip(walk(life), life, strict=True):
        assert said(apply(before.known, changes)) == said(now.known)
        assert now.document == document
        assert not now.missing.keys() & document.events.keys()
        keys = [change.event.key for change in changes]
        assert len(keys) == len(set(keys))
        for change in changes:
            assert_true(change, before.known.get(change.event.key), document)
        if any(change.kind == "canceled" for change in changes):
            after, restarted, service_was_off = circumstances
            assert (after <= 5, restarted, service_was_off) == (True, False, False)
            assert_continuous(before.document, document)
    again, changes = compare(now, document, Observation(at=0.0, gap_seconds=None))
    assert (again, changes) == (now, ())  # seeing the same once more changes nothing


def assert_true(change: Change, was: ScheduledEvent | None, document: Document) -> None:
    """Check that a change differs from what was, or says of an event that it is gone."""
    assert change.previous == was
    if change.kind in events.END_STATUS:
        assert change.event.key not in document.events
    else:
        assert was is None or (was.content != change.event.content and change.changed)


def assert_continuous(before: Document | None, now: Document) -> None:
    assert before is not None
    assert before.incarnation is not None
    assert now.incarnation is not None
    assert now.incarnation - before.incarnation in (0, 1)


@thorough
@given(documents, st.randoms(use_true_random=False))
def test_a_document_in_another_spelling_changes_nothing(document: Document, random: Any) -> None:
    def respelled(entry: Mapping[str, Any]) -> dict[str, Any]:
        spelled = {name: value for name, value in entry.items() if value not in (None, "")}
        spelled["EventId"] = random.choice([str.upper, str.lower])(entry["EventId"])
        if entry.get("NotBefore") in (NOT_BEFORE, "2022-04-11T22:26:58Z"):
            spelled["NotBefore"] = random.choice([NOT_BEFORE, "2022-04-12T00:26:58+02:00"])
        if entry.get("Resources"):
            spelled["Resources"] = [name.swapcase() for name in reversed(entry["Resources"])]
        return dict(random.sample([*spelled.items()], len(spelled)))

    other = {**document.raw, "Events": [respelled(entry) for entry in document.raw["Events"]]}
    _, changes = compare(Watch(document=document), read_document(other), Observation(at=0.0, gap_seconds=1.0))
    assert changes == ()


@thorough
@given(lives, st.sampled_from(["web-1", "db-7"]), st.sampled_from(["", "other"]))
def test_ids_are_the_same_on_every_vm_and_none_is_given_twice(
    life: list[Step], name: str, group: str
) -> None:
    mine = list(publish(life, REPORTER))
    again = [(parse_document(json.dumps(document.raw).encode()), seen) for document, seen in life]
    other = Vm(name=name, vm_id="another", resource_group=group)
    theirs = publish(again, replace(REPORTER, name=name, epoch="e2", vm=other))
    assert [(event.id, event.type) for event in mine] == [(event.id, event.type) for event in theirs]
    assert len({event.id for event in mine}) == len(mine)


# Unusual ones: properties of IMDS with any values, entries that are not events, unknown properties.
texts = st.text(st.characters(exclude_categories=())) | st.sampled_from(["NaN", "\ud800", "\x00"])
any_json = json_values(st.none() | st.booleans() | st.integers() | texts, texts)
names = st.sampled_from(["EventStatus", "NotBefore", "Resources", "EventType", "Vm", "Changed"]) | texts
odd_entries = st.builds(
    lambda rest, event_id: {**rest, "EventId": event_id}, st.dictionaries(names, any_json), event_ids
)


@thorough
@given(st.binary(max_size=300), st.dictionaries(st.sampled_from(["Events", "DocumentIncarnation"]), any_json))
def test_bytes_and_json_of_any_kind_are_read_or_refused(body: bytes, value: Any) -> None:
    event = b'{"EventId": "a", "X": "' + body + b'"}'
    lists = [b'{"Events": [' + one + b"]}" for one in (body, event)]
    for whole in (body, *lists, json.dumps(value).encode()):
        with suppress(ValueError):
            parse_document(whole)


@thorough
@given(st.lists(st.lists(odd_entries | any_json, max_size=4), min_size=1, max_size=3), any_json)
def test_any_document_becomes_valid_cloudevents(all_entries: list[list[Any]], odd: Any) -> None:
    watch = Watch()
    for entries in all_entries:
        raw = {"DocumentIncarnation": odd, "Events": entries, "Odd": odd}
        document = parse_document(json.dumps(raw).encode())
        assert document.raw == raw
        assert len(document.events) + len(document.invalid_entries) == len(entries)
        before = watch.document
        watch, changes = compare(watch, document, Observation(at=0.0, gap_seconds=1.0))
        assert Watch.load(watch.dump()) == watch
        published = [REPORTER.scheduled_event(change, seen_before=0, incarnation=None) for change in changes]
        whole = REPORTER.document(document, previous=before, event_ids=[])
        for event in (*published, whole):
            envelope = envelope_of(structured(event))
            assert faults_of(envelope) == []
            assert all(value.isascii() and value.isprintable() for value in binary(envelope)[0].values())
        assert envelope["data"]["Document"] == raw
