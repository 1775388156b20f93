"""Delivery from the outbox to a sink: order, retries, dead letters, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import inspect as ledger
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.clock import full_jitter
from bridge.runtime.threads import Stop
from bridge.service import dispatcher as module
from bridge.service.dispatcher import Dispatcher
from bridge.sinks.memory import MemorySink
from tests.support.clock import MovedClock
from tests.support.outbox import OTHER_TYPE, event, open_outbox
from tests.support.process import LIMIT_SECONDS, wait_until

MAX_AGE_SECONDS = 100.0


class Rig:
    """An outbox with one sink called "a" and the dispatcher between them, on a clock that is moved."""

    def __init__(
        self, path: Path, sink: MemorySink, wanted: Filter, max_per_second: float | None = None
    ) -> None:
        self.clock = MovedClock()
        self.folder = StateFolder(path)
        self.sink = sink
        self.outbox = open_outbox(path, sinks={"a": (wanted, True)}, clock=self.clock)
        self.dispatcher = Dispatcher(
            "a",
            sink,
            wanted=wanted,
            max_age_seconds=MAX_AGE_SECONDS,
            outbox=self.outbox,
            clock=self.clock,
            max_per_second=max_per_second,
        )
        self.thread = threading.Thread(target=self.dispatcher.run, daemon=True)

    def commit(self, *names: str, **data: Any) -> None:
        for name in names:
            self.outbox.commit([event(name, **data)], meta={})

    def run_to_the_end(self) -> None:
        """Run until nothing waits."""
        self.dispatcher.stop_when_drained()
        self.thread.start()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()

    def received(self) -> list[str]:
        return [one.id for one in self.sink.received]

    def dead(self) -> list[tuple[str, str, str]]:
        return [(row["id"], row["reason"], row["detail"]) for row in ledger.dead_letters(self.folder)]


Make = Callable[..., Rig]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    rigs: list[Rig] = []

    def build(
        *failures: DeliveryError,
        max_batch: int = 1,
        wanted: Filter | None = None,
        max_per_second: float | None = None,
    ) -> Rig:
        sink = MemorySink(max_batch=max_batch)
        sink.failures.extend(failures)
        rigs.append(Rig(tmp_path / str(len(rigs)), sink, wanted or Filter(), max_per_second))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.dispatcher.stop_when_drained()
        if rig.thread.ident:
            rig.thread.join(LIMIT_SECONDS)
        rig.outbox.close()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no wait last, and note how long each would have been; jitter gives its limit."""
    noted: list[float] = []

    def wait(_: Stop, seconds: float | None) -> bool:
        noted.append(seconds or 0.0)
        return False

    def limit(attempt: int, *, base_seconds: float, limit_seconds: float) -> float:
        return min(limit_seconds, base_seconds * 2.0**attempt)

    monkeypatch.setattr(Stop, "wait", wait)
    monkeypatch.setattr(module, "LAST_RETRY_SECONDS", float("inf"))
    monkeypatch.setattr(module, "full_jitter", limit)
    return noted


# --- what arrives ---


def test_events_arrive_in_their_order(make: Make) -> None:
    rig = make()
    names = [str(number) for number in range(200)]
    rig.commit(*names)
    rig.run_to_the_end()
    assert rig.received() == names
    assert rig.outbox.backlog("a") == (0, None)
    assert rig.sink.is_closed


def test_an_event_that_is_committed_while_it_waits_is_sent_at_once(make: Make) -> None:
    rig = make()
    rig.thread.start()
    for number in range(20):
        rig.commit(str(number))
        assert len(rig.sink.wait_for(number + 1)) == number + 1


def test_a_sink_that_takes_several_gets_as_many_as_it_takes(make: Make) -> None:
    rig = make(max_batch=7)
    sizes: list[int] = []
    send = rig.sink.send

    def note(events: Sequence[StoredEvent]) -> None:
        sizes.append(len(events))
        send(events)

    rig.sink.send = note  # type: ignore[method-assign]
    rig.commit(*map(str, range(20)))
    rig.run_to_the_end()
    assert sizes == [7, 7, 6]
    assert rig.received() == [str(number) for number in range(20)]


def test_only_what_types_and_where_take_is_sent_and_the_rest_is_passed_over(make: Make) -> None:
    wanted = Filter(types=["io.imdsbridge.scheduledevent.*"], where={"EventType": ["Reboot", "Redeploy"]})
    rig = make(wanted=wanted)
    rig.commit("reboot", EventType="Reboot")
    rig.commit("freeze", EventType="Freeze")
    rig.outbox.commit([event("document", type_=OTHER_TYPE, EventType="Reboot")], meta={})
    rig.commit("redeploy", EventType="Redeploy")
    rig.commit("none")
    rig.run_to_the_end()
    assert rig.received() == ["reboot", "redeploy"]
    assert rig.outbox.backlog("a") == (0, None)


