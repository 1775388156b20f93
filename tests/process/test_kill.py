"""kill -9 at random instants: nothing is lost, nothing moves back."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import pytest

from bridge.lab.imds import EVENTS_PATH
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.process import (
    LIMIT_SECONDS,
    Forward,
    Stored,
    by_order_key,
    kills,
    random_instants,
    read_outbox,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("without_coverage")

KILLS = kills(12)
SINKS = ("inbox", "other")
LANES = 6
REQUESTS_PER_CHANGE = 3  # a change is two events; with faults, some need more than one request
PREFIX = "io.imdsbridge.scheduledevent."
INBOX_FAULTS = ("503", "503", "drop", "drop", "lost_answer", "lost_answer", "slow", "slow", "timeout")
IMDS_FAULTS = ("500", "drop", "garbage", "slow", "empty")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What must be published about an event: one of `kinds`, for the `count`th time."""

    event_id: str
    kinds: tuple[str, ...]
    count: int = 1


class Changes:
    """A stream of changes: several events at a time, each going on once its last step has arrived.

    `expected` lists every step. Beside it one event changes all the time, but never faster than what a slow machine
    delivers, and the receiver and IMDS misbehave.
    """

    def __init__(self, lab: ImdsLab, inbox: Inbox, other: Inbox, rng: random.Random) -> None:
        self.expected: list[Step] = []
        self._lab = lab
        self._inbox = inbox
        self._other = other
        self._rng = rng
        self._arrived: dict[str, tuple[str, str]] = {}
        self._looked_at = self._next_change_at = 0
        self._restless = lab.schedule(event_type="Freeze", resources=["web-0"], notice_seconds=86_400)
        self._stop_when_drained = threading.Event()
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._run, name="changes", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Begin no further event and wait until those that are under way have ended."""
        self._stop_when_drained.set()
        self._thread.join(LIMIT_SECONDS * 2)
        assert not self._thread.is_alive(), f"did not arrive: {self.expected[-LANES:]}"

    def _run(self) -> None:
        lanes = [self._life() for _ in range(LANES)]
        steps = [next(lane) for lane in lanes]
        while lanes:
            self._take_in()
            for place in reversed(range(len(lanes))):
                if not self._has_arrived(steps[place]):
                    continue
                step = next(lanes[place], None)
                if step is not None:
                    steps[place] = step
                elif self._stop_when_drained.is_set():
                    del lanes[place], steps[place]
                else:
                    lanes[place] = self._life()
                    steps[place] = next(lanes[place])
            if self._stop_when_drained.is_set():
                self._behave()
            elif self._looked_at >= self._next_change_at:
                self._next_change_at = self._looked_at + REQUESTS_PER_CHANGE
                self._lab.update(self._restless, Description=f"{self._rng.random()}")
            self._pause.wait(0.02)

    def _life(self) -> Iterator[Step]:
        """Let one event happen; yield each step, to be resumed when it has arrived."""
        event_type = self._rng.choice(["Freeze", "Reboot", "Redeploy", "Preempt"])
        event = self._lab.schedule(event_type=event_type, resources=["web-0"], notice_seconds=86_400)
        yield self._expect(event, "scheduled")
        for count in range(1, self._rng.randint(1, 3)):
            self._lab.update(event, Description=f"text {count}")
            yield self._expect(event, "updated", count=count)
        if self._rng.random() < 0.3:
            self._lab.cancel(event)
            yield self._expect(event, "canceled", "ended")
        else:
            self._lab.start(event)
            yield self._expect(event, "started")
            self._lab.complete(event)
            yield self._expect(event, "completed")

    def _expect(self, event: str, *kinds: str, count: int = 1) -> Step:
        self.expected.append(Step(event_id=event, kinds=kinds, count=count))
        return self.expected[-1]

    def _take_in(self) -> None:
        received = self._inbox.received
        for one in received[self._looked_at :]:
            if one.status == 200:
                event = one.json()
                self._arrived[event["id"]] = (event["subject"], kind_of(event["type"]))
            self._misbehave()
        self._looked_at = len(received)

    def _has_arrived(self, step: Step) -> bool:
        seen = Counter(self._arrived.values())
        return sum(seen[step.event_id, kind] for kind in step.kinds) >= step.count

    def _misbehave(self) -> None:
        """Once for each request that came, so that faults never pile up."""
        chance = self._rng.random()
        if chance < 0.25:
            receiver = self._rng.choice((self._inbox, self._other))
            receiver.fault(self._rng.choice(INBOX_FAULTS), seconds=self._rng.uniform(0, 0.3))
        elif chance < 0.30:
            self._lab.fault(self._rng.choice(IMDS_FAULTS), seconds=0, path=EVENTS_PATH)

    def _behave(self) -> None:
        self._inbox.clear_faults()
        self._other.clear_faults()
        self._lab.clear_faults()


def kind_of(event_type: str) -> str:
    return event_type.removeprefix(PREFIX).removesuffix(".v1")


def place(stored: Stored) -> tuple[int, int]:
    """Return what never may decrease: the incarnation of the document, and the number of the last event."""
    document = (stored.state.get("watch") or {}).get("document") or {}
    return document.get("DocumentIncarnation", 0), stored.state.get("run", {}).get("seq", 0)


def assert_not_back(before: Stored, after: Stored) -> None:
    assert all(new >= old for old, new in zip(place(before), place(after), strict=True)), (
        f"moved back from {place(before)} to {place(after)}"
    )
    assert after.events[: len(before.events)] == before.events
    assert [seq for seq, *_ in after.events] == list(range(1, place(after)[1] + 1))
    had = {(sink, seq) for sink in SINKS for seq, *_ in before.events} - set(before.waiting)
    assert not had & set(after.waiting), "what a sink has had waits for it again"


def run_and_kill(forward: Forward, lab: ImdsLab, rng: random.Random) -> None:
    """Kill a new process at some instant of its start, while it deals with an answer, or at any time."""
    asked = len(lab.requests())
    instant = rng.choice(["start", "answer", "answer", "any"])
    with forward:
        if instant != "start":
            later = asked + (rng.randint(1, 4) if instant == "answer" else 1)
            wait_until(lambda: len(lab.requests()) >= later, describe=lambda: forward)
        within_seconds = {"start": 0.35, "answer": 0.04, "any": 0.7}[instant]
        threading.Event().wait(rng.uniform(0, within_seconds))
        assert forward.process is not None
        assert forward.process.poll() is None, forward
        forward.kill()


@pytest.mark.timeout(0 if KILLS > 60 else 600)
def test_kill_9_at_many_random_instants_loses_nothing_and_moves_nothing_back(tmp_path: Path) -> None:
    rng = random_instants()
    with ImdsLab(rate_limit=None) as lab, Inbox(strict=True) as inbox, Inbox(strict=True) as other:
        sinks = {}
        for name, one in zip(SINKS, (inbox, other), strict=True):
            sinks[name] = {"kind": "webhook", "url": one.url, "from_start": True}
            one.fault("lost_answer")  # so that each gets at least one event twice
        given = {"endpoint": lab.url("web-0"), "poll_seconds": 0.2}
        forward = Forward(tmp_path, {"imds": given, "sinks": sinks})
        changes = Changes(lab, inbox, other, random.Random(rng.random()))  # noqa: S311
        before = Stored()
        for _ in range(KILLS):
            run_and_kill(forward, lab, rng)
            after = read_outbox(forward.state)
            assert_not_back(before, after)
            before = after
        with forward:
            # Each step waits for the one before it to arrive, in spite of faults.
            long = 4 * LIMIT_SECONDS
            wait_until(lambda: len(changes.expected) >= KILLS, timeout_seconds=long, describe=lambda: forward)
            changes.finish()
            wait_until(
                lambda: not read_outbox(forward.state).waiting, describe=lambda: forward, apart_seconds=0.1
            )
            assert forward.stop() == 0, forward
        stored = read_outbox(forward.state)
        assert_not_back(before, stored)
        for one in (inbox, other):
            assert_all_arrived(stored, one)
        assert_all_published(stored, changes.expected)
        assert_counted_without_gaps(stored)


def assert_all_arrived(stored: Stored, inbox: Inbox) -> None:
    """Check ids, order and bodies at a receiver against what the outbox holds."""
    assert stored.dead == []
    assert inbox.problems == []
    arrivals = [(one.json()["id"], one.body) for one in inbox.accepted]
    bodies = {event_id: body for _, event_id, _, body in stored.events}
    assert len(bodies) == len(stored.events), "an id was given twice"
    expected = by_order_key(map(json.loads, bodies.values()))
    assert by_order_key(one.json() for one in inbox.accepted) == expected, "one is missing, or out of order"
    assert all(body == bodies[event_id] for event_id, body in arrivals), "a duplicate differs"
    assert len(arrivals) > len(bodies), "the lost answer led to no duplicate"


def assert_all_published(stored: Stored, expected: list[Step]) -> None:
    """Check that every step of every event was published, and none twice."""
    published = Counter((json.loads(body)["subject"], kind_of(type_)) for _, _, type_, body in stored.events)
    final = {(step.event_id, step.kinds): step.count for step in expected}
    for (event_id, kinds), count in final.items():
        assert sum(published[event_id, kind] for kind in kinds) == count, f"{kinds} of {event_id}"


def assert_counted_without_gaps(stored: Stored) -> None:
    """Check what an audit checks: the chain of runs, their counters, and the ids that each document names."""
    events = [json.loads(body) for *_, body in stored.events]
    own = [one for one in events if "reporterseq" in one]
    before: tuple[str | None, int | None] = (None, None)
    for epoch, run in groupby(own, lambda event: event["reporterepoch"]):
        started, *rest = run
        assert (started["data"]["PreviousEpoch"], started["data"]["PreviousLastReporterSeq"]) == before
        assert [int(one["reporterseq"]) for one in (started, *rest)] == list(range(1, len(rest) + 2))
        before = (epoch, len(rest) + 1)
    listed = {name for one in own for name in one["data"].get("CloudEventIds", [])}
    assert listed == {one["id"] for one in events if one["type"].startswith(PREFIX)}
