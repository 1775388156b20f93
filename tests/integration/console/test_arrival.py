"""What is shown does not depend on the order of arrival, on repetition, or on how events are grouped."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.console import fleet, history, rows
from bridge.imds.diff import ChangeKind
from tests.support.console import NOW, FleetVm, event, event_id, shown
from tests.support.diff import steady

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
