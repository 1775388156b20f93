"""A listener that rests on a real bus: it holds no connection, wakes for an event, and tells a look that fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge.service import listener
from tests.support.bus import FLEET, QUEUE, SUBSCRIPTION, TOPIC, BusRig, Sender, command, reasons
from tests.support.imds_lab import ImdsLab
from tests.support.process import wait_until
from tests.support.servicebus import ServiceBusLab

# The SDK leaves the sockets of connections that were cut to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collect() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _rest_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "AWAIT_SECONDS", 1.0)


def wait_for_rest(rig: BusRig, bus: ServiceBusLab) -> None:
    wait_until(lambda: rig.commands.status().rests and bus.connections == 0)


@pytest.mark.parametrize(
    ("settings", "vm"),
    [
        ({"queue": QUEUE}, "web-0"),
        ({"queue": QUEUE, "policy": {"allow": [{}], "scope": "group"}}, "web-1"),
        ({"queue": FLEET, "session": "{resource_group}.{vm}"}, "web-0"),
        ({"topic": TOPIC, "subscription": SUBSCRIPTION}, "web-0"),
    ],
    ids=["queue", "group", "sessions", "topic"],
)
def test_a_command_that_waits_while_it_rests_is_decided_when_its_event_appears(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, settings: dict[str, Any], vm: str
) -> None:
    with BusRig(tmp_path, imds, bus, **settings) as rig:
        wait_for_rest(rig, bus)
        session = "lab.web-0" if "session" in settings else None
        with Sender(bus, settings.get("queue", TOPIC)) as sender:
            sender.send(command("E-1", id="waits", session=session))
        wait_for_rest(rig, bus)
        assert rig.receipts() == []
        imds.schedule(event_type="Reboot", resources=[vm], event_id="E-1")
        assert rig.receipt_of("waits")["Reason"] == "approved"


def test_a_look_that_fails_is_told_until_one_succeeds(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BusRig(tmp_path, imds, bus, grace_seconds=0) as rig:
        wait_for_rest(rig, bus)
        with Sender(bus) as sender:
            sender.send(command("E-1", id="c"))
        bus.fault("unauthorized")
        assert rig.commands.status().last_error is None
        monkeypatch.setattr(rig.listener._bridge_events, "_heartbeat_at", 0.0)
        wait_until(lambda: "role" in (rig.commands.status().last_error or ""))
        bus.stop_listening()
        bus.clear_faults()
        wait_until(lambda: "role" not in (rig.commands.status().last_error or "role"))
        bus.listen_again()
        assert rig.receipt_of("c")["Reason"] == "unknown_event"
        wait_for_rest(rig, bus)
        assert rig.commands.status().last_error is None
        assert reasons(rig.receipts()) == ["unknown_event"]
