"""What an outbox keeps: transactions, what waits for whom, dead letters, ages and the size limit."""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from bridge.delivery.queue import Queue
from bridge.events.filters import Filter
from bridge.events.urgency import YOUNG_SECONDS
from bridge.outbox import inspect, room, upkeep
from bridge.outbox import rows as rows_module
from bridge.outbox.rows import STATE, Ledger
from bridge.outbox.sqlite import LOG_BYTES, kept_log
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import DEAD_LETTER_SECONDS, LEFT_SECONDS, KeptOutbox
from tests.support.clock import MovedClock
from tests.support.only import only
from tests.support.outbox import (
    EVERYTHING,
    OTHER_TYPE,
    TWO,
    TYPE,
    abandon,
    commit,
    dead_letter,
    deliver,
    drain,
    event,
    kill,
    losses_of,
    older_state,
    open_outbox,
    retry_dead_letters,
    rows,
    trace,
    used_bytes,
    waiting,
)


@contextmanager
def counted_steps(outbox: KeptOutbox) -> Iterator[list[int]]:
    """Count the steps of SQLite's machine, which is what a statement costs; the list has tens of them."""
    connection = outbox.storage.database._connection
    steps: list[int] = []
    connection.set_progress_handler(lambda: steps.append(10), 10)
    yield steps
    connection.set_progress_handler(None, 10)


# Transactions and restarts


def test_a_commit_is_one_transaction_that_waits_for_the_disk_and_an_acknowledge_is_one_that_does_not(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "0")
        deliver(outbox)
        ran: list[str] = []
        trace(outbox, ran.append)
        outbox.commit([event("1"), event("2")], records={("kind", "key"): 1})
        assert (ran.count("COMMIT"), "PRAGMA synchronous = FULL" in ran) == (1, True)
        ran.clear()
        deliver(outbox)
        assert (ran.count("COMMIT"), "PRAGMA synchronous = NORMAL" in ran) == (1, True)
        ran.clear()
        dead_letter(outbox, "b")
        assert (ran.count("COMMIT"), "PRAGMA synchronous = FULL" in ran) == (1, True)


def test_of_a_transaction_that_fails_nothing_is_stored() -> None:
    with closing(Ledger()) as database:

        def fail() -> None:
            with database.transaction():
                database.save_record("kind", "key", 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert database.record("kind", "key") is None


def test_a_transaction_holds_the_file_from_its_start(tmp_path: Path) -> None:
    file = older_state(tmp_path, "1") / "outbox.db"
    with (
        closing(Ledger(file, mode="write")) as one,
        closing(Ledger(file, mode="write", busy_seconds=0)) as other,
        one.transaction(),
        pytest.raises(sqlite3.OperationalError, match="locked"),
        other.transaction(),
    ):
        pass


@pytest.mark.parametrize("killed", [False, True])
def test_a_restart_finds_everything_as_it_was(tmp_path: Path, killed: bool) -> None:
    path = tmp_path / "state"
    outbox = open_outbox(path, sinks=TWO)
    outbox.commit([event("1"), event("2"), event("3")], records={("kind", "key"): {"a": [1]}})
    deliver(outbox, "a", limit=2)
    dead_letter(outbox, "b")
    if killed:
        path = kill(outbox, path, tmp_path / "image")
    else:
        outbox.close()
    with closing(open_outbox(path, sinks=TWO)) as outbox:
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["3"], ["2", "3"])
        assert outbox.backlogs() == {"a": 1, "b": 2}
        assert outbox.record("kind", "key") == {"a": [1]}
        assert outbox.dead_letter_counts() == {"b": 1}
        assert outbox.losses() == []
        commit(outbox, "4")
        assert [stored.seq for stored in outbox.pending("a", 5)] == [3, 4]


