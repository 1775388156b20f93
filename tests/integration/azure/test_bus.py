"""Service Bus with the real client: what arrives meanwhile, what cannot be decoded, and whom it trusts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from azure.servicebus import ServiceBusClient

from bridge.azure import bus_receiver
from bridge.azure.bus_receiver import BusReceiver, try_to_receive
from bridge.azure.internals import keep_what_arrives
from bridge.config.approvals import ApprovalSettings
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings, ServiceBusSettings
from bridge.config.values import UNTRUSTED
from bridge.errors import Misconfigured
from bridge.process.parts import build_sinks
from bridge.runtime.threads import Stop, start_thread
from bridge.runtime.time import Clock
from bridge.runtime.worker import Worker
from tests.support.bus import FLEET, QUEUE, BusRig, Sender, command, message, wait_settled
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS, RawServer, stored_event, wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.tls import Authority, forwarding
from tests.support.undecodable import VALUES, send_encoded, with_annotation, with_body, with_property


def test_a_message_that_comes_while_another_is_settled_is_received_next_and_only_once(
    bus: ServiceBusLab,
) -> None:
    with (
        Sender(bus) as sender,
        ServiceBusClient.from_connection_string(bus.connection_string, retry_total=0) as client,
        client.get_queue_receiver(QUEUE) as receiver,
    ):
        keep_what_arrives(receiver)
        sender.send(message(b"", message_id="1"))
        first = only(receiver.receive_messages(max_message_count=5, max_wait_time=30))
        sender.send(*(message(b"", message_id=name) for name in "234"))  # the receiver asked for four more
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 4)
        receiver.complete_message(first)
        assert bus.entity(QUEUE).counts.locked == 3  # not given back
        kept = receiver.receive_messages(max_message_count=3, max_wait_time=30)
        assert [one.message_id for one in kept] == ["2", "3", "4"]
        for one in kept:
            receiver.complete_message(one)
    assert bus.entity(QUEUE).counts.active == 0


def test_a_bus_that_accepts_connections_and_is_silent_is_tried_for_ever(
    bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, answers, tries, wait = Stop(), Event(), 0, Worker._wait
    settings = ReceiverSettings(connection_string=Secret(bus.connection_string), queue=QUEUE)
    receiver = BusReceiver(settings, what="commands", clock=Clock(), stop=stop)

    def wait_until_it_is_connected(worker: Worker, outcome: Future[Any], deadline: float) -> None:
        nonlocal tries
        if answers.is_set():
            wait(worker, outcome, deadline)
        else:
            tries += 1
            wait_until(lambda: outcome.done() or bus.applied("silent") >= tries)

    def pause_seconds(*_: Any, **__: Any) -> float:
        wait_until(lambda: receiver._worker._hanging() == 0)
        return 0.0

    monkeypatch.setattr(Worker, "_wait", wait_until_it_is_connected)
    monkeypatch.setattr(bus_receiver, "full_jitter", pause_seconds)
    bus.fault("silent")
    thread = start_thread("commands", receiver.run)
    wait_until(lambda: tries > 5)  # more often than calls may hang at once
    answers.set()
    bus.clear_faults()
    with Sender(bus) as sender:
        sender.send(message(b"", message_id="1"))
    assert only([*receiver.messages(LIMIT_SECONDS)]).message_id == "1"
    stop.set()
    thread.join(LIMIT_SECONDS)
    assert not thread.is_alive()


# A message that the SDK cannot decode is dead-lettered, and the message behind it is handled


@pytest.mark.parametrize("queue", [QUEUE, FLEET])
def test_the_listener_dead_letters_and_answers_each_and_approves_the_command_behind_them(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, queue: str
) -> None:
    event = imds.schedule(event_type="Reboot", resources=["web-0"])
    session = "web-0" if queue == FLEET else None
    encoded = [with_annotation(VALUES["a char"], b"{}", session_id=session)]
    for name, value in VALUES.items():
        encoded.append(with_property(value, b"{}", message_id=name, session_id=session))
        encoded.append(with_body(value, message_id=name, session_id=session))
    with (
        Sender(bus, queue) as sender,
        BusRig(tmp_path, imds, bus, queue=queue, session="{vm}" if session else "") as rig,
    ):
        for payload in encoded:
            send_encoded(sender, payload, session_id=session)
        wait_until(lambda: bus.entity(queue).dead_letters)  # opening the link has a limit of its own
        sender.send(command(event, id="c", session=session))
        wait_until(lambda: imds.approvals)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, queue)
        assert rig.commands.status().last_error is None
        refused = rig.wait_for(lambda found: found)[0]
        assert refused["data"]["Reason"] == "malformed"
        assert refused["causationid"].startswith("delivery-")
    dead = bus.entity(queue).dead_letters
    assert [(one.dead_letter_reason, one.delivery_count) for one in dead] == [("malformed", 0)] * len(encoded)
    assert sum("cannot decode" in (one.dead_letter_description or "") for one in dead) > len(VALUES)


def test_check_looks_at_a_queue_with_such_a_message(bus: ServiceBusLab) -> None:
    settings = ReceiverSettings(connection_string=Secret(bus.connection_string), queue=QUEUE)
    with Sender(bus) as sender:
        send_encoded(sender, with_property(VALUES["a char"], b"{}"))
    assert "commands wait there" in try_to_receive(settings, what="commands")


# A broker behind a private authority and a port of its own


@pytest.fixture
def settings(bus: ServiceBusLab, authority: Authority) -> Iterator[dict[str, Any]]:
    """Serve the bus with TLS on a port of its own; return how to reach it."""
    with RawServer(forwarding(bus.port), tls=authority.server()) as front:
        plain = bus.connection_string.replace(str(bus.port), str(front.port))
        secured = plain.replace("UseDevelopmentEmulator=true", "").rstrip(";")
        yield {"connection_string": Secret(secured), "queue": QUEUE}


def send_one(settings: dict[str, Any]) -> None:
    sink = only(build_sinks({"bus": ServiceBusSettings(kind="servicebus", **settings)}).values())
    try:
        sink.send([stored_event(1)])
    finally:
        sink.close()


def test_events_and_commands_go_through_tls_to_the_port_of_the_connection_string(
    bus: ServiceBusLab, settings: dict[str, Any], authority: Authority
) -> None:
    given = {**settings, "ca_file": authority.file}
    send_one(given)
    assert bus.entity(QUEUE).counts.active == 1
    assert "commands wait there" in try_to_receive(ApprovalSettings(**given), what="commands")


def test_a_broker_of_another_authority_is_refused(bus: ServiceBusLab, settings: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured, match=UNTRUSTED):
        send_one(settings)
    assert bus.entity(QUEUE).counts.enqueued == 0
