"""The official Service Bus emulator keeps the contract that the lab keeps: what the lab says, it is asked.

Whoever runs this accepts the terms of the emulator and of SQL Server, which it keeps its messages in. It runs
where a Docker engine is reached; on the machine where it was written none was, so it has not run there.
"""

from __future__ import annotations

import gc
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from azure.servicebus import NEXT_AVAILABLE_SESSION, ServiceBusReceiveMode, ServiceBusSubQueue
from azure.servicebus.exceptions import OperationTimeoutError

from bridge.lab.servicebus.config import load
from tests.contract.bus_contract import CONFIG, STALL_SECONDS, Bus, BusContract

pytestmark = pytest.mark.timeout(600)  # the images are pulled and started

EMULATOR = "mcr.microsoft.com/azure-messaging/servicebus-emulator:latest"
SQL_SERVER = "mcr.microsoft.com/mssql/server:2022-latest"
CONFIG_PLACE = "/ServiceBus_Emulator/ConfigFiles/Config.json"
READY = "Emulator Service is Successfully Up"
READY_SECONDS = 240
PORT = 5672
SOCKET = Path("/var/run/docker.sock")


@pytest.fixture(scope="module")
def emulator() -> Iterator[Bus]:
    if reason := _no_docker():
        pytest.skip(f"no Docker engine is reached, which the official emulator needs: {reason}")
    yield from _run()


def _no_docker() -> str:
    """Return why there is no Docker engine, or nothing."""
    if not (os.environ.get("DOCKER_HOST") or shutil.which("docker") or SOCKET.exists()):
        return f"neither DOCKER_HOST nor the command docker nor {SOCKET} is there"
    docker = pytest.importorskip("docker", reason="the packages testcontainers and docker are not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # docker leaves its socket open without an answer
        try:
            client = docker.from_env()
            client.ping()
            client.close()
        except docker.errors.DockerException as error:
            return str(error)
        finally:
            gc.collect()
    return ""


def _run() -> Iterator[Bus]:
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


@pytest.fixture
def bus(emulator: Bus) -> Iterator[Bus]:
    """Leave the entities as each test finds them: empty. One emulator serves all tests."""
    yield emulator
    for name, requires_session in _entities():
        if requires_session:
            _empty_sessions(emulator, name)
        else:
            _empty(emulator, name)
        _empty(emulator, name, sub_queue=ServiceBusSubQueue.DEAD_LETTER)


def _entities() -> list[tuple[str, bool]]:
    namespace = load(CONFIG)
    subscriptions = [
        (f"{topic.name}/{one.name}", one.properties.requires_session)
        for topic in namespace.topics
        for one in topic.subscriptions
    ]
    return [*((one.name, one.properties.requires_session) for one in namespace.queues), *subscriptions]


def _empty(bus: Bus, name: str, **options: object) -> None:
    mode = ServiceBusReceiveMode.RECEIVE_AND_DELETE
    with bus.client() as client, bus.receiver(client, name, receive_mode=mode, **options) as receiver:
        while receiver.receive_messages(100, max_wait_time=STALL_SECONDS):
            pass


def _empty_sessions(bus: Bus, name: str) -> None:
    try:
        while True:
            _empty(bus, name, session_id=NEXT_AVAILABLE_SESSION, max_wait_time=STALL_SECONDS)
    except OperationTimeoutError:
        return


class TestEmulator(BusContract):
    """Run the suite against the official emulator."""
