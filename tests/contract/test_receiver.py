"""Every receiver keeps the duties of the protocol: the double in memory, and the real one on the lab's bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Thread

import pytest
from azure.servicebus import ServiceBusClient
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from bridge.azure.bus_receiver import BusReceiver
from bridge.azure.internals import close_socket_on_close
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.bus import QUEUE, bus_config
from tests.support.memory_queue import MemoryQueue, MemoryReceiver
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.servicebus import ServiceBusLab

LOCK_SECONDS = 5


class Station(ABC):
    """A queue with a receiver of it, whose `run` runs on a thread."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.stop = Stop()
        self.receiver = self.connect(self.stop)
        self.thread = start_thread("receiver", self.receiver.run)

    @abstractmethod
    def connect(self, stop: Stop) -> Receiver: ...
    @abstractmethod
    def send(self, body: bytes, *, message_id: str = "", **properties: str) -> None: ...
    @abstractmethod
    def cut(self) -> None:
        """Cut the receiver's connection."""

    @abstractmethod
    def counts(self) -> tuple[int, int, int]:
        """Return how many messages are left, completed and dead-lettered."""

    @abstractmethod
    def dead_letters(self) -> list[tuple[str, str]]:
        """Return reason and description of each dead letter."""

    @abstractmethod
    def unlocked(self) -> int:
        """Return how many messages are available to any receiver."""

    def receive(self, count: int = 1) -> list[ReceivedMessage]:
        """Return `count` messages once they are there."""
        received: list[ReceivedMessage] = []

        def is_complete() -> bool:
            received.extend(self.receiver.messages(0.1))
            return len(received) >= count

        wait_until(is_complete, describe=lambda: received)
        return received

    def receive_one(self) -> ReceivedMessage:
        (message,) = self.receive()
        return message

    def wait_for(self, *counts: int) -> None:
        wait_until(lambda: self.counts() == counts, describe=self.counts)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()


class MemoryStation(Station):
    """The double."""

    def __init__(self) -> None:
        self.queue = MemoryQueue()
        super().__init__()

    def connect(self, stop: Stop) -> MemoryReceiver:
        self._receiver = MemoryReceiver(self.queue, stop=stop)
        return self._receiver

    def send(self, body: bytes, *, message_id: str = "", **properties: str) -> None:
        self.queue.send(body, message_id=message_id, properties=properties)

    def cut(self) -> None:
        self._receiver.disconnect()

    def counts(self) -> tuple[int, int, int]:
        return len(self.queue.messages), len(self.queue.completed), len(self.queue.dead_letters)

    def dead_letters(self) -> list[tuple[str, str]]:
        settlements = [message.settlement for message in self.queue.dead_letters]
        return [(one.dead_letter_reason, one.description) for one in settlements if one]

    def unlocked(self) -> int:
        return sum(message.locked_by is None for message in self.queue.messages)


class BusStation(Station):
    """The real receiver on the lab's bus."""

    def __init__(self, bus: ServiceBusLab, sender: ServiceBusClient) -> None:
        self._bus = bus
        self._sender = sender.get_queue_sender(QUEUE)
        close_socket_on_close(self._sender)  # `cut` cuts its connection, too
        super().__init__()

    def connect(self, stop: Stop) -> BusReceiver:
        settings = ReceiverSettings(connection_string=Secret(self._bus.connection_string), queue=QUEUE)
        return BusReceiver(settings, what="messages", clock=Clock(), stop=stop)

    def send(self, body: bytes, *, message_id: str = "", **properties: str) -> None:
        message = AmqpAnnotatedMessage(  # a ServiceBusMessage always has an id
            data_body=[body],
            properties=AmqpMessageProperties(message_id=message_id) if message_id else None,
            application_properties=properties,
        )
        self._sender.send_messages(message, timeout=LIMIT_SECONDS)

    def cut(self) -> None:
        self._bus.fault("drop")
        self._bus.advance(LOCK_SECONDS)

    def counts(self) -> tuple[int, int, int]:
        counts = self._bus.entity(QUEUE).counts
        return counts.active, counts.completed, counts.dead_letters

    def dead_letters(self) -> list[tuple[str, str]]:
        return [
            (one.dead_letter_reason or "", one.dead_letter_description or "")
            for one in self._bus.entity(QUEUE).dead_letters
        ]

    def unlocked(self) -> int:
        return sum(not message.locked for message in self._bus.entity(QUEUE).messages)


