"""The outbox on a disk that is well: what is stored together, who gets what, and what is forgotten when."""

from __future__ import annotations

import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bridge.events.filters import Filter
from bridge.outbox.outbox import OVERFLOW, REJECTED, Outbox, dead_letter
from tests.support.clock import MovedClock
from tests.support.outbox import (
    OTHER_TYPE,
    TYPE,
    abandon,
    commit,
    cursor,
    deliver,
    event,
    kill,
    open_outbox,
    retry_dead_letters,
    rows,
    trace,
    used_bytes,
    waiting,
)
from tests.support.paths import ROOT

EVERYTHING = (Filter(), False)
TWO = {"a": EVERYTHING, "b": EVERYTHING}


def add_dead_letter(outbox: Outbox, sink: str = "a", detail: str = "400 Bad Request") -> None:
    """Dead-letter the next event of a sink."""
    generation, page = outbox.pending(sink, 1)
    letter = dead_letter(sink, page[0], REJECTED, detail, page[0].stored_at)
    outbox.acknowledge(sink, generation, page, dead_lettered=letter)


# What is stored together


def test_events_what_is_remembered_and_what_was_counted_are_in_the_file_when_a_commit_returns(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        durable = outbox.commit([event("1"), event("2")], meta={"watch": "w"}, occurrences={"f": 3})
        assert durable
        assert rows(tmp_path, "SELECT seq, id FROM event") == [(1, "1"), (2, "2")]
        assert rows(tmp_path, "SELECT value FROM meta WHERE key = 'watch'") == [("w",)]
        assert rows(tmp_path, "SELECT fingerprint, count FROM occurrence") == [("f", 3)]


def test_a_commit_is_one_transaction_that_waits_for_the_disk_and_a_cursor_is_one_that_does_not(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        statements: list[str] = []
        trace(outbox, statements.append)
        outbox.commit([event("1"), event("2")], meta={"watch": "w"}, occurrences={"f": 1})
        assert [s for s in statements if "synchronous" in s] == ["PRAGMA synchronous = FULL"]
        assert [s.split()[0] for s in statements].count("COMMIT") == 1
        statements.clear()
        deliver(outbox)
        assert [s for s in statements if "synchronous" in s] == ["PRAGMA synchronous = NORMAL"]
        statements.clear()
        commit(outbox, "3")
        add_dead_letter(outbox)
        assert statements.count("PRAGMA synchronous = NORMAL") == 0
        assert outbox._storage.database._connection.execute("PRAGMA journal_mode").fetchall() == [("wal",)]


def test_a_dead_letter_and_the_cursor_that_passes_it_are_one_transaction(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        statements: list[str] = []
        trace(outbox, statements.append)
        add_dead_letter(outbox)
        trace(outbox, None)
        written = re.findall(r"BEGIN|INTO \w+|COMMIT", " ".join(statements))
        assert written == ["BEGIN", "INTO done", "INTO dead_letter", "COMMIT"]


def test_a_restart_finds_everything_as_it_was(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        epoch = outbox.meta("epoch")
        assert outbox.count("reporterseq") == 1
        outbox.commit([event("1"), event("2")], meta={"watch": "w"}, occurrences={"f": 2})
        deliver(outbox, "a", limit=1)
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        assert (outbox.meta("epoch"), outbox.meta("watch")) == (epoch, "w")
        assert outbox.count("reporterseq") == 2
        assert (outbox.occurrences("f"), outbox.occurrences("g")) == (2, 0)
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == (["2"], ["1", "2"])
        assert (outbox.backlog("a")[0], outbox.backlog("b")[0]) == (1, 2)
        commit(outbox, "3")
        assert waiting(outbox, "a") == ["2", "3"]


def test_a_kill_loses_neither_an_event_nor_a_cursor(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "one")
    commit(outbox, "1", "2", "3")
    deliver(outbox, limit=2)
    outbox.set_meta({"seen": "yes"})
    image = kill(outbox, tmp_path / "one", tmp_path / "two")
    with closing(open_outbox(image)) as outbox:
        assert waiting(outbox) == ["3"]
        assert (outbox.meta("watch"), outbox.meta("seen")) == ("3", "yes")


CHILD = """
    import sys
    from pathlib import Path
    from tests.support.outbox import commit, open_outbox
    from bridge.runtime.clock import Clock

    outbox = open_outbox(Path(sys.argv[1]), clock=Clock())
    number = int(outbox.meta("watch", "0"))
    while True:
        number += 1
        commit(outbox, str(number))
        print("committed", number, flush=True)
        generation, page = outbox.pending("a", 3)
        for event in page:
            print("delivered", event.id, flush=True)
            outbox.acknowledge("a", generation, [event])
"""


def test_a_process_that_is_really_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    committed, delivered = 0, []
    for lines in (5, 40, 17, 90, 31):
        command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout is not None
            read = [child.stdout.readline() for _ in range(lines)]
            os.kill(child.pid, signal.SIGKILL)
            read += child.stdout.readlines()
        done = [line.split() for line in read if line.endswith("\n")]
        committed = max([committed, *(int(number) for word, number in done if word == "committed")])
        delivered += [int(number) for word, number in done if word == "delivered"]
    with closing(open_outbox(tmp_path)) as outbox:
        assert int(outbox.meta("watch")) >= committed > 0
        delivered += map(int, waiting(outbox))
        assert list(dict.fromkeys(delivered)) == list(range(1, int(outbox.meta("watch")) + 1))
        assert [row[0] for row in rows(tmp_path, "SELECT seq FROM event ORDER BY seq")] == [
            row[0] for row in rows(tmp_path, "SELECT CAST(id AS INTEGER) FROM event ORDER BY seq")
        ]


# Who gets what


def test_each_sink_has_its_own_cursor_and_holds_up_no_other(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1", "2", "3")
        assert deliver(outbox, "a") == ["1", "2", "3"]
        assert deliver(outbox, "b", limit=1) == ["1"]
        assert (waiting(outbox, "a"), waiting(outbox, "b")) == ([], ["2", "3"])
        assert (outbox.backlog("a")[0], outbox.backlog("b")[0]) == (0, 2)


def test_a_new_sink_starts_at_the_present_unless_it_wants_everything_from_the_start(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2")
    sinks = {"a": EVERYTHING, "new": EVERYTHING, "all": (Filter(), True)}
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        commit(outbox, "3")
        assert waiting(outbox, "new") == ["3"]
        assert waiting(outbox, "all") == ["1", "2", "3"]
        assert (outbox.backlog("new")[0], outbox.backlog("all")[0]) == (1, 3)


def test_a_new_sink_keeps_its_place_even_if_the_process_is_killed_before_anything_happens(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
    abandon(open_outbox(tmp_path, sinks=TWO))
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "2")
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        assert waiting(outbox, "b") == ["2"]


def test_a_removed_sink_blocks_no_pruning_and_resumes_at_its_cursor_when_it_comes_back(
    tmp_path: Path,
) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock)) as outbox:
        commit(outbox, "1", "2")
        deliver(outbox, "b", limit=1)
    with closing(open_outbox(tmp_path, clock=clock, retain_seconds=60)) as outbox:
        deliver(outbox)
        clock.advance(61)
        commit(outbox, "3")
        deliver(outbox)
        outbox.prune()
        assert rows(tmp_path, "SELECT id FROM event") == [("3",)]
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock)) as outbox:
        assert waiting(outbox, "b") == ["3"]
        assert outbox.backlog("b") == (1, clock.steady())


def test_the_backlog_counts_only_what_the_sink_takes(tmp_path: Path) -> None:
    sinks = {
        "types": (Filter(types=[TYPE]), False),
        "where": (Filter(where={"EventType": "Reboot"}), False),
    }
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        outbox.commit(
            [event("1", EventType="Freeze"), event("2", EventType="Reboot"), event("3", type_=OTHER_TYPE)],
            meta={},
        )
        assert (outbox.backlog("types")[0], outbox.backlog("where")[0]) == (2, 1)
        deliver(outbox, "where", limit=2)
        assert outbox.backlog("where") == (0, None)


def test_a_backlog_that_a_restart_could_only_estimate_is_right_again_once_it_was_passed(
    tmp_path: Path,
) -> None:
    sinks = {"where": (Filter(where={"EventType": "Reboot"}), False)}
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        outbox.commit([event(str(n), EventType="Freeze") for n in range(5)], meta={})
    with closing(open_outbox(tmp_path, sinks=sinks)) as outbox:
        assert outbox.backlog("where")[0] == 5
        outbox.commit([event("last", EventType="Reboot")], meta={})
        deliver(outbox, "where", limit=5)
        assert outbox.backlog("where")[0] == 1


def test_a_batch_ends_where_it_would_take_too_much_memory(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3", size=3 * 1024 * 1024)
        assert waiting(outbox) == ["1", "2"]
        deliver(outbox)
        assert waiting(outbox) == ["3"]


def test_who_waits_is_woken_by_a_commit_and_by_wake_and_not_held_when_there_is_something(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        for act in (lambda: commit(outbox, "1"), outbox.wake):
            outbox.pending("a", 10)
            thread = threading.Thread(target=outbox.wait, args=("a", 30.0))
            thread.start()
            while thread.is_alive() and not outbox._grown._waiters:  # type: ignore[attr-defined]
                time.sleep(0.001)
            act()
            thread.join(20)
            assert not thread.is_alive()
        commit(outbox, "2")
        began = time.monotonic()
        outbox.wait("a", 30.0)
        assert time.monotonic() - began < 20


def test_an_acknowledge_of_an_older_generation_is_ignored(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
        for change in (lambda: outbox.shift(100.0), outbox.move_aside):
            generation, page = outbox.pending("a", 10)
            change()
            commit(outbox, "new")
            outbox.acknowledge(
                "a", generation, page, dead_lettered=dead_letter("a", page[0], REJECTED, "", 0.0)
            )
            assert outbox.generation > generation
            assert "new" in waiting(outbox)
            assert outbox.dead_letter_counts() == {}


def test_a_late_acknowledge_never_moves_a_cursor_back(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1", "2", "3")
        generation, old_page = outbox.pending("a", 1)
        deliver(outbox)
        outbox.acknowledge("a", generation, old_page)
        assert (cursor(outbox), waiting(outbox), outbox.backlog("a")[0]) == (3, [], 0)


def test_many_threads_at_once_lose_and_mix_up_nothing(tmp_path: Path) -> None:
    names = [str(number) for number in range(150)]
    got: dict[str, list[str]] = {"a": [], "b": []}
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:

        def read(sink: str) -> None:
            while len(got[sink]) < len(names):
                got[sink] += deliver(outbox, sink, limit=7)
                outbox.backlog(sink)
                outbox.wait(sink, 0.05)

        threads = [threading.Thread(target=read, args=(sink,)) for sink in got]
        for thread in threads:
            thread.start()
        commit(outbox, *names)
        for thread in threads:
            thread.join(60)
        assert got == {"a": names, "b": names}


# Dead letters


def test_a_dead_letter_that_is_to_be_sent_again_is_given_out_until_it_is_settled(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO)) as outbox:
        commit(outbox, "1", "2")
        add_dead_letter(outbox)
        add_dead_letter(outbox)
        assert outbox.dead_letter_counts() == {"a": 2}
        assert outbox.retries("a", 10) == []
        retry_dead_letters(outbox, tmp_path, 1, 2)
        (first, one), (second, two) = outbox.retries("a", 10)
        assert (one.id, one.envelope["id"], two.id) == ("1", "1", "2")
        assert outbox.retries("b", 10) == []
        outbox.settle_retry(first)
        outbox.settle_retry(second, detail="400 again")
        assert outbox.retries("a", 10) == []
        assert rows(tmp_path, "SELECT id, reason, detail FROM dead_letter WHERE retry < 2") == [
            ("2", REJECTED, "400 again")
        ]


def test_text_that_cannot_be_stored_as_it_is_stops_nothing(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        outbox.set_meta({"vm_id": "half a pair: \ud83d"})
        commit(outbox, "1")
        add_dead_letter(outbox, detail="\udfff")
        assert outbox.storage_error is None
        assert outbox.dead_letter_counts() == {"a": 1}


# What is forgotten when


def test_pruning_forgets_what_every_sink_has_had_once_it_is_old_and_nothing_else(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, sinks=TWO, clock=clock, retain_seconds=60)) as outbox:
        commit(outbox, "1", "2", "3")
        deliver(outbox, "a")
        deliver(outbox, "b", limit=2)
        outbox.prune()
        assert len(rows(tmp_path, "SELECT id FROM event")) == 3
        clock.advance(61)
        commit(outbox, "4")
        outbox.prune()
        assert rows(tmp_path, "SELECT id FROM event") == [("3",), ("4",)]
        clock.advance(365 * 86_400)
        outbox.prune()
        assert waiting(outbox, "b") == ["3", "4"]


def test_pruning_keeps_dead_letters_and_counts_for_thirty_days_and_retries_for_ever(tmp_path: Path) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock)) as outbox:
        outbox.commit([event("1"), event("2")], meta={}, occurrences={"f": 1})
        for _ in range(2):
            generation, page = outbox.pending("a", 1)
            letter = dead_letter("a", page[0], REJECTED, "", clock.steady())
            outbox.acknowledge("a", generation, page, dead_lettered=letter)
        retry_dead_letters(outbox, tmp_path, 2)
        clock.advance(29 * 86_400)
        outbox.prune()
        assert (outbox.dead_letter_counts(), outbox.occurrences("f")) == ({"a": 2}, 1)
        clock.advance(2 * 86_400)
        outbox.prune()
        assert (outbox.dead_letter_counts(), outbox.occurrences("f")) == ({"a": 1}, 0)


@pytest.mark.parametrize("seconds", [7200.0, -7200.0])
def test_ages_survive_a_jump_of_the_wall_clock_and_a_restart_after_it(tmp_path: Path, seconds: float) -> None:
    clock = MovedClock()
    with closing(open_outbox(tmp_path, clock=clock, retain_seconds=60)) as outbox:
        commit(outbox, "1", "2")
        add_dead_letter(outbox)
        outbox.failing("a", since=clock.steady())
        clock.advance(10)
        clock.jump(seconds)
        assert clock.jump_seconds() == seconds
        outbox.shift(seconds)
        assert clock.jump_seconds() == 0
        assert outbox.backlog("a") == (1, clock.steady() - 10)
        assert outbox._state.positions["a"].failing_since == clock.steady() - 10
        deliver(outbox)
        outbox.prune()
        assert len(rows(tmp_path, "SELECT id FROM event")) == 2
    new_clock = MovedClock()
    new_clock.advance(10 + seconds)
    with closing(open_outbox(tmp_path, clock=new_clock, retain_seconds=60)) as outbox:
        assert rows(tmp_path, "SELECT DISTINCT stored_at FROM event") == [(new_clock.steady() - 10,)]
        assert rows(tmp_path, "SELECT dead_at FROM dead_letter") == [(new_clock.steady() - 10,)]
        new_clock.advance(51)
        outbox.prune()
        assert rows(tmp_path, "SELECT id FROM event") == []


# Room


def test_delivered_events_are_deleted_first_at_the_size_limit_and_no_sink_loses_any(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, max_bytes=2**20)) as outbox:
        for number in range(400):
            commit(outbox, str(number), size=8000)
            assert deliver(outbox) == [str(number)]
        assert outbox.dead_letter_counts() == {}
        assert used_bytes(outbox) <= 2**20
        assert (tmp_path / "outbox.db").stat().st_size < 2**21


def test_old_records_of_done_work_go_before_an_event_that_a_sink_waits_for(tmp_path: Path) -> None:
    clock = MovedClock()
    value = {"done": True, "text": "x" * 500}
    with closing(open_outbox(tmp_path, clock=clock, max_bytes=2**20)) as outbox:
        outbox.commit([], meta={}, records={("command", "open"): {**value, "done": False}})
        outbox.commit([], meta={}, records={("approved", "e"): {"text": "x"}})
        for number in range(300):
            clock.advance(1)
            records = {("command", f"{number}-{part}"): value for part in range(10)}
            outbox.commit([], meta={}, records=records)
        commit(outbox, *map(str, range(80)), size=7000)
        assert used_bytes(outbox) <= 2**20
        assert waiting(outbox) == [str(number) for number in range(80)]
        assert outbox.losses() == []
        assert outbox.record("command", "0-0") is None
        assert outbox.record("command", "299-9") == value
        assert outbox.record("command", "open") == {**value, "done": False}
        assert outbox.record("approved", "e") == {"text": "x"}


def test_a_limit_below_the_size_of_an_empty_file_blocks_no_commit(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, max_bytes=1)) as outbox:
        commit(outbox, "1", "2")
        assert outbox.storage_error is None


def test_bodies_of_dead_letters_go_before_an_event_that_a_sink_waits_for(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, max_bytes=2**20)) as outbox:
        for number in range(100):
            commit(outbox, f"dead {number}", size=5000)
            add_dead_letter(outbox)
        commit(outbox, *map(str, range(80)), size=7000)
        assert waiting(outbox) == [str(number) for number in range(80)]
        assert outbox.dead_letter_counts() == {"a": 100}
        assert rows(tmp_path, "SELECT COUNT(*) FROM dead_letter WHERE body IS NULL")[0][0] > 0


