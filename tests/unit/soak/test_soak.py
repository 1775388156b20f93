"""The soak test: its plan of faults, and each of its checks on a right history with one thing wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from tests.support.only import only
from tests.support.usage import Usage
from tools.soak.checks import problems
from tools.soak.plan import WARM_UP_SECONDS, Lane, plan
from tools.soak.truth import Command, Document, Envelope, Evidence, Observer, Poll, Span

Events = list[dict[str, Any]]
VM, EVENT_ID, TYPE = "web-0", "E-1", "io.imdsbridge."
WALL = 1_800_000_000.0
STATES: list[dict[str, str]] = [
    {},
    {"EventStatus": "Scheduled"},
    {"EventStatus": "Scheduled", "Description": "later"},
    {"EventStatus": "Started"},
    {},
]
KINDS = ("scheduled", "updated", "started", "completed")
COMMANDS = {"c1": EVENT_ID, "c2": EVENT_ID, "c3": ""}
USAGE = Usage(rss_mib=40.0, threads=5, files=20)


def state(number: int) -> dict[str, Any]:
    """Return the events of a document by EventId."""
    fixed = {"EventId": EVENT_ID, "EventType": "Reboot", "EventSource": "Platform", "Resources": [VM]}
    return {EVENT_ID: {**fixed, **STATES[number]}} if STATES[number] else {}


def own(number: int, type_: str, role: str = "forward", **data: Any) -> dict[str, Any]:
    place = {"reporter": f"{VM}/{role}", "reporterepoch": f"epoch of {role}", "reporterseq": f"{number:012}"}
    return {"id": f"{role} {number}", "type": f"{TYPE}{type_}.v1", **place, "data": data}


def document(number: int) -> dict[str, Any]:
    return own(
        number + 1,
        "document.changed",
        Document={"DocumentIncarnation": number, "Events": [*state(number).values()]},
        DocumentIncarnation=number,
        PreviousIncarnation=number - 1 if number else None,
        CloudEventIds=[f"id {number}"] if number else [],
    )


def change(number: int) -> dict[str, Any]:
    data = {**(state(number) or state(number - 1))[EVENT_ID], "Vm": {"Name": VM}}
    type_ = f"{TYPE}scheduledevent.{KINDS[number - 1]}.v1"
    return {"id": f"id {number}", "type": type_, "correlationid": EVENT_ID, "data": data}


def published() -> Events:
    changes = [one for number in range(1, len(STATES)) for one in (change(number), document(number))]
    return [document(0), *changes]


def receipt(number: int, command: str, outcome: str, reason: str) -> dict[str, Any]:
    made = own(number, f"approval.{outcome.lower()}", "listen", Outcome=outcome, Reason=reason)
    return {**made, "causationid": command, "correlationid": EVENT_ID}


def polls_without(start: float = 0, end: float = 0) -> list[Poll]:
    return [Poll(at=at, wall=WALL + at, is_clean=True) for at in range(50) if not start < at < end]


APPROVED, LATE = receipt(1, "c1", "Accepted", "approved"), receipt(2, "c2", "Rejected", "already_started")
# Nothing is wrong: a process saw four changes, and there were two commands.
RIGHT = Evidence(
    documents=[
        Document(incarnation=number, since=10.0 * number, events=state(number))
        for number in range(len(STATES))
    ],
    observers=[
        Observer(
            name=f"{VM}/forward",
            sinks={"hook": [*published(), change(4)], "grid": published()},
            polls=polls_without(),
            runs=[Span(start=0, end=50)],
        )
    ],
    topic=[*published(), APPROVED, LATE],
    relayed=[*published(), APPROVED, LATE],
    receipts={VM: [APPROVED, LATE, LATE]},
    commands=[Command(id=name, vm=VM, event_id=about) for name, about in COMMANDS.items()],
    approvals=[(VM, EVENT_ID)],
    dead_letters=frozenset({"c3"}),
    before={VM: USAGE},
    after={VM: USAGE},
)


def edited(edit: Callable[[Events], object], *names: str, of: Evidence = RIGHT) -> Evidence:
    """Return evidence in which `edit` has changed what some receivers got, by default all of the process's."""
    observer = only(of.observers)
    got: dict[str, Any] = copy.deepcopy({**observer.sinks, "bus": of.topic})
    for name in names or got:
        edit(got[name])
    topic = got.pop("bus")
    return replace(of, observers=[replace(observer, sinks=got)], topic=topic, relayed=topic)


