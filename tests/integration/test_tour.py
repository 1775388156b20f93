"""The tour of docs/architecture.md: its stops exist, and a document passes them in that order."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FrameType
from typing import Any

from bridge.config.models import ImdsSettings
from bridge.delivery.dispatcher import Dispatcher
from bridge.imds.client import ImdsClient
from bridge.lab.imds import ImdsLab
from tests.support.clock import MovedClock
from tests.support.diff import BEFORE_START
from tests.support.forward import Station, name_of
from tests.support.inbox import Inbox
from tests.support.paths import ROOT
from tests.support.sinks import MakeWebhook

STOP = re.compile(r"^\| `(?P<file>[a-z_/]+)\.py` `(?P<name>[\w.]+)` \|", re.MULTILINE)


def stops() -> list[tuple[str, CodeType]]:
    """Return the name and the code of each function of the tour."""
    section = (
        (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## A tour")[1].split("\n## ")[0]
    )
    found = []
    for match in STOP.finditer(section):
        module = import_module(f"bridge.{match['file'].replace('/', '.')}")
        function = inspect.unwrap(resolve_name(f"{module.__name__}:{match['name']}"))
        found.append((match["name"], function.__code__))
    return found


def test_a_document_passes_the_stops_of_the_tour_in_their_order(
    tmp_path: Path, imds: ImdsLab, inbox: Inbox, webhook: MakeWebhook
) -> None:
    clock = MovedClock(BEFORE_START)
    station = Station(
        tmp_path / "state", ImdsClient(ImdsSettings(endpoint=imds.url("web-0")), clock=clock), clock
    )
    sink = Dispatcher("all", webhook(), max_age_seconds=9e9, outbox=station.outbox, clock=clock)
    imds.schedule(event_type="Reboot", resources=["web-0"])
    called: list[CodeType] = []

    def note(frame: FrameType, what: str, _: Any) -> None:
        if what == "call":
            called.append(frame.f_code)

    sys.setprofile(note)
    try:
        station.poll()
        sink.step()
    finally:
        sys.setprofile(None)
    station.close()
    station.imds.close()
    assert [name_of(event).split()[0] for event in inbox.events()] == ["scheduledevent.scheduled"]
    expected, rest = stops(), iter(called)
    assert len(expected) > 10
    assert [name for name, code in expected if not any(one is code for one in rest)] == []
