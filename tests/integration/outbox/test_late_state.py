"""A folder that is not there at first, or an older state that appears later."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bridge.events.filters import Filter
from tests.support.outbox import (
    EVERYTHING,
    check_recovered,
    commit,
    deliver,
    drain,
    event,
    older_state,
    open_outbox,
    waiting,
)


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
