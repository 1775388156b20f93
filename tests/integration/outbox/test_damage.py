"""A state that is damaged, went back or is gone: the outbox starts, publishes, and reports one loss."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bridge.delivery.queue import Queue
from bridge.errors import StateError, Stopped
from bridge.events.filters import Filter
from bridge.outbox import file_storage as storage_module
from bridge.outbox import inspect
from bridge.outbox.rows import OWED, STATE, Ledger
from bridge.outbox.sqlite import VERSION, Database, log_of
from bridge.outbox.state_dir import StateFolder
from tests.support.clock import MovedClock
from tests.support.only import only
from tests.support.outbox import (
    OTHER_TYPE,
    TWO,
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
    send,
    waiting,
)

TRIALS = int(os.environ.get("TEST_DAMAGE_TRIALS", "30"))
SECTOR_BYTES = 512
SIZES = (0, 0, 200, 1200, 3000, 3900, 4100, 9000)
SINKS = {"a": (Filter(), True)}
DAMAGE, GONE = [("Damage", None)], [("StateFolderGone", None)]


# What a start makes of the files that it finds

TEN = [str(number) for number in range(1, 11)]
Change = Callable[[Path], object]


def other_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[18:20] = 9, 1  # the versions of the format that a writer and a reader must know
    file.write_bytes(content)


def remove_all(file: Path) -> None:
    for one in file.parent.iterdir():
        one.unlink()


def numbers(text: str) -> Change:
    """Return what puts this text into the file of the last numbers."""
    return lambda file: (file.parent / "last-number").write_text(text)


def trace(name: str, *empty: str) -> Change:
    """Return what leaves a file that a process without a database had, and empty files."""

    def change(file: Path) -> None:
        remove_all(file)
        for one in empty:
            (file.parent / one).touch()
        (file.parent / name).write_text("2026-11-23T00:00:00.000Z" if name == "last-good" else "{}")

    return change


@pytest.mark.parametrize(
    ("killed", "change", "found", "number"),
    [
        pytest.param(killed, change, found, number, id=f"{name}{' after a kill' if killed else ''}")
        for name, killed, change, *found, number in [
            ("deleted", False, Path.unlink, GONE, [], 11),
            ("deleted", True, Path.unlink, GONE, [], 11),
            ("deleted with its log", True, lambda file: [*map(Path.unlink, _with_log(file))], GONE, [], 11),
            ("emptied", False, lambda file: file.write_bytes(b""), GONE, [], 11),
            ("emptied", True, lambda file: file.write_bytes(b""), GONE, [], 11),
            ("without its log", True, lambda file: log_of(file).unlink(), DAMAGE, TEN[:3], 11),
            ("cut to a page", False, lambda file: os.truncate(file, 4096), DAMAGE, [], 11),
            ("another header", False, other_header, DAMAGE, TEN, 11),
            ("no number", False, numbers(""), [], TEN, 11),
            ("letters for the number", False, numbers("x" * 20), [], TEN, 11),
            ("a negative number", False, numbers("-1"), [], TEN, 11),
            ("thousands of digits", False, numbers("9" * 4000), [], TEN, 11),
            ("a number above SQLite's", False, numbers(f"{10**19:020d} {1:020d}"), DAMAGE, TEN, 11),
            ("a second number above SQLite's", False, numbers(f"{1:020d} {10**19:020d}"), DAMAGE, TEN, 11),
            ("a status alone", False, trace("status.json"), GONE, [], 1),
            ("a status", False, trace("status.json", "outbox.db", "last-number"), GONE, [], 1),
            ("a last answer alone", False, trace("last-good"), GONE, [], 1),
            ("a last answer", False, trace("last-good", "outbox.db", "last-number"), GONE, [], 1),
        ]
    ],
)
def test_a_state_that_is_gone_or_went_back_is_one_loss_and_its_numbers_are_not_given_again(
    tmp_path: Path, killed: bool, change: Change, found: list[object], number: int
) -> None:
    path = older_state(tmp_path / "state", *TEN[:3])
    outbox = open_outbox(path)
    commit(outbox, *TEN[3:])
    if killed:
        path = kill(outbox, path, tmp_path / "killed")
    outbox.close()
    change(path / "outbox.db")
    for _ in range(2):  # a kill before it is published does not forget it
        with closing(open_outbox(path)) as outbox:
            assert [losses_of(outbox), waiting(outbox)] == found
            assert outbox.storage_error is None
    with closing(open_outbox(path)) as outbox:
        outbox.commit([event("report")], published=outbox.losses())
        assert outbox.pending("a", 20)[-1].seq == number
    with closing(open_outbox(path)) as outbox:
        assert outbox.losses() == []


def _with_log(file: Path) -> Iterator[Path]:
    return file.parent.glob("outbox.db*")


@pytest.mark.parametrize("fails", [False, True], ids=["the disk works", "the disk fails"])
def test_an_old_copy_of_the_database_is_a_loss(tmp_path: Path, fails: bool) -> None:
    path = older_state(tmp_path / "state", "1", "2")
    shutil.copy(path / "outbox.db", tmp_path / "copy.db")
    with closing(open_outbox(path)) as outbox:
        deliver(outbox)
        commit(outbox, "3")
    shutil.copy(tmp_path / "copy.db", path / "outbox.db")
    with failing_disk() as failing:
        if fails:
            failing.fail()
        outbox = open_outbox(path)
    with closing(outbox):
        assert (outbox.storage_error is not None) is fails
        assert (losses_of(outbox), waiting(outbox)) == (DAMAGE, ["1", "2"])
        commit(outbox, "4")
        assert outbox.pending("a", 20)[-1].seq == 4


def test_a_process_that_never_committed_an_event_has_lost_none(tmp_path: Path) -> None:
    open_outbox(tmp_path).close()
    (tmp_path / "status.json").write_text("{}")
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.losses() == []


@pytest.mark.posix("Windows removes no file that is open")
def test_a_state_folder_that_is_removed_in_use_is_made_again_with_what_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "state"
    with closing(open_outbox(path, sinks=TWO)) as outbox:
        commit(outbox, "1", "2")
        dead_letter(outbox, "b")
        shutil.rmtree(path)
        outbox.recover()
        assert "the state folder was removed while in use" in str(vars(caplog.records[0]))
        assert (outbox.storage_error, losses_of(outbox)) == (None, GONE)
        with pytest.raises(StateError, match="is held by"):
            open_outbox(path)
        commit(outbox, "3")
    with closing(open_outbox(path, sinks=TWO)) as outbox:
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["1", "2", "3"], ["2", "3"])


# Damaged


def overwrite(file: Path, at: int, size: int) -> None:
    """Fill a part of a file with noise."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(random.Random(1).randbytes(size))  # noqa: S311 - it is to be repeatable


