"""Digests: when what gathers is sent, what cannot wait, and what becomes of a digest that fails."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from bridge.delivery.holding import HELD_EVENTS
from bridge.errors import Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.outbox.rows import READ_BYTES
from bridge.runtime.time import iso_utc
from tests.support.moved_delivery import MakeDelivery, MovedDelivery
from tests.support.outbox import TYPE, event, failing_disk

DIGEST_SECONDS = 300.0
STARTED = "io.imdsbridge.scheduledevent.started.v1"
COMPLETED = "io.imdsbridge.scheduledevent.completed.v1"
APPROVAL = "io.imdsbridge.approval."
LATER: dict[str, Any] = {"EventStatus": "Started", "PreviousStatus": "Scheduled"}


@pytest.fixture
def make(make: MakeDelivery) -> MakeDelivery:
    """Make deliveries that gather."""
    return partial(make, max_age_seconds=3600.0, digest_seconds=DIGEST_SECONDS)


def notice(rig: MovedDelivery, name: str, *, seconds: float, type_: str = TYPE) -> None:
    """Commit a notice of an event that starts in so many seconds."""
    start = iso_utc(datetime.fromtimestamp(rig.clock.wall() + seconds, UTC))
    rig.commit(name, type_=type_, EventStatus="Scheduled", NotBeforeUtc=start)


def run(rig: MovedDelivery, seconds: float) -> None:
    """Deliver for so many seconds, also while nothing waits."""
    until = rig.clock.monotonic() + seconds
    rig.deliver(seconds=seconds)
    rig.clock.advance(max(0.0, until - rig.clock.monotonic()))


def gathering(make: MakeDelivery, **settings: Any) -> MovedDelivery:
    """Make a delivery that has sent a first event, and has another that gathers."""
    rig = make(**settings)
    rig.commit("first", **LATER)
    assert rig.deliver() == []
    rig.commit("gathers", **LATER)
    run(rig, 1)
    assert rig.sink.batches == [["first"]]
    return rig


@pytest.fixture
def rig(make: MakeDelivery) -> MovedDelivery:
    return gathering(make)


# --- when ---


def test_the_first_event_goes_out_at_once_the_next_after_30_s_and_then_every_digest_seconds(
    make: MakeDelivery,
) -> None:
    rig = make()
    began_at = rig.clock.monotonic()
    sent: list[tuple[int, int]] = []
    accept = rig.sink.send

    def note(events: Sequence[StoredEvent]) -> None:
        sent.append((round(rig.clock.monotonic() - began_at), len(events)))
        accept(events)

    rig.sink.send = note  # type: ignore[method-assign]
    for number in range(140):  # one event in five seconds
        rig.commit(f"e{number}", **LATER)
        run(rig, 5)
    rig.deliver()
    assert [at for at, _ in sent] == [0, 30, 330, 630, 930]
    assert [count for _, count in sent][:2] in ([1, 6], [1, 5])
    assert rig.received() == [f"e{number}" for number in range(140)]


def test_after_a_quiet_time_an_event_is_a_first_one_again(make: MakeDelivery) -> None:
    rig = make()
    for name in ("1", "2", "3"):
        rig.commit(name, **LATER)
        run(rig, 40)
    assert rig.sink.batches == [["1"], ["2"]], "the second message was due when 2 came"
    run(rig, 600)
    assert rig.sink.batches == [["1"], ["2"], ["3"]]
    rig.commit("4", **LATER)
    run(rig, 0)
    rig.commit("5", **LATER)
    run(rig, 29)
    assert rig.sink.batches[3:] == [["4"]]
    run(rig, 2)
    assert rig.sink.batches[4:] == [["5"]]


def test_without_digest_seconds_each_event_is_a_message(make: MakeDelivery) -> None:
    rig = make(digest_seconds=0.0)
    rig.commit("1", "2", "3", **LATER)
    assert rig.deliver() == []
    assert rig.sink.batches == [["1"], ["2"], ["3"]]


@pytest.mark.parametrize("seconds", [-60.0, 0.0, 10.0, 28.0])
@pytest.mark.parametrize("type_", [TYPE, "io.imdsbridge.scheduledevent.updated.v1"])
def test_a_notice_that_starts_before_the_digest_is_due_goes_out_within_two_seconds(
    rig: MovedDelivery, seconds: float, type_: str
) -> None:
    notice(rig, "soon", seconds=seconds, type_=type_)
    assert rig.deliver(seconds=1.9) == []
    rig.deliver(seconds=0.2)
    assert rig.sink.batches[1:] == [["gathers", "soon"]]


@pytest.mark.parametrize(("seconds", "waits"), [(30, 2), (42, 2), (48, 3), (120, 15), (305, 29), (3600, 29)])
def test_a_notice_gathers_for_a_sixth_of_what_is_left_of_it_beyond_30_seconds(
    rig: MovedDelivery, seconds: float, waits: float
) -> None:
    notice(rig, "later", seconds=seconds)
    assert rig.deliver() == [pytest.approx(waits)]
    notice(rig, "after a second digest", seconds=seconds)
    assert rig.deliver() == [pytest.approx(max(2, (seconds - 30) / 6), abs=0.01) if seconds < 1800 else 300]


@pytest.mark.parametrize(
    ("type_", "data", "seconds"),
    [
        (TYPE, {"EventStatus": "Scheduled"}, 2),
        (STARTED, {"EventStatus": "Started", "PreviousStatus": None}, 2),
        (f"{APPROVAL}failed.v1", {"Outcome": "Failed"}, 2),
        (f"{APPROVAL}rejected.v1", {"Outcome": "Rejected"}, 2),
        (f"{APPROVAL}prepared.v1", {"Outcome": "Failed"}, 2),
        (STARTED, LATER, 29),
        (COMPLETED, {"EventStatus": "Completed", "PreviousStatus": "Started"}, 29),
        (f"{APPROVAL}accepted.v1", {"Outcome": "Accepted"}, 29),
        (f"{APPROVAL}prepared.v1", {"DurationSeconds": "12.5"}, 29),
    ],
    ids=[
        *(
            "a notice without a time",
            "started without a notice",
            "an approval that failed",
            "a drain that failed",
        ),
        *("a preparation that failed", "started as announced", "completed", "an approval", "a preparation"),
    ],
)
def test_only_what_was_announced_or_went_well_gathers(
    rig: MovedDelivery, type_: str, data: dict[str, Any], seconds: float
) -> None:
    rig.commit("event", type_=type_, **data)
    assert rig.deliver() == [pytest.approx(seconds)]


def test_300_alarms_within_seconds_are_few_messages(rig: MovedDelivery) -> None:
    for number in range(300):
        rig.commit(f"e{number}", type_=STARTED, PreviousStatus=None)
        run(rig, 0.05)
    rig.deliver()
    assert len(rig.sink.batches) - 1 == 8  # 15 s, one in 2 s
    assert len(rig.received()) == 302


def test_a_stop_sends_what_is_there(rig: MovedDelivery) -> None:
    rig.run_to_the_end()
    assert rig.sink.batches == [["first"], ["gathers"]]


def test_while_the_state_cannot_be_written_nothing_gathers(rig: MovedDelivery) -> None:
    with failing_disk() as disk:
        disk.fail()
        rig.commit("memory", **LATER)
        run(rig, 0)
        assert rig.sink.batches[1:] == [["gathers", "memory"]]


def test_after_a_restart_what_gathered_goes_out_at_once(make: MakeDelivery) -> None:
    rig = make(max_age_seconds=3600.0)
    rig.commit("first", **LATER)
    rig.deliver()
    rig.commit("1", "2", **LATER)
    rig.deliver(seconds=1)
    rig.outbox.close()
    again = MovedDelivery(rig.folder.path, digest_seconds=DIGEST_SECONDS)
    assert again.deliver() == []
    assert again.sink.batches == [["1", "2"]]
    again.close()


def test_a_digest_is_limited_in_events_and_in_bytes_and_a_full_one_goes_out_at_once(
    rig: MovedDelivery,
) -> None:
    rig.outbox.commit([event_of(f"e{number}") for number in range(2 * HELD_EVENTS)])
    run(rig, 0)
    assert len(rig.sink.batches[1]) == HELD_EVENTS
    rig.deliver()
    before = len(rig.sink.batches)
    rig.outbox.commit([event_of(f"large{number}", size=100_000) for number in range(200)])
    rig.deliver()
    for batch in rig.sink.batches[before:]:
        assert 100_000 * len(batch) < READ_BYTES + 101_000
    assert len(rig.received()) == len({*rig.received()}) == 2 + 2 * HELD_EVENTS + 200


def event_of(name: str, *, size: int = 0) -> StoredEvent:
    return event(name, type_=COMPLETED, size=size)


# --- what the status and the alerts show ---


def test_what_only_gathers_does_not_wait(make: MakeDelivery) -> None:
    rig = gathering(make, digest_seconds=1000.0)
    run(rig, 29)
    for number in range(5):
        notice(rig, f"n{number}", seconds=7200.0)
        run(rig, 150)
        status = rig.dispatcher.status()
        assert (status.oldest_waits_seconds, status.notice_until) == (0.0, None), number
        assert status.backlog == number + 1
    assert rig.sink.batches == [["first"], ["gathers"]]


def test_what_is_due_and_cannot_be_sent_waits_since_it_was_due(rig: MovedDelivery) -> None:
    notice(rig, "n", seconds=2000.0)
    rig.sink.refuse = lambda _: Unavailable("no", status=503)
    run(rig, 29 + 100)
    status = rig.dispatcher.status()
    assert status.oldest_waits_seconds == pytest.approx(100.0, abs=0.2)
    assert status.notice_until is not None
    assert status.state == "retrying"


# --- failures ---


def test_a_refused_digest_is_sent_again_in_parts_and_dead_letters_are_single_events(
    make: MakeDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    rig = gathering(make, max_per_second=4)
    rig.sink.refuse = lambda one: Rejected("too large", status=413) if one.id == "bad" else None
    rig.commit("1", "bad", "2", "3", **LATER)
    run(rig, 29 + 2)
    assert rig.sink.batches == [["first"], ["gathers"], ["1"], ["2", "3"]]
    assert rig.dead() == [("bad", "rejected", "too large")]
    assert len([record for record in caplog.records if "in parts" in record.message]) == 2
    rig.commit("4", "5", **LATER)
    rig.deliver()
    assert rig.sink.batches[-1] == ["4", "5"], "later events gather again"


@pytest.mark.parametrize("status", [503, 401, 429, None])
def test_an_outage_leaves_one_digest_whatever_the_answers(rig: MovedDelivery, status: int | None) -> None:
    rig.sink.refuse = lambda _: Unavailable("no", status=status)
    for number in range(40):
        rig.commit(f"e{number}", **LATER)
        run(rig, 3)
    before = len(rig.sink.calls)
    rig.sink.refuse = lambda _: None
    run(rig, 60)
    assert len(rig.sink.batches) - 1 <= 2
    assert len(rig.received()) == 42
    assert before <= 120 / 2 + 20, "retries are two seconds apart"


@pytest.mark.parametrize("position", [0, 1, 30, 59])
@pytest.mark.parametrize("status", [500, 401])
def test_an_event_that_keeps_failing_holds_a_digest_back_for_seconds_and_then_only_itself(
    rig: MovedDelivery, position: int, status: int
) -> None:
    rig.sink.refuse = lambda one: Unavailable("no", status=status) if one.id == f"e{position}" else None
    rig.commit(*(f"e{number}" for number in range(60)), **LATER)
    run(rig, 29 + 15)
    assert {*rig.received()} == {"first", "gathers", *(f"e{n}" for n in range(60) if n != position)}
    rig.commit("next", **LATER)
    run(rig, 1)
    assert rig.received()[-1] == "next"
    rig.sink.refuse = lambda _: None
    rig.deliver()
    assert len(rig.received()) == len({*rig.received()}) == 63


def test_what_is_too_old_becomes_a_dead_letter_of_one_event(make: MakeDelivery) -> None:
    rig = gathering(make, max_age_seconds=600.0)
    rig.sink.refuse = lambda _: Unavailable("no", status=503)
    rig.commit("1", "2", **LATER)
    run(rig, 700)
    assert [(name, reason) for name, reason, _ in rig.dead()] == [
        (name, "expired") for name in ("gathers", "1", "2")
    ]