def test_the_longest_failing_sink_loses_its_oldest_events_with_an_error_and_the_others_keep_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = MovedClock()
    sinks = {"well": EVERYTHING, "slow": EVERYTHING, "dead": EVERYTHING}
    with closing(open_outbox(tmp_path, sinks=sinks, clock=clock, max_bytes=2**20)) as outbox:
        outbox.failing("dead", since=clock.steady())
        clock.advance(1)
        outbox.failing("slow", since=clock.steady())
        number = 0
        while "dead" not in outbox.dead_letter_counts():
            number += 1
            commit(outbox, str(number), size=4000)
            deliver(outbox, "well")
            if number % 5 == 0:
                deliver(outbox, "slow", limit=4)
        expected = [str(n) for n in range(1, number + 1)]
        assert waiting(outbox, "slow") == expected[number // 5 * 4 :]
        letters = rows(
            tmp_path, "SELECT id, reason, body FROM dead_letter WHERE sink = 'dead' ORDER BY number"
        )
        assert [letter[0] for letter in letters] + waiting(outbox, "dead") == expected
        assert {letter[1:] for letter in letters} == {(OVERFLOW, None)}
        assert list(outbox.dead_letter_counts()) == ["dead"]
        assert len(letters) < 50
        assert outbox.backlog("dead")[0] == number - len(letters)
        assert outbox.storage_error is None
    loud = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "for sink dead are dropped" in loud[0].getMessage()


def test_a_sink_that_is_well_gets_every_event_however_long_another_one_overflows(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path, sinks=TWO, max_bytes=2**17)) as outbox:
        outbox.failing("b", since=0.0)
        for number in range(1200):
            commit(outbox, str(number), size=2000)
            assert deliver(outbox, "a") == [str(number)]
        assert set(outbox.dead_letter_counts()) == {"b"}
        assert used_bytes(outbox) <= 2**17
        assert waiting(outbox, "b")[-1] == "1199"


