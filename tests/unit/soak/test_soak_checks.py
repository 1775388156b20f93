"""Each check of the soak test notices what it is there for: a right history with one thing wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.usage import Usage
from tools.soak.checks import problems
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


def right() -> Evidence:
    """Return a history in which nothing is wrong: a process that saw four changes, and two commands."""
    receipts = [receipt(1, "c1", "Accepted", "approved"), receipt(2, "c2", "Rejected", "already_started")]
    polls = [Poll(at=at, wall=WALL + at, is_clean=True) for at in range(50)]
    return Evidence(
        documents=[
            Document(incarnation=number, since=10.0 * number, events=state(number))
            for number in range(len(STATES))
        ],
        observers=[
            Observer(
                name=f"{VM}/forward",
                sinks={"hook": [*published(), change(4)], "grid": published()},
                polls=polls,
                runs=[Span(start=0, end=50)],
            )
        ],
        topic=[*published(), *receipts],
        relayed=[*published(), *receipts],
        receipts={VM: [*receipts, receipts[1]]},
        commands=[
            *(Command(id=name, vm=VM, event_id=EVENT_ID) for name in ("c1", "c2")),
            Command(id="c3", vm=VM, event_id=""),
        ],
        approvals=[(VM, EVENT_ID)],
        dead_letters=frozenset({"c3"}),
        before={VM: USAGE},
        after={VM: USAGE},
    )


def with_sinks(evidence: Evidence, edit: Callable[[Events], object], *names: str) -> Evidence:
    """Return evidence in which `edit` has changed what some receivers got, by default all of the process's."""
    (observer,) = evidence.observers
    sinks = {name: copy.deepcopy([*map(dict, events)]) for name, events in observer.sinks.items()}
    topic = copy.deepcopy([*map(dict, evidence.topic)])
    for name, events in {**sinks, "bus": topic}.items():
        if not names or name in names:
            edit(events)
    return replace(evidence, observers=[replace(observer, sinks=sinks)], topic=topic, relayed=topic)


def only_observer(evidence: Evidence, **changes: Any) -> Evidence:
    return replace(evidence, observers=[replace(evidence.observers[0], **changes)])


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


def swap(first: int, second: int) -> Callable[[Events], object]:
    def edit(events: Events) -> None:
        events[first], events[second] = events[second], events[first]

    return edit


def lose(reason: str, sink: str, count: int) -> Callable[[Events], object]:
    return lambda events: events.append(own(6, "bridge.loss", Reason=reason, Sink=sink, Count=count))


def recovered(start: float, end: float) -> Callable[[Events], object]:
    times = {
        name: datetime.fromtimestamp(WALL + at, UTC).isoformat()
        for name, at in (("BlindFrom", start), ("BlindTo", end))
    }
    return lambda events: events.append(own(6, "imds.recovered", **times))


def polls_without(start: float, end: float) -> list[Poll]:
    return [Poll(at=at, wall=WALL + at, is_clean=True) for at in range(50) if not start < at < end]


def answers(*receipts: Envelope) -> Evidence:
    evidence = right()
    topic = [one for one in evidence.topic if "causationid" not in one] + [*receipts]
    return replace(evidence, receipts={VM: receipts}, topic=topic, relayed=topic)


def grown(**more: Any) -> Evidence:
    return replace(right(), after={VM: replace(USAGE, **more)})


def test_a_right_history_has_no_problem() -> None:
    assert problems(right()) == []


def test_a_loss_that_is_reported_is_no_problem() -> None:
    evidence = with_sinks(right(), lose("SizeLimit", "grid", 2))
    assert problems(with_sinks(evidence, without(2), "grid")) == []


def test_a_document_that_only_the_bus_has_is_published() -> None:
    evidence = right()
    for sink in ("hook", "grid"):
        evidence = with_sinks(
            with_sinks(evidence, lose("SizeLimit", sink, 1)), lambda events: events.pop(4), sink
        )
    assert [one for one in problems(evidence) if "did not publish" in one] == []


def test_a_gap_that_is_reported_is_no_problem() -> None:
    evidence = with_sinks(right(), recovered(11.0, 22.0))
    assert problems(only_observer(evidence, polls=polls_without(11, 22))) == []