def test_each_run_has_an_epoch_of_its_own_and_knows_what_the_one_before_committed_last(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as first:
        assert first.previous_run == (None, None)
        assert [first.next_number(), first.next_number()] == [1, 2]
        commit(first, "1")
        first.next_number()  # counted, and never committed
    with closing(open_outbox(tmp_path)) as second:
        assert second.previous_run == (first.epoch, 2)
        assert second.epoch != first.epoch
        assert second.next_number() == 1
    with closing(open_outbox(tmp_path)) as third:
        assert third.previous_run == (first.epoch, 2), "a run that commits nothing is none"


# Who gets what


def test_a_sink_waits_for_what_its_filter_takes_at_the_commit_and_holds_up_no_other(tmp_path: Path) -> None:
    sinks = {
        "all": EVERYTHING,
        "notices": (Filter(types=[TYPE]), False),
        "nothing": (Filter(types=["x"]), False),
    }
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        commit(outbox, "1")
        outbox.commit([event("2", type_=OTHER_TYPE)])
        commit(outbox, "3")
        assert outbox.backlogs() == {"all": 3, "notices": 2, "nothing": 0}
        assert (deliver(outbox, "notices"), waiting(outbox, "nothing")) == (["1", "3"], [])
        assert waiting(outbox, "all") == ["1", "2", "3"]
    changed = {"all": (Filter(types=[OTHER_TYPE]), False)}
    with closing(open_outbox(tmp_path, sinks=changed)) as outbox:
        commit(outbox, "4")
        assert waiting(outbox, "all") == ["1", "2", "3"], "a changed filter counts for later commits"


def test_a_new_sink_starts_at_the_present_unless_it_wants_everything_from_the_start(tmp_path: Path) -> None:
    older_state(tmp_path, "1", "2", had=2)
    sinks = {"now": EVERYTHING, "all": (Filter(), True), "notices": (Filter(types=[OTHER_TYPE]), True)}
    for _ in range(2):
        with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
            assert [waiting(outbox, sink) for sink in sinks] == [[], ["1", "2"], []]
            assert outbox.backlog("all")[0] == 2
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        deliver(outbox, "all")
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        assert waiting(outbox, "all") == [], "it is not new any more"


def test_a_sink_that_left_the_configuration_is_named_and_what_waits_for_it_expires_after_seven_days(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock)) as outbox:
        commit(outbox, "1", "2")
        deliver(outbox, "a")
        clock.advance(60)
        commit(outbox, "3")
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        assert "2 event(s) wait for sink b" not in caplog.text
        assert "3 event(s) wait for sink b, which is not configured" in caplog.text
        assert (outbox.left_sinks(), outbox.backlogs()) == ({"b": 3}, {"a": 1})
        clock.advance(LEFT_SECONDS - 30)
        outbox.prune()
        assert outbox.left_sinks() == {"b": 1}
        assert outbox.dead_letter_counts() == {"b": 2}
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock)) as outbox:
        assert (outbox.left_sinks(), waiting(outbox, "b")) == ({}, ["3"]), "it is back"


def test_events_are_acknowledged_in_whatever_order(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        first, second, third = outbox.pending("a", 5)
        outbox.acknowledge("a", [third, first])
        outbox.acknowledge("a", [first])
        assert (waiting(outbox), outbox.backlog("a")[0]) == (["2"], 1)
        assert outbox.pending("a", 5, after=second.seq) == []


def test_a_batch_ends_where_it_would_take_too_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "READ_BYTES", 5000)
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3", "4", size=2000)
        assert deliver(outbox) == ["1", "2", "3"]
        assert deliver(outbox) == ["4"]


