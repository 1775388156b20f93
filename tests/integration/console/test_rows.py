"""What the pages read from the store at a moment: the state of VMs and events, and what filters choose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bridge.console import rows
from bridge.console.rows import Filter
from bridge.imds.diff import ChangeKind
from tests.support.console import NOW, FleetVm, Shown, event, shown

AT = NOW.timestamp()
HOUR, DAY = 3600.0, 86_400.0


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Shown]:
    with shown(tmp_path) as opened:
        yield opened


@pytest.mark.parametrize(
    ("reason", "is_reachable", "seconds", "watch"),
    [
        ("Hourly", True, 3899, "watched"),
        ("Hourly", True, 3901, "silent"),
        ("Hourly", False, 3901, "silent"),
        ("Hourly", False, 9, "unreachable"),
        ("Stopping", True, 9, "stopped"),
        ("Stopping", True, 9999, "stopped"),
    ],
)
def test_a_vm_is_watched_if_it_was_heard_of_within_an_hour_and_reaches_imds(
    seen: Shown, reason: str, is_reachable: bool, seconds: float, watch: str
) -> None:
    vm = FleetVm("web-0")
    seen.add(*([] if is_reachable else [vm.unreachable(NOW, since=NOW)]), vm.heartbeat(reason=reason))
    seen.clock.advance(seconds)
    assert seen.vm().watch == watch


def test_a_vm_that_reports_after_its_stop_is_watched(seen: Shown) -> None:
    vm = FleetVm("web-0")
    seen.add(vm.heartbeat(reason="Stopping"), vm.change("scheduled", event(), NOW + timedelta(seconds=1)))
    assert seen.vm().watch == "watched"


def test_not_watched_stays_so_whatever_events_name_the_vm(seen: Shown) -> None:
    """An event on a VM that is silent or cannot reach IMDS: the list, the count and the filter agree."""
    web, silent, unreachable = FleetVm("web-0"), FleetVm("web-1"), FleetVm("web-2")
    seen.add(
        silent.heartbeat(NOW - timedelta(hours=2)),
        unreachable.unreachable(NOW, since=NOW),
        FleetVm("web-3").heartbeat(NOW - timedelta(hours=3)),
        web.change("scheduled", event(vms=["web-0", "web-1", "web-2"])),
    )
    counted = {(watch, has_event): count for watch, has_event, count in seen.read(rows.count_vms)}
    assert counted == {
        ("watched", True): 1,
        ("silent", True): 1,
        ("silent", False): 1,
        ("unreachable", True): 1,
    }
    chosen = {
        status: [vm.name for vm in seen.vms(status=status)]
        for status in ("silent", "unreachable", "unwatched", "Scheduled", "quiet")
    }
    assert chosen == {
        "silent": ["web-1", "web-3"],
        "unreachable": ["web-2"],
        "unwatched": ["web-1", "web-2", "web-3"],
        "Scheduled": ["web-0", "web-1", "web-2"],
        "quiet": [],
    }


def test_a_vm_that_never_reported_but_is_named_by_an_open_event_is_unknown(seen: Shown) -> None:
    vm, reboot = FleetVm("web-0"), event(vms=["web-0", "web-1"])
    seen.add(vm.change("scheduled", reboot))
    assert {one.name: (one.watch, one.event_type) for one in seen.vms()} == {
        "web-0": ("watched", "Reboot"),
        "web-1": ("unknown", "Reboot"),
    }
    seen.add(vm.change("canceled", reboot, NOW + timedelta(seconds=9), previous=reboot))
    assert [(one.name, one.event_id) for one in seen.vms()] == [("web-0", None)]


def test_a_vm_of_the_same_name_in_another_group_is_not_affected(seen: Shown) -> None:
    seen.add(FleetVm("web-0", group="other").heartbeat(), FleetVm("web-0").change("scheduled", event()))
    assert [(vm.group, vm.state) for vm in seen.vms()] == [("other", "quiet"), ("shop", "Scheduled")]


def test_a_vm_shows_its_most_urgent_event(seen: Shown) -> None:
    vm = FleetVm("web-0")
    started = event("F", type="Freeze", EventStatus="Started")
    seen.add(vm.change("scheduled", event()), vm.change("scheduled", event("later", minutes=90)))
    assert seen.vm().starts_at == AT + 900
    seen.add(vm.change("started", started, NOW))
    assert (seen.vm().event_type, seen.vm().event_status) == ("Freeze", "Started")


def test_vms_are_in_the_order_of_their_numbers(seen: Shown) -> None:
    seen.add(*(FleetVm(f"web-{number}").heartbeat() for number in (10, 9, 1)))
    assert [vm.name for vm in seen.vms()] == ["web-1", "web-9", "web-10"]
    seen.add(FleetVm("web-1").change("scheduled", event(vms=["web-10", "web-9", "web-1"])))
    assert seen.event().resources == ("web-1", "web-9", "web-10")


# --- events ---


@pytest.mark.parametrize(
    ("minutes", "changes", "due"),
    [
        (-5.1, {}, "overdue"),
        (-4.9, {}, "1h"),
        (59.9, {}, "1h"),
        (60, {}, "later"),
        (15, {"NotBefore": ""}, "1h"),
        (-9, {"EventStatus": "Started"}, "started"),
    ],
)
def test_an_event_is_overdue_in_progress_due_within_the_hour_or_later(
    seen: Shown, minutes: float, changes: dict[str, Any], due: str
) -> None:
    kind: ChangeKind = "started" if changes.get("EventStatus") else "scheduled"
    at = NOW - timedelta(hours=2)
    seen.add(
        FleetVm("web-0").change(kind, event(minutes=0, at=NOW + timedelta(minutes=minutes), **changes), at)
    )
    (row,) = seen.events()
    assert row.due == due
    assert [len(seen.events(due=one)) for one in rows.DUES] == [int(one == due) for one in rows.DUES]


def test_overdue_comes_first_then_what_has_started_then_the_earliest_start(seen: Shown) -> None:
    vm, before = FleetVm("web-0"), NOW - timedelta(hours=9)
    seen.add(
        vm.change("scheduled", event("later", minutes=90)),
        vm.change("scheduled", event("soon", minutes=9)),
        vm.change("scheduled", event("unknown", NotBefore="")),
        vm.change("started", event("started", EventStatus="Started", NotBefore=""), before),
        vm.change("scheduled", event("overdue", minutes=60, at=before), before),
    )
    expected = [seen.event(name) for name in ("overdue", "started", "unknown", "soon", "later")]
    assert seen.events() == expected


@pytest.mark.parametrize("kind", ["Redeploy", "Terminate"])
def test_an_event_that_started_and_never_ended_stays_unless_it_deletes_the_vm(seen: Shown, kind: str) -> None:
    started = event(type=kind, EventStatus="Started", NotBefore="")
    seen.add(FleetVm("web-0").change("started", started))
    seen.clock.advance(DAY - 1)
    assert len(seen.events()) == 1
    seen.clock.advance(HOUR)
    assert len(seen.events()) == (kind == "Redeploy")


def test_azure_tells_the_scale_set_or_else_the_vms_that_the_event_names(seen: Shown) -> None:
    alone, others = FleetVm("web-0"), [FleetVm(f"web-{number}") for number in range(1, 5)]
    in_set = [FleetVm(f"set_{number}", scale_set="Workers") for number in range(4)]
    seen.add(*(vm.heartbeat() for vm in (alone, *others, *in_set)))
    seen.add(alone.change("scheduled", event()), in_set[0].change("scheduled", event("S", vms=["set_0"])))
    for name, told in (("E", 1), ("S", 4)):
        row = seen.event(name)
        assert seen.read(rows.count_seen, [row]) == {row.key: (1, told)}
        assert len(seen.read(rows.vms_of, row)) == told
    assert seen.event("S").group == "shop/workers"


# --- filters ---


def filled(seen: Shown) -> None:
    """Add an event in each of two subscriptions with a group of the same name."""
    here = FleetVm("\u00fcNode-1", tags={"Env": "Prod", "team": "Payments  EU"})
    there = FleetVm("web-1", subscription="2" * 36)
    for vm, scheduled in (
        (here, event("E", vms=[here.name])),
        (there, event("F", vms=[there.name], type="Freeze", EventSource="User")),
    ):
        seen.add(vm.heartbeat(), vm.change("scheduled", scheduled))


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({}, "EF"),
        ({"type": "Reboot", "status": "Scheduled", "source": "Platform", "group": ("shop",)}, "E"),
        ({"status": "Open"}, "EF"),
        ({"status": "Started"}, ""),
        ({"type": "Freeze"}, "F"),
        ({"group": ("other",)}, ""),
        ({"group": ("other", "shop")}, "EF"),
        ({"vm": "\u00dcNODE"}, "E"),
        ({"vm": "web-1"}, "F"),
        ({"tag": ("env=prod",)}, "E"),
        ({"tag": ("ENV=Prod", "team=payments eu")}, "E"),
        ({"tag": ("env=pro",)}, ""),
        ({"tag": ("env=prod", "team=x")}, ""),
        ({"subscription": "2" * 36}, "F"),
        ({"due": "1h"}, "EF"),
    ],
)
def test_a_filter_shows_what_meets_all_of_it(seen: Shown, wanted: dict[str, Any], names: str) -> None:
    filled(seen)
    expected = {seen.event(name).event_id for name in names}
    assert {row.event_id for row in seen.events(**wanted)} == expected
    assert {row.event_id for row in seen.read(rows.events_since, AT - 1, Filter(**wanted))} == expected
    if not wanted.keys() & {"type", "source", "due", "status"}:
        assert {vm.event_id for vm in seen.vms(**wanted)} == expected
        assert sum(count for _, _, count in seen.read(rows.count_vms, Filter(**wanted))) == len(expected)


def test_an_event_is_found_by_the_beginning_of_its_eventid(seen: Shown) -> None:
    filled(seen)
    assert seen.events(vm=seen.event().event_id[:8]) == [seen.event()]


def test_the_subscription_is_shown_as_soon_as_there_are_two(seen: Shown) -> None:
    seen.add(FleetVm("web-0").heartbeat())
    assert seen.read(rows.groups_of) == (["shop"], [])
    filled(seen)
    groups, subscriptions = seen.read(rows.groups_of)
    assert (groups, len(subscriptions)) == (["shop"], 2)
    assert seen.read(rows.tags_of) == ["env=prod", "team=payments eu"]


def test_counts_are_those_of_the_filter(seen: Shown) -> None:
    filled(seen)
    assert seen.read(rows.count_due, Filter()) == {"1h": (2, 1, 2)}
    assert seen.read(rows.count_due, Filter(tag=("env=prod",))) == {"1h": (1, 0, 1)}


def test_every_field_of_a_filter_has_an_example() -> None:
    assert all(field.metadata["example"] for field in fields(Filter))