def polled(polls: list[Poll], of: Evidence = RIGHT) -> Evidence:
    return replace(of, observers=[replace(only(of.observers), polls=polls)])


def without(number: int) -> Callable[[Events], object]:
    """Return what removes a change and its document."""
    return lambda events: events.__setitem__(
        slice(None),
        [one for one in events if one["id"] not in (f"id {number}", f"forward {number + 1}")],
    )


def renumber(events: Events) -> None:
    """Skip document 3, without a gap in the counter."""
    without(3)(events)
    for one in events:
        if one["id"] == "forward 5":
            one["reporterseq"] = f"{4:012}"


def renumber_with_gap(events: Events) -> None:
    """Publish document 4 after document 2, as a process does that could not see document 3."""
    renumber(events)
    for one in events:
        if one["id"] == "forward 5":
            one["data"]["PreviousIncarnation"] = 2
        elif one["id"] == "forward 6":
            one["reporterseq"] = f"{5:012}"
        elif one["id"] == "id 4":
            one["type"] = f"{TYPE}scheduledevent.ended.v1"
            one["data"] = {**state(2)[EVENT_ID], "Vm": {"Name": VM}}


def swap(first: int, second: int) -> Callable[[Events], object]:
    def edit(events: Events) -> None:
        events[first], events[second] = events[second], events[first]

    return edit


def lose(reason: str, sink: str, count: int) -> Callable[[Events], object]:
    return lambda events: events.append(own(6, "bridge.loss", Reason=reason, Sink=sink, Count=count))


def with_data(number: int, **data: Any) -> Callable[[Events], object]:
    return lambda events: events[number]["data"].update(data)


def recovered(start: float, end: float) -> Callable[[Events], object]:
    times = {
        name: datetime.fromtimestamp(WALL + at, UTC).isoformat()
        for name, at in (("BlindFrom", start), ("BlindTo", end))
    }
    return lambda events: events.append(own(6, "imds.recovered", **times))


def answers(*receipts: Envelope) -> Evidence:
    topic = [one for one in RIGHT.topic if "causationid" not in one] + [*receipts]
    return replace(RIGHT, receipts={VM: receipts}, topic=topic, relayed=topic)


def grown(**more: Any) -> Evidence:
    return replace(RIGHT, after={VM: replace(USAGE, **more)})


REPORTED = edited(recovered(29.0, 39.0))
HARMLESS = {
    "a right history": RIGHT,
    "a loss that is reported": edited(without(2), "grid", of=edited(lose("SizeLimit", "grid", 2))),
    "a gap that is reported": polled(polls_without(11, 22), edited(recovered(11.0, 22.0))),
    "a document that was not shown for long": polled(
        polls_without(31, 39), edited(renumber_with_gap, of=REPORTED)
    ),
}


@pytest.mark.parametrize("evidence", HARMLESS.values(), ids=HARMLESS)
def test_what_is_right_or_reported_is_no_problem(evidence: Evidence) -> None:
    assert problems(evidence) == []


def test_a_document_that_only_the_bus_has_is_published() -> None:
    evidence = RIGHT
    for sink in ("hook", "grid"):
        reported = edited(lose("SizeLimit", sink, 1), of=evidence)
        evidence = edited(lambda events: events.pop(4), sink, of=reported)
    assert [one for one in problems(evidence) if "did not publish" in one] == []


