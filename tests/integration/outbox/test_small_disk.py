"""A disk that is full or read-only: notices go out all the same."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.outbox import rows as rows_module
from bridge.outbox.state_dir import StateFolder
from tests.support.disk import SmallDisk, small_disk
from tests.support.outbox import (
    TWO,
    check_recovered,
    commit,
    deliver,
    drain,
    kill,
    older_state,
    open_outbox,
    waiting,
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as mounted:
        yield mounted


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
        disk.fill()  # with the room that the log left
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