@pytest.fixture(params=["memory", "bus"])
def station(request: pytest.FixtureRequest) -> Iterator[Station]:
    with ExitStack() as stack:
        made: Station
        if request.param == "memory":
            made = MemoryStation()
        else:
            bus = stack.enter_context(ServiceBusLab(bus_config(LockDuration=f"PT{LOCK_SECONDS}S")))
            client = ServiceBusClient.from_connection_string(bus.connection_string)
            made = BusStation(bus, stack.enter_context(client))
        stack.callback(made.end)
        yield made


def test_a_message_arrives_with_body_id_properties_and_times(station: Station) -> None:
    station.send(b"one", message_id="m-1", name="value")
    station.send(b"two")
    named, nameless = station.receive(2)
    assert (named.body, named.message_id, named.properties) == (b"one", "m-1", {"name": "value"})
    assert named.enqueued_at is not None
    assert named.sequence_number is not None
    assert nameless.message_id == f"sequence-number-{nameless.sequence_number}"


def test_messages_arrive_in_their_order(station: Station) -> None:
    for number in range(20):
        station.send(str(number).encode())
    assert [message.body for message in station.receive(20)] == [str(n).encode() for n in range(20)]


def test_without_a_message_the_wait_ends(station: Station) -> None:
    assert list(station.receiver.messages(0.0)) == []
    assert list(station.receiver.messages(0.05)) == []


def test_a_settled_message_is_completed_or_dead_with_its_reason(station: Station) -> None:
    station.send(b"one")
    station.receiver.settle(station.receive_one(), Settlement())
    station.wait_for(0, 1, 0)
    station.send(b"two")
    settlement = Settlement(dead_letter_reason="malformed", description="no JSON")
    station.receiver.settle(station.receive_one(), settlement)
    station.wait_for(0, 1, 1)
    assert station.dead_letters() == [("malformed", "no JSON")]


def test_a_released_message_is_delivered_again(station: Station) -> None:
    station.send(b"one")
    first = station.receive_one()
    station.receiver.settle(first, Settlement(is_released=True))
    again = station.receive_one()
    assert again.sequence_number == first.sequence_number
    assert station.counts() == (1, 0, 0)
    station.receiver.settle(again, Settlement())
    station.wait_for(0, 1, 0)


def test_any_thread_may_settle(station: Station) -> None:
    for _ in range(10):
        station.send(b"one")
    received = station.receive(10)
    threads = [Thread(target=station.receiver.settle, args=(message, Settlement())) for message in received]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    station.wait_for(0, 10, 0)


def test_the_status_counts_what_is_not_settled(station: Station) -> None:
    station.send(b"one")
    message = station.receive_one()
    status = station.receiver.status()
    assert status["from"]
    assert (status["unsettled"], status["last_error"]) == (1, None)
    station.receiver.settle(message, Settlement())
    wait_until(lambda: station.receiver.status()["unsettled"] == 0)


def test_after_a_lost_connection_messages_are_delivered_again_and_old_settlements_are_ignored(
    station: Station,
) -> None:
    station.send(b"one")
    first = station.receive_one()
    station.cut()
    again = station.receive_one()
    assert (again.body, again.sequence_number) == (first.body, first.sequence_number)
    assert again.generation > first.generation
    assert again != first
    station.receiver.settle(first, Settlement(dead_letter_reason="late"))
    station.receiver.settle(again, Settlement())
    station.wait_for(0, 1, 0)


def test_the_stop_carries_out_settlements_and_releases_the_rest(station: Station) -> None:
    for _ in range(3):
        station.send(b"one")
    received = station.receive(3)
    station.receiver.settle(received[0], Settlement())
    station.receiver.settle(received[1], Settlement(dead_letter_reason="malformed"))
    station.end()
    assert station.counts() == (1, 1, 1)
    wait_until(lambda: station.unlocked() == 1)  # the broker sees a moment later that the link is closed


def test_an_unsettled_message_is_delivered_to_the_next_receiver(station: Station) -> None:
    station.send(b"one", message_id="m-1")
    station.receive()
    station.end()
    station.start()
    message = station.receive_one()
    assert message.message_id == "m-1"
