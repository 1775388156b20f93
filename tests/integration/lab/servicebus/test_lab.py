"""The lab's Service Bus serves the unmodified client over sockets, and fails on demand."""

from __future__ import annotations

import gc
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import pytest
from azure.core.credentials import AccessToken
from azure.servicebus import (
    NEXT_AVAILABLE_SESSION,
    AutoLockRenewer,
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceivedMessage,
    ServiceBusReceiver,
    ServiceBusSender,
)
from azure.servicebus.exceptions import (
    MessageLockLostError,
    MessagingEntityDisabledError,
    MessagingEntityNotFoundError,
    OperationTimeoutError,
    ServiceBusAuthenticationError,
    ServiceBusAuthorizationError,
    ServiceBusConnectionError,
    ServiceBusError,
    ServiceBusQuotaExceededError,
    ServiceBusServerBusyError,
    SessionLockLostError,
)

from bridge.lab.httpd import LabError
from bridge.lab.servicebus.connection import Connection
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


def test_a_topic_counts_what_it_took_and_what_it_dropped(lab: ServiceBusLab) -> None:
    with client_of(lab) as client, client.get_topic_sender("events") as sender:
        for _ in range(3):
            send(sender, message_id="same")
    counts = lab.entity("events").counts
    assert (counts.enqueued, counts.duplicates, counts.active) == (1, 2, 0)
    assert held(lab, "events/Subscriptions/all") == [b"body"]


def test_messages_can_be_looked_at_after_the_end(lab: ServiceBusLab) -> None:
    put(lab, "1")
    lab.stop()
    assert held(lab) == [b"1"]
    assert lab.connections == 0


def test_connections_that_the_end_closes_release_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Connection] = []
    free = Connection.connection_lost

    def record(connection: Connection, error: Exception | None) -> None:
        freed.append(connection)
        free(connection, error)

    monkeypatch.setattr(Connection, "connection_lost", record)
    with (
        ServiceBusLab(CONFIG) as lab,
        socket.create_connection(("127.0.0.1", lab.port), timeout=LIMIT_SECONDS),
    ):
        wait_until(lambda: lab.connections == 1)
        lab.stop()
        assert len(freed) == 1


def test_a_waiting_receiver_gets_a_message_at_once(lab: ServiceBusLab) -> None:
    with sender_to(lab) as sender, receiver_of(lab) as receiver:
        started = threading.Event()
        received_at: list[float] = []

        def wait() -> None:
            started.set()
            one(receiver)
            received_at.append(time.monotonic())

        waiting = Attempt(wait)
        started.wait(LIMIT_SECONDS)
        sent = time.monotonic()
        send(sender)
        wait_until(lambda: waiting.over)
        assert received_at[0] - sent < LIMIT_SECONDS / 2


def test_the_clock_can_be_put_forward(lab: ServiceBusLab) -> None:
    for _ in range(2):
        put(lab, "1", queue="deduplicated", message_id="same")
    lab.advance(10)
    put(lab, "2", queue="deduplicated", message_id="same")
    assert held(lab, "deduplicated") == [b"1"]
    lab.advance(10)
    put(lab, "3", queue="deduplicated", message_id="same")
    assert held(lab, "deduplicated") == [b"1", b"3"]


def test_more_than_a_socket_holds_arrives_whole_and_in_order(lab: ServiceBusLab) -> None:
    padding = "x" * 200_000
    wanted = [f"{number}{padding}" for number in range(60)]
    put(lab, *wanted)
    with receiver_of(lab, prefetch_count=60) as receiver:
        got: list[str] = []
        while len(got) < len(wanted):
            got += [str(message) for message in receiver.receive_messages(60, max_wait_time=LIMIT_SECONDS)]
    assert got == wanted


# --- locks ---


def test_a_lost_lock_is_reported_at_settlement(lab: ServiceBusLab) -> None:
    put(lab, "1")
    with receiver_of(lab) as receiver:
        message = one(receiver)
        lab.advance(61)
        for settle in (receiver.complete_message, receiver.renew_message_lock):
            with pytest.raises(MessageLockLostError):
                settle(message)


