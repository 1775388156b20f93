"""Random receivers and events: what must hold of the requests, whatever the schedule chooses."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bridge.errors import DeliveryError, Unavailable
from bridge.events.model import StoredEvent
from bridge.service.holding import HOLD_SECONDS
from bridge.service.schedule import NOTHING_WAITS
from tests.support.moved_delivery import DELIVERY_TRIALS, MovedDelivery
from tests.support.outbox import OTHER_TYPE, TYPE

Answer = DeliveryError | None
FIRST_TRIES_A_SECOND, RETRIES_A_SECOND = 20, 4


@dataclass(frozen=True, kw_only=True)
class Try:
    """An event in a request: when, whether it was its first alone, and what became of it."""

    at: float
    name: str
    is_first: bool
    error: Answer


class World:
    """Delivers to a receiver that answers as `answer` says, and notes each try; the clock is moved."""

    def __init__(self, path: Path, *, max_batch: int = 1, holds_copies: bool = False) -> None:
        self.rig = MovedDelivery(path, max_batch=max_batch, max_age_seconds=1e9, holds_copies=holds_copies)
        self.answer: Callable[[str], Answer] = lambda _: None
        self.tries: list[Try] = []
        self.committed: dict[str, float] = {}
        self.subjects: dict[str, str] = {}
        self.rig.sink.refuse = self._note
        self.close = self.rig.close
        self._failed: set[str] = set()
        send = self.rig.sink.send

        def note_size(events: Sequence[StoredEvent]) -> None:
            self._is_alone = len(events) == 1
            send(events)

        self.rig.sink.send = note_size  # type: ignore[method-assign]

    @property
    def now(self) -> float:
        return self.rig.clock.monotonic()

    def _note(self, event: StoredEvent) -> Answer:
        error = self.answer(event.id)
        self.tries.append(Try(at=self.now, name=event.id, is_first=event.id not in self._failed, error=error))
        # What fails in a batch is tried alone at once.
        if error and self._is_alone:
            self._failed.add(event.id)
        return error

    def commit(self, name: str, *, subject: str = "", type_: str = TYPE, **data: Any) -> None:
        self.committed[name], self.subjects[name] = self.now, subject or name
        self.rig.commit(name, subject=subject, type_=type_, **data)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            wait_seconds = self.rig.dispatcher.step()
            if wait_seconds is not None:
                self.rig.clock.advance(min(wait_seconds, until - self.now))

    def accepted(self) -> list[Try]:
        return [one for one in self.tries if one.error is None]

    def check_order_and_loss(self) -> None:
        """Heal the receiver: everything comes once, and in its order for each subject."""
        self.answer = lambda _: None
        self.run(7200)
        assert self.rig.dispatcher.step() == NOTHING_WAITS
        names = [one.name for one in self.accepted()]
        assert sorted(names) == sorted(self.committed)
        of_subjects: dict[str, list[str]] = {}
        for name in names:
            of_subjects.setdefault(self.subjects[name], []).append(name)
        for mine in of_subjects.values():
            assert mine == [name for name in self.committed if name in mine]

    def highest_rate(self, *, is_first: bool) -> int:
        """Return how many tries of a kind failed with an answer in the worst second."""
        times = [one.at for one in self.tries if one.error and one.error.status and one.is_first is is_first]
        return max((bisect_left(times, at + 1.0 - 1e-6) - n for n, at in enumerate(times)), default=0)


@pytest.fixture(params=range(DELIVERY_TRIALS))
def chance(request: pytest.FixtureRequest) -> Random:
    random.seed(request.param)
    return Random(request.param)  # noqa: S311 - a seed


def test_order_loss_and_rates_whatever_fails(tmp_path: Path, chance: Random) -> None:
    with closing(World(tmp_path, max_batch=chance.choice((1, 1, 5, 100)))) as world:
        bad: dict[str, int | None] = {}
        world.answer = lambda name: Unavailable("no", status=bad[name]) if name in bad else None
        for number in range(150):
            name = f"e{number}"
            world.commit(name, subject=f"s{chance.randrange(60)}", type_=chance.choice((TYPE, OTHER_TYPE)))
            if chance.random() < 0.4:
                bad[name] = chance.choice((500, 503, 401, 404)) if chance.random() < 0.95 else None
            if bad and chance.random() < 0.2:
                del bad[chance.choice(sorted(bad))]
            world.run(chance.choice((0.0, 0.0, 0.01, 0.3, 5.0)))
        world.run(200)
        assert world.highest_rate(is_first=True) <= FIRST_TRIES_A_SECOND
        assert world.highest_rate(is_first=False) <= RETRIES_A_SECOND
        world.check_order_and_loss()


def test_a_good_notice_waits_only_for_first_tries_of_notices_before_it(
    tmp_path: Path, chance: Random
) -> None:
    with closing(World(tmp_path)) as world:
        world.answer = lambda name: Unavailable("no", status=500) if name.startswith("bad") else None
        for number in range(60):
            for bad in range(chance.choice((0, 1, 3, 40))):
                world.commit(f"bad {number} {bad}", type_=chance.choice((TYPE, OTHER_TYPE)))
            world.run(chance.choice((0.0, 0.1, 4.0)))
            tried = {one.name for one in world.tries}
            untried = [name for name in world.committed if name.startswith("bad") and name not in tried]
            world.commit(f"good {number}")
            limit_seconds = (len(untried) + 2) / FIRST_TRIES_A_SECOND
            world.run(limit_seconds)
            assert f"good {number}" in world.rig.received(), (number, limit_seconds)


def test_an_outage_without_answers_keeps_the_order_and_ends_within_two_seconds(
    tmp_path: Path, chance: Random
) -> None:
    with closing(World(tmp_path, max_batch=chance.choice((1, 10)))) as world:
        for number in range(40):
            is_unreached = chance.random() < 0.5
            is_down = chance.random() < 0.6

            def answer(_: str, *, is_down: bool = is_down, is_unreached: bool = is_unreached) -> Answer:
                return Unavailable("no answer", is_unreached=is_unreached) if is_down else None

            world.answer = answer
            for more in range(chance.randrange(4)):
                world.commit(f"{number} {more}")
            world.run(chance.choice((0.1, 3.0, 30.0)) if is_down else 2.0 + 1e-6)
            assert is_down or world.rig.outbox.backlog("a") == (0, None)
        world.check_order_and_loss()
        assert [one.name for one in world.accepted()] == list(world.committed)


def test_what_a_receiver_asks_for_is_obeyed(tmp_path: Path, chance: Random) -> None:
    with closing(World(tmp_path, max_batch=chance.choice((1, 10)))) as world:
        not_before = {"": 0.0}  # by event; "": for all

        def answer(name: str) -> Answer:
            assert world.now >= max(not_before[""], not_before.get(name, 0.0)) - 1e-6
            if chance.random() < 0.5:
                return None
            seconds, status = chance.choice((1, 20, 90)), chance.choice((429, 503))
            not_before["" if status == 429 else name] = world.now + seconds
            return Unavailable("slower", status=status, retry_after_seconds=seconds)

        world.answer = answer
        for number in range(60):
            world.commit(str(number), type_=OTHER_TYPE)
            world.run(chance.choice((0.0, 1.0, 50.0)))
        world.check_order_and_loss()


def test_copies_that_are_held_keep_the_order_and_delay_nothing_else_whatever_fails(
    tmp_path: Path, chance: Random
) -> None:
    with closing(World(tmp_path, max_batch=100, holds_copies=True)) as world:
        world.run(1)
        own: set[str] = set()
        for number in range(150):
            name, affects = f"e{number}", chance.random() < 0.2
            is_down = chance.random() < 0.1
            world.answer = lambda _, is_down=is_down: Unavailable("no answer") if is_down else None  # type: ignore[misc]
            type_ = TYPE.replace(
                "scheduled.v1", chance.choice(("scheduled.v1", "started.v1", "completed.v1"))
            )
            data = {
                "AffectsThisVm": affects,
                "PreviousStatus": "Scheduled",
                "NotBeforeUtc": "2126-01-01T00:00:00Z",
            }
            world.commit(name, subject=f"s{chance.randrange(20)}", type_=type_, **data)
            own |= {name} if affects else set()
            world.run(chance.choice((0.0, 1.0, 30.0, 200.0)))
            if not is_down:
                world.run(2.5)  # a retry after an outage may wait for 2 s
                assert own <= {one.name for one in world.accepted()}
        world.answer = lambda _: None
        world.run(HOLD_SECONDS)
        assert len(world.accepted()) == 150
        world.check_order_and_loss()
