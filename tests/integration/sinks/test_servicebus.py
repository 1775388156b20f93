"""The Service Bus sink on the real SDK and the lab: what arrives, in which pieces, by which way."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from azure.core.messaging import CloudEvent
from azure.servicebus import ServiceBusClient
from azure.servicebus.exceptions import MessageSizeExceededError

from bridge.azure import credentials as credentials_module
from bridge.azure.servicebus import IDLE_LIMIT_SECONDS
from bridge.config.base import Secret
from bridge.config.bus import ServiceBusSettings
from bridge.errors import Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.sinks.servicebus import ServiceBusSink, to_message
from tests.support.clock import MovedClock
from tests.support.process import LIMIT_SECONDS, RawServer, environment, stored_event, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.sink import (
    QUEUE,
    TOKEN,
    TOPIC,
    Connect,
    TokenEndpoint,
    entities,
    ids,
    set_proxy,
    settings,
    with_identity,
    write,
)
from tests.support.webhook import failure

EVENT_ID = "4CAEA225-A741-474D-A72E-428C86FCD853"
LIMIT_BYTES = 20_000
SERVICE_LIMIT_SECONDS = 600.0  # after which the service detaches an idle link


@pytest.fixture
def lab() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(entities(), max_message_bytes=LIMIT_BYTES) as started:
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


def sent(lab: ServiceBusLab, *events: StoredEvent, **more: Any) -> None:
    with closing(ServiceBusSink(settings(lab, **more))) as sink:
        sink.send(events)


# --- the message ---


def test_a_message_carries_the_event_and_azure_core_reads_it_as_it_is(lab: ServiceBusLab) -> None:
    one = event()
    sent(lab, one)
    (message,) = lab.entity(QUEUE).messages
    assert (message.body, message.message_id, message.subject) == (one.body, one.id, one.type)
    assert (message.correlation_id, message.session_id) == (EVENT_ID, None)
    assert message.content_type == "application/cloudevents+json; charset=utf-8"
    attributes = {f"cloudEvents_{k}": v for k, v in one.envelope.items() if k != "data"}
    filtered = {"EventType": "Reboot", "EventStatus": "Scheduled", "EventSource": "Platform"}
    assert message.application_properties == {**attributes, **filtered, "Resources": ",vm1,vm2,"}
    assert {type(value) for value in message.application_properties.values()} == {str}
    with (
        ServiceBusClient.from_connection_string(lab.connection_string) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        (received,) = receiver.receive_messages(1, max_wait_time=LIMIT_SECONDS)
        read: CloudEvent[Any] = CloudEvent.from_json(received)
    assert (read.id, read.type, read.source) == (one.id, one.type, one.envelope["source"])
    assert read.data == one.envelope["data"]
    assert read.extensions == {"correlationid": EVENT_ID, "partitionkey": EVENT_ID}


def test_what_imds_may_send_instead_of_texts_arrives_all_the_same(lab: ServiceBusLab) -> None:
    invalid_entries = [
        event(1, data={"EventType": {"a": [1]}, "EventStatus": 7, "Resources": [1, None, "vm\ud800"]}),
        event(2, data={"EventType": "half a pair: \ud800", "EventSource": True}),
        event(3, data=["no", "object"]),
        event(4, data=None, correlationid="\udfff"),
    ]
    sent(lab, *invalid_entries)
    assert [message.body for message in lab.entity(QUEUE).messages] == [one.body for one in invalid_entries]


def test_a_subscription_of_a_topic_selects_by_the_properties() -> None:
    sql = "EventType IN ('Reboot', 'Redeploy') AND Resources LIKE '%,vm2,%'"
    rule = {"Name": "rule", "Properties": {"FilterType": "Sql", "SqlFilter": {"SqlExpression": sql}}}
    config = entities(subscriptions=[{"Name": "all"}, {"Name": "by-vm", "Rules": [rule]}])
    with ServiceBusLab(config) as lab:
        one = event()
        beat = stored_event(9, type_="io.imdsbridge.bridge.heartbeat.v1", EventType="")
        sent(lab, one, beat, topic=TOPIC)
        assert ids(lab.entity(f"{TOPIC}/Subscriptions/all").messages) == [one.id, beat.id]
        assert ids(lab.entity(f"{TOPIC}/Subscriptions/by-vm").messages) == [one.id]


# --- sessions ---


def test_events_of_several_sessions_in_one_send_keep_their_order_within_each() -> None:
    queue = {"Name": QUEUE, "Properties": {"RequiresSession": True}}
    with ServiceBusLab(entities(queues=[queue])) as lab:
        sent(lab, *(event(n, correlationid=f"E{n // 2 % 2}") for n in range(8)), session="{event}")
        messages = lab.entity(QUEUE).messages
    for session in ("E0", "E1"):
        got = [m.message_id for m in messages if m.session_id == session]
        assert got == [event(n).id for n in range(8) if f"E{n // 2 % 2}" == session]


# --- batches and sizes ---


def test_events_go_in_batches_as_large_as_the_link_allows(
    lab: ServiceBusLab, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = connect()
    counts: list[int] = []
    send = sink._send

    def count(transfer: Any) -> None:
        counts.append(len(transfer))
        send(transfer)

    monkeypatch.setattr(sink, "_send", count)
    events = [event(number, size=4000) for number in range(10)]
    sink.send(events)
    assert sum(counts) == 10
    assert max(counts) <= 4
    assert len(counts) in (3, 4)
    assert ids(lab.entity(QUEUE).messages) == [one.id for one in events]


def test_an_event_too_large_for_the_entity_is_rejected_and_all_before_it_are_delivered(
    lab: ServiceBusLab, connect: Connect
) -> None:
    events = [event(0), event(1), event(2, size=2 * LIMIT_BYTES), event(3)]
    sink = connect()
    with pytest.raises(Rejected, match="too large") as raised:
        sink.send(events)
    assert raised.value.delivered == 2
    sink.send(events[3:])
    assert ids(lab.entity(QUEUE).messages) == [events[number].id for number in (0, 1, 3)]


def test_an_event_that_fits_alone_but_in_no_batch_is_sent_alone(lab: ServiceBusLab, connect: Connect) -> None:
    sink = connect()
    batch = sink._open().create_message_batch()
    batch.add_message(to_message(event(1, size=1000)))
    size = LIMIT_BYTES - (batch.size_in_bytes - 1000) + 1  # a batch adds eight bytes to each message
    with pytest.raises(MessageSizeExceededError):
        sink._open().create_message_batch().add_message(to_message(event(1, size=size)))
    sink.send([event(0), event(1, size=size), event(2)])
    assert ids(lab.entity(QUEUE).messages) == [event(number).id for number in range(3)]


# --- idle ---


def test_an_idle_sender_is_reopened_before_the_service_detaches_it(
    lab: ServiceBusLab, connect: Connect
) -> None:
    clock = MovedClock()
    sink = connect(clock=clock)
    sink.keep_alive()
    assert lab.connections == 0
    sink.send([event(0)])
    first = sink._link
    for _ in range(int(2 * SERVICE_LIMIT_SECONDS / 50)):
        clock.advance(50)
        lab.advance(50)
        sink.keep_alive()
    link = sink._link
    assert link is not first
    wait_until(lambda: lab.connections == 1)  # those before it are closed
    connections = lab.clients
    sink.send([event(1)])
    assert sink._link is link
    assert lab.clients == connections  # nothing had to be opened
    assert len(lab.entity(QUEUE).messages) == 2


@pytest.mark.parametrize("kind", ["detach", "drop"])
def test_a_link_that_was_lost_in_silence_fails_once_and_the_next_try_connects(
    lab: ServiceBusLab, connect: Connect, kind: str
) -> None:
    sink = connect()
    sink.send([event(0)])
    lab.fault(kind)
    with pytest.raises(Unavailable):
        sink.send([event(1)])
    sink.send([event(1)])
    assert ids(lab.entity(QUEUE).messages) == [event(0).id, event(1).id]


def test_a_rest_that_fails_leaves_it_to_the_next_send(lab: ServiceBusLab, connect: Connect) -> None:
    clock = MovedClock()
    sink = connect(clock=clock)
    sink.send([event(0)])
    lab.stop_listening()
    clock.advance(IDLE_LIMIT_SECONDS)
    with pytest.raises(Unavailable):
        sink.keep_alive()
    lab.listen_again()
    sink.send([event(1)])
    assert len(lab.entity(QUEUE).messages) == 2


# --- who it is ---


def test_an_entity_path_for_another_entity_is_refused(lab: ServiceBusLab, connect: Connect) -> None:
    given = {"connection_string": f"{lab.connection_string}EntityPath=another"}
    with pytest.raises(Misconfigured, match="EntityPath"):
        connect(**given).check()


def test_the_identity_of_the_vm_gets_its_token_from_imds_without_a_proxy_and_keeps_it(
    lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab has no TLS and takes any token: what is real is the SDK, azure-identity and its request to IMDS."""
    with TokenEndpoint() as imds, TokenEndpoint() as proxy:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", imds.url)
        set_proxy(monkeypatch, proxy.url)
        clock = MovedClock()
        with closing(ServiceBusSink(with_identity(monkeypatch, lab, client_id="c-1"), clock=clock)) as sink:
            sink.send([event()])
            link = sink._link
            clock.advance(IDLE_LIMIT_SECONDS)
            sink.keep_alive()
            sink.send([event()])
            assert sink._link is not link
            assert len(imds.requests) == 1
            sink.reload()
            sink.send([event()])
        assert len(imds.requests) == 2
        assert "client_id=c-1" in imds.requests[0]
        assert "resource=https://servicebus.azure.net" in imds.requests[0]
        assert proxy.requests == []
    assert len(lab.entity(QUEUE).messages) == 3