def test_a_lost_session_detaches_its_receiver(lab: ServiceBusLab) -> None:
    put(lab, "1", queue="sessions", session_id="a")
    with receiver_of(lab, "sessions", session_id="a") as receiver:
        message = one(receiver)
        lab.advance(61)
        with pytest.raises((SessionLockLostError, ServiceBusError)):
            receiver.complete_message(message)
    with receiver_of(lab, "sessions", session_id="a") as receiver:
        assert one(receiver).delivery_count == 1


def test_a_lock_renewer_holds_a_message_beyond_its_lock(lab: ServiceBusLab) -> None:
    lab.create_queue("brief", {"LockDuration": "PT5S"})
    put(lab, "1", queue="brief")
    with AutoLockRenewer() as renewer, receiver_of(lab, "brief") as receiver:
        message = one(receiver)
        first_expiry = message.locked_until_utc
        assert first_expiry is not None
        renewer.register(receiver, message, max_lock_renewal_duration=LIMIT_SECONDS)
        wait_until(lambda: message.locked_until_utc != first_expiry)
        lab.advance((first_expiry - datetime.now(UTC)).total_seconds())
        receiver.complete_message(message)
    assert lab.entity("brief").counts.completed == 1


def test_a_dropped_connection_leaves_its_messages_locked_until_their_time_is_over(lab: ServiceBusLab) -> None:
    put(lab, "1")
    with receiver_of(lab) as receiver:
        one(receiver)
        lab.fault("drop")
        assert lab.entity("plain").counts.locked == 1
        lab.advance(61)
        assert lab.entity("plain").counts.locked == 0


def test_a_dropped_connection_frees_its_session_at_once(lab: ServiceBusLab) -> None:
    put(lab, "1", queue="sessions", session_id="a")
    with receiver_of(lab, "sessions", session_id="a") as first:
        one(first)
        lab.fault("drop")
        with receiver_of(lab, "sessions", session_id="a") as second:
            assert one(second).delivery_count == 0


# --- access ---


def test_a_wrong_key_is_refused(lab: ServiceBusLab) -> None:
    wrong = lab.connection_string_with("wrong")
    with (
        ServiceBusClient.from_connection_string(wrong, retry_total=0) as client,
        pytest.raises(ServiceBusAuthenticationError),
    ):
        client.get_queue_sender("plain").__enter__()


def test_a_token_of_an_identity_is_accepted(lab: ServiceBusLab) -> None:
    class Identity:
        def get_token(self, *_: str, **__: Any) -> AccessToken:
            return AccessToken("a.b.c", int(time.time()) + 3600)

    namespace = f"127.0.0.1:{lab.port}"
    with (
        ServiceBusClient(namespace, Identity(), retry_total=0, use_tls=False) as client,
        client.get_queue_sender("plain") as sender,
    ):
        send(sender)
    assert held(lab) == [b"body"]


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


def test_a_dropped_connection_is_reopened_by_the_next_send(lab: ServiceBusLab) -> None:
    with sender_to(lab, retry_total=3, retry_backoff_factor=0.05) as sender:
        send(sender, "1")
        lab.fault("drop")
        assert lab.connections == 0
        send(sender, "2")
    assert held(lab)[-1] == b"2"


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


def test_an_idle_link_is_detached_after_ten_minutes(lab: ServiceBusLab) -> None:
    with sender_to(lab) as sender:
        send(sender, "1")
        lab.advance(580)
        send(sender, "2")
        lab.advance(601)
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


def test_a_busy_bus_refuses_to_renew_locks(lab: ServiceBusLab) -> None:
    put(lab, "1")
    with receiver_of(lab) as receiver:
        message = one(receiver)
        lab.fault("busy", "plain", count=1)
        with pytest.raises(ServiceBusServerBusyError):
            receiver.renew_message_lock(message)
        receiver.renew_message_lock(message)


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


