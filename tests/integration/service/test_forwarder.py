"""The forwarder with the real client and the simulated IMDS; its decisions are tested in tests/unit/service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bridge.config.models import ImdsSettings
from bridge.imds.client import ImdsClient
from bridge.lab.imds import EVENT_VERSIONS, EVENTS_PATH
from tests.support.clock import MovedClock
from tests.support.diff import FIRST
from tests.support.forward import Station, name_of
from tests.support.imds_lab import ImdsLab

Start = Callable[[ImdsSettings], Station]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    stations: list[Station] = []

    def start_station(settings: ImdsSettings) -> Station:
        clock = MovedClock()
        imds = ImdsClient(settings, clock=clock)
        stations.append(Station(tmp_path / f"state-{len(stations)}", imds, clock))
        return stations[-1]

    yield start_station
    for station in stations:
        station.close()
        station.imds.close()


@pytest.mark.parametrize("version", [EVENT_VERSIONS[0], EVENT_VERSIONS[-1]])
def test_a_whole_life_is_published_in_the_oldest_and_the_newest_api_version(
    imds: ImdsLab, start: Start, version: str
) -> None:
    settings = {"endpoint": imds.url("web-0"), "api_version": version}
    station = start(ImdsSettings.model_validate(settings))
    station.poll()
    imds.schedule(event_type="Reboot", resources=["web-0"], event_id=FIRST)
    station.poll()
    imds.start(FIRST)
    station.poll()
    imds.complete(FIRST)
    station.poll()
    events = station.events()
    assert [name_of(event) for event in events] == [
        "document.changed",
        f"scheduledevent.scheduled {FIRST}",
        "document.changed",
        f"scheduledevent.started {FIRST}",
        "document.changed",
        f"scheduledevent.completed {FIRST}",
        "document.changed",
    ]
    assert events[1]["data"]["AffectsThisVm"] is True
    assert events[1]["data"]["NotBeforeUtc"] is not None


def test_a_request_that_hangs_is_reported_and_repeated_on_another_connection(
    imds: ImdsLab, start: Start
) -> None:
    station = start(ImdsSettings(endpoint=imds.url("web-0")))
    station.settle()
    station.imds._late_seconds = 0.2
    imds.fault("slow", seconds=600, path=EVENTS_PATH)
    assert station.polled(after=6) == ["imds.unreachable", "imds.recovered"]
