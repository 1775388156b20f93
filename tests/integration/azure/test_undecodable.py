"""A message that the SDK cannot decode stops nothing: it is dead-lettered, and the message behind it is handled."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.azure.bus_receiver import try_to_receive
from bridge.config.base import Secret
from bridge.config.bus import ReceiverSettings
from tests.support.bus import FLEET, QUEUE, BusRig, Sender, command, wait_settled
from tests.support.imds_lab import ImdsLab
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab
from tests.support.undecodable import (
    VALUES,
    send_encoded,
    with_annotation,
    with_body,
    with_property,
)


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
        (refused, *_) = rig.wait_for(lambda found: found)
        assert refused["data"]["Reason"] == "malformed"
        assert refused["causationid"].startswith("delivery-")
    dead = bus.entity(queue).dead_letters
    assert len(dead) == len(encoded)
    assert {one.dead_letter_reason for one in dead} == {"malformed"}
    assert sum("cannot decode" in (one.dead_letter_description or "") for one in dead) > len(VALUES)
    assert {one.delivery_count for one in dead} == {0}


def test_check_looks_at_a_queue_with_such_a_message(bus: ServiceBusLab) -> None:
    settings = ReceiverSettings(connection_string=Secret(bus.connection_string), queue=QUEUE)
    with Sender(bus) as sender:
        send_encoded(sender, with_property(VALUES["a char"], b"{}"))
    assert "commands wait there" in try_to_receive(settings, what="commands")
