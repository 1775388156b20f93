"""The state folder: held by one process, readable only by its owner, of one VM and of a known version."""

from __future__ import annotations

import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.outbox.state_dir import StateFolder
from tests.support.outbox import commit, failing_disk, open_outbox, waiting
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


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


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


@pytest.mark.posix("Windows has access lists instead of modes")
@pytest.mark.usefixtures("generous_umask")
def test_the_folder_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    for path in (tmp_path / "new", tmp_path / "old"):
        if path.name == "old":
            path.mkdir(mode=0o755)
        with closing(open_outbox(path)) as outbox:
            commit(outbox, "1")
            assert mode(path) == 0o700


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
