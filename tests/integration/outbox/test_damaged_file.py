"""A damaged file is moved aside, and every readable row is in a new one."""

from __future__ import annotations

import errno
import gc
import os
import random
import sqlite3
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.clock import MovedClock
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


def test_damage_shows_also_after_the_dates_have_been_changed(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        for name in ("1", "2", "3"):
            commit(outbox, name, size=6000)
    break_a_body(tmp_path / "outbox.db")
    long_after = MovedClock()
    long_after.advance(86_400)
    with closing(open_outbox(tmp_path, clock=long_after)) as outbox:
        long_after.jump(3600)
        outbox.shift(3600)
        assert waiting(outbox) == ["2", "3"]
        assert [(loss.reason, loss.count) for loss in outbox.losses()] == [("Damage", 1)]


class Killed(BaseException):
    """The process does not come further than this."""


@pytest.mark.parametrize("renames", range(4))
def test_a_kill_while_a_damaged_file_is_moved_aside_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    outbox = open_outbox(tmp_path / "running")
    commit(outbox, "1", "2", "3", size=6000)
    outbox._storage.database._empty_log()
    commit(outbox, "4", "5", "6", size=6000)
    damaged = kill(outbox, tmp_path / "running", tmp_path / "killed")
    overwrite(damaged / "outbox.db-wal", 48, 8)  # the checksum of the first page in the log
    left, rename = renames, Path.replace

    def rename_or_be_killed(path: Path, target: Path | str) -> Path:
        nonlocal left
        if ".db" in path.name and not left:
            raise Killed
        left -= ".db" in path.name
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", rename_or_be_killed)
    with pytest.raises(Killed):
        open_outbox(damaged)
    gc.collect()  # nothing closes the new file, which is locked, in the place of the kernel
    monkeypatch.undo()
    with closing(open_outbox(damaged)) as outbox:
        assert waiting(outbox) == ["1", "2", "3", "4", "5", "6"]
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]
    assert not list(damaged.glob("*unsalvaged*"))


@pytest.mark.parametrize("step", ["transfer.salvage", "storage.fill_file", "storage.is_new"])
def test_a_kill_while_a_damaged_file_is_salvaged_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    older_state(tmp_path, *map(str, range(20)), had=5)
    overwrite(tmp_path / "outbox.db", 0, 100)

    def be_killed(*_: object, **__: object) -> None:
        raise Killed

    for _ in range(2):
        monkeypatch.setattr(f"bridge.outbox.{step}", be_killed)
        with pytest.raises(Killed):
            open_outbox(tmp_path)
        monkeypatch.undo()
    with closing(open_outbox(tmp_path)) as outbox:
        assert drain(outbox) == [*map(str, range(5, 20))]
        assert [loss.reason for loss in outbox.losses()] == ["Damage"]
    check_recovered(tmp_path)


def test_a_large_file_is_salvaged_in_little_memory(tmp_path: Path) -> None:
    older_state(tmp_path, *map(str, range(800)), size=10_000)
    overwrite(tmp_path / "outbox.db", 0, 100)
    tracemalloc.start()
    try:
        with closing(open_outbox(tmp_path)) as outbox:
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert drain(outbox) == [*map(str, range(800))]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * 1024 * 1024


def test_a_place_that_the_disk_cannot_read_costs_only_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(tmp_path, *map(str, range(50)), size=3000)
    overwrite(tmp_path / "outbox.db", 0, 100)
    read = os.read

    def fail_at_a_page(file: int, size: int) -> bytes:
        start = os.lseek(file, 0, os.SEEK_CUR)
        if start <= 20 * 4096 < start + size:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size)

    monkeypatch.setattr("os.read", fail_at_a_page)
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.storage_error is None
        assert len(set(waiting(outbox)) & {*map(str, range(50))}) in (48, 49)
        assert [loss.count for loss in outbox.losses()] == [50 - len(waiting(outbox))]


def test_no_room_for_the_rows_of_a_damaged_file_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(tmp_path, "1", "2", size=3000)
    overwrite(tmp_path / "outbox.db", 0, 100)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with closing(open_outbox(tmp_path)) as outbox:
        assert "needed to salvage" in str(outbox.storage_error)
        commit(outbox, "3")
        monkeypatch.undo()
        outbox.recover()
        assert outbox.storage_error is None
        assert waiting(outbox) == ["1", "2", "3"]


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
