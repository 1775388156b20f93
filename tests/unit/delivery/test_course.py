"""What a sink is sent next, event by event, and when a failed delivery is tried again."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.delivery.course import Course, Failure, Pace
from bridge.delivery.queue import Head, Queue, Taken
from bridge.errors import DeliveryError, Unavailable
from bridge.events.model import StoredEvent
from bridge.events.urgency import HAS_STARTED, RECEIPTS, REST_LANE, Now, urgency
from bridge.outbox.rows import Ledger
from bridge.outbox.storage import Storage
from bridge.runtime.time import iso_utc
from tests.support.diff import steady

NOTICE = "io.imdsbridge.scheduledevent.scheduled.v1"
OTHER = "io.imdsbridge.bridge.heartbeat.v1"
PACE = Pace(limit_seconds=60.0)
URGENT = Pace(limit_seconds=60.0, urgent_seconds=2.0)
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


class MemoryStorage:
    """What a queue needs of an outbox, in memory."""

    def __init__(self) -> None:
        self.database = Ledger()
        weakref.finalize(self, self.database.close)

    def run(self, work: Callable[[Ledger], Any], *, synced: bool | None = None) -> Any:
        with nullcontext() if synced is None else self.database.transaction(synced=synced):
            return work(self.database)


class Told:
    """A queue of events that are named by their subject: `A1` and `nA2` are about A, `nA2` is a notice of 100 s.

    It is told what happens in words: `@10` is the time; the other words without `=` name what is sent next and say
    what becomes of it (`A,B+` is accepted, see FAILURES for the others); the rest is compared with the course.
    """

    def __init__(self, names: str, *, max_batch: int = 1) -> None:
        self.storage = MemoryStorage()
        self.queue = Queue("a", cast("Storage", self.storage))
        self.course = Course(max_batch=max_batch, batch=max_batch)
        self.count, self.now, self.pace, self.is_draining = 0, 0.0, PACE, False
        for name in names.split():
            self.count += 1
            type_ = NOTICE if name.startswith("n") else OTHER
            body: dict[str, Any] = {"id": name, "type": type_, "source": "/s"}
            body["subject"] = name.lstrip("n").rstrip("0123456789")
            body["data"] = {"NotBeforeUtc": "1970-01-01T00:01:40Z"}
            event = StoredEvent(
                seq=self.count, id=name, type=type_, stored_at=0.0, body=json.dumps(body).encode()
            )
            self.storage.database.save_event(event)
            self.storage.database.save_waiting(event, {"a": None})

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
        if name in ("next", "at"):
            at, taken = self.choose()
            return at if name == "at" else ",".join(event.id for event in taken.events)
        return self.course.blocked_by is not None if name == "blocked" else getattr(self.course, name)

    def choose(self) -> tuple[float, Taken]:
        """Return when to ask again, and what is sent now, as a dispatcher does."""
        heads: Sequence[Head] = []
        if (at := self.course.blocked_until(self.pace)) <= self.now:
            now = Now(wall=self.now, steady=self.now)
            kinds = self.course.kinds(self.now)
            ready = self.queue.ready(now, self.course.limit, **kinds)
            if (self.course.blocked_by or self.is_draining) and not ready.fresh and self.queue.forgive(now):
                ready = self.queue.ready(now, self.course.limit, **kinds)
            at, heads = self.course.choose(ready, self.now)
        return at, self.queue.take(heads, self.course.limit, is_noted=False)

    def send(self, word: str) -> None:
        """Send what is next, which must be what the word names."""
        _, taken = self.choose()
        assert ",".join(event.id for event in taken.events) == word[:-1]
        if error := FAILURES[word[-1]]:
            self.fail(Failure(error=error, began_at=self.now, at=self.now, share=1.0), taken)
            return
        for event in reversed(taken.events):
            self.storage.database.execute("delete-waiting", "a", event.seq)
        if self.course.is_after_outage(self.now):
            self.queue.forgive(Now(wall=self.now, steady=self.now))
        newest = taken.events[-1].seq  # as if what follows had come later
        course = self.course.accepted(is_again=taken.is_again)
        self.course = replace(course, accepted_at=self.now, accepted_seq=newest)

    def fail(self, failure: Failure, taken: Taken) -> None:
        """Note a failure as a dispatcher does."""
        count, head = len(taken.events), None
        if count == 1 and failure.may_be_caused_by_event:
            head = self.queue.head(taken.events[0].seq)
            assert head
            due_at = replace(failure, count=head.tries + 1).retry_at(self.pace)
            self.queue.note_failure(head, due_at=due_at, is_asked=failure.must_wait(self.pace))
        is_again = head.has_failed if head else taken.is_again
        self.course = self.course.failed(failure, count=count, is_again=is_again, pace=self.pace)


BATCHED = {
    "in their order and in batches": (2, "A B C D E", "A,B+ C,D+ E+ next= at=inf"),
    "after a failed batch alone, and then in batches that double": (
        *(4, "A B C D E F G H I J K L M N O"),
        "A,B,C,D- blocked=False next= @0.05 A+ B+ C,D+ E,F,G,H+ I,J,K,L+ M,N,O+",
    ),
    "what fails alone of a failed batch waits for its own retry": (
        *(4, "A B C D E"),
        "A,B,C,D- @0.05 A+ B- failures=1 @0.1 C+ D,E+ next= @1 B+",
    ),
    "after an outage retries go together": (
        *(4, "A B C D E"),
        "A,B,C,D- @0.06 A- @0.12 B- @0.18 C- @0.24 D- @0.3 E+ A,B,C,D+",
    ),
    "a batch without an answer makes the sink wait": (2, "A B", "A,B! blocked=True failures=1 next="),
    "a batch that is to come later waits as a whole": (2, "A B", "A,B~ blocked=True at=60.0"),
    "what starts soon is in no batch with others": (4, "A nB C nD", "nB,nD+ A,C+"),
    "as many of a subject as there is room for": (4, "A1 A2 A3 B1 B2 A4", "A1,A2,A3,B1+ B2,A4+"),
}
ALONE = {
    "429 suspects no event": ("A B", "A% blocked=True next= @100 A+"),
    "no connection suspects no event": ("A B", "A^ blocked=True next= @100 A+"),
    "another subject is tried soon": (
        "A1 A2 B C",
        "A1- blocked=False next= at=0.05 @0.05 B- @0.1 C- next= at=0.5 failures=3",
    ),
    "retries have a highest rate": ("A B C", "A- @0.05 B- @0.1 C- @1 A- next= at=1.25 @1.25 B- @1.5 C-"),
    "after a failure what was never tried comes first": (
        "A B C D",
        "A- @0.5 B- next=A @0.56 C- @0.62 D+ A+ B+ C+",
    ),
    "what failed once is tried again before others that are as urgent": ("A B C", "A- @0.5 B+ A+ C+"),
    "what failed more often is tried again behind others that are as urgent": (
        "A B C D",
        "A- @0.05 B+ @0.5 A- C- @2 D+ C+ A+",
    ),
    "a retry that is more urgent comes first, and then it is the turn of another": (
        "nA B C",
        "nA- @0.05 B+ @0.5 nA- next=C C+ next= @1.5 nA+",
    ),
    "after a failure what is due for longest and, each fourth time, the most urgent": (
        "nA B C",
        "nA- @1 B- @2 C- @100 nA- @101 nA- @102 B- @103 C-",
    ),
    "every second time something that came after the last that was accepted": (
        "A B nC D E",
        "nC+ @1 A- @2 B- @3 D- @4 E- @10 A- @11 D- @12 B- @13 E-",
    ),
    "a lone event waits longer each time": ("A", "A- failures=1 at=0.5 @10 A- failures=2 at=11.0"),
    "what is accepted after two failures makes the others due": (
        "A B C D",
        "A- @0.05 B- @0.1 C+ blocked=False failures=0 A+ B+ D+",
    ),
    "after one failure it makes none due": ("A B", "A- @0.05 B+ next= at=0.5"),
    "soon after another it makes none due": ("A B C D", "A+ @9 B- @9.1 C- @9.2 D+ next= at=9.5"),
    "an event that fails holds up its subject": (
        "A1 B A2 C",
        "A1- @0.05 B+ C+ next= at=0.5 @0.5 A1- blocked=False next= at=1.5 @1.5 A1+ A2+",
    ),
    "the most urgent first": ("A B nC D", "nC+ A- @0.05 B+ D+ next= @0.5 A+"),
    "a subject is as urgent as its newest notice": ("A C B1 B2 nB3", "B1+ B2+ nB3+ A+ C+"),
    "without an answer what is due for longest": (
        "A B C",
        "A! blocked=True next= @10 B! blocked=True next= @20 C! @30 A! @40 A+ B+ C+",
    ),
    "without an answer a lone event makes the sink wait": ("A", "A! failures=1 @10 A! failures=2 at=11.0"),
    "without an answer a notice is no exception": (
        "A B nC",
        "urgent nC! @10 A! @20 B! @30 nC! @40 nC+ A+ B+",
    ),
    "an event without an answer while others are accepted": (
        "A B C",
        "A! @10 B+ A! blocked=True next= @20 C+ A+",
    ),
    "an answer ends the wait": ("A B", "A! @10 B- blocked=False @10.5 A+"),
    "what is to come later is not due then": ("A nB", "nB+ A~ blocked=True @30 next= @60 A+"),
    "what is to come later delays no other that is urgent": (
        "nA nB",
        "nA~ blocked=True @30 urgent nB+ @59 next= @60 nA+",
    ),
}


@pytest.mark.parametrize(("max_batch", "names", "story"), BATCHED.values(), ids=BATCHED)
def test_batches(max_batch: int, names: str, story: str) -> None:
    Told(names, max_batch=max_batch).tell(story)


def test_a_digest_that_fails_twice_is_sent_in_parts_also_if_it_was_as_large_as_possible() -> None:
    told = Told("A B C D E F G H", max_batch=4)
    told.course = replace(told.course, is_digest=True)
    told.tell("A,B,C,D- @2 A+ batch=3 B,C,D- batch=1 @4 B+ C+ D,E+")


@pytest.mark.parametrize(("names", "story"), ALONE.values(), ids=ALONE)
def test_what_is_sent_next(names: str, story: str) -> None:
    Told(names).tell(story)


def test_what_failed_is_tried_at_once_when_the_process_stops_unless_the_receiver_asked_for_time() -> None:
    told = Told("A nB")
    told.tell("nB+ A- @10 A- @20 A- @30 A- @40 A- at=48.0 @41 next=")
    told.is_draining = True
    told.tell("next=A A~ blocked=True @100 next= @101 A+")


def test_the_rank_of_events() -> None:
    now = 1_800_000_000.0

    def rank(name: str, at: float | None = None, *, stored_at: float = now) -> tuple[int, float]:
        start = None if at is None else iso_utc(datetime.fromtimestamp(at, UTC))
        body = json.dumps({"data": {"NotBeforeUtc": start}}).encode()
        event = StoredEvent(seq=1, id="1", type=f"io.imdsbridge.{name}.v1", stored_at=stored_at, body=body)
        value = urgency(event, stored_at)
        lanes = [
            number
            for number, (low, high) in enumerate(Now(wall=now, steady=now).lanes)
            if value is not None and low <= value < high
        ]
        return (lanes or [REST_LANE])[0], value or 0.0

    in_order = [
        rank("scheduledevent.scheduled", now + 30),
        rank("scheduledevent.updated", now + 119),
        rank("scheduledevent.scheduled", now - 800, stored_at=now - 2000),
        rank("scheduledevent.scheduled", now - 10, stored_at=now - 2000),
        rank("scheduledevent.scheduled", now + 121),
        rank("scheduledevent.scheduled", now + 3 * 86400),
        rank("scheduledevent.started", stored_at=now - 800),
        rank("scheduledevent.scheduled", now - 5000),  # long overdue as it comes
        rank("scheduledevent.ended", stored_at=now - 800),
        rank("approval.failed"),
    ]
    assert in_order == sorted(in_order)
    assert {
        rank("document.changed"),
        rank("bridge.heartbeat"),
        rank("scheduledevent.scheduled", now - 901, stored_at=now - 5000),
        rank("scheduledevent.started", stored_at=now - 901),
        rank("approval.accepted", stored_at=now - 901),
    } == {(REST_LANE, at + now - 901 if at is not None else 0.0) for at in (None, 0.0, HAS_STARTED, RECEIPTS)}


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
    assert failure.retry_at(URGENT) <= 2.0
    assert failure.retry_at(Pace(limit_seconds=60.0, is_draining=True)) <= 0.5
    assert failure.retry_at(Pace(limit_seconds=0.1, urgent_seconds=2.0)) <= 0.1


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
    pace = Pace(limit_seconds=60.0, urgent_seconds=2.0 if is_urgent else math.inf, is_draining=is_draining)
    assert Failure(error=error, count=9, at=0.0, share=1.0).retry_at(pace) == wait_seconds
