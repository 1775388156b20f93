"""No value in an event keeps it from being stored, or a page from being shown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bridge.console import rows
from bridge.console.ingest import BATCH, read_events
from bridge.contract.types import EVENT_NAMES, type_of
from tests.support.console import NOW, ask, shown, web_of
from tests.support.diff import steady

PATHS = (
    *("/", "/fleet", "/fleet?view=table", "/history", "/history.csv", "/metrics", "/?vm=%00&tag=%EF%BF%BF"),
    *(f"/api/v1/{name}" for name in ("events", "vms", "history")),
)
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
    {}, optional=dict.fromkeys(("Name", "ResourceId", "Zone", "Location", "ScaleSet", "Tags"), VALUES)
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


@given(st.lists(events(), min_size=1, max_size=8))
@settings(steady, max_examples=30, phases=set(Phase) - {Phase.explain})
def test_whatever_an_event_holds_it_is_stored_and_every_page_is_shown(
    given_events: list[dict[str, Any]],
) -> None:
    body = json.dumps(given_events).encode()
    content = read_events({"content-type": BATCH}, body, now=NOW.timestamp())
    assert content.faults == []
    with TemporaryDirectory() as folder, shown(Path(folder)) as seen:
        writer = seen.writer()
        future = writer.submit(content.events)
        writer.run_once(0)
        assert future.result(0) is None
        keys = ("e-1", "\x00", "\ufffd")
        known = [key for key in keys if seen.read(rows.find_event, key) is not None]
        pages = ("/event/{}", "/api/v1/events/{}", "/event/{}/events.jsonl")
        paths = {page.format(quote(key)): key in known for key in keys for page in pages}
        answers = asyncio.run(ask(web_of(seen.store, seen.clock), [*PATHS, *paths]))
    expected = dict.fromkeys(PATHS, True) | paths
    statuses = {path: answer.status_code for path, answer in answers.items()}
    assert statuses == {path: 200 if is_known else 404 for path, is_known in expected.items()}
