"""What programs send with Microsoft's clients for Node, Go and Java is understood as they mean it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bus import FLEET, BusRig, reasons, wait_settled
from tests.support.clients import client
from tests.support.imds_lab import ImdsLab
from tests.support.servicebus import ServiceBusLab

pytestmark = pytest.mark.timeout(900)  # the first run downloads the clients

# How each sends a command: see the clients in tests/data/servicebus.
VARIANTS = {
    "plain": "approved",  # an object as JSON in a data section
    "text": "approved",  # JSON as an AMQP string
    "twice": "approved",  # JSON in a JSON string
    "structured": "approved",
    "binary": "approved",
    "binary-colon": "approved",
    "binary-other": "malformed",  # a CloudEvent of another type
}


@pytest.mark.parametrize("language", ["node", "go", "java"])
def test_a_command_is_understood_in_every_form(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, language: str
) -> None:
    send = client(language)
    events = {name: imds.schedule(event_type="Reboot", resources=["web-0"], hold=True) for name in VARIANTS}
    with BusRig(tmp_path, imds, bus, queue=FLEET, session="{vm}") as rig:
        order = {"queue": FLEET, "session": "web-0", "type": "io.imdsbridge.command.approve.v1"}
        assert send("send", bus.connection_string, {**order, "events": events}) == "sent"
        receipts = rig.receipts_of(*VARIANTS)
        wait_settled(bus, FLEET)
    assert dict(zip(VARIANTS, reasons(receipts), strict=True)) == VARIANTS
    approved = {variant: event for variant, event in events.items() if VARIANTS[variant] == "approved"}
    accepted = {one["causationid"]: one["data"].get("EventId") for one in receipts}
    assert {variant: accepted[variant] for variant in approved} == approved
    (dead,) = bus.entity(FLEET).dead_letters
    assert (dead.message_id, dead.dead_letter_reason) == ("binary-other", "malformed")
