"""The lab's Service Bus serves the unmodified client over sockets, and fails on demand."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)
from azure.servicebus.exceptions import (
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
)

from bridge.lab.httpd import LabError
from tests.support.paths import DATA
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab

CONFIG = DATA / "servicebus" / "config.json"
LIMIT_SECONDS = 20.0
CROWD_SECONDS = 90.0  # for sixty clients at once in one process
T = TypeVar("T")


# azure-servicebus leaves the socket of a failed connection to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(autouse=True)
def _no_socket_left_to_other_tests() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(CONFIG) as started:
        yield started
        started.clear_faults()
        assert started.failures == ()


def client_of(lab: ServiceBusLab, **options: Any) -> ServiceBusClient:
    return ServiceBusClient.from_connection_string(lab.connection_string, **{"retry_total": 0, **options})


@contextmanager
def sender_to(lab: ServiceBusLab, queue: str = "plain", **options: Any) -> Iterator[ServiceBusSender]:
    with client_of(lab, **options) as client, client.get_queue_sender(queue) as sender:
        yield sender


@contextmanager
def receiver_of(lab: ServiceBusLab, queue: str = "plain", **options: Any) -> Iterator[ServiceBusReceiver]:
    with client_of(lab) as client, client.get_queue_receiver(queue, **options) as receiver:
        yield receiver


def send(
    sender: ServiceBusSender, body: str = "body", *, seconds: float = LIMIT_SECONDS, **options: Any
) -> None:
    sender.send_messages(ServiceBusMessage(body, **options), timeout=seconds)


def put(lab: ServiceBusLab, *bodies: str, queue: str = "plain", **options: Any) -> None:
    with sender_to(lab, queue) as sender:
        for body in bodies:
            send(sender, body, **options)


def one(receiver: ServiceBusReceiver) -> ServiceBusReceivedMessage:
    (message,) = receiver.receive_messages(1, max_wait_time=LIMIT_SECONDS)
    return message


def held(lab: ServiceBusLab, queue: str = "plain") -> list[bytes]:
    return [message.body for message in lab.entity(queue).messages]


class Attempt:
    """Run something that may hang on a daemon thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - what it was is the test's subject
            self.error = error


# --- inspection ---


def test_the_entities_can_be_looked_into(lab: ServiceBusLab) -> None:
    put(lab, "1", "2", "3", message_id="m", subject="s", application_properties={"a": "b"})
    with receiver_of(lab) as receiver:
        receiver.complete_message(one(receiver))
        receiver.dead_letter_message(one(receiver), reason="r", error_description="d")
        one(receiver)
        (left,) = lab.entity("Plain").messages
        assert (left.body, left.message_id, left.subject, left.locked) == (b"3", "m", "s", True)
        assert left.application_properties == {"a": "b"}
        (dead,) = lab.entity("plain").dead_letters
        assert (dead.body, dead.dead_letter_reason, dead.dead_letter_description) == (b"2", "r", "d")
        counts = lab.entity("plain").counts
        assert (counts.active, counts.locked, counts.dead_letters) == (1, 1, 1)
        assert (counts.enqueued, counts.completed, counts.duplicates) == (3, 1, 0)
        assert (lab.connections, lab.receivers("plain"), lab.senders("plain")) == (1, 1, 0)
    with pytest.raises(LabError, match="nowhere"):
        lab.entity("nowhere")


def test_messages_can_be_looked_at_after_the_end(lab: ServiceBusLab) -> None:
    put(lab, "1")
    lab.stop()
    assert held(lab) == [b"1"]
    assert lab.connections == 0


def test_the_clock_can_be_put_forward(lab: ServiceBusLab) -> None:
    for _ in range(2):
        put(lab, "1", queue="deduplicated", message_id="same")
    lab.advance(10)
    put(lab, "2", queue="deduplicated", message_id="same")
    assert held(lab, "deduplicated") == [b"1"]
    lab.advance(10)
    put(lab, "3", queue="deduplicated", message_id="same")
    assert held(lab, "deduplicated") == [b"1", b"3"]


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


