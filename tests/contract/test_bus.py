"""What every bus must do that the project's bus code meets: the lab's, and the official emulator where Docker is.

Written against azure.servicebus alone. The entities are those of tests/data/servicebus/config.json, which both read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
    ServiceBusSubQueue,
)
from azure.servicebus.exceptions import (
    MessageAlreadySettled,
    MessageSizeExceededError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusError,
    SessionCannotBeLockedError,
)

from bridge.lab.servicebus.config import load
from tests.support.only import only
from tests.support.paths import DATA
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab

CONFIG = DATA / "servicebus" / "config.json"
TOPIC = "events"
SEND_SECONDS = 20.0
WAIT_SECONDS = 30.0  # for what must come
STALL_SECONDS = 0.5  # for what must not
SOCKET_SECONDS = 0.2  # the SDK's own

EMULATOR = "mcr.microsoft.com/azure-messaging/servicebus-emulator:latest"
SQL_SERVER = "mcr.microsoft.com/mssql/server:2022-latest"
CONFIG_PLACE = "/ServiceBus_Emulator/ConfigFiles/Config.json"
READY = "Emulator Service is Successfully Up"
READY_SECONDS = 240
PORT = 5672
SOCKET = Path("/var/run/docker.sock")


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Reach one bus, by its connection string.

    Attributes:
        stall_seconds: how long to wait for what must not come.
        socket_seconds: how long the SDK reads before it looks at the time, and twice when it closes a receiver.
        advance: moves its clock; without one, a receiver waits.
    """

    connection_string: str
    stall_seconds: float = STALL_SECONDS
    socket_seconds: float = SOCKET_SECONDS
    advance: Callable[[float], None] = lambda _: None

    def client(self) -> ServiceBusClient:
        """Return a client; as a context manager it closes what it gave."""
        return ServiceBusClient.from_connection_string(self.connection_string, retry_total=0)

    def receiver(self, client: ServiceBusClient, entity: str, **options: Any) -> ServiceBusReceiver:
        """Return a receiver of a queue, or of "topic/subscription"."""
        topic, _, subscription = entity.partition("/")
        if subscription:
            return client.get_subscription_receiver(topic, subscription, **options)
        return client.get_queue_receiver(entity, **options)

    def sender(self, client: ServiceBusClient, entity: str) -> ServiceBusSender:
        """Return a sender to a queue or a topic."""
        return client.get_topic_sender(entity) if entity == TOPIC else client.get_queue_sender(entity)

    def send(self, entity: str, *messages: ServiceBusMessage) -> None:
        """Send messages on a connection of their own."""
        with self.client() as client, self.sender(client, entity) as sender:
            sender.send_messages(list(messages), timeout=SEND_SECONDS)

    @contextmanager
    def receiving(self, entity: str, **options: Any) -> Iterator[ServiceBusReceiver]:
        """Give a receiver on a connection of its own."""
        # What is still on its way when a receiver is closed needs the SDK's own time.
        seconds = SOCKET_SECONDS if "prefetch_count" in options else self.socket_seconds
        given = {"socket_timeout": seconds, **options}
        with self.client() as client, self.receiver(client, entity, **given) as receiver:
            yield receiver

    def receive(self, entity: str, count: int, **options: Any) -> list[ServiceBusReceivedMessage]:
        """Receive and complete a number of messages on a connection of their own, and see that no more come."""
        with self.receiving(entity, **options) as receiver:
            messages = collect(receiver, count)
            for message in messages:
                receiver.complete_message(message)
            assert self.gives_nothing(receiver)
            return messages

    def gives_nothing(self, receiver: ServiceBusReceiver) -> bool:
        """Return whether no message comes."""
        return not receiver.receive_messages(1, max_wait_time=self.stall_seconds)

    def dead_letter(self, entity: str) -> ServiceBusReceivedMessage:
        """Take the only dead letter."""
        return only(self.receive(entity, 1, sub_queue=ServiceBusSubQueue.DEAD_LETTER))

    def wait_until_gone(self, receiver: ServiceBusReceiver) -> None:
        """Peek until a queue shows no message any more."""
        wait_until(lambda: not receiver.peek_messages(1, sequence_number=1, timeout=WAIT_SECONDS))


def collect(receiver: ServiceBusReceiver, count: int) -> list[ServiceBusReceivedMessage]:
    """Receive a number of messages; fewer where no more come in time."""
    messages: list[ServiceBusReceivedMessage] = []
    deadline = time.monotonic() + WAIT_SECONDS
    while len(messages) < count and (rest := deadline - time.monotonic()) > 0:
        messages += receiver.receive_messages(count - len(messages), max_wait_time=rest)
    return messages