def flip(path: Path, text: bytes) -> None:
    """Change a bit of a text in the database, which SQLite does not notice."""
    content = (path / "outbox.db").read_bytes()
    assert text in content
    (path / "outbox.db").write_bytes(content.replace(text, bytes([text[0] ^ 1]) + text[1:]))


def test_damage_that_shows_while_the_process_runs_ends_it_and_the_next_start_goes_on(tmp_path: Path) -> None:
    older_state(tmp_path, "1", "two", "3")
    flip(tmp_path, b'"Filling"')
    outbox = open_outbox(tmp_path)
    with pytest.raises(StateError, match="the state is damaged"):
        outbox.pending("a", 10)
    with pytest.raises(Stopped):
        commit(outbox, "4")
    outbox.close()
    with closing(open_outbox(tmp_path)) as outbox:
        assert (losses_of(outbox), waiting(outbox)) == (DAMAGE, [])
        commit(outbox, "5")
        assert outbox.pending("a", 10)[0].seq == 4
    assert len(list(tmp_path.glob("outbox.db.salvaged-*[0-9]"))) == 1


def test_of_a_damaged_row_only_that_row_is_lost(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path, sinks=TWO)
    outbox.commit(
        [event("1"), event("two"), event("3")], records={("kind", "key"): "kept", ("kind", "x"): "bad"}
    )
    deliver(outbox, "b", limit=2)
    dead_letter(outbox, "b")
    outbox.close()
    flip(tmp_path, b'"subject": "two"')
    flip(tmp_path, b'"bad"')
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox, pytest.raises(StateError):
        waiting(outbox)
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["1", "3"], [])
        assert [outbox.record("kind", key) for key in ("key", "x")] == ["kept", None]
        assert (outbox.dead_letter_counts(), losses_of(outbox)) == ({"b": 1}, DAMAGE)
        assert outbox.backlogs() == {"a": 2, "b": 0}


