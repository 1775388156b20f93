"""The undocumented attributes of azure-servicebus that imds-bridge uses are still there."""

from __future__ import annotations

import socket
import subprocess
import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient, ServiceBusReceiver, ServiceBusSender

from bridge.azure.internals import abort_connection, close_socket_on_close
from tests.support.paths import ROOT

CONNECTION = "Endpoint=sb://127.0.0.1;SharedAccessKeyName=a;SharedAccessKey=YQ==;UseDevelopmentEmulator=true"


@pytest.fixture(params=["sender", "receiver"])
def handler(request: pytest.FixtureRequest) -> ServiceBusSender | ServiceBusReceiver:
    client = ServiceBusClient.from_connection_string(CONNECTION)
    if request.param == "sender":
        return client.get_queue_sender("q")
    return client.get_queue_receiver("q")


def test_the_version_of_the_sdk_is_bounded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "azure-servicebus>=7.15,<8" in project["dependencies"]


def test_a_sender_and_a_receiver_have_the_attributes(handler: Any) -> None:
    assert callable(handler._close_handler)
    assert handler._handler is None


def test_an_amqp_client_and_its_connection_have_the_attributes() -> None:
    from azure.servicebus._pyamqp._connection import Connection  # noqa: PLC0415
    from azure.servicebus._pyamqp.client import AMQPClient  # noqa: PLC0415

    client: Any = AMQPClient("127.0.0.1")  # type: ignore[no-untyped-call] # the SDK's own
    assert client._connection is None
    assert client._shutdown is False
    connection = Connection("amqp://127.0.0.1", transport=SimpleNamespace(sock=None))
    assert connection._transport is not None


def test_both_places_that_decode_messages_do_so_by_the_name_that_is_replaced() -> None:
    script = (
        "from azure.servicebus._pyamqp import _decode, receiver\n"
        "from azure.servicebus._transport import _pyamqp_transport\n"
        "assert receiver.decode_payload is _pyamqp_transport.decode_payload is _decode.decode_payload\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_handler_that_was_never_connected_is_closed_and_aborted_without_an_error(handler: Any) -> None:
    close_socket_on_close(handler)
    abort_connection(handler)
    handler.close()


def test_closing_closes_the_transport_even_if_the_sdk_fails() -> None:
    closed: list[bool] = []

    def fail() -> None:
        raise OSError("cut")

    transport = SimpleNamespace(close=lambda: closed.append(True))
    connection = SimpleNamespace(_transport=transport)
    handler = SimpleNamespace(_close_handler=fail, _handler=SimpleNamespace(_connection=connection))
    close_socket_on_close(handler)
    with pytest.raises(OSError, match="cut"):
        handler._close_handler()
    assert closed == [True]


def test_aborting_shuts_the_socket_down() -> None:
    shut: list[int] = []
    sock = SimpleNamespace(shutdown=shut.append)
    connection = SimpleNamespace(_transport=SimpleNamespace(sock=sock))
    abort_connection(SimpleNamespace(_handler=SimpleNamespace(_connection=connection)))
    assert shut == [socket.SHUT_RDWR]
