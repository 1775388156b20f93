"""A COMMIT that fails may be in the file all the same: whatever it left there, nothing is lost, doubled or untold.

SQLite answers with an error where a sync fails or a last write only seems to, but the transaction's pages are in the
log, and it is there, whole, when the file is opened again. The store cannot know.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import pytest

from bridge.events.model import StoredEvent
from bridge.outbox import inspect
from bridge.outbox import outbox as outbox_module
from bridge.outbox.outbox import REJECTED
from bridge.outbox.rows import Loss
from bridge.outbox.sqlite import LOG_BYTES, Database, log_of
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from tests.support.clock import MovedClock
from tests.support.outbox import (
    TWO,
    FailingDisk,
    abandon,
    check_recovered,
    commit,
    dead_letter,
    deliver,
    drain,
    event,
    failing_disk,
    kill,
    losses_of,
    open_outbox,
    retry_dead_letters,
    waiting,
)

TRIALS = int(os.environ.get("TEST_COMMIT_TRIALS", "20"))
SMALL_BYTES = LOG_BYTES + 200_000

# What a transaction that fails leaves: nothing, or all of it; then the open file shows it at once or when it is
# opened again, as after a sync that failed.
Left = Literal["nothing", "all", "all, unseen"]


class Commits:
    """Has every transaction on a file fail that `fails` says so of, and leave what it returns."""

    def __init__(self, scratch: Path) -> None:
        self.fails: Callable[[], Left | None] = lambda: None
        self._scratch = scratch
        self._copies = 0

    @contextmanager
    def transaction(self, database: Database, *, synced: bool = True) -> Iterator[None]:  # noqa: ARG002
        connection = database._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        left = None if database.is_memory else self.fails()
        before = self._copy(connection) if left == "all, unseen" else None
        connection.execute("ROLLBACK" if left == "nothing" else "COMMIT")
        if before:
            connection.close()
            database._connection = sqlite3.connect(before, isolation_level=None, check_same_thread=False)
        if left:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = 1034  # SQLITE_IOERR_FSYNC
            raise error

    def _copy(self, connection: sqlite3.Connection) -> Path:
        """Copy the file as the open transaction found it."""
        _, _, name = connection.execute("PRAGMA database_list").fetchone()
        self._copies += 1
        target = self._scratch / str(self._copies) / "outbox.db"
        target.parent.mkdir()
        for one, copy in ((Path(name), target), (log_of(Path(name)), log_of(target))):
            if one.exists():
                shutil.copy(one, copy)
        return target


@pytest.fixture
def commits(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Commits:
    """Let transactions fail on demand."""
    made = Commits(tmp_path_factory.mktemp("before"))
    monkeypatch.setattr(Database, "transaction", lambda database, **_: made.transaction(database))
    return made


def once(left: Left) -> Callable[[], Left | None]:
    """Fail one transaction."""
    answers = iter([left])
    return lambda: next(answers, None)


LEFT: list[Left] = ["nothing", "all", "all, unseen"]


@pytest.mark.parametrize("left", LEFT)
def test_a_commit_that_failed_is_told_once_also_after_further_attempts_that_fail(
    tmp_path: Path, commits: Commits, left: Left
) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1")
        commits.fails = lambda: left
        assert not commit(outbox, "2", "3")
        assert deliver(outbox, "a", limit=2) == ["1", "2"]
        for _ in range(3):
            outbox.recover()
            assert outbox.storage_error is not None
        commit(outbox, "4")
        commits.fails = lambda: None
        outbox.recover()
        assert outbox.storage_error is None
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["3", "4"], ["1", "2", "3", "4"])
        assert outbox.losses() == []
        assert [stored.seq for stored in outbox.pending("b", 9)] == [1, 2, 3, 4]
    check_recovered(tmp_path, "3", "4")


@pytest.mark.parametrize("left", LEFT)
def test_a_first_start_whose_commits_fail_takes_what_they_left_for_its_own_state(
    tmp_path: Path, commits: Commits, left: Left
) -> None:
    commits.fails = lambda: left
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1")
        for _ in range(2):
            outbox.recover()
            commit(outbox, "2")
        commits.fails = lambda: None
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox, "b") == ["1", "2", "2"]


@pytest.mark.parametrize("left", LEFT)
def test_after_a_kill_an_event_whose_commit_failed_is_there_or_reported_as_lost(
    tmp_path: Path, commits: Commits, left: Left
) -> None:
    outbox = open_outbox(tmp_path / "state")
    commit(outbox, "1")
    commits.fails = once(left)
    commit(outbox, "2")
    with closing(open_outbox(kill(outbox, tmp_path / "state", tmp_path / "killed"))) as outbox:
        expected = (["1"], 1) if left == "nothing" else (["1", "2"], 0)
        assert (waiting(outbox), len(outbox.losses())) == expected
        commit(outbox, "3")
        assert outbox.pending("a", 9)[-1].seq == 3


def lose(outbox: KeptOutbox) -> None:
    commit(outbox, *map(str, range(50)), size=3000)
    assert [reason for reason, _ in losses_of(outbox)] == ["SizeLimit"]
    drain(outbox)


def refuse(outbox: KeptOutbox) -> None:
    commit(outbox, "1")
    dead_letter(outbox)


@pytest.mark.parametrize("act", [refuse, lose], ids=["a dead letter", "a loss that is not published"])
def test_a_kill_after_what_only_memory_knows_is_a_loss(
    tmp_path: Path, commits: Commits, monkeypatch: pytest.MonkeyPatch, act: Callable[[KeptOutbox], None]
) -> None:
    monkeypatch.setattr(outbox_module, "MEMORY_BYTES", 100_000)
    outbox = open_outbox(tmp_path / "state")
    commits.fails = lambda: "nothing"
    act(outbox)
    commits.fails = lambda: None
    with closing(open_outbox(kill(outbox, tmp_path / "state", tmp_path / "killed"))) as outbox:
        assert [count for _, count in losses_of(outbox)] == [None]


@pytest.mark.parametrize("left", LEFT)
def test_a_dead_letter_whose_retry_fails_to_commit_is_sent_again_once_under_a_number_of_its_own(
    tmp_path: Path, commits: Commits, left: Left
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        dead_letter(outbox)
        assert inspect.retry(StateFolder(tmp_path), [1]) == 1
        commits.fails = once(left)
        outbox.recover()
        assert outbox.storage_error is not None
        commit(outbox, "2")
        outbox.recover()
        assert outbox.storage_error is None
        seqs = {stored.id: stored.seq for stored in outbox.pending("a", 9)}
        assert seqs.keys() == {"1", "2"}
        assert len({1, *seqs.values()}) == 3
        assert outbox.dead_letter_counts() == {}


@pytest.mark.parametrize("left", LEFT)
def test_losses_of_a_commit_that_failed_are_reported_and_those_that_memory_published_are_not_again(
    tmp_path: Path, commits: Commits, left: Left
) -> None:
    with closing(open_outbox(tmp_path, max_bytes=SMALL_BYTES)) as outbox:
        commit(outbox, *map(str, range(60)), size=3000)
        before = outbox.losses()
        assert [loss.reason for loss in before] == ["SizeLimit"]
        commits.fails = once(left)
        outbox.commit([event("report")], published=before)
        commits.fails = lambda: "nothing"
        outbox.recover()
        commits.fails = lambda: None
        outbox.recover()
        assert outbox.storage_error is None
        told = sum(loss.count or 0 for loss in [*before, *outbox.losses()])
        assert told + len(waiting(outbox)) == 60 + 1  # with the report


def test_a_loss_that_file_and_memory_know_is_one(tmp_path: Path, commits: Commits) -> None:
    with closing(open_outbox(tmp_path, max_bytes=SMALL_BYTES)) as outbox:
        commit(outbox, *map(str, range(60)), size=3000)
        before = outbox.losses()
        commits.fails = once("nothing")
        deliver(outbox, limit=1)
        outbox.recover()
        assert outbox.storage_error is None
        assert outbox.losses() == before


def test_the_number_of_a_retried_dead_letter_is_not_given_again_without_the_file_of_numbers(
    tmp_path: Path,
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock, retain_seconds=1)) as outbox:
        commit(outbox, "1")
        dead_letter(outbox)
        retry_dead_letters(outbox, tmp_path, 1)
        assert [stored.seq for stored in outbox.pending("a", 1)] == [2]
        drain(outbox)
        clock.advance(2)
        outbox.prune()
    (tmp_path / "last-number").unlink()
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "2")
        assert [stored.seq for stored in outbox.pending("a", 1)] == [3]


def test_what_the_command_line_drops_or_moves_while_only_memory_is_used_stays_so(
    tmp_path: Path, commits: Commits
) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1", "2")
        commits.fails = once("nothing")
        commit(outbox, "3")
        folder = StateFolder(tmp_path)
        assert inspect.drop_waiting(folder, "a") == 2
        assert inspect.move(folder, "b", "c") == 2
        outbox.recover()
        assert [waiting(outbox, sink) for sink in "abc"] == [["3"], ["3"], ["1", "2"]]


# At random


class Schedule:
    """Random steps over an outbox, its disk and its process; what was committed is counted independently of it.

    Where commits fail, dead letters are sent again, sink `b` takes nothing for long times, and folder and size are at
    stake too; `told` are the losses that were published. A disk that is only full, on which nothing of that happens,
    leaves no doubt: it is known what a kill loses, and everything comes in order.
    """

    def __init__(self, folder: Path, seed: int, disk: Commits | FailingDisk) -> None:
        self.rng = random.Random(seed)  # noqa: S311 - it is to be repeatable
        self.folder, self.disk, self.clock = folder, disk, MovedClock()
        self.is_exact = isinstance(disk, FailingDisk)
        self.is_failing = self.is_b_away = False
        self.max_bytes = LOG_BYTES + (250_000 if self.rng.random() < 0.3 and not self.is_exact else 2**30)
        self.starts = 0
        self.committed: list[str] = []
        self.durable: set[str] = set()
        self.order: dict[str, list[str]] = {"a": [], "b": []}
        self.got: dict[str, set[str]] = {"a": set(), "b": set()}
        self.acknowledged: dict[str, set[str]] = {"a": set(), "b": set()}  # by this process
        self.saved: dict[str, set[str]] = {"a": set(), "b": set()}
        self.ids: dict[int, str] = {}
        self.told: Counter[str] = Counter()  # events of which a loss says that the sink may have lost them
        self.uncounted: dict[str, set[str]] = {
            "a": set(),
            "b": set(),
        }  # a loss without a count says so of these
        self.may_lose = False
        if isinstance(disk, Commits):
            disk.fails = self.fails
        self.path = folder / "0"
        self.outbox = self.open()

    def fails(self) -> Left | None:
        return self.rng.choice([*LEFT, None]) if self.is_failing else None

    def open(self) -> KeptOutbox:
        return open_outbox(self.path, sinks=TWO, clock=self.clock, max_bytes=self.max_bytes)

    def run(self, steps: int) -> None:
        actions = (
            [self.commit, self.deliver, self.deliver, self.recover] * 5 + [self.turn_disk] * 3 + [self.kill]
        )
        if self.is_exact:
            actions += [self.commit, self.deliver] * 5 + [self.prune]
        else:
            actions += [self.refuse] * 5 + [self.turn_b, self.retry, self.publish_losses] * 3
            if sys.platform != "win32":  # Windows removes no file that is open
                actions.append(self.remove)
        for _ in range(steps):
            self.clock.advance(self.rng.random())
            self.rng.choice(actions)()
        self.let_disk_fail(is_failing=False)
        self.recover()
        assert self.outbox.storage_error is None
        self.outbox.close()
        self.acknowledged = {"a": set(), "b": set()}
        self.outbox = self.open()
        self.check()

    def commit(self) -> None:
        names = [str(len(self.committed) + n) for n in range(self.rng.randint(1, 3))]
        size = self.rng.choice((0, 0, 0, 20_000))
        self.outbox.commit([event(name, size=size) for name in names])
        self.committed += names
        self.note_saved()

    def page(self, sink: str) -> list[StoredEvent]:
        page = self.outbox.pending(sink, self.rng.randint(1, 6))
        for stored in page:
            assert self.ids.setdefault(stored.seq, stored.id) == stored.id, "a number was given twice"
            assert stored.id not in self.acknowledged[sink], f"{stored.id} was acknowledged before"
        return page

    def deliver(self) -> None:
        """Let a sink have a page and take it or, as one that fails in the middle, a part of it."""
        sink = self.rng.choice("a" if self.is_b_away else "ab")
        page = self.page(sink)
        self.order[sink] += [stored.id for stored in page]
        taken = page[: self.rng.randint(0, len(page))] if self.rng.random() < 0.2 else page
        self.outbox.acknowledge(sink, taken)
        names = {stored.id for stored in taken}
        self.got[sink] |= names
        self.acknowledged[sink] |= names
        self.note_saved()

    def refuse(self) -> None:
        sink = self.rng.choice("ab")
        page = self.page(sink)[:1]
        self.outbox.acknowledge(sink, page, dead=(REJECTED, "400"))
        self.acknowledged[sink] |= {stored.id for stored in page}

    def retry(self) -> None:
        """Have some dead letters sent again, as an operator does, whatever the process can use."""
        folder = StateFolder(self.path)
        if not folder.database.exists():
            return
        for letter in inspect.dead_letters(folder):
            if self.rng.random() < 0.3:
                self.is_failing, was = False, self.is_failing
                inspect.retry(folder, [letter["number"]])
                self.is_failing = was
                self.acknowledged[letter["sink"]].discard(letter["id"])

    def recover(self) -> None:
        self.outbox.recover()
        self.note_saved()

    def prune(self) -> None:
        self.outbox.prune()

    def note_saved(self) -> None:
        if self.outbox.storage_error is None:
            self.durable = set(self.committed)
            self.saved = {sink: set(names) for sink, names in self.acknowledged.items()}

    def turn_disk(self) -> None:
        self.let_disk_fail(is_failing=not self.is_failing)

    def let_disk_fail(self, *, is_failing: bool) -> None:
        self.is_failing = is_failing
        if isinstance(self.disk, FailingDisk):
            (self.disk.fail if is_failing else self.disk.recover)()

    def turn_b(self) -> None:
        self.is_b_away = not self.is_b_away

    def publish_losses(self) -> None:
        losses = self.outbox.losses()
        for loss in losses:
            self.note_told(loss)
        if losses:
            self.outbox.commit([event(f"loss {len(self.ids)} {self.clock.now()}")], published=losses)

    def note_told(self, loss: Loss) -> None:
        assert loss.count is not None or self.may_lose, "a loss is reported of which there was none"
        for sink in [loss.sink] if loss.sink else ["a", "b"]:
            if loss.count is None:
                self.uncounted[sink] |= set(self.committed)
            else:
                self.told[sink] += loss.count

    def kill(self) -> None:
        """Go on with the files as they are; what only the memory held may be gone, and is reported then."""
        self.starts += 1
        self.may_lose = self.may_lose or self.outbox.storage_error is not None
        if not self.path.exists():
            return
        if self.is_exact:
            self.let_disk_fail(is_failing=False)
        self.path = kill(self.outbox, self.path, self.folder / str(self.starts))
        self.outbox = self.open()
        if self.is_exact:
            self.note_lost()
        else:
            self.acknowledged = {"a": set(), "b": set()}

    def note_lost(self) -> None:
        lost = set(self.committed) - self.durable
        undelivered = lost - (self.acknowledged["a"] & self.acknowledged["b"])
        losses = self.outbox.losses()
        assert bool(losses) == bool(undelivered), "a loss is not reported, or there was none"
        self.outbox.commit([], published=losses)
        for sink, names in self.uncounted.items():
            names.update(lost - self.got[sink])
        self.durable = set(self.committed)
        self.acknowledged = {sink: set(names) for sink, names in self.saved.items()}

    def remove(self) -> None:
        self.may_lose = True
        shutil.rmtree(self.path)
        self.outbox.recover()

    def check(self) -> None:
        self.publish_losses()
        dead: dict[str, list[str]] = {"a": [], "b": []}
        for letter in inspect.dead_letters(StateFolder(self.path)):
            dead[letter["sink"]].append(letter["id"])
        for sink in "ab":
            assert len(dead[sink]) == len(set(dead[sink])), "a dead letter is doubled"
            assert not set(dead[sink]) & set(waiting(self.outbox, sink)), "a dead letter waits as well"
            while page := self.page(sink):
                self.outbox.acknowledge(sink, page)
                self.order[sink] += [stored.id for stored in page]
                self.got[sink] |= {stored.id for stored in page}
            missing = set(self.committed) - self.got[sink] - set(dead[sink]) - self.uncounted[sink]
            assert len(missing) <= self.told[sink], f"{sink} lacks {sorted(missing, key=int)}"
            first_times = [int(name) for name in dict.fromkeys(self.order[sink]) if self.is_exact]
            assert first_times == sorted(first_times)
        assert not self.is_exact or self.outbox.backlogs() == {"a": 0, "b": 0}


def run_schedules(folder: Path, disk: Commits | FailingDisk, *, steps: int) -> None:
    first = int(os.environ.get("TEST_COMMIT_SEED", "20261123"))
    for seed in range(first, first + TRIALS):
        place = folder / str(seed)
        place.mkdir()
        print(f"TEST_COMMIT_SEED={seed} TEST_COMMIT_TRIALS=1 repeats this schedule")
        schedule = Schedule(place, seed, disk)
        try:
            schedule.run(steps)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            schedule.let_disk_fail(is_failing=False)
            abandon(schedule.outbox)
        shutil.rmtree(place)


@pytest.mark.timeout(0 if TRIALS > 100 else 300)
def test_whatever_a_failed_commit_left_every_sink_gets_every_event_or_a_loss_says_so(
    tmp_path: Path, commits: Commits
) -> None:
    run_schedules(tmp_path, commits, steps=120)


@pytest.mark.timeout(0 if TRIALS > 100 else 300)
def test_whatever_happens_on_a_full_disk_every_sink_gets_every_event_in_order_and_losses_are_reported(
    tmp_path: Path,
) -> None:
    with failing_disk() as disk:
        run_schedules(tmp_path, disk, steps=120)


# With a real sync that fails

FAILING_SYNC = """
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>
#include <sys/syscall.h>

