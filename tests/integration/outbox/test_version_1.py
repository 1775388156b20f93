"""A state of version 1: it is brought up to date once, and until then the command line and memory read it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bridge.outbox import inspect
from bridge.outbox.rows import Ledger
from bridge.outbox.sqlite import VERSION
from bridge.outbox.state_dir import StateFolder
from tests.support.clock import MovedClock
from tests.support.outbox import (
    OTHER_TYPE,
    TWO,
    check_recovered,
    commit,
    deliver,
    drain,
    event,
    failing_disk,
    open_outbox,
    rows,
    waiting,
)

WAITING_1 = """
CREATE TABLE waiting (sink TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (sink, seq)) WITHOUT ROWID;
CREATE INDEX waiting_by_seq ON waiting (seq);
CREATE INDEX event_by_age ON event (stored_at);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """Leave a state of version 1, whose sink a has had one of four events, and b none."""
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        outbox.commit([event("document 1", type_=OTHER_TYPE, subject="vm")])
        commit(outbox, "notice")
        outbox.commit([event(f"document {number}", type_=OTHER_TYPE, subject="vm") for number in (2, 3)])
        deliver(outbox, "a", limit=1)
    with closing(sqlite3.connect(tmp_path / "outbox.db")) as database:
        kept = database.execute("SELECT sink, seq FROM waiting").fetchall()
        database.executescript(f"DROP TABLE waiting; {WAITING_1} PRAGMA user_version = 1;")
        database.executemany("INSERT INTO waiting VALUES (?, ?)", kept)
        database.commit()
    return tmp_path


def version(path: Path) -> int:
    return int(rows(path, "PRAGMA user_version")[0][0])


def sent(path: Path) -> list[list[str]]:
    """Return what sinks a and b are sent, in their order."""
    with closing(open_outbox(path, sinks=TWO)) as outbox:
        got: dict[str, list[str]] = {"a": [], "b": []}
        for sink, ids in got.items():
            queue = outbox.queue(sink)
            while heads := queue.turn(outbox.now(), 1, may_begin=True, may_retry=True).fresh:
                taken = queue.take(heads, 1, is_noted=False)
                outbox.acknowledge(sink, taken.events)
                ids += [one.id for one in taken.events]
        return [*got.values()]


def test_what_waits_gets_its_order_key_and_its_urgency_at_the_first_start(old: Path) -> None:
    assert version(old) == 1
    documents = ["document 2", "document 3"]
    assert sent(old) == [["notice", *documents], ["notice", "document 1", *documents]]
    assert version(old) == VERSION


def test_the_command_line_lists_drops_and_moves_what_waits(old: Path) -> None:
    folder = StateFolder(old)
    now = MovedClock().now()
    assert [row["id"] for row in inspect.waiting(folder, "a", 9, now)] == [
        "notice",
        "document 2",
        "document 3",
    ]
    assert [fate.waiting for fate in inspect.fates(folder, "notice")] == [{"a": [0, None], "b": [0, None]}]
    assert inspect.drop_waiting(folder, "b") == 4
    assert inspect.move(folder, "a", "b") == 3
    assert version(old) == 1
    assert sent(old) == [[], ["notice", "document 2", "document 3"]]


def test_a_disk_that_does_not_take_the_change_is_read_as_it_is_and_changed_once_it_works(old: Path) -> None:
    with failing_disk() as disk:
        disk.fail()
        with closing(open_outbox(old, sinks=TWO)) as outbox:
            assert outbox.storage_error
            assert waiting(outbox, "a") == ["notice", "document 2", "document 3"]
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
    check_recovered(old, "notice", "document 2", "document 3")
