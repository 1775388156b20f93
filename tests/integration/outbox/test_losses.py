"""What is lost is noted until it is published, and no two events have the same number of an epoch."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bridge.errors import StateError
from bridge.events.builder import Reporter
from bridge.events.filters import Filter
from bridge.formats.cloudevents import structured
from bridge.outbox import outbox as outbox_module
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from tests.support.clock import MovedClock
from tests.support.outbox import commit, deliver, event, failing_disk, kill, open_outbox, waiting

SINKS = {"a": (Filter(), True)}
AT = datetime(2026, 11, 20, tzinfo=UTC)


def heartbeat(outbox: Outbox) -> tuple[str, int]:
    """Commit a heartbeat as a process does; return what the outbox holds of it: its epoch and number."""
    reporter = Reporter(name="web-0", role="forward", epoch=outbox.meta("epoch"))
    built = reporter.heartbeat(
        reason="Hourly", version="1", backlog={}, sequence=outbox.count("reporterseq"), at=AT
    )
    outbox.commit([(built, structured(built))], meta={})
    envelope = outbox.pending("a", 1000)[1][-1].envelope
    assert envelope["data"]["LastReporterSeq"] == int(envelope["reporterseq"])
    return envelope["reporterepoch"], int(envelope["reporterseq"])


def test_a_kill_in_memory_only_mode_gives_no_number_of_an_epoch_twice(tmp_path: Path) -> None:
    with failing_disk() as failing:
        outbox = open_outbox(tmp_path / "state", sinks=SINKS)
        numbers = [heartbeat(outbox), heartbeat(outbox)]
        failing.fail()
        numbers += [heartbeat(outbox), heartbeat(outbox)]  # the first meets the failure
        failing.recover()
        image = kill(outbox, tmp_path / "state", tmp_path / "image")
    with closing(open_outbox(image, sinks=SINKS)) as outbox:
        numbers.append(heartbeat(outbox))
    first, second = numbers[0][0], numbers[2][0]
    assert numbers == [(first, 1), (first, 2), (second, 1), (second, 2), (first, 3)]


def test_an_event_that_was_counted_before_the_state_store_failed_gets_a_number_of_the_new_epoch(
    tmp_path: Path,
) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        reporter = Reporter(name="web-0", role="forward", epoch=outbox.meta("epoch"))
        sequence = outbox.count("reporterseq")
        failing.fail()
        outbox.set_meta({"another": "thread"})
        built = reporter.heartbeat(reason="Hourly", version="1", backlog={}, sequence=sequence, at=AT)
        outbox.commit([(built, structured(built))], meta={})
        stored = outbox.pending("a", 1)[1][0]
        assert stored.envelope["reporterepoch"] == outbox.meta("epoch") != reporter.epoch
        assert stored.id == stored.envelope["id"] != built.id
        assert heartbeat(outbox) == (outbox.meta("epoch"), 2)


def test_an_event_that_is_repeated_after_the_state_store_failed_keeps_its_number(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        heartbeat(outbox)
        (first,) = [one.body for one in outbox.pending("a", 10)[1]]
        failing.fail()
        outbox.repeat([first])
        assert outbox.storage_error is not None
        assert [one.body for one in outbox.pending("a", 10)[1]] == [first, first]


def test_an_event_that_got_another_number_is_repeated_with_it(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        reporter = Reporter(name="web-0", role="listen", epoch=outbox.meta("epoch"))
        built = reporter.receipt(
            outcome="accepted",
            key="k",
            command_id="c",
            event_id="E-1",
            resources=[],
            sequence=outbox.count("reporterseq"),
            at=AT,
            data={},
        )
        failing.fail()
        outbox.commit([(built, structured(built))], meta={})
        outbox.repeat([structured(built)])
        first, again = (one.envelope for one in outbox.pending("a", 2)[1])
        assert first == again
        assert first["reporterepoch"] == outbox.meta("epoch") != reporter.epoch


def test_a_commit_that_runs_out_of_memory_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        heartbeat(outbox)
        before = outbox.committed()
        monkeypatch.setattr(outbox_module, "save_event", fail)
        built = Reporter(name="web-0", role="forward", epoch=outbox.meta("epoch")).heartbeat(
            reason="Hourly", version="1", backlog={}, sequence=outbox.count("reporterseq"), at=AT
        )
        with pytest.raises(MemoryError):
            outbox.commit([(built, structured(built))], meta={"watch": "new"})
        assert (outbox.committed(), outbox.meta("watch")) == (before, "")
        monkeypatch.undo()
        assert heartbeat(outbox) == (outbox.meta("epoch"), 2)


def test_events_of_others_keep_their_epoch(tmp_path: Path) -> None:
    with failing_disk() as failing, closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        built = Reporter(name="db-0", role="forward", epoch="theirs").heartbeat(
            reason="Hourly", version="1", backlog={}, sequence=7, at=AT
        )
        failing.fail()
        outbox.commit([(built, structured(built))], meta={})
        assert outbox.pending("a", 1)[1][0].body == structured(built)


def test_a_state_that_is_older_than_what_was_published_begins_a_new_epoch_and_is_a_loss(
    tmp_path: Path,
) -> None:
    folder = StateFolder(tmp_path)
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        heartbeat(outbox)
    old = (tmp_path / "outbox.db").read_bytes()
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        epoch, _ = heartbeat(outbox)
        folder.write_status({"committed": outbox.committed()})
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        assert (outbox.meta("epoch"), outbox.losses()) == (epoch, [])
    (tmp_path / "outbox.db").write_bytes(old)
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        assert heartbeat(outbox)[0] != epoch
        assert [(loss.reason, loss.count) for loss in outbox.losses()] == [("Damage", None)]


@pytest.mark.parametrize("number", [None, [], {}, "x", "9" * 40, 1e300, "1:"])
def test_a_damaged_status_file_says_nothing_about_the_state(tmp_path: Path, number: object) -> None:
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        epoch, _ = heartbeat(outbox)
    StateFolder(tmp_path).write_status({"committed": {"epoch": epoch, "reporterseq": number}})
    with closing(open_outbox(tmp_path, sinks=SINKS)) as outbox:
        assert (outbox.meta("epoch"), outbox.losses(), outbox.storage_error) == (epoch, [], None)
    assert not list(tmp_path.glob("outbox.db.*"))


def test_the_size_limit_is_a_loss_until_it_is_published(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, max_bytes=2**18)) as outbox:
        commit(outbox, *map(str, range(100)), size=4000)
        (loss,) = outbox.losses()
        assert (loss.reason, loss.sink, loss.count) == ("SizeLimit", "a", 100 - len(waiting(outbox)))
    with closing(open_outbox(tmp_path, max_bytes=2**18)) as outbox:
        assert outbox.losses() == [loss]
        deliver(outbox)
        outbox.commit([event("it is lost")], meta={}, published=[loss])
        assert outbox.losses() == []
    with closing(open_outbox(tmp_path, max_bytes=2**18)) as outbox:
        assert outbox.losses() == []


@pytest.mark.parametrize("what", ["folder", "files", "log"])
def test_a_state_folder_that_is_removed_is_made_again_locked_and_filled(tmp_path: Path, what: str) -> None:
    state = tmp_path / "state"
    with closing(open_outbox(state, sinks=SINKS)) as outbox:
        outbox.commit(
            [event("1"), event("2")], meta={"watch": "w"}, occurrences={"f": 2}, records={("k", "1"): 3}
        )
        deliver(outbox, limit=1)
        outbox.recover()
        if what == "folder":
            shutil.rmtree(state)
        for name in {"files": ("outbox.db", "outbox.db-wal"), "log": ("outbox.db-wal",)}.get(what, ()):
            (state / name).unlink()
        outbox.recover()
        assert outbox.storage_error is None
        with pytest.raises(StateError, match="is held by"):
            open_outbox(state, sinks=SINKS)
        assert [(loss.reason, loss.count) for loss in outbox.losses()] == [("StateFolderGone", 0)]
        commit(outbox, "3")
        image = kill(outbox, state, tmp_path / "image")
    with closing(open_outbox(image, sinks=SINKS)) as outbox:
        assert waiting(outbox) == ["2", "3"]
        assert (outbox.meta("watch"), outbox.occurrences("f"), outbox.record("k", "1")) == ("3", 2, 3)


def test_a_lock_that_is_removed_is_taken_again(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        (tmp_path / "lock").unlink()
        outbox.recover()
        with pytest.raises(StateError, match="is held by"):
            open_outbox(tmp_path)
        assert outbox.losses() == []


def test_a_folder_that_does_not_change_is_not_looked_into_and_a_change_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    acquire = StateFolder.acquire

    def count_and_acquire(folder: StateFolder) -> None:
        looks.append(1)
        acquire(folder)

    monkeypatch.setattr(StateFolder, "acquire", count_and_acquire)
    with closing(open_outbox(tmp_path / "state")) as outbox:
        commit(outbox, "1")
        outbox.recover()
        outbox.recover()  # a change within the resolution of the file system's clock is found now
        looks.clear()
        for _ in range(5):
            outbox.recover()
        assert looks == []
        (tmp_path / "state" / "outbox.db").unlink()
        outbox.recover()
        assert [loss.reason for loss in outbox.losses()] == ["StateFolderGone"]


def test_a_change_that_does_not_alter_the_time_of_the_folder_is_noticed_by_the_next_look(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    with closing(open_outbox(state)) as outbox:
        commit(outbox, "1")
        outbox.recover()
        before = state.stat()
        (state / "lock").unlink()
        os.utime(state, ns=(before.st_atime_ns, before.st_mtime_ns))
        outbox.recover()
        assert (state / "lock").exists()


def test_the_log_of_a_damaged_file_is_moved_aside_with_it(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "state", sinks=SINKS)
    commit(outbox, "1", "2", "3")
    image = kill(outbox, tmp_path / "state", tmp_path / "image")
    log = bytearray((image / "outbox.db-wal").read_bytes())
    log[100] ^= 1  # in its first page: SQLite would leave out all that follows
    (image / "outbox.db-wal").write_bytes(log)
    (image / "outbox.db").write_bytes(b"nonsense" * 1000)
    (image / "outbox.db-shm").write_bytes(b"nonsense" * 1000)
    with closing(open_outbox(image, sinks=SINKS)) as outbox:
        assert waiting(outbox) == ["1", "2", "3"]
        assert not (image / "outbox.db-shm").exists()
    assert [path.read_bytes() for path in image.glob("outbox.db.damaged-*-wal")] == [log]
    assert len(list(image.glob("outbox.db.damaged-*-shm"))) == 1


def ages(outbox: Outbox, clock: MovedClock) -> list[float]:
    return [round(clock.steady() - stored.stored_at) for stored in outbox.pending("a", 10)[1]]


def test_a_clock_that_is_thirty_days_ahead_at_the_start_makes_nothing_older(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        commit(outbox, "1", "2")
    clock.advance(5)
    clock.jump(30 * 86_400.0)
    clock.reboot()
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        assert max(ages(outbox, clock)) < 60
        outbox.prune()
        clock.advance(20)
        clock.jump(-30 * 86_400.0)
        outbox.shift(clock.jump_seconds())
        assert max(ages(outbox, clock)) < 60
        clock.advance(3600)
        outbox.recover()
        assert max(ages(outbox, clock)) < 3700


def test_a_long_downtime_counts_once_the_clock_has_run_for_a_while(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        commit(outbox, "1")
    clock.advance(30 * 86_400.0)
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        commit(outbox, "2")
        outbox.recover()
        assert max(ages(outbox, clock)) < 60
        clock.advance(600)
        outbox.recover()
        assert ages(outbox, clock) == [30 * 86_400 + 600, 600]
