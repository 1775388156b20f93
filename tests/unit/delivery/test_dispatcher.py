"""Delivery from the outbox to a sink: order, retries, dead letters, and how it ends."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bridge.delivery.course import NOTHING_WAITS
from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Stopped, Unavailable
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import inspect
from bridge.runtime.threads import start_thread
from bridge.runtime.time import iso_utc
from tests.support.clock import MovedClock
from tests.support.memory_sink import MemorySink
from tests.support.moved_delivery import MakeDelivery, MovedDelivery
from tests.support.outbox import OTHER_TYPE, TYPE, open_outbox, retry_dead_letters
from tests.support.process import LIMIT_SECONDS, wait_until

FOREVER = 1e9


@pytest.fixture
def rig(make: MakeDelivery) -> MovedDelivery:
    """Return a delivery that has not failed."""
    return make()


def unavailable(*, status: int | None = 503, **more: Any) -> Unavailable:
    return Unavailable("not now", status=status, **more)


# --- what arrives ---


def test_an_answer_that_comes_after_the_process_has_closed_the_outbox_is_no_error(
    rig: MovedDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    is_sending, may_answer = threading.Event(), threading.Event()

    def hang(_: StoredEvent) -> None:
        is_sending.set()
        may_answer.wait(LIMIT_SECONDS)

    rig.sink.refuse = hang
    rig.commit("1")
    thread = start_thread("sink-a", rig.dispatcher.run)
    assert is_sending.wait(LIMIT_SECONDS)
    rig.outbox.close()
    may_answer.set()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
    assert rig.received() == ["1"]
    with pytest.raises(Stopped):
        rig.outbox.pending("a", 1)
    again = open_outbox(rig.folder.path, sinks={"a": (Filter(), True)}, clock=rig.clock)
    assert [one.id for one in again.pending("a", 1)] == ["1"]
    again.close()


# --- failures ---


@pytest.mark.parametrize("type_", [TYPE, "io.imdsbridge.approval.failed.v1"])
def test_while_a_young_notice_or_receipt_waits_retries_are_at_most_two_seconds_apart(
    rig: MovedDelivery, type_: str
) -> None:
    rig.sink.refuse = lambda _: unavailable()
    rig.commit("other", type_=OTHER_TYPE)
    rig.commit("urgent", type_=type_)
    assert max(rig.deliver(seconds=890)) == 2.0
    assert 50.0 < max(rig.deliver(seconds=600)) <= 60.0
    rig.sink.refuse = lambda _: None
    rig.deliver()
    assert sorted(rig.received()) == ["other", "urgent"]


def test_a_notice_that_comes_during_a_long_wait_is_tried_within_two_seconds(make: MakeDelivery) -> None:
    rig = make(*(unavailable(status=None, is_unreached=True) for _ in range(20)))
    rig.commit("1", type_=OTHER_TYPE)
    rig.deliver(seconds=300)
    rig.sink.failures.clear()
    assert rig.received() == []
    rig.commit("urgent")
    assert sum(rig.deliver()) <= 2.0
    assert rig.received() == ["1", "urgent"] or rig.received() == ["urgent", "1"]


def test_a_receiver_that_asks_for_time_gets_it_while_the_process_stops(make: MakeDelivery) -> None:
    rig = make(
        unavailable(status=429, retry_after_seconds=60), unavailable(status=503, retry_after_seconds=40)
    )
    rig.commit("1")
    rig.dispatcher.stop_when_drained()
    assert rig.deliver(seconds=30) == []
    assert len(rig.sink.failures) == 1
    assert rig.deliver(seconds=31) == [30]
    assert rig.deliver() == [39]
    assert rig.received() == ["1"]


def test_the_status_shows_the_next_try_as_long_as_something_fails(make: MakeDelivery) -> None:
    rig = make(*(unavailable(status=None) for _ in range(3)))
    rig.commit("1", type_=OTHER_TYPE)
    assert rig.dispatcher.status().next_retry_at is None
    rig.deliver(seconds=1)
    after_two = rig.clock.now() + timedelta(seconds=0.5)
    assert rig.dispatcher.status().next_retry_at == iso_utc(after_two)
    rig.deliver()
    assert rig.dispatcher.status().next_retry_at is None


def test_what_will_never_be_accepted_is_dead_lettered_and_the_next_goes_on(make: MakeDelivery) -> None:
    rig = make(Rejected("https://x answered 422: no such channel", status=422))
    rig.commit("1", "2", subject="s")
    assert rig.deliver() == []
    assert rig.received() == ["2"]
    assert rig.dead() == [("1", "rejected", "https://x answered 422: no such channel")]
    status = rig.dispatcher.status()
    assert (status.state, status.backlog) == ("ok", 0)
    assert status.last_error == "1: https://x answered 422: no such channel"


@pytest.mark.parametrize(("uncertain", "is_delivered"), [(1, True), (0, False)])
def test_a_conflict_about_an_event_that_an_earlier_process_sent_means_that_it_was_delivered(
    tmp_path: Path, uncertain: int, is_delivered: bool
) -> None:
    with closing(MovedDelivery(tmp_path)) as rig:
        rig.sink.failures.append(unavailable(status=None, uncertain=uncertain))
        rig.commit("1")
        rig.deliver(seconds=0)
    with closing(MovedDelivery(tmp_path)) as rig:
        rig.sink.failures.append(Rejected("https://x answered 409", status=409))
        rig.deliver()
        assert rig.dead() == ([] if is_delivered else [("1", "rejected", "https://x answered 409")])
        assert rig.outbox.backlog("a") == (0, None)


def test_an_event_that_was_being_sent_when_the_process_was_killed_may_have_arrived(tmp_path: Path) -> None:
    with closing(MovedDelivery(tmp_path / "state")) as rig:

        def copy(_: StoredEvent) -> None:
            shutil.copytree(tmp_path / "state", tmp_path / "killed")

        rig.sink.refuse = copy
        rig.commit("1")
        rig.deliver()
    with closing(MovedDelivery(tmp_path / "killed")) as rig:
        rig.sink.failures.append(Rejected("https://x answered 409", status=409))
        rig.deliver()
        assert (rig.dead(), rig.outbox.backlog("a")) == ([], (0, None))


def test_after_a_restart_all_is_due_and_then_the_pauses_go_on_whatever_the_clock(rig: MovedDelivery) -> None:
    rig.sink.refuse = lambda _: unavailable()
    rig.commit("1", type_=OTHER_TYPE)
    rig.deliver(seconds=100)
    rig.outbox.close()
    tries = 8
    for wall in (rig.clock.wall(), rig.clock.wall() - 86400):
        clock = MovedClock(wall)
        with closing(MovedDelivery(rig.folder.path, clock=clock)) as again:
            again.sink.refuse = lambda _: unavailable()
            status = again.dispatcher.status()
            assert (status.state, status.failures) == ("retrying", tries)
            assert again.deliver(seconds=70) == [60]
            assert len(again.sink.calls) == 2
            tries += 2


@pytest.mark.parametrize(
    ("failures", "dead"),
    [
        ([{"uncertain": 0}], ["1", "2", "3"]),
        ([{"uncertain": 1}], ["2", "3"]),
        ([{"uncertain": 2}], ["3"]),
        ([{"uncertain": 1}, {"status": 503}], ["2", "3"]),
    ],
    ids=["none may have", "one may have", "two may have", "one may have, and has clearly failed since"],
)
def test_a_conflict_about_an_event_that_may_have_arrived_means_that_it_was_delivered(
    make: MakeDelivery, failures: list[dict[str, Any]], dead: list[str]
) -> None:
    rig = make(*(unavailable(**{"status": None, **failure}) for failure in failures), max_batch=3)
    rig.sink.failures.extend(Rejected("no", status=409) for _ in range(3))
    rig.commit("1", "2", "3", subject="s")
    rig.deliver()
    assert [name for name, *_ in rig.dead()] == dead


def test_a_sink_that_answers_with_a_refusal_counts_as_reachable(make: MakeDelivery) -> None:
    rig = make(unavailable(), Rejected("400"))
    rig.commit("1")
    assert rig.deliver() == [0.5]
    assert (rig.dispatcher.status().state, rig.dispatcher.status().failures) == ("rejecting", 0)


def test_a_batch_that_is_accepted_in_part_goes_on_behind_that_part(make: MakeDelivery) -> None:
    rig = make(Unavailable("2 of 4", delivered=2), Rejected("refused"), max_batch=4)
    rig.commit("1", "2", "3", "4", "5", "6")
    assert rig.deliver() == [0.5]
    assert rig.received() == ["1", "2", "4", "5", "6"]
    assert rig.dead() == [("3", "rejected", "refused")]


def test_wrong_credentials_are_logged_as_an_error_and_read_again_before_the_next_try(
    make: MakeDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(Unavailable("503"), Misconfigured("401"), Misconfigured("401"))
    rig.commit("1", "2", subject="s")
    rig.deliver()
    assert rig.sink.calls == ["send", "send", "reload", "send", "reload", "send", "send"]
    assert rig.received() == ["1", "2"]
    assert rig.dead() == []
    assert [record.levelno for record in caplog.records if "credentials" in record.message] == [logging.ERROR]


def test_a_receiver_that_is_gone_gets_no_more_events_and_none_is_lost(
    make: MakeDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(Gone("410"))
    rig.commit("1", "2")
    rig.thread.start()
    wait_until(lambda: rig.sink.is_closed)
    rig.commit("3")
    assert rig.thread.is_alive(), "a thread that ends makes the whole process stop"
    rig.run_to_the_end()
    assert (rig.received(), rig.dead(), rig.sink.is_closed) == ([], [], True)
    status = rig.dispatcher.status()
    assert (status.state, status.backlog, status.next_retry_at) == ("gone", 3, None)
    assert [record.levelno for record in caplog.records if "410 Gone" in record.message] == [logging.ERROR]


# --- one event does not block the rest ---


def poison(*ids: str, status: int | None = 500) -> Callable[[StoredEvent], DeliveryError | None]:
    """Fail for events with these ids only."""
    return lambda stored: unavailable(status=status) if stored.id in ids else None


def test_an_event_that_fails_holds_back_no_event_of_another_subject(rig: MovedDelivery) -> None:
    rig.sink.refuse = poison("bad")
    rig.commit("bad", type_=OTHER_TYPE, subject="vm")
    rig.commit("behind", type_=OTHER_TYPE, subject="vm")
    rig.commit(*(f"notice {number}" for number in range(119)))
    rig.deliver(seconds=0.05)
    assert rig.received() == [f"notice {number}" for number in range(119)]
    assert rig.deliver(seconds=7.6) == pytest.approx([0.45, 1, 2, 4])
    rig.sink.refuse = poison()
    rig.deliver()
    assert rig.received()[119:] == ["bad", "behind"]


@pytest.mark.parametrize("status", [500, None])
def test_an_event_that_keeps_failing_is_retried_until_it_is_too_old_and_delays_no_other(
    make: MakeDelivery, status: int | None
) -> None:
    rig = make(max_age_seconds=3600.0)
    rig.sink.refuse = poison("bad", status=status)
    rig.commit("bad", type_=OTHER_TYPE, subject="vm")
    for number in range(10):
        rig.commit(str(number))
        rig.deliver(seconds=300)
        assert rig.received() == [str(one) for one in range(number + 1)]
    assert rig.dispatcher.status().state == "retrying"
    assert rig.dispatcher.status().next_retry_at is not None
    rig.deliver()
    assert [(name, reason) for name, reason, _ in rig.dead()] == [("bad", "expired")]
    assert rig.dispatcher.status().state == "ok"


@pytest.mark.parametrize(("max_batch", "status", "within"), [(1, 500, 0.5), (100, 500, 0.5), (1, None, 2.0)])
def test_a_notice_that_comes_while_another_event_fails_is_sent_within_half_a_second_or_two_if_it_hangs(
    make: MakeDelivery, max_batch: int, status: int | None, within: float
) -> None:
    rig = make(max_batch=max_batch)
    rig.sink.refuse = poison("bad", status=status)
    rig.commit("bad", type_=OTHER_TYPE, subject="vm")
    rig.deliver(seconds=900)
    for number in range(5):
        rig.commit("behind" + str(number), type_=OTHER_TYPE, subject="vm")
        rig.commit(str(number))
        rig.deliver(seconds=within)
        assert rig.received() == [str(one) for one in range(number + 1)]
        rig.deliver(seconds=300)


@pytest.mark.parametrize("max_batch", [1, 100])
def test_an_outage_without_answers_costs_few_requests_however_many_notices_wait(
    make: MakeDelivery, max_batch: int
) -> None:
    rig = make(max_batch=max_batch)
    rig.sink.refuse = lambda _: unavailable(status=None)
    rig.commit(*map(str, range(300)))
    rig.deliver(seconds=120)
    assert len(rig.sink.calls) <= 2 * 120 / 2 + 16  # two in each round, and a little more at first


@pytest.mark.parametrize(
    ("status", "is_unreached"), [(503, False), (401, False), (None, False), (None, True)]
)
def test_after_an_outage_everything_is_delivered_at_once(
    rig: MovedDelivery, status: int | None, is_unreached: bool
) -> None:
    names = [str(number) for number in range(20)]
    rig.sink.refuse = lambda _: unavailable(status=status, is_unreached=is_unreached)
    for name in names:
        rig.commit(name, type_=OTHER_TYPE)
        rig.deliver(seconds=100)
    rig.sink.refuse = lambda _: None
    assert sum(rig.deliver()) <= 60
    # What failed least often comes first; what never reached the receiver did not fail.
    assert rig.received() == names if is_unreached else sorted(rig.received()) == sorted(names)


def test_a_page_that_was_read_before_an_operator_dropped_what_waits_is_read_again(make: MakeDelivery) -> None:
    rig = make(unavailable(status=None, is_unreached=True))
    rig.commit("1", "2")
    rig.deliver(seconds=0.1)
    assert inspect.drop_waiting(rig.folder, "a") == 2
    rig.commit("3")
    rig.outbox.recover()
    rig.deliver()
    assert (rig.received(), rig.outbox.backlog("a")) == (["3"], (0, None))


# --- age ---


@pytest.mark.parametrize(
    ("errors", "more"), [([], ""), ([Unavailable("503")], "; the last error: 503")], ids=["untried", "tried"]
)
def test_what_waited_too_long_is_dead_lettered_as_expired_with_the_last_error_of_the_receiver(
    make: MakeDelivery, errors: list[DeliveryError], more: str
) -> None:
    rig = make(*errors, max_age_seconds=10.0)
    rig.commit("old", "older than it looks")
    for _ in errors:
        rig.dispatcher.step()
    rig.clock.advance(11)
    rig.commit("new")
    rig.run_to_the_end()
    why = ("expired", f"older than max_age_seconds = 10{more}")
    assert (rig.received(), rig.dead()) == (["new"], [("old", *why), ("older than it looks", *why)])


def test_an_outage_is_logged_once_and_then_every_ten_minutes(
    make: MakeDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(*(Unavailable(f"failure {number}") for number in range(36)))
    rig.commit("1", type_=OTHER_TYPE)
    with caplog.at_level(logging.INFO):
        rig.deliver()
    logged = [record.message.rpartition(": ")[2] for record in caplog.records if "retrying" in record.message]
    assert logged == ["failure 0", "failure 16", "failure 26"]
    assert "delivering again" in caplog.text


def test_the_status_shows_how_a_sink_is(make: MakeDelivery) -> None:
    rig = make(Unavailable("503"))
    rig.commit("1", "2")
    rig.clock.advance(7)
    before = rig.dispatcher.status()
    assert (before.backlog, before.oldest_waits_seconds, before.last_success_at) == (2, 7.0, None)
    rig.deliver()
    after = rig.dispatcher.status()
    assert (after.backlog, after.oldest_waits_seconds, after.failures) == (0, None, 0)
    assert after.last_error == "503"
    assert str(after.last_error_at) < str(after.last_success_at)


def test_what_waits_while_a_program_runs_within_its_limit_has_not_waited(rig: MovedDelivery) -> None:
    until = iso_utc(rig.clock.now() + timedelta(seconds=100))
    rig.commit("1", "2", type_="io.imdsbridge.scheduledevent.scheduled.v1", NotBeforeUtc=until)
    rig.clock.advance(400)
    for at_work, waits_seconds, notice_until in ((True, 0.0, None), (False, 400.0, until)):
        rig.sink.is_at_work = at_work
        status = rig.dispatcher.status()
        shown = (status.backlog, status.oldest_waits_seconds, status.notice_until)
        assert shown == (2, waits_seconds, notice_until)


def test_the_status_shows_until_when_a_notice_that_waits_is_one(rig: MovedDelivery) -> None:
    soon, later = (rig.clock.now() + timedelta(seconds=seconds) for seconds in (30, 900))
    for kind, until in (("completed", soon), ("updated", later), ("scheduled", soon)):
        rig.commit(kind, type_=f"io.imdsbridge.scheduledevent.{kind}.v1", NotBeforeUtc=iso_utc(until))
    assert rig.dispatcher.status().notice_until is None
    rig.clock.advance(5.1)
    assert rig.dispatcher.status().notice_until == iso_utc(soon)
    rig.deliver()
    assert rig.dispatcher.status().notice_until is None
    began = rig.clock.now()
    rig.commit("1", type_="io.imdsbridge.scheduledevent.started.v1", NotBeforeUtc="never")
    rig.clock.advance(60)
    assert rig.dispatcher.status().notice_until == iso_utc(began)


# --- dead letters again ---


def retry_all(rig: MovedDelivery) -> None:
    numbers = [row["number"] for row in inspect.dead_letters(rig.folder)]
    retry_dead_letters(rig.outbox, rig.folder.path, *numbers)


def test_dead_letters_are_sent_again_and_one_that_is_refused_again_stays_with_the_new_reason(
    make: MakeDelivery,
) -> None:
    rig = make(Rejected("400"), Rejected("400"))
    rig.commit("1", "2")
    rig.deliver()
    assert [name for name, _, _ in rig.dead()] == ["1", "2"]
    retry_all(rig)
    rig.sink.refuse = lambda event: Rejected("422 this time") if event.id == "1" else None
    rig.commit("3")
    rig.deliver()
    assert (rig.received(), rig.dead()) == (["3", "2"], [("1", "rejected", "422 this time")])
    assert [row["retry"] for row in inspect.dead_letters(rig.folder)] == [False]


# --- beside others, and at the end ---


def test_a_sink_that_hangs_holds_up_no_other(make: MakeDelivery) -> None:
    rig = make(others=["hangs"])
    hanging, let_go = MemorySink(), threading.Event()

    def hang(_: StoredEvent) -> None:
        let_go.wait(LIMIT_SECONDS)

    hanging.refuse = hang
    other = Dispatcher("hangs", hanging, max_age_seconds=FOREVER, outbox=rig.outbox, clock=rig.clock)
    threads = [start_thread("hangs", other.run), rig.thread]
    rig.thread.start()
    rig.commit(*map(str, range(50)))
    assert len(rig.sink.wait_for(50)) == 50
    assert rig.outbox.backlog("hangs")[0] == 50
    let_go.set()
    for run, thread in zip((other, rig.dispatcher), threads, strict=True):
        run.stop_when_drained()
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


def test_an_event_that_is_committed_just_before_a_wait_ends_it(
    rig: MovedDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.dispatcher.step() == NOTHING_WAITS
    rig.commit("1")
    seen: list[int] = []
    monkeypatch.setattr(rig.outbox, "wait", lambda changes, _: seen.append(changes))
    rig.dispatcher._pause(NOTHING_WAITS)
    assert seen[0] < rig.outbox.changes


def test_a_running_dispatcher_notices_the_stop_while_it_waits(make: MakeDelivery) -> None:
    rig = make(*(unavailable(status=None) for _ in range(12)))
    rig.commit("1", type_=OTHER_TYPE)
    rig.deliver(seconds=200)
    rig.sink.failures.clear()
    rig.thread.start()
    changes = rig.outbox.changes
    rig.dispatcher.begin_drain()
    assert rig.outbox.changes > changes, "who waits is woken"
    assert [one.id for one in rig.sink.wait_for(1)] == ["1"]
    assert rig.thread.is_alive()
    rig.commit("2")
    rig.sink.wait_for(2)
    rig.dispatcher.stop_when_drained()
    rig.thread.join(LIMIT_SECONDS)
    assert not rig.thread.is_alive()


# --- how fast ---


def test_an_event_that_is_committed_while_the_last_step_ends_is_delivered_at_the_stop(
    rig: MovedDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = rig.dispatcher.step

    def commit_behind_it() -> float | None:
        wait_seconds = step()
        if not rig.outbox.changes:
            rig.commit("last")
            rig.dispatcher.stop_when_drained()
        return wait_seconds

    rig.outbox.changes = 0
    monkeypatch.setattr(rig.dispatcher, "step", commit_behind_it)
    rig.dispatcher.run()
    assert rig.received() == ["last"]


@pytest.mark.parametrize(("max_batch", "waits"), [(1, [0.25, 0.25]), (2, [0.25])])
def test_a_rate_limit_lets_time_pass_between_requests_but_not_before_the_first(
    make: MakeDelivery, max_batch: int, waits: list[float]
) -> None:
    rig = make(max_batch=max_batch, max_per_second=4)
    rig.commit("1", "2", "3")
    assert rig.deliver() == pytest.approx(waits)
    assert rig.received() == ["1", "2", "3"]


def test_a_rate_limit_is_waited_for_without_work_while_events_come(
    make: MakeDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(max_per_second=20)
    monkeypatch.setattr(rig.clock, "monotonic", time.monotonic)
    steps = 0
    step = rig.dispatcher.step

    def counted() -> float | None:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(rig.dispatcher, "step", counted)
    rig.commit("1", "2")
    rig.thread.start()
    rig.sink.wait_for(1)
    rig.commit("3")
    rig.sink.wait_for(3)
    assert steps < 20


def test_a_rate_limit_holds_for_an_event_that_is_retried_on_its_own(make: MakeDelivery) -> None:
    rig = make(max_per_second=1)
    rig.commit("bad", type_=OTHER_TYPE)
    rig.commit(*map(str, range(10)))
    sent_at: list[float] = []
    refuse = poison("bad")

    def noted(stored: StoredEvent) -> DeliveryError | None:
        sent_at.append(rig.clock.monotonic())
        return refuse(stored)

    rig.sink.refuse = noted
    rig.deliver(seconds=60)
    assert set(rig.received()) == set(map(str, range(10)))
    assert min(later - sooner for sooner, later in pairwise(sent_at)) >= 1 - 1e-9


def test_several_events_that_fail_at_different_times_do_not_put_off_that_secrets_are_read_again(
    rig: MovedDelivery,
) -> None:
    rig.commit("well")
    rig.deliver()
    rig.sink.refuse = lambda _: Misconfigured("403", status=403)
    for number in range(8):
        rig.commit(str(number), subject=str(number))
        rig.dispatcher.step()
        rig.clock.advance(0.2)
    assert rig.sink.calls.count("reload") >= 2


def test_a_misconfigured_sink_with_nothing_to_send_is_not_reloaded(make: MakeDelivery) -> None:
    rig = make(Misconfigured("401"), max_age_seconds=100.0)
    rig.commit("1")
    rig.dispatcher.step()  # fails
    rig.clock.advance(200.0)
    rig.deliver()  # and then the event is too old
    assert [reason for _, reason, _ in rig.dead()] == ["expired"]
    for _ in range(5):
        assert rig.dispatcher.step() == NOTHING_WAITS
    assert rig.sink.calls == ["send"]


def test_a_failure_that_nothing_waits_for_any_more_causes_no_work(make: MakeDelivery) -> None:
    rig = make(unavailable(status=None))
    rig.commit("1", type_=OTHER_TYPE)
    rig.dispatcher.step()  # fails, and then an operator drops it
    inspect.drop_waiting(rig.folder, "a")
    rig.outbox.recover()
    assert rig.deliver(seconds=300) == [0.5]
    assert rig.dispatcher.step() == NOTHING_WAITS


def test_a_jump_of_the_wall_clock_expires_nothing(make: MakeDelivery) -> None:
    rig = make(unavailable(), max_age_seconds=100.0)
    rig.commit("1")
    rig.dispatcher.step()
    rig.clock.jump(200.0)
    rig.deliver()
    assert (rig.received(), rig.dead()) == (["1"], [])


# --- what the log tells ---


def test_what_has_started_is_urgent_also_after_the_wall_clock_was_set_back(rig: MovedDelivery) -> None:
    rig.clock.jump(-3600)
    rig.commit("document", type_=OTHER_TYPE)
    rig.commit("started", type_=TYPE.replace("scheduled.v1", "started.v1"), EventStatus="Started")
    rig.clock.advance(6)
    assert rig.dispatcher.status().notice_until == iso_utc(rig.clock.now() - timedelta(seconds=6))
    rig.deliver()
    assert rig.received() == ["started", "document"]


def test_the_debug_log_tells_what_is_chosen_and_why_events_wait(
    rig: MovedDelivery, caplog: pytest.LogCaptureFixture
) -> None:
    rig.sink.refuse = lambda one: unavailable(status=500 if one.id == "bad" else None)
    with caplog.at_level(logging.DEBUG):
        rig.commit("bad", "hangs")
        rig.deliver(seconds=2)
    texts = ("sends the most urgent of what is due", "a failed event waits, and what is behind it")
    told = {record.getMessage().removeprefix("sink a: ") for record in caplog.records}
    assert told >= {*texts, "waits up to 0.05 s"}
    assert any(getattr(record, "whole_sink", None) == "not now" for record in caplog.records)


# --- what would delay a notice, or others ---


def in_seconds(rig: MovedDelivery, seconds: float) -> str:
    return iso_utc(rig.clock.now() + timedelta(seconds=seconds))


def passed(rig: MovedDelivery, until: Callable[[], bool], *, most: float = 1e5) -> float:
    """Deliver until something holds; return how many seconds that took."""
    began = rig.clock.monotonic()
    while not until() and rig.clock.monotonic() < began + most:
        rig.clock.advance(min(rig.dispatcher.step() or 0.0, most))
    return rig.clock.monotonic() - began


@pytest.mark.parametrize("behind", [0, 1])
def test_a_poison_event_is_blamed_also_where_others_of_its_key_are_behind_it(
    make: MakeDelivery, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    rig = make(max_batch=64)
    rig.sink.refuse = poison("bad")
    rig.commit("bad", subject="poison", NotBeforeUtc=in_seconds(rig, 86400))
    rig.deliver(seconds=1)
    rig.commit("ok")
    rig.deliver(seconds=20)
    for number in range(behind):
        rig.commit(f"behind {number}", subject="poison", NotBeforeUtc=in_seconds(rig, 86400))
    rig.sink.is_digest = True  # all or none of a batch
    send = rig.sink.send

    def slow(events: Sequence[StoredEvent]) -> None:
        rig.clock.advance(0.1)
        send(events)

    monkeypatch.setattr(rig.sink, "send", slow)
    rig.commit(*map(str, range(400)), type_=OTHER_TYPE)
    rig.clock.advance(61)
    assert passed(rig, lambda: rig.outbox.backlog("a")[0] == 1 + behind) < 5


def test_what_is_moved_before_the_head_of_its_key_is_the_head(make: MakeDelivery) -> None:
    rig = make(others=["old"])
    rig.commit("1", subject="s")
    rig.outbox.acknowledge("a", rig.outbox.pending("a", 9))
    rig.commit("2", subject="s")
    rig.commit("3", "4", type_=OTHER_TYPE)
    rig.outbox.acknowledge("old", rig.outbox.pending("old", 9)[1:])
    inspect.move(rig.folder, "old", "a")
    rig.outbox.recover()
    rig.sink.refuse = poison("1")
    rig.deliver(seconds=60)
    assert sorted(rig.received()) == ["3", "4"]
    assert len(rig.sink.calls) < 60
    rig.sink.refuse = lambda _: None
    rig.deliver()
    assert rig.received()[-2:] == ["1", "2"]


@pytest.mark.parametrize("more", [{"retry_after_seconds": 3600.0}, {}])
def test_a_notice_does_not_wait_for_the_retry_of_an_older_one_of_its_key(
    rig: MovedDelivery, more: dict[str, Any]
) -> None:
    rig.sink.refuse = lambda _: unavailable(**more)
    rig.commit("scheduled", subject="s", NotBeforeUtc=in_seconds(rig, 1500))
    rig.deliver(seconds=1500)
    rig.sink.refuse = lambda _: None
    rig.commit("started", subject="s", NotBeforeUtc=in_seconds(rig, 0))
    assert passed(rig, lambda: "started" in rig.received()) <= 2


def test_what_was_learned_of_events_does_not_outlast_them(make: MakeDelivery) -> None:
    rig = make(unavailable(status=500), max_batch=10)
    rig.commit(*"abcd", type_=OTHER_TYPE)
    rig.deliver()
    rig.clock.advance(3600)
    rig.sink.refuse = lambda _: unavailable(status=None)  # an outage
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 300))
    rig.deliver(seconds=200)
    rig.sink.refuse = lambda _: None
    assert passed(rig, lambda: "notice" in rig.received()) <= 2


def test_one_failed_batch_does_not_turn_an_outage_into_many_poison_events(make: MakeDelivery) -> None:
    rig = make(unavailable(status=500), max_batch=16)
    rig.commit(*map(str, range(200)), type_=OTHER_TYPE)
    passed(rig, lambda: bool(rig.received()))
    rig.sink.refuse = lambda _: unavailable(status=None)
    rig.deliver(seconds=10)
    before = len(rig.sink.calls)
    rig.deliver(seconds=290)
    assert len(rig.sink.calls) - before < 40


def test_dead_letters_that_are_sent_again_stand_behind_notices(rig: MovedDelivery) -> None:
    rig.sink.refuse = lambda _: Rejected("400", status=400)
    for number in range(30):
        rig.commit(str(number), subject=str(number), NotBeforeUtc=in_seconds(rig, 30))
    rig.deliver()
    rig.clock.advance(7 * 86400)
    rig.sink.refuse = lambda _: None
    retry_all(rig)
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 900))
    rig.deliver()
    assert rig.received()[0] == "notice"


def test_a_dead_letter_that_is_sent_again_makes_no_notice_of_its_event_less_urgent(
    rig: MovedDelivery,
) -> None:
    rig.sink.refuse = lambda _: Rejected("400", status=400)
    rig.commit("old", type_=TYPE.replace("scheduled.v1", "started.v1"), subject="E")
    rig.deliver()
    rig.sink.refuse = lambda _: None
    rig.commit("document", type_=OTHER_TYPE)
    rig.commit("new", subject="E", NotBeforeUtc=in_seconds(rig, 30))
    retry_all(rig)
    rig.deliver()
    assert rig.received()[0] == "new"


def test_what_is_too_old_is_dead_lettered_many_at_a_time(make: MakeDelivery) -> None:
    rig = make(max_age_seconds=3600.0)
    rig.commit(*map(str, range(300)), type_=OTHER_TYPE)
    rig.clock.advance(3601)
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 30))
    steps = 0
    while not rig.received():
        rig.dispatcher.step()
        steps += 1
    assert steps < 12
    assert len(rig.dead()) == 300


def test_an_event_that_keeps_failing_is_not_shown_as_held_and_ends_no_pause_of_a_digest(
    make: MakeDelivery,
) -> None:
    copies = make(holds_copies=True)
    copies.sink.refuse = poison("bad")
    copies.commit("bad", NotBeforeUtc=in_seconds(copies, 600))
    copies.deliver(seconds=1)
    copies.commit("ok")
    copies.deliver(seconds=100)
    assert not copies.dispatcher.status().is_held
    digest = make(digest_seconds=300.0)
    digest.sink.is_digest = True
    digest.sink.refuse = poison("bad")
    digest.commit("first", type_=OTHER_TYPE)
    digest.deliver(seconds=1)
    digest.commit("bad", type_=OTHER_TYPE)
    sent = []
    for number in range(120):  # 20 minutes: in the first ten it is found out which event it is
        digest.commit(str(number), type_=OTHER_TYPE)
        digest.deliver(seconds=10)
        sent.append(len(digest.sink.batches))
    assert sent[-1] - sent[59] <= 3


def test_a_sink_that_has_learned_to_take_one_at_a_time_is_sent_the_most_urgent_next(
    make: MakeDelivery,
) -> None:
    rig = make(max_batch=64)
    rig.sink.max_batch = 1
    rig.commit(*map(str, range(9)), type_=OTHER_TYPE)
    rig.dispatcher.step()
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 30))
    rig.deliver()
    assert rig.sink.batches[:2] == [["0"], ["notice"]]


def test_a_notice_is_not_late_after_a_receiver_that_was_back_for_one_event(rig: MovedDelivery) -> None:
    rig.sink.refuse = lambda _: unavailable(status=None)
    rig.commit("other", type_=OTHER_TYPE)
    rig.deliver(seconds=1)
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 300))
    rig.deliver(seconds=4)
    accepted = iter([None])
    rig.sink.refuse = lambda event: (
        next(accepted, unavailable(status=None)) if event.id == "other" else unavailable(status=None)
    )
    rig.deliver(seconds=83)
    assert rig.received() == ["other"]
    rig.sink.refuse = lambda _: None
    assert passed(rig, lambda: "notice" in rig.received()) <= 2


@pytest.mark.parametrize("status", [503, None])
def test_notices_are_told_at_once_after_an_outage_that_comes_twice(
    rig: MovedDelivery, status: int | None
) -> None:
    rig.sink.refuse = lambda _: unavailable(status=status)
    rig.commit("1", "2", NotBeforeUtc=in_seconds(rig, 900))
    rig.deliver(seconds=40)
    rig.commit("document", type_=OTHER_TYPE)
    rig.sink.refuse = lambda event: None if event.id == "document" else unavailable(status=status)
    passed(rig, lambda: rig.received() == ["document"])
    rig.sink.refuse = lambda _: unavailable(status=status)
    rig.deliver(seconds=300)
    rig.sink.refuse = lambda _: None
    assert passed(rig, lambda: len(rig.received()) == 3) <= 2


def test_what_failed_before_a_restart_is_told_at_once_after_it(tmp_path: Path) -> None:
    with closing(MovedDelivery(tmp_path)) as rig:
        rig.sink.refuse = lambda _: unavailable(status=None)
        rig.commit("notice", "other", NotBeforeUtc=in_seconds(rig, 900))
        rig.deliver(seconds=100)
    with closing(MovedDelivery(tmp_path, clock=rig.clock)) as again:
        assert again.deliver() == []
        assert sorted(again.received()) == ["notice", "other"]


@pytest.mark.parametrize("more", [{}, {"status": None}, {"retry_after_seconds": 1800.0}])
def test_an_old_notice_is_tried_again_within_a_sixth_of_what_is_left_of_it(
    rig: MovedDelivery, more: dict[str, Any]
) -> None:
    rig.sink.refuse = lambda _: unavailable(**more)
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 2400))
    rig.commit("other", type_=OTHER_TYPE)
    rig.deliver(seconds=2340)
    rig.sink.refuse = lambda _: None
    assert passed(rig, lambda: "notice" in rig.received()) <= 12.1


def test_what_has_started_comes_behind_notices_and_before_receipts(rig: MovedDelivery) -> None:
    rig.commit("receipt", type_="io.imdsbridge.approval.accepted.v1")
    rig.commit("started", type_=TYPE.replace("scheduled.v1", "started.v1"))
    rig.clock.advance(40)
    rig.commit("later", NotBeforeUtc=in_seconds(rig, 900))
    rig.commit("soon", NotBeforeUtc=in_seconds(rig, 30))
    rig.deliver()
    assert rig.received() == ["soon", "later", "started", "receipt"]


def test_a_young_receipt_is_urgent_behind_a_notice_of_its_key_that_is_not(rig: MovedDelivery) -> None:
    rig.commit("old", subject="E", NotBeforeUtc=in_seconds(rig, 60))
    rig.clock.advance(1200)
    rig.commit("document", type_=OTHER_TYPE)
    rig.commit("receipt", subject="E", type_="io.imdsbridge.approval.accepted.v1")
    rig.deliver()
    assert rig.received() == ["old", "receipt", "document"]


def test_a_notice_among_many_that_are_never_taken_is_told_after_an_outage(rig: MovedDelivery) -> None:
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 1800))
    rig.sink.refuse = lambda _: unavailable(status=500)
    rig.deliver(seconds=300)
    rig.commit(*(f"bad {number}" for number in range(40)), NotBeforeUtc=in_seconds(rig, 3600))
    rig.deliver(seconds=60)
    rig.sink.refuse = poison(*(f"bad {number}" for number in range(40)))
    assert passed(rig, lambda: rig.received() == ["notice"]) <= 3


@pytest.mark.parametrize("kind", ["started", "scheduled"])
def test_a_preempt_is_the_next_request_behind_many_for_which_it_is_too_late(
    rig: MovedDelivery, kind: str
) -> None:
    names = [str(number) for number in range(300)]
    rig.commit(*names, type_=TYPE.replace("scheduled", kind), NotBeforeUtc=in_seconds(rig, -5000))
    rig.clock.advance(40)
    rig.commit("preempt", NotBeforeUtc=in_seconds(rig, 30))
    assert rig.dispatcher.step() is None
    assert rig.received() == ["preempt"]


@pytest.mark.parametrize("status", [503, None])
def test_a_notice_that_came_in_an_outage_is_not_behind_those_that_were_refused_before(
    rig: MovedDelivery, status: int | None
) -> None:
    bad = [f"bad {number}" for number in range(120)]
    rig.commit(*bad, NotBeforeUtc=in_seconds(rig, 600))
    rig.sink.refuse = poison(*bad)
    rig.deliver(seconds=30)
    rig.commit("document", type_=OTHER_TYPE)
    passed(rig, lambda: rig.received() == ["document"])
    rig.sink.refuse = lambda _: unavailable(status=status)
    rig.commit("notice", NotBeforeUtc=in_seconds(rig, 3600))
    rig.deliver(seconds=200)
    rig.sink.refuse = poison(*bad)
    assert passed(rig, lambda: rig.received() == ["document", "notice"]) <= 3


@pytest.mark.parametrize("type_", [TYPE, "io.imdsbridge.approval.accepted.v1"])
def test_what_is_young_is_tried_soon_after_an_outage_also_if_something_newer_was_accepted_before_it(
    rig: MovedDelivery, type_: str
) -> None:
    rig.sink.refuse = lambda event: unavailable(retry_after_seconds=1.0) if event.id == "first" else None
    rig.commit("first", "second", type_=type_, NotBeforeUtc=in_seconds(rig, 2400))
    passed(rig, lambda: rig.received() == ["second"])
    rig.sink.refuse = lambda _: unavailable(status=None, is_unreached=True)
    rig.deliver(seconds=300)
    rig.sink.refuse = lambda _: None
    assert passed(rig, lambda: "first" in rig.received()) <= 2
