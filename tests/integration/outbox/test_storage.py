"""The outbox on a disk that is full, read-only, away or damaged: notices go out all the same."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import outbox as outbox_module
from bridge.outbox import retention
from bridge.outbox import rows as rows_module
from bridge.outbox import sqlite as sqlite_module
from bridge.outbox.outbox import OVERFLOW, REJECTED, Outbox, dead_letter
from bridge.outbox.rows import save_event
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from tests.support.clock import MovedClock
from tests.support.outbox import (
    FailingDisk,
    abandon,
    commit,
    cursor,
    deliver,
    event,
    failing_disk,
    kill,
    open_outbox,
    retry_dead_letters,
    rows,
    used_bytes,
    waiting,
)

EVERYTHING = (Filter(), False)
TWO = {"a": EVERYTHING, "b": EVERYTHING}


class SmallDisk:
    """A file system of one mebibyte, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / "state"
        self._filling = path / "filling"

    def mount(self) -> None:
        self.path.mkdir(exist_ok=True)
        self._run("mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "imds-bridge-test", str(self.path))

    def unmount(self) -> None:
        self._run("umount", "-l", str(self.path))

    def fill(self) -> None:
        """Take the last byte."""
        with self._filling.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def free(self) -> None:
        self._filling.unlink()

    def set_read_only(self, read_only: bool) -> None:
        self._run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", str(self.path))

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    small = SmallDisk(tmp_path / "disk")
    try:
        small.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", None) or error).splitlines()[0]
        reason = f"a file system cannot be mounted here: {why}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    yield small
    small.unmount()


def older_state(path: Path, *names: str, had: int = 0, image: Path | None = None) -> Path:
    """Leave a state with events of which sink `a` has had `had`; with `image`, as a kill would leave it there."""
    outbox = open_outbox(path)
    commit(outbox, *names)
    if had:
        deliver(outbox, limit=had)
    if image:
        return kill(outbox, path, image)
    outbox.close()
    return path


def written_at(path: Path) -> list[tuple[int, int]]:
    """Return the sizes and times of the outbox's files, which every write changes."""
    found = [file.stat() for file in sorted(path.glob("outbox.db*"))]
    return [(stat.st_size, stat.st_mtime_ns) for stat in found]


def drain(outbox: Outbox, sink: str = "a") -> list[str]:
    """Let a sink have all that waits, one event at a time."""
    got: list[str] = []
    while page := deliver(outbox, sink, limit=1):
        got += page
    return got


def check_recovered(path: Path, *expected: str) -> None:
    """Check that a restart finds these events waiting for sink `a`, and a disk that is well."""
    with closing(open_outbox(path)) as outbox:
        assert outbox.storage_error is None
        assert drain(outbox) == list(expected)


# A full disk


def test_a_full_disk_holds_up_nothing_and_has_everything_in_order_once_there_is_room(
    disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_outbox(disk.state, sinks=TWO)) as outbox:
        commit(outbox, "1", "2", "3")
        deliver(outbox, "a", limit=1)
        disk.fill()
        assert not commit(outbox, "4", "5", size=9000)
        assert outbox.storage_error is not None
        assert "full" in outbox.storage_error
        assert "the state store is unavailable" in caplog.text
        assert deliver(outbox, "a", limit=3) == ["2", "3", "4"]
        outbox.recover()
        assert outbox.storage_error is not None
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["5"], ["1", "2", "3", "4", "5"])
        disk.free()
        outbox.recover()
        assert outbox.storage_error is None
        assert "the state store works again" in caplog.text
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["5"], ["1", "2", "3", "4", "5"])
        image = kill(outbox, disk.state, disk.path / "image")
    with closing(open_outbox(image, sinks=TWO)) as outbox:
        assert outbox.meta("watch") == "5"
        assert (drain(outbox, "a"), drain(outbox, "b")) == (["5"], ["1", "2", "3", "4", "5"])


def test_what_waits_on_a_full_disk_is_delivered_before_what_came_after_it(disk: SmallDisk) -> None:
    with closing(open_outbox(disk.state)) as outbox:
        commit(outbox, "1", "2")
        disk.fill()
        number = 2
        while commit(outbox, str(number := number + 1), size=4000):
            pass
        commit(outbox, "last")
        assert drain(outbox) == [*map(str, range(1, number + 1)), "last"]
        disk.free()
        outbox.recover()
        assert drain(outbox) == []
    check_recovered(disk.state)


