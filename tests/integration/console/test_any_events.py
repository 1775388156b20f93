"""Whatever events hold, and in whatever order they arrive: they are stored, and the same is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bridge.console import fleet, history, rows
from bridge.console.ingest import BATCH, read_events
from bridge.contract.types import EVENT_NAMES, type_of
from bridge.imds.diff import ChangeKind
from bridge.imds.document import ScheduledEvent
from tests.support.console import NOW, FleetVm, Shown, event, event_id, shown
from tests.support.diff import steady

# --- order ---

LATER = NOW + timedelta(hours=6)
NAMES = ("E", "F")
KINDS: tuple[ChangeKind, ...] = ("scheduled", "started", "updated", "completed", "canceled", "ended")
# Seconds at which several VMs see the same, or nearly.
TIMES = st.sampled_from([0, 0.001, 1, 2, 30, 59, 61, 400, 4000])


@st.composite
def fleets(draw: st.DrawFn) -> list[bytes]:
    """Draw what the VMs of two groups publish about two events, with the VMs' own events and receipts."""
    bodies: list[bytes] = []
    vms = [FleetVm("web-0"), FleetVm("WEB-1", group="SHOP"), FleetVm("web-0", group="other", epoch="2")]
    for _ in range(draw(st.integers(1, 12))):
        vm, at = draw(st.sampled_from(vms)), NOW + timedelta(seconds=draw(TIMES))
        bodies.append(_drawn(draw, vm, at))
    return bodies


def _drawn(draw: st.DrawFn, vm: FleetVm, at: datetime) -> bytes:
    minutes = draw(st.sampled_from([10, 15]))
    one = event(draw(st.sampled_from(NAMES)), vms=["web-0", "web-1"], minutes=minutes)
    if draw(st.booleans()):
        one = event("E", vms=["web-0", "web-1"], EventId=event_id("E").swapcase())
    other = draw(
        st.sampled_from(["change"] * 4 + ["heartbeat", "stopping", "unreachable", "document", "receipt"])
    )
    if other == "change":
        return vm.change(draw(st.sampled_from(KINDS)), one, at, previous=draw(st.sampled_from([None, one])))
    if other == "unreachable":
        return vm.unreachable(at, since=at - timedelta(seconds=9))
    if other == "document":
        return vm.document(one, ["an-id"], at)
    if other == "receipt":
        at += timedelta(milliseconds=10 * vm.receipts)  # no two receipts of a VM are the same
        return vm.receipt(one, at, outcome=draw(st.sampled_from(["accepted", "rejected"])))
    at += timedelta(milliseconds=10 * vm.sequence)  # a VM's heartbeats have times of their own
    return vm.heartbeat(at, reason="Stopping" if other == "stopping" else "Hourly")


