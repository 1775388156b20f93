"""What the Service Bus sink makes of a bus that fails: with the real dispatcher and outbox, against the lab."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bridge.azure import servicebus as servicebus_module
from bridge.errors import HungError, Misconfigured, Unavailable
from bridge.sinks import servicebus as module
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.delivery import Delivery, running
from tests.support.process import LIMIT_SECONDS, stored_event, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import QUEUE, Connect, entities, ids, settings
from tests.support.webhook import EVENT, failure

KEY = "a-key-that-must-not-be-shown"
RECOVERY_SECONDS = 5.0
THREAD = f"servicebus-{QUEUE}"


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(entities(), key=KEY) as started:
        yield started
        assert started.failures == ()


def stored(lab: ServiceBusLab) -> list[str]:
    return ids(lab.entity(QUEUE).messages)


def firsts(names: list[str]) -> list[str]:
    """Return each name once, in the order in which they first came."""
    return list(dict.fromkeys(names))


# --- down and back ---


def commit(delivery: Delivery, count: int) -> None:
    """Commit events, one transaction each."""
    for _ in range(count):
        delivery.commit(stored_event(len(delivery.ids)))


def test_a_bus_that_goes_and_comes_back_loses_nothing_and_keeps_the_order(
    lab: ServiceBusLab, connect: Connect, tmp_path: Path
) -> None:
    lab.stop_listening()
    with running(tmp_path / "state", connect()) as delivery:
        for _ in range(2):
            commit(delivery, 20)
            wait_until(lambda: delivery.status("failures") >= 3)
            lab.listen_again()
            delivery.wait_for_all()
            assert max(delivery.pauses) < RECOVERY_SECONDS
            commit(delivery, 20)
            delivery.wait_for_all()
            lab.stop_listening()
        lab.listen_again()
        assert firsts(stored(lab)) == delivery.ids


@pytest.mark.parametrize("kind", ["drop_before_store", "drop_after_store"])
def test_a_connection_cut_in_the_middle_of_a_batch_costs_duplicates_of_the_same_id_at_most(
    lab: ServiceBusLab, connect: Connect, tmp_path: Path, kind: str
) -> None:
    with running(tmp_path / "state", connect()) as delivery:
        commit(delivery, 1)
        delivery.wait_for_all()
        for after in range(2):
            lab.fault(kind, count=2, after=after)
            for _ in range(6):
                commit(delivery, 5)
                delivery.wait_for_all()
    assert firsts(stored(lab)) == delivery.ids
    assert set(stored(lab)) == set(delivery.ids)
    if kind == "drop_before_store":
        assert stored(lab) == delivery.ids
    assert lab.applied(kind) >= 3


def test_what_was_delivered_before_the_cut_is_not_sent_again(lab: ServiceBusLab, connect: Connect) -> None:
    """Batches of a send are counted one by one: the error says how many events arrived."""
    events = [stored_event(number, Description="x" * 100_000) for number in range(8)]
    sink = connect()
    lab.fault("drop_before_store", after=2, count=1)
    with pytest.raises(Unavailable) as raised:
        sink.send(events)
    delivered = raised.value.delivered
    assert len(lab.entity(QUEUE).messages) == delivered
    assert 2 <= delivered < 8
    sink.send(events[delivered:])
    assert ids(lab.entity(QUEUE).messages) == [one.id for one in events]


# --- wrong settings and limits ---


FAILURES = {
    "refuse_cbs": (Misconfigured, "refused"),
    "unauthorized": (Misconfigured, "role"),
    "missing": (Misconfigured, "no such queue or topic"),
    "disabled": (Misconfigured, "disabled"),
    "quota": (Unavailable, "full"),
    "busy": (Unavailable, "busy"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_named_and_ends_without_a_restart(
    lab: ServiceBusLab, connect: Connect, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    sink = connect()
    lab.fault(kind)
    error = failure(sink)
    error_type, words = FAILURES[kind]
    assert type(error) is error_type
    assert words in str(error)
    assert error.is_unreached  # another event would fail as well
    lab.clear_faults()
    sink.send([EVENT])
    if kind == "disabled":  # while the link is open
        lab.fault(kind)
        failure(sink)
        assert "disabled" in str(failure(sink))
    assert KEY not in f"{error}{caplog.text}"
    assert not [r for r in caplog.records if r.name.startswith(("azure", "msal", "uamqp"))]


def test_a_refusal_of_what_is_sent_keeps_the_connection(lab: ServiceBusLab, connect: Connect) -> None:
    sink = connect()
    sink.send([stored_event(0)])
    link = sink._link
    for kind in ("busy", "quota"):
        lab.fault(kind, count=1)
        with pytest.raises(Unavailable):
            sink.send([stored_event(1)])
    sink.send([stored_event(1)])
    assert sink._link is link


# --- silence ---


def test_a_peer_that_is_silent_while_opening_is_aborted_and_its_thread_comes_back(
    lab: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRY_SECONDS", 0.2)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.2)
    lab.fault("silent")
    sink = connect()
    for _ in range(5):  # more often than calls may hang at once
        with pytest.raises(Unavailable, match="has not returned") as raised:
            sink.send([stored_event(0)])
        assert raised.value.delivered == 0
        wait_until(lambda: threads() == 0)
    monkeypatch.undo()
    lab.clear_faults()
    sink.send([stored_event(0)])
    assert len(lab.entity(QUEUE).messages) == 1


def test_a_broker_without_credit_holds_a_send_no_longer_than_its_time_limit(
    lab: ServiceBusLab, connect: Connect
) -> None:
    sink = connect(timeout_seconds=2.0)
    sink.send([stored_event(0)])
    lab.fault("no_credit")
    with pytest.raises(Unavailable, match="no answer in time"):
        sink.send([stored_event(1)])
    lab.clear_faults()
    sink.send([stored_event(1)])
    assert firsts(ids(lab.entity(QUEUE).messages)) == [stored_event(0).id, stored_event(1).id]


def test_a_token_that_is_never_answered_is_aborted(
    lab: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicebus_module, "TRY_SECONDS", 0.5)
    lab.fault("silent_cbs")
    sink = connect()
    with pytest.raises(Unavailable, match="no answer in time"):
        sink.send([stored_event(0)])
    monkeypatch.undo()
    lab.clear_faults()
    sink.send([stored_event(0)])
    assert len(lab.entity(QUEUE).messages) == 1


def test_a_send_that_succeeds_late_is_a_duplicate_of_the_same_id_and_sends_nothing_more(
    lab: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.3)
    gate = threading.Event()
    events = [stored_event(number, Description="x" * 150_000) for number in range(4)]  # each a batch
    sink = connect(timeout_seconds=3.0)
    sink.send(events[:1])
    link = sink._link
    assert link is not None
    sender = link.open()
    monkeypatch.setattr(link, "abort", lambda: None)  # as with an SDK that has been rebuilt
    send = sender.send_messages

    def slowly(message: Any, **given: Any) -> None:
        gate.wait(LIMIT_SECONDS)
        send(message, **given)

    monkeypatch.setattr(sender, "send_messages", slowly)
    with pytest.raises(Unavailable, match="has not returned"):
        sink.send(events[1:])
    monkeypatch.undo()
    sink.send(events[1:])
    gate.set()
    wait_until(lambda: len(lab.entity(QUEUE).messages) == 5)
    wait_until(lambda: threads() == 1)
    wait_until(lambda: lab.connections == 1)
    expected = [one.id for one in events]
    assert ids(lab.entity(QUEUE).messages) == [*expected, expected[1]]


def test_the_last_of_the_hung_calls_is_final(lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(module._Link, "open", lambda _: gate.wait(LIMIT_SECONDS))
    sink = ServiceBusSink(settings(lab))
    for expected in (Unavailable, Unavailable, HungError, HungError):
        with pytest.raises(expected):
            sink.send([stored_event(0)])
    gate.set()
    sink.close()
    wait_until(lambda: threads() == 0)


# --- nothing is left over ---


def threads() -> int:
    return sum(thread.name == THREAD for thread in threading.enumerate())


def sockets() -> int:
    """Count this process's open sockets."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += str(path.readlink()).startswith("socket:")
    return count


def test_fifty_reconnects_leave_neither_threads_nor_connections(lab: ServiceBusLab, connect: Connect) -> None:
    def quiet() -> bool:
        return threads() <= 1 and lab.connections == 1

    sink = connect()
    sink.send([stored_event(0)])
    wait_until(quiet)
    gc.collect()
    gc.disable()  # nothing is left to the collector
    try:
        before, files = threading.active_count(), sockets()
        for number in range(50):
            if number % 5:
                sink.reload()
            else:
                lab.fault("drop")
                with pytest.raises(Unavailable):
                    sink.send([stored_event(number)])
            sink.send([stored_event(number)])
        wait_until(quiet)
        wait_until(lambda: threading.active_count() <= before, describe=threading.enumerate)
        wait_until(lambda: sockets() <= files, describe=sockets)
    finally:
        gc.enable()
    assert lab.entity(QUEUE).counts.enqueued == 51
