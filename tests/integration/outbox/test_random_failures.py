"""Random commits, deliveries, failures of the disk and kills."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.outbox import (
    TWO,
    FailingDisk,
    abandon,
    cursor,
    event,
    failing_disk,
    kill,
    open_outbox,
)


class Walk:
    """Random steps over an outbox, compared with what must be true after each of them.

    `must` are events that a sink must still get, `delivered` what it got, in order. `settled` was acknowledged and
    is on the disk, `at_risk` is known to the memory alone.
    """

    def __init__(self, folder: Path, seed: int, disk: FailingDisk) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - no secret
        self.folder = folder
        self.disk = disk
        self.starts = 0
        self.committed: list[str] = []
        self.durable: set[str] = set()
        self.delivered: dict[str, list[str]] = {"a": [], "b": []}
        self.acknowledged: dict[str, set[str]] = {"a": set(), "b": set()}
        self.saved: dict[str, set[str]] = {"a": set(), "b": set()}
        self.cursors = {"a": 0, "b": 0}
        self.lost: set[str] = set()
        self.path = folder / "0"
        self.outbox = open_outbox(self.path, sinks=TWO)

    def run(self, steps: int) -> None:
        actions = (
            [self.commit] * 6
            + [self.deliver] * 8
            + [self.fail, self.recover, self.try_storage, self.prune, self.kill]
        )
        for _ in range(steps):
            self.rng.choice(actions)()
            self.check()
        self.recover()
        for sink in self.delivered:
            while self.deliver_to(sink):
                self.check()
        self.finish()

    def commit(self) -> None:
        names = [str(len(self.committed) + n) for n in range(self.rng.randint(1, 3))]
        self.committed += names
        size = self.rng.choice((0, 0, 3000))
        if self.outbox.commit([event(name, size=size) for name in names], meta={"watch": names[-1]}):
            self.note_saved()

    def deliver(self) -> None:
        self.deliver_to(self.rng.choice("ab"))

    def deliver_to(self, sink: str) -> list[str]:
        """Let a sink have a page and take part of it, as a sink that fails in the middle does."""
        generation, page = self.outbox.pending(sink, self.rng.randint(1, 6))
        sent = page[: self.rng.randint(1, len(page))] if page else []
        for stored in sent:
            assert stored.id not in self.acknowledged[sink], f"{stored.id} was acknowledged before"
            self.delivered[sink].append(stored.id)
        taken = sent[: self.rng.randint(0, len(sent))] if self.rng.random() < 0.2 else sent
        self.outbox.acknowledge(sink, generation, taken)
        self.acknowledged[sink] |= {stored.id for stored in taken}
        if self.outbox.storage_error is None:
            self.note_saved()
        return [stored.id for stored in page]

    def fail(self) -> None:
        self.disk.fail()

    def recover(self) -> None:
        self.disk.recover()
        self.try_storage()
        assert self.outbox.storage_error is None
        self.note_saved()

    def try_storage(self) -> None:
        self.outbox.recover()
        if self.outbox.storage_error is None:
            self.note_saved()

    def prune(self) -> None:
        self.outbox.prune()

    def kill(self) -> None:
        """Go on with the files as they are; what only the memory held may be gone."""
        self.starts += 1
        failing = self.disk.is_failing
        self.disk.recover()
        self.path = kill(self.outbox, self.path, self.folder / str(self.starts))
        if failing and self.rng.random() < 0.5:
            self.disk.fail()
        self.outbox = open_outbox(self.path, sinks=TWO)
        self.lost |= set(self.committed) - self.durable
        self.durable = set(self.committed) - self.lost
        self.acknowledged = {sink: set(names) for sink, names in self.saved.items()}
        self.cursors = {sink: cursor(self.outbox, sink) for sink in self.cursors}

    def note_saved(self) -> None:
        self.durable = set(self.committed) - self.lost
        self.saved = {sink: set(names) for sink, names in self.acknowledged.items()}

    def check(self) -> None:
        for sink, before in self.cursors.items():
            self.cursors[sink] = cursor(self.outbox, sink)
            assert self.cursors[sink] >= before or self.outbox._state.positions[sink].ahead
            backlog, since = self.outbox.backlog(sink)
            assert backlog >= 0
            assert (since is None) == (backlog == 0) or self.outbox.storage_error

    def finish(self) -> None:
        for sink, delivered in self.delivered.items():
            assert self.durable <= set(delivered), "an event never arrived"
            assert self.outbox.backlog(sink)[0] == 0
        assert self.outbox.dead_letter_counts() == {}
        self.outbox.close()

    def first_times(self, sink: str) -> list[int]:
        return list(dict.fromkeys(int(name) for name in self.delivered[sink]))


@pytest.mark.parametrize("seed", range(10))
def test_whatever_happens_to_disk_and_process_every_sink_gets_every_event_and_in_order_while_it_can_be_read(
    tmp_path: Path, seed: int
) -> None:
    with failing_disk() as failing:
        walk = Walk(tmp_path, seed, failing)
        kill_well = walk.kill

        def kill_on_a_disk_that_is_well() -> None:
            walk.disk.recover()
            kill_well()

        walk.kill = kill_on_a_disk_that_is_well  # type: ignore[method-assign]
        try:
            walk.run(250)
        finally:
            failing.recover()
            abandon(walk.outbox)
    for sink in walk.delivered:
        assert walk.first_times(sink) == sorted(walk.first_times(sink))


@pytest.mark.parametrize("seed", range(10, 20))
def test_whatever_happens_while_older_events_cannot_even_be_read_every_sink_gets_every_event(
    tmp_path: Path, seed: int
) -> None:
    with failing_disk() as failing:
        walk = Walk(tmp_path, seed, failing)
        try:
            walk.run(250)
        finally:
            failing.recover()
            abandon(walk.outbox)