def test_who_waits_is_woken_by_a_commit_and_by_wake_and_not_held_when_something_has_changed(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:

        def wait_twice(seen: int) -> None:
            for _ in range(2):
                outbox.wait(seen, 3600.0)

        for change in (lambda: commit(outbox, "1"), outbox.wake):
            waiter = threading.Thread(target=wait_twice, args=(outbox.changes,), daemon=True)
            waiter.start()
            change()
            waiter.join(60)
            assert not waiter.is_alive()


def test_many_threads_at_once_lose_and_mix_up_nothing(tmp_path: Path) -> None:
    names = [str(number) for number in range(150)]
    got: dict[str, list[str]] = {"a": [], "b": []}
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:

        def read(sink: str) -> None:
            while len(got[sink]) < len(names):
                seen = outbox.changes
                got[sink] += deliver(outbox, sink, limit=7)
                outbox.backlog(sink)
                outbox.wait(seen, 0.05)

        threads = [threading.Thread(target=read, args=(sink,)) for sink in got]
        for thread in threads:
            thread.start()
        commit(outbox, *names)
        for thread in threads:
            thread.join(60)
        assert got == {"a": names, "b": names}


@pytest.mark.parametrize("urgent", [True, False])
def test_a_young_notice_is_found_behind_whatever_waits(tmp_path: Path, urgent: bool) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock, sinks=TWO)) as outbox:
        outbox.commit([event(str(number), type_=OTHER_TYPE) for number in range(100)])
        outbox.commit([event("new", type_=TYPE if urgent else OTHER_TYPE)])
        assert outbox.has_young("a") is urgent
        clock.advance(YOUNG_SECONDS)
        assert not outbox.has_young("a")
        outbox.commit([event("newer", type_=TYPE)])
        drain(outbox, "a")
        assert not outbox.has_young("a")
    with closing(open_outbox(tmp_path, clock=clock, sinks=TWO)) as outbox:
        assert [outbox.has_young(sink) for sink in "ab"] == [False, True]


def test_what_is_held_hides_no_failure(tmp_path: Path) -> None:
    held = {"a": lambda event: event.stored_at + 5 if event.id == "held" else None}
    with closing(open_outbox(tmp_path, held=held)) as outbox:
        queue = Queue("a", outbox.storage)
        commit(outbox, "held", "bad")
        assert queue.failures() == 0
        (head,) = queue.ready(outbox.now(), 9).fresh
        queue.note_failure(head, due_at=outbox.now().steady + 60, is_asked=False)
        assert queue.failures() == 1


@pytest.mark.parametrize("subject", ["", "one"])
@pytest.mark.parametrize("type_", [TYPE, OTHER_TYPE])
@pytest.mark.parametrize("fails", [False, True])
def test_the_cost_of_a_delivery_does_not_grow_with_what_waits_or_fails(
    tmp_path: Path, subject: str, type_: str, fails: bool
) -> None:
    def cost(count: int) -> int:
        with closing(open_outbox(tmp_path / str(count))) as outbox:
            queue, now = Queue("a", outbox.storage), outbox.now()
            outbox.commit([event(f"{number}", type_=type_, subject=subject) for number in range(count)])
            for head in queue.ready(now, count if fails else 0, may_begin=True, may_retry=True).fresh:
                queue.note_failure(head, due_at=now.steady + 1e6 * (head.seq % 2 == 0), is_asked=False)
            outbox.commit([event("new", type_=type_, subject=subject and "other")])
            queue.ready(now, 1, may_begin=True, may_retry=True)  # lets the first retries be due
            with counted_steps(outbox) as steps:
                ready = queue.ready(now, 1, may_begin=True, may_retry=True)
                taken = queue.take(ready.fresh, 1, is_noted=True)
                queue.note_failure(ready.fresh[0], due_at=now.steady + 1, is_asked=False)
                for failures in range(3):
                    assert queue.ready(now, 1, may_begin=False, failures=failures).again or not fails
                outbox.acknowledge("a", taken.events)
                outbox.has_young("a")
                outbox.commit([event("newer", type_=type_, subject=subject)])
            return sum(steps)

    few, many = cost(1000), cost(3000)
    assert many < 1.5 * few + 200


# Dead letters


