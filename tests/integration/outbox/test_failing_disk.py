"""Writing fails or reading fails: what is buffered in memory is written once it works again."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import outbox as outbox_module
from bridge.outbox import retention
from bridge.outbox import sqlite as sqlite_module
from bridge.outbox.outbox import OVERFLOW, REJECTED, dead_letter
from bridge.outbox.rows import save_event
from bridge.outbox.sqlite import Database
from tests.support.clock import MovedClock
from tests.support.outbox import (
    EVERYTHING,
    TWO,
    check_recovered,
    commit,
    cursor,
    deliver,
    drain,
    event,
    failing_disk,
    older_state,
    open_outbox,
    retry_dead_letters,
    rows,
    used_bytes,
    waiting,
    written_at,
)


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
        assert outbox.storage_errors == 2
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
