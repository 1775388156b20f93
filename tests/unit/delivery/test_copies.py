"""Copies of events that name only other VMs: how long they wait, what ends it, and in which order they go."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.delivery.course import PAGE_EVENTS
from bridge.delivery.holding import HELD_EVENTS, HOLD_SECONDS, hold_seconds
from bridge.errors import Unavailable
from bridge.runtime.time import iso_utc
from tests.support.moved_delivery import MovedDelivery
from tests.support.outbox import OTHER_TYPE, TYPE, event

STARTED, COMPLETED = TYPE.replace("scheduled.v1", "started.v1"), TYPE.replace("scheduled.v1", "completed.v1")
UPDATED = TYPE.replace("scheduled.v1", "updated.v1")
COPY: dict[str, Any] = {"AffectsThisVm": False}


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MovedDelivery]:
    """Yield a delivery whose copies wait for half of the longest time; what was there at its start is sent."""
    monkeypatch.setattr(random, "random", lambda: 0.5)
    with closing(MovedDelivery(tmp_path, max_batch=100, holds_copies=True)) as made:
        made.deliver()
        yield made


def copy(
    rig: MovedDelivery, *names: str, notice_seconds: float = 900.0, type_: str = TYPE, **data: Any
) -> None:
    until = iso_utc(rig.clock.now() + timedelta(seconds=notice_seconds))
    rig.commit(*names, type_=type_, **{**COPY, "NotBeforeUtc": until, **data})


@pytest.mark.parametrize(
    ("type_", "notice_seconds", "data", "expected"),
    [
        (TYPE, 900, COPY, HOLD_SECONDS),
        (TYPE, 7 * 86400, COPY, HOLD_SECONDS),
        (TYPE, 600, COPY, 100),
        (TYPE, 30, COPY, 5),
        (TYPE, -5, COPY, 0),
        (UPDATED, 300, {**COPY, "PreviousStatus": "Scheduled"}, 50),
        (UPDATED, None, {**COPY, "PreviousStatus": "Started"}, 0),
        (STARTED, None, COPY, 0),  # without notice: the VM may be dead
        (STARTED, None, {**COPY, "PreviousStatus": "Scheduled"}, HOLD_SECONDS),
        (COMPLETED, 0, {**COPY, "PreviousStatus": "Started"}, HOLD_SECONDS),
        (TYPE, 900, {"AffectsThisVm": True}, 0),
        (TYPE, 900, {"AffectsThisVm": None}, 0),
        (OTHER_TYPE, 900, {}, 0),
    ],
)
def test_only_copies_with_a_notice_wait_a_sixth_of_it_at_most(
    rig: MovedDelivery, type_: str, notice_seconds: float | None, data: dict[str, Any], expected: float
) -> None:
    now = rig.clock.now()
    until = None if notice_seconds is None else iso_utc(now + timedelta(seconds=notice_seconds))
    given = event("a", type_=type_, **{**data, "NotBeforeUtc": until})
    assert hold_seconds(given, now) == pytest.approx(expected, abs=0.01)


def test_what_starts_without_notice_is_not_held_also_after_the_wall_clock_was_set_back(
    rig: MovedDelivery,
) -> None:
    rig.clock.jump(-3600)
    rig.commit("started", type_=STARTED, **COPY)
    assert rig.dispatcher.step() is None
    assert rig.received() == ["started"]


def test_a_copy_waits_and_what_comes_meanwhile_goes_with_it_in_order(rig: MovedDelivery) -> None:
    copy(rig, "first")
    assert rig.dispatcher.step() == pytest.approx(HOLD_SECONDS / 2, abs=0.01)
    rig.clock.advance(30)
    copy(rig, "second", type_=COMPLETED, subject="first", PreviousStatus="Scheduled")
    assert rig.dispatcher.step() == pytest.approx(HOLD_SECONDS / 2 - 30, abs=0.01)
    assert rig.received() == []
    rig.deliver()
    assert rig.received() == ["first", "second"]
    copy(rig, "third")  # is drawn anew
    assert rig.dispatcher.step() == pytest.approx(HOLD_SECONDS / 2, abs=0.01)


def test_a_copy_with_a_short_notice_ends_the_hold_of_those_before_it(rig: MovedDelivery) -> None:
    copy(rig, "long")
    rig.dispatcher.step()
    copy(rig, "short", notice_seconds=30)
    assert rig.dispatcher.step() == pytest.approx(2.5, abs=0.01)
    rig.deliver()
    assert rig.received() == ["short", "long"]


@pytest.mark.parametrize(
    "other",
    [
        {"type_": TYPE, "AffectsThisVm": True},
        {"type_": OTHER_TYPE},
        {"type_": STARTED, "AffectsThisVm": False},
    ],
)
def test_anything_else_that_is_sent_takes_the_copies_along_at_once(
    rig: MovedDelivery, other: dict[str, Any]
) -> None:
    copy(rig, "held")
    rig.dispatcher.step()
    rig.commit("now", **other)
    assert rig.deliver() == []
    assert {*rig.received()} == {"held", "now"}


def test_a_page_of_copies_is_sent_and_what_is_behind_it_too(rig: MovedDelivery) -> None:
    names = [f"e{number:03}" for number in range(HELD_EVENTS + 10)]
    copy(rig, *names)
    assert rig.dispatcher.step() is None
    assert rig.received() == names[:PAGE_EVENTS]  # in batches
    rig.deliver()
    assert rig.received() == names


def test_while_copies_are_held_the_sink_rests_and_no_notice_counts_as_undelivered(
    rig: MovedDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []

    def rest() -> float:
        rested.append(0.0)
        return 0.0

    monkeypatch.setattr(rig.sink, "rest", rest)
    copy(rig, "held")
    wait_seconds = rig.dispatcher.step()
    assert wait_seconds is not None
    rig.dispatcher._pause(wait_seconds)
    assert rested == [0.0]
    rig.clock.advance(60)
    status = rig.dispatcher.status()
    assert (status.is_held, status.backlog, status.notice_until) == (True, 1, None)
    rig.deliver()
    assert rig.dispatcher.status().is_held is False


def test_a_stop_sends_what_is_held(rig: MovedDelivery) -> None:
    copy(rig, "held")
    rig.dispatcher.step()
    rig.run_to_the_end()
    assert rig.received() == ["held"]


def test_after_a_restart_everything_is_due(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_batch": 100, "holds_copies": True}
    with closing(MovedDelivery(tmp_path, **settings)) as rig:
        rig.deliver()
        copy(rig, "held")
        rig.dispatcher.step()
        assert rig.received() == []
    with closing(MovedDelivery(tmp_path, **settings)) as rig:
        assert rig.deliver() == []
        assert rig.received() == ["held"]


def test_copies_are_not_held_while_something_fails(rig: MovedDelivery) -> None:
    rig.sink.failures.extend([Unavailable("no answer"), Unavailable("no answer")])
    rig.commit("now", type_=OTHER_TYPE)
    rig.dispatcher.step()
    copy(rig, "held")
    rig.deliver(seconds=10)
    assert sorted(rig.received()) == ["held", "now"]
    copy(rig, "later")
    assert rig.dispatcher.step() == pytest.approx(HOLD_SECONDS / 2, abs=0.01)


def test_a_copy_that_is_not_held_because_the_state_cannot_be_written_counts_as_waiting(
    rig: MovedDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(rig.outbox), "storage_error", property(lambda _: "no space"))
    rig.sink.failures.extend([Unavailable("away")] * 9)
    copy(rig, "waits")
    rig.dispatcher.step()
    rig.clock.advance(20.0)
    status = rig.dispatcher.status()
    assert status.oldest_waits_seconds == 20.0
    assert status.notice_until
