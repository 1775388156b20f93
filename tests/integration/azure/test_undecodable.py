"""A message that the SDK cannot decode stops nothing: it is dead-lettered, and the message behind it is handled."""

from __future__ import annotations

import contextlib
from pathlib import Path
from uuid import uuid4

import pytest
from azure.servicebus.exceptions import ServiceBusError
from hypothesis import Phase, given, settings

from bridge.azure.bus_receiver import try_to_receive
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from tests.support.bus import FLEET, QUEUE, Rig, Sender, command, wait_settled
from tests.support.imds_lab import ImdsLab
from tests.support.process import wait_until
from tests.support.relay import TOPIC, RelayRig, body_of, event_message, fleet_bus, subscription
from tests.support.servicebus import ServiceBusLab
from tests.support.undecodable import (
    VALUES,
    any_message,
    send_encoded,
    with_annotation,
    with_body,
    with_property,
)

EXAMPLES = 40


@pytest.mark.parametrize("queue", [QUEUE, FLEET])
def test_the_listener_dead_letters_each_and_approves_the_command_behind_them(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, queue: str
) -> None:
    event = imds.schedule(event_type="Reboot", resources=["web-0"])
    session = "web-0" if queue == FLEET else None
    with (
        Sender(bus, queue) as sender,
        Rig(tmp_path, imds, bus, queue=queue, session="{vm}" if session else "") as rig,
    ):
        for name, value in VALUES.items():
            payload = with_property(value, b"{}", message_id=name, session_id=session)
            send_encoded(sender, payload, session_id=session)
            send_encoded(sender, with_body(value, message_id=name, session_id=session), session_id=session)
        wait_until(lambda: bus.entity(queue).dead_letters)  # opening the link has a limit of its own
        sender.send(command(event, id="c", session=session))
        wait_until(lambda: imds.approvals)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, queue)
        assert rig.commands.status()["last_error"] is None
    dead = bus.entity(queue).dead_letters
    assert len(dead) == 2 * len(VALUES)
    assert {one.dead_letter_reason for one in dead} == {"malformed"}
    assert sum("cannot decode" in (one.dead_letter_description or "") for one in dead) >= len(VALUES)
    assert {one.delivery_count for one in dead} == {0}


@pytest.mark.parametrize("queue", [QUEUE, FLEET])
def test_whatever_message_the_broker_accepts_the_command_behind_it_is_answered(
    tmp_path: Path, bus: ServiceBusLab, queue: str
) -> None:
    session = "web-0" if queue == FLEET else None
    accepted: list[bytes] = []
    with (
        ImdsLab(vms=("web-0",), approvals="hold") as imds,
        Sender(bus, queue) as sender,
        Rig(tmp_path, imds, bus, queue=queue, session="{vm}" if session else "") as rig,
    ):
        event = imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)

        @settings(
            max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.explicit, Phase.generate]
        )
        @given(payload=any_message(session))
        def check(payload: bytes) -> None:
            with contextlib.suppress(ServiceBusError):  # the broker refuses it
                send_encoded(sender, payload, session_id=session)
                accepted.append(payload)
            name = str(uuid4())
            sender.send(command(event, id=name, session=session))
            rig.wait_for(
                lambda found: any(one.get("causationid") == name for one in found) or None,
            )
            assert rig.commands.status()["last_error"] is None

        check()
        wait_settled(bus, queue)
    assert len(accepted) > EXAMPLES / 10


def test_one_with_an_undecodable_annotation_is_dead_lettered_and_answered_too(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    with Sender(bus) as sender, Rig(tmp_path, imds, bus) as rig:
        send_encoded(sender, with_annotation(VALUES["a char"], b"{}", message_id="bad"))
        (receipt,) = rig.wait_for(lambda found: found)
        assert receipt["data"]["Reason"] == "malformed"
        assert receipt["causationid"].startswith("delivery-")
        wait_settled(bus)
    assert len(bus.entity(QUEUE).dead_letters) == 1


def test_the_relay_dead_letters_each_and_relays_the_event_behind_them(tmp_path: Path) -> None:
    with ServiceBusLab(fleet_bus()) as bus, Sender(bus, TOPIC) as sender, RelayRig(tmp_path, bus) as rig:
        for name, value in VALUES.items():
            send_encoded(sender, with_property(value, body_of(name), message_id=name))
        sender.send(event_message("good"))
        wait_until(lambda: rig.sinks[0].ids() == ["good"])
        rig.wait_until_settled()
        assert rig.sinks[0].ids() == ["good"]
        assert rig.relay.status()["malformed"] == len(VALUES)
        assert len(subscription(bus).dead_letters) == len(VALUES)


def test_check_looks_at_a_queue_with_such_a_message(bus: ServiceBusLab) -> None:
    settings = ReceiverSettings(connection_string=Secret(bus.connection_string), queue=QUEUE)
    with Sender(bus) as sender:
        send_encoded(sender, with_property(VALUES["a char"], b"{}"))
    assert "commands wait there" in try_to_receive(settings, what="commands")
