"""The simulated fleet of `imds-bridge demo --console`: what its forwarders publish."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from bridge.errors import UsageError
from bridge.lab.demo.console import DAY, HOUR, OPENING, SILENT, SimulatedFleet, show_console
from tests.support.diff import envelope_of, faults_of

START = 1_800_000_000.0

Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def events() -> Events:
    """Return what is published until a day after the beginning."""
    return [envelope_of(body) for body in SimulatedFleet(START).advance(START + DAY)]


def test_sixty_vms_in_three_groups_publish_valid_events(events: Events) -> None:
    assert len({event["data"]["Vm"]["VmId"] for event in events}) == 60
    assert len({event["source"] for event in events if "EventId" in event["data"]}) >= 3
    assert [fault for event in events[::50] for fault in faults_of(event)] == []


def test_the_same_seed_gives_the_same_play() -> None:
    first, second = (SimulatedFleet(START, seed=7).advance(START) for _ in range(2))
    assert first == second
    assert first != SimulatedFleet(START, seed=8).advance(START)


def test_what_is_announced_ends_and_only_vms_that_lost_imds_doubt_an_end(events: Events) -> None:
    kinds = Counter(event["type"] for event in events)
    doubts = [event["data"]["EndReason"] for event in events if event["type"].endswith("ended.v1")]
    assert set(doubts) <= {"Gap"}
    assert kinds["io.imdsbridge.scheduledevent.canceled.v1"] > 0
    assert kinds["io.imdsbridge.scheduledevent.completed.v1"] > kinds["io.imdsbridge.imds.unreachable.v1"] > 0


def test_the_opening_is_announced_before_the_beginning() -> None:
    published = [envelope_of(body) for body in SimulatedFleet(START).advance(START)]
    announced = {
        tuple(event["data"]["Resources"]) for event in published if event["type"].endswith("scheduled.v1")
    }
    assert announced >= {names for _, names, _, _ in OPENING}


def test_a_silent_vm_publishes_nothing_while_others_send_a_heartbeat_every_hour(events: Events) -> None:
    beats = Counter(
        event["data"]["Vm"]["Name"]
        for event in events
        if event["type"].endswith("heartbeat.v1") and event["time"] > "2027-01-15T08:00"
    )
    assert SILENT[0] not in beats
    assert beats["web-0"] in (DAY // HOUR, DAY // HOUR + 1)


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "nonsense", "127.0.0.1"])
def test_the_console_of_the_demo_listens_on_loopback_addresses_only(listen: str) -> None:
    with pytest.raises(UsageError, match="expected a loopback address"):
        show_console(listen=listen, minutes=1)