@pytest.mark.parametrize("sized", [False, True], ids=["nothing there", "an empty file there"])
def test_a_disk_that_is_full_at_the_start_holds_up_nothing(disk: SmallDisk, sized: bool) -> None:
    if sized:
        disk.state.mkdir()
        (disk.state / "outbox.db").touch()
    disk.fill()
    with closing(open_outbox(disk.state)) as outbox:
        assert outbox.storage_error is not None
        assert not commit(outbox, "1", "2", "3")
        assert deliver(outbox, limit=2) == ["1", "2"]
        disk.free()
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["3"]
        commit(outbox, "4")
    check_recovered(disk.state, "3", "4")


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_disk_that_is_full_at_the_start_still_gives_what_an_older_process_left(
    disk: SmallDisk, killed: bool
) -> None:
    state = older_state(disk.state, "1", "2", "3", had=1, image=disk.path / "killed" if killed else None)
    disk.fill()
    with closing(open_outbox(state)) as outbox:
        assert waiting(outbox) == ["2", "3"]
        while commit(outbox, "4", size=4000):
            assert "4" in drain(outbox)
        assert set(drain(outbox)) <= {"2", "3", "4"}
        disk.free()
        outbox.recover()
        assert outbox.storage_error is None
        assert drain(outbox) == []
    check_recovered(state)


def test_a_full_disk_that_needs_a_new_file_for_reading_gives_what_is_there(disk: SmallDisk) -> None:
    older_state(disk.state, "1", "2")
    (disk.state / "outbox.db-wal").touch()
    disk.fill()
    with closing(open_outbox(disk.state)) as outbox:
        assert drain(outbox) == ["1", "2"]
        disk.free()
        outbox.recover()
    check_recovered(disk.state)


# A disk that can only be read


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_read_only_disk_gives_what_an_older_process_left_and_what_comes_after_it(
    disk: SmallDisk, killed: bool
) -> None:
    older = open_outbox(disk.state)
    commit(older, "1", "2", "3")
    deliver(older, limit=1)
    if killed:
        shutil.copytree(disk.state, disk.path / "killed")
    older.close()
    state = disk.path / "killed" if killed else disk.state
    disk.set_read_only(True)
    with closing(open_outbox(state)) as outbox:
        assert outbox.storage_error is not None
        assert outbox.meta("watch") == "3"
        assert outbox.backlog("a")[0] == 2
        assert not commit(outbox, "4", "5")
        assert deliver(outbox, limit=3) == ["2", "3", "4"]
        outbox.recover()
        assert outbox.storage_error is not None
        assert waiting(outbox) == ["5"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["5"]
        commit(outbox, "6")
    check_recovered(state, "5", "6")


def test_a_read_only_disk_with_nothing_on_it_holds_up_nothing(disk: SmallDisk) -> None:
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)) as outbox:
        assert outbox.storage_error is not None
        assert "Read-only" in outbox.storage_error
        commit(outbox, "1", "2")
        assert deliver(outbox, limit=1) == ["1"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["2"]
    check_recovered(disk.state, "2")


def test_a_second_process_is_refused_on_a_read_only_disk_too(disk: SmallDisk) -> None:
    older_state(disk.state, "1")
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)), pytest.raises(StateError, match="is held by"):
        open_outbox(disk.state)


def test_a_full_disk_still_says_in_the_status_that_it_is_full(disk: SmallDisk) -> None:
    folder = StateFolder(disk.state)
    folder.acquire()
    folder.write_status({"storage_error": None})
    disk.fill()
    for number in range(3):
        folder.write_status({"storage_error": "full", "number": number})
        assert folder.read_status() == {"storage_error": "full", "number": number}
    with pytest.raises(OSError, match="No space"):
        folder.write_status({"much": "x" * 100_000})
    assert folder.read_status() == {"storage_error": "full", "number": 2}
    folder.release()


def test_a_read_only_disk_leaves_the_old_status_and_says_that_the_process_runs(disk: SmallDisk) -> None:
    folder = StateFolder(disk.state)
    folder.acquire()
    folder.write_status({"number": 1})
    folder.release()
    disk.set_read_only(True)
    folder.acquire()
    with pytest.raises(OSError, match="Read-only"):
        folder.write_status({"number": 2})
    assert StateFolder(disk.state).holder() is not None
    assert folder.read_status() == {"number": 1}
    folder.release()


