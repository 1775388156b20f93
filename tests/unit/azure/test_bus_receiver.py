"""The receiver with an SDK that hangs, fails or cannot decode, without a bus, and what is done to its internals."""

from __future__ import annotations

import ast
import re
import socket
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import azure.servicebus
import pytest
from azure.servicebus import ServiceBusClient, ServiceBusReceivedMessage
from azure.servicebus.exceptions import (
    MessageLockLostError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.azure import bus_receiver, internals
from bridge.azure.bus_receiver import BusReceiver, Connection, convert, try_to_receive
from bridge.azure.internals import _decode, abort_connection, close_socket_on_close, fault_of
from bridge.azure.receiver import ReceivedMessage
from bridge.azure.servicebus import delivery_error, link_is_intact
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from bridge.config.values import UNTRUSTED
from bridge.errors import DeliveryError, HungError, Misconfigured, Unavailable
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from bridge.runtime.worker import Worker
from tests.support.bus_messages import APPLICATION, DATA, PROPERTIES, SEQUENCE, VALUE, section
from tests.support.clock import MovedClock
from tests.support.diff import steady, trials
from tests.support.paths import ROOT
from tests.support.process import wait_until
from tests.support.undecodable import (
    CHAR,
    VALUES,
    any_section,
    with_annotation,
    with_body,
    with_property,
)

LIMIT_SECONDS = 60.0
EMPTY: dict[str, Any] = {"body": b"", "properties": {}, "enqueued_at": None}
CONNECTION = "Endpoint=sb://127.0.0.1;SharedAccessKeyName=a;SharedAccessKey=YQ==;UseDevelopmentEmulator=true"


class FakeSdk:
    """Stands in for client and receiver; `on_open` and `on_receive` are what the calls do."""

    session: Any = None

    def __init__(self) -> None:
        self._handler = SimpleNamespace(_shutdown=False, _connection=None)
        self.released = threading.Event()
        self.hung = 0
        self.on_open: Callable[[], None] = lambda: None
        self.on_receive: Callable[[], None] = lambda: None
        self.opened = 0

    def hang(self) -> None:
        """Return only when the test ends."""
        self.hung += 1
        self.released.wait(LIMIT_SECONDS)

    def get_queue_receiver(self, _: str, **__: Any) -> FakeSdk:
        return self

    def __enter__(self) -> FakeSdk:
        self.opened += 1
        self.on_open()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def peek_messages(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def receive_messages(self, **_: Any) -> list[Any]:
        self.on_receive()
        return []

    def close(self) -> None:
        """Nothing is open."""

    def _close_handler(self) -> None:
        """Close nothing."""


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSdk]:
    fake = FakeSdk()
    monkeypatch.setattr(bus_receiver, "connect", lambda *_, **__: fake)
    for name in ("IDLE_SECONDS", "REST_SECONDS", "RETRY_LIMIT_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(bus_receiver, name, 0.02)
    monkeypatch.setattr(bus_receiver, "OPEN_SECONDS", LIMIT_SECONDS)
    yield fake
    fake.released.set()


@pytest.fixture
def stop() -> Stop:
    return Stop()


@contextmanager
def running(receiver: BusReceiver, stop: Stop) -> Iterator[None]:
    """Let it receive on a thread of its own, which has to end with `stop`."""
    thread = start_thread("commands", receiver.run)
    yield
    stop.set()
    thread.join(LIMIT_SECONDS / 2)
    assert not thread.is_alive()


SETTINGS = ReceiverSettings(connection_string=Secret("Endpoint=sb://nowhere"), queue="q")


@pytest.fixture
def receiver(stop: Stop) -> BusReceiver:
    return BusReceiver(SETTINGS, what="commands", clock=Clock(), stop=stop)


@pytest.mark.parametrize("call", ["on_open", "on_receive"])
def test_calls_that_hang_end_run_once_there_are_too_many(
    sdk: FakeSdk,
    receiver: BusReceiver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    left = 0

    def wait_until_it_hangs(_: Worker, outcome: Future[Any], deadline: float) -> None:
        nonlocal left
        assert deadline < time.monotonic() + 2 * LIMIT_SECONDS
        wait_until(lambda: outcome.done() or sdk.hung > left)
        left += not outcome.done()

    monkeypatch.setattr(Worker, "_wait", wait_until_it_hangs)
    setattr(sdk, call, sdk.hang)
    with pytest.raises(HungError) as caught:
        receiver.run()
    assert caught.value.final
    assert sdk.opened == 3
    assert len([line for line in caplog.messages if "no commands can be received" in line]) == 1


def test_a_call_that_hangs_does_not_delay_the_stop(sdk: FakeSdk, receiver: BusReceiver, stop: Stop) -> None:
    hanging = threading.Event()

    def hang() -> None:
        hanging.set()
        sdk.hang()

    sdk.on_receive = hang
    with running(receiver, stop):
        assert hanging.wait(LIMIT_SECONDS)


def test_after_an_error_of_the_sdk_or_a_receiver_that_it_has_shut_the_connection_is_opened_again(
    sdk: FakeSdk, receiver: BusReceiver, stop: Stop, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []

    def fail_three_times() -> None:
        shown.append(receiver.status().last_error or "")
        if len(shown) in (1, 2):
            raise TypeError("unexpected")
        sdk._handler._shutdown = len(shown) == 3
        if len(shown) == 5:
            stop.set()

    sdk.on_receive = fail_three_times
    receiver.run()
    assert sdk.opened == 4
    assert [bool(error) for error in shown] == [False, False, True, True, False]  # one failure is not told
    assert "unexpected" in shown[2]
    assert shown[3].endswith("the SDK has closed its receiver")  # one of imds-bridge's own is shown as it is
    assert "unexpected" in caplog.text


def test_it_rests_without_a_connection_once_a_look_has_found_nothing(
    sdk: FakeSdk, receiver: BusReceiver, stop: Stop
) -> None:
    receiver.receive_until(receiver.clock.monotonic())
    with running(receiver, stop):
        wait_until(lambda: receiver.status().rests)
        assert sdk.opened == 1
        assert receiver.status().looked_at
        receiver.receive_until(receiver.clock.monotonic() + LIMIT_SECONDS)
        wait_until(lambda: sdk.opened == 2)
        assert not receiver.status().rests


def test_a_look_that_fails_is_repeated_and_told(sdk: FakeSdk, receiver: BusReceiver, stop: Stop) -> None:
    tries: list[None] = []

    def fail() -> None:
        tries.append(None)
        if len(tries) < 5:
            raise TypeError("no role")

    sdk.on_open = fail
    receiver.receive_until(receiver.clock.monotonic())
    shown: list[object] = []
    sdk.on_receive = lambda: shown.append(receiver.status().last_error)
    with running(receiver, stop):
        wait_until(lambda: receiver.status().rests)
        assert len(tries) == 5
        assert "no role" in str(shown[0])
        wait_until(lambda: receiver.status().last_error is None)


def test_a_message_may_have_waited_until_an_empty_receive_some_seconds_after_connecting(
    sdk: FakeSdk, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    receiver = BusReceiver(SETTINGS, what="commands", clock=clock, stop=stop)
    messages = ["first", "", "early", "", "", "", "", "", "", "late"]
    seen: list[bool] = []

    def receive() -> list[Any]:
        clock.advance(1.0)
        text = messages.pop(0) if messages else ""
        if not messages:
            stop.set()
        return [SimpleNamespace(message_id=text)] if text else []

    def convert(*_: Any, may_have_waited: bool, **__: Any) -> ReceivedMessage:
        seen.append(may_have_waited)
        return ReceivedMessage(**EMPTY, message_id="", sequence_number=1)

    monkeypatch.setattr(sdk, "receive_messages", lambda **_: receive())
    monkeypatch.setattr(bus_receiver, "convert", convert)
    monkeypatch.setattr(internals, "release", lambda *_: None)
    monkeypatch.setattr(Connection, "locks_to_renew", lambda _: [])
    receiver.run()
    assert seen == [True, True, False]


def test_nothing_is_opened_while_the_session_is_not_known(sdk: FakeSdk, stop: Stop) -> None:
    asked: list[None] = []

    def session() -> str | None:
        asked.append(None)
        if len(asked) == 3:
            stop.set()
        return None

    BusReceiver(SETTINGS, what="commands", session=session, clock=Clock(), stop=stop).run()
    assert sdk.opened == 0


def test_a_check_does_not_take_a_receiver_that_the_sdk_has_shut_for_one_that_receives(sdk: FakeSdk) -> None:
    sdk._handler._shutdown = True
    with pytest.raises(Unavailable, match="the SDK has closed its receiver"):
        try_to_receive(SETTINGS, what="commands")


def test_a_lost_lock_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [
        ReceivedMessage(**EMPTY, message_id=str(number), sequence_number=number, handle=number)
        for number in range(3)
    ]
    requests: list[list[int]] = []

    def renew(_: object, handles: list[int]) -> list[datetime]:
        requests.append(handles)
        if 1 in handles:
            raise MessageLockLostError
        return [datetime.now(UTC) + timedelta(seconds=60) for _ in handles]

    monkeypatch.setattr(internals, "renew_locks", renew)
    sdk: Any = SimpleNamespace(session=None)
    connection = Connection(
        client=sdk, receiver=sdk, address="", what="commands", session="", clock=MovedClock()
    )
    connection.unsettled = dict.fromkeys(messages, 0.0)
    for renew_one in connection.locks_to_renew():
        renew_one()
    assert requests == [[0, 1, 2], [0], [1], [2]]
    assert [one.message_id for one in connection.unsettled] == ["0", "2"]
    assert all(renew_at > 0 for renew_at in connection.unsettled.values())


# What is done to undocumented attributes of the SDK; tests on a bus show that they are there.


def test_the_version_of_the_sdk_is_the_minor_one_that_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "azure-servicebus>=7.15,<7.16" in project["dependencies"]
    assert metadata.version("azure-servicebus").startswith("7.15.")


UNDOCUMENTED = {
    *(
        "_ERROR_CODE_TO_ERROR_MAPPING",
        "_close_handler",
        "_connection",
        "_delivery_id",
        "_delivery_tag",
        "_expiry",
    ),
    *("_handler", "_link", "_receive_context", "_renew_locks", "_shutdown", "_transport"),
}


def test_every_undocumented_attribute_that_is_used_is_known_and_the_sdk_has_it() -> None:
    used = {
        node.attr
        for path in (ROOT / "bridge").rglob("*.py")
        if "azure.servicebus" in (text := path.read_text(encoding="utf-8")) and "lab" not in path.parts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr)
        if ast.unparse(node.value) not in ("self", "cls")
    }
    assert used == UNDOCUMENTED
    sdk = Path(str(azure.servicebus.__file__)).parent
    source = "".join(path.read_text(encoding="utf-8") for path in sdk.rglob("*.py"))
    assert {
        name for name in UNDOCUMENTED if not re.search(rf"(self\.|^){name}\b", source, re.MULTILINE)
    } == set()


@pytest.mark.parametrize("kind", ["sender", "receiver"])
def test_a_handler_that_was_never_connected_is_closed_and_aborted_without_an_error(kind: str) -> None:
    client = ServiceBusClient.from_connection_string(CONNECTION)
    handler = getattr(client, f"get_queue_{kind}")("q")
    assert handler._handler is None
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


# Whatever a sender has encoded, a message can be received and settled


def received(payload: bytes, *, tag: bytes | None = None) -> ServiceBusReceivedMessage:
    """Build a message as the SDK does when a transfer has arrived; `tag` is its delivery tag."""
    frame: Any = [None, None, tag, *[None] * 9]
    return ServiceBusReceivedMessage(
        _decode(memoryview(payload)), receiver=SimpleNamespace(session=None), frame=frame
    )


def test_a_message_that_the_sdk_can_decode_has_no_fault() -> None:
    message = convert(received(with_property("text", b"body", message_id="m")))
    assert (message.fault, message.body, message.message_id) == ("", b"body", "m")
    assert message.properties == {"good": "text", "bad": "text"}


@pytest.mark.parametrize("value", VALUES.values(), ids=list(VALUES))
def test_a_message_or_body_that_the_sdk_cannot_decode_is_empty_and_says_so(value: Any) -> None:
    message = convert(received(with_property(value, b"body", message_id="m")))
    assert (message.body, message.properties, message.sequence_number) == (b"", {}, None)
    with pytest.raises(ValueError, match="cannot decode"):
        message.decoded_body()
    message = convert(received(with_body(value, message_id="m")))
    assert message.fault or message.body == b"" or value is VALUES["a decimal128"]


@pytest.mark.parametrize(
    ("kind", "value", "name"),
    [
        (VALUE, {"EventId": "A"}, "map"),
        (VALUE, ["A"], "list"),
        (VALUE, 7, "number"),
        (SEQUENCE, ["A"], "sequence"),
    ],
)
def test_a_body_that_is_no_text_is_named_by_its_kind_and_keeps_the_messages_id(
    kind: int, value: Any, name: str
) -> None:
    message = convert(received(section(PROPERTIES, ["m"]) + section(kind, value)))
    assert (message.message_id, message.fault) == (
        "m",
        f"its body is an AMQP {name}, expected a text or bytes",
    )


def test_each_delivery_of_such_a_message_has_an_id_of_its_own() -> None:
    tags = [bytes(range(16)), bytes(range(1, 17))]
    messages = [convert(received(with_property(CHAR, b"body"), tag=tag)) for tag in tags]
    assert all(message.fault for message in messages)
    assert [message.message_id for message in messages] == [f"delivery-{UUID(bytes_le=tag)}" for tag in tags]


def test_binary_properties_that_are_no_text_are_no_fault() -> None:
    message = convert(received(with_property(b"a\xff", b"body", message_id="m")))
    assert (message.fault, message.properties) == ("", {"good": "text", "bad": "a\N{REPLACEMENT CHARACTER}"})


def test_an_id_that_the_sdk_cannot_decode_is_replaced() -> None:
    message = convert(received(section(PROPERTIES, [CHAR, "user"]) + section(DATA, b"body")))
    assert message.message_id.startswith("delivery-")
    assert message.fault


def test_application_properties_that_are_no_map_are_a_fault() -> None:
    message = convert(received(section(APPLICATION, ["no map"]) + section(DATA, b"body")))
    assert (message.body, message.properties) == (b"", {})
    assert "a value that the SDK cannot decode" in message.fault


def test_a_sender_cannot_claim_the_fault() -> None:
    payload = with_annotation("text", b"body")
    assert fault_of(received(payload.replace(b"own-marker", b"imds-bridg"))) == ""


WHOLE, CUTS = with_property(CHAR, b"body"), st.integers(0, 200)
CUT = st.builds(
    lambda at, junk, rest: WHOLE[:at] + junk + WHOLE[at:][rest:], CUTS, st.binary(max_size=4), CUTS
)


@settings(steady, max_examples=trials(300))
@given(payload=st.lists(any_section, max_size=6).map(b"".join) | st.binary(max_size=60) | CUT)
def test_any_message_and_bytes_that_are_none_can_be_received(payload: bytes) -> None:
    assert convert(received(payload)).message_id


def test_an_application_property_of_any_type_is_text() -> None:
    payload = section(APPLICATION, {"number": 7, "flag": True}) + section(DATA, b"")
    assert convert(received(payload)).properties == {"number": "7", "flag": "True"}


# What the SDK's errors are mapped to

NO_CONNECTION = "ConnectionsQuotaExceeded for namespace contoso. 276167e3_G47"
NONE_LEFT = "the namespace has no connection left (it accepts 5,000); close"
FULL = "The maximum entity size has been reached or exceeded."


@pytest.mark.parametrize(
    ("kind", "text", "expected", "advice"),
    [
        (
            ServiceBusAuthenticationError,
            "Failed to authenticate the connection due to exception: [Errno -2] Name or service not known",
            Unavailable,
            "the host name cannot be resolved",
        ),
        (
            ServiceBusAuthorizationError,
            "Ip has been prevented to connect to the endpoint. For more information see: https://aka.ms/x",
            Misconfigured,
            "the namespace's firewall refuses this machine",
        ),
        (
            ServiceBusConnectionError,
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate",
            Misconfigured,
            UNTRUSTED,
        ),
        (
            ServiceBusError,
            "Handler failed: failed CONNECT via proxy status: 407.",
            Misconfigured,
            "the proxy wants user and password, or other ones, in http_proxy",
        ),
        (ServiceBusQuotaExceededError, NO_CONNECTION, Unavailable, NONE_LEFT),
        (ServiceBusConnectionError, NO_CONNECTION, Unavailable, NONE_LEFT),
        (ServiceBusQuotaExceededError, FULL, Unavailable, "the entity is full"),
    ],
)
def test_an_error_is_told_as_what_it_is_where_the_sdk_has_no_class_for_it(
    kind: type[Exception], text: str, expected: type[DeliveryError], advice: str
) -> None:
    given = {"message": text}
    mapped = delivery_error(kind(**given), "contoso/events")
    assert type(mapped) is expected
    assert str(mapped).startswith(f"contoso/events: {advice}")


@pytest.mark.parametrize(
    ("kind", "text", "is_intact"),
    [
        (ServiceBusQuotaExceededError, NO_CONNECTION, False),  # there was none: the next try connects
        (ServiceBusConnectionError, NO_CONNECTION, False),
        (ServiceBusQuotaExceededError, FULL, True),
    ],
)
def test_a_full_entity_keeps_the_connection(kind: type[Exception], text: str, is_intact: bool) -> None:
    given = {"message": text}
    assert link_is_intact(kind(**given)) is is_intact
