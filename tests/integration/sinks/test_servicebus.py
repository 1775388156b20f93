"""The Service Bus sink on the real SDK and the lab: what arrives, in which pieces, by which way, and what fails."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import math
import socket
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from azure.core.messaging import CloudEvent
from azure.servicebus import ServiceBusClient
from azure.servicebus.exceptions import MessageSizeExceededError

from bridge.azure import credentials as credentials_module
from bridge.azure import servicebus as servicebus_module
from bridge.config.bus import ServiceBusSettings
from bridge.errors import DeliveryError, HungError, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.worker import Worker
from bridge.sinks import servicebus as module
from bridge.sinks.base import Sink
from bridge.sinks.servicebus import REST_SECONDS, ServiceBusSink, to_message
from tests.support.clock import MovedClock
from tests.support.moved_delivery import MovedDelivery
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, RawServer, stored_event, wait_until
from tests.support.servicebus import ServiceBusLab, entities
from tests.support.sinks import QUEUE, TOPIC, Connect, bus_settings, failure, set_proxy
from tests.support.tls import forwarding

EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
KEY = "a-key-that-must-not-be-shown"
SESSIONS = "sessions"
LIMIT_BYTES = 20_000

RECOVERY_SECONDS = 5.0
SQL = "EventType IN ('Reboot', 'Redeploy') AND Resources LIKE '%,vm2,%'"
RULE = {"Name": "rule", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": SQL}}}
PARTITIONED = {"EnablePartitioning": True, "RequiresDuplicateDetection": True}
ENTITIES = entities(
    queues=[
        {"Name": QUEUE},
        {"Name": SESSIONS, "Properties": {"RequiresSession": True}},
        {"Name": "partitioned", "Properties": PARTITIONED},
        {"Name": "partitioned-sessions", "Properties": {**PARTITIONED, "RequiresSession": True}},
    ],
    subscriptions=[{"Name": "all"}, {"Name": "by-vm", "Rules": [RULE]}],
)


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(ENTITIES, key=KEY, max_message_bytes=LIMIT_BYTES) as started:
        yield started
        assert started.failures == ()


def event(number: int = 0, *, size: int = 0, **attributes: Any) -> StoredEvent:
    """Make an event as the forwarder does, of at least `size` bytes."""
    plain = stored_event(
        number,
        EventStatus="Scheduled",
        EventSource="Platform",
        Resources=["vm1", "vm2"],
        Vm={"Name": "VM1", "ResourceId": "/subscriptions/s/resourceGroups/RG/providers/x"},
        Description="x" * size,
    )
    envelope = {**plain.envelope, "correlationid": EVENT_ID, "partitionkey": EVENT_ID, **attributes}
    return replace(plain, body=json.dumps(envelope).encode("ascii"))


def sent(bus: ServiceBusLab, *events: StoredEvent, **more: Any) -> None:
    """Send with a sink that is closed then, and has no connection."""
    with closing(ServiceBusSink(bus_settings(bus, **more))) as sink:
        sink.send(events)
    wait_until(lambda: bus.connections == 0)


def deliver(sink: Sink, events: Sequence[StoredEvent]) -> None:
    """Send as the dispatcher does, until all have arrived: what has arrived is not sent again."""
    while events:
        try:
            sink.send(events)
            break
        except Unavailable as error:
            events = events[error.delivered :]


def ids(events: Sequence[StoredEvent]) -> list[str]:
    return [one.id for one in events]


def arrived(bus: ServiceBusLab, entity: str = QUEUE) -> list[str]:
    return [message.message_id for message in bus.entity(entity).messages]


def firsts(names: list[str]) -> list[str]:
    """Return each name once, in the order in which they first came."""
    return list(dict.fromkeys(names))


# --- the message ---


def test_a_message_carries_the_event_and_azure_core_reads_it_as_it_is(bus: ServiceBusLab) -> None:
    one = event()
    sent(bus, one)
    message = only(bus.entity(QUEUE).messages)
    assert (message.body, message.message_id, message.subject) == (one.body, one.id, one.type)
    assert (message.correlation_id, message.session_id) == (EVENT_ID, None)
    assert message.content_type == "application/cloudevents+json; charset=utf-8"
    attributes = {f"cloudEvents_{k}": v for k, v in one.envelope.items() if k != "data"}
    filtered = {"EventType": "Reboot", "EventStatus": "Scheduled", "EventSource": "Platform"}
    assert message.application_properties == {**attributes, **filtered, "Resources": ",vm1,vm2,"}
    assert {type(value) for value in message.application_properties.values()} == {str}
    with (
        ServiceBusClient.from_connection_string(bus.connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        received = only(receiver.receive_messages(1, max_wait_time=LIMIT_SECONDS))
        read: CloudEvent[Any] = CloudEvent.from_json(received)
    assert (read.id, read.type, read.source) == (one.id, one.type, one.envelope["source"])
    assert read.data == one.envelope["data"]
    assert read.extensions == {"correlationid": EVENT_ID, "partitionkey": EVENT_ID}


def test_what_imds_may_send_instead_of_texts_arrives_all_the_same(bus: ServiceBusLab) -> None:
    invalid_entries = [
        event(1, data={"EventType": {"a": [1]}, "EventStatus": 7, "Resources": [1, None, "vm\ud800"]}),
        event(2, data={"EventType": "half a pair: \ud800", "EventSource": True}),
        event(3, data=["no", "object"]),
        event(4, data=None, correlationid="\udfff"),
    ]
    sent(bus, *invalid_entries)
    assert [message.body for message in bus.entity(QUEUE).messages] == [one.body for one in invalid_entries]


def test_a_subscription_of_a_topic_selects_by_the_properties(bus: ServiceBusLab) -> None:
    one, beat = event(), stored_event(9, type_="io.imdsbridge.bridge.heartbeat.v1", EventType="")
    sent(bus, one, beat, topic=TOPIC)
    assert arrived(bus, f"{TOPIC}/Subscriptions/all") == ids([one, beat])
    assert arrived(bus, f"{TOPIC}/Subscriptions/by-vm") == [one.id]


def test_events_of_several_sessions_in_one_send_keep_their_order_within_each(bus: ServiceBusLab) -> None:
    events = [event(number, correlationid=f"E{number // 2 % 2}") for number in range(8)]
    sent(bus, *events, queue=SESSIONS, session="{event}")
    for session in ("E0", "E1"):
        got = [one.message_id for one in bus.entity(SESSIONS).messages if one.session_id == session]
        assert got == [one.id for one in events if one.envelope["correlationid"] == session]


@pytest.mark.parametrize(
    "entity", [{"queue": "partitioned"}, {"queue": "partitioned-sessions", "session": "{event}"}], ids=str
)
def test_an_entity_with_partitions_gets_61_events_of_a_document_at_once_over_one_connection(
    bus: ServiceBusLab, connect: Connect, tmp_path: Path, entity: dict[str, str]
) -> None:
    sink = connect(**entity)
    delivery = MovedDelivery(tmp_path, sink=sink, max_age_seconds=math.inf)
    events = [event(number, correlationid=f"E{number % 30}") for number in range(61)]
    with closing(delivery):
        delivery.outbox.commit(events)
        assert delivery.deliver(seconds=100) == []  # no wait
        assert delivery.dispatcher.status().last_error is None
    assert arrived(bus, entity["queue"]) == ids(events)
    assert sink._link.is_open
    assert bus.applied("connect") == 1


def test_a_message_that_is_refused_alone_is_no_lost_connection(bus: ServiceBusLab, connect: Connect) -> None:
    sink = connect(queue=SESSIONS)
    for _ in range(2):
        error = failure(sink, event(1), event(2))
        assert (type(error), error.is_unreached, error.delivered) == (Misconfigured, False, 0)
        assert "requires sessions (TransferRefusedError: The SessionId was not set" in str(error)
    assert bus.applied("connect") == 1


def test_copies_of_several_vms_reach_one_partition_where_duplicates_are_dropped(bus: ServiceBusLab) -> None:
    copies = [event(1, correlationid=given, reporter=f"web-{given}/forward") for given in ("Ab-1", "aB-1")]
    own = [event(number, correlationid=None, reporter=f"{'x' * 200}-{number}") for number in (2, 3)]
    for one in (*copies, *own):
        sent(bus, one, queue="partitioned")
    assert arrived(bus, "partitioned") == ids([copies[0], *own])


# --- batches and sizes ---


def test_events_go_in_batches_as_large_as_the_link_allows(bus: ServiceBusLab, connect: Connect) -> None:
    events = [event(number, size=4000) for number in range(10)]
    connect().send(events)
    assert bus.applied("store") in (3, 4)  # transfers
    assert arrived(bus) == ids(events)


def test_an_event_too_large_for_the_entity_is_rejected_and_all_before_it_are_delivered(
    bus: ServiceBusLab, connect: Connect
) -> None:
    events = [event(0), event(1), event(2, size=2 * LIMIT_BYTES), event(3)]
    sink = connect()
    error = failure(sink, *events)
    assert (type(error), error.delivered, "too large" in str(error)) == (Rejected, 2, True)
    sink.send(events[3:])
    assert arrived(bus) == ids([*events[:2], events[3]])


def test_an_event_that_fits_alone_but_in_no_batch_is_sent_alone(bus: ServiceBusLab, connect: Connect) -> None:
    sink = connect()
    batch = sink._open().create_message_batch()
    batch.add_message(to_message(event(1, size=1000)))
    size = LIMIT_BYTES - (batch.size_in_bytes - 1000) + 1  # a batch adds eight bytes to each message
    events = [event(0), event(1, size=size), event(2)]
    with pytest.raises(MessageSizeExceededError):
        sink._open().create_message_batch().add_message(to_message(events[1]))
    bus.fault("busy", count=1, after=2)
    error = failure(sink, *events)
    assert (type(error), error.delivered) == (Unavailable, 2)
    sink.send(events[2:])
    assert arrived(bus) == ids(events)


# --- idle, down and back ---


def test_a_sender_holds_no_connection_a_few_seconds_after_the_last_send(
    bus: ServiceBusLab, connect: Connect
) -> None:
    clock = MovedClock()
    sink = connect(clock=clock)
    assert sink.rest() == math.inf
    assert bus.connections == 0
    for number in range(2):
        sink.send([event(number)])
        clock.advance(REST_SECONDS - 1)
        assert sink.rest() == 1
        assert bus.connections == 1
        clock.advance(1)
        assert sink.rest() == math.inf
        wait_until(lambda: bus.connections == 0)
    assert arrived(bus) == ids([event(0), event(1)])


def test_a_link_that_was_detached_in_silence_fails_once_and_the_next_try_connects(
    bus: ServiceBusLab, connect: Connect
) -> None:
    sink = connect()
    sink.send([event(0)])
    bus.fault("detach")
    assert type(failure(sink, event(1))) is Unavailable
    sink.send([event(1)])
    assert arrived(bus) == ids([event(0), event(1)])


def test_after_a_pause_of_the_process_a_connection_that_was_lost_in_silence_delays_nothing(
    bus: ServiceBusLab, hold_up: Callable[[], None]
) -> None:
    with RawServer(forwarding(bus.port)) as nat:
        text = bus.connection_string.replace(str(bus.port), str(nat.port))
        with closing(ServiceBusSink(bus_settings(bus, connection_string=text))) as sink:
            sink.send([event(1)])
            nat.forgotten = nat.connections
            hold_up()
            sink.send([event(2)])  # over the lost one it would fail after 10 s
            assert nat.connections == nat.forgotten + 1
    assert len(arrived(bus)) == 2


def test_a_bus_that_is_down_is_sent_to_when_it_is_back_also_after_a_rest(
    bus: ServiceBusLab, connect: Connect
) -> None:
    clock = MovedClock()
    sink = connect(clock=clock)
    assert sink.retry_limit_seconds < RECOVERY_SECONDS
    for number in range(3):
        bus.stop_listening()
        clock.advance(REST_SECONDS)
        sink.rest()
        assert type(failure(sink, event(number))) is Unavailable
        bus.listen_again()
        sink.send([event(number)])
    assert arrived(bus) == ids([event(number) for number in range(3)])


@pytest.mark.parametrize("kind", ["drop_before_store", "drop_after_store"])
def test_a_connection_cut_between_batches_costs_duplicates_of_the_same_id_at_most(
    bus: ServiceBusLab, connect: Connect, kind: str
) -> None:
    events = [event(number, size=4000) for number in range(30)]  # four in a batch
    sink = connect()
    for after in range(3):
        bus.fault(kind, count=2, after=after)
        deliver(sink, events[10 * after : 10 * after + 10])
    assert bus.applied(kind) == 6
    assert firsts(arrived(bus)) == ids(events)
    if kind == "drop_before_store":  # the error has said how many had arrived
        assert arrived(bus) == ids(events)


# --- refusals ---


FAILURES = {
    "refuse_cbs": (Misconfigured, "refused"),
    "unauthorized": (Misconfigured, "role"),
    "missing": (Misconfigured, "no such queue or topic"),
    "disabled": (Misconfigured, "disabled"),
    "quota": (Unavailable, "the entity is full"),
    "busy": (Unavailable, "busy"),
    "no_connection": (Unavailable, "the namespace has no connection left (it accepts 5,000)"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_named_and_ends_without_a_restart(
    bus: ServiceBusLab, connect: Connect, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG)
    sink = connect()
    bus.fault(kind)
    error = failure(sink, event())
    error_type, words = FAILURES[kind]
    assert (type(error), words in str(error)) == (error_type, True)
    assert error.is_unreached  # another event would fail as well
    assert not (kind == "no_connection" and sink._link.is_open)
    bus.clear_faults()
    sink.send([event()])
    link = sink._link
    bus.fault(kind)  # while the link is open
    if kind == "disabled":
        failure(sink, event())
        assert "disabled" in str(failure(sink, event()))
    elif kind in ("quota", "busy"):  # what refuses an event keeps the connection
        failure(sink, event())
        assert sink._link is link
    assert KEY not in f"{error}{caplog.text}"
    assert not [r for r in caplog.records if r.name.startswith(("azure", "msal", "uamqp"))]


def test_a_check_needs_the_entity_and_the_right_to_send_and_sends_nothing(
    bus: ServiceBusLab, connect: Connect
) -> None:
    sink = connect()
    assert sink.check() == f"127.0.0.1:{bus.port}/{QUEUE}: ready to send"
    bus.fault("unauthorized")
    with pytest.raises(Misconfigured, match="role"):
        sink.check()
    bus.clear_faults()
    for given, reason in (
        ({"queue": "nowhere"}, "no such queue or topic"),
        ({"connection_string": f"{bus.connection_string}EntityPath=another"}, "EntityPath"),
    ):
        with pytest.raises(Misconfigured, match=reason):
            connect(**given).check()
    shown = connect(session="{type}").preview(event())
    assert {f"message_id: {event().id}", f"session_id: {event().type}", "EventType: Reboot"} <= set(
        shown.head
    )
    assert not [line for line in sink.preview(event()).head if line.startswith("session_id")]
    with pytest.raises(Rejected, match="cannot be converted"):
        sink.preview(replace(event(), id="x" * 200))
    assert bus.entity(QUEUE).counts.enqueued == 0


# --- silence ---


def threads() -> int:
    return sum(thread.name == f"servicebus-{QUEUE}" for thread in threading.enumerate())


def test_a_peer_that_is_silent_while_opening_is_aborted_and_its_thread_comes_back(
    bus: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.fault("silent")
    sink, calls = connect(), 0

    def wait_until_it_is_connected(_: Worker, outcome: Future[Any], __: float) -> None:
        nonlocal calls
        calls += 1
        wait_until(lambda: outcome.done() or bus.applied("silent") == calls)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "_wait", wait_until_it_is_connected)
        for _ in range(5):  # more often than calls may hang at once
            with pytest.raises(Unavailable, match="has not returned") as raised:
                sink.send([event()])
            assert raised.value.delivered == 0
            # As the next call does: the SDK may not have kept the socket yet that it has just connected.
            wait_until(lambda: sink._worker._hanging() == 0)
    bus.clear_faults()
    sink.send([event()])
    assert len(arrived(bus)) == 1


def test_a_call_that_is_left_behind_before_it_connects_does_not_connect_to_a_silent_peer(
    bus: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def connect_late(*given: Any, **named: Any) -> ServiceBusClient:
        gate.wait(LIMIT_SECONDS)
        return servicebus_module.connect(*given, **named)

    sink = connect()
    bus.fault("silent")
    monkeypatch.setattr(module, "connect", connect_late)
    monkeypatch.setattr(module, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    with pytest.raises(Unavailable, match="has not returned"):
        sink.send([event()])
    gate.set()
    wait_until(lambda: threads() == 0, describe=threading.enumerate)


@pytest.mark.parametrize("kind", ["no_credit", "silent_cbs"])
def test_a_broker_that_gives_no_credit_or_answers_no_token_is_left_in_time(
    bus: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sink = connect(timeout_seconds=0.3)
    deliver(sink, [event(0)])
    if kind == "silent_cbs":
        sink.reload()  # the open link needs no token
    bus.fault(kind)
    with monkeypatch.context() as patch:
        patch.setattr(servicebus_module, "TRY_SECONDS", 0.3)
        with pytest.raises(Unavailable, match="no answer in time"):
            sink.send([event(1)])
    bus.clear_faults()
    deliver(sink, [event(1)])
    assert firsts(arrived(bus)) == ids([event(0), event(1)])


def test_a_send_that_succeeds_late_is_a_duplicate_of_the_same_id_and_sends_nothing_more(
    bus: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    events = [event(number, size=12_000) for number in range(4)]  # each a batch
    sink = connect(timeout_seconds=LIMIT_SECONDS)
    sink.send(events[:1])
    link = sink._link
    assert link is not None
    sender = link.open()
    send = sender.send_messages

    def slowly(message: Any, **given: Any) -> None:
        gate.wait(LIMIT_SECONDS)
        send(message, **given)

    with monkeypatch.context() as patch:
        patch.setattr(link, "abort", lambda: None)  # as with an SDK that has been rebuilt
        patch.setattr(sender, "send_messages", slowly)
        patch.setattr(module, "TRY_SECONDS", 2 * LIMIT_SECONDS)
        patch.setattr(module, "GRACE_SECONDS", 0.2 - LIMIT_SECONDS)
        with pytest.raises(Unavailable, match="has not returned"):
            sink.send(events[1:])
    sink.send(events[1:])
    gate.set()
    wait_until(lambda: len(arrived(bus)) == 5, describe=lambda: arrived(bus))
    wait_until(lambda: threads() == 0, describe=threading.enumerate)
    wait_until(lambda: bus.connections == 1, describe=lambda: bus.clients)
    assert arrived(bus) == [*ids(events), events[1].id]


def test_the_last_of_the_hung_calls_is_final(bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    gate = threading.Event()
    monkeypatch.setattr(module._Link, "open", lambda _: gate.wait(LIMIT_SECONDS))
    sink = ServiceBusSink(bus_settings(bus))
    for expected in (Unavailable, Unavailable, HungError, HungError):
        with pytest.raises(expected):
            sink.send([event()])
    gate.set()
    sink.close()
    wait_until(lambda: threads() == 0)


def sockets() -> int:
    """Count this process's open sockets."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += str(path.readlink()).startswith("socket:")
    return count


