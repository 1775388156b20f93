"""The simulated fleet of `imds-bridge demo --console`: what its forwarders publish."""

from __future__ import annotations

from collections import Counter

import pytest

from bridge.errors import UsageError
from bridge.lab.demo.console import DAY, HISTORY_SECONDS, HOUR, OPENING, SILENT, SimulatedFleet, show_console
from tests.support.diff import envelope_of, faults_of

START = 1_800_000_000.0


def test_sixty_vms_publish_valid_events_of_every_kind_and_one_is_silent() -> None:
    fleet = SimulatedFleet(START)
    past = [envelope_of(body) for body in fleet.advance(START)]
    play = [envelope_of(body) for body in fleet.advance(START + 4 * HOUR)]
    assert len({event["data"]["Vm"]["VmId"] for event in past}) == 60
    assert len({event["source"] for event in past if "EventId" in event["data"]}) >= 3
    assert [fault for event in (past + play)[::50] for fault in faults_of(event)] == []
    kinds = Counter(event["type"].split(".", 2)[2] for event in past + play)
    assert {"scheduledevent.canceled.v1", "approval.accepted.v1", "approval.rejected.v1"} <= set(kinds)
    assert kinds["scheduledevent.completed.v1"] > kinds["imds.unreachable.v1"] == 1
    announced = [event["data"]["Resources"] for event in past if event["type"].endswith("scheduled.v1")]
    assert [names for _, names, _, _ in OPENING if [*names] not in announced] == []
    beats = Counter(event["subject"] for event in play if event["type"].endswith("heartbeat.v1"))
    assert SILENT[0] not in beats
    assert beats["web-0"] == 4


def test_the_same_seed_gives_the_same_play() -> None:
    until = START - HISTORY_SECONDS + 2 * DAY
    plays = [SimulatedFleet(START, seed=seed).advance(until) for seed in (7, 7, 8)]
    assert plays[0] == plays[1] != plays[2]


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "nonsense", "127.0.0.1"])
def test_the_console_of_the_demo_listens_on_loopback_addresses_only(listen: str) -> None:
    with pytest.raises(UsageError, match="expected a loopback address"):
        show_console(listen=listen, minutes=1)