def test_a_page_that_was_given_up_meanwhile_moves_nothing_back_when_it_is_acknowledged_late(
    tmp_path: Path,
) -> None:
    with closing(open_outbox(tmp_path, max_bytes=2**18)) as outbox:
        commit(outbox, "0")
        generation, page = outbox.pending("a", 1)
        outbox.failing("a", since=0.0)
        commit(outbox, *map(str, range(1, 100)), size=4000)
        reached, left = cursor(outbox), outbox.backlog("a")[0]
        assert reached > 1
        outbox.acknowledge("a", generation, page)
        assert (cursor(outbox), outbox.backlog("a")[0]) == (reached, left)
        assert left == len(waiting(outbox))


# Another state


def test_a_state_that_is_moved_aside_is_kept_and_a_new_one_starts(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "1")
    with closing(open_outbox(tmp_path)) as outbox:
        epoch, count = outbox.meta("epoch"), outbox.count("reporterseq")
        kept_as = outbox.move_aside()
        assert outbox.storage_error is None
        assert (outbox.meta("watch"), waiting(outbox), outbox.backlog("a")) == ("", [], (0, None))
        assert (outbox.meta("epoch") != epoch, outbox.count("reporterseq")) == (True, count)
        commit(outbox, "2")
        assert deliver(outbox) == ["2"]
    assert kept_as.name.startswith("outbox.db.other-vm-")
    with closing(sqlite3.connect(kept_as)) as old:
        assert old.execute("SELECT id FROM event").fetchall() == [("1",)]


