"""The state folder: held by one process, readable only by its owner, of one VM and of a known version."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.outbox import sqlite as sqlite_module
from bridge.outbox.sqlite import Database, _migrations
from bridge.outbox.state_dir import StateFolder
from tests.support.outbox import commit, deliver, event, failing_disk, open_outbox, waiting

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


@pytest.mark.parametrize(
    "name", ["status.json", "status.json.new", "lock", "outbox.db", "mark-retry.1.request"]
)
def test_no_symbolic_link_in_the_folder_is_followed(tmp_path: Path, name: str) -> None:
    target = tmp_path / "target"
    target.write_text('{"not": "ours"}')
    target.chmod(0o644)
    folder = StateFolder(tmp_path / "state")
    folder.path.mkdir(mode=0o700)
    (folder.path / name).symlink_to(target)
    outbox = open_outbox(folder.path)
    commit(outbox, "E-1")
    with suppress(OSError):
        folder.write_status({"ours": True})
    with suppress(OSError):
        folder.request("mark-retry", 1)
    assert folder.read_status() != {"not": "ours"}
    outbox.close()
    assert (target.read_text(), mode(target)) == ('{"not": "ours"}', 0o644)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for name in ("status.json", "lock", "last-good"):
        os.mkfifo(tmp_path / name)
    assert folder.read_status() is None
    folder.holder()
    folder.read_last_good()


def test_a_link_of_another_user_to_a_folder_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "state"
    link.symlink_to(tmp_path / "target")
    StateFolder(link).acquire()
    (tmp_path / "target" / "lock").unlink()
    user = os.geteuid()
    if user == 0:
        os.lchown(link, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="another user's symbolic link"):
        StateFolder(link).acquire()
    assert not list((tmp_path / "target").iterdir())


# The lock


def test_a_second_process_is_refused_with_the_name_of_the_holder(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        with pytest.raises(
            StateError, match=rf"{re.escape(str(tmp_path))} is held by process {process.pid}:"
        ):
            open_outbox(tmp_path)
        assert StateFolder(tmp_path).holder() == f"process {process.pid}"


def test_a_folder_whose_holder_was_killed_is_free(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        process.kill()
        process.wait()
        assert StateFolder(tmp_path).holder() is None
        with closing(open_outbox(tmp_path)) as outbox:
            assert StateFolder(tmp_path).holder() == f"process {os.getpid()}"
            assert outbox.storage_error is None
    assert StateFolder(tmp_path).holder() is None


def test_who_is_refused_leaves_the_lock_to_its_holder_and_holds_nothing_himself(tmp_path: Path) -> None:
    refused = StateFolder(tmp_path)
    with holding(tmp_path):
        with pytest.raises(StateError):
            refused.acquire()
        assert StateFolder(tmp_path).holder() is not None
    refused.acquire()
    refused.acquire()
    refused.release()
    refused.release()


def test_who_may_not_open_the_state_does_not_keep_the_folder_from_others(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError):
        open_outbox(tmp_path)
    assert StateFolder(tmp_path).holder() is None


def test_the_holder_of_a_lock_without_a_name_is_another_process(tmp_path: Path) -> None:
    with holding(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(StateError, match="is held by another process"):
            open_outbox(tmp_path)


def test_a_lock_that_was_removed_is_taken_again(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    (tmp_path / "lock").unlink()
    folder.acquire()
    assert StateFolder(tmp_path).holder() == f"process {os.getpid()}"
    folder.release()


def test_a_folder_that_does_not_exist_has_no_holder(tmp_path: Path) -> None:
    assert StateFolder(tmp_path / "none").holder() is None


# Who may read it


@pytest.mark.usefixtures("generous_umask")
def test_the_folder_is_0700_and_its_files_0600_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "state" / "forward"
    with closing(open_outbox(path)) as outbox:
        commit(outbox, "1")
        StateFolder(path).write_status({"a": 1})
        assert mode(path) == 0o700
        assert {file.name: mode(file) for file in path.iterdir()} == dict.fromkeys(
            ("lock", "outbox.db", "outbox.db-wal", "status.json"), 0o600
        )


@pytest.mark.usefixtures("generous_umask")
def test_a_folder_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.mkdir(mode=0o755)
    (path / "outbox.db").touch(mode=0o644)
    with closing(open_outbox(path)) as outbox:
        commit(outbox, "1")
        assert (mode(path), mode(path / "outbox.db"), mode(path / "outbox.db-wal")) == (0o700, 0o600, 0o600)


@pytest.mark.usefixtures("generous_umask")
def test_files_that_are_moved_aside_stay_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with closing(open_outbox(path)) as outbox:
        kept_as = outbox.move_aside()
        assert (mode(kept_as), mode(path / "outbox.db")) == (0o600, 0o600)


# Versions


def schema(path: Path) -> list[tuple[str]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
        ).fetchall()


def test_a_file_from_nothing_is_brought_to_the_newest_version_and_opening_it_again_changes_nothing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "outbox.db"
    path.touch()
    schemas = []
    for _ in range(3):
        with closing(Database(path)) as database:
            assert database.execute("all-meta").fetchall() == []
        schemas.append(schema(path))
    assert schemas[0] == schemas[1] == schemas[2] != []
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (len(_migrations()),)


def test_a_migration_that_is_killed_halfway_is_done_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outbox.db"
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_module, "_migrations", lambda: [[*_migrations()[0], "NO SQL"]])
        with pytest.raises(sqlite3.OperationalError):
            Database(path)
    assert schema(path) == []
    Database(path).close()
    assert schema(path) != []


def test_a_state_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as newer:
        newer.execute("PRAGMA user_version = 99")
    before = (tmp_path / "outbox.db").read_bytes()
    with pytest.raises(StateError, match=r"newer imds-bridge \(its version is 99, this one knows \d+\)"):
        open_outbox(tmp_path)
    assert (tmp_path / "outbox.db").read_bytes() == before
    assert not list(tmp_path.glob("outbox.db.*"))


def test_only_the_process_that_holds_the_folder_migrates_it(tmp_path: Path) -> None:
    path = tmp_path / "outbox.db"
    path.touch()
    with pytest.raises(sqlite3.OperationalError, match="the next start migrates it"):
        Database(path, read_only=True)
    assert schema(path) == []


def test_a_path_with_characters_that_mean_something_in_an_address_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a?b#c%20d e"
    with closing(open_outbox(path)) as outbox:
        commit(outbox, "1")
    assert (path / "outbox.db").exists()
    with closing(open_outbox(path)) as outbox:
        assert waiting(outbox) == ["1"]


# Another VM's state


def test_a_copied_state_folder_is_independent_once_it_was_moved_aside(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.set_meta({"vm_id": "theirs"})
        outbox.commit([event("theirs")], meta={"watch": "theirs"}, occurrences={"f": 1})
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.meta("vm_id") == "theirs"
        outbox.move_aside()
        outbox.set_meta({"vm_id": "ours"})
        commit(outbox, "1")
        assert deliver(outbox) == ["1"]
        assert outbox.occurrences("f") == 0
    with closing(open_outbox(tmp_path)) as outbox:
        assert (outbox.meta("vm_id"), waiting(outbox)) == ("ours", [])


# The status file


def test_the_status_is_what_was_last_written(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.read_status() is None
    for status in ({"a": "x" * 40_000}, {"a": "\u00e9"}):
        folder.write_status(status)
        assert folder.read_status() == status
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_an_invalid_status_file_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "status.json").write_bytes(content)
    assert StateFolder(tmp_path).read_status() is None


def test_a_status_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.write_status({"number": 1})
    with failing_disk() as disk:
        disk.fail()
        with pytest.raises(OSError, match="too large"):
            folder.write_status({"number": 2})
    assert folder.read_status() == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_a_folder_that_cannot_be_looked_into_is_looked_into_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, pattern: str) -> Iterator[Path]:
        raise OSError(errno.EMFILE, f"{path}/{pattern}")

    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        with monkeypatch.context() as patched:
            patched.setattr(Path, "glob", fail)
            outbox.recover()
        assert waiting(outbox) == ["1"]
        assert outbox.storage_error is None


def test_a_request_for_an_impossible_number_is_ignored(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.request("mark-retry", 10**18)
    folder.request("mark-retry", 7)
    assert folder.requests() == [("mark-retry", 7)]
