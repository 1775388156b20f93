"""Turns: which events may take their VMs away at once, by documents alone."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.approvals.state import EventState, Stay
from bridge.approvals.turns import SETTLE_SECONDS, deadline, give_turns
from bridge.config.approvals import AutoSettings
from bridge.imds.document import SCHEDULED, read_document
from bridge.runtime.time import iso_utc
from tests.support.only import only

DRAIN = str(Path("/drain.exe").absolute())  # on Windows a program needs a drive and this suffix

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)


def rule(limit: int = 1, **settings: Any) -> AutoSettings:
    return AutoSettings(run=(DRAIN,), run_timeout_seconds=60, group=True, max_unavailable=limit, **settings)


RULE = rule()


def event(event_id: str, *names: str, notice: float | None = 900, **changes: Any) -> dict[str, Any]:
    not_before = iso_utc(NOW + timedelta(seconds=notice)) if notice is not None else None
    return {
        "EventId": event_id,
        "EventType": "Reboot",
        "EventStatus": "Scheduled",
        "Resources": [*names] or [event_id],
        "NotBefore": not_before,
        **changes,
    }


def states(*events: dict[str, Any], limit: int = 1, before: Collection[str] = ()) -> dict[str, EventState]:
    """Return the events of a document, some of which have a turn."""
    document = read_document({"DocumentIncarnation": 1, "Events": [*events]})
    return {
        key: EventState(
            event=one,
            stay=Stay(since=0.0),
            has_turn=key in before,
            rule=rule(limit) if one.status == SCHEDULED else None,
        )
        for key, one in document.events.items()
    }


def with_turns(events: Mapping[str, EventState]) -> set[str]:
    return {key for key, one in events.items() if one.has_turn}


def held(*events: dict[str, Any], limit: int = 1, before: tuple[str, ...] = ()) -> set[str]:
    """Return which events hold a turn once the document has stayed the same for long."""
    given = states(*events, limit=limit, before=before)
    for at in (0.0, SETTLE_SECONDS, 2 * SETTLE_SECONDS):
        given, _ = give_turns(given, now=NOW, at=at)
    return with_turns(given)


STARTED: dict[str, Any] = {"EventStatus": "Started", "NotBefore": ""}
DELETION: dict[str, Any] = {"EventType": "Terminate"}


@pytest.mark.parametrize(
    ("events", "limit", "expected"),
    [
        ([event("a"), event("b"), event("c")], 1, "a"),
        ([event("a"), event("b"), event("c")], 2, "ab"),
        ([event("a", notice=900), event("b", notice=600)], 1, "b"),
        ([event("a", notice=None), event("b")], 1, "a"),
        ([event("a", "1", "2", "3"), event("b", "4")], 1, "a"),
        ([event("a", "1", "2"), event("b", "1")], 1, "a"),
        ([event("a", "1", "2"), event("b", "2", "1")], 1, "ab"),
        ([event("a", "1"), event("b", "1", "2")], 2, "ab"),
        ([event("a", "1", "2"), event("b", "3")], 3, "ab"),
        ([event("a", **STARTED), event("b")], 1, ""),
        ([event("a", **STARTED), event("b")], 2, "b"),
        ([event("a", **STARTED, EventType="Terminate"), event("b")], 1, "b"),
        ([event("a", **DELETION), event("b")], 1, "b"),
        ([event("a", "1", Resources=["1", 7]), event("b", "2")], 2, "a"),
        ([event("a", Resources=[]), event("b")], 1, "a"),
        ([event("a", "vm", "VM", "_Vm"), event("b")], 2, "ab"),
        ([event("a", EventStatus="Odd"), event("b")], 1, "b"),
    ],
)
def test_who_has_a_turn(events: list[dict[str, Any]], limit: int, expected: str) -> None:
    assert held(*events, limit=limit) == set(expected)


def test_a_turn_is_kept_while_the_event_is_in_the_document_whatever_changes() -> None:
    assert held(event("b", notice=900), event("a", notice=60), before=("b",)) == {"b"}
    assert held(event("b", **STARTED), event("a"), before=("b",)) == {"b"}
    assert held(event("a"), before=("b",)) == {"a"}


def test_a_turn_needs_five_seconds_in_which_nothing_comes_first() -> None:
    late, known = event("b", notice=900), dict[str, EventState]()
    for at, shown, expected in (
        (0.0, [late], set()),
        (4.0, [late, event("a", notice=600)], set()),
        (8.0, [late, event("a", notice=600)], set()),
        (9.0, [late, event("a", notice=600)], {"a"}),
        (10.0, [late], set()),
        (14.9, [late], set()),
        (15.0, [late], {"b"}),
    ):
        given = {key: known.get(key, one) for key, one in states(*shown).items()}
        known, _ = give_turns(given, now=NOW, at=at)
        assert with_turns(known) == expected, at


def test_what_waits_and_what_may_not_be_approved_names_the_event_that_is_first() -> None:
    shown = states(event("a"), event("b"), event("c", notice=30), before="a")
    given, order = give_turns(shown, now=NOW, at=0.0)
    a, b, c = given.values()
    assert order.first_ahead(b, RULE) == a.event
    assert order.first_beside(a.event, RULE) == c.event  # which is past its deadline
    assert order.first_beside(c.event, RULE) == a.event
    _, order = give_turns({"a": a}, now=NOW, at=1.0)
    assert order.first_beside(a.event, RULE) is None


def test_the_deadline_leaves_the_program_its_time() -> None:
    given, undated = states(event("a", notice=900), event("b", notice=None)).values()
    assert deadline(given.event, RULE) == NOW + timedelta(seconds=900 - 60 - 10)
    assert deadline(undated.event, RULE) < NOW
    warning = only(states(event("a", notice=None, EventStatus="Advisory")).values())
    for never, by in ((given, AutoSettings(max_unavailable=1)), (warning, RULE)):
        assert deadline(never.event, by) > NOW + timedelta(days=10_000)


def test_five_thousand_events_are_put_in_order_within_a_second() -> None:
    shown = states(*(event(f"e{number}", notice=900 + number) for number in range(5000)))
    began = time.process_time()
    given, order = give_turns(shown, now=NOW, at=0.0)
    for one in given.values():
        order.first_ahead(one, RULE)
        order.first_beside(one.event, RULE)
    assert time.process_time() - began < 1