def test_a_dead_letter_that_is_to_be_sent_again_waits_like_a_new_event_for_its_sink_alone(
    tmp_path: Path,
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock)) as outbox:
        commit(outbox, "1", "2")
        dead_letter(outbox, "a")
        clock.advance(3600)
        changes = outbox.changes
        retry_dead_letters(outbox, tmp_path, 1)
        assert outbox.changes > changes, "who waits is woken"
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["2", "1"], ["1", "2"])
        assert (outbox.dead_letter_counts(), outbox.backlogs()) == ({}, {"a": 2, "b": 2})
        again = outbox.pending("a", 5)[1]
        assert (again.seq, again.stored_at) == (3, clock.steady())
        commit(outbox, "3")
        assert waiting(outbox, "a") == ["2", "1", "3"]


def test_however_many_dead_letters_are_to_be_sent_again_all_of_them_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "CHUNK_ROWS", 2)
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, *"12345")
        for _ in range(5):
            dead_letter(outbox)
        retry_dead_letters(outbox, tmp_path, 1, 2, 3, 4, 5)
        assert waiting(outbox) == [*"12345"]


def test_text_that_cannot_be_stored_as_it_is_stops_nothing(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.commit([event("\ud800 1")], records={("kind\udfff", "key"): "\ud800"})
        dead_letter(outbox, detail="answered \udc80")
        assert outbox.dead_letter_counts() == {"a": 1}
        assert outbox.storage_error is None
    with closing(open_outbox(tmp_path)) as outbox:
        assert outbox.losses() == []


# Ages


def test_pruning_forgets_what_every_sink_has_had_once_it_is_old_and_nothing_else(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock, retain_seconds=100)) as outbox:
        commit(outbox, "1", "2", "3")
        deliver(outbox, "a")
        deliver(outbox, "b", limit=1)
        clock.advance(101)
        commit(outbox, "4")
        drain(outbox, "a")
        outbox.prune()
        assert [row[0] for row in rows(tmp_path, "SELECT id FROM event")] == ["2", "3", "4"]
        drain(outbox, "b")
        outbox.prune()
        assert [row[0] for row in rows(tmp_path, "SELECT id FROM event")] == ["4"]


def test_records_and_dead_letters_that_are_not_to_be_sent_again_are_kept_for_thirty_days_and_the_state_for_ever(
    tmp_path: Path,
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        outbox.commit([event("1"), event("2")], records={("kind", "key"): 1, (STATE, "vm"): 2})
        dead_letter(outbox)
        dead_letter(outbox)
        inspect.retry(StateFolder(tmp_path), [2])
        for advance, record, numbers in ((DEAD_LETTER_SECONDS, 1, [(1,), (2,)]), (1.0, None, [(2,)])):
            clock.advance(advance)
            outbox.prune()
            assert outbox.record("kind", "key") == record
            assert rows(tmp_path, "SELECT number FROM dead_letter") == numbers
        assert outbox.record(STATE, "vm") == 2


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 40 * 86_400.0])
def test_a_jump_of_the_wall_clock_makes_nothing_older_or_younger(tmp_path: Path, jump: float) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock, retain_seconds=100)) as outbox:
        commit(outbox, "1", "2")
        deliver(outbox, limit=1)
        clock.jump(jump)
        clock.jump_seconds()
        clock.advance(99)
        outbox.prune()
        assert len(rows(tmp_path, "SELECT id FROM event")) == 2
        assert clock.steady() - (outbox.backlog("a")[1] or 0) == pytest.approx(99)


# The size limit

MIB = 1024 * 1024
ROOM_BYTES = MIB // 2
LIMIT = LOG_BYTES + ROOM_BYTES  # leaves so much for the rows