def test_a_file_of_another_program_or_of_an_unreleased_version_is_moved_aside(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as other:
        other.execute(
            "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, checksum INTEGER NOT NULL)"
        )
    with closing(open_outbox(tmp_path)) as outbox:
        assert (losses_of(outbox), outbox.storage_error) == (DAMAGE, None)
        assert commit(outbox, "1")
    assert len(list(tmp_path.glob("outbox.db.salvaged-*[0-9]"))) == 1


def test_where_it_cannot_be_read_what_waits_every_sink_gets_what_is_there(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.commit([event(str(number)) for number in range(2000)])
        deliver(outbox, limit=1990)
    page = only(rows(tmp_path, "SELECT rootpage FROM sqlite_master WHERE name = 'waiting'"))[0]
    overwrite(tmp_path / "outbox.db", (page - 1) * 4096, 4096)
    with closing(open_outbox(tmp_path)) as outbox:
        assert len(waiting(outbox, limit=3000)) == 2000
        assert losses_of(outbox) == DAMAGE


def test_a_salvage_reads_a_table_from_both_ends(tmp_path: Path) -> None:
    older_state(tmp_path, *map(str, range(300)), size=3000)
    file = tmp_path / "outbox.db"
    overwrite(file, file.stat().st_size // 2, 20_000)
    with closing(open_outbox(tmp_path)) as outbox:
        left = waiting(outbox)
        assert {"0", "1", "298", "299"} <= set(left)
        assert 200 < len(left) < 300
        assert losses_of(outbox) == DAMAGE


@pytest.mark.parametrize("is_read", [False, True], ids=["at the start", "in use"])
def test_a_file_that_another_program_holds_open_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """As on Windows, where a backup that reads the file keeps others from writing to it; it may have just ended."""
    path = older_state(tmp_path / "state", "1", "2", "3", image=tmp_path / "killed")
    outbox = open_outbox(path) if is_read else None
    begin = Database.transaction

    def refuse_to_write(database: Database, **how: Any) -> Any:
        if database.is_memory:
            return begin(database, **how)
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorcode = sqlite3.SQLITE_READONLY
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Database, "transaction", refuse_to_write)
        outbox = outbox or open_outbox(path)
        assert not commit(outbox, "4")
        assert deliver(outbox, limit=1) == ["1"]
    with closing(outbox):
        outbox.recover()
        assert (outbox.storage_error, outbox.losses()) == (None, [])
        assert waiting(outbox) == ["2", "3", "4"]
    assert not list(path.glob("outbox.db.*"))


def test_a_damaged_file_that_cannot_be_renamed_is_used_by_nobody_and_moved_aside_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older_state(tmp_path, "1", "2", "3")
    flip(tmp_path, b'"subject": "2"')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=PermissionError(errno.EACCES, "it is in use")))
        outbox = open_outbox(tmp_path)
        assert waiting(outbox) == []
        assert outbox.storage_error is not None
        commit(outbox, "4")
        outbox.recover()
        assert waiting(outbox) == ["4"]
    with closing(outbox):
        outbox.recover()
        assert (waiting(outbox), losses_of(outbox)) == (["1", "3", "4"], DAMAGE)


