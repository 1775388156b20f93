"""What a sink is sent next, event by event, without an outbox and a clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from bridge.errors import DeliveryError, Unavailable
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import Outbox
from bridge.service.schedule import MANY_FAILED, MAX_FAILED, NOTHING_WAITS, Failure, Pace, Schedule

NOTICE = "io.imdsbridge.scheduledevent.scheduled.v1"
OTHER = "io.imdsbridge.bridge.heartbeat.v1"
PACE = Pace(limit_seconds=60.0)
URGENT = Pace(limit_seconds=60.0, is_urgent=True)
ANSWERED = Unavailable("not now", status=503)
UNANSWERED = Unavailable("no answer")


class Stored:
    """An outbox as far as a schedule needs it."""

    generation = 1

    def __init__(self) -> None:
        self.events: list[StoredEvent] = []

    def pending(self, _sink: str, limit: int, *, after: int) -> list[StoredEvent]:
        return [one for one in self.events if one.seq > after][:limit]

    def acknowledge(self, _sink: str, done: Sequence[StoredEvent], **_: Any) -> None:
        self.events = [one for one in self.events if one not in done]


class Rig:
    """A schedule over events that are named by their subject: `A1` and `nA2` are about A, `nA2` is a notice."""

    def __init__(self, *names: str, max_batch: int = 1) -> None:
        self.stored = Stored()
        self.schedule = Schedule("a", cast("Outbox", self.stored), max_batch=max_batch)
        self.count = 0
        self.add(*names)

    def add(self, *names: str) -> None:
        """Store events behind those that wait."""
        for name in names:
            self.count += 1
            type_ = NOTICE if name.startswith("n") else OTHER
            body = json.dumps(
                {"id": name, "type": type_, "source": "/s", "subject": name.lstrip("n").rstrip("0123456789")}
            )
            event = StoredEvent(seq=self.count, id=name, type=type_, stored_at=0.0, body=body.encode())
            self.stored.events.append(event)
        self.schedule.read()

    def choose(self, *, pace: Pace = PACE, now: float = 0.0) -> list[StoredEvent]:
        self.schedule.read()
        return self.schedule.next_events(pace, now)

    def names(self, *, pace: Pace = PACE, now: float = 0.0) -> list[str]:
        """Name what is sent next."""
        return [event.id for event in self.choose(pace=pace, now=now)]

    def fail(
        self, error: DeliveryError = ANSWERED, *, pace: Pace = PACE, now: float = 0.0, count: int = 1
    ) -> list[str]:
        """Let what is next fail, `count` times; name it."""
        names: list[str] = []
        for _ in range(count):
            events = self.choose(pace=pace, now=now)
            failure = Failure(error=error, at=now, share=1.0)
            self.schedule.note_failure(failure, events, pace=pace)
            names += [event.id for event in events]
        return names

    def accept(self, *, pace: Pace = PACE, now: float = 0.0) -> list[str]:
        """Let what is next be accepted; name it."""
        events = self.choose(pace=pace, now=now)
        self.schedule.acknowledge(events)
        self.schedule.note_accepted()
        return [event.id for event in events]

    @property
    def holds(self) -> bool:
        return self.schedule.hold is not None


def test_events_are_sent_in_their_order_and_in_batches() -> None:
    rig = Rig("A", "B", "C", "D", "E", max_batch=2)
    assert [rig.accept(), rig.accept(), rig.accept(), rig.accept()] == [["A", "B"], ["C", "D"], ["E"], []]
    assert rig.schedule.retry_at(PACE) == NOTHING_WAITS


def test_after_a_failed_batch_events_are_sent_alone_and_then_in_batches_that_double() -> None:
    rig = Rig(*"ABCDEFGHIJKLMNO", max_batch=4)
    assert rig.fail() == [*"ABCD"]
    assert not rig.holds
    assert [rig.accept() for _ in range(5)] == [["A"], [*"BC"], [*"DEFG"], [*"HIJK"], [*"LMNO"]]


def test_a_batch_that_gets_no_answer_makes_the_sink_wait() -> None:
    rig = Rig("A", "B", max_batch=2)
    rig.fail(UNANSWERED)
    assert rig.holds
    assert rig.schedule.failed == {}


def test_a_batch_that_the_receiver_asked_to_send_later_waits_as_a_whole() -> None:
    rig = Rig("A", "B", max_batch=2)
    rig.fail(Unavailable("later", status=503, retry_after_seconds=7))
    assert rig.holds
    assert rig.schedule.retry_at(PACE) == 7


@pytest.mark.parametrize(
    "error", [Unavailable("slower", status=429), Unavailable("no route", is_unreached=True)]
)
def test_a_failure_that_no_event_causes_makes_the_sink_wait_and_suspects_no_event(error: Unavailable) -> None:
    rig = Rig("A", "B")
    assert rig.fail(error) == ["A"]
    assert rig.holds
    assert rig.schedule.failed == {}
    assert rig.names(now=100) == ["A"]


def test_after_an_answered_failure_another_subject_is_tried_at_once_and_then_the_sink_waits() -> None:
    rig = Rig("A1", "A2", "B", "C")
    assert rig.fail() == ["A1"]
    assert not rig.holds
    assert rig.fail() == ["B"]
    assert rig.holds
    assert rig.schedule.failures == 1


def test_after_a_wait_the_oldest_event_is_tried_first_and_another_one_next() -> None:
    rig = Rig("A", "B", "C", "D")
    rig.fail(count=2)
    assert rig.fail(now=10) == ["A"]
    assert not rig.holds
    assert rig.fail(now=10) == ["C"]
    assert rig.schedule.failures == 2
    assert rig.fail(now=20, count=2) == ["A", "D"]
    assert rig.schedule.failures == 3


def test_when_every_event_has_failed_the_oldest_and_the_one_that_failed_longest_ago_are_tried() -> None:
    rig = Rig("A", "B", "C")
    rig.fail(count=2)
    rig.fail(now=10, count=2)
    assert rig.fail(now=20, count=2) == ["A", "B"]
    assert rig.fail(now=30, count=2) == ["A", "C"]


def test_without_an_answer_no_other_event_is_tried_until_the_oldest_failed_twice() -> None:
    rig = Rig("A", "B", "C")
    assert rig.fail(UNANSWERED) == ["A"]
    assert rig.holds
    assert rig.fail(UNANSWERED, now=10) == ["A"]
    assert not rig.holds
    assert rig.fail(UNANSWERED, now=10) == ["B"]
    assert rig.holds


def test_a_lone_event_that_fails_makes_the_sink_wait_and_each_failure_counts() -> None:
    rig = Rig("A")
    rig.fail()
    assert rig.holds
    assert rig.schedule.failures == 1
    rig.fail(now=10)
    assert rig.schedule.failures == 2
    assert rig.schedule.retry_at(PACE) == 11


def test_what_failed_is_due_as_soon_as_another_event_is_accepted_the_oldest_first() -> None:
    rig = Rig("A", "B", "C", "D")
    rig.fail(count=2)
    rig.fail(now=10)
    assert rig.accept(now=10) == ["C"]
    assert not rig.holds
    assert rig.schedule.failures == 0
    assert [rig.accept(now=10) for _ in range(3)] == [["A"], ["B"], ["D"]]


def test_what_the_receiver_asked_to_send_later_is_not_due_when_another_event_is_accepted() -> None:
    rig = Rig("A", "B")
    rig.fail(Unavailable("later", status=503, retry_after_seconds=60))
    assert rig.holds
    assert rig.accept(now=30) == ["B"]
    assert rig.names(now=59) == []
    assert rig.names(now=60) == ["A"]


def isolated(*names: str) -> Rig:
    """Return a rig whose first event has failed again while another one was accepted."""
    rig = Rig(*names)
    first, second = names[:2]
    assert rig.fail() == [first]
    assert rig.accept() == [second]
    assert rig.fail() == [first]
    return rig


def test_an_event_that_fails_while_others_are_accepted_is_retried_alone_and_holds_up_only_its_subject() -> (
    None
):
    rig = isolated("A1", "B", "A2", "C", "D")
    (failed,) = rig.schedule.failed.values()
    assert (failed.is_isolated, failed.failure.count) == (True, 2)
    assert not rig.holds
    assert rig.schedule.retry_at(PACE) == 1
    assert rig.accept() == ["C"]


def test_a_due_isolated_event_and_the_others_take_turns() -> None:
    rig = isolated("A", "B", "C", "D", "E", "F")
    assert rig.names(now=100) == ["C"]
    rig.accept(now=100)
    assert rig.fail(now=100) == ["A"]
    assert rig.schedule.failures == 0
    assert rig.names(now=200) == ["D"]
    rig.accept(now=200)
    assert rig.accept(now=200) == ["A"]
    assert [rig.accept(now=200), rig.accept(now=200)] == [["E"], ["F"]]


def test_an_isolated_event_is_retried_when_no_other_one_waits() -> None:
    rig = isolated("A", "B")
    assert rig.names(now=0.5) == []
    assert rig.names(now=1) == ["A"]


def test_a_suspect_is_tried_before_a_due_isolated_event() -> None:
    rig = isolated("A", "B", "C", "D")
    assert rig.fail(now=100) == ["C"]
    assert rig.accept(now=100) == ["D"]
    assert rig.accept(now=100) == ["C"]
    assert rig.accept(now=100) == ["A"]


def test_a_second_try_goes_to_a_notice_that_waits_behind_other_events() -> None:
    rig = Rig("A", "B", "nC", "D")
    assert rig.fail(pace=URGENT) == ["A"]
    assert rig.names() == ["B"]
    assert rig.names(pace=URGENT) == ["nC"]


def test_after_an_answered_wait_a_notice_is_tried_before_the_oldest_event() -> None:
    rig = Rig("A", "B", "C", "D", "nE")
    rig.fail(count=2)
    assert rig.names(now=10) == ["A"]
    assert rig.names(pace=URGENT, now=10) == ["nE"]


def test_after_a_wait_without_an_answer_the_oldest_event_stays_first() -> None:
    rig = Rig("A", "B", "nC")
    assert rig.fail(UNANSWERED, pace=URGENT) == ["A"]
    assert rig.fail(UNANSWERED, pace=URGENT, now=10) == ["A"]
    assert rig.names(pace=URGENT, now=10) == ["nC"]


def test_an_earlier_event_of_the_same_subject_goes_before_the_notice() -> None:
    rig = Rig("A", "C", "B1", "B2", "nB3")
    rig.fail(pace=URGENT)
    assert rig.names(pace=URGENT) == ["B1"]


@pytest.mark.parametrize(("failed", "next_name"), [(MANY_FAILED - 1, "nZ"), (MANY_FAILED, "A")])
def test_a_notice_passes_until_so_many_events_failed_that_the_receiver_must_be_unavailable(
    failed: int, next_name: str
) -> None:
    rig = Rig(*"ABCDEFGHIJKL", "nZ")
    rig.fail(count=2)
    for now in range(10, 10 * (failed - 1), 10):
        rig.fail(now=now, count=2)
    assert len(rig.schedule.failed) == failed
    assert rig.schedule.has_untried() is (failed < MANY_FAILED)
    assert rig.names(pace=URGENT, now=1000) == [next_name]


def test_only_a_notice_counts_as_one_that_may_be_accepted_although_others_are_not() -> None:
    assert not Rig("A", "B").schedule.has_untried()
    assert Rig("A", "nB").schedule.has_untried()


def test_after_a_thousand_failed_events_no_other_one_is_tried() -> None:
    rig = Rig(*(f"{chr(0x4E00 + number)}" for number in range(MAX_FAILED + 5)))
    rig.fail(count=2)
    now = 0.0
    while len(rig.schedule.failed) < MAX_FAILED:
        now += 100
        rig.fail(now=now, count=2)
    assert rig.fail(now=now + 100, count=2) == [chr(0x4E00), chr(0x4E01)]
    assert len(rig.schedule.failed) == MAX_FAILED


def test_tries_are_counted_from_the_start_once_no_other_event_was_left_to_try() -> None:
    rig = Rig("A", "B")
    rig.fail()
    rig.schedule.acknowledge(rig.schedule.page)  # it became too old
    assert rig.names() == []
    rig.add("C")
    assert rig.fail() == ["C"]
    assert not rig.holds
    assert rig.schedule.failures == 2
