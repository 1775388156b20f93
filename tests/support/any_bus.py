"""The buses that tests/contract/test_bus.py compares by the SDK alone: the lab's, and the official emulator."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from azure.servicebus.exceptions import OperationTimeoutError

from bridge.lab.servicebus.config import load
from tests.support.paths import DATA
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab

CONFIG = DATA / "servicebus" / "config.json"
TOPIC = "events"
SEND_SECONDS = 20.0
WAIT_SECONDS = 30.0  # for what must come
STALL_SECONDS = 0.5  # for what must not

EMULATOR = "mcr.microsoft.com/azure-messaging/servicebus-emulator:latest"
SQL_SERVER = "mcr.microsoft.com/mssql/server:2022-latest"
CONFIG_PLACE = "/ServiceBus_Emulator/ConfigFiles/Config.json"
READY = "Emulator Service is Successfully Up"
READY_SECONDS = 240
PORT = 5672
SOCKET = Path("/var/run/docker.sock")


@dataclass(frozen=True, kw_only=True)
class Bus:
    """Reach one bus, by its connection string."""

    connection_string: str
    advance: Callable[[float], None] = lambda _: None  # moves its clock; without one, a receiver waits

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
        with self.client() as client, self.receiver(client, entity, **options) as receiver:
            yield receiver

    def receive(self, entity: str, count: int, **options: Any) -> list[ServiceBusReceivedMessage]:
        """Receive and complete a number of messages on a connection of their own, and see that no more come."""
        with self.receiving(entity, **options) as receiver:
            messages = collect(receiver, count)
            for message in messages:
                receiver.complete_message(message)
            assert nothing(receiver)
            return messages

    def dead_letter(self, entity: str) -> ServiceBusReceivedMessage:
        """Take the only dead letter."""
        (message,) = self.receive(entity, 1, sub_queue=ServiceBusSubQueue.DEAD_LETTER)
        return message

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


def only(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    """Receive the one message that must come."""
    (message,) = collect(receiver, 1)
    return message


def nothing(receiver: ServiceBusReceiver) -> bool:
    """Return whether no message comes."""
    return not receiver.receive_messages(1, max_wait_time=STALL_SECONDS)


def lab() -> Iterator[Bus]:
    """Run the lab."""
    with ServiceBusLab(CONFIG) as started:
        yield Bus(connection_string=started.connection_string, advance=started.advance)
        assert started.failures == ()


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
