"""Random receivers and events: what must hold of the requests, whatever the schedule chooses."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bridge.delivery.course import DIGEST_RETRY_SECONDS, NOTHING_WAITS
from bridge.delivery.holding import HOLD_SECONDS
from bridge.errors import DeliveryError, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.outbox import inspect
from bridge.outbox import storage as storage_module
from bridge.runtime.time import iso_utc
from tests.support.clock import MovedClock
from tests.support.moved_delivery import DELIVERY_TRIALS, MovedDelivery
from tests.support.outbox import OTHER_TYPE, TYPE, FailingDisk, failing_disk, kill

Answer = DeliveryError | None
FIRST_TRIES_A_SECOND, RETRIES_A_SECOND = 20, 4
STARTED, ENDED = (TYPE.replace("scheduled.v1", f"{kind}.v1") for kind in ("started", "ended"))


@dataclass(frozen=True, kw_only=True)
class Try:
    """An event in a request: when, whether it was its first alone, and what became of it."""

    at: float
    name: str
    is_first: bool
    error: Answer


class World:
    """Delivers to a receiver that answers as `answer` says, and notes each try; the clock is moved."""

    def __init__(self, path: Path, *, is_digest: bool = False, **settings: Any) -> None:
        self._path, self._is_digest, self._settings, self._kills = path, is_digest, settings, 0
        self.answer: Callable[[str], Answer] = lambda _: None
        self.request_seconds: Callable[[Sequence[StoredEvent]], float] = lambda _: 0.0
        self.tries: list[Try] = []
        self.committed: dict[str, float] = {}
        self.received_at: dict[str, float] = {}
        self.subjects: dict[str, str] = {}
        self._failed: set[str] = set()
        self._names: list[str] = []  # what earlier processes have delivered
        self._start(path / "0", clock=None)

    def _start(self, path: Path, *, clock: MovedClock | None) -> None:
        self.rig = MovedDelivery(path, clock=clock, **self._settings)
        self.rig.sink.is_digest = self._is_digest
        self.rig.sink.refuse = self._note
        send = self.rig.sink.send

        def note_size(events: Sequence[StoredEvent]) -> None:
            self._is_alone = len(events) == 1
            self.rig.clock.advance(self.request_seconds(events))
            before = len(self.rig.sink.received)
            try:
                send(events)
            finally:
                new = self.rig.sink.received[before:]
                self.received_at |= {event.id: self.now for event in new}

        self.rig.sink.send = note_size  # type: ignore[method-assign]

    def close(self) -> None:
        self.rig.close()

    def kill(self) -> None:
        """Go on with what a kill leaves, in another process."""
        self._kills += 1
        self._names += self.rig.received()
        folder = kill(self.rig.outbox, self.rig.folder.path, self._path / str(self._kills))
        self.rig.outbox.close()
        self._start(folder, clock=self.rig.clock)

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

    def check_order_and_loss(self) -> None:
        """Heal the receiver: everything comes once, and in its order for each subject."""
        self.answer = lambda _: None
        self.run(7200)
        assert self.rig.dispatcher.step() == NOTHING_WAITS
        names = [*self._names, *self.rig.received()]
        if self._kills:  # what was delivered a moment before may come again
            names = [*dict.fromkeys(names)]
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
        for number in range(40):
            for bad in range(chance.choice((0, 1, 3, 40))):
                world.commit(f"bad {number} {bad}", type_=chance.choice((TYPE, OTHER_TYPE)))
            world.run(chance.choice((0.0, 0.1, 4.0)))
            tried = {one.name for one in world.tries}
            untried = [name for name in world.committed if name.startswith("bad") and name not in tried]
            world.commit(f"good {number}")
            limit_seconds = (len(untried) + 2) / FIRST_TRIES_A_SECOND
            world.run(limit_seconds)
            assert f"good {number}" in world.rig.received(), (number, limit_seconds)


def test_after_an_outage_without_answers_everything_comes_within_two_seconds(
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
            type_ = chance.choice((TYPE, STARTED, ENDED))
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
                assert own <= {*world.rig.received()}
        world.answer = lambda _: None
        world.run(HOLD_SECONDS)
        assert len(world.rig.received()) == 150
        world.check_order_and_loss()


# How long a notice of 30 seconds waits: the time in which the receiver would have taken it, and two requests more.
WAIT_SECONDS = 5.0
REQUEST_SECONDS = 0.4
HANG_SECONDS = 3.0
PREEMPT_SECONDS = 30.0


class Receiver:
    """Accepts, fails in four ways or hangs, for random times; some events it never takes."""

    def __init__(self, world: World, chance: Random) -> None:
        self._world, self._chance = world, chance
        self._kind, self._until = "up", 0.0
        self.poison: dict[str, int | None] = {}
        self._turns: list[tuple[float, str]] = [(world.now, "up")]
        world.answer, world.request_seconds = self.answer, self.request_seconds

    def turn(self) -> None:
        """Behave in another way, more often well than not."""
        self._become(self._chance.choice(("up", "up", "up", "500", "hangs", "unreached", "429")))
        self._until = self._world.now + self._chance.choice((1.0, 7.0)) * (self._kind == "429")

    def heal(self) -> None:
        """Take everything from now on."""
        self._become("up")
        self.poison.clear()

    def _become(self, kind: str) -> None:
        self._kind = kind
        self._turns.append((self._world.now, kind))

    def free_seconds(self, begin: float, end: float) -> float:
        """Return for how long it would have taken a notice between two times."""
        turns = pairwise([*self._turns, (end, "")])
        return sum(
            max(0.0, min(until, end) - max(at, begin)) for (at, kind), (until, _) in turns if kind == "up"
        )

    def request_seconds(self, events: Sequence[StoredEvent]) -> float:
        hangs = self._kind == "hangs" or any(
            one.id in self.poison and self.poison[one.id] is None for one in events
        )
        return HANG_SECONDS if hangs else self._chance.choice((0.0, 0.01, REQUEST_SECONDS))

    def answer(self, name: str) -> Answer:
        if self._kind == "429":
            left = self._until - self._world.now
            if left <= 0:
                self._become("up")
            else:
                return Unavailable("slower", status=429, retry_after_seconds=left)
        if self._kind == "up":
            return Unavailable("no", status=self.poison[name]) if name in self.poison else None
        status = 500 if self._kind == "500" else None
        return Unavailable("no", status=status, is_unreached=self._kind == "unreached")


def announce(world: World, name: str, notice_seconds: float, *, subject: str = "", type_: str = TYPE) -> None:
    start = iso_utc(world.rig.clock.now() + timedelta(seconds=notice_seconds))
    world.commit(name, subject=subject, type_=type_, EventStatus="Scheduled", NotBeforeUtc=start)


@pytest.mark.parametrize("kind", ["alone", "batches", "digests"])
def test_a_notice_of_30_seconds_is_late_by_5_seconds_at_most_whatever_waits_and_fails(
    tmp_path: Path, chance: Random, kind: str
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "alone": {"max_per_second": chance.choice((1.0, 1000.0))},
        "batches": {"max_batch": chance.choice((5, 100))},
        "digests": {"digest_seconds": chance.choice((30.0, 300.0)), "max_per_second": 1.0},
    }
    settings = kinds[kind]
    with closing(World(tmp_path, is_digest=kind == "digests", **settings)) as world:
        receiver = Receiver(world, chance)
        for number in range(70):
            if chance.random() < 0.25:
                receiver.turn()
            for more in range(chance.choice((0, 1, 5, 40))):
                name = f"{number}-{more}"
                subject = f"s{chance.randrange(40)}" if chance.random() < 0.3 else name
                type_ = chance.choice((TYPE, TYPE, OTHER_TYPE, ENDED))
                announce(world, name, chance.choice((1800, 86400 * 3)), subject=subject, type_=type_)
                receiver.poison |= {name: chance.choice((500, 500, None))} if chance.random() < 0.1 else {}
            if chance.random() < (0.5 if settings.get("max_per_second") != 1.0 else 0.2):
                announce(world, f"preempt{number}", PREEMPT_SECONDS)
            if chance.random() < 0.1 and receiver.poison:
                del receiver.poison[chance.choice(sorted(receiver.poison))]
            if chance.random() < 0.05:  # a wave of starts, for which nothing can be done any more
                for more in range(100):
                    announce(world, f"{number}-started{more}", -1, type_=STARTED)
            if chance.random() < 0.05:
                world.kill()
            world.run(chance.choice((0.0, 0.1, 2.0, 20.0)))
        waited = {
            name: receiver.free_seconds(at, min(world.received_at.get(name, world.now), at + PREEMPT_SECONDS))
            for name, at in world.committed.items()
            if name.startswith("preempt")
        }
        # A chat is left alone for a while after each failure, and a rate limit lets requests pass.
        pause_seconds = DIGEST_RETRY_SECONDS if kind == "digests" else 1 / settings.get("max_per_second", 1e9)
        limit_seconds = WAIT_SECONDS + 2 * (HANG_SECONDS + pause_seconds)
        assert {name: seconds for name, seconds in waited.items() if seconds > limit_seconds} == {}
        receiver.heal()
        world.check_order_and_loss()


class Life:
    """A process with a sink of each kind through kills, a disk that fails, an operator and a clock that jumps."""

    def __init__(self, path: Path, chance: Random, disk: FailingDisk) -> None:
        self._path, self._chance, self._disk, self._kills = path, chance, disk, 0
        self.clock = MovedClock()
        self.is_digest = chance.random() < 0.3
        self.committed: dict[str, str] = {}
        self.got: list[str] = []
        self.uncertain: set[str] = set()  # sent without a clear answer, or before a kill
        self.bad: dict[str, DeliveryError] = {}
        self.outage: DeliveryError | None = None
        self.start(path / "0")

    def start(self, path: Path) -> None:
        settings = {"digest_seconds": 30.0} if self.is_digest else {"max_batch": self._chance.choice((1, 7))}
        self.rig = MovedDelivery(path, clock=self.clock, others=["b"], **settings)
        self.rig.sink.is_digest = self.is_digest
        self.rig.sink.refuse = self._answer
        self._counted = 0

    def _answer(self, event: StoredEvent) -> Answer:
        error = self.outage or self.bad.get(event.id)
        if error and error.uncertain:
            self.uncertain.add(event.id)
        return error

    def run(self, seconds: float) -> None:
        until = self.clock.monotonic() + seconds
        self.rig.deliver(seconds=seconds)
        self.clock.advance(max(0.0, until - self.clock.monotonic()))
        new = self.rig.received()[self._counted :]
        self._counted += len(new)
        for name in new:
            assert name not in self.got or name in self.uncertain, f"{name} came twice"
        self.got += new

    def commit(self) -> None:
        name = f"e{len(self.committed)}"
        self.committed[name] = f"s{self._chance.randrange(25)}"
        type_ = self._chance.choice((TYPE, OTHER_TYPE, STARTED, ENDED))
        # It becomes urgent while it waits, or is overdue as it comes.
        start = self.clock.now() + timedelta(seconds=self._chance.choice((-5000, 30, 300, 90000)))
        data = {"NotBeforeUtc": iso_utc(start)} if self._chance.random() < 0.5 else {}
        self.rig.commit(name, subject=self.committed[name], type_=type_, **data)
        if self._chance.random() < 0.1:
            errors = (
                Unavailable("no", status=500),
                Unavailable("no", uncertain=1),
                Rejected("no", status=400),
            )
            self.bad[name] = self._chance.choice(errors)

    def turn_receiver(self) -> None:
        unreached = Unavailable("gone", is_unreached=True)
        slower = Unavailable("slower", status=429, retry_after_seconds=5)
        self.outage = self._chance.choice((None, None, Unavailable("no", status=503), unreached, slower))
        for name in [name for name in self.bad if self._chance.random() < 0.2]:
            del self.bad[name]

    def kill(self) -> None:
        """Go on with what a kill leaves; what was acknowledged a moment ago may be sent again."""
        self._kills += 1
        if self._is_stored():
            folder = self.rig.folder.path
            self.start(kill(self.rig.outbox, folder, self._path / str(self._kills)))

    def move(self) -> None:
        """Hand all to another sink and back, as an operator does; so it waits like something new."""
        if self._is_stored():
            inspect.move(self.rig.folder, "a", "c")
            inspect.move(self.rig.folder, "c", "a")
            self.rig.outbox.recover()

    def recover(self) -> None:
        self.rig.outbox.recover()

    def turn_disk(self) -> None:
        if self._disk.is_failing:
            self._disk.recover()
        else:
            self._disk.fail()

    def jump(self) -> None:
        self.clock.jump(self._chance.choice((-1e5, 400.0, 1e6)))

    def _is_stored(self) -> bool:
        return not (self._disk.is_failing or self.rig.outbox.storage_error)

    def heal(self, *, has_order: bool) -> None:
        self.outage = None
        self.bad.clear()
        self.rig.outbox.recover()
        self.run(4000)
        assert self.rig.dispatcher.step() == NOTHING_WAITS
        dead = {name for name, *_ in self.rig.dead()}
        assert {*self.got} ^ dead == {*self.committed}
        assert [one.id for one in self.rig.outbox.pending("b", 9999)] == [*self.committed]
        for subject in {*self.committed.values()} if has_order else ():
            mine = [*dict.fromkeys(name for name in self.got if self.committed[name] == subject)]
            assert mine == [
                name for name in self.committed if self.committed[name] == subject and name not in dead
            ]


@pytest.mark.posix("Windows has no limits of a process")
def test_nothing_is_lost_or_comes_twice_through_kills_failing_disks_operators_and_jumps_of_the_clock(
    tmp_path: Path, chance: Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Memory mode often has room for a part alone; what is behind that can be overtaken.
    copied_bytes = chance.choice((2_000, 20_000, 2**24, 2**24))
    monkeypatch.setattr(storage_module, "COPY_BYTES", copied_bytes)
    with failing_disk() as disk:
        life = Life(tmp_path, chance, disk)
        rare = [life.turn_disk, life.recover, life.jump]
        for _ in range(150):
            chance.choice([*[life.commit] * 24, *[life.turn_receiver, life.kill, life.move] * 2, *rare])()
            life.run(chance.choice((0.0, 0.0, 0.2, 3.0, 70.0)))
    life.heal(has_order=copied_bytes == 2**24)
    life.rig.close()
