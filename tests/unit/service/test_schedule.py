"""What a sink is sent next, event by event, and when a failed delivery is tried again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DeliveryError, Unavailable
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import Outbox
from bridge.service.schedule import (
    FIRST_TRY_SECONDS,
    PAGE_EVENTS,
    Failure,
    KeyQueue,
    Pace,
    Schedule,
    urgency,
)
from tests.support.diff import steady

NOTICE = "io.imdsbridge.scheduledevent.scheduled.v1"
OTHER = "io.imdsbridge.bridge.heartbeat.v1"
PACE = Pace(limit_seconds=60.0)
URGENT = Pace(limit_seconds=60.0, is_urgent=True)
FAILURES: dict[str, DeliveryError | None] = {
    "+": None,
    "-": Unavailable("not now", status=503),
    "!": Unavailable("no answer"),
    "~": Unavailable("later", status=503, retry_after_seconds=60),
    "%": Unavailable("slower", status=429),
    "^": Unavailable("no route", is_unreached=True),
}
SHARES = st.floats(min_value=0, max_value=1)
COUNTS = st.integers(min_value=1, max_value=10_000)
NO_ANSWER = Unavailable("later")


class Stored:
    """An outbox as far as a schedule needs it."""

    generation = 1

    def __init__(self) -> None:
        self.events: list[StoredEvent] = []

    def pending(self, _sink: str, limit: int, *, after: int = 0) -> list[StoredEvent]:
        return [one for one in self.events if one.seq > after][:limit]

    def acknowledge(self, _sink: str, done: Sequence[StoredEvent], **_: Any) -> None:
        self.events = [one for one in self.events if one not in done]


class Told:
    """A schedule over events that are named by their subject: `A1` and `nA2` are about A, `nA2` is a notice.

    It is told what happens in words: `@10` is the time; the other words without `=` name what is sent next and say
    what becomes of it (`A,B+` is accepted, see FAILURES for the others); the rest is compared with the schedule.
    """

    def __init__(self, names: str, *, max_batch: int = 1) -> None:
        self.stored = Stored()
        self.schedule = Schedule("a", cast("Outbox", self.stored), max_batch=max_batch)
        self.count, self.now, self.pace = 0, 0.0, PACE
        self.add(names)

    def add(self, names: str) -> None:
        """Store events behind those that wait."""
        for name in names.split():
            self.count += 1
            type_ = NOTICE if name.startswith("n") else OTHER
            body = {"id": name, "type": type_, "source": "/s"}
            body["subject"] = name.lstrip("n").rstrip("0123456789")
            event = StoredEvent(
                seq=self.count, id=name, type=type_, stored_at=0.0, body=json.dumps(body).encode()
            )
            self.stored.events.append(event)
        self.schedule.read()

    def tell(self, story: str) -> None:
        """Let it happen word by word."""
        for word in story.split():
            if word.startswith("@"):
                self.now = float(word[1:])
            elif word == "urgent":
                self.pace = URGENT
            elif "=" in word:
                name, _, value = word.partition("=")
                assert str(self.shown(name)) == value, f"{word} in {story}"
            else:
                self.send(word)

    def shown(self, name: str) -> object:
        """Return what a story compares; only `next` changes what is tried."""
        schedule = self.schedule
        if name == "next":
            return ",".join(event.id for event in schedule.next_events(self.pace, self.now)[1])
        if name == "at":
            return schedule.next_events(self.pace, self.now)[0]
        return {
            "hold": schedule.hold is not None,
            "failures": schedule.failures,
            "failed": len(schedule.failed),
        }[name]

    def send(self, word: str) -> None:
        """Send what is next, which must be what the word names."""
        self.schedule.read()
        _, events = self.schedule.next_events(self.pace, self.now)
        assert ",".join(event.id for event in events) == word[:-1]
        if error := FAILURES[word[-1]]:
            failure = Failure(error=error, at=self.now, share=1.0)
            self.schedule.note_failure(failure, events, pace=self.pace, began_at=self.now)
        else:
            self.schedule.acknowledge(events)
            self.schedule.note_accepted()


BATCHED = {
    "in their order and in batches": (2, "A B C D E", "A,B+ C,D+ E+ next= at=inf"),
    "after a failed batch alone, and then in batches that double": (
        *(4, "A B C D E F G H I J K L M N O"),
        "A,B,C,D- hold=False A+ B,C+ D,E,F,G+ H,I,J,K+ L,M,N,O+",
    ),
    "a batch without an answer makes the sink wait": (2, "A B", "A,B! hold=True failed=0"),
    "a batch that is to come later waits as a whole": (2, "A B", "A,B~ hold=True at=60.0"),
}
ALONE = {
    "429 suspects no event": ("A B", "A% hold=True failed=0 @100 A+"),
    "no connection suspects no event": ("A B", "A^ hold=True failed=0 @100 A+"),
    "another subject is tried soon": (
        "A1 A2 B C",
        "A1- hold=False next= at=0.05 @0.05 B- @0.1 C- next= at=0.5 failures=3",
    ),
    "retries have a highest rate": ("A B C", "A- @0.05 B- @0.1 C- @1 A- next= at=1.25 @1.25 B- @1.5 C-"),
    "retries come first, and leave time for others": (
        "A B C D",
        "A- @1 A- B- next= @1.05 C- @1.25 D+ A+ B+ C+",
    ),
    "a lone event waits longer each time": ("A", "A- failures=1 at=0.5 @10 A- failures=2 at=11.0"),
    "an accepted event makes the others due": (
        "A B C D",
        "A- @0.05 B- @0.1 C+ hold=False failures=0 A+ B+ D+",
    ),
    "an event that alone fails holds up its subject": (
        "A1 B A2 C",
        "A1- @0.05 B+ A1- hold=False C+ next= at=0.55 @0.55 A1+ A2+",
    ),
    "the most urgent first": ("A B nC D", "A- @0.05 nC+ A+ B+ D+"),
    "an earlier event of its subject before the notice": ("A C B1 B2 nB3", "A- @0.05 B1+"),
    "without an answer no other until the oldest failed twice": (
        "A B C",
        "A! hold=True next= @10 A! B! hold=True next=",
    ),
    "without an answer a lone event makes the sink wait": ("A", "A! failures=1 @10 A! failures=2 at=11.0"),
    "without an answer the oldest and another one, and then all in their order": (
        "A B C D",
        "A! @10 A! B! @20 A! C! @30 A! D! @40 A! B! @60 A! C! @90 A+ B+ C+ D+",
    ),
    "without an answer the other one is a notice": ("A B nC", "urgent A! @10 A! nC+"),
    "without an answer the other one may be all that is left": ("A B", "A! @10 A! B! @20 A! B!"),
    "an event without an answer while others are accepted": ("A B C", "A! @10 A! B+ A! hold=False C+ next="),
    "an answer ends the wait": ("A B", "A! @10 A- hold=False B+"),
    "what is to come later is not due then": ("A nB", "A~ hold=True @30 urgent nB+ @59 next= @60 A+"),
    "what is to come later goes in turns with another": ("A B", "A~ @60 B+ A+"),
}


@pytest.mark.parametrize(("max_batch", "names", "story"), BATCHED.values(), ids=BATCHED)
def test_batches(max_batch: int, names: str, story: str) -> None:
    Told(names, max_batch=max_batch).tell(story)


@pytest.mark.parametrize(("names", "story"), ALONE.values(), ids=ALONE)
def test_what_is_sent_next(names: str, story: str) -> None:
    Told(names).tell(story)


def test_a_notice_behind_thousands_of_events_is_found_while_the_first_of_them_fail() -> None:
    names = [chr(0x4E00 + number) for number in range(1000)]
    told = Told(" ".join([*names, "nZ"]))
    tries = 0
    while (name := str(told.shown("next"))) != "nZ":
        told.send(f"{name}-")
        told.schedule.read()
        told.now += FIRST_TRY_SECONDS + 0.01
        tries += 1
    assert tries == 1000 // (2 * PAGE_EVENTS) + 1  # this test reads twice for each try


def test_events_that_are_gone_because_of_the_size_limit_are_forgotten() -> None:
    told = Told("A B C")
    told.tell("A- @0.05")
    told.stored.events.pop(1)
    told.tell("next= at=0.05")
    told.schedule.read()
    told.tell("next=A")


@pytest.mark.parametrize("is_draining", [False, True])
def test_what_failed_is_tried_soon_once_the_process_stops(is_draining: bool) -> None:
    told = Told("A")
    told.tell("A- @10 A- @20 A- @30 A- @40 A- at=48.0")
    told.pace = replace(told.pace, is_draining=is_draining)
    told.tell(f"@41 next={'A' if is_draining else ''}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scheduledevent.scheduled", 0),
        ("scheduledevent.started", 0),
        ("scheduledevent.updated", 0),
        ("scheduledevent.ended", 1),
        ("approval.failed", 1),
        ("document.changed", 2),
        ("bridge.heartbeat", 2),
    ],
)
def test_notices_are_the_most_urgent_and_then_receipts(name: str, expected: int) -> None:
    stored = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=5.0, body=b"{}")
    assert urgency(stored) == (expected, 0.0 if expected else 5.0)


def test_of_notices_the_one_with_the_earliest_not_before_is_the_most_urgent() -> None:
    def notice(data: dict[str, str]) -> StoredEvent:
        return StoredEvent(
            seq=1, id="1", type=NOTICE, stored_at=9e9, body=json.dumps({"data": data}).encode()
        )

    sooner, later = ({"NotBeforeUtc": f"2026-11-20T10:0{minute}:00.000Z"} for minute in (1, 2))
    assert urgency(notice(sooner)) < urgency(notice(later)) < urgency(notice({}))


# When a failed delivery is tried again


@steady
@given(share=SHARES, count=COUNTS)
def test_a_wait_is_a_share_of_a_limit_that_doubles_up_to_a_minute(share: float, count: int) -> None:
    wait_seconds = Failure(error=NO_ANSWER, count=count, at=100.0, share=share).retry_at(PACE) - 100.0
    assert wait_seconds == pytest.approx(share * min(60.0, 0.5 * 2 ** min(count - 1, 20)))


@steady
@given(share=SHARES, count=COUNTS)
def test_an_urgent_event_is_retried_within_two_seconds_and_a_drain_within_half_of_one(
    share: float, count: int
) -> None:
    failure = Failure(error=NO_ANSWER, count=count, at=0.0, share=share)
    assert failure.retry_at(Pace(limit_seconds=60.0, is_urgent=True)) <= 2.0
    assert failure.retry_at(Pace(limit_seconds=60.0, is_draining=True)) <= 0.5
    assert failure.retry_at(Pace(limit_seconds=0.1, is_urgent=True)) <= 0.1


@pytest.mark.parametrize(
    ("status", "is_urgent", "is_draining", "wait_seconds"),
    [
        (429, False, False, 90.0),
        (429, True, False, 90.0),
        (429, True, True, 90.0),
        (503, False, False, 90.0),
        (503, True, False, 2.0),
        (503, True, True, 90.0),
        (None, False, False, 90.0),
    ],
)
def test_what_the_receiver_asks_for_is_obeyed_unless_it_delays_an_urgent_event_without_429(
    status: int | None, is_urgent: bool, is_draining: bool, wait_seconds: float
) -> None:
    error = Unavailable("later", status=status, retry_after_seconds=90.0)
    pace = Pace(limit_seconds=60.0, is_urgent=is_urgent, is_draining=is_draining)
    assert Failure(error=error, count=9, at=0.0, share=1.0).retry_at(pace) == wait_seconds


@pytest.mark.parametrize(
    ("is_urgent", "status", "name", "wait_seconds"),
    [
        (True, 503, "nA", 2.0),
        (False, 503, "nA", 60.0),
        (True, None, "nA", 60.0),
        (True, 503, "A", 60.0),
    ],
)
def test_an_event_is_retried_often_only_if_it_is_a_young_notice_that_is_answered(
    is_urgent: bool, status: int | None, name: str, wait_seconds: float
) -> None:
    queue = KeyQueue(urgency=(0 if name == "nA" else 2, 0.0))
    queue.failure = Failure(error=NO_ANSWER, at=0.0, share=1.0, count=20)
    failure = Failure(error=Unavailable("not now", status=status), at=100.0, share=1.0)
    queue.fail(failure, Pace(limit_seconds=60.0, is_urgent=is_urgent))
    assert queue.retry_at == 100.0 + wait_seconds
