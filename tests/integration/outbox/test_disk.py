"""A disk that fails, is full, slow or read-only: notices go out all the same, and are written once it works."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.delivery.queue import Queue
from bridge.errors import StateError
from bridge.outbox import outbox as outbox_module
from bridge.outbox import storage as storage_module
from bridge.outbox.rows import STATE, VM
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import TRIAL_BYTES, StateFolder, try_to_write
from tests.support.disk import SmallDisk, small_disk
from tests.support.outbox import (
    OTHER_TYPE,
    TWO,
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
    older_state,
    open_outbox,
    rows,
    waiting,
)
from tests.support.status import read_raw, write_raw


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


# Writing fails


def test_without_a_disk_to_write_to_a_sink_gets_what_waits_there_and_then_what_is_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        failing.fail()
        assert not commit(outbox, "4", "5")
        assert deliver(outbox, limit=1) == ["1"]
        for _ in range(3):
            outbox.recover()
        assert outbox.storage_error is not None
        assert outbox.storage_errors == 4
        assert deliver(outbox, limit=3) == ["2", "3", "4"]
        assert outbox.backlogs() == {"a": 1}
        failing.recover()
        outbox.recover()
        assert outbox.storage_error is None
        assert (waiting(outbox), outbox.losses()) == (["5"], [])
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.partition(";")[0] for text in messages] == [
        "the state store is unavailable",
        "the state store works again",
    ]
    check_recovered(tmp_path, "5")


def test_records_and_dead_letters_are_kept_while_the_disk_fails(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        outbox.commit([event("1"), event("2")], records={("kind", "old"): 1, ("occurrence", "f"): 3})
        dead_letter(outbox)
        failing.fail()
        outbox.commit([event("3")], records={("kind", "new"): 2})
        dead_letter(outbox, detail="401")
        assert [outbox.record("kind", key) for key in ("old", "new")] == [1, 2]
        assert outbox.record("occurrence", "f") == 3
        failing.recover()
        outbox.recover()
        assert outbox.dead_letter_counts() == {"a": 2}
    assert rows(tmp_path, "SELECT number, id, detail FROM dead_letter") == [(1, "1", "400"), (2, "2", "401")]
    with closing(open_outbox(tmp_path)) as outbox:
        assert [outbox.record("kind", key) for key in ("old", "new")] == [1, 2]
        assert waiting(outbox) == ["3"]


def test_the_memory_is_bounded_and_what_the_disk_has_as_well_is_dropped_first_without_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "MEMORY_BYTES", 300_000)
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, *map(str, range(10)), size=3000)
        failing.fail()
        commit(outbox, *map(str, range(10, 50)), size=3000)
        assert outbox.losses() == []
        commit(outbox, *map(str, range(50, 100)), size=3000)
        left = waiting(outbox)
        assert left == [str(number) for number in range(100 - len(left), 100)]
        assert losses_of(outbox) == [("SizeLimit", 90 - len(left))]
        failing.recover()
        outbox.recover()
        assert waiting(outbox) == [*map(str, range(10)), *left]
        assert outbox.backlog("a")[0] == 10 + len(left)


def test_only_so_much_of_a_large_file_is_copied_into_memory_and_the_rest_follows_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "COPY_BYTES", 10_000)
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, *map(str, range(10)), size=3000)
        outbox.commit([], records={(STATE, "large"): "x" * 20_000, ("kind", "key"): 1})
        failing.fail()
        commit(outbox, "new")
        assert drain(outbox) == ["0", "1", "2", "new"]
        assert (outbox.record(STATE, "large"), outbox.record("kind", "key")) == ("x" * 20_000, None)
        failing.recover()
        outbox.recover()
        assert drain(outbox) == [str(number) for number in range(3, 10)]
        assert outbox.record("kind", "key") == 1
    check_recovered(tmp_path)


def test_on_a_full_disk_what_waits_goes_out_at_once_however_much_is_remembered(tmp_path: Path) -> None:
    many = {("relayed", f"{number:064}"): {"at": "2026-01-01T00:00:00.000Z"} for number in range(20_000)}
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        outbox.commit([], records=many)
        failing.fail()
        commit(outbox, "2")
        assert drain(outbox) == ["1", "2"]
        assert outbox.record("relayed", f"{19_999:064}") is not None, "the newest can be recognised"
        assert outbox.record("relayed", f"{0:064}") is None, "to copy all would take long"


def test_while_nothing_can_be_read_new_events_go_out_and_the_older_ones_follow_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(tmp_path, "1", "2", "3", had=1)
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.commit([], records={("occurrence", "f"): 3})
    (tmp_path / "last-number").unlink()
    execute = Database.execute

    def fail(self: Database, name: str, *values: object) -> sqlite3.Cursor:
        if self.is_memory:
            return execute(self, name, *values)
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Database, "execute", fail)
        outbox = open_outbox(tmp_path)
        outbox.commit([event("4")], records={("occurrence", "f"): 1})
        commit(outbox, "5")
        assert outbox.storage_error is not None
        assert deliver(outbox, limit=1) == ["4"]
        outbox.recover()
        outbox.prune()
    outbox.recover(may_end=False)
    assert outbox.storage_error is not None
    for _ in range(2):
        with pytest.raises(StateError, match="the process ends, and the next start goes on with it"):
            outbox.recover()
    commit(outbox, "6")
    assert deliver(outbox, limit=1) == ["5"]  # while the process ends
    assert outbox.close()
    with closing(open_outbox(tmp_path)) as outbox:
        assert losses_of(outbox) == [("NotWritten", None)]
        commit(outbox, "7")
        assert drain(outbox) == ["2", "3", "6", "7"]
        assert outbox.record("occurrence", "f") == 3, "memory counted from zero"
    check_recovered(tmp_path)


def test_a_lock_of_another_program_is_waited_for_and_then_taken_for_a_slow_disk(tmp_path: Path) -> None:
    with (
        closing(open_outbox(tmp_path)) as outbox,
        closing(sqlite3.connect(tmp_path / "outbox.db", isolation_level=None)) as other,
    ):
        commit(outbox, "1")
        other.execute("BEGIN IMMEDIATE")
        assert not commit(outbox, "2")
        assert outbox.storage_error is not None
        assert "locked" in outbox.storage_error
        assert deliver(outbox) == ["1", "2"]
        other.execute("ROLLBACK")
        outbox.recover()
        assert outbox.storage_error is None
    check_recovered(tmp_path)


def test_a_stop_writes_what_only_memory_has_or_says_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, works_again in (("works again", True), ("fails", False)):
        with failing_disk() as failing:
            outbox = open_outbox(tmp_path / name)
            failing.fail()
            commit(outbox, "1", "2")
            if works_again:
                failing.recover()
            outbox.close()
            assert ("2 event(s) that were not delivered are lost" in caplog.text) is not works_again
        with closing(open_outbox(tmp_path / name)) as outbox:
            assert waiting(outbox) == (["1", "2"] if works_again else [])
            assert losses_of(outbox) == ([] if works_again else [("NotWritten", None)])


# Killed in memory mode: what was given is written down in place, also on a full disk


def test_a_kill_in_memory_mode_is_a_loss_unless_every_sink_has_what_only_memory_had(disk: SmallDisk) -> None:
    with closing(open_outbox(disk.state, sinks=TWO)) as outbox:
        commit(outbox, "1")
        disk.fill()
        number = 1
        while commit(outbox, str(number := number + 1), size=4000):
            pass
        drain(outbox, "a")
        lossy = shutil.copytree(disk.state, disk.path.parent / "lossy")
        drain(outbox, "b")
        harmless = shutil.copytree(disk.state, disk.path.parent / "harmless")
        disk.free()
    with closing(open_outbox(harmless, sinks=TWO)) as outbox:
        assert outbox.losses() == []
        commit(outbox, "new")
        assert outbox.pending("a", 100)[-1].seq == number + 1, "a number that only memory gave is given again"
    with closing(open_outbox(lossy, sinks=TWO)) as outbox:
        assert losses_of(outbox) == [("NotWritten", None)]
        commit(outbox, "new")
        assert outbox.pending("a", 100)[-1].seq == number + 1, "the numbering goes on above the lost ones"
        outbox.commit([event("report")], published=outbox.losses())
    with closing(open_outbox(lossy, sinks=TWO)) as outbox:
        assert outbox.losses() == [], "it is reported once"


# A full disk


def test_a_full_disk_holds_up_nothing_and_has_everything_in_order_once_there_is_room(disk: SmallDisk) -> None:
    with closing(open_outbox(disk.state, sinks=TWO)) as outbox:
        commit(outbox, "1", "2", "3")
        deliver(outbox, "a", limit=1)
        disk.fill()
        number = 3
        while commit(outbox, str(number := number + 1), size=9000):
            pass
        assert "full" in (outbox.storage_error or "")
        assert deliver(outbox, "a", limit=2) == ["2", "3"]
        expected = [str(one) for one in range(1, number + 1)]
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (expected[3:], expected)
        disk.free()
        outbox.recover()
        assert outbox.storage_error is None
        image = kill(outbox, disk.state, disk.path / "image")
    with closing(open_outbox(image, sinks=TWO)) as outbox:
        assert (drain(outbox, "a"), drain(outbox, "b")) == (expected[3:], expected)


@pytest.mark.parametrize("left", ["nothing", "an empty file", "a state", "the state of a killed process"])
def test_a_disk_that_is_full_at_the_start_gives_what_is_there_and_holds_up_nothing(
    disk: SmallDisk, left: str
) -> None:
    state = disk.state
    if left == "an empty file":
        state.mkdir()
        (state / "outbox.db").touch()
    elif left != "nothing":
        image = disk.path / "killed" if "killed" in left else None
        state = older_state(state, "1", "2", "3", had=1, image=image)
    disk.fill()
    with closing(open_outbox(state)) as outbox:
        assert drain(outbox) == (["2", "3"] if "state" in left else [])
        while commit(outbox, "4", size=4000):
            assert drain(outbox) == ["4"]
        assert outbox.storage_error is not None
        commit(outbox, "5", "6")
        assert deliver(outbox, limit=2) == ["4", "5"]
        disk.free()
        outbox.recover()
        assert [outbox.storage_error, *waiting(outbox)] == [None, "6"]
        commit(outbox, "7")
    check_recovered(state, "6", "7")


# A disk that can only be read


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_read_only_disk_gives_what_an_older_process_left_and_what_comes_after_it(
    disk: SmallDisk, killed: bool
) -> None:
    state = older_state(disk.state, "1", "2", "3", had=1, image=disk.path / "killed" if killed else None)
    disk.set_read_only(True)
    with closing(open_outbox(state)) as outbox:
        assert outbox.record("state", "watch") == "3"
        assert outbox.backlog("a")[0] == 2
        assert not commit(outbox, "4", "5")
        assert deliver(outbox, limit=3) == ["2", "3", "4"]
        outbox.recover()
        assert (waiting(outbox), outbox.storage_error is None) == (["5"], False)
        with pytest.raises(StateError, match="is held by"):
            open_outbox(state)
        disk.set_read_only(False)
        outbox.recover()
        assert (waiting(outbox), outbox.storage_error) == (["5"], None)
        commit(outbox, "6")
    check_recovered(state, "5", "6")


@pytest.mark.parametrize(("is_damaged", "moved"), [(False, "other-vm"), (True, "salvaged")])
def test_a_read_only_file_of_another_vm_or_a_damaged_one_is_moved_aside_later(
    disk: SmallDisk, is_damaged: bool, moved: str
) -> None:
    older_state(disk.state, "the other's")
    if is_damaged:
        (disk.state / "outbox.db").write_bytes(b"nonsense" * 4096)
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)) as outbox:
        if not is_damaged:
            outbox.replace({})
        commit(outbox, "1")
        assert deliver(outbox) == ["1"]
        disk.set_read_only(False)
        outbox.recover()
        assert outbox.storage_error is None
        assert len(list(disk.state.glob(f"outbox.db.{moved}-*"))) == 1
        commit(outbox, "2")
    check_recovered(disk.state, "2")


def test_of_another_vms_file_a_clone_delivers_nothing_while_it_can_only_be_read(disk: SmallDisk) -> None:
    vms = [{(STATE, VM): {"boot_id": "", "vm": {"vm_id": name}}} for name in ("original", "clone")]
    with closing(open_outbox(disk.state)) as outbox:
        commit(outbox, "the other's")
        outbox.commit([], records=vms[0])
    folder = StateFolder(disk.state)
    folder.keep({VM: vms[1][STATE, VM]})  # killed before it could move the file aside
    folder.release()
    disk.set_read_only(True)
    with closing(open_outbox(disk.state)) as outbox:
        assert (waiting(outbox), outbox.record(STATE, VM)) == ([], vms[1][STATE, VM])
        commit(outbox, "1")
        disk.set_read_only(False)
        outbox.recover()
        assert (waiting(outbox), outbox.record(STATE, VM)) == (["1"], vms[1][STATE, VM])
        assert ("OtherVm", None) in losses_of(outbox)
        assert len(list(disk.state.glob("outbox.db.other-vm-*"))) == 1


def test_a_trial_shows_a_full_disk_that_small_writes_do_not_and_leaves_a_notice_its_room(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", mebibytes=16) as disk,
        closing(open_outbox(disk.state)) as outbox,
    ):
        for number in range(100):
            commit(outbox, str(number), size=10_000)
        with closing(sqlite3.connect(disk.state / "outbox.db")) as other:
            other.execute("PRAGMA wal_checkpoint(RESTART)")  # from here on the log is overwritten
        before = sorted(disk.state.iterdir())
        try_to_write(disk.state)
        assert sorted(disk.state.iterdir()) == before
        disk.fill()
        assert all(outbox.commit([], records={("kind", "key"): number}) for number in range(60))
        with pytest.raises(OSError, match="only 0 KiB are free, expected 2048"):
            try_to_write(disk.state)
        os.truncate(disk.path / "filling", (disk.path / "filling").stat().st_size - 2 * TRIAL_BYTES + 4096)
        with pytest.raises(OSError, match="only 2044 KiB are free"):
            try_to_write(disk.state)  # beside a notice it might take the last room
        disk.free()
        try_to_write(disk.state)


def test_a_trial_notices_a_disk_that_does_not_say_how_much_is_free(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = SimpleNamespace(total=0, free=0)  # as of some network file systems, or below a quota
    monkeypatch.setattr("bridge.outbox.state_dir.shutil.disk_usage", lambda _: unknown)
    try_to_write(disk.path)
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        try_to_write(disk.path)
    assert [path.name for path in disk.path.iterdir()] == ["filling"]


def test_a_full_disk_still_says_in_the_status_that_it_is_full_and_a_read_only_one_that_a_process_runs(
    disk: SmallDisk,
) -> None:
    folder = StateFolder(disk.state)
    folder.acquire()
    write_raw(folder, {"storage_error": None})
    disk.fill()
    for number in range(3):
        write_raw(folder, {"storage_error": "full", "number": number})
        assert read_raw(folder) == {"storage_error": "full", "number": number}
    with pytest.raises(OSError, match="No space"):
        write_raw(folder, {"much": "x" * 100_000})
    folder.release()
    disk.set_read_only(True)
    folder.acquire()
    with pytest.raises(OSError, match="Read-only"):
        write_raw(folder, {"number": 3})
    assert StateFolder(disk.state).owner() is not None
    assert read_raw(folder) == {"storage_error": "full", "number": 2}
    folder.release()


# Stopped or killed without its state on the disk


def test_a_state_that_only_memory_had_on_a_full_disk_is_there_after_a_kill(disk: SmallDisk) -> None:
    big = {"document": [f"{number} {hash(number)}" for number in range(5000)]}
    outbox = open_outbox(disk.state)
    disk.fill()
    for text in ("first", "second"):
        outbox.commit([event(text)], records={(STATE, "watch"): text, (STATE, "big"): big, ("other", "x"): 1})
    assert outbox.storage_error is not None
    abandon(outbox)
    for is_full in (True, False, False):
        if not is_full and (disk.path / "filling").exists():
            disk.free()
        with closing(open_outbox(disk.state)) as again:
            assert (again.storage_error is None) is not is_full
            assert (again.record(STATE, "watch"), again.record(STATE, "big")) == ("second", big)
            assert again.record("other", "x") is None
            if is_full:
                again.storage.close()  # killed


@pytest.mark.posix("Windows removes no file that is open")
def test_a_state_folder_that_is_gone_at_the_stop_is_made_again_with_everything(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "state")
    commit(outbox, "1")
    shutil.rmtree(tmp_path / "state")
    commit(outbox, "2")
    assert outbox.close()
    check_recovered(tmp_path / "state", "1", "2")


def test_what_is_copied_of_a_large_file_into_memory_is_the_most_urgent_with_all_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "COPY_BYTES", 14_000)
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        documents = [event(str(number), type_=OTHER_TYPE, size=3000) for number in range(10)]
        outbox.commit([*documents, event("document", type_=OTHER_TYPE, subject="E", size=3000)])
        outbox.commit([event("notice", subject="E")])
        failing.fail()
        outbox.commit([event("new", subject="E")])
        assert drain(outbox)[-3:] == ["document", "notice", "new"]
        failing.recover()
        outbox.recover()
        assert drain(outbox) == [str(number) for number in range(3, 10)]
    check_recovered(tmp_path)


def test_what_was_sent_from_memory_without_an_answer_is_known_to_the_file(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        failing.fail()
        commit(outbox, "2")
        ready = Queue("a", outbox.storage).ready(outbox.now(), 1)
        assert not Queue("a", outbox.storage).take(ready.fresh, 1, is_noted=True).sent
        Queue("a", outbox.storage).note_failure(ready.fresh[0], due_at=0.0, is_asked=False)
        failing.recover()
        outbox.recover()
        assert outbox.storage_error is None
        again = Queue("a", outbox.storage).ready(outbox.now(), 1).again
        assert [head.tries for head in again] == [1]
        assert Queue("a", outbox.storage).take(again, 1, is_noted=True).sent == {1}