def test_twenty_reconnects_leave_neither_threads_nor_connections(
    bus: ServiceBusLab, connect: Connect
) -> None:
    def quiet() -> bool:
        return threads() == 0 and bus.connections == 1

    sink = connect()
    sink.send([event()])
    wait_until(quiet)
    gc.collect()
    gc.disable()  # nothing is left to the collector
    try:
        before, files = threading.active_count(), sockets()
        for number in range(20):
            if number % 5:
                sink.reload()
            else:
                bus.fault("drop")
                assert type(failure(sink, event(number))) is Unavailable
            sink.send([event(number)])
        wait_until(quiet)
        wait_until(lambda: threading.active_count() <= before, describe=threading.enumerate)
        wait_until(lambda: sockets() <= files, describe=sockets)
    finally:
        gc.enable()
    assert bus.entity(QUEUE).counts.enqueued == 21


# --- who it is, and the way ---


def test_a_connection_string_needs_no_azure_identity(
    bus: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "azure.identity", None)
    importlib.reload(credentials_module)
    connect().send([event()])
    assert len(arrived(bus)) == 1


@pytest.mark.parametrize("way", ["key", "file", "environment"])
@pytest.mark.parametrize(("status", "kind"), [(502, Unavailable), (407, Misconfigured)])
def test_over_websockets_it_goes_through_the_proxy_to_port_443(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, status: int, kind: type[DeliveryError]
) -> None:
    """The proxy is real as far as its first request; a WebSocket that leads anywhere is not shown."""

    def refuse(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())

    with RawServer(refuse) as proxy:
        url = proxy.url.replace("://", f"://user:{KEY}%21@")
        (tmp_path / "proxy").write_text(url)
        set_proxy(monkeypatch, url if way == "environment" else "http://127.0.0.1:9")
        ways: dict[str, Any] = {"key": {"http_proxy": url}, "file": {"http_proxy_file": tmp_path / "proxy"}}
        with closing(ServiceBusSink(over_websockets("bus.invalid", **ways.get(way, {})))) as sink:
            error = failure(sink, event())
        head = proxy.requests[0]
    assert head.startswith("CONNECT bus.invalid:443 HTTP/1.1")
    assert f"Proxy-Authorization: Basic {b64encode(f'user:{KEY}!'.encode()).decode()}" in head
    assert (type(error), KEY in str(error)) == (kind, False)


def over_websockets(host: str, **more: Any) -> ServiceBusSettings:
    text = f"Endpoint=sb://{host}/;SharedAccessKeyName=k;SharedAccessKey={KEY}"
    given = {"kind": "servicebus", "connection_string": text, "queue": QUEUE, "transport": "websocket"}
    return ServiceBusSettings.model_validate({**given, **more})


def test_a_name_that_dns_does_not_know_is_no_refused_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with closing(ServiceBusSink(over_websockets("does-not-exist.invalid"))) as sink:
        error = failure(sink, event())
    assert (type(error), "the host name cannot be resolved" in str(error)) == (Unavailable, True)


def test_without_its_package_the_websocket_is_a_fault_that_names_the_extra(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "websocket", None)
    sink = connect(transport="websocket")
    for try_it in (sink.check, lambda: sink.send([event()])):
        with pytest.raises(Misconfigured, match=r"its package: install imds-bridge\[websocket\]"):
            try_it()