# --- access ---


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("unauthorized", ServiceBusAuthorizationError),
        ("refuse_cbs", ServiceBusAuthenticationError),
        ("missing", MessagingEntityNotFoundError),
        ("disabled", MessagingEntityDisabledError),
    ],
)
def test_an_entity_recovers_from_a_fault(lab: ServiceBusLab, kind: str, error: type[Exception]) -> None:
    lab.fault(kind, "plain")
    with client_of(lab) as client:
        for open_link in (client.get_queue_sender, client.get_queue_receiver):
            with pytest.raises(error):
                open_link("plain").__enter__()
        with client.get_queue_sender("short-lock") as other:
            send(other)
        lab.clear_faults(kind)
        with client.get_queue_sender("plain") as sender:
            send(sender)
    assert held(lab) == held(lab, "short-lock") == [b"body"]


@pytest.mark.parametrize("kind", ["missing", "disabled", "detach"])
def test_a_link_that_is_open_is_detached(lab: ServiceBusLab, kind: str) -> None:
    with sender_to(lab) as sender:
        send(sender, "1")
        lab.fault(kind, "plain")
        with pytest.raises(ServiceBusError):
            send(sender, "2")
        lab.clear_faults()
        send(sender, "3")
    assert held(lab)[-1:] == [b"3"]


def test_an_entity_can_be_created_later(lab: ServiceBusLab) -> None:
    with client_of(lab) as client:
        with pytest.raises(MessagingEntityNotFoundError):
            client.get_queue_sender("late").__enter__()
        lab.create_queue("late", {"MaxDeliveryCount": 1})
        lab.create_topic("late-topic", subscriptions=[{"Name": "s"}])
        with client.get_queue_sender("late") as sender, client.get_topic_sender("late-topic") as publisher:
            send(sender)
            send(publisher)
    assert held(lab, "late") == held(lab, "late-topic/Subscriptions/s") == [b"body"]


# --- broken connections ---


def test_the_bus_is_down_and_comes_back_on_its_port_with_its_messages(lab: ServiceBusLab) -> None:
    port = lab.port
    with sender_to(lab, retry_total=0) as sender:
        send(sender, "1")
        lab.stop_listening()
        for _ in range(2):
            with pytest.raises(ServiceBusError):
                send(sender, "lost", seconds=3)
        lab.listen_again()
        send(sender, "2")
    assert lab.port == port
    assert held(lab) == [b"1", b"2"]


@pytest.mark.parametrize(("kind", "stored"), [("drop_before_store", 0), ("drop_after_store", 10)])
def test_a_batch_whose_connection_breaks_is_stored_whole_or_not_at_all(
    lab: ServiceBusLab, kind: str, stored: int
) -> None:
    with sender_to(lab) as sender:
        send(sender, "first")
        lab.fault(kind, "plain", count=1)
        batch = sender.create_message_batch()
        for number in range(10):
            batch.add_message(ServiceBusMessage(str(number)))
        with pytest.raises(ServiceBusConnectionError):
            sender.send_messages(batch, timeout=LIMIT_SECONDS)
        assert len(held(lab)) == 1 + stored
        send(sender, "last")
    assert held(lab)[-1] == b"last"


@pytest.mark.parametrize(("kind", "completed"), [("drop_before_settle", 0), ("drop_after_settle", 1)])
def test_a_settlement_whose_connection_breaks_has_happened_or_not(
    lab: ServiceBusLab, kind: str, completed: int
) -> None:
    put(lab, "1")
    with receiver_of(lab) as receiver:
        message = one(receiver)
        lab.fault(kind, "plain", count=1)
        with pytest.raises(ServiceBusError):
            receiver.complete_message(message)
        assert lab.entity("plain").counts.completed == completed
        assert lab.entity("plain").counts.locked == 1 - completed


def test_a_fault_lets_some_pass_first(lab: ServiceBusLab) -> None:
    lab.fault("drop_before_store", after=2, count=1)
    with sender_to(lab) as sender:
        send(sender, "1")
        send(sender, "2")
        with pytest.raises(ServiceBusConnectionError):
            send(sender, "3")
        send(sender, "4")
    assert held(lab) == [b"1", b"2", b"4"]


# --- errors and missing answers ---


@pytest.mark.parametrize(
    ("kind", "error"), [("busy", ServiceBusServerBusyError), ("quota", ServiceBusQuotaExceededError)]
)
def test_sends_are_refused_as_often_as_the_fault_says(
    lab: ServiceBusLab, kind: str, error: type[Exception]
) -> None:
    with sender_to(lab) as sender:
        lab.fault(kind, count=2)
        for _ in range(2):
            with pytest.raises(error):
                send(sender, "refused")
        send(sender, "taken")
    assert held(lab) == [b"taken"]