def test_a_log_that_a_reader_keeps_counts_as_size_and_is_named_with_what_to_do(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        assert kept_log(outbox.folder.database) is None
        with closing(sqlite3.connect(outbox.folder.database)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT COUNT(*) FROM event").fetchone()
            for number in range(20):
                commit(outbox, str(number), size=MIB)
            assert outbox.size_bytes() > 20 * MIB
            assert re.search(
                r"outbox\.db-wal has 2\d MiB, .* end that program$", kept_log(outbox.folder.database) or ""
            )
        drain(outbox)
        commit(outbox, "last")
        assert waiting(outbox) == ["last"], "nothing is dropped for it"


def test_delivered_events_are_deleted_first_at_the_size_limit_and_no_sink_loses_any(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO, max_bytes=LIMIT)) as outbox:
        for number in range(500):
            commit(outbox, str(number), size=3000)
            deliver(outbox, "a")
            if number < 450:
                deliver(outbox, "b")
        assert used_bytes(outbox) <= ROOM_BYTES
        assert len(waiting(outbox, "b")) == 50
        assert outbox.losses() == []


def test_events_that_no_sink_wants_make_room_at_the_limit_before_those_that_wait(tmp_path: Path) -> None:
    sinks = {"a": (Filter(types=[TYPE]), False)}
    with closing(open_outbox(tmp_path, sinks=sinks, max_bytes=LIMIT)) as outbox:
        while not outbox.losses():
            commit(outbox, "wanted", size=4000)
        left = outbox.backlog("a")[0]
        for _ in range(20):
            outbox.commit([event("unwanted", type_=OTHER_TYPE, size=4000)])
        assert outbox.backlog("a")[0] == left


def test_old_records_of_done_work_and_then_dead_letters_as_a_loss_go_before_an_event_that_a_sink_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, max_bytes=LIMIT, clock=clock)) as outbox:
        commit(outbox, *(f"dead {number}" for number in range(9)), "kept", size=3000)
        for _ in range(9):
            dead_letter(outbox)
        for number in range(100):
            clock.advance(1)
            value = {"done": number % 2 == 0, "text": "x" * 2000}
            outbox.commit([], records={("kind", str(number)): value})
        assert outbox.dead_letter_counts() == {"a": 9}
        with monkeypatch.context() as patch:
            patch.setattr(room, "FREED_ROWS", 4)
            while outbox.dead_letter_counts() == {"a": 9}:
                commit(outbox, "new", size=3000)
        assert rows(tmp_path, "SELECT MIN(number), MAX(number) FROM dead_letter") == [(5, 9)], "the oldest go"
        while outbox.dead_letter_counts():
            commit(outbox, "new", size=3000)
        assert losses_of(outbox) == [("SizeLimit", 9)]
        assert (outbox.record("kind", "98"), outbox.record("kind", "99")["done"]) == (None, False)
        assert waiting(outbox)[0] == "kept"


def test_with_two_sinks_behind_the_oldest_events_go_for_both_as_few_as_make_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = {"well": EVERYTHING, "slow": EVERYTHING, "dead": EVERYTHING}
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=sinks, clock=clock, max_bytes=LIMIT)) as outbox:
        for number in range(300):
            clock.advance(1)
            commit(outbox, f"{number:04}", size=3000)
            assert deliver(outbox, "well") == [f"{number:04}"]
            if number == 50:
                deliver(outbox, "slow", limit=30)
        left = waiting(outbox, "dead")
        dropped = 300 - len(left)
        assert left == waiting(outbox, "slow") == [f"{number:04}" for number in range(dropped, 300)]
        assert 4096 * len(left) > 0.85 * ROOM_BYTES, "more was dropped than had to be"
        assert outbox.backlogs() == {"well": 0, "slow": len(left), "dead": len(left)}
        losses = {loss.sink: loss for loss in outbox.losses()}
        found = {sink: (loss.reason, loss.count) for sink, loss in losses.items()}
        assert found == {"dead": ("SizeLimit", dropped), "slow": ("SizeLimit", dropped - 30)}
        assert (losses["dead"].newest or 0) - (losses["dead"].oldest or 0) == dropped - 1
        assert outbox.dead_letter_counts() == {}
        commit(outbox, "last")
        outbox.commit([event("report")], published=outbox.losses())
        assert outbox.losses() == []
    error = only(record.message for record in caplog.records if record.levelno == logging.ERROR)
    assert "the outbox reached its size limit" in error