def shown_after(batches: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    """Return what the pages show after some batches."""
    with TemporaryDirectory() as folder, shown(Path(folder), LATER) as seen:
        for one in batches:
            seen.add(*one, at=LATER)
        return {
            "events": [seen.read(rows.find_event, event_id(name)) for name in NAMES],
            "open": seen.events(),
            "fleet": fleet.groups(seen.vms()),
            "history": seen.read(history.read_history, 30, LATER.timestamp(), rows.EVERY),
            "stories": [
                sorted(
                    (one.at, one.kind, *one.seen_by)
                    for one in seen.read(rows.reports_of, event_id(name).lower())
                )
                for name in NAMES
            ],
        }


@given(fleets(), st.data())
@settings(steady, max_examples=60)
def test_every_order_repetition_and_grouping_of_events_shows_the_same(
    bodies: list[bytes], data: st.DataObject
) -> None:
    repeated = bodies + data.draw(st.lists(st.sampled_from(bodies), max_size=4))
    order = data.draw(st.permutations(repeated))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order)))))
    batches = [order[start:end] for start, end in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    found, expected = shown_after(batches), shown_after([bodies])
    for part, value in expected.items():
        assert found[part] == value


# --- an event that comes back ---

ENDED: tuple[ChangeKind, ...] = ("completed", "canceled", "ended")
# What begins a story, and how long after an end at least.
RETURNS: dict[ChangeKind, float] = {"scheduled": 0.001, "started": 60.001, "updated": 60.001}
MIDDLE = (*RETURNS, "prepared", "recovered", "accepted", "rejected")
PAUSES = st.sampled_from([0, 0.001, 1, 30, 300])
GROUP = ("web-0", "web-1", "web-2")


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """Draw what VMs publish of the stories of an event before the last one, which end, and of the last one."""
    vms, at, found = [FleetVm(name) for name in GROUP], NOW, []
    number = draw(st.integers(2, 3))
    for story in range(number):
        begin = draw(st.sampled_from(sorted(RETURNS)))
        at += timedelta(seconds=RETURNS[begin])
        middle = draw(st.lists(st.sampled_from(MIDDLE), max_size=5))
        ends = draw(st.lists(st.sampled_from(ENDED), min_size=int(story < number - 1), max_size=2))
        bodies = []
        for step, kind in enumerate([begin, *middle, *ends]):
            at += timedelta(seconds=draw(PAUSES) if step else 0)
            one = event(
                vms=draw(st.sampled_from([GROUP, GROUP[1:]])), minutes=draw(st.sampled_from([10, 15]))
            )
            for vm in draw(st.sampled_from([vms[:1], vms[1:2], vms[1:]])):
                bodies.append(_published(vm, kind, one, at, story))
                at += timedelta(milliseconds=1)
        found.append(bodies)
    return [body for bodies in found[:-1] for body in bodies], found[-1]


def _published(vm: FleetVm, kind: Any, one: ScheduledEvent, at: datetime, story: int) -> bytes:
    if kind == "prepared":
        return vm.prepared(one, at)
    if kind == "recovered":
        return vm.of_work(kind, at, since=NOW, event=one)
    if kind in ("accepted", "rejected"):
        return vm.receipt(one, at, outcome=kind, command_id=f"{'auto:' * (kind == 'rejected')}{at}")
    status = kind.capitalize() if kind in ("started", *ENDED) else "Scheduled"
    return vm.change(kind, replace(one, raw={**one.raw, "EventStatus": status}), at, seen_before=story)


def everything_of_an_event(seen: Shown) -> dict[str, Any]:
    """Return whatever the pages show of the only event, but for the list of all that was received of it."""
    now = LATER.timestamp()
    found = seen.read(history.read_history, 30, now, rows.EVERY)
    return {
        "event": seen.event(),
        "open": seen.events(),
        "current": seen.read(rows.every_open, rows.EVERY),
        "preparations": seen.read(rows.preparations_of, seen.event().key),
        "vms": [(vm.name, vm.event_status, vm.starts_at, vm.due, vm.preparation) for vm in seen.vms()],
        "history": (found.total, found.ends, found.per_day, found.notices, found.prepared),
        "affected": seen.read(lambda store: [*map(tuple, store.execute("SELECT * FROM affected"))]),
    }


@given(stories(), st.data())
@settings(steady)
def test_an_event_that_came_back_is_shown_as_if_nothing_before_its_last_story_had_been_heard(
    drawn: tuple[list[bytes], list[bytes]], data: st.DataObject
) -> None:
    before, last = drawn
    known = [vm.heartbeat(NOW + timedelta(seconds=1), reason="Started") for vm in map(FleetVm, GROUP)]
    known.append(FleetVm("web-9").prepared(event("another")))
    with (
        TemporaryDirectory() as folder,
        TemporaryDirectory() as other,
        shown(Path(folder), LATER) as seen,
        shown(Path(other), LATER) as expected,
    ):
        for body in data.draw(st.permutations([*known, *before, *last])):
            seen.add(body, at=LATER)
        expected.add(*known, *last, at=LATER)
        assert everything_of_an_event(seen) == everything_of_an_event(expected)


# --- content ---

PATHS = (
    *("/", "/fleet", "/fleet?view=table", "/history", "/history.csv", "/metrics", "/?vm=%00&tag=%EF%BF%BF"),
    *(f"/api/v1/{name}" for name in ("events", "vms", "history")),
)
FIELDS = (
    *("EventId", "EventType", "EventStatus", "PreviousStatus", "EventSource", "Description", "NotBeforeUtc"),
    *("DurationInSeconds", "Resources", "Previous", "Changed", "Vm", "Backlog", "Version", "Reason", "Since"),
    *("Command", "Detail", "CloudEventIds", "EndReason", "Count", "BlindSeconds", "Cause", "VmRebooted"),
)
TEXTS = ("", "\x00", "\ud800", "x" * 5000, "E-1", "Started", "\u202e", "=1", "1e999")
CLOCKS = ("", "x", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59+14:00", "2027-01-15T08:00:00Z")
NUMBERS = (0, -1, 2**31, 2**63, 2**200, 1e308, True, None)
UNUSUAL = st.sampled_from([*TEXTS, *CLOCKS, *NUMBERS])
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
    data: Any = draw(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8))
    if draw(st.booleans()):
        data["EventId"] = "E-1"
    if draw(st.booleans()):
        data["Vm"] = {"Name": "web-0", **draw(VM)}
    given = {
        "specversion": "1.0",
        "id": draw(st.sampled_from("abcdefgh")),
        "source": draw(st.sampled_from(["/a", "/\U0001f600"])),
        "type": draw(st.sampled_from(TYPES)),
        "time": draw(st.sampled_from(CLOCKS)),
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
        expected = dict.fromkeys(PATHS, 200)
        expected |= {page.format(quote(key)): 200 if key in known else 404 for key in keys for page in pages}
        answers = seen.ask(*expected)
    assert dict(zip(expected, (one.status_code for one in answers), strict=True)) == expected
