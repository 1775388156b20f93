"""The approval listener: the real Service Bus client on the lab's bus, and the lab's IMDS, over real sockets."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.approvals.pending import REJECTED_RECEIPTS_PER_MINUTE
from bridge.config.base import Secret
from bridge.http.signing import sign
from bridge.lab.imds import EVENTS_PATH
from bridge.service.listener import MAX_WAITING
from tests.support.bus import (
    FLEET,
    QUEUE,
    SECRET,
    SUBSCRIPTION,
    TOPIC,
    Rig,
    Sender,
    bus_config,
    command,
    message,
    posts,
    reasons,
    wait_settled,
)
from tests.support.imds_lab import ImdsLab
from tests.support.process import LIMIT_SECONDS, wait_until
from tests.support.servicebus import ServiceBusLab

OTHER_SECRET = "whsec_" + "QUJD" * 8


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab(vms=("web-0", "web-1")) as lab:
        yield lab


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config()) as lab:
        yield lab
        assert lab.failures == ()


@pytest.fixture
def sender(bus: ServiceBusLab) -> Iterator[Sender]:
    with Sender(bus) as one:
        yield one


def reboot(imds: ImdsLab, *resources: str, **changes: Any) -> str:
    return imds.schedule(**{"event_type": "Reboot", "resources": resources or ["web-0"], **changes})


# From the message to the settlement


def test_an_approval_is_posted_answered_and_settled(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds, "web-0", "web-1")
    with Rig(tmp_path, imds, bus, policy={"scope": "self", "allow": [{"event_type": ["Reboot"]}]}) as rig:
        sender.send(command(event, id="c", Reason="now", RequestedBy="jo"))
        (receipt,) = rig.receipts_of("c")
        wait_settled(bus)
    data = receipt["data"]
    assert (receipt["type"], data["Outcome"], data["Reason"]) == (
        "io.imdsbridge.approval.accepted.v1",
        "Accepted",
        "approved",
    )
    assert (receipt["subject"], receipt["correlationid"], receipt["causationid"]) == (event, event, "c")
    assert data["Resources"] == ["web-0", "web-1"]
    assert data["Command"]["RequestedBy"] == "jo"
    assert [one.event_id for one in imds.approvals] == [event]
    assert imds.events[0]["EventStatus"] == "Started"
    assert bus.entity(QUEUE).counts.completed == 1


def test_the_oldest_api_version_gets_the_document_incarnation_as_it_came(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, api_version="2017-03-01") as rig:
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
    assert posts(imds) == [{"StartRequests": [{"EventId": event}], "DocumentIncarnation": "2"}]


def test_a_malformed_message_is_dead_lettered_with_reason_and_description(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(message(b"nonsense", message_id="m"))
        data = rig.receipt_of("m")
        wait_settled(bus)
    (dead,) = bus.entity(QUEUE).dead_letters
    assert dead.dead_letter_reason == data["Reason"] == "malformed"
    assert dead.dead_letter_description == data["Detail"]


def test_a_body_in_several_pieces_is_put_together(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    text = json.dumps({"EventId": event}).encode()
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(AmqpAnnotatedMessage(data_body=[text[:9], text[9:]], properties={"message_id": "m"}))
        assert rig.receipt_of("m")["Reason"] == "approved"


def test_messages_without_an_id_are_different_commands(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus) as rig:
        for _ in range(2):
            sender.send(message(json.dumps({"EventId": event})))
        receipts = rig.wait_for(lambda receipts: receipts if len(receipts) == 2 else None)
    assert len({one["id"] for one in receipts}) == 2


def test_a_signature_arrives_in_the_application_properties(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    given = command(reboot(imds), id="c")
    headers = sign([SECRET], "c", datetime.now(UTC), b"".join(given.body))
    signed = message(b"".join(given.body), message_id="c", properties=headers)
    with Rig(tmp_path, imds, bus, signing_secrets=Secret(SECRET)) as rig:
        sender.send(signed)
        assert rig.receipt_of("c")["Reason"] == "approved"


# Failures of IMDS


def test_an_approval_whose_answer_is_lost_is_accepted(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    """IMDS takes the approval and starts the event, and its answer never comes."""
    event = reboot(imds)
    imds.fault("lost_answer", method="POST", count=2)  # the client asks again once
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c"))
        data = rig.receipt_of("c")
    assert (data["Outcome"], data["Reason"]) == ("Accepted", "approved")
    assert "not recorded" in data["Detail"]


@pytest.mark.parametrize("fault", ["drop", "timeout"])
def test_a_command_waits_until_imds_answers_again(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender, fault: str
) -> None:
    with ImdsLab(approvals="hold") as imds:
        event = reboot(imds)
        hangs: dict[str, Any] = {"seconds": 0.5} if fault == "timeout" else {}
        imds.fault(fault, path=EVENTS_PATH, count=2, **hangs)
        imds.fault(fault, method="POST", count=1)
        with Rig(tmp_path, imds, bus) as rig:
            sender.send(command(event, id="c"))
            if fault == "timeout":
                imds.wait_for(imds.requests, LIMIT_SECONDS)
                imds.clear_faults()
            assert rig.receipt_of("c")["Reason"] == "approved"
            wait_settled(bus)


# Many messages, locks and the stop


@pytest.mark.timeout(600)  # 2,000 commands, on a slow machine
@pytest.mark.parametrize("queue", [QUEUE, FLEET])
def test_a_flood_for_unknown_events_delays_others_by_less_than_their_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, queue: str
) -> None:
    event = reboot(imds)
    session = "web-0" if queue == FLEET else None
    with Sender(bus, queue) as sender:
        sender.send(*[command(f"unknown-{n}", id=f"w{n}", session=session) for n in range(2000)])
        sender.send(command(event, id="c", session=session))
    options: dict[str, Any] = {"queue": queue, "session": "{vm}" if session else ""}
    with Rig(tmp_path, imds, bus, grace_seconds=600, **options) as rig:
        rig.wait_for(lambda found: "approved" in reasons(found), timeout_seconds=3 * LIMIT_SECONDS)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_until(lambda: bus.entity(queue).counts.dead_letters >= 2000 - MAX_WAITING - 100)
        counted = Counter(reasons(rig.receipts()))
        assert counted == {"unknown_event": REJECTED_RECEIPTS_PER_MINUTE, "approved": 1}
    waiting = bus.entity(queue).messages
    assert len(waiting) <= MAX_WAITING
    assert {(one.locked, one.delivery_count) for one in waiting} == {(False, 0)}


@pytest.mark.timeout(600)
def test_a_thousand_commands_half_of_them_nonsense_are_all_settled_and_answered(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    events = [reboot(imds, notice_seconds=86_400) for _ in range(20)]
    sender.send(
        *[
            command(events[number // 2 % 20], id=f"c{number}")
            if number % 2
            else message(os.urandom(50), message_id=f"m{number}")
            for number in range(1000)
        ]
    )
    with Rig(tmp_path, imds, bus) as rig:
        wait_settled(bus)
        counted = Counter(reasons(rig.receipts()))
        assert rig.listener.status()["waiting_commands"] == 0
    counts = bus.entity(QUEUE).counts
    assert (counts.completed, counts.dead_letters) == (500, 500)
    assert counted["approved"] + counted["already_approved"] == 500
    assert sorted({one.event_id for one in imds.approvals}) == sorted(events)
    assert all(one.status != 429 for one in imds.requests())


def test_the_lock_of_a_session_is_renewed_while_commands_wait(tmp_path: Path, imds: ImdsLab) -> None:
    lock_seconds = 5
    with (
        ServiceBusLab(bus_config(LockDuration=f"PT{lock_seconds}S")) as bus,
        Sender(bus, FLEET) as sender,
        Rig(tmp_path, imds, bus, queue=FLEET, session="{vm}", grace_seconds=600) as rig,
    ):
        sender.send(command("unknown", id="c", session="web-0"))
        wait_until(lambda: bus.entity(FLEET).counts.locked == 1)
        first = wait_until(lambda: rig.commands._renew_session_at)
        assert first is not None
        wait_until(lambda: (rig.commands._renew_session_at or 0.0) > first + lock_seconds)
        assert [(one.locked, one.delivery_count) for one in bus.entity(FLEET).messages] == [(True, 0)]
        reboot(imds, event_id="unknown")
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, FLEET)


def test_at_the_stop_a_waiting_command_is_abandoned(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus, grace_seconds=600):
        sender.send(command("unknown", id="c"))
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 1)
    (waiting,) = bus.entity(QUEUE).messages
    assert not waiting.locked


# Where commands come from


def test_commands_come_from_the_session_of_this_vm_alone(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    events = [reboot(imds), reboot(imds, "web-1")]
    with Sender(bus, FLEET) as sender:
        sender.send(command(events[1], id="other", session="lab.web-1"))
        sender.send(command(events[0], id="own", session="lab.web-0"))
        options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
        with Rig(tmp_path / "0", imds, bus, **options) as rig:
            assert rig.receipt_of("own")["Reason"] == "approved"
            wait_until(lambda: bus.entity(FLEET).counts.active == 1)
            with Rig(tmp_path / "1", imds, bus, vm="web-1", **options) as other:
                assert other.receipt_of("other")["Reason"] == "approved"
                wait_settled(bus, FLEET)


def test_commands_come_from_a_subscription(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    event = reboot(imds)
    with (
        Rig(tmp_path, imds, bus, topic=TOPIC, subscription=SUBSCRIPTION) as rig,
        Sender(bus, TOPIC) as sender,
    ):
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, f"{TOPIC}/Subscriptions/{SUBSCRIPTION}")


# Two listeners


@pytest.mark.parametrize("notices", [(300, 300), (300, 600)])
def test_two_deletions_are_approved_each_by_its_own_vm_and_the_first_waits_for_the_other(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, notices: tuple[int, int]
) -> None:
    deletions = [
        reboot(imds, f"web-{number}", event_type="Terminate", notice_seconds=notices[number])
        for number in range(2)
    ]
    options: dict[str, Any] = {"queue": FLEET, "session": "{vm}", "policy": {"scope": "group", "allow": [{}]}}
    with ExitStack() as stack:
        sender = stack.enter_context(Sender(bus, FLEET))
        rigs = [
            stack.enter_context(Rig(tmp_path / str(number), imds, bus, vm=f"web-{number}", **options))
            for number in range(2)
        ]
        sender.send(command(*deletions, id="first", session="web-0"))
        receipts = rigs[0].receipts_of("first", count=2)
        assert {one["subject"]: one["data"]["Reason"] for one in receipts} == {
            deletions[0]: "approved",
            deletions[1]: "other_vm",
        }
        assert {one["EventStatus"] for one in imds.events} == {"Scheduled"}
        sender.send(command(deletions[1], id="second", session="web-1"))
        assert rigs[1].receipt_of("second")["Reason"] == "approved"
        assert {one["EventStatus"] for one in imds.events} == {"Started"}
    assert [(one.vm, one.event_id) for one in imds.approvals] == [
        ("web-0", deletions[0]),
        ("web-1", deletions[1]),
    ]


def test_of_three_listeners_on_a_queue_without_sessions_each_answers_the_commands_for_its_vm(
    tmp_path: Path,
) -> None:
    names = [f"web-{number}" for number in range(3)]
    with ExitStack() as stack:
        imds = stack.enter_context(ImdsLab(vms=names))
        bus = stack.enter_context(ServiceBusLab(bus_config(MaxDeliveryCount=2)))
        sender = stack.enter_context(Sender(bus))
        rigs = [stack.enter_context(Rig(tmp_path / name, imds, bus, vm=name)) for name in names]
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


def test_a_command_for_a_vm_without_a_listener_delays_no_other_and_counts_no_delivery(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command("E-1", id="other", Vm="web-1"))
        for number in range(3):
            sender.send(command(reboot(imds), id=f"c{number}"))
            assert rig.receipt_of(f"c{number}")["Reason"] == "approved"
        wait_until(lambda: bus.entity(QUEUE).counts.active == 1)
    (waiting,) = bus.entity(QUEUE).messages
    assert (waiting.locked, waiting.delivery_count) == (False, 0)
