"""The approval listener: the real Service Bus client on the lab's bus, and the lab's IMDS, over real sockets."""

from __future__ import annotations

import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.approvals import inbox as inbox_module
from bridge.azure import bus_receiver
from bridge.config.base import Secret
from bridge.process import identity
from tests.integration.flows.conftest import MakeBus
from tests.support.bus import (
    FLEET,
    QUEUE,
    SUBSCRIPTION,
    TOPIC,
    BusRig,
    Sender,
    bus_config,
    command,
    posts,
    reasons,
    wait_settled,
)
from tests.support.clients import client
from tests.support.imds_lab import ImdsLab
from tests.support.only import only
from tests.support.process import RawServer, silent, wait_until
from tests.support.servicebus import ServiceBusLab

# The SDK leaves the sockets of connections that were cut to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

LOCK_SECONDS = 60.0  # of the bus
WAITING = 100
RETRY_LIMIT_SECONDS = bus_receiver.RETRY_LIMIT_SECONDS  # which the tests shorten


def reboot(imds: ImdsLab, *resources: str, **changes: Any) -> str:
    return imds.schedule(**{"event_type": "Reboot", "resources": resources or ["web-0"], **changes})


def send(bus: ServiceBusLab, *messages: Any, to: str = QUEUE) -> None:
    with Sender(bus, to) as sender:
        sender.send(*messages)


def renewed(connection: bus_receiver.Connection, since: float) -> bool:
    return connection.renew_at > since


def ids(count: int, prefix: str = "c") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