@pytest.mark.parametrize("step", ["moved", "copied", "renamed"])
def test_a_kill_while_a_damaged_file_is_replaced_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "dead", "1", "2", "3")
        dead_letter(outbox)
    flip(tmp_path, b'"subject": "2"')

    class Killed(BaseException):
        pass

    def be_killed(*_: object, **__: object) -> None:
        raise Killed

    with closing(open_outbox(tmp_path)) as outbox, pytest.raises(StateError):
        waiting(outbox)
    with monkeypatch.context() as patch:
        if step == "renamed":
            patch.setattr(StateFolder, "note_salvaged", be_killed)
        else:
            owner, name = (storage_module, "salvage") if step == "moved" else (Ledger, "last_seq")
            patch.setattr(owner, name, be_killed)
        with pytest.raises(Killed):
            open_outbox(tmp_path)
    with closing(open_outbox(tmp_path)) as outbox:
        assert (losses_of(outbox), waiting(outbox)) == (DAMAGE, ["1", "3"])
        assert outbox.dead_letter_counts() == {"a": 1}


def test_a_newer_state_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    older_state(tmp_path, "1")
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    before = (tmp_path / "outbox.db").read_bytes()
    with pytest.raises(StateError, match="written by a newer imds-bridge"):
        open_outbox(tmp_path)
    assert (tmp_path / "outbox.db").read_bytes() == before
    assert not list(tmp_path.glob("outbox.db.*"))


def test_the_state_of_another_vm_is_moved_aside_and_what_waited_there_is_a_loss(tmp_path: Path) -> None:
    older_state(tmp_path, "1", "2", had=1)
    with closing(open_outbox(tmp_path)) as outbox:
        target = outbox.replace({})
        assert target.name.startswith("outbox.db.other-vm-")
        loss = only(outbox.losses())
        assert (loss.reason, loss.count, loss.sink, loss.oldest is not None) == ("OtherVm", 1, "a", True)
        assert (waiting(outbox), outbox.previous_run, outbox.backlogs()) == ([], (None, None), {"a": 0})
        commit(outbox, "3")
        assert outbox.pending("a", 5)[0].seq == 1
        with closing(open_outbox(shutil.copytree(tmp_path, tmp_path / "copy"))) as copied:
            assert waiting(copied) == ["3"]
    with closing(Database(target, mode="read")) as aside:
        assert aside.execute("count-waiting").fetchall() == [("a", 1)]


@pytest.mark.parametrize("step", ["before", "after"])
def test_a_kill_while_the_state_of_another_vm_is_moved_loses_neither_what_is_owed_nor_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    older_state(tmp_path / "state", "1", had=0)
    outbox = open_outbox(tmp_path / "state")
    move = StateFolder.move_aside

    def killed(folder: StateFolder, why: str) -> None:
        if step == "after":
            move(folder, why)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "move_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            outbox.replace({OWED: ["a program"]})
    with closing(open_outbox(kill(outbox, tmp_path / "state", tmp_path / "image"))) as restarted:
        if step == "before":  # the next start finds another VM's state once more
            restarted.replace({OWED: restarted.record(STATE, OWED)})
        assert restarted.record(STATE, OWED) == ["a program"]
        loss = only(restarted.losses())
        assert (loss.reason, loss.count, loss.sink) == ("OtherVm", 1, "a")
        assert waiting(restarted) == []


# Of versions 1 and 2: it is brought up to date once, and until then the command line and memory read it


NOTICE_FIRST = ["notice", "document 2", "document 3"]
WAITING_1 = """
CREATE TABLE waiting (sink TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (sink, seq)) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq);
CREATE INDEX event_by_age ON event (stored_at);
"""
WAITING_2 = """
CREATE TABLE waiting (
    sink TEXT NOT NULL, seq INTEGER NOT NULL, key INTEGER NOT NULL, urgency REAL, state INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, due_at REAL, is_asked INTEGER NOT NULL DEFAULT 0,
    is_sent INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (key, sink, seq)
) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq, sink);
CREATE INDEX waiting_heads ON waiting (sink, state, urgency, seq) WHERE state <> 7;
CREATE INDEX waiting_by_due ON waiting (sink, due_at) WHERE due_at IS NOT NULL;
CREATE TRIGGER waiting_next AFTER DELETE ON waiting WHEN OLD.state < 7 BEGIN
    UPDATE waiting SET state = 0, urgency = COALESCE(OLD.urgency, urgency)
    WHERE key = OLD.key AND sink = OLD.sink
    AND seq = (SELECT MIN(seq) FROM waiting WHERE key = OLD.key AND sink = OLD.sink);
END;
"""
# What sink a waits for by keys of its own numbers, the first of each sent without an answer, and often.
INSERT_2 = "INSERT INTO waiting VALUES (?1, ?2, ?2 % 2, NULL, IIF(?2 < 3, 4, 7), 9, 9e9, 0, ?2 < 3)"