def test_a_stalled_entity_holds_up_links_that_are_yet_to_open(lab: ServiceBusLab) -> None:
    lab.fault("stall", "plain")
    stalled = Attempt(lambda: put(lab, "1"))
    wait_until(lambda: lab.applied("stall") == 1)
    put(lab, "other", queue="short-lock")
    assert not stalled.over
    lab.clear_faults()
    wait_until(lambda: stalled.over)
    assert stalled.error is None
    assert held(lab) == [b"1"]


def test_a_stall_ends_after_its_seconds(lab: ServiceBusLab) -> None:
    lab.fault("stall", seconds=0.5)
    put(lab, "1")
    assert held(lab) == [b"1"]


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


def test_a_receiver_that_waits_for_a_session_can_be_detached(lab: ServiceBusLab) -> None:
    waiting = Attempt(lambda: receiver_of(lab, "sessions", session_id=NEXT_AVAILABLE_SESSION).__enter__())
    wait_until(lambda: lab.receivers("Sessions") == 1)
    lab.fault("missing", "sessions")
    wait_until(lambda: waiting.over)
    assert isinstance(waiting.error, MessagingEntityNotFoundError)


def test_the_limit_of_a_message_can_be_set() -> None:
    with ServiceBusLab(CONFIG, max_message_bytes=2000) as lab, sender_to(lab) as sender:
        with pytest.raises(ServiceBusError, match="exceeds the limit"):
            send(sender, "x" * 3000)
        batch = sender.create_message_batch()
        assert batch.max_size_in_bytes == 2000
        send(sender, "x" * 1000)
        assert len(held(lab)) == 1


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


@pytest.mark.timeout(400)  # each step of sixty clients may take CROWD_SECONDS
def test_sixty_clients_with_two_connections_each_lose_nothing(lab: ServiceBusLab) -> None:
    ready = threading.Barrier(61)
    received: list[str] = []

    def take_part(number: int) -> None:
        with sender_to(lab) as sender, receiver_of(lab) as receiver:
            ready.wait(CROWD_SECONDS)
            send(sender, str(number), seconds=CROWD_SECONDS)
            (message,) = receiver.receive_messages(1, max_wait_time=CROWD_SECONDS)
            receiver.complete_message(message)
            received.append(str(message))

    attempts = [Attempt(partial(take_part, number)) for number in range(60)]
    ready.wait(CROWD_SECONDS)
    assert lab.connections == 120
    wait_until(lambda: all(attempt.over for attempt in attempts), timeout_seconds=CROWD_SECONDS)
    assert [attempt.error for attempt in attempts] == [None] * 60
    assert sorted(received, key=int) == [str(number) for number in range(60)]
    assert lab.entity("plain").counts.active == 0


def test_more_than_1024_connections_are_served(lab: ServiceBusLab) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096
    if soft < wanted:
        if hard < wanted:
            pytest.skip(f"this machine allows {hard} open files a process; the test needs {wanted}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    with ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(socket.create_connection(("127.0.0.1", lab.port), timeout=LIMIT_SECONDS))
        wait_until(lambda: lab.connections == 1100)
        lab.create_queue("crowded")
        # In another process: the client's select() cannot handle the descriptors above 1,024 of this one.
        script = (
            "import sys; from azure.servicebus import *\n"
            "with ServiceBusClient.from_connection_string(sys.argv[1], retry_total=0) as client:\n"
            "    with client.get_queue_sender('crowded') as sender:\n"
            "        sender.send_messages(ServiceBusMessage('1'), timeout=20)\n"
        )
        subprocess.run([sys.executable, "-c", script, lab.connection_string], check=True, timeout=60)
        assert held(lab, "crowded") == [b"1"]


def test_without_proton_the_extra_to_install_is_named() -> None:
    script = "import sys; sys.modules['proton'] = None; import bridge.lab.servicebus"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 1
    assert "pip install 'imds-bridge[lab]'" in result.stderr
