"""No value in an event keeps it from being stored, or a page from being shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from bridge.console.access import Person
from bridge.console.api import write
from bridge.console.content import BATCH, read_events
from bridge.console.metrics import Figures, new_registry
from bridge.console.pages import Pages, Request
from bridge.console.queries import Readers
from bridge.console.received import Received
from bridge.console.store import Store
from bridge.console.writer import Writer
from bridge.contract.types import EVENT_NAMES, type_of
from bridge.runtime.threads import Stop
from tests.support.clock import MovedClock

CLOCK = MovedClock()
NAMES = (
    *("EventId", "EventType", "EventStatus", "PreviousStatus", "EventSource", "Description", "NotBeforeUtc"),
    *("DurationInSeconds", "Resources", "Previous", "Changed", "Vm", "Backlog", "Version", "Reason", "Since"),
    *("Command", "Detail", "CloudEventIds", "EndReason", "Count", "BlindSeconds", "Cause", "VmRebooted"),
)
TEXTS = ("", "\x00", "\ud800", "x" * 5000, "E-1", "Started", "\u202e", "=1", "1e999")
TIMES = ("", "x", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59+14:00", "2027-01-15T08:00:00Z")
NUMBERS = (0, -1, 2**31, 2**63, 2**200, 1e308, True, None)
UNUSUAL = st.sampled_from([*TEXTS, *TIMES, *NUMBERS])
VALUES = st.recursive(
    UNUSUAL,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
VM = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("Name", "ResourceId", "Zone", "Location", "ScaleSet"), VALUES)
)
TYPES = (*map(type_of, EVENT_NAMES), "io.imdsbridge.scheduledevent.new.v2", "io.imdsbridge.")
NUMBERED = ("", "1", "9" * 18, "9" * 30, "-1", "\u0661")


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an event of any type, with any data."""
    data: Any = draw(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8))
    if draw(st.booleans()):
        data["EventId"] = "E-1"
    if draw(st.booleans()):
        data["Vm"] = {"Name": "web-0", **draw(VM)}
    given = {
        "specversion": "1.0",
        "id": draw(st.sampled_from("abcdefgh")),
        "source": draw(st.sampled_from(["/a", "/\U0001f600"])),
        "type": draw(st.sampled_from(TYPES)),
        "time": draw(st.sampled_from(TIMES)),
        "reporter": draw(st.sampled_from(["", "web-0/forward", "web-0/listen"])),
        "reporterepoch": "1",
        "reporterseq": draw(st.sampled_from(NUMBERED)),
    }
    return given | {"data": draw(st.sampled_from([data, data, data, None, [], "x"]))}


class Rig:
    """Pages whose templates are read once, of a store that each example makes new."""

    def __init__(self) -> None:
        self.pages = Pages(None, clock=CLOCK, input_error=str, version=int)  # type: ignore[arg-type] # set by `stored`

    @contextmanager
    def stored(self, events: list[Received]) -> Iterator[Pages]:
        with (
            TemporaryDirectory() as folder,
            closing(Store(Path(folder) / "console.db")) as store,
            closing(Readers(store)) as self.pages._readers,
        ):
            writer = Writer(store, clock=CLOCK, stop=Stop(), retain_seconds=1e9)
            future = writer.submit(events)
            writer.run_once(0)
            assert future.result(0) is None
            yield self.pages


RIG = Rig()


@given(st.lists(events(), min_size=1, max_size=8))
@settings(deadline=None, max_examples=30, phases=set(Phase) - {Phase.explain})
def test_whatever_an_event_holds_it_is_stored_and_every_page_is_shown(
    given_events: list[dict[str, Any]],
) -> None:
    body = json.dumps(given_events).encode()
    content = read_events({"content-type": BATCH}, body, now=CLOCK.wall())
    assert content.faults == []
    with RIG.stored(content.events) as pages:
        show_everything(pages)


def show_everything(pages: Pages) -> None:
    viewer = Person(name="", is_viewer=True, is_approver=False)
    for query in ({}, {"view": "table"}):
        request = Request(query=query, person=viewer)
        for render in (pages.now, pages.fleet, pages.history):
            render(request).encode()
        for answer in (pages.api_events, pages.api_vms, pages.api_history):
            write(answer(request)).encode()
    status = {"received": 0, "repeated": 0, "storage_error": None, "bus": None}
    generate_latest(new_registry(Figures(lambda: status, pages._readers, CLOCK)))
    "".join(pages.csv(request)).encode()
    for event_id in ("e-1", "", "\x00", "\ufffd"):
        (pages.event(request, event_id) or "").encode()
        if details := pages.api_event(request, event_id):
            write(details).encode()
        pages.jsonl(event_id)