def test_a_clone_on_a_read_only_disk_sends_nothing_of_the_other_vm_and_sets_it_aside_later(
    disk: SmallDisk,
) -> None:
    older_state(disk.state, "the other's")
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)) as outbox:
        assert outbox.move_aside() == disk.state / "outbox.db"
        commit(outbox, "1")
        assert deliver(outbox) == ["1"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert len(list(disk.state.glob("outbox.db.other-vm-*"))) == 1
        commit(outbox, "2")
    check_recovered(disk.state, "2")


def test_a_damaged_file_on_a_read_only_disk_is_moved_aside_once_that_is_possible(disk: SmallDisk) -> None:
    older_state(disk.state, "1")
    (disk.state / "outbox.db").write_bytes(b"nonsense" * 4096)
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)) as outbox:
        commit(outbox, "2")
        assert deliver(outbox) == ["2"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert len(list(disk.state.glob("outbox.db.damaged-*"))) == 1
        commit(outbox, "3")
    check_recovered(disk.state, "3")


def test_what_looks_like_damage_where_only_reading_is_possible_sets_nothing_aside(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(disk.state, "1", "2")
    disk.set_read_only(True)
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "checksum", lambda *_: -1)
        outbox = open_outbox(disk.state)
    with closing(outbox):
        commit(outbox, "3")
        assert deliver(outbox) == ["3"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert drain(outbox) == ["1", "2"]
    assert not list(disk.state.glob("outbox.db.*"))


# A folder that is not there, or an older state that appears later


def test_a_folder_that_cannot_be_made_at_first_is_made_later(tmp_path: Path) -> None:
    in_the_way = tmp_path / "state"
    in_the_way.write_text("no folder")
    with closing(open_outbox(in_the_way / "forward")) as outbox:
        assert outbox.storage_error is not None
        commit(outbox, "1", "2", "3")
        assert deliver(outbox, limit=1) == ["1"]
        outbox.recover()
        assert outbox.storage_error is not None
        in_the_way.unlink()
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["2", "3"]
    check_recovered(in_the_way / "forward", "2", "3")


@pytest.mark.parametrize("had_new", [0, 1, 3])
def test_an_older_state_that_can_be_read_only_later_loses_nothing_and_repeats_nothing(
    tmp_path: Path, had_new: int
) -> None:
    sinks = {"a": EVERYTHING, "fresh": EVERYTHING, "all": (Filter(), True)}
    older_state(tmp_path, "1", "2", "3", "4", had=2)
    hidden = (tmp_path / "outbox.db").rename(tmp_path / "elsewhere")
    (tmp_path / "outbox.db").mkdir()  # in its place, so that it can neither be read nor made
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        assert outbox.storage_error is not None
        outbox.commit([event("new 1"), event("new 2"), event("new 3")], meta={"watch": "newer"})
        for sink in sinks:
            got = [deliver(outbox, sink, limit=1)[0] for _ in range(had_new)]
            assert got == ["new 1", "new 2", "new 3"][:had_new]
        generation, page = outbox.pending("a", 10)
        (tmp_path / "outbox.db").rmdir()
        hidden.rename(tmp_path / "outbox.db")
        outbox.recover()
        assert outbox.storage_error is None
        assert outbox.generation > generation
        outbox.acknowledge("a", generation, page)  # numbered as before: ignored
        left = ["new 1", "new 2", "new 3"][had_new:]
        assert outbox.meta("watch") == "newer"
        assert outbox.backlog("a")[0] == 2 + len(left)
        commit(outbox, "new 4")
        assert drain(outbox, "a") == ["3", "4", *left, "new 4"]
        assert drain(outbox, "all") == ["1", "2", "3", "4", *left, "new 4"]
        assert drain(outbox, "fresh") == [*left, "new 4"]
        assert outbox.backlog("all")[0] == 0
        assert not any(reader.ahead for reader in outbox._state.positions.values())
    check_recovered(tmp_path)


def test_an_older_state_that_appears_before_anything_happened_is_simply_gone_on_with(tmp_path: Path) -> None:
    older_state(tmp_path / "older", "1", "2", had=1)
    with closing(open_outbox(tmp_path / "older")) as outbox:
        epoch = outbox.meta("epoch")
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        outbox.set_meta({"vm": "known"})
        (tmp_path / "state").unlink()
        (tmp_path / "older").rename(tmp_path / "state")
        outbox.recover()
        assert (outbox.meta("watch"), outbox.meta("vm")) == ("2", "known")
        assert outbox.meta("epoch") != epoch
        assert waiting(outbox) == ["2"]
    check_recovered(tmp_path / "state", "2")


def test_an_older_state_of_another_vm_that_appears_later_is_moved_aside(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path / "older")) as outbox:
        outbox.set_meta({"vm_id": "theirs"})
        commit(outbox, "the other's")
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        outbox.set_meta({"vm_id": "ours"})
        commit(outbox, "1", "2")
        deliver(outbox, limit=1)
        (tmp_path / "state").unlink()
        (tmp_path / "older").rename(tmp_path / "state")
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["2"]
    assert len(list((tmp_path / "state").glob("outbox.db.other-vm-*"))) == 1
    check_recovered(tmp_path / "state", "2")


def test_a_folder_that_another_process_has_taken_meanwhile_is_trouble_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        commit(outbox, "1")
        (tmp_path / "state").unlink()
        with closing(open_outbox(tmp_path / "state")):
            outbox.recover()
            assert outbox.storage_error is not None
            assert "is held by" in outbox.storage_error
            assert deliver(outbox) == ["1"]
        outbox.recover()
        assert outbox.storage_error is None


def test_a_state_that_a_newer_version_put_there_meanwhile_is_trouble_and_no_end(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        (tmp_path / "state").unlink()
        (tmp_path / "state").mkdir()
        with closing(sqlite3.connect(tmp_path / "state" / "outbox.db")) as newer:
            newer.execute("PRAGMA user_version = 99")
        outbox.recover()
        assert outbox.storage_error is not None
        assert "newer imds-bridge" in outbox.storage_error


# Writing fails, reading fails


def test_without_a_disk_to_write_to_a_sink_gets_what_waits_there_and_then_what_is_in_memory(
    tmp_path: Path,
) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        failing.fail()
        assert not commit(outbox, "4", "5")
        assert deliver(outbox, limit=1) == ["1"]
        outbox.recover()
        assert outbox.storage_error is not None
        assert deliver(outbox, limit=3) == ["2", "3", "4"]
        assert cursor(outbox) == 4
        failing.recover()
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["5"]
    check_recovered(tmp_path, "5")


def test_while_nothing_can_be_read_new_events_go_out_and_the_older_ones_follow_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        deliver(outbox, limit=1)
        with monkeypatch.context() as patch:
            break_reading(patch)
            commit(outbox, "4", "5")
            assert outbox.storage_error is not None
            assert deliver(outbox, limit=1) == ["4"]
            assert (outbox.occurrences("f"), outbox.retries("a", 1), outbox.dead_letter_counts()) == (
                0,
                [],
                {},
            )
            assert outbox.backlog("a")[0] == 3
            outbox.prune()
            outbox.recover()
            assert outbox.storage_error is not None
            assert deliver(outbox, limit=1) == ["5"]
            assert cursor(outbox) == 1
        outbox.recover()
        assert outbox.storage_error is None
        commit(outbox, "6")
        assert drain(outbox) == ["2", "3", "6"]
        assert outbox._state.positions["a"].ahead == set()
    check_recovered(tmp_path)


def break_reading(patch: pytest.MonkeyPatch) -> None:
    """Make every statement on the file fail as a dying disk would."""
    execute = Database.execute

    def fail(self: Database, name: str, *values: object) -> sqlite3.Cursor:
        if self.is_memory:
            return execute(self, name, *values)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    patch.setattr(Database, "execute", fail)


def test_an_older_state_of_which_only_a_part_can_be_read_at_first_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(tmp_path, "1", "2", "3", had=1)
    execute = Database.execute
    with monkeypatch.context() as patch:

        def fail_late(self: Database, name: str, *values: object) -> sqlite3.Cursor:
            if name == "backlog-by-type":
                raise sqlite3.OperationalError("disk I/O error")
            return execute(self, name, *values)

        patch.setattr(Database, "execute", fail_late)
        outbox = open_outbox(tmp_path)
    with closing(outbox):
        commit(outbox, "4")
        outbox.recover()
        assert drain(outbox) == ["2", "3", "4"]
        commit(outbox, "5")
        assert [stored.seq for stored in outbox.pending("a", 5)[1]] == [5]


def test_a_commit_that_the_disk_took_although_it_said_no_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        with monkeypatch.context() as patch:

            def commit_and_fail(database: Database, stored: StoredEvent) -> None:
                save_event(database, stored)
                if not database.is_memory:
                    database._connection.execute("COMMIT")
                    raise sqlite3.OperationalError("disk I/O error")

            patch.setattr(outbox_module, "save_event", commit_and_fail)
            assert not commit(outbox, "1")
        assert not commit(outbox, "2")
        outbox.recover()
        assert outbox.storage_error is None
        assert drain(outbox) == ["1", "2"]


def test_a_retry_that_was_delivered_while_the_disk_fails_is_not_sent_again(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2")
        for _ in range(2):
            generation, page = outbox.pending("a", 1)
            letter = dead_letter("a", page[0], REJECTED, "400", page[0].stored_at)
            outbox.acknowledge("a", generation, page, dead_lettered=letter)
        retry_dead_letters(outbox, tmp_path, 1, 2)
        (first, _), (second, _) = outbox.retries("a", 2)
        failing.fail()
        outbox.settle_retry(first)
        outbox.settle_retry(second, detail="400 again")
        assert outbox.retries("a", 2) == []
        failing.recover()
        outbox.recover()
        assert outbox.retries("a", 2) == []
        assert outbox.dead_letter_counts() == {"a": 1}


def test_a_clock_jump_while_the_disk_fails_keeps_every_age(tmp_path: Path) -> None:
    clock = MovedClock()
    with failing_disk() as failing, closing(open_outbox(tmp_path, clock=clock)) as outbox:
        commit(outbox, "1")
        began = clock.steady()
        failing.fail()
        commit(outbox, "2")
        letter = dead_letter("a", outbox.pending("a", 2)[1][0], REJECTED, "", began)
        outbox.acknowledge("a", outbox.generation, [], dead_lettered=letter)
        clock.jump(9000.0)
        outbox.shift(9000.0)
        assert outbox.backlog("a") == (2, began + 9000)
        assert [stored.stored_at for stored in outbox.pending("a", 2)[1]] == [began + 9000] * 2
        failing.recover()
        outbox.recover()
        assert [stored.stored_at for stored in outbox.pending("a", 2)[1]] == [began + 9000] * 2
        assert rows(tmp_path, "SELECT dead_at FROM dead_letter") == [(began + 9000,)]


def test_the_memory_is_bounded_while_the_disk_fails_and_older_events_on_the_disk_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "MEMORY_BYTES", 250_000)
    monkeypatch.setattr(retention, "EVICT_ROWS", 1)
    with failing_disk() as failing, closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1", "2", "3")
        drain(outbox, "b")
        failing.fail()
        commit(outbox, "4", "5", size=40_000)
        drain(outbox, "b")
        commit(outbox, "6", "7", "8", size=40_000)  # 4 and 5 wait for sink a all the same
        assert "1 event(s) for sink a are dropped" in caplog.text
        assert deliver(outbox, "b", limit=1) == ["6"]
        failing.recover()
        outbox.recover()
        assert drain(outbox, "b") == ["7", "8"]
        assert drain(outbox, "a") == ["1", "2", "3", "5", "6", "7", "8"]
        assert rows(tmp_path, "SELECT sink, id, reason, body FROM dead_letter") == [
            ("a", "4", OVERFLOW, None)
        ]


def test_without_a_disk_what_everybody_had_leaves_the_memory_before_anything_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MEMORY_BYTES", 200_000)
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        for number in range(100):
            commit(outbox, str(number), size=9000)
            if number >= 2:
                assert deliver(outbox, limit=1) == [str(number - 2)]
        assert used_bytes(outbox) <= 200_000
        assert outbox.dead_letter_counts() == {}
        (tmp_path / "state").unlink()
        outbox.recover()
        assert drain(outbox) == ["98", "99"]


def test_dead_letters_and_counts_are_kept_while_the_disk_fails_and_only_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MEMORY_BYTES", 125_000)
    monkeypatch.setattr(retention, "BYTES_PER_DEAD_LETTER", 40_000)
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state")) as outbox:
        for number in range(6):
            outbox.commit([event(str(number))], meta={}, occurrences={"f": number})
            generation, page = outbox.pending("a", 1)
            letter = dead_letter("a", page[0], REJECTED, "4" * 20_000, page[0].stored_at)
            outbox.acknowledge("a", generation, page, dead_lettered=letter)
        outbox.commit([], meta={})
        assert (outbox.dead_letter_counts(), outbox.occurrences("f")) == ({"a": 3}, 5)
        (tmp_path / "state").unlink()
        outbox.recover()
        assert (outbox.dead_letter_counts(), outbox.occurrences("f")) == ({"a": 3}, 5)


def test_an_event_that_one_sink_waits_for_outlasts_those_that_everybody_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MEMORY_BYTES", 120_000)
    sinks = {"slow": (Filter(where={"For": "slow"}), False), "quick": EVERYTHING}
    (tmp_path / "state").write_text("in the way")
    with closing(open_outbox(tmp_path / "state", sinks=sinks)) as outbox:
        outbox.commit([event("precious", For="slow")], meta={})
        generation, page = outbox.pending("slow", 1)
        for number in range(20):
            outbox.commit([event(str(number), For="quick", size=9000)], meta={})
            drain(outbox, "quick")
        outbox.acknowledge("slow", generation, [])
        assert waiting(outbox, "slow", 1) == [page[0].id]
        assert outbox.dead_letter_counts() == {}


def test_an_acknowledge_does_not_try_a_disk_that_fails(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        failing.fail()
        commit(outbox, "4")
        before = written_at(tmp_path)
        failing.recover()
        deliver(outbox, limit=1)
        outbox.set_meta({"seen": "yes"})
        assert outbox.storage_error is not None
        assert written_at(tmp_path) == before


def test_a_stop_while_the_disk_fails_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_disk() as failing:
        outbox = open_outbox(tmp_path)
        failing.fail()
        commit(outbox, "1", "2", "3")
        deliver(outbox, limit=1)
        outbox.close()
    assert "2 event(s) that were not delivered are lost" in caplog.text


def test_each_trouble_is_said_once_until_the_disk_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        for _ in range(2):
            failing.fail()
            for number in range(5):
                commit(outbox, str(number))
                outbox.recover()
            failing.recover()
            outbox.recover()
    levels = [record.levelno for record in caplog.records]
    assert levels.count(logging.ERROR) == 2
    assert levels.count(logging.WARNING) == 2


def test_a_program_that_has_the_file_open_at_the_start_is_only_a_temporary_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "BUSY_SECONDS", 0.05)
    older_state(tmp_path, "1")
    with closing(sqlite3.connect(tmp_path / "outbox.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        outbox = open_outbox(tmp_path)
        assert outbox.storage_error is not None
        assert "locked" in outbox.storage_error
        commit(outbox, "2")
        assert deliver(outbox, limit=1) == ["1"]
        other.execute("ROLLBACK")
    with closing(outbox):
        outbox.recover()
        assert outbox.storage_error is None
        assert deliver(outbox) == ["2"]


def test_a_folder_that_was_replaced_while_the_disk_failed_gets_a_new_state_with_all_that_is_known(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    with failing_disk() as failing, closing(open_outbox(path)) as outbox:
        outbox.commit([event("1"), event("2")], meta={"watch": "w"})
        deliver(outbox)
        failing.fail()
        commit(outbox, "3", "4")
        deliver(outbox, limit=1)
        path.rename(tmp_path / "old")
        failing.recover()
        outbox.recover()
        assert outbox.storage_error is None
        with pytest.raises(StateError, match="is held by"):
            open_outbox(path)
    with closing(open_outbox(path)) as outbox:
        assert outbox.meta("watch") == "4"
        assert drain(outbox) == ["4"]


# Damage


def overwrite(file: Path, offset: int, length: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(random.Random(offset).randbytes(length))  # noqa: S311 - no secret


def empty_all_but_the_header(file: Path) -> None:
    overwrite(file, 100, file.stat().st_size - 100)


def break_a_body(file: Path) -> None:
    """Change a byte within a body, which SQLite itself does not notice."""
    content = bytearray(file.read_bytes())
    content[content.index(b"x" * 100)] ^= 1
    file.write_bytes(content)


# With the number of events, of 20, that can be read afterwards at least.
DAMAGES: dict[str, tuple[Callable[[Path], object], int]] = {
    "the header is overwritten": (lambda file: overwrite(file, 0, 100), 20),
    "pages in the middle are overwritten": (lambda file: overwrite(file, 4096 * 20, 4096 * 10), 14),
    "everything but the header is overwritten": (empty_all_but_the_header, 0),
    "half of it is cut off": (lambda file: os.truncate(file, file.stat().st_size // 2 // 4096 * 4096), 6),
    "a page is cut off in the middle": (lambda file: os.truncate(file, 5000), 0),
    "one bit of a body is another": (break_a_body, 19),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_moved_aside_and_every_readable_row_is_in_a_new_one(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        for number in range(20):
            commit(outbox, str(number), size=6000)
    damage, left = DAMAGES[name]
    damage(tmp_path / "outbox.db")
    damaged = (tmp_path / "outbox.db").read_bytes()
    with closing(open_outbox(tmp_path)) as outbox:
        salvaged = [int(name) for name in drain(outbox)]
        assert salvaged == sorted(salvaged)
        assert len(salvaged) >= left
        outbox.recover()
        assert outbox.storage_error is None
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]
        commit(outbox, "new")
        assert drain(outbox) == ["new"]
        outbox.prune()
        assert outbox.storage_error is None
    assert [file.read_bytes() for file in tmp_path.glob("outbox.db.damaged-*")] == [damaged]
    assert "every readable row is copied to a new one" in caplog.text
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.meta("watch") == "new"
        assert outbox.storage_error is None


def test_a_file_whose_tables_are_gone_is_damaged(tmp_path: Path) -> None:
    older_state(tmp_path, "1")
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as other:
        other.execute("DROP TABLE event")
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.storage_error is None
        assert commit(outbox, "2")
    assert len(list(tmp_path.glob("outbox.db.damaged-*"))) == 1


@pytest.mark.parametrize("table", ["meta", "done", "event"])
def test_a_row_that_is_not_as_it_was_written_is_damage(tmp_path: Path, table: str) -> None:
    older_state(tmp_path, "1", "2", had=1)
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as other, other:
        other.execute(f"UPDATE {table} SET checksum = checksum + 1")  # noqa: S608 - of the line above
    with closing(open_outbox(tmp_path)) as outbox:
        waiting(outbox)
        assert outbox.storage_error is None
        assert commit(outbox, "3")
    assert len(list(tmp_path.glob("outbox.db.damaged-*"))) == 1


def test_damage_that_shows_while_the_process_runs_costs_only_what_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, *map(str, range(50)), size=5000)
        outbox.set_meta({"vm_id": "ours"})
        drain(outbox, "a")
        epoch = outbox.meta("epoch")
        connection = outbox._storage.database._connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA shrink_memory")
        overwrite(tmp_path / "outbox.db", 4096 * 40, (tmp_path / "outbox.db").stat().st_size - 4096 * 40)
        left = deliver(outbox, "b", limit=100)
        assert 0 < len(left) < 50
        assert left == sorted(left, key=int)
        assert "every readable row is copied to a new one" in caplog.text
        assert [(loss.reason, loss.count) for loss in outbox.losses()] == [("Damage", 50 - len(left))]
        outbox.recover()
        assert outbox.storage_error is None
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == ([], [])
        assert outbox.backlog("b") == (0, None)
        commit(outbox, "next")
        assert (drain(outbox, "a"), drain(outbox, "b")) == (["next"], ["next"])
        assert (outbox.backlog("a"), outbox.backlog("b")) == ((0, None), (0, None))
        assert outbox.meta("epoch") != epoch
        assert outbox.count("reporterseq") == 1
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        assert (outbox.meta("vm_id"), outbox.meta("watch")) == ("ours", "next")
        assert (drain(outbox, "a"), drain(outbox, "b")) == ([], [])


def test_a_commit_that_meets_damage_is_in_the_new_file(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, *map(str, range(50)), size=5000)
        drain(outbox)
        connection = outbox._storage.database._connection
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA shrink_memory")
        overwrite(tmp_path / "outbox.db", 4096, (tmp_path / "outbox.db").stat().st_size - 4096)
        assert commit(outbox, "next")
        assert outbox.storage_error is None
        image = kill(outbox, tmp_path, tmp_path / "image")
    assert len(list(tmp_path.glob("outbox.db.damaged-*"))) == 1
    check_recovered(image, "next")


# A long walk


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