# --- failures ---


def test_what_may_help_later_is_sent_again_with_growing_waits_up_to_a_minute(
    make: Make, waits: list[float]
) -> None:
    rig = make(*(Unavailable("503") for _ in range(10)))
    rig.commit("1", "2")
    rig.run_to_the_end()
    assert rig.received() == ["1", "2"]
    assert waits == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_the_wait_is_anywhere_below_its_limit() -> None:
    for attempt, limit in ((0, 0.5), (3, 4.0), (9, 60.0), (10_000, 60.0)):
        drawn = [full_jitter(attempt, base_seconds=0.5, limit_seconds=60) for _ in range(500)]
        assert min(drawn) < limit / 10
        assert limit * 0.9 < max(drawn) <= limit


def test_after_a_success_the_waits_begin_anew(make: Make, waits: list[float]) -> None:
    rig = make(Unavailable("a"), Unavailable("b"), Unavailable("c"))
    send, calls = rig.sink.send, iter([True, True, False, True])

    def mixed(events: Sequence[StoredEvent]) -> None:
        if next(calls, False):
            send(events)
        else:
            rig.sink.received += events

    rig.sink.send = mixed  # type: ignore[method-assign]
    rig.commit("1", "2")
    rig.run_to_the_end()
    assert rig.received() == ["1", "2"]
    assert waits == [0.5, 1, 0.5]


@pytest.mark.parametrize("kind", [Unavailable, Misconfigured])
@pytest.mark.parametrize(("asked", "waited"), [(17, 17), (0, 0.5), (3600, 3600)])
def test_a_receiver_that_asks_for_time_gets_it(
    make: Make, waits: list[float], kind: type[DeliveryError], asked: float, waited: float
) -> None:
    rig = make(kind("later", retry_after_seconds=asked))
    rig.commit("1")
    rig.run_to_the_end()
    assert rig.received() == ["1"]
    assert waits == [waited]


def test_what_will_never_help_is_dead_lettered_and_the_next_goes_on(make: Make, waits: list[float]) -> None:
    rig = make(Rejected("https://x answered 422: no such channel", status=422))
    rig.commit("1", "2")
    rig.run_to_the_end()
    assert rig.received() == ["2"]
    assert rig.dead() == [("1", "rejected", "https://x answered 422: no such channel")]
    assert waits == []
    status = rig.dispatcher.status()
    assert (status["state"], status["backlog"]) == ("ok", 0)
    assert status["last_error"] == "1: https://x answered 422: no such channel"


def test_a_sink_that_answers_with_a_refusal_counts_as_there_again(make: Make, waits: list[float]) -> None:
    rig = make(Unavailable("503"), Rejected("400"))
    rig.commit("1")
    rig.run_to_the_end()
    assert (rig.dispatcher.status()["state"], rig.dispatcher.status()["failures"]) == ("rejecting", 0)
    assert waits == [0.5]


def test_a_batch_that_is_taken_in_part_goes_on_behind_that_part(make: Make, waits: list[float]) -> None:
    rig = make(Unavailable("2 of 4", delivered=2), Rejected("1 of 2", delivered=1), max_batch=4)
    rig.commit("1", "2", "3", "4", "5", "6")
    rig.run_to_the_end()
    assert rig.received() == ["1", "2", "3", "5", "6"]
    assert rig.dead() == [("4", "rejected", "1 of 2")]
    assert waits == [0.5]


