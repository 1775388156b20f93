"""The lab's Service Bus over sockets: what product tests rely on and would not notice."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)
from azure.servicebus._pyamqp.cbs import CBSAuthenticator
from azure.servicebus.exceptions import (
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
)

from bridge.lab.httpd import LabError
from tests.support.only import only
from tests.support.paths import DATA
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab

LIMIT_SECONDS = 20.0

# azure-servicebus leaves the socket of a failed connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def _no_socket_left_to_other_tests() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(DATA / "servicebus" / "config.json") as started:
        yield started


def client_of(lab: ServiceBusLab) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(lab.connection_string, retry_total=0)


@contextmanager
def sender_to(lab: ServiceBusLab, queue: str = "plain") -> Iterator[ServiceBusSender]:
    with client_of(lab) as client, client.get_queue_sender(queue) as sender:
        yield sender


@contextmanager
def receiver_of(lab: ServiceBusLab, queue: str = "plain", **options: Any) -> Iterator[ServiceBusReceiver]:
    with client_of(lab) as client, client.get_queue_receiver(queue, **options) as receiver:
        yield receiver


def send(sender: ServiceBusSender, *bodies: str, **options: Any) -> None:
    sender.send_messages([ServiceBusMessage(body, **options) for body in bodies], timeout=LIMIT_SECONDS)


def put(lab: ServiceBusLab, *bodies: str, queue: str = "plain", **options: Any) -> None:
    with sender_to(lab, queue) as sender:
        send(sender, *bodies, **options)


def one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    return only(receiver.receive_messages(1, max_wait_time=LIMIT_SECONDS))


def held(lab: ServiceBusLab) -> list[bytes]:
    return [message.body for message in lab.entity("plain").messages]


def test_the_entities_can_be_looked_into_also_after_the_end(lab: ServiceBusLab) -> None:
    put(lab, "1", "2", "3", message_id="m", subject="s", application_properties={"a": "b"})
    with receiver_of(lab) as receiver:
        receiver.complete_message(one(receiver))
        receiver.dead_letter_message(one(receiver), reason="r", error_description="d")
        one(receiver)
        left, dead = only(lab.entity("Plain").messages), only(lab.entity("plain").dead_letters)
        assert (left.body, left.message_id, left.subject, left.locked) == (b"3", "m", "s", True)
        assert left.application_properties == {"a": "b"}
        assert (dead.body, dead.dead_letter_reason, dead.dead_letter_description) == (b"2", "r", "d")
        counts = lab.entity("plain").counts
        assert (counts.active, counts.locked, counts.dead_letters) == (1, 1, 1)
        assert (counts.enqueued, counts.completed, counts.duplicates) == (3, 1, 0)
        assert (lab.connections, lab.receivers("plain"), lab.senders("plain")) == (1, 1, 0)
    with pytest.raises(LabError, match="nowhere"):
        lab.entity("nowhere")
    with socket.create_connection(("127.0.0.1", lab.port), LIMIT_SECONDS) as client:
        client.sendall(SASL)
        assert client.recv(1000).startswith(SASL)
        lab.stop()
        while client.recv(1000):
            pass
    assert (held(lab), lab.connections, lab.failures) == ([b"3"], 0, ())


@pytest.mark.posix("Windows reserves no port")
def test_during_an_outage_nobody_else_is_given_the_port(lab: ServiceBusLab) -> None:
    lab.stop_listening()
    with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", lab.port))
    lab.listen_again()
    put(lab, "one")


def test_a_dropped_connection_leaves_its_messages_locked_and_frees_its_session(lab: ServiceBusLab) -> None:
    put(lab, "1")
    put(lab, "1", queue="sessions", session_id="a")
    with receiver_of(lab) as receiver, receiver_of(lab, "sessions", session_id="a") as first:
        one(receiver)
        one(first)
        lab.fault("drop")
        assert lab.entity("plain").counts.locked == 1
        lab.advance(61)
        assert lab.entity("plain").counts.locked == 0
        with receiver_of(lab, "sessions", session_id="a") as second:
            message = one(second)
            assert message.delivery_count == 0
            lab.advance(61)  # the session's lock ends: its receiver is detached
            with pytest.raises(ServiceBusError):
                second.complete_message(message)
    assert lab.failures == ()


@pytest.mark.parametrize(("when", "has_happened"), [("before", False), ("after", True)])
def test_a_batch_or_a_settlement_whose_connection_breaks_has_happened_whole_or_not_at_all(
    lab: ServiceBusLab, when: str, *, has_happened: bool
) -> None:
    with sender_to(lab) as sender:
        lab.fault(f"drop_{when}_store", "plain", count=1)
        with pytest.raises(ServiceBusConnectionError):
            send(sender, *"0123456789")
    assert len(held(lab)) == 10 * has_happened
    put(lab, "1")
    with receiver_of(lab) as receiver:
        message = one(receiver)
        lab.fault(f"drop_{when}_settle", "plain", count=1)
        with pytest.raises(ServiceBusError):
            receiver.complete_message(message)
        counts = lab.entity("plain").counts
        assert (counts.completed, counts.locked) == (has_happened, not has_happened)


@pytest.mark.parametrize("kind", ["silent", "silent_cbs", "no_credit", "stall"])
def test_a_bus_without_answers_leaves_a_client_waiting_until_it_is_dropped(
    lab: ServiceBusLab, kind: str
) -> None:
    def attempt() -> None:
        with suppress(ServiceBusError):
            put(lab, "1")

    lab.fault(kind)
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    wait_until(lambda: lab.applied(kind) or lab.senders("plain"))
    assert (thread.is_alive(), held(lab)) == (True, [])
    lab.clear_faults()
    lab.fault("drop")
    wait_until(lambda: not thread.is_alive())
    put(lab, "2")
    assert held(lab)[-1:] == [b"2"]


SASL, AMQP = b"AMQP\x03\x01\x00\x00", b"AMQP\x00\x01\x00\x00"
OUTCOME_OK = b"\x00\x00\x00\x10\x02\x01\x00\x00\x00\x53\x44\xc0\x03\x01\x50\x00"


def sasl_init(mechanism: bytes) -> bytes:
    """Return the frame in which a client chooses; .NET's knows only MSSBCBS."""
    name = b"\xa3" + bytes([len(mechanism)]) + mechanism
    body = b"\x00\x53\x41\xc0" + bytes([len(name) + 1, 1]) + name
    return (len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body


@pytest.mark.parametrize("piece_bytes", [1, 10, 1000])
def test_the_mechanisms_of_net_and_of_the_other_clients_are_offered_and_taken(
    lab: ServiceBusLab, piece_bytes: int
) -> None:
    for mechanism in (b"MSSBCBS", b"ANONYMOUS"):
        with socket.create_connection(("127.0.0.1", lab.port), LIMIT_SECONDS) as client:
            answers = client.makefile("rb")
            client.sendall(SASL)
            offer = answers.read(len(SASL) + 4)
            assert offer.startswith(SASL)
            names = answers.read(int.from_bytes(offer[-4:], "big") - 4)
            assert b"\x07MSSBCBS" in names
            assert b"\x09ANONYMOUS" in names
            sent = sasl_init(mechanism) + AMQP
            for start in range(0, len(sent), piece_bytes):
                client.sendall(sent[start : start + piece_bytes])
            assert answers.read(len(OUTCOME_OK + AMQP)) == OUTCOME_OK + AMQP
    put(lab, "1")
    assert (held(lab), lab.failures) == ([b"1"], ())


@pytest.mark.parametrize(
    "sent", [SASL + sasl_init(b"PLAIN"), SASL + b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", SASL * 2]
)
def test_a_client_that_is_none_is_turned_away(lab: ServiceBusLab, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", lab.port), LIMIT_SECONDS) as client:
        client.sendall(sent)
        while client.recv(1000):
            pass
    assert lab.failures == ()


def test_a_client_without_a_token_for_an_entity_is_refused(
    lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_token = CBSAuthenticator._put_token

    def for_another(authenticator: Any, token: str, kind: str, audience: str, *more: Any) -> None:
        put_token(authenticator, token, kind, audience.replace("plain", "plain-other"), *more)

    with monkeypatch.context() as patch:
        patch.setattr(CBSAuthenticator, "_put_token", for_another)
        with pytest.raises(ServiceBusAuthorizationError, match="no token"):
            put(lab, "1")
    put(lab, "2")
    assert held(lab) == [b"2"]


def test_a_fault_of_the_labs_own_costs_one_connection_and_is_kept(
    lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = RuntimeError("a fault of the lab's own")
    with sender_to(lab) as other, sender_to(lab) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(lab._bus.broker, "send", lambda *_: (_ for _ in ()).throw(fault))
            with pytest.raises(ServiceBusConnectionError):
                send(sender, "1")
        assert lab.failures == (fault,)
        send(other, "2")
    assert held(lab) == [b"2"]
