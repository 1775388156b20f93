"""Every receiver keeps the duties of the protocol: the double in memory, and the real one on the lab's bus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread

import pytest
from azure.servicebus import ServiceBusClient
from azure.servicebus.amqp import AmqpAnnotatedMessage, AmqpMessageProperties

from bridge.azure import bus_receiver
from bridge.azure.bus_receiver import BusReceiver
from bridge.azure.internals import close_socket_on_close
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from tests.support.bus import QUEUE, bus_config
from tests.support.memory_queue import MemoryQueue, MemoryReceiver
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.servicebus import ServiceBusLab

LOCK_SECONDS = 5


@dataclass(kw_only=True)
class Station:
    """A queue with a receiver of it, whose `run` runs on a thread.

    Attributes:
        connect: makes a receiver.
        send: sends a body, and maybe `message_id` and properties.
        cut: cuts the receiver's connection.
        counts: returns how many messages are left, completed and dead-lettered.
        dead_letters: returns reason and description of each dead letter.
        unlocked: returns how many messages are available to any receiver.
    """

    connect: Callable[[Stop], Receiver]
    send: Callable[..., None]
    cut: Callable[[], object]
    counts: Callable[[], tuple[int, int, int]]
    dead_letters: Callable[[], list[tuple[str, str]]]
    unlocked: Callable[[], int]

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.stop = Stop()
        self.receiver = self.connect(self.stop)
        self.thread = start_thread("receiver", self.receiver.run)

    def receive(self, count: int = 1) -> list[ReceivedMessage]:
        """Return `count` messages once they are there."""
        received: list[ReceivedMessage] = []

        def is_complete() -> bool:
            received.extend(self.receiver.messages(0.1))
            return len(received) >= count

        wait_until(is_complete, describe=lambda: received)
        return received

    def receive_one(self) -> ReceivedMessage:
        return only(self.receive())

    def wait_for(self, *counts: int) -> None:
        wait_until(lambda: self.counts() == counts, describe=self.counts)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(LIMIT_SECONDS)
        assert not self.thread.is_alive()


def in_memory(_: ExitStack) -> Station:
    """Make the double."""
    queue, receivers = MemoryQueue(), list[MemoryReceiver]()

    def connect(stop: Stop) -> MemoryReceiver:
        receivers.append(MemoryReceiver(queue, stop=stop))
        return receivers[-1]

    def cut() -> None:
        receivers[-1].disconnect()

    def dead_letters() -> list[tuple[str, str]]:
        settlements = [message.settlement for message in queue.dead_letters]
        return [(one.dead_letter_reason, one.description) for one in settlements if one]

    return Station(
        connect=connect,
        send=lambda body, message_id="", **given: queue.send(body, message_id=message_id, properties=given),
        cut=cut,
        counts=lambda: (len(queue.messages), len(queue.completed), len(queue.dead_letters)),
        dead_letters=dead_letters,
        unlocked=lambda: sum(message.locked_by is None for message in queue.messages),
    )


def on_bus(stack: ExitStack) -> Station:
    """Make the real receiver on the lab's bus."""
    bus = stack.enter_context(ServiceBusLab(bus_config(LockDuration=f"PT{LOCK_SECONDS}S")))
    client = stack.enter_context(ServiceBusClient.from_connection_string(bus.connection_string))
    sender = client.get_queue_sender(QUEUE)
    close_socket_on_close(sender)  # `cut` cuts its connection, too
    settings = ReceiverSettings(connection_string=Secret(bus.connection_string), queue=QUEUE)

    def send(body: bytes, message_id: str = "", **properties: str) -> None:
        message = AmqpAnnotatedMessage(  # a ServiceBusMessage always has an id
            data_body=[body],
            properties=AmqpMessageProperties(message_id=message_id) if message_id else None,
            application_properties=properties,
        )
        sender.send_messages(message, timeout=LIMIT_SECONDS)

    def cut() -> None:
        bus.fault("drop")
        bus.advance(LOCK_SECONDS)

    def counts() -> tuple[int, int, int]:
        found = bus.entity(QUEUE).counts
        return found.active, found.completed, found.dead_letters

    def dead_letters() -> list[tuple[str, str]]:
        letters = bus.entity(QUEUE).dead_letters
        return [(one.dead_letter_reason or "", one.dead_letter_description or "") for one in letters]

    return Station(
        connect=lambda stop: BusReceiver(settings, what="messages", clock=Clock(), stop=stop),
        send=send,
        cut=cut,
        counts=counts,
        dead_letters=dead_letters,
        unlocked=lambda: sum(not message.locked for message in bus.entity(QUEUE).messages),
    )


