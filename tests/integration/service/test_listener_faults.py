"""The bus fails in every way; no command is lost, and the listener recovers without a restart and stops."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge.azure import bus_receiver
from bridge.config.base import Secret
from tests.support.bus import QUEUE, BusRig, Sender, bus_config, command, posts, reasons, wait_settled
from tests.support.imds_lab import ImdsLab
from tests.support.process import RawServer, silent, wait_until
from tests.support.servicebus import ServiceBusLab

# The SDK leaves the sockets of connections that were cut to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LOCK_SECONDS = 5


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    """Collect what the SDK has left open here, where a warning does not fail the test."""
    yield
    gc.collect()


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config(LockDuration=f"PT{LOCK_SECONDS}S")) as lab:
        yield lab


def schedule(imds: ImdsLab) -> str:
    return imds.schedule(event_type="Reboot", resources=["web-0"], notice_seconds=86_400)


@pytest.mark.parametrize("fault", ["drop", "detach"])
def test_a_connection_that_is_cut_while_commands_wait_loses_none(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str
) -> None:
    with BusRig(tmp_path, imds, bus, grace_seconds=600) as rig:
        with Sender(bus) as sender:
            sender.send(*[command(f"E-{number}", id=f"c{number}") for number in range(5)])
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 5)
        bus.fault(fault)
        bus.advance(LOCK_SECONDS)
        for number in range(5):
            imds.schedule(event_type="Reboot", resources=["web-0"], event_id=f"E-{number}")
        rig.receipts_of(*[f"c{number}" for number in range(5)])
        wait_settled(bus)
        receipts = rig.receipts()
    assert len({one["id"] for one in receipts}) == len({str(one) for one in receipts}) == 5
    posted = [one["EventId"] for post in posts(imds) for one in post["StartRequests"]]
    assert sorted(posted) == [f"E-{number}" for number in range(5)]


@pytest.mark.parametrize("fault", ["drop_before_settle", "drop_after_settle"])
def test_a_settlement_that_is_cut_short_leads_to_no_second_answer(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str
) -> None:
    bus.fault(fault, count=2)
    with BusRig(tmp_path, imds, bus) as rig:
        with Sender(bus) as sender:
            sender.send(*[command(schedule(imds), id=f"c{number}") for number in range(4)])
        wait_until(lambda: bus.applied(fault) >= 1)
        bus.advance(LOCK_SECONDS)
        wait_until(lambda: bus.applied(fault) == 2)
        bus.advance(LOCK_SECONDS)
        rig.receipts_of(*[f"c{number}" for number in range(4)])
        wait_settled(bus)
        receipts = rig.receipts()
    assert len({one["id"] for one in receipts}) == len({str(one) for one in receipts}) == 4
    assert set(reasons(receipts)) == {"approved"}


def test_a_wrong_key_is_logged_once_and_a_new_one_is_used_without_a_restart(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text(bus.connection_string_with("d3Jvbmc="))
    rig = BusRig(tmp_path / "state", imds, bus)
    rig.settings = rig.settings.model_copy(update={"connection_string": Secret(file=key)})
    with rig:
        with Sender(bus) as sender:
            sender.send(command(schedule(imds), id="c"))
        wait_until(lambda: rig.commands._failures >= 2)
        key.write_text(bus.connection_string)
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus)
    logged = [line for line in caplog.messages if "no commands can be received" in line]
    assert len(logged) == 1
    assert "key or identity is refused" in logged[0]
    assert "d3Jvbmc=" not in caplog.text


def test_a_missing_entity_is_received_from_once_it_is_there(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, caplog: pytest.LogCaptureFixture
) -> None:
    with BusRig(tmp_path, imds, bus, queue="later") as rig:
        wait_until(lambda: rig.commands.status().last_error)
        assert bus_receiver.RETRY_LIMIT_SECONDS <= 5
        bus.create_queue("later")
        with Sender(bus, "later") as sender:
            sender.send(command(schedule(imds), id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, "later")
    assert sum("there is no such queue" in line for line in caplog.messages) == 1


def test_a_silent_peer_does_not_prevent_the_stop(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    with RawServer(silent) as peer:
        port = peer.url.rpartition(":")[2]
        text = bus.connection_string.replace(str(bus.port), port)
        rig = BusRig(tmp_path, imds, bus, connection_string=text).start()
        wait_until(lambda: peer.connections)
        assert_stops(rig)
    rig.stop()


@pytest.mark.parametrize("fault", ["silent_cbs", "stall"])
def test_a_broker_that_stops_answering_does_not_prevent_the_stop(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, fault: str
) -> None:
    if fault == "silent_cbs":
        bus.fault(fault)
    rig = BusRig(tmp_path, imds, bus, grace_seconds=600).start()
    wait_until(lambda: bus.connections)
    if fault == "stall":
        with Sender(bus) as sender:
            sender.send(command("unknown", id="c"))
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 1)
        bus.fault(fault)
    assert_stops(rig)
    bus.clear_faults()
    bus.stop()
    rig.stop()


def assert_stops(rig: BusRig) -> None:
    rig.stopping.set()
    wait_until(lambda: not any(thread.is_alive() for thread in rig._threads))