def test_a_document_that_was_not_shown_for_long_need_not_be_published() -> None:
    evidence = with_sinks(right(), recovered(29.0, 39.0))
    evidence = only_observer(with_sinks(evidence, renumber_with_gap), polls=polls_without(31, 39))
    assert problems(evidence) == []


def renumber_with_gap(events: Events) -> None:
    """Publish document 4 after document 2, as a process does that could not see document 3."""
    without(3)(events)
    for one in events:
        if one["id"] == "forward 5":
            one["reporterseq"] = f"{4:012}"
            one["data"]["PreviousIncarnation"] = 2
        elif one["id"] == "forward 6":
            one["reporterseq"] = f"{5:012}"
        elif one["id"] == "id 4":
            one["type"] = f"{TYPE}scheduledevent.ended.v1"
            one["data"] = {**state(2)[EVENT_ID], "Vm": {"Name": VM}}


WRONG: dict[str, tuple[Evidence, str]] = {
    "an event is missing at one sink": (
        with_sinks(right(), without(2), "grid"),
        "sink grid: 2 events missing",
    ),
    "an event is missing on the bus": (with_sinks(right(), without(2), "bus"), "sink bus: 2 events missing"),
    "more is missing than a loss reports": (
        with_sinks(with_sinks(right(), lose("SizeLimit", "grid", 1)), without(2), "grid"),
        "2 events missing, 1 reported",
    ),
    "an event is missing everywhere": (
        with_sinks(right(), lambda events: events.pop(1)),
        "1 events missing",
    ),
    "a loss without cause": (
        with_sinks(right(), lose("Damage", "grid", 0)),
        "a loss that nothing has caused",
    ),
    "events of one EventId in the wrong order": (with_sinks(right(), swap(1, 3), "hook"), "('id 2',)"),
    "own events in the wrong order": (with_sinks(right(), swap(2, 4), "grid"), "came after"),
    "the bus has events of one EventId in the wrong order": (
        with_sinks(right(), swap(1, 3), "bus"),
        "topic: ('id 1',) came after ('id 2',)",
    ),
    "one id has two contents": (
        with_sinks(right(), lambda events: events[1]["data"].update(Description="other"), "grid"),
        "one id, different events",
    ),
    "a document that IMDS did not have": (
        with_sinks(right(), lambda events: events[2]["data"]["Document"]["Events"].clear()),
        "a document that IMDS did not have",
    ),
    "a document is skipped": (with_sinks(right(), renumber), "did not publish [3]"),
    "the wrong kind of change": (
        with_sinks(right(), lambda events: events[7].update(type=f"{TYPE}scheduledevent.canceled.v1")),
        "expected {'E-1': {'completed'}}",
    ),
    "an event that differs from IMDS": (
        with_sinks(right(), lambda events: events[1]["data"].update(Resources=["db-0"])),
        "differs from IMDS",
    ),
    "a gap that is not reported": (
        only_observer(right(), polls=polls_without(11, 22)),
        "had no answer for ['11.0 s']",
    ),
    "the relay lacks an event": (replace(right(), relayed=right().topic[1:]), "relay: 1 events missing"),
    "a command without an answer": (answers(receipt(1, "c1", "Accepted", "approved")), "0 answers"),
    "a command with two answers": (
        answers(*right().receipts[VM], receipt(3, "c2", "Accepted", "approved")),
        "2 answers",
    ),
    "a command is accepted without a POST": (replace(right(), approvals=[]), "IMDS got no approval"),
    "an allowed command is denied": (
        answers(receipt(1, "c1", "Accepted", "approved"), receipt(2, "c2", "Rejected", "denied")),
        "but the policy says: True",
    ),
    "a malformed command is not dead-lettered": (
        replace(right(), dead_letters=frozenset()),
        "dead letters: []",
    ),
    "an approval that the policy denies": (
        replace(right(), approvals=[(VM, EVENT_ID), ("web-9", EVENT_ID)]),
        "which the policy denies",
    ),
    "a process that holds more memory": (grown(rss_mib=90.0), "grew"),
    "a process that has more threads": (grown(threads=12), "grew"),
    "a process that has more files": (grown(files=40), "grew"),
    "a process that is gone": (replace(right(), after={}), "does not run"),
    "a process that exited": (replace(right(), problems=["web-0 exited with 1"]), "exited with 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_checks_notice(what: str) -> None:
    evidence, expected = WRONG[what]
    found = problems(evidence)
    assert any(expected in problem for problem in found), found