@pytest.mark.usefixtures("waits")
def test_wrong_credentials_are_told_loudly_and_read_again_before_the_next_try(
    make: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(Unavailable("503"), Misconfigured("401"), Misconfigured("401"))
    order: list[str] = []
    send, reload = rig.sink.send, rig.sink.reload

    def note_send(events: Sequence[StoredEvent]) -> None:
        order.append("send")
        send(events)

    def note_reload() -> None:
        order.append("reload")
        reload()

    monkeypatch.setattr(rig.sink, "send", note_send)
    monkeypatch.setattr(rig.sink, "reload", note_reload)
    rig.commit("1", "2")
    rig.run_to_the_end()
    assert order == ["send", "send", "reload", "send", "reload", "send", "send"]
    assert rig.received() == ["1", "2"]
    assert rig.dead() == []
    assert [record.levelno for record in caplog.records if "credentials" in record.message] == [logging.ERROR]


@pytest.mark.usefixtures("waits")
def test_a_receiver_that_is_gone_is_left_alone_and_loses_nothing(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(Gone("410"))
    rig.commit("1", "2")
    rig.thread.start()
    wait_until(lambda: rig.dispatcher.status()["state"] == "gone")
    rig.commit("3")
    rig.dispatcher.stop_when_drained()
    rig.thread.join(LIMIT_SECONDS)
    assert not rig.thread.is_alive()
    assert (rig.received(), rig.dead(), rig.sink.is_closed) == ([], [], True)
    status = rig.dispatcher.status()
    assert (status["state"], status["backlog"]) == ("gone", 3)
    assert [record.levelno for record in caplog.records if "410 Gone" in record.message] == [logging.ERROR]


def test_an_event_that_waited_too_long_is_dead_lettered_as_expired(make: Make) -> None:
    rig = make()
    rig.commit("old", "older than it looks")
    rig.clock.advance(MAX_AGE_SECONDS + 1)
    rig.commit("new")
    rig.run_to_the_end()
    assert rig.received() == ["new"]
    assert [(name, reason) for name, reason, _ in rig.dead()] == [
        ("old", "expired"),
        ("older than it looks", "expired"),
    ]
    assert rig.dead()[0][2] == "older than max_age_seconds = 100"


def test_what_no_filter_takes_does_not_expire(make: Make) -> None:
    rig = make(wanted=Filter(types=[OTHER_TYPE]))
    rig.commit("old")
    rig.clock.advance(MAX_AGE_SECONDS + 1)
    rig.run_to_the_end()
    assert rig.dead() == []


def test_an_outage_is_told_once_and_then_every_ten_minutes(
    make: Make, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(*(Unavailable(f"failure {number}") for number in range(30)))
    send = rig.sink.send

    def minute(events: Sequence[StoredEvent]) -> None:
        rig.clock.advance(60)
        rig.dispatcher._max_age_seconds += 60
        send(events)

    rig.sink.send = minute  # type: ignore[method-assign]
    rig.commit("1")
    with caplog.at_level(logging.INFO):
        rig.run_to_the_end()
    told = [
        record.message.rpartition(": ")[2] for record in caplog.records if "sending again" in record.message
    ]
    assert told == ["failure 0", "failure 10", "failure 20"]
    assert "delivers again" in caplog.text
    assert len(waits) == 30


@pytest.mark.usefixtures("waits")
def test_the_status_tells_how_a_sink_does(make: Make) -> None:
    rig = make(Unavailable("503"))
    rig.commit("1", "2")
    rig.clock.advance(7)
    before = rig.dispatcher.status()
    assert (before["backlog"], before["oldest_waits_seconds"], before["last_success_at"]) == (2, 7.0, None)
    rig.run_to_the_end()
    after = rig.dispatcher.status()
    assert (after["backlog"], after["oldest_waits_seconds"], after["failures"]) == (0, None, 0)
    assert after["last_error"] == "503"
    assert after["last_success_at"] == after["last_error_at"]


# --- dead letters again ---


@contextmanager
def dead_letters(rig: Rig, *names: str) -> Iterator[None]:
    """Bury events of these names, and ask for them to be sent again."""
    rig.sink.failures.extend(Rejected("400") for _ in names)
    rig.commit(*names)
    rig.thread.start()
    wait_until(lambda: len(rig.dead()) == len(names))
    yield
    ledger.mark(rig.folder, "mark-retry", [row["number"] for row in ledger.dead_letters(rig.folder)])
    rig.outbox.recover()


def test_dead_letters_are_sent_again_in_their_order_when_asked_for(make: Make) -> None:
    rig = make()
    with dead_letters(rig, "1", "2", "3"):
        pass
    assert [one.id for one in rig.sink.wait_for(3)] == ["1", "2", "3"]
    wait_until(lambda: rig.dead() == [])


def test_a_dead_letter_that_is_refused_again_stays_with_the_new_reason(make: Make) -> None:
    rig = make()
    with dead_letters(rig, "1", "2"):
        rig.sink.failures.append(Rejected("422 this time"))
    assert [one.id for one in rig.sink.wait_for(1)] == ["2"]
    wait_until(lambda: rig.dead() == [("1", "rejected", "422 this time")])
    assert [row["retry"] for row in ledger.dead_letters(rig.folder)] == [False]


def test_a_dead_letter_waits_for_a_sink_that_is_not_there(make: Make) -> None:
    rig = make()
    with dead_letters(rig, "1"):
        rig.sink.failures.append(Unavailable("503", retry_after_seconds=0))
    assert [one.id for one in rig.sink.wait_for(1)] == ["1"]
    wait_until(lambda: rig.dead() == [])


# --- beside others, and at the end ---


def test_a_sink_that_hangs_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything: Mapping[str, tuple[Filter, bool]] = {"hangs": (Filter(), True), "works": (Filter(), True)}
    clock = MovedClock()
    outbox = open_outbox(tmp_path, sinks=everything, clock=clock)
    hanging, working, let_go = MemorySink(), MemorySink(), threading.Event()
    monkeypatch.setattr(hanging, "send", lambda _: let_go.wait(LIMIT_SECONDS))
    runs = [deliver_to(outbox, clock, "hangs", hanging), deliver_to(outbox, clock, "works", working)]
    for number in range(50):
        outbox.commit([event(str(number))], meta={})
    assert len(working.wait_for(50)) == 50
    assert outbox.backlog("hangs")[0] == 50
    let_go.set()
    for run, thread in runs:
        run.stop_when_drained()
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()
    outbox.close()


def deliver_to(
    outbox: Outbox, clock: MovedClock, name: str, sink: MemorySink
) -> tuple[Dispatcher, threading.Thread]:
    run = Dispatcher(name, sink, wanted=Filter(), max_age_seconds=1e9, outbox=outbox, clock=clock)
    thread = threading.Thread(target=run.run, daemon=True)
    thread.start()
    return run, thread


def test_a_wait_ends_when_the_process_is_about_to_stop(make: Make) -> None:
    rig = make(Unavailable("503", retry_after_seconds=3600))
    rig.commit("1")
    rig.thread.start()
    wait_until(lambda: rig.dispatcher.status()["failures"] == 1)
    rig.dispatcher.begin_drain()
    assert [one.id for one in rig.sink.wait_for(1)] == ["1"]
    assert rig.thread.is_alive()
    rig.commit("2")
    rig.sink.wait_for(2)
    rig.dispatcher.stop_when_drained()
    rig.thread.join(LIMIT_SECONDS)
    assert not rig.thread.is_alive()


# --- how fast ---


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig], list[float]]:
    """Let each wait move the rig's clock instead of lasting; return how long each was."""

    def prepare(rig: Rig) -> list[float]:
        noted: list[float] = []

        def wait(_: Stop, seconds: float | None) -> bool:
            noted.append(seconds or 0.0)
            rig.clock.advance(seconds or 0.0)
            return False

        monkeypatch.setattr(Stop, "wait", wait)
        monkeypatch.setattr(module, "LAST_RETRY_SECONDS", float("inf"))
        return noted

    return prepare


def test_a_rate_limit_lets_time_pass_between_sendings_but_not_before_the_first(
    make: Make, moving: Callable[[Rig], list[float]]
) -> None:
    rig = make(max_per_second=4)
    waits = moving(rig)
    rig.commit("1", "2", "3")
    rig.run_to_the_end()
    assert rig.received() == ["1", "2", "3"]
    assert waits == pytest.approx([0.25, 0.25])


def test_a_rate_limit_counts_a_batch_as_one(make: Make, moving: Callable[[Rig], list[float]]) -> None:
    rig = make(max_batch=2, max_per_second=4)
    waits = moving(rig)
    rig.commit("1", "2", "3")
    rig.run_to_the_end()
    assert rig.received() == ["1", "2", "3"]
    assert waits == pytest.approx([0.25])


def test_dead_letters_that_are_sent_again_keep_to_the_rate_limit(
    make: Make, moving: Callable[[Rig], list[float]]
) -> None:
    rig = make(max_per_second=4)
    waits = moving(rig)
    with dead_letters(rig, "1", "2", "3"):
        waits.clear()
    wait_until(lambda: rig.received() == ["1", "2", "3"])
    assert sum(waits) >= 0.5 - 1e-9


@pytest.mark.usefixtures("waits")
def test_a_misconfigured_sink_with_nothing_to_send_is_left_alone(make: Make) -> None:
    rig = make(Misconfigured("401"))
    rig.commit("1")
    rig.dispatcher._step()  # fails
    rig.clock.advance(MAX_AGE_SECONDS * 2)
    rig.dispatcher._step()  # and then the event is too old
    assert [reason for _, reason, _ in rig.dead()] == ["expired"]
    before = rig.sink.reloads
    for _ in range(5):
        rig.dispatcher._step()
    assert rig.sink.reloads == before