@pytest.fixture(params=[1, 2])
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Leave a state of an earlier version, whose sink a has had one of four events, and b none."""
    first, *others = [event(f"document {number}", type_=OTHER_TYPE, subject="vm") for number in (1, 2, 3)]
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        outbox.commit([first])
        commit(outbox, "notice")
        outbox.commit(others)
        deliver(outbox, "a", limit=1)
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as database:
        kept = database.execute("SELECT sink, seq FROM waiting").fetchall()
        tables, insert = {1: (WAITING_1, "INSERT INTO waiting VALUES (?, ?)"), 2: (WAITING_2, INSERT_2)}[
            request.param
        ]
        database.executescript(f"DROP TABLE waiting; {tables} PRAGMA user_version = {request.param};")
        database.executemany(insert, kept)
        database.commit()
    return tmp_path


def version(path: Path) -> int:
    return int(rows(path, "PRAGMA user_version")[0][0])


def sent(path: Path) -> list[list[str]]:
    """Return what sinks a and b are sent, in their order."""
    with closing(open_outbox(path, sinks=TWO)) as outbox:
        return [send(outbox, sink) for sink in TWO]


def test_what_waits_gets_its_order_key_and_its_urgency_at_the_first_start(old: Path) -> None:
    assert version(old) < VERSION
    assert sent(old) == [NOTICE_FIRST, ["notice", "document 1", *NOTICE_FIRST[1:]]]
    assert version(old) == VERSION


def test_the_command_line_lists_drops_and_moves_what_waits(old: Path) -> None:
    folder = StateFolder(old)
    now = MovedClock().now()
    assert [row["id"] for row in inspect.waiting(folder, "a", 9, now)] == NOTICE_FIRST
    assert [fate.waiting for fate in inspect.fates(folder, "notice")] == [{"a": [0, None], "b": [0, None]}]
    assert inspect.drop_waiting(folder, "b") == 4
    assert inspect.move(folder, "a", "b") == 3
    assert version(old) < VERSION
    assert sent(old) == [[], NOTICE_FIRST]


def test_a_disk_that_does_not_take_the_change_is_read_as_it_is_and_changed_once_it_works(old: Path) -> None:
    with failing_disk() as disk:
        disk.fail()
        with closing(open_outbox(old, sinks=TWO)) as outbox:
            assert outbox.storage_error
            assert waiting(outbox, "a") == NOTICE_FIRST
            commit(outbox, "new")
            assert drain(outbox, "a")[-1] == "new"
            disk.recover()
            outbox.recover()
            assert outbox.storage_error is None
            assert waiting(outbox, "b") == ["document 1", "notice", "document 2", "document 3", "new"]
    assert version(old) == VERSION


def test_a_change_that_is_interrupted_is_made_again(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "upgrade", fail)
        with pytest.raises(KeyboardInterrupt):
            open_outbox(old, sinks=TWO)
    check_recovered(old, *NOTICE_FIRST)


@pytest.mark.parametrize("old", [2], indirect=True)
@pytest.mark.parametrize("disk", ["works", "is full", "has damaged the file"])
def test_what_was_sent_without_an_answer_stays_so(old: Path, disk: str) -> None:
    with failing_disk() as failing:
        if disk == "is full":
            failing.fail()
        elif disk == "has damaged the file":
            other_header(old / "outbox.db")
        with closing(open_outbox(old, sinks=TWO)) as outbox:
            assert (outbox.storage_error is not None) == (disk == "is full")
            heads = Queue("a", outbox.storage).ready(outbox.now(), 9).fresh
            taken = Queue("a", outbox.storage).take(heads, 9, is_noted=True)
            assert [one.id for one in taken.events if one.seq in taken.sent] == ["notice"]


# At random


@dataclass(frozen=True, kw_only=True)
class Template:
    """A state as a process left it; `bodies` are those of the events that sink `a` still has to get."""

    path: Path
    bodies: dict[str, bytes]


def make_template(path: Path, rng: random.Random, *, killed: bool) -> Template:
    """Run an outbox for a while, and stop or kill it."""
    outbox = open_outbox(path / "running", sinks=SINKS)
    bodies: dict[str, bytes] = {}
    for number in range(rng.randint(10, 60)):
        made = event(f"{number:06d}", size=rng.choice(SIZES))
        filled = made.body.replace(b"xxxxxxxx", rng.randbytes(4).hex().encode())
        bodies[made.id] = filled
        outbox.commit(
            [replace(made, body=filled)], records={("kind", made.id): {}, ("occurrence", made.id): 1}
        )
        if rng.random() < 0.3:
            for name in deliver(outbox, limit=1):
                del bodies[name]
        if rng.random() < 0.1:
            for name in waiting(outbox, limit=1):
                dead_letter(outbox)
                del bodies[name]
    assert waiting(outbox) == list(bodies)
    if killed:
        return Template(path=kill(outbox, path / "running", path / "killed"), bodies=bodies)
    outbox.close()
    return Template(path=path / "running", bodies=bodies)


def zero_sector(file: Path, rng: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(rng.randrange(file.stat().st_size) // SECTOR_BYTES * SECTOR_BYTES)
        opened.write(bytes(SECTOR_BYTES))


def flip_bits(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


DAMAGES: list[Callable[[Path, random.Random], None]] = [*[zero_sector] * 2, *[flip_bits] * 2, truncate]


def damage(folder: Path, rng: random.Random) -> list[str]:
    """Damage one or a few of the files; return what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        file = rng.choice([path for path in folder.glob("outbox.db*") if path.stat().st_size])
        change = rng.choice(DAMAGES)
        change(file, rng)
        done.append(f"{change.__name__} {file.name}")
        if not any(path.stat().st_size for path in folder.glob("outbox.db*")):
            break
    return done


