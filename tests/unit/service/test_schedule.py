"""What a sink is sent next, event by event, and when a failed delivery is tried again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import DeliveryError, Unavailable
from bridge.events.model import StoredEvent
from bridge.outbox.outbox import Outbox
from bridge.service.dispatcher import (
    MANY_FAILED,
    MAX_FAILED,
    FailedEvent,
    Failure,
    Pace,
    Schedule,
    is_urgent_type,
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

    def pending(self, _sink: str, limit: int, *, after: int) -> list[StoredEvent]:
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
            return ",".join(event.id for event in schedule.next_events(self.pace, self.now))
        return {
            "hold": schedule.hold is not None,
            "failures": schedule.failures,
            "failed": len(schedule.failed),
            "at": schedule.retry_at(self.pace),
        }[name]

    def send(self, word: str) -> None:
        """Send what is next, which must be what the word names."""
        self.schedule.read()
        events = self.schedule.next_events(self.pace, self.now)
        assert ",".join(event.id for event in events) == word[:-1]
        if error := FAILURES[word[-1]]:
            failure = Failure(error=error, at=self.now, share=1.0)
            self.schedule.note_failure(failure, events, pace=self.pace)
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
    "another subject is tried at once": ("A1 A2 B C", "A1- hold=False B- hold=True failures=1"),
    "after a wait the oldest and another one": (
        "A B C D",
        "A- B- @10 A- hold=False C- failures=2 @20 A- D- failures=3",
    ),
    "when all failed the oldest and what failed longest ago": (
        "A B C",
        "A- B- @10 A- C- @20 A- B- @30 A- C-",
    ),
    "without an answer no other until the oldest failed twice": (
        "A B C",
        "A! hold=True @10 A! hold=False B! hold=True",
    ),
    "a lone event makes the sink wait": ("A", "A- hold=True failures=1 @10 A- failures=2 at=11.0"),
    "an accepted event makes the others due": (
        "A B C D",
        "A- B- @10 A- C+ hold=False failures=0 A+ B+ D+",
    ),
    "what is to come later is not due then": ("A nB", "A~ hold=True @30 urgent nB+ @59 next= @60 A+"),
    "an event that alone fails holds up its subject": ("A1 B A2 C", "A1- B+ A1- hold=False at=0.5 C+ next="),
    "an isolated event and the others take turns": (
        "A B C D E F",
        "A- B+ A- @100 C+ A- failures=0 @200 D+ A+ E+ F+",
    ),
    "an isolated event is retried when no other waits": ("A B", "A- B+ A- @0.4 next= @0.5 A+"),
    "a suspect before a due isolated event": ("A B C D", "A- B+ A- @100 C- D+ C+ A+"),
    "without an urgent one the next is tried": ("A B nC D", "A- B+"),
    "the second try is for a notice": ("A B nC D", "urgent A- nC+"),
    "after a wait the oldest": ("A B C D nE", "A- B- @10 A+"),
    "after an answered wait a notice": ("A B C D nE", "A- B- @10 urgent nE+"),
    "after a wait without an answer the oldest": ("A B nC", "urgent A! @10 A! nC+"),
    "an earlier event of its subject before the notice": ("A C B1 B2 nB3", "urgent A- B1+"),
}


@pytest.mark.parametrize(("max_batch", "names", "story"), BATCHED.values(), ids=BATCHED)
def test_batches(max_batch: int, names: str, story: str) -> None:
    Told(names, max_batch=max_batch).tell(story)


@pytest.mark.parametrize(("names", "story"), ALONE.values(), ids=ALONE)
def test_what_is_sent_next(names: str, story: str) -> None:
    Told(names).tell(story)


@pytest.mark.parametrize(("failed", "next_name"), [(MANY_FAILED - 1, "nZ"), (MANY_FAILED, "A")])
def test_a_notice_passes_until_so_many_events_failed_that_the_receiver_must_be_unavailable(
    failed: int, next_name: str
) -> None:
    told = Told("A B C D E F G H I J K L nZ")
    tried = "".join(f"@{100 * number} A- {name}- " for number, name in enumerate("BCDEFGH"[: failed - 1]))
    told.tell(f"{tried} failed={failed}")
    assert told.schedule.has_untried() is (failed < MANY_FAILED)
    told.tell(f"@1000 urgent next={next_name}")


def test_only_a_notice_counts_as_one_that_may_be_accepted_although_others_are_not() -> None:
    assert not Told("A B").schedule.has_untried()
    assert Told("A nB").schedule.has_untried()


def test_after_a_thousand_failed_events_no_other_one_is_tried() -> None:
    names = [chr(0x4E00 + number) for number in range(MAX_FAILED + 5)]
    told = Told(" ".join(names))
    for number, name in enumerate(names[1:MAX_FAILED], 1):
        told.tell(f"@{100 * number} {names[0]}- {name}-")
    told.tell(f"@{100 * MAX_FAILED} {names[0]}- {names[1]}- failed={MAX_FAILED}")


def test_tries_are_counted_from_the_start_once_no_other_event_was_left_to_try() -> None:
    told = Told("A B")
    told.tell("A-")
    told.schedule.acknowledge(told.schedule.page)  # it became too old
    told.tell("next=")
    told.add("C")
    told.tell("C- hold=False failures=2")


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
    ("name", "is_urgent"),
    [
        ("scheduledevent.scheduled", True),
        ("scheduledevent.ended", True),
        ("approval.failed", True),
        ("document.changed", False),
        ("bridge.heartbeat", False),
        ("imds.unreachable", False),
    ],
)
def test_notices_and_receipts_are_urgent(name: str, is_urgent: bool) -> None:
    stored = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=0.0, body=b"{}")
    assert is_urgent_type(stored) is is_urgent


@pytest.mark.parametrize(
    ("is_urgent", "status", "name", "wait_seconds"),
    [
        (True, 503, "scheduledevent.scheduled", 2.0),
        (False, 503, "scheduledevent.scheduled", 60.0),
        (True, None, "scheduledevent.scheduled", 60.0),
        (True, 503, "bridge.heartbeat", 60.0),
    ],
)
def test_an_isolated_event_is_retried_often_only_if_it_is_a_young_notice_that_is_answered(
    is_urgent: bool, status: int | None, name: str, wait_seconds: float
) -> None:
    stored = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=0.0, body=b"{}")
    failure = Failure(error=Unavailable("not now", status=status), at=0.0, share=1.0, count=20)
    failed = FailedEvent(event=stored, failure=failure, is_isolated=True)
    assert failed.retry_at(Pace(limit_seconds=60.0, is_urgent=is_urgent)) == wait_seconds
