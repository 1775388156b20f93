"""Events from Service Bus: settled after the commit, beside webhooks at the same time."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bridge.console import tables
from bridge.console.bus import BusInput
from bridge.console.received import Received
from bridge.console.store import Store
from bridge.console.writer import Writer
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.bus import Sender, message
from tests.support.clock import MovedClock
from tests.support.console import FleetVm, event, event_id, running_console, shown
from tests.support.memory_queue import MemoryQueue, MemoryReceiver
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.relay import TOPIC, fleet_bus, source, subscription
from tests.support.servicebus import ServiceBusLab


@pytest.fixture
def fleet_topic() -> Iterator[ServiceBusLab]:
    """Return a bus with the fleet's topic."""
    with ServiceBusLab(fleet_bus()) as lab:
        yield lab
        assert lab.failures == ()


class ConsoleOnQueue:
    """The bus input on a queue in memory, with a writer that works when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.queue = MemoryQueue()
        clock, self.stop = MovedClock(), Stop()
        self.store = Store(folder / "console.db", clock=clock)
        self.writer = Writer(self.store, clock=clock, stop=Stop(), retain_seconds=1e9)
        self.receiver = MemoryReceiver(self.queue, stop=self.stop)
        self.bus = BusInput(
            receiver=self.receiver, writer=self.writer, clock=clock, stop=self.stop, settled=Stop()
        )

    def send(self, *names: str) -> None:
        """Put a heartbeat of each VM into the queue."""
        for name in names:
            self.queue.send(FleetVm(name).heartbeat(), message_id=name)

    @contextmanager
    def receiving(self) -> Iterator[threading.Thread]:
        """Let the input work once, beside the writer and until its end."""
        thread = start_thread("bus", lambda: self.bus.run_once(LIMIT_SECONDS))
        yield thread
        thread.join(LIMIT_SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[ConsoleOnQueue]:
    made = ConsoleOnQueue(tmp_path)
    yield made
    made.store.close()


def test_a_message_is_completed_only_after_the_commit(rig: ConsoleOnQueue) -> None:
    rig.send("web-0")
    with rig.receiving():
        wait_until(lambda: rig.receiver.status().unsettled == 1)
        assert not rig.queue.completed
        rig.writer.run_once(LIMIT_SECONDS)
    assert len(rig.queue.completed) == 1


def test_a_message_stays_on_the_bus_while_the_store_fails(rig: ConsoleOnQueue) -> None:
    rig.store.close()
    rig.send("web-0")
    with rig.receiving():
        rig.writer.run_once(LIMIT_SECONDS)
        assert rig.writer.error
        rig.stop.set()
    assert rig.receiver.settled == []


def test_a_message_that_is_no_event_is_dead_lettered(rig: ConsoleOnQueue) -> None:
    rig.queue.send(b"{", message_id="1")
    rig.bus.run_once(5.0)
    assert (len(rig.queue.dead_letters), rig.bus.status().malformed) == (1, 1)


def test_an_event_that_cannot_be_stored_is_dead_lettered_and_the_others_are_kept(
    rig: ConsoleOnQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = tables.add

    def fail(
        connection: sqlite3.Connection, events: Sequence[Received], *, received_at: float
    ) -> tables.Added:
        if any(b"web-3" in event.body for event in events):
            raise sqlite3.IntegrityError("NOT NULL constraint failed")
        return add(connection, events, received_at=received_at)

    monkeypatch.setattr(tables, "add", fail)
    rig.send(*(f"web-{number}" for number in range(5)))
    with rig.receiving() as thread:
        while thread.is_alive():
            rig.writer.run_once(0.01)
    assert [one.message_id for one in rig.queue.dead_letters] == ["web-3"]
    assert len(rig.queue.completed) == 4


def test_a_message_that_is_delivered_again_counts_once(
    rig: ConsoleOnQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.send("web-0")
    with monkeypatch.context() as patch, rig.receiving():
        patch.setattr(rig.receiver, "settle", lambda *_: rig.receiver.disconnect())  # the lock is lost
        rig.writer.run_once(LIMIT_SECONDS)
    with rig.receiving():
        rig.writer.run_once(LIMIT_SECONDS)
    assert (len(rig.queue.completed), rig.writer.received, rig.writer.repeated) == (1, 1, 1)


def test_bus_and_webhook_feed_the_same_console(tmp_path: Path, fleet_topic: ServiceBusLab) -> None:
    first, second = FleetVm("bus-0"), FleetVm("hook-1")
    change = event("both", at=Clock().now(), vms=["bus-0"])
    now = Clock().now()
    with running_console(tmp_path, bus=source(fleet_topic)) as console:
        with Sender(fleet_topic, TOPIC) as sender:
            sender.send(message(first.change("scheduled", change, now), message_id="1"))
        console.send(second.change("scheduled", change, now))
        wait_until(lambda: subscription(fleet_topic).counts.active == 0, describe=lambda: console.page("/"))
        page = console.page(f"/event/{event_id('both')}")
    assert "seen by 2 VMs" in page
    with shown(tmp_path / "console") as seen:
        assert seen.sql("SELECT count(*) FROM event") == 1
