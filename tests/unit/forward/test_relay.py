"""The relay's decisions, on doubles and with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bridge.azure.receiver import ReceivedMessage, Settlement
from bridge.contract.status import to_json
from bridge.events.filters import Filter
from bridge.forward.relay import Relay
from bridge.process.identity import VmIdentity
from bridge.runtime.threads import Stop
from bridge.runtime.time import REPEAT_LOG_SECONDS
from tests.support.clock import MovedClock
from tests.support.forward import parts_of
from tests.support.memory_queue import MemoryQueue, MemoryReceiver
from tests.support.only import only
from tests.support.outbox import failing_disk, open_outbox
from tests.support.relay import body_of, names


class RelayOnDoubles:
    """The real relay and outbox with a queue in memory; sinks are cursors that the test moves."""

    def __init__(self, folder: Path, *, sinks: int = 1) -> None:
        self.folder = folder
        self._sinks = [f"sink{number}" for number in range(sinks)]
        self.clock = MovedClock()
        self.queue = MemoryQueue(now=self.clock.now)
        self.start()

    def start(self) -> None:
        sinks = dict.fromkeys(self._sinks, (Filter(), True))
        self.outbox = open_outbox(self.folder, sinks=sinks, clock=self.clock)
        self.stop, self.settled = Stop(), Stop()
        self.receiver = MemoryReceiver(self.queue, stop=self.settled)
        identity = VmIdentity("relay", imds=None, outbox=self.outbox, clock=self.clock)
        parts = parts_of(outbox=self.outbox, clock=self.clock, stop=self.stop, identity=identity)
        self.relay = Relay(parts, self.receiver, self.settled)

    def crash(self) -> None:
        """End the process."""
        self.receiver.disconnect()
        self.outbox.close()

    def restart(self) -> None:
        """End the process, and start it again on the same state."""
        self.crash()
        self.start()

    def send(self, *names: str) -> None:
        """Put events on the queue."""
        for name in names:
            self.queue.send(body_of(name), message_id=name)

    def run(self, passes: int = 1) -> None:
        """Make passes, a second apart."""
        for _ in range(passes):
            self.relay.run_once(0.0)
            self.clock.advance(1.0)

    def deliver(self, sink: int = 0) -> list[str]:
        """Let a sink have everything that waits for it; return the ids."""
        delivered: list[str] = []
        while True:
            page = self.outbox.pending(self._sinks[sink], 100)
            if not page:
                return delivered
            self.outbox.acknowledge(self._sinks[sink], page)
            delivered += [event.id for event in page]

    @property
    def completed(self) -> int:
        return len(self.queue.completed)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[RelayOnDoubles]:
    made = RelayOnDoubles(tmp_path)
    yield made
    made.outbox.close()


def test_events_are_committed_in_their_order_and_byte_for_byte_and_then_completed_fifty_in_a_pass(
    rig: RelayOnDoubles,
) -> None:
    rig.send(*names(120))
    rig.run()
    assert rig.completed == 50
    rig.run(2)
    page = rig.outbox.pending("sink0", 1000)
    assert [event.body for event in page] == [body_of(name) for name in names(120)]
    assert rig.completed == 120
    assert rig.relay.status().relayed == 120


def test_an_event_is_committed_before_its_message_is_completed(
    rig: RelayOnDoubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    settle = rig.receiver.settle

    def count_and_settle(message: ReceivedMessage, settlement: Settlement) -> None:
        counted.append(rig.outbox.backlog("sink0")[0])
        settle(message, settlement)

    monkeypatch.setattr(rig.receiver, "settle", count_and_settle)
    rig.send("a")
    rig.run()
    assert counted == [1]


def test_malformed_messages_are_dead_lettered_with_the_reason_while_the_good_go_on(
    rig: RelayOnDoubles,
) -> None:
    for name in names(20):
        rig.queue.send(b"nonsense", message_id=f"bad-{name}")
        rig.send(name)
    rig.run()
    assert rig.deliver() == names(20)
    assert (rig.completed, rig.relay.status().malformed) == (20, 20)
    settlements = [dead.settlement for dead in rig.queue.dead_letters]
    assert {one.dead_letter_reason for one in settlements if one} == {"malformed"}
    description = settlements[0].description if settlements[0] else ""
    assert len(settlements) == 20
    assert "not JSON" in description
    assert "expected one CloudEvent 1.0 as a JSON object" in description


def test_malformed_messages_are_logged_again_after_a_while_with_their_number(
    rig: RelayOnDoubles, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        rig.queue.send(b"nonsense")
    rig.run()
    rig.clock.advance(REPEAT_LOG_SECONDS)
    rig.queue.send(b"nonsense")
    rig.run()
    assert [record.__dict__["count"] for record in caplog.records if "not events" in record.message] == [1, 3]


# Repeated events


def test_one_event_in_several_messages_is_sent_once_and_every_message_is_completed(
    rig: RelayOnDoubles,
) -> None:
    for name in names(7):
        rig.queue.send(body_of("same"), message_id=name)
    rig.send("other")
    rig.run()
    assert rig.deliver() == ["same", "other"]
    assert rig.completed == 8
    assert rig.relay.status().repeated == 6


def test_an_event_that_is_delivered_again_after_a_restart_is_not_sent_twice(
    rig: RelayOnDoubles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig.receiver, "settle", lambda *_: None)
    rig.send(*names(10))
    rig.run()
    assert rig.deliver() == names(10)
    rig.restart()
    rig.run()
    assert (rig.relay.status().relayed, rig.relay.status().repeated) == (0, 10)
    assert rig.deliver() == []
    assert rig.completed == 10


# While the state store is unavailable


def test_without_a_store_messages_are_completed_only_once_every_sink_has_their_events(
    tmp_path: Path,
) -> None:
    rig = RelayOnDoubles(tmp_path, sinks=2)
    with closing(rig.outbox), failing_disk() as disk:
        disk.fail()
        rig.send(*names(30))
        rig.run(2)
        assert rig.deliver(0) == names(30)
        rig.run()
        assert (rig.completed, rig.relay.status().uncompleted) == (0, 30)
        assert rig.deliver(1) == names(30)
        rig.run()
        assert (rig.completed, rig.relay.status().uncompleted) == (30, 0)
        assert rig.outbox.storage_error


def test_messages_are_completed_once_the_store_works_again_whatever_the_sinks_do(rig: RelayOnDoubles) -> None:
    with failing_disk() as disk:
        disk.fail()
        rig.send(*names(30))
        rig.run(2)
        assert (rig.completed, rig.relay.status().uncompleted) == (0, 30)
        disk.recover()
        rig.outbox.recover()
        rig.run()
    assert rig.completed == 30
    rig.restart()
    assert rig.deliver() == names(30)


def test_without_a_store_an_event_that_is_delivered_again_is_sent_once_and_completed_when_it_is_safe(
    rig: RelayOnDoubles,
) -> None:
    with failing_disk() as disk:
        disk.fail()
        rig.send(*names(5))
        rig.run()
        rig.receiver.disconnect()
        rig.run()
        status = rig.relay.status()
        assert (status.repeated, status.uncompleted, rig.completed) == (5, 5, 0)
        assert rig.deliver() == names(5)
        rig.run()
        assert (rig.completed, len(rig.receiver.settled)) == (5, 5)


def test_without_a_store_messages_that_no_sink_has_are_abandoned_at_the_stop(rig: RelayOnDoubles) -> None:
    with failing_disk() as disk:
        disk.fail()
        rig.send(*names(5))
        rig.run()
        rig.stop.set()
        rig.relay.run()
        assert rig.settled
        rig.receiver.run()
        disk.recover()
    assert [message.locked_by for message in rig.queue.messages] == [None] * 5
    assert rig.completed == 0


# Losses


def test_a_loss_is_published_as_an_event_of_the_relay(rig: RelayOnDoubles) -> None:
    rig.send("a")
    rig.run()
    rig.deliver()
    rig.crash()
    (rig.folder / "outbox.db").write_bytes(b"nonsense" * 1000)
    rig.start()
    rig.run(2)
    loss = only(rig.outbox.pending("sink0", 100))
    assert loss.type == "io.imdsbridge.bridge.loss.v1"
    assert loss.envelope["reporter"].endswith("/relay")
    assert loss.envelope["data"]["Reason"] == "Damage"
    assert rig.outbox.losses() == []


# Sinks, the clock and the stop


def test_the_status_shows_the_bus_the_counts_and_the_last_event(rig: RelayOnDoubles) -> None:
    assert rig.relay.status().last_event_at is None
    at = rig.clock.now()
    rig.send("a")
    rig.run()
    rig.receiver.last_error = "the bus is gone"
    assert {**to_json(rig.relay.status()), "looked_at": None} == {
        "from": "memory",
        "unsettled": 0,
        "rests": False,
        "looked_at": None,
        "last_error": "the bus is gone",
        "relayed": 1,
        "repeated": 0,
        "malformed": 0,
        "uncompleted": 0,
        "last_event_at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
    }
