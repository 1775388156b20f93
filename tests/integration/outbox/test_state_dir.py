"""The state folder: held by one process, closed to others; and what `imds-bridge outbox` does beside that process."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge.errors import StateError, UsageError
from bridge.outbox import inspect
from bridge.outbox.outbox import EXPIRED
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from tests.support.clock import MovedClock
from tests.support.outbox import (
    TWO,
    commit,
    dead_letter,
    deliver,
    failing_disk,
    older_state,
    open_outbox,
    waiting,
)
from tests.support.status import read_raw, write_raw

HOLD = """
import sys
from pathlib import Path
from bridge.outbox.state_dir import StateFolder

folder = StateFolder(Path(sys.argv[1]))
folder.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the folder."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


# The lock


def test_a_second_process_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        reason = rf"{re.escape(str(tmp_path))} is held by process {process.pid}:"
        with pytest.raises(StateError, match=reason):
            open_outbox(tmp_path)
        assert StateFolder(tmp_path).owner() == f"process {process.pid}"
        (tmp_path / "lock").write_text("")
        with pytest.raises(StateError, match="is held by another process"):
            open_outbox(tmp_path)
        (tmp_path / "lock").write_text("1 4026000000")  # as process 1 of a container writes it
        with pytest.raises(StateError, match=r"is held by process 1 of another container \(PID namespace\):"):
            open_outbox(tmp_path)
        (tmp_path / "lock").write_text(f"{process.pid:<20}")  # as the version before does
        assert StateFolder(tmp_path).owner() == f"process {process.pid}"


def test_who_is_refused_leaves_the_lock_to_its_holder_until_that_is_killed(tmp_path: Path) -> None:
    refused = StateFolder(tmp_path)
    assert refused.owner() is None
    with holding(tmp_path) as process:
        with pytest.raises(StateError):
            refused.acquire()
        assert StateFolder(tmp_path).owner() is not None
        process.kill()
        process.wait()
        assert StateFolder(tmp_path).owner() is None
    with closing(open_outbox(tmp_path)) as outbox:
        assert StateFolder(tmp_path).owner() == f"process {os.getpid()}"
        assert outbox.storage_error is None
    for act in (refused.acquire, refused.acquire, refused.release, refused.release):
        act()
    assert StateFolder(tmp_path).owner() is None


def test_who_may_not_open_the_state_does_not_keep_the_folder_from_others(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError):
        open_outbox(tmp_path)
    assert StateFolder(tmp_path).owner() is None


@pytest.mark.posix("Windows removes no file that is open")
def test_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    (tmp_path / "lock").unlink()
    folder.acquire()
    assert StateFolder(tmp_path).owner() == f"process {os.getpid()}"
    folder.release()


# Who may read it


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.posix("Windows has access lists instead of modes")
@pytest.mark.usefixtures("generous_umask")
def test_the_folder_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            path.mkdir(mode=0o755)
        with closing(open_outbox(path)) as outbox:
            commit(outbox, "1")
            assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_a_path_with_characters_that_mean_something_in_an_address_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / ("b#c%20d e" if sys.platform == "win32" else "a?b#c%20d e")
    with closing(open_outbox(path)) as outbox:
        commit(outbox, "1")
    assert (path / "outbox.db").exists()
    with closing(open_outbox(path)) as outbox:
        assert waiting(outbox) == ["1"]


# The status file