def test_held_events_and_dead_letters_wait_and_a_release_wakes_their_sinks(tmp_path: Path) -> None:
    with closing(open_outbox(tmp_path)) as outbox:
        commit(outbox, "kept")
        add_dead_letter(outbox)
    with closing(open_outbox(tmp_path)) as outbox:
        retry_dead_letters(outbox, tmp_path, 1)
        commit(outbox, "older")
        generation, _ = outbox.pending("a", 10)
        assert len(outbox.retries("a", 10)) == 1
        outbox.hold_kept(20.0)
        assert outbox.retries("a", 10) == []
        outbox.pending("a", 10)
        thread = threading.Timer(0.05, outbox.release_kept)
        thread.start()
        outbox.wait("a", 10.0)
        thread.join()
        assert outbox.generation > generation
        assert len(outbox.retries("a", 10)) == 1


def test_the_cost_of_a_page_does_not_grow_with_what_waits(tmp_path: Path) -> None:
    best: dict[int, float] = {}
    with ExitStack() as stack:
        outboxes: dict[int, Outbox] = {}
        for waits in (1_000, 20_000):
            outboxes[waits] = stack.enter_context(closing(open_outbox(tmp_path / str(waits))))
            outboxes[waits].commit([event(str(number), size=200) for number in range(waits)], meta={})
        for _ in range(15):
            # In turn, and on the thread's own time: what else runs on the machine takes from both alike.
            for waits, outbox in outboxes.items():
                began = time.thread_time()
                deliver(outbox, limit=64)
                best[waits] = min(best.get(waits, 1.0), time.thread_time() - began)
    assert best[20_000] < best[1_000] * 3