static int failing(void) { return access(getenv("SYNC_FAILS"), F_OK) == 0; }
int fsync(int file) { if (failing()) { errno = EIO; return -1; } return (int)syscall(SYS_fsync, file); }
int fdatasync(int file) { if (failing()) { errno = EIO; return -1; } return (int)syscall(SYS_fdatasync, file); }
"""

COMMIT_WHILE_SYNC_FAILS = """
import os
import sys
from pathlib import Path
from tests.support.outbox import commit, drain, open_outbox, waiting

state, fails = Path(sys.argv[1]), Path(os.environ["SYNC_FAILS"])
outbox = open_outbox(state)
commit(outbox, "1")
fails.touch()
assert not commit(outbox, "2")
for _ in range(3):
    outbox.recover()
assert not commit(outbox, "3")
if sys.argv[2] == "killed":
    os._exit(0)
fails.unlink()
outbox.recover()
assert outbox.storage_error is None
assert (waiting(outbox), outbox.losses()) == (["1", "2", "3"], []), (waiting(outbox), outbox.losses())
outbox.close()
"""


@pytest.fixture(scope="module")
def failing_sync(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a library that lets every sync fail while the file SYNC_FAILS is there."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or not compiler:
        pytest.skip("posix: needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("sync")
    (folder / "sync.c").write_text(FAILING_SYNC)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "sync.so", "sync.c"], cwd=folder, check=True)
    return folder / "sync.so"


@pytest.mark.parametrize("end", ["recovered", "killed"])
def test_a_real_sync_that_fails_loses_and_hides_no_event(
    tmp_path: Path, failing_sync: Path, end: str
) -> None:
    state = tmp_path / "state"
    given = {
        **os.environ,
        "LD_PRELOAD": f"{failing_sync} {os.environ.get('LD_PRELOAD', '')}",
        "SYNC_FAILS": str(tmp_path / "fails"),
    }
    subprocess.run(
        [sys.executable, "-c", COMMIT_WHILE_SYNC_FAILS, state, end],
        env=given,
        cwd=Path(__file__).parents[3],
        check=True,
    )
    with closing(open_outbox(state)) as outbox:
        got = drain(outbox)
        assert set(got) >= {"1"}
        assert got == ["1", "2", "3"] or outbox.losses(), "a loss is not reported"
        assert (end == "recovered") <= (got == ["1", "2", "3"])