def take(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    """Receive the one message that must come."""
    return only(collect(receiver, 1))


@pytest.fixture(scope="module")
def emulator() -> Iterator[Bus]:
    """Run the official emulator, or skip the test where there is no Docker.

    Whoever runs this accepts the terms of the emulator and of SQL Server, which it keeps its messages in. It has not
    run on the machine where it was written, which has no Docker.
    """
    if not (os.environ.get("DOCKER_HOST") or SOCKET.exists()):
        pytest.skip(f"the official emulator needs Docker, and neither DOCKER_HOST nor {SOCKET} is there")
    pytest.importorskip("testcontainers")
    # Only here is it sure that the package is there.
    from testcontainers.core.container import DockerContainer  # noqa: PLC0415
    from testcontainers.core.network import Network  # noqa: PLC0415
    from testcontainers.core.wait_strategies import LogMessageWaitStrategy  # noqa: PLC0415

    password = f"Lab-{uuid4()}"  # of a database that lives as long as this module's tests
    ready = LogMessageWaitStrategy(READY).with_startup_timeout(READY_SECONDS)
    with Network() as network:
        database = (
            DockerContainer(SQL_SERVER)
            .with_network(network)
            .with_network_aliases("sqlserver")
            .with_env("ACCEPT_EULA", "Y")
            .with_env("MSSQL_SA_PASSWORD", password)
        )
        emulator = (
            DockerContainer(EMULATOR)
            .with_network(network)
            .with_exposed_ports(PORT)
            .with_volume_mapping(str(CONFIG), CONFIG_PLACE, "ro")
            .with_env("ACCEPT_EULA", "Y")
            .with_env("SQL_SERVER", "sqlserver")
            .with_env("MSSQL_SA_PASSWORD", password)
            .waiting_for(ready)
        )
        with database, emulator:
            host, port = emulator.get_container_host_ip(), emulator.get_exposed_port(PORT)
            yield Bus(
                connection_string=f"Endpoint=sb://{host}:{port};SharedAccessKeyName=RootManageSharedAccessKey;"
                "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"
            )


def empty(bus: Bus) -> None:
    """Take every message off the entities: one emulator serves all tests."""
    namespace = load(CONFIG)
    subscriptions = [
        (f"{topic.name}/{one.name}", one) for topic in namespace.topics for one in topic.subscriptions
    ]
    for name, entity in [*((one.name, one) for one in namespace.queues), *subscriptions]:
        if entity.properties.requires_session:
            with suppress(OperationTimeoutError):
                while True:
                    _empty(bus, name, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=STALL_SECONDS)
        else:
            _empty(bus, name)
        _empty(bus, name, sub_queue=ServiceBusSubQueue.DEAD_LETTER)


def _empty(bus: Bus, name: str, **options: object) -> None:
    with bus.receiving(name, **options) as receiver:
        while messages := receiver.receive_messages(100, max_wait_time=STALL_SECONDS):
            for message in messages:
                receiver.complete_message(message)


@pytest.fixture(params=["lab", pytest.param("emulator", marks=pytest.mark.timeout(600))])  # images are pulled
def bus(request: pytest.FixtureRequest) -> Iterator[Bus]:
    """Return a bus with empty entities."""
    if request.param == "lab":
        with ServiceBusLab(CONFIG) as started:
            yield Bus(
                connection_string=started.connection_string,
                stall_seconds=0.1,
                socket_seconds=0.02,
                advance=started.advance,
            )
            assert started.failures == ()
        return
    shared = request.getfixturevalue("emulator")
    yield shared
    empty(shared)


def bodies(messages: Iterable[ServiceBusReceivedMessage]) -> list[str]:
    return [str(message) for message in messages]


# --- sending and receiving ---


def test_a_message_arrives_with_its_properties_and_body(bus: Bus) -> None:
    given: dict[str, Any] = {
        "message_id": "m1",
        "subject": "io.imdsbridge.test.v1",
        "correlation_id": "E1",
        "content_type": "application/cloudevents+json; charset=utf-8",
    }
    properties: dict[Any, Any] = {"cloudEvents_type": "t", "EventStatus": "Scheduled", "empty": ""}
    bus.send("plain", ServiceBusMessage(b"{}", application_properties=properties, **given))
    message = only(bus.receive("plain", 1))
    assert {name: getattr(message, name) for name in given} == given
    assert (b"".join(message.body), message.delivery_count) == (b"{}", 0)
    sent = {name.encode(): value.encode() for name, value in properties.items()}
    assert message.application_properties == sent
    assert message.sequence_number is not None
    assert message.enqueued_time_utc is not None
    assert abs(datetime.now(UTC) - message.enqueued_time_utc) < timedelta(minutes=10)


@pytest.mark.parametrize("count", [1, 50])
def test_a_batch_arrives_message_by_message_in_order(bus: Bus, count: int) -> None:
    expected = [(f"body {number}", f"m{number}") for number in range(count)]
    with bus.client() as client, bus.sender(client, "plain") as sender:
        batch = sender.create_message_batch()
        for body, message_id in expected:
            batch.add_message(ServiceBusMessage(body, message_id=message_id))
        sender.send_messages(batch, timeout=SEND_SECONDS)
    messages = bus.receive("plain", count)
    assert [(str(message), message.message_id) for message in messages] == expected


def test_a_message_above_the_limit_is_refused_and_one_of_200_kilobytes_arrives_whole(bus: Bus) -> None:
    body = bytes(range(256)) * 800
    with bus.client() as client, bus.sender(client, "plain") as sender:
        with pytest.raises(MessageSizeExceededError):
            sender.send_messages(ServiceBusMessage(body * 10), timeout=SEND_SECONDS)
        sender.send_messages(ServiceBusMessage(body), timeout=SEND_SECONDS)
    message = only(bus.receive("plain", 1))
    assert b"".join(message.body) == body


def test_an_unknown_entity_is_not_found(bus: Bus) -> None:
    with bus.client() as client:
        with pytest.raises(MessagingEntityNotFoundError), client.get_queue_sender("nowhere"):
            pass
        with pytest.raises(MessagingEntityNotFoundError), client.get_queue_receiver("nowhere"):
            pass


# --- settlement ---


def test_a_completed_message_does_not_come_back_and_is_not_settled_twice(bus: Bus) -> None:
    bus.send("plain", ServiceBusMessage("1"))
    with bus.receiving("plain") as receiver:
        message = take(receiver)
        receiver.complete_message(message)
        with pytest.raises(MessageAlreadySettled):
            receiver.complete_message(message)
        assert bus.gives_nothing(receiver)


def test_an_abandoned_message_comes_back_counted_and_after_three_deliveries_is_dead(bus: Bus) -> None:
    bus.send("plain", ServiceBusMessage("1", message_id="m1"))
    with bus.receiving("plain") as receiver:
        for count in range(3):
            message = take(receiver)
            assert (str(message), message.delivery_count) == ("1", count)
            receiver.abandon_message(message)
        assert bus.gives_nothing(receiver)
    dead = bus.dead_letter("plain")
    assert (dead.message_id, dead.dead_letter_reason) == ("m1", "MaxDeliveryCountExceeded")


def test_a_dead_letter_has_a_reason_and_a_description(bus: Bus) -> None:
    bus.send("plain", ServiceBusMessage("1", application_properties={"kept": "yes"}))
    with bus.receiving("plain") as receiver:
        receiver.dead_letter_message(take(receiver), reason="malformed", error_description="no EventId")
        assert bus.gives_nothing(receiver)
    dead = bus.dead_letter("plain")
    assert (str(dead), (dead.application_properties or {})[b"kept"]) == ("1", b"yes")
    assert (dead.dead_letter_reason, dead.dead_letter_error_description) == ("malformed", "no EventId")


def test_a_lock_can_be_renewed(bus: Bus) -> None:
    bus.send("plain", ServiceBusMessage("1"))
    with bus.receiving("plain") as receiver:
        message = take(receiver)
        before = message.locked_until_utc
        assert before is not None
        assert timedelta() < before - datetime.now(UTC) < timedelta(seconds=90)
        assert receiver.renew_message_lock(message) >= before
        receiver.complete_message(message)


def test_a_message_whose_lock_ends_goes_to_another_receiver_counted(bus: Bus) -> None:
    bus.send("short-lock", ServiceBusMessage("1"))
    with bus.receiving("short-lock") as first:
        take(first)
        with bus.receiving("short-lock") as second:
            bus.advance(5)
            again = take(second)
            assert (str(again), again.delivery_count) == ("1", 1)
            second.complete_message(again)


def test_closing_a_receiver_hands_back_what_it_had_not_given_out(bus: Bus) -> None:
    bus.send("plain", *(ServiceBusMessage(str(number)) for number in range(5)))
    with bus.receiving("plain", prefetch_count=20) as receiver:
        receiver.complete_message(take(receiver))
    rest = bus.receive("plain", 4)
    assert sorted(bodies(rest)) == ["1", "2", "3", "4"]


# --- time ---


def test_an_expired_message_is_dead_where_the_entity_says_so(bus: Bus) -> None:
    bus.send("expiring", ServiceBusMessage("1", time_to_live=timedelta(seconds=1)))
    bus.advance(1)
    with bus.receiving("expiring") as receiver:  # which the emulator may need to look at it
        bus.wait_until_gone(receiver)
        dead = bus.dead_letter("expiring")
    assert (str(dead), dead.dead_letter_reason) == ("1", "TTLExpiredException")


# --- duplicates ---


@pytest.mark.parametrize(("entity", "read"), [("deduplicated", "deduplicated"), (TOPIC, f"{TOPIC}/all")])
def test_a_message_id_is_taken_once_also_within_a_batch(bus: Bus, entity: str, read: str) -> None:
    first, second = str(uuid4()), str(uuid4())
    one, again, *both = (
        ServiceBusMessage(body, message_id=message_id)
        for body, message_id in (("1", first), ("2", first), ("3", second), ("4", second))
    )
    for messages in ([one], [again], both):
        bus.send(entity, *messages)
    assert bodies(bus.receive(read, 2)) == ["1", "3"]


# --- sessions ---


def test_a_session_gives_its_own_messages_in_order(bus: Bus) -> None:
    first, second = str(uuid4()), str(uuid4())
    for body, session_id in (("1", first), ("x", second), ("2", first)):
        bus.send("sessions", ServiceBusMessage(body, session_id=session_id))
    assert bodies(bus.receive("sessions", 2, session_id=first)) == ["1", "2"]
    message = only(bus.receive("sessions", 1, session_id=second))
    assert (str(message), message.session_id) == ("x", second)


def test_with_no_session_available_the_wait_ends(bus: Bus) -> None:
    with bus.client() as client, pytest.raises(OperationTimeoutError):
        bus.receiver(client, "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=0.3).__enter__()


def test_a_session_is_locked_by_one_receiver_at_a_time_and_the_next_one_has_a_message(bus: Bus) -> None:
    session_id = str(uuid4())
    bus.send("sessions", ServiceBusMessage("1", session_id=session_id))
    with bus.client() as client, bus.client() as other:
        first = bus.receiver(client, "sessions", session_id=session_id)
        with first, pytest.raises(SessionCannotBeLockedError):
            bus.receiver(other, "sessions", session_id=session_id).__enter__()
        following = bus.receiver(
            other, "sessions", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=WAIT_SECONDS
        )
        with following as second:
            assert second.session.session_id == session_id
            assert second.session.renew_lock(timeout=WAIT_SECONDS) > datetime.now(UTC)
            second.complete_message(take(second))


def test_without_a_session_nothing_is_sent_to_or_received_from_an_entity_that_requires_one(bus: Bus) -> None:
    with pytest.raises(ServiceBusError):
        bus.send("sessions", ServiceBusMessage("1"))
    with bus.client() as client, pytest.raises(ServiceBusError):
        bus.receiver(client, "sessions").__enter__()


# --- topics ---


def wanted(body: str = "1", subject: str = "wanted", **properties: Any) -> ServiceBusMessage:
    given: dict[Any, Any] = {"EventStatus": "Scheduled", **properties}
    return ServiceBusMessage(body, message_id=str(uuid4()), subject=subject, application_properties=given)


def test_each_subscription_gets_what_its_rules_take(bus: Bus) -> None:
    bus.send(
        TOPIC,
        wanted("1", EventType="Reboot", Resources=",vm1,vm2,"),
        wanted("2", EventStatus="Started", EventType="Redeploy", Resources=",vm1,"),
        wanted("3", EventType="Freeze", Resources=",vm1,"),
        wanted("4", EventStatus="Started", EventType="Reboot", Resources=",vm10,"),
        wanted("5", "other", EventType="Reboot", Resources=",vm1,"),
        ServiceBusMessage("6", message_id=str(uuid4()), subject="wanted"),
    )
    expected = {"all": [*"123456"], "by-subject": ["1", "3"], "by-sql": ["1", "2"]}
    got = {name: bodies(bus.receive(f"{TOPIC}/{name}", len(some))) for name, some in expected.items()}
    assert got == expected