@pytest.mark.parametrize("step", [1, 2], ids=["one blocked event", "every other event is blocked"])
def test_the_cost_of_an_acknowledge_does_not_grow_with_what_is_done_behind_a_blocked_event(
    tmp_path: Path, step: int
) -> None:
    best: dict[int, float] = {}
    with ExitStack() as stack:
        for done in (500, 20_000):
            outbox = stack.enter_context(closing(open_outbox(tmp_path / str(done))))
            outbox.commit([event(str(number)) for number in range(done + 100)], meta={})
            generation, page = outbox.pending("a", 50_000)
            outbox.acknowledge("a", generation, page[1 : done + 1 : step])
            for stored in page[done + 1 :: step]:
                began = time.thread_time()
                outbox.acknowledge("a", generation, [stored])
                best[done] = min(best.get(done, 1.0), time.thread_time() - began)
            assert cursor(outbox) == 0
    assert best[20_000] < best[500] * 3


def test_what_is_done_behind_a_blocked_event_survives_a_kill(tmp_path: Path) -> None:
    outbox = open_outbox(tmp_path / "state")
    commit(outbox, *map(str, range(10)))
    generation, page = outbox.pending("a", 10)
    outbox.acknowledge("a", generation, page[2:5])
    outbox.acknowledge("a", generation, page[6:8])
    outbox.acknowledge("a", generation, page[:1])
    image = kill(outbox, tmp_path / "state", tmp_path / "image")
    with closing(open_outbox(image)) as outbox:
        assert (cursor(outbox), outbox.backlog("a")[0]) == (1, 4)
        assert waiting(outbox) == ["1", "5", "8", "9"]
        generation, page = outbox.pending("a", 10)
        outbox.acknowledge("a", generation, page[:2])
        assert cursor(outbox) == 8
        assert rows(image, "SELECT seq FROM done") == [(8,)]