# Many messages and locks


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fewer and smaller commands wait and be held, in the proportions of the real limits."""
    monkeypatch.setattr(inbox_module, "MAX_WAITING", WAITING)
    monkeypatch.setattr(inbox_module, "MAX_WAITING_BYTES", inbox_module.MAX_WAITING_BYTES // 5)
    most_bytes = bus_receiver.MAX_UNSETTLED_BYTES // 5
    monkeypatch.setattr(bus_receiver, "MAX_UNSETTLED_BYTES", most_bytes)
    monkeypatch.setattr(bus_receiver, "MESSAGE_BYTES", most_bytes // (2 * WAITING))


@pytest.mark.parametrize("queue", [QUEUE, FLEET])
@pytest.mark.usefixtures("small_limits")
def test_a_flood_for_unknown_events_delays_others_by_less_than_their_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, queue: str
) -> None:
    event = reboot(imds)
    session = "web-0" if queue == FLEET else None
    unknown = [command(name, id=name, session=session) for name in ids(2 * WAITING, "unknown")]
    send(bus, *unknown, command(event, id="c", session=session), to=queue)
    options: dict[str, Any] = {"queue": queue, "session": "{vm}" if session else ""}
    with BusRig(tmp_path, imds, bus, grace_seconds=600, **options) as rig:
        rig.wait_for(lambda found: "approved" in reasons(found))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_until(lambda: len(bus.entity(queue).messages) <= WAITING)
        assert bus.entity(queue).counts.dead_letters > 0
        assert set(reasons(rig.receipts())) == {"unknown_event", "approved"}
    wait_until(lambda: bus.entity(queue).counts.locked == 0)
    # What was released counts as not delivered; what was on its way at the stop counts once.
    assert {one.delivery_count for one in bus.entity(queue).messages} <= {0, 1}


def test_the_lock_of_a_session_is_renewed_while_commands_wait(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_receiver, "RENEW_AT_LATEST_SECONDS", 0.2)
    with BusRig(tmp_path, imds, bus, queue=FLEET, session="{vm}", grace_seconds=600) as rig:
        send(bus, command("unknown", id="c", session="web-0"), to=FLEET)
        wait_until(lambda: bus.entity(FLEET).counts.locked == 1)
        connection = wait_until(lambda: rig.commands._connection)
        assert connection is not None
        for _ in range(3):
            wait_until(partial(renewed, connection, connection.renew_at))
            bus.advance(LOCK_SECONDS / 2)
        assert [(one.locked, one.delivery_count) for one in bus.entity(FLEET).messages] == [(True, 0)]
        reboot(imds, event_id="unknown")
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, FLEET)


# Where commands come from


def test_commands_come_from_the_session_of_this_vm_alone(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    for vm in ("web-1", "web-0"):
        send(bus, command(reboot(imds, vm), id=vm, session=f"lab.{vm}"), to=FLEET)
    options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
    with BusRig(tmp_path / "0", imds, bus, **options) as rig:
        assert rig.receipt_of("web-0")["Reason"] == "approved"
        wait_until(lambda: bus.entity(FLEET).counts.active == 1)
        with BusRig(tmp_path / "1", imds, bus, vm="web-1", **options) as other:
            assert other.receipt_of("web-1")["Reason"] == "approved"
            wait_settled(bus, FLEET)


def has_tag(rig: BusRig, value: str) -> bool:
    """Return whether the listener knows the VM with this tag."""
    vm = rig.listener.parts.identity.vm
    return vm is not None and vm.tags == {"env": value}


def test_a_listener_ends_once_the_vm_has_another_session_and_the_next_start_receives_from_it(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "READ_EVERY_SECONDS", 0.1)
    part = dict.fromkeys(("vmId", "resourceGroupName", "subscriptionId", "resourceId", "tagsList"))
    imds.describe("web-0", {**part, "name": "web-24"})
    options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
    with Sender(bus, FLEET) as sender, BusRig(tmp_path, imds, bus, **options) as rig:
        assert rig.listener.status().vm == "web-24"
        assert rig.commands._connection is None
        for group in ("lab", "other"):
            imds.describe("web-0", {"resourceGroupName": group})
            wait_until(lambda: not rig.is_deciding())
            rig.stop()
            rig.start()
            event = reboot(imds)
            sender.send(command(event, id=event, session=f"{group}.web-0"))
            assert rig.receipt_of(event)["Reason"] == "approved"
            imds.describe(
                "web-0", {"resourceGroupName": group, "tagsList": [{"name": "env", "value": event}]}
            )
            wait_until(partial(has_tag, rig, event))
        ends = [one for one in rig.events() if one["data"].get("Reason") == "Stopping"]
        starts = [one for one in rig.events() if one["data"].get("Reason") == "Started"]
    assert [one["data"]["PreviousEpoch"] for one in starts[1:]] == [one["reporterepoch"] for one in ends]
    assert [one["reporter"] for one in starts] == ["web-24/listen", "web-0/listen", "web-0/listen"]


def test_commands_come_from_a_subscription_with_a_body_in_several_pieces(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    event = reboot(imds)
    text = json.dumps({"EventId": event}).encode()
    with BusRig(tmp_path, imds, bus, topic=TOPIC, subscription=SUBSCRIPTION) as rig:
        send(
            bus,
            AmqpAnnotatedMessage(data_body=[text[:9], text[9:]], properties={"message_id": "m"}),
            to=TOPIC,
        )
        assert rig.receipt_of("m")["Reason"] == "approved"
        wait_settled(bus, f"{TOPIC}/Subscriptions/{SUBSCRIPTION}")
    assert [one.event_id for one in imds.approvals] == [event]
    assert imds.events[0]["EventStatus"] == "Started"


def test_of_three_listeners_on_a_queue_without_sessions_each_answers_the_commands_for_its_vm(
    tmp_path: Path, make_bus: MakeBus
) -> None:
    bus = make_bus(bus_config(MaxDeliveryCount=2))
    names = ids(3, "web-")
    sent: dict[str, list[str]] = {name: [] for name in names}
    with ExitStack() as stack:
        imds = stack.enter_context(ImdsLab(vms=names))
        rigs = {name: stack.enter_context(BusRig(tmp_path / name, imds, bus, vm=name)) for name in names}
        sender = stack.enter_context(Sender(bus))
        for number in range(30):
            name = names[number * 7 % 3]
            event = reboot(imds, name, notice_seconds=86_400)
            given: dict[str, Any] = {"Vm": name} if number % 2 else {}  # else the Resources show whose it is
            sender.send(command(event, id=f"c{number}", **given))
            sent[name].append(f"c{number}")
        for name, rig in rigs.items():
            assert set(reasons(rig.receipts_of(*sent[name]))) == {"approved"}
        wait_settled(bus)
        answered = {name: [one["causationid"] for one in rig.receipts()] for name, rig in rigs.items()}
        assert {name: sorted(one) for name, one in answered.items()} == {
            name: sorted(one) for name, one in sent.items()
        }
        counts = bus.entity(QUEUE).counts
        assert (counts.completed, counts.dead_letters) == (30, 0)
        assert all(one.status != 429 for one in imds.requests())


# What programs send with Microsoft's clients: see tests/data/servicebus for how each variant is sent.
VARIANTS = {
    "plain": "approved",  # an object as JSON in a data section
    "text": "approved",  # JSON as an AMQP string
    "twice": "approved",  # JSON in a JSON string
    "structured": "approved",
    "binary": "approved",
    "binary-colon": "approved",
    "binary-other": "malformed",  # a CloudEvent of another type
}


@pytest.mark.timeout(900)  # the first run downloads the clients
@pytest.mark.parametrize("language", ["node", "go", "java"])
def test_a_command_is_understood_in_every_form_of_a_client(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, language: str
) -> None:
    call = client(language)
    events = {name: reboot(imds, hold=True) for name in VARIANTS}
    with BusRig(tmp_path, imds, bus, queue=FLEET, session="{vm}") as rig:
        order = {"queue": FLEET, "session": "web-0", "type": "io.imdsbridge.command.approve.v1"}
        assert call("send", bus.connection_string, {**order, "events": events}) == "sent"
        receipts = rig.receipts_of(*VARIANTS)
        wait_settled(bus, FLEET)
    assert dict(zip(VARIANTS, reasons(receipts), strict=True)) == VARIANTS
    accepted = {one["causationid"]: one["data"].get("EventId") for one in receipts}
    assert {**accepted, "binary-other": None} == {**events, "binary-other": None}
    dead = only(bus.entity(FLEET).dead_letters)
    assert (dead.message_id, dead.dead_letter_reason) == ("binary-other", "malformed")


# While it rests it holds no connection, and it wakes for an event


@pytest.fixture
def rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "AWAIT_SECONDS", 0.1)


def wait_for_rest(rig: BusRig, bus: ServiceBusLab) -> None:
    wait_until(lambda: rig.commands.status().rests and bus.connections == 0)


@pytest.mark.parametrize(
    "settings",
    [
        {"topic": TOPIC, "subscription": SUBSCRIPTION, "policy": {"allow": [{}], "scope": "group"}},
        {"queue": FLEET, "session": "{resource_group}.{vm}"},
    ],
    ids=["a group's topic", "a queue with sessions"],
)
@pytest.mark.usefixtures("rest_soon")
def test_a_command_that_waits_while_it_rests_is_decided_when_its_event_appears(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, settings: dict[str, Any]
) -> None:
    vm, session = ("web-0", "lab.web-0") if "session" in settings else ("web-1", None)
    with BusRig(tmp_path, imds, bus, **settings) as rig:
        wait_for_rest(rig, bus)
        send(bus, command("E-1", id="waits", session=session), to=settings.get("queue", TOPIC))
        wait_for_rest(rig, bus)
        assert rig.receipts() == []
        reboot(imds, vm, event_id="E-1")
        assert rig.receipt_of("waits")["Reason"] == "approved"


# The bus fails in every way: no command is lost, the listener recovers without a restart, and it stops


def assert_answered_once(receipts: list[dict[str, Any]], count: int) -> None:
    """Check that there is one answer to each command, which may come twice as it is."""
    assert len({one["id"] for one in receipts}) == len({str(one) for one in receipts}) == count
    assert set(reasons(receipts)) == {"approved"}


@pytest.mark.parametrize("fault", ["drop", "detach"])
def test_a_connection_that_is_cut_while_commands_wait_loses_none(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str
) -> None:
    with BusRig(tmp_path, imds, bus, grace_seconds=600) as rig:
        send(bus, *[command(name, id=name) for name in ids(5)])
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 5)
        bus.fault(fault)
        bus.advance(LOCK_SECONDS)
        for name in ids(5):
            reboot(imds, event_id=name)
        rig.receipts_of(*ids(5))
        wait_settled(bus)
        assert_answered_once(rig.receipts(), 5)
    posted = [one["EventId"] for post in posts(imds) for one in post["StartRequests"]]
    assert sorted(posted) == ids(5)


@pytest.mark.parametrize("fault", ["drop_before_settle", "drop_after_settle"])
def test_a_settlement_that_is_cut_short_leads_to_no_second_answer(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str
) -> None:
    bus.fault(fault, count=2)
    with BusRig(tmp_path, imds, bus) as rig:
        send(bus, *[command(reboot(imds, notice_seconds=86_400), id=name) for name in ids(4)])
        wait_until(lambda: bus.applied(fault) >= 1)
        bus.advance(LOCK_SECONDS)
        wait_until(lambda: bus.applied(fault) == 2)
        bus.advance(LOCK_SECONDS)
        rig.receipts_of(*ids(4))
        wait_settled(bus)
        assert_answered_once(rig.receipts(), 4)


def test_a_wrong_key_is_logged_once_and_a_new_one_is_used_without_a_restart(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text(bus.connection_string_with("d3Jvbmc="))
    rig = BusRig(tmp_path / "state", imds, bus)
    rig.settings = rig.settings.model_copy(update={"connection_string": Secret(file=key)})
    with rig:
        send(bus, command(reboot(imds), id="c"))
        wait_until(lambda: rig.commands._failures >= 2)
        key.write_text(bus.connection_string)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus)
    logged = only(line for line in caplog.messages if "no commands can be received" in line)
    assert "key or identity is refused" in logged
    assert "d3Jvbmc=" not in caplog.text


def test_a_missing_entity_is_received_from_once_it_is_there(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, caplog: pytest.LogCaptureFixture
) -> None:
    with BusRig(tmp_path, imds, bus, queue="later") as rig:
        wait_until(lambda: rig.commands.status().last_error)
        assert RETRY_LIMIT_SECONDS <= 5
        bus.create_queue("later")
        send(bus, command(reboot(imds), id="c"), to="later")
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, "later")
    assert sum("there is no such queue" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("fault", ["a silent peer", "silent_cbs", "stall"])
def test_a_bus_that_stops_answering_does_not_prevent_the_stop(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_receiver, "STOP_SECONDS", 0.2)
    with RawServer(silent) as peer:
        text = bus.connection_string
        if fault == "a silent peer":
            text = text.replace(str(bus.port), str(peer.port))
        if fault == "silent_cbs":
            bus.fault(fault)
        rig = BusRig(tmp_path, imds, bus, grace_seconds=600, connection_string=text).start()
        wait_until(lambda: bus.connections or peer.connections)
        if fault == "stall":
            send(bus, command("unknown", id="c"))
            wait_until(lambda: bus.entity(QUEUE).counts.locked == 1)
            bus.fault(fault)
        rig.stopping.set()
        wait_until(lambda: not any(thread.is_alive() for thread in rig._threads))
        bus.clear_faults()
        bus.stop()
    rig.stop()