@pytest.fixture(params=[in_memory, on_bus])
def station(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Station]:
    for pause in ("IDLE_SECONDS", "REST_SECONDS", "RELEASE_PAUSE_SECONDS"):
        monkeypatch.setattr(bus_receiver, pause, 0.05)
    monkeypatch.setattr(bus_receiver, "STOP_SECONDS", LIMIT_SECONDS)  # of which a slow machine takes some
    with ExitStack() as stack:
        made: Station = request.param(stack)
        stack.callback(made.end)
        yield made


def test_it_rests_from_when_it_may_and_looks_when_it_is_asked_to(station: Station) -> None:
    def rests() -> bool:
        return [*station.receiver.messages(0.0)] == [] and bool(station.receiver.status().rests)

    station.receiver.receive_until(time.monotonic())
    wait_until(rests)
    station.send(b"one")
    assert list(station.receiver.messages(0.2)) == []
    station.receiver.receive_until(time.monotonic())
    message = station.receive_one()
    assert message.may_have_waited
    assert not station.receiver.status().rests
    station.receiver.settle(message, Settlement())
    wait_until(rests)


def test_a_message_arrives_with_body_id_properties_and_times(station: Station) -> None:
    station.send(b"one", message_id="m-1", name="value")
    station.send(b"two")
    named, nameless = station.receive(2)
    assert (named.body, named.message_id, named.properties) == (b"one", "m-1", {"name": "value"})
    assert named.enqueued_at is not None
    assert named.sequence_number is not None
    assert nameless.message_id == f"sequence-number-{nameless.sequence_number}"


def test_messages_arrive_in_their_order_and_without_one_the_wait_ends(station: Station) -> None:
    assert list(station.receiver.messages(0.0)) == list(station.receiver.messages(0.05)) == []
    for number in range(20):
        station.send(str(number).encode())
    assert [message.body for message in station.receive(20)] == [str(n).encode() for n in range(20)]


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
    assert status.from_
    assert (status.unsettled, status.last_error) == (1, None)
    station.receiver.settle(message, Settlement())
    wait_until(lambda: station.receiver.status().unsettled == 0)


def test_after_a_lost_connection_messages_are_delivered_again_and_old_settlements_are_ignored(
    station: Station,
) -> None:
    station.send(b"one")
    first = station.receive_one()
    station.cut()
    again = station.receive_one()
    assert (again.body, again.sequence_number) == (first.body, first.sequence_number)
    assert again != first
    station.receiver.settle(first, Settlement(dead_letter_reason="late"))
    station.receiver.settle(again, Settlement())
    station.wait_for(0, 1, 0)


def test_the_stop_carries_out_settlements_and_releases_the_rest_for_the_next_receiver(
    station: Station,
) -> None:
    for number in range(3):
        station.send(b"one", message_id=f"m-{number}")
    received = station.receive(3)
    station.receiver.settle(received[0], Settlement())
    station.receiver.settle(received[1], Settlement(dead_letter_reason="malformed"))
    station.end()
    assert station.counts() == (1, 1, 1)
    wait_until(lambda: station.unlocked() == 1)  # the broker sees a moment later that the link is closed
    station.start()
    assert station.receive_one().message_id == "m-2"
