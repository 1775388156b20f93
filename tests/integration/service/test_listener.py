"""The approval listener: the real Service Bus client on the lab's bus, and the lab's IMDS, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.service import identity
from bridge.service.listener import MAX_WAITING
from tests.support.bus import (
    FLEET,
    QUEUE,
    SUBSCRIPTION,
    TOPIC,
    BusRig,
    Sender,
    bus_config,
    command,
    reasons,
    wait_settled,
)
from tests.support.imds_lab import ImdsLab
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.servicebus import ServiceBusLab


@pytest.fixture
def sender(bus: ServiceBusLab) -> Iterator[Sender]:
    with Sender(bus) as one:
        yield one


def reboot(imds: ImdsLab, *resources: str, **changes: Any) -> str:
    return imds.schedule(**{"event_type": "Reboot", "resources": resources or ["web-0"], **changes})


# From the message to the settlement


def test_a_body_in_several_pieces_is_put_together(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    text = json.dumps({"EventId": event}).encode()
    with BusRig(tmp_path, imds, bus) as rig:
        sender.send(AmqpAnnotatedMessage(data_body=[text[:9], text[9:]], properties={"message_id": "m"}))
        assert rig.receipt_of("m")["Reason"] == "approved"


# Many messages, locks and the stop


@pytest.mark.timeout(600)
@pytest.mark.parametrize("queue", [QUEUE, FLEET])
def test_a_flood_for_unknown_events_delays_others_by_less_than_their_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, queue: str
) -> None:
    event = reboot(imds)
    session = "web-0" if queue == FLEET else None
    with Sender(bus, queue) as sender:
        unknown = [command(f"unknown-{n}", id=f"w{n}", session=session) for n in range(2 * MAX_WAITING)]
        sender.send(*unknown, command(event, id="c", session=session))
    options: dict[str, Any] = {"queue": queue, "session": "{vm}" if session else ""}
    with BusRig(tmp_path, imds, bus, grace_seconds=600, **options) as rig:
        rig.wait_for(lambda found: "approved" in reasons(found), timeout_seconds=3 * LIMIT_SECONDS)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_until(lambda: len(bus.entity(queue).messages) <= MAX_WAITING, timeout_seconds=3 * LIMIT_SECONDS)
        assert bus.entity(queue).counts.dead_letters > 0
        assert set(reasons(rig.receipts())) == {"unknown_event", "approved"}
    wait_until(lambda: bus.entity(queue).counts.locked == 0)
    # What was released counts as not delivered; what was on its way at the stop counts once.
    assert {one.delivery_count for one in bus.entity(queue).messages} <= {0, 1}


def test_large_commands_for_unknown_events_delay_a_valid_one_by_less_than_their_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    for number in range(120):
        sender.send(command(f"unknown-{number}", id=f"w{number}", Reason="x" * 200 * 1024))
    sender.send(command(event, id="c"))
    with BusRig(tmp_path, imds, bus, grace_seconds=600) as rig:
        rig.wait_for(lambda found: "approved" in reasons(found), timeout_seconds=3 * LIMIT_SECONDS)


def test_the_lock_of_a_session_is_renewed_while_commands_wait(tmp_path: Path, imds: ImdsLab) -> None:
    with (
        ServiceBusLab(bus_config(LockDuration="PT5S")) as bus,
        Sender(bus, FLEET) as sender,
        BusRig(tmp_path, imds, bus, queue=FLEET, session="{vm}", grace_seconds=600) as rig,
    ):
        sender.send(command("unknown", id="c", session="web-0"))
        wait_until(lambda: bus.entity(FLEET).counts.locked == 1)
        connection = wait_until(lambda: rig.commands._connection)
        assert connection is not None
        first = connection.renew_at
        wait_until(lambda: connection.renew_at > first)  # the broker gave more time
        assert [(one.locked, one.delivery_count) for one in bus.entity(FLEET).messages] == [(True, 0)]
        reboot(imds, event_id="unknown")
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, FLEET)


# Where commands come from


def test_commands_come_from_the_session_of_this_vm_alone(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    events = [reboot(imds), reboot(imds, "web-1")]
    with Sender(bus, FLEET) as sender:
        sender.send(command(events[1], id="other", session="lab.web-1"))
        sender.send(command(events[0], id="own", session="lab.web-0"))
        options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
        with BusRig(tmp_path / "0", imds, bus, **options) as rig:
            assert rig.receipt_of("own")["Reason"] == "approved"
            wait_until(lambda: bus.entity(FLEET).counts.active == 1)
            with BusRig(tmp_path / "1", imds, bus, vm="web-1", **options) as other:
                assert other.receipt_of("other")["Reason"] == "approved"
                wait_settled(bus, FLEET)


def test_a_vm_of_which_a_part_is_known_gets_its_session_and_another_after_a_move_without_a_restart(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "READ_EVERY_SECONDS", 0.5)
    part = dict.fromkeys(("vmId", "resourceGroupName", "subscriptionId", "resourceId", "tagsList"))
    imds.describe("web-0", {**part, "name": "web-24"})
    events = [reboot(imds, name) for name in ("web-0", "web-0", "web-0")]
    options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
    with Sender(bus, FLEET) as sender, BusRig(tmp_path, imds, bus, **options) as rig:
        wait_until(lambda: rig.listener.status().vm == "web-24")
        assert rig.commands._connection is None
        imds.describe("web-0", {})
        for event, group in zip(events, ("lab", "other", "other"), strict=True):
            sender.send(command(event, id=event, session=f"{group}.web-0"))
            assert rig.receipt_of(event)["Reason"] == "approved"
            imds.describe(
                "web-0", {"resourceGroupName": "other", "tagsList": [{"name": "env", "value": event}]}
            )
        known = rig.listener.parts.identity
        wait_until(lambda: known.vm and known.vm.tags == {"env": event})
        ends = [one for one in rig.events() if one["data"].get("Reason") == "Stopping"]
        starts = [one for one in rig.events() if one["data"].get("Reason") == "Started"]
    assert [one["data"]["PreviousEpoch"] for one in starts[1:]] == [one["reporterepoch"] for one in ends]
    assert [one["reporter"] for one in starts[1:]] == ["web-24/listen", "web-0/listen", "web-0/listen"]


def test_commands_come_from_a_subscription(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    event = reboot(imds)
    with (
        BusRig(tmp_path, imds, bus, topic=TOPIC, subscription=SUBSCRIPTION) as rig,
        Sender(bus, TOPIC) as sender,
    ):
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, f"{TOPIC}/Subscriptions/{SUBSCRIPTION}")
    assert [one.event_id for one in imds.approvals] == [event]
    assert imds.events[0]["EventStatus"] == "Started"


# Two listeners


def test_of_three_listeners_on_a_queue_without_sessions_each_answers_the_commands_for_its_vm(
    tmp_path: Path,
) -> None:
    names = [f"web-{number}" for number in range(3)]
    with ExitStack() as stack:
        imds = stack.enter_context(ImdsLab(vms=names))
        bus = stack.enter_context(ServiceBusLab(bus_config(MaxDeliveryCount=2)))
        sender = stack.enter_context(Sender(bus))
        rigs = [stack.enter_context(BusRig(tmp_path / name, imds, bus, vm=name)) for name in names]
        expected: dict[str, list[str]] = {name: [] for name in names}
        for number in range(30):
            name = names[number * 7 % 3]
            event = reboot(imds, name, notice_seconds=86_400)
            given: dict[str, Any] = (
                {"Vm": name} if number % 2 else {}
            )  # otherwise the Resources show whose it is
            sender.send(command(event, id=f"c{number}", **given))
            expected[name].append(f"c{number}")
        for rig, ids in zip(rigs, expected.values(), strict=True):
            receipts = rig.receipts_of(*ids)
            assert set(reasons(receipts)) == {"approved"}
        wait_settled(bus)
        for rig, ids in zip(rigs, expected.values(), strict=True):
            assert sorted(one["causationid"] for one in rig.receipts()) == sorted(ids)
        counts = bus.entity(QUEUE).counts
        assert (counts.completed, counts.dead_letters) == (30, 0)
        assert all(one.status != 429 for one in imds.requests())