LESS_REPORTED = edited(lose("SizeLimit", "grid", 1))
DENIED = receipt(2, "c2", "Rejected", "denied")
AGAIN = receipt(3, "c2", "Accepted", "approved")
WRONG: dict[str, tuple[Evidence, str]] = {
    "an event is missing at one sink": (edited(without(2), "grid"), "sink grid: 2 events missing"),
    "an event is missing on the bus": (edited(without(2), "bus"), "sink bus: 2 events missing"),
    "more is missing than a loss reports": (
        edited(without(2), "grid", of=LESS_REPORTED),
        "2 events missing, 1 reported",
    ),
    "an event is missing everywhere": (edited(lambda events: events.pop(1)), "1 events missing"),
    "a loss without cause": (edited(lose("Damage", "grid", 0)), "a loss that nothing has caused"),
    "events of one EventId in the wrong order": (edited(swap(1, 3), "hook"), "('id 2',)"),
    "own events in the wrong order": (edited(swap(2, 4), "grid"), "came after"),
    "the bus in the wrong order": (edited(swap(1, 3), "bus"), "topic: ('id 1',) came after ('id 2',)"),
    "one id has two contents": (
        edited(with_data(1, Description="other"), "grid"),
        "one id, different events",
    ),
    "a document that IMDS did not have": (
        edited(lambda events: events[2]["data"]["Document"]["Events"].clear()),
        "a document that IMDS did not have",
    ),
    "a document is skipped": (edited(renumber), "did not publish [3]"),
    "the wrong kind of change": (
        edited(lambda events: events[7].update(type=f"{TYPE}scheduledevent.canceled.v1")),
        "expected {'E-1': {'completed'}}",
    ),
    "an event that differs from IMDS": (edited(with_data(1, Resources=["db-0"])), "differs from IMDS"),
    "a gap that is not reported": (polled(polls_without(11, 22)), "had no answer for ['11.0 s']"),
    "the relay lacks an event": (replace(RIGHT, relayed=RIGHT.topic[1:]), "relay: 1 events missing"),
    "a command without an answer": (answers(APPROVED), "0 answers"),
    "a command with two answers": (answers(APPROVED, LATE, LATE, AGAIN), "2 answers"),
    "a command is accepted without a POST": (replace(RIGHT, approvals=[]), "IMDS got no approval"),
    "an allowed command is denied": (answers(APPROVED, DENIED), "but the policy says: True"),
    "a malformed command stays": (replace(RIGHT, dead_letters=frozenset()), "dead letters: []"),
    "an approval that the policy denies": (
        replace(RIGHT, approvals=[(VM, EVENT_ID), ("web-9", EVENT_ID)]),
        "which the policy denies",
    ),
    "a process that holds more memory": (grown(rss_mib=90.0), "grew"),
    "a process that has more threads": (grown(threads=12), "grew"),
    "a process that has more files": (grown(files=40), "grew"),
    "a process that is gone": (replace(RIGHT, after={}), "does not run"),
    "a process that exited": (replace(RIGHT, problems=["web-0 exited with 1"]), "exited with 1"),
}


@pytest.mark.parametrize(("evidence", "expected"), WRONG.values(), ids=WRONG)
def test_the_checks_notice(evidence: Evidence, expected: str) -> None:
    found = problems(evidence)
    assert any(expected in problem for problem in found), found


# The plan

LANES = {
    "imds": Lane(kinds=("500", "drop", "slow")),
    "bus": Lane(kinds=("outage", "stall"), fail_seconds=(2, 3), rest_seconds=(1, 2)),
}
SECONDS = 600.0


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert plan(1, SECONDS, LANES) == plan(1, SECONDS, LANES) != plan(2, SECONDS, LANES)


@pytest.mark.parametrize("target", LANES)
def test_every_kind_comes_one_at_a_time_and_ends_before_the_checks(target: str) -> None:
    lane, faults = LANES[target], [one for one in plan(1, SECONDS, LANES) if one.target == target]
    assert {fault.kind for fault in faults[: len(lane.kinds)]} == {*lane.kinds}
    assert all(then.start - last.end >= lane.rest_seconds[0] for last, then in pairwise(faults))
    assert all(WARM_UP_SECONDS <= fault.start < fault.end <= SECONDS for fault in faults)
