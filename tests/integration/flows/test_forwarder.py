"""The forwarder with the real client and the simulated IMDS; its decisions are tested in tests/unit/forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bridge.config.models import ImdsSettings
from bridge.imds.client import ImdsClient
from bridge.lab.imds import EVENT_VERSIONS, EVENTS_PATH
from tests.support.clock import MovedClock
from tests.support.diff import FIRST
from tests.support.forward import Station, name_of
from tests.support.imds_lab import ImdsLab

Start = Callable[..., Station]


@pytest.fixture
def start(tmp_path: Path, imds: ImdsLab) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_station(**settings: Any) -> Station:
            clock = MovedClock()
            client = ImdsClient(ImdsSettings(endpoint=imds.url("web-0"), **settings), clock=clock)
            stack.callback(client.close)
            return stack.enter_context(closing(Station(tmp_path / "state", client, clock)))

        yield start_station


@pytest.mark.parametrize("version", [EVENT_VERSIONS[0], EVENT_VERSIONS[-1]])
def test_a_whole_life_is_published_in_the_oldest_and_the_newest_api_version(
    imds: ImdsLab, start: Start, version: str
) -> None:
    station = start(api_version=version)
    station.poll()
    imds.schedule(event_type="Reboot", resources=["web-0"], event_id=FIRST)
    station.poll()
    imds.start(FIRST)
    station.poll()
    imds.complete(FIRST)
    station.poll()
    events = station.events()
    names = [f"scheduledevent.{change} {FIRST}" for change in ("scheduled", "started", "completed")]
    expected = ["document.changed", *chain(*((name, "document.changed") for name in names))]
    assert [name_of(event) for event in events] == expected
    assert events[1]["data"]["AffectsThisVm"] is True
    assert events[1]["data"]["NotBeforeUtc"] is not None


def test_a_request_that_hangs_is_reported_and_repeated_on_another_connection(
    imds: ImdsLab, start: Start
) -> None:
    station = start()
    station.settle()
    station.imds._late_seconds = 0.2
    imds.fault("slow", seconds=600, path=EVENTS_PATH)
    assert station.polled(after=6) == ["imds.unreachable", "imds.recovered"]