@pytest.mark.parametrize("entity", [None, "plain"])
def test_a_stalled_bus_answers_nothing_and_goes_on_where_it_was(
    lab: ServiceBusLab, entity: str | None
) -> None:
    with sender_to(lab) as sender:
        send(sender, "1")
        lab.fault("stall", entity)
        with pytest.raises(OperationTimeoutError):
            send(sender, "2", seconds=0.5)
        assert held(lab) == [b"1"]
        lab.clear_faults()
        wait_until(lambda: held(lab) == [b"1", b"2"])
        send(sender, "3")
    assert held(lab) == [b"1", b"2", b"3"]


def test_a_stall_can_begin_between_settlements(lab: ServiceBusLab) -> None:
    put(lab, "1", "2")
    with receiver_of(lab) as receiver:
        lab.fault("stall", "plain", after=1)
        receiver.complete_message(one(receiver))
        second = one(receiver)
        stalled = Attempt(lambda: receiver.complete_message(second))
        wait_until(lambda: lab.applied("stall") == 1)
        assert lab.entity("plain").counts.completed == 1
        assert not stalled.over
        lab.clear_faults()
        wait_until(lambda: stalled.over)
        assert stalled.error is None
    assert lab.entity("plain").counts.completed == 2


def test_a_silent_bus_accepts_connections_and_sends_nothing_until_it_closes_them(lab: ServiceBusLab) -> None:
    with sender_to(lab) as sender:
        lab.fault("silent")
        hung = Attempt(lambda: put(lab, "1"))
        wait_until(lambda: lab.connections == 2)
        send(sender, "2")  # an existing connection is not affected
        assert not hung.over
        lab.clear_faults()
        wait_until(lambda: hung.over)
    assert hung.error is not None
    assert held(lab) == [b"2"]


def test_tokens_may_get_no_answer(lab: ServiceBusLab) -> None:
    lab.fault("silent_cbs")
    hung = Attempt(lambda: put(lab, "1"))
    wait_until(lambda: lab.applied("silent_cbs") == 1)
    lab.clear_faults()
    put(lab, "2")
    assert not hung.over
    lab.fault("drop")
    wait_until(lambda: hung.over)
    assert hung.error is not None
    assert held(lab) == [b"2"]


def test_without_credit_a_send_gets_no_answer_until_there_is_some(lab: ServiceBusLab) -> None:
    with sender_to(lab) as sender:
        lab.fault("no_credit", "plain")
        with pytest.raises(OperationTimeoutError):
            send(sender, "1", seconds=0.5)
        assert held(lab) == []
        lab.clear_faults()
        wait_until(lambda: held(lab) == [b"1"])
        send(sender, "2")
    assert held(lab) == [b"1", b"2"]


# --- many clients, and others than AMQP clients ---


def test_a_client_without_amqp_is_disconnected_and_does_not_disturb_others(lab: ServiceBusLab) -> None:
    with sender_to(lab) as sender:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"AMQP\x00\x01\x00\x00" + b"\xff" * 100, b""):
            with socket.create_connection(("127.0.0.1", lab.port), timeout=LIMIT_SECONDS) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass
        send(sender)
        wait_until(lambda: lab.connections == 1)
    assert held(lab) == [b"body"]


def test_a_fault_of_the_labs_own_costs_one_connection_and_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with ServiceBusLab(CONFIG) as lab, sender_to(lab) as other, sender_to(lab) as sender:
        fault = RuntimeError("a fault of the lab's own")
        with monkeypatch.context() as patch:
            patch.setattr(lab._bus.broker, "send", lambda *_: (_ for _ in ()).throw(fault))
            with pytest.raises(ServiceBusConnectionError):
                send(sender, "1")
        assert lab.failures == (fault,)
        send(other, "2")
        send(sender, "3")
        assert held(lab) == [b"2", b"3"]


def test_without_proton_the_extra_to_install_is_named() -> None:
    script = "import sys; sys.modules['proton'] = None; import bridge.lab.servicebus"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert "pip install 'imds-bridge[lab]'" in result.stderr