def test_a_commit_at_the_limit_costs_little_however_much_waits(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO, max_bytes=LOG_BYTES + 8 * MIB)) as outbox:
        while not outbox.losses():
            outbox.commit([event("x", size=1000) for _ in range(100)])
        commit(outbox, "new", size=1000)  # searches in vain for delivered events
        with counted_steps(outbox) as steps:
            for _ in range(10):
                commit(outbox, "new", size=1000)
    assert sum(steps) / 10 < 3000


def test_what_is_old_is_forgotten_at_a_cost_that_does_not_grow_with_what_is_remembered(
    tmp_path: Path,
) -> None:
    def cost(count: int) -> int:
        with closing(open_outbox(tmp_path / str(count))) as outbox:
            outbox.commit(
                [], records={("relayed", f"{number:064}"): {"done": True} for number in range(count)}
            )
            outbox.max_bytes = used_bytes(outbox) + LOG_BYTES
            commit(outbox, "new", size=9000)  # searches in vain for delivered events
            with counted_steps(outbox) as steps:
                outbox.prune()
                commit(outbox, "newer", size=9000)
            assert outbox.record("relayed", f"{0:064}") is None, "room was made"
            return sum(steps)

    assert cost(9000) < 1.5 * cost(3000)


def test_old_dead_letters_are_deleted_at_a_cost_that_does_not_grow_with_the_others(tmp_path: Path) -> None:
    def cost(count: int) -> int:
        clock = MovedClock()
        with closing(open_outbox(tmp_path / str(count), clock=clock, retain_seconds=1e9)) as outbox:
            for more in (1, count):
                clock.advance(DEAD_LETTER_SECONDS - 1)
                outbox.commit([event(f"{number}") for number in range(more)])
                outbox.acknowledge("a", outbox.pending("a", more), dead=("rejected", "400"))
            clock.advance(2)
            with counted_steps(outbox) as steps:
                outbox.prune()
            assert outbox.dead_letter_counts() == {"a": count}
            return sum(steps)

    assert cost(3000) < 1.5 * cost(1000) + 100


def test_room_is_made_by_what_a_healthy_sink_had_at_a_cost_that_does_not_grow_with_what_another_waits_for(
    tmp_path: Path,
) -> None:
    sinks = {"dead": (Filter(types=[TYPE]), False), "well": EVERYTHING}

    def cost(count: int) -> int:
        with closing(open_outbox(tmp_path / str(count), sinks=sinks)) as outbox:
            outbox.commit([event(f"{number}", type_=OTHER_TYPE) for number in range(3)])
            outbox.commit([event(f"{number}", size=3000) for number in range(count)])
            drain(outbox, "well")
            outbox.max_bytes = used_bytes(outbox) + LOG_BYTES
            commit(outbox, "new", size=9000)  # searches from the beginning
            with counted_steps(outbox) as steps:
                for _ in range(20):
                    outbox.commit([event("other", type_=OTHER_TYPE, size=9000)])
                    outbox.acknowledge("well", outbox.pending("well", 9, after=count))
            assert outbox.backlog("well")[0] == 0
            assert outbox.backlog("dead")[0] > count - 20
            return sum(steps)

    assert cost(900) < 1.5 * cost(300)


def test_what_is_dropped_meanwhile_can_be_acknowledged_late(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, max_bytes=LIMIT)) as outbox:
        commit(outbox, "0")
        page = outbox.pending("a", 1)
        commit(outbox, *map(str, range(1, 400)), size=4000)
        left = outbox.backlog("a")[0]
        outbox.acknowledge("a", page)
        assert outbox.backlog("a")[0] == left == len(waiting(outbox))
        abandon(outbox)