def deliver_everything(folder: Path) -> list[str]:
    """Start until it runs on, as a supervisor does, and let the sink have everything; return what it got."""
    got: list[str] = []
    for _ in range(3):  # damage within a row shows when that is read, once
        try:
            with closing(open_outbox(folder, sinks=SINKS)) as outbox:
                if outbox.losses():
                    outbox.commit([event("loss")], published=outbox.losses())
                commit(outbox, "new")
                while page := deliver(outbox, limit=3):
                    got += page
                outbox.prune()
                outbox.record("kind", "000001")
                assert outbox.storage_error is None
                return got
        except StateError:
            continue
    raise AssertionError("it ends again and again")


@pytest.mark.timeout(0 if TRIALS > 1000 else 300)
def test_whatever_the_files_contain_the_outbox_starts_and_delivers_or_reports_a_loss(tmp_path: Path) -> None:
    seed = int(os.environ.get("TEST_DAMAGE_SEED", "20261122"))
    print(f"TEST_DAMAGE_SEED={seed} TEST_DAMAGE_TRIALS={TRIALS} repeats these damages")
    rng = random.Random(seed)  # noqa: S311 - it is to be repeatable
    templates = [make_template(tmp_path / str(n), rng, killed=n % 3 > 0) for n in range(12)]
    for trial in range(TRIALS):
        folder = tmp_path / f"trial-{trial}"
        template = rng.choice(templates)
        shutil.copytree(template.path, folder)
        done = damage(folder, rng)
        try:
            got = deliver_everything(folder)
            assert "new" in got
            assert set(template.bodies) <= set(got) or "loss" in got, "a loss was not reported"
        except BaseException as error:
            error.add_note(f"trial {trial}: {done}")
            raise
        shutil.rmtree(folder)