def test_a_missing_token_is_reported_in_time_and_recovers_without_a_restart(
    lab: ServiceBusLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with TokenEndpoint((200, 60.0)) as imds:
        monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", imds.url)
        with closing(ServiceBusSink(with_identity(monkeypatch, lab))) as sink:
            with monkeypatch.context() as patch:
                patch.setitem(credentials_module._LIMITS, "read_timeout", 0.2)
                error = failure(sink, event())
            assert type(error) is Misconfigured
            assert "no token for the identity" in str(error)
            sink.reload()
            sink.send([event()])
    assert len(lab.entity(QUEUE).messages) == 1
    assert TOKEN not in caplog.text
    assert "sig=" not in str(error)


# --- the way ---


def test_over_websockets_it_goes_through_the_proxy_to_port_443() -> None:
    """The proxy is real as far as its first request; a WebSocket that leads anywhere is not shown."""

    def refuse(server: RawServer, connection: socket.socket) -> None:
        server.read_head(connection)
        connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    with RawServer(refuse) as proxy:
        text = "Endpoint=sb://bus.invalid/;SharedAccessKeyName=k;SharedAccessKey=s3cret-key"
        given = ServiceBusSettings(
            kind="servicebus",
            connection_string=Secret(text),
            queue=QUEUE,
            transport="websocket",
            http_proxy=proxy.url,
        )
        with closing(ServiceBusSink(given)) as sink, pytest.raises(Unavailable) as raised:
            sink.send([event()])
        assert proxy.requests[0].startswith("CONNECT bus.invalid:443 HTTP/1.1")
    assert "s3cret-key" not in str(raised.value)


def test_without_its_package_the_websocket_is_a_fault_that_names_the_extra(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "websocket", None)
    sink = connect(transport="websocket")
    for try_it in (sink.check, lambda: sink.send([event()])):
        with pytest.raises(Misconfigured, match=r"websocket-client; install imds-bridge\[websocket\]"):
            try_it()


# --- check and close ---


def test_a_check_needs_the_entity_and_the_right_to_send_and_sends_nothing(
    lab: ServiceBusLab, connect: Connect
) -> None:
    sink = connect()
    assert sink.check() == f"127.0.0.1:{lab.port}/{QUEUE}: ready to send"
    lab.fault("unauthorized")
    with pytest.raises(Misconfigured, match="role"):
        sink.check()
    lab.clear_faults()
    with pytest.raises(Misconfigured, match="no such queue or topic"):
        connect(queue="nowhere").check()
    assert lab.entity(QUEUE).counts.enqueued == 0


def test_a_closed_sink_has_no_connection(lab: ServiceBusLab) -> None:
    sent(lab, event())
    wait_until(lambda: lab.connections == 0)


def test_a_connection_string_needs_no_azure_identity(lab: ServiceBusLab, tmp_path: Path) -> None:
    file = write(tmp_path / "bus", lab.connection_string)
    code = (
        "import sys; from bridge.sinks.servicebus import ServiceBusSink;"
        "from bridge.config.bus import ServiceBusSettings;"
        f"given = ServiceBusSettings(kind='servicebus', connection_string_file=sys.argv[1], queue='{QUEUE}');"
        "sink = ServiceBusSink(given); print(sink.check()); sink.close();"
        "print([name for name in sys.modules if name.startswith(('azure.identity', 'msal'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.splitlines()[1:] == ["[]"]