def test_the_status_is_what_was_last_written(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.read_status() is None
    for status in ({"a": "x" * 40_000}, {"a": "\u00e9"}):
        write_raw(folder, status)
        assert read_raw(folder) == status
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
@pytest.mark.usefixtures("without_collection")
def test_an_invalid_status_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert StateFolder(tmp_path).read_status() is None


def test_a_status_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    write_raw(folder, {"number": 1})
    with failing_disk() as disk:
        disk.fail(0)
        with pytest.raises(OSError, match="too large"):
            write_raw(folder, {"number": 2})
    assert read_raw(folder) == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


# Moved aside


def test_a_move_aside_that_fails_half_way_leaves_the_database_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {tmp_path / f"outbox.db{suffix}": suffix or "database" for suffix in ("", "-wal", "-shm")}
    for file, text in files.items():
        file.write_text(text)
    replace = Path.replace

    def refuse(source: Path, target: Path) -> Path:
        if source.name == "outbox.db":
            raise PermissionError("it is used by another process")
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(PermissionError):
            StateFolder(tmp_path).move_aside("damaged")
    assert {file: file.read_text() for file in tmp_path.iterdir()} == files
    assert StateFolder(tmp_path).move_aside("damaged").read_text() == "database"
    assert not any(file.exists() for file in files)


# The file of a process that runs beside

OTHER_PROCESS = """
import json, sys
from pathlib import Path
from bridge.outbox import inspect
from bridge.outbox.state_dir import StateFolder

path, calls = sys.argv[1:]
folder = StateFolder(Path(path))
print(json.dumps([getattr(inspect, name)(folder, *arguments) for name, *arguments in json.loads(calls)]))
"""


def beside(path: Path, *calls: Sequence[object]) -> object:
    """Call functions of the module in another process."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), json.dumps(calls)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """Return a state folder; its name says whose it is."""
    folder = tmp_path / "forward"
    folder.mkdir()
    return folder


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[KeptOutbox]:
    """Give an outbox in use: sink a has two events that wait and two dead letters, sink b everything."""
    with closing(open_outbox(tmp_path, sinks=TWO)) as made:
        commit(made, "1", "2", "3", "4")
        dead_letter(made)
        made.acknowledge("a", made.pending("a", 1), dead=(EXPIRED, "too old"))
        yield made


def test_what_waits_is_listed_oldest_first_with_its_age_and_the_sinks_last_error(
    tmp_path: Path, outbox: KeptOutbox
) -> None:
    folder = StateFolder(tmp_path)
    write_raw(folder, {"sinks": {"b": {"last_error": "503"}}})
    now = datetime.fromtimestamp(MovedClock().wall() + 90, UTC)
    rows = inspect.waiting(folder, None, 3, now)
    names = ("sink", "seq", "subject", "age_seconds", "last_error")
    assert [tuple(row[name] for name in names) for row in rows] == [
        ("b", 1, "1", 90, "503"),
        ("b", 2, "2", 90, "503"),
        ("a", 3, "3", 90, None),
    ]
    assert [row["seq"] for row in inspect.waiting(folder, "a", 9, now)] == [3, 4]
    assert outbox.storage_error is None


def test_a_dead_letter_that_is_marked_or_dropped_beside_a_process_is_sent_again_or_gone(
    tmp_path: Path, outbox: KeptOutbox
) -> None:
    assert beside(tmp_path, ("retry", [1, 99]), ("drop", [2])) == [1, 1]
    outbox.recover()
    assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["3", "4", "1"], ["1", "2", "3", "4"])
    assert (outbox.dead_letter_counts(), outbox.backlogs()) == ({}, {"a": 3, "b": 4})


def test_a_dead_letter_that_is_marked_while_no_process_runs_is_sent_after_the_next_start(
    tmp_path: Path, outbox: KeptOutbox
) -> None:
    outbox.close()
    inspect.retry(StateFolder(tmp_path), [2])
    with closing(open_outbox(tmp_path, sinks=TWO)) as again:
        assert waiting(again) == ["3", "4", "2"]


def test_what_waits_can_be_dropped_and_moved_beside_a_process(tmp_path: Path, outbox: KeptOutbox) -> None:
    deliver(outbox, "b", limit=1)
    assert beside(tmp_path, ("drop_waiting", "a"), ("move", "b", "a")) == [2, 3]
    outbox.recover()
    assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["2", "3", "4"], [])
    assert outbox.backlogs() == {"a": 3, "b": 0}


def test_a_large_change_lets_the_process_write_in_between(
    tmp_path: Path, outbox: KeptOutbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "CHANGED_ROWS", 2)
    assert inspect.move(StateFolder(tmp_path), "b", "c") == 4
    outbox.recover()
    assert outbox.left_sinks() == {"c": 4}


def test_an_event_is_shown_by_its_id_and_by_its_number_also_as_a_dead_letter(
    tmp_path: Path, outbox: KeptOutbox
) -> None:
    folder = StateFolder(tmp_path)
    assert inspect.show(folder, "4")["id"] == "4"
    for sink in TWO:
        deliver(outbox, sink)
    outbox.retain_seconds = -1
    outbox.prune()
    assert inspect.newest(folder, 10) == []
    assert inspect.show(folder, "2")["id"] == "2"
    with pytest.raises(UsageError, match="no such event is stored"):
        inspect.show(folder, "4")


@pytest.mark.parametrize("killed", [False, True])
def test_looking_changes_nothing_that_a_process_left(tmp_path: Path, killed: bool) -> None:
    path = older_state(tmp_path / "state", "1", "2", image=tmp_path / "image" if killed else None)

    def contents() -> list[bytes]:
        return [file.read_bytes() for file in (path / "outbox.db", path / "outbox.db-wal") if file.exists()]

    before = contents()
    assert [row["id"] for row in inspect.newest(StateFolder(path), 10)] == ["1", "2"]
    assert contents() == before
    assert len(before) == 1 + killed
    with closing(open_outbox(path)) as outbox:
        assert (waiting(outbox), outbox.losses()) == (["1", "2"], [])


def test_a_file_that_cannot_be_used_is_said_and_left_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / "outbox.db"
    database.write_bytes(b"no database" * 1000)
    for use in (lambda folder: inspect.newest(folder, 1), lambda folder: inspect.drop(folder, [1])):
        with pytest.raises(StateError, match="file is not a database"):
            use(StateFolder(tmp_path))
    assert database.read_bytes() == b"no database" * 1000


def test_a_folder_that_may_not_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(StateError, match="you may not read it; try as root or as its owner"):
        inspect.newest(StateFolder(tmp_path), 1)
