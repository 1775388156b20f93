"""The relay: a subscription of the lab's Service Bus to the same sinks, over real sockets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.azure import bus_receiver
from bridge.azure.receiver import ReceivedMessage
from tests.integration.flows.conftest import MakeBus
from tests.support.bus import Sender
from tests.support.cli import Cli
from tests.support.clock import MovedClock
from tests.support.imds_lab import ImdsLab
from tests.support.inbox import Inbox
from tests.support.outbox import failing_disk
from tests.support.process import Forward, wait_until
from tests.support.relay import (
    LOCK_SECONDS,
    TOPIC,
    RelayProcess,
    RelayRig,
    body_of,
    die,
    event_message,
    fleet_bus,
    live,
    names,
    source,
    subscription,
)
from tests.support.servicebus import ServiceBusLab

# The SDK leaves the sockets of connections that were cut to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def bus(make_bus: MakeBus) -> ServiceBusLab:
    return make_bus(fleet_bus())


@pytest.fixture
def sender(bus: ServiceBusLab) -> Iterator[Sender]:
    with Sender(bus, TOPIC) as one:
        yield one


# Events


def test_events_go_out_byte_for_byte_and_alone_and_are_completed_without_a_question_to_imds(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender, inbox: Inbox
) -> None:
    foreign: dict[str, Any] = {"type": "com.contoso.backup.done", "subject": None, "extra": 7}
    with ImdsLab() as imds:
        with RelayProcess(tmp_path, bus, inbox, imds={"endpoint": imds.url("web-0")}) as relay:
            sender.send(*map(event_message, names(150)), event_message("of others", **foreign))
            relay.wait_until_relayed(bus)
            assert relay.stop() == 0, relay
        assert imds.requests() == []
    expected = [*map(body_of, names(150)), body_of("of others", **foreign)]
    assert sorted(one.body for one in inbox.accepted) == sorted(expected)
    assert (subscription(bus).counts.completed, subscription(bus).counts.dead_letters) == (151, 0)


def test_a_change_that_two_vms_publish_is_sent_once_also_where_the_bus_detects_no_duplicates(
    tmp_path: Path, make_bus: MakeBus, imds: ImdsLab, inbox: Inbox
) -> None:
    bus = make_bus(fleet_bus(RequiresDuplicateDetection=False))
    vms, types = ["web-0", "web-1"], ["io.imdsbridge.scheduledevent.*"]
    place = {"kind": "servicebus", "connection_string": bus.connection_string, "topic": TOPIC, "types": types}
    with ExitStack() as stack:
        for vm in vms:
            given = {"endpoint": imds.url(vm), "poll_seconds": 0.2}
            forward = Forward(tmp_path / vm, {"imds": given, "sinks": {"bus": place}})
            stack.enter_context(forward).wait_for_status(lambda status: status["document"] is not None)
        relay = stack.enter_context(RelayProcess(tmp_path / "relay", bus, inbox))
        imds.schedule(event_type="Reboot", resources=vms, notice_seconds=86_400)
        wait_until(lambda: bus.entity(TOPIC).counts.enqueued == 2, describe=lambda: relay)
        relay.wait_until_relayed(bus)
    assert [event["data"]["EventType"] for event in inbox.events()] == ["Reboot"]


# While the state store is unavailable


def test_more_messages_flow_without_a_disk_than_can_be_unsettled_at_once(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender
) -> None:
    with failing_disk() as disk, RelayRig(tmp_path, bus) as rig:
        disk.fail()
        sender.send(*map(event_message, names(350)))
        rig.sinks[0].wait_for(350)
        rig.wait_until_settled()
        assert rig.outbox.storage_error
        disk.recover()
    assert sorted(rig.sinks[0].ids()) == names(350)


@pytest.fixture
def relay_of_the_dead(
    tmp_path: Path, bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[RelayRig]:
    """Return a relay that renews locks often, without a disk, and whose sink takes nothing."""
    monkeypatch.setattr(bus_receiver, "RENEW_AT_LATEST_SECONDS", 0.2)

    @contextmanager
    def running() -> Iterator[RelayRig]:  # within the test: pytest itself needs a disk for what it says of it
        rig = RelayRig(tmp_path, bus)
        die(*rig.sinks)
        with failing_disk() as disk, rig:
            disk.fail()
            yield rig
            disk.recover()

    return running()


def test_an_uncompleted_message_keeps_its_lock_for_longer_than_a_lock_lasts(
    relay_of_the_dead: AbstractContextManager[RelayRig], bus: ServiceBusLab, sender: Sender
) -> None:
    with relay_of_the_dead as rig:
        sender.send(*map(event_message, names(3)))
        rig.wait_for_status(uncompleted=3)
        for _ in range(3):
            wait_until_renewed(rig)
            bus.advance(LOCK_SECONDS * 0.4)
        assert [(one.locked, one.delivery_count) for one in subscription(bus).messages] == [(True, 0)] * 3
        live(*rig.sinks)
        rig.wait_until_settled()
        assert rig.relay.status().repeated == 0


def test_without_a_disk_only_a_limited_number_of_bytes_is_received(
    relay_of_the_dead: AbstractContextManager[RelayRig],
    bus: ServiceBusLab,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bus_receiver, "RECEIVE_MESSAGES", 1)
    monkeypatch.setattr(bus_receiver, "MESSAGE_BYTES", 1)
    monkeypatch.setattr(bus_receiver, "MAX_UNSETTLED_BYTES", 5 * len(body_of("e000")))
    with relay_of_the_dead as rig:
        sender.send(*map(event_message, names(20)))
        rig.wait_for_status(uncompleted=5)
        wait_until_renewed(rig)
        assert subscription(bus).counts.locked <= 7  # up to two more are kept for the next call
        live(*rig.sinks)
        rig.wait_until_settled()
        assert sorted(rig.sinks[0].ids()) == names(20)


def wait_until_renewed(rig: RelayRig) -> None:
    """Wait until the lock of every message that is not settled was renewed."""
    connection = rig.receiver._connection
    assert connection
    first = max(connection.unsettled.values())
    wait_until(lambda: min(connection.unsettled.values()) > first)


# While the bus fails


def test_a_bus_that_goes_away_is_used_again_once_it_is_back(
    tmp_path: Path, bus: ServiceBusLab, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with RelayRig(tmp_path, bus) as rig:
        for turn in range(2):
            with Sender(bus, TOPIC) as sender:
                sender.send(*map(event_message, names(5, start=5 * turn)))
            rig.sinks[0].wait_for(5 * (turn + 1))
            rig.wait_until_settled()
            bus.stop_listening()
            wait_until(lambda: rig.relay.status().last_error)
            bus.listen_again()
            rig.wait_for_status(last_error=None)
    assert sorted(rig.sinks[0].ids()) == names(10)
    for text in ("no events can be received", "events are received again"):
        assert sum(text in message for message in caplog.messages) == 2


# Locks


@pytest.mark.parametrize(
    ("left_seconds", "after_seconds"), [(10, 5), (100, 20), (2, 1.5), (-10, 1.5), (None, 20)]
)
def test_a_lock_is_renewed_halfway_within_bounds_as_the_clock_may_be_wrong(
    left_seconds: float | None, after_seconds: float
) -> None:
    clock = MovedClock()
    without_session: Any = SimpleNamespace(session=None)
    connection = bus_receiver.Connection(
        client=without_session, receiver=without_session, address="", what="", session="", clock=clock
    )
    message = ReceivedMessage(body=b"", message_id="m", properties={}, enqueued_at=None, sequence_number=1)
    until = None if left_seconds is None else datetime.now(UTC) + timedelta(seconds=left_seconds)
    connection.add(message, until)
    assert connection.unsettled[message] - clock.monotonic() == pytest.approx(after_seconds, abs=1)


# Configuration, check and status


HOOK = {"kind": "webhook", "url": "http://127.0.0.1:9/hook"}
RELAY = {"namespace": "contoso.servicebus.windows.net", "topic": TOPIC, "subscription": "chat"}
CIRCLE = {"kind": "servicebus", "namespace": RELAY["namespace"], "topic": TOPIC}


@pytest.mark.parametrize(
    ("relay", "sink", "why"),
    [
        (None, HOOK, "the configuration has no [relay]"),
        ({**RELAY, "subscription": ""}, HOOK, "a topic needs a subscription"),
        (RELAY, CIRCLE, "the entity that [relay] receives from"),
        (RELAY, {**HOOK, "scope": "self"}, "sinks.a.scope: given self"),
        (RELAY, {**HOOK, "scope": "first"}, "sinks.a.scope: given first"),
        (RELAY, {**HOOK, "where": {"AffectsThisVm": True}}, "sinks.a.where.AffectsThisVm"),
        (RELAY, {**HOOK, "where": {"Vm.Name": "web-0"}}, "sinks.a.where.Vm.Name"),
    ],
    ids=["no relay", "a topic alone", "a circle", "self", "first", "AffectsThisVm", "Vm.Name"],
)
def test_a_configuration_that_cannot_be_relayed_is_refused_at_the_start(
    cli: Cli, relay: dict[str, str] | None, sink: dict[str, Any], why: str
) -> None:
    cli.write(sinks={"a": sink}, **({"relay": relay} if relay else {}))
    ended = cli("relay")
    assert ended.code == 2, ended
    assert why in ended.err
    assert not cli.state().parent.exists()


def test_check_tries_to_receive_and_takes_nothing(
    cli: Cli, bus: ServiceBusLab, sender: Sender, inbox: Inbox
) -> None:
    cli.write(relay=source(bus), sinks={"hook": {"kind": "webhook", "url": inbox.url}})
    assert "events do not wait there" in cli.check().row(check="relay")["message"]
    sender.send(event_message("a"))
    found = cli.check().row(check="relay", result="ok")
    assert "events wait there" in found["message"]
    assert [(one.locked, one.delivery_count) for one in subscription(bus).messages] == [(False, 0)]


@pytest.mark.parametrize(
    ("relay", "sink", "why"),
    [({}, {"scope": "self"}, "sinks.hook.scope"), ({"subscription": "none"}, {}, "there is no such queue")],
)
def test_check_reports_what_the_relay_would_refuse_and_a_missing_subscription(
    cli: Cli, bus: ServiceBusLab, relay: dict[str, str], sink: dict[str, str], why: str
) -> None:
    cli.write(relay={**source(bus), **relay}, sinks={"hook": {**HOOK, **sink}})
    assert why in cli.check().row(check="relay", result="FAIL")["message"]
