"""What the pages read from the store at a moment: the state of VMs and events, and what filters choose."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

import pytest

from bridge.console import rows
from bridge.console.history import read_history
from bridge.console.rows import Filter
from bridge.console.state import DUES
from bridge.imds.diff import ChangeKind
from tests.support.console import NOW, FleetVm, Shown, event
from tests.support.only import only

AT = NOW.timestamp()
HOUR, DAY = 3600.0, 86_400.0


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


WEB = FleetVm("web-0")


@pytest.mark.parametrize(
    ("bodies", "seconds", "watch"),
    [
        ([WEB.heartbeat()], 3899, "watched"),
        ([WEB.heartbeat()], 3901, "silent"),
        ([WEB.unreachable(since=NOW), WEB.heartbeat()], 3901, "silent"),
        ([WEB.unreachable(since=NOW), WEB.heartbeat()], 9, "unreachable"),
        ([WEB.heartbeat(reason="Stopping")], 9, "stopped"),
        ([WEB.heartbeat(reason="Stopping")], 9999, "stopped"),
        ([WEB.heartbeat(reason="Stopping"), WEB.change("scheduled", event(), after(1))], 9, "watched"),
    ],
)
def test_a_vm_is_watched_if_it_was_heard_of_within_an_hour_and_reaches_imds(
    seen: Shown, bodies: list[bytes], seconds: float, watch: str
) -> None:
    seen.add(*bodies)
    seen.clock.advance(seconds)
    assert seen.vm().watch == watch


def test_not_watched_stays_so_whatever_events_name_the_vm(seen: Shown) -> None:
    """An event on a VM that is silent or cannot reach IMDS: the list, the count and the filter agree."""
    web, silent, unreachable = FleetVm("web-0"), FleetVm("web-1"), FleetVm("web-2")
    seen.add(
        silent.heartbeat(NOW - timedelta(hours=2)),
        unreachable.unreachable(NOW, since=NOW),
        FleetVm("web-3").heartbeat(NOW - timedelta(hours=3)),
        web.change("scheduled", event(vms=["web-0", "web-1", "web-2"])),
    )
    chosen = {
        "watched": ["web-0"],
        "silent": ["web-1", "web-3"],
        "unreachable": ["web-2"],
        "unwatched": ["web-1", "web-2", "web-3"],
        "Scheduled": ["web-0", "web-1", "web-2"],
    }
    assert {status: [vm.name for vm in seen.vms(status=status)] for status in chosen} == chosen
    counted = {status: len(names) for status, names in chosen.items()}
    assert seen.read(rows.count_vms) == {**counted, "unwatched with event": 2, "": 4}


def test_a_vm_shows_its_most_urgent_event(seen: Shown) -> None:
    vm = FleetVm("web-0")
    started = event("F", type="Freeze", EventStatus="Started")
    seen.add(vm.change("scheduled", event()), vm.change("scheduled", event("later", minutes=90)))
    assert seen.vm().starts_at == AT + 900
    seen.add(vm.change("started", started, NOW))
    assert (seen.vm().event_type, seen.vm().event_status) == ("Freeze", "Started")


def test_the_pages_of_the_vms_have_each_of_them_once_and_in_their_order(seen: Shown) -> None:
    """Also VMs that an event names and that have never reported, in a group that nobody has reported from."""
    seen.add(*(FleetVm(f"web-{n}", group=f"g{n % 3}", zone=str(n % 2)).heartbeat() for n in range(9)))
    seen.add(FleetVm("web-1", group="g1").change("scheduled", event(vms=["web-1", "never-1"])))
    ordered = [(vm.group, vm.zone, vm.name) for vm in seen.vms()]
    for size in (1, 2, 4, 100):
        pages = [seen.read(rows.vms, limit=size, offset=first) for first in range(0, 11, size)]
        assert [(vm.group, vm.zone, vm.name) for page in pages for vm in page] == ordered
    assert len(ordered) == 10


def test_what_is_urgent_comes_first_in_its_group(seen: Shown) -> None:
    seen.add(*(FleetVm(f"web-{n}").heartbeat() for n in range(3)))
    seen.add(FleetVm("web-2").change("scheduled", event("E", vms=["web-2"])))
    seen.add(*(FleetVm(name).heartbeat(after(-2 * HOUR)) for name in ("web-1", "web-9")))
    assert [vm.name for vm in seen.vms()] == ["web-2", "web-9", "web-0", "web-1"]


def test_vms_are_in_the_order_of_their_numbers(seen: Shown) -> None:
    seen.add(*(FleetVm(f"web-{number}").heartbeat() for number in (10, 9, 1)))
    assert [vm.name for vm in seen.vms()] == ["web-1", "web-9", "web-10"]
    seen.add(FleetVm("web-1").change("scheduled", event(vms=["web-10", "web-9", "web-1"])))
    assert seen.event().resources == ("web-1", "web-9", "web-10")


@pytest.mark.parametrize(
    ("clocks", "apart", "ahead"),
    [
        ((3600,) * 3, 30, 3600),
        ((-3600, -3610, -3590), 30, -3600),
        ((3600,) * 19 + (0,), 5, 3600),  # one of twenty is wrong itself
        ((-300,), 0, None),  # one event that was delivered late
        ((-3600,) * 5, 0, None),  # what waited is delivered at once
        ((-300, -400, -500, -900), 30, None),  # all arrive late, but not equally
        ((3600, 3600, 0, 0, 0), 30, None),
    ],
)
def test_a_clock_with_which_most_senders_disagree_by_as_much_is_the_consoles(
    seen: Shown, clocks: tuple[float, ...], apart: float, ahead: float | None
) -> None:
    for number, one in enumerate(clocks):
        at = after(number * apart)
        seen.add(FleetVm(f"web-{number}").heartbeat(at + timedelta(seconds=one)), at=at)
        seen.clock.advance(apart)
    assert seen.read(rows.notes)["ahead"] == ahead
    seen.clock.advance(601)
    assert seen.read(rows.notes)["ahead"] is None


def test_a_vm_is_out_of_work_until_its_program_has_put_it_back(seen: Shown) -> None:
    vm = FleetVm("web-0")
    late, out = (vm.of_work("outofwork", after(seconds), since=NOW) for seconds in (30, 60))
    back = vm.of_work("recovered", after(90), since=NOW)
    for body, is_out in ((out, 1), (back, 0), (late, 0)):
        seen.add(vm.heartbeat(), body)
        assert len(seen.vms(status="outofwork")) == is_out
        assert seen.read(rows.count_vms).get("outofwork", 0) == is_out
        assert (">1</strong> out of work" in seen.page("/")) == is_out


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
    one = event(minutes=0, at=after(60 * minutes), **changes)
    seen.add(WEB.change(kind, one, after(-2 * HOUR)))
    assert only(seen.events()).due == due
    assert [len(seen.events(due=one)) for one in DUES] == [int(one == due) for one in DUES]


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


def test_who_has_seen_an_event_is_counted_apart_for_the_vms_that_it_names_and_for_others(seen: Shown) -> None:
    alone, others = FleetVm("web-0"), [FleetVm(f"web-{number}") for number in range(1, 5)]
    in_set = [FleetVm(f"set_{number}", scale_set="Workers") for number in range(4)]
    seen.add(*(vm.heartbeat() for vm in (alone, *others, *in_set)))
    seen.add(alone.change("scheduled", event()), in_set[0].change("scheduled", event("S", vms=["set_0"])))
    seen.add(in_set[1].change("scheduled", event("T", vms=["set_0", "SET_2"])))
    seen.add(in_set[2].change("scheduled", event("T", vms=["set_0", "SET_2"])))
    for name, told, witnesses in (("E", 1, (1, 0)), ("S", 4, (1, 0)), ("T", 4, (1, 1))):
        row = seen.event(name)
        assert (row.seen, row.seen_by_others) == witnesses
        assert len(seen.read(rows.vms_of, row)) == told
    assert seen.event("S").group == "shop/workers"


@pytest.mark.parametrize(
    ("before", "role", "is_late"),
    [
        (2, "forward", True),
        (419, "forward", True),
        (-30, "forward", True),
        (421, "forward", False),
        (2, "listen", False),
    ],
)
@pytest.mark.parametrize("is_heartbeat_first", [True, False])
def test_notice_is_azures_unless_the_forwarder_had_just_started(
    seen: Shown, before: float, role: str, *, is_late: bool, is_heartbeat_first: bool
) -> None:
    vm, at = FleetVm("web-0"), NOW - timedelta(seconds=before)
    start = vm.heartbeat(at, reason="Started", role=role)
    arriving = [start, vm.change("scheduled", event(minutes=2))]
    for body in arriving if is_heartbeat_first else reversed(arriving):
        seen.add(body, at=after(40))
    assert seen.event().seen_late == is_late
    notices = seen.read(read_history, 30, AT, Filter()).notices
    assert [(one.short, one.total) for one in notices] == ([] if is_late else [(1, 1)])


def test_notice_is_known_if_the_vm_that_saw_the_event_first_had_been_watching(seen: Shown) -> None:
    new, old = FleetVm("w-0", scale_set="w"), FleetVm("w-1", scale_set="w")
    seen.add(new.heartbeat(after(20), reason="Started"), old.heartbeat())
    seen.add(new.change("scheduled", event(), after(30)), old.change("scheduled", event(), after(1)))
    assert not seen.event().seen_late


# --- VMs that are gone ---


def ended_vms(seen: Shown, kind: str = "Preempt", *, last: float = 0, reason: str = "Hourly") -> None:
    """Let an event of a type name web-0 and never-0, start in 15 minutes, and web-0 be heard of that much later."""
    vm = FleetVm("web-0")
    scheduled = event(type=kind, vms=["web-0", "never-0"])
    seen.add(vm.change("scheduled", scheduled))
    at = NOW + timedelta(minutes=15, seconds=last)
    seen.add(vm.heartbeat(at, reason=reason), at=at)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
@pytest.mark.parametrize(("last", "reason"), [(-60, "Hourly"), (0, "Hourly"), (200, "Stopping")])
def test_a_vm_that_is_deleted_is_probably_gone_for_a_day_and_then_on_no_list(
    seen: Shown, kind: str, last: float, reason: str
) -> None:
    ended_vms(seen, kind, last=last, reason=reason)
    seen.clock.advance(900 + 301)
    assert only(seen.events()).due == "gone"
    seen.clock.advance(2 * HOUR)
    assert {vm.name: (vm.watch, vm.describe_watch(AT)) for vm in seen.vms()} == {
        "never-0": ("gone", "probably gone"),
        "web-0": ("gone", "probably gone"),
    }
    assert seen.vms(status="unwatched") == []
    seen.clock.advance(DAY - 2 * HOUR)
    assert (seen.vms(), seen.events()) == ([], [])
    assert seen.read(rows.count_vms) == {}


@pytest.mark.parametrize(("kind", "last"), [("Reboot", 0), ("Redeploy", 0), ("Freeze", 0), ("Preempt", 301)])
def test_a_vm_that_is_not_deleted_or_was_heard_of_since_is_silent_and_its_event_overdue(
    seen: Shown, kind: str, last: float
) -> None:
    ended_vms(seen, kind, last=last)
    seen.clock.advance(3 * HOUR)
    assert [vm.watch for vm in seen.vms()] == ["unknown", "silent"]
    assert seen.event().due == "overdue"
    seen.clock.advance(2 * DAY)
    assert [vm.watch for vm in seen.vms()] == ["unknown"] * (kind != "Preempt") + ["silent"]


def test_a_vm_that_is_heard_of_again_returns(seen: Shown) -> None:
    ended_vms(seen)
    seen.clock.advance(3 * DAY)
    assert seen.vms() == []
    seen.add(FleetVm("web-0").heartbeat(NOW + timedelta(days=3)), at=NOW + timedelta(days=3))
    assert [(vm.name, vm.watch) for vm in seen.vms()] == [("web-0", "watched")]


@pytest.mark.parametrize(("end", "watch"), [("completed", "gone"), ("ended", "gone"), ("canceled", "silent")])
def test_the_end_that_another_vm_reports_does_not_bring_the_vm_back(
    seen: Shown, end: ChangeKind, watch: str
) -> None:
    gone, other, deleted = (FleetVm(f"w-{n}", scale_set="w") for n in (0, 1, 2))
    preempt = event(type="Preempt", vms=["w-0"])
    started = event(type="Preempt", vms=["w-0"], EventStatus="Started", NotBefore="")
    later = NOW + timedelta(minutes=15)
    seen.add(gone.change("scheduled", preempt), deleted.heartbeat())
    if end == "completed":
        seen.add(other.change("started", started, later, previous=preempt), at=later)
    last = started if end == "completed" else preempt
    seen.add(other.change(end, last, later + timedelta(minutes=1), previous=last), at=later)
    seen.add(other.heartbeat(NOW + timedelta(hours=2)), at=NOW + timedelta(hours=2))
    seen.clock.advance(2 * HOUR)
    assert {vm.name: vm.watch for vm in seen.vms()} == {"w-0": watch, "w-1": "watched", "w-2": "silent"}
    seen.clock.advance(DAY)
    assert ("w-0" in [vm.name for vm in seen.vms()]) == (watch == "silent")


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
        ({"due": "1H"}, "EF"),
        ({"type": "reboot", "status": "open", "group": ("Shop",)}, "E"),
        ({"vm": "web", "tag": ("env=prod",)}, ""),
    ],
)
def test_a_filter_shows_what_meets_all_of_it(seen: Shown, wanted: dict[str, Any], names: str) -> None:
    filled(seen)
    expected = {seen.event(name).event_id for name in names}
    assert {row.event_id for row in seen.events(**wanted)} == expected
    assert {row.event_id for row in seen.read(rows.events_since, AT - 1, Filter(**wanted))} == expected
    if not wanted.keys() & {"type", "source", "due", "status"}:
        assert {vm.event_id for vm in seen.vms(**wanted)} == expected
        assert seen.read(rows.count_vms, Filter(**wanted))[""] == len(expected)


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


def test_the_vms_of_a_filter_come_first_and_are_counted(seen: Shown) -> None:
    app = [FleetVm(f"app-{number}", tags={"team": "alpha"}) for number in range(18)]
    mine = [FleetVm(f"zeta-{number}", tags={"team": "zeta"}) for number in (1, 2)]
    shared = event("E", vms=[vm.name for vm in (*app, *mine)])
    seen.add(*(vm.heartbeat() for vm in (*app, *mine)), app[0].change("scheduled", shared))
    wanted = Filter(tag=("team=zeta",))
    assert seen.read(rows.count_due, wanted) == {"1h": (1, 0, 2)}
    row = only(seen.read(rows.mine_first, seen.events(tag=wanted.tag), wanted))
    assert (row.resources[:3], row.vms) == (("zeta-1", "zeta-2", "app-0"), "2 of 20 VMs")
    row = only(seen.read(rows.mine_first, seen.events(), Filter()))
    assert (row.resources[0], row.vms) == ("app-0", "20 VMs")


def test_a_group_is_also_found_by_its_resource_group_alone(seen: Shown) -> None:
    vm = FleetVm("web_0", group="RG", scale_set="Web")
    seen.add(vm.heartbeat(), FleetVm("db-0", group="rg2").heartbeat())
    for group in ("rg", "Rg/WEB"):
        assert [one.name for one in seen.vms(group=(group,))] == ["web_0"]
    assert seen.read(rows.groups_of)[0] == ["rg", "rg/web", "rg2"]


def test_what_a_filter_asks_for_and_does_not_exist_has_a_nearest_value(seen: Shown) -> None:
    filled(seen)
    wanted = Filter(due="1x", type="Rebot", group=("shop", "shopp"), tag=("env=pord",), vm="web-11")
    known = {
        "type": ["Freeze", "Reboot"],
        "due": DUES,
        "vm": seen.read(rows.names_unlike, wanted.only("vm")),
        "group": seen.read(rows.groups_of)[0],
        "tag": seen.read(rows.tags_of),
    }
    found = rows.unknown_values(wanted, known)
    assert found == [
        ("type", "Rebot", "Reboot"),
        ("due", "1x", "1h"),
        ("vm", "web-11", "web-1"),
        ("group", "shopp", "shop"),
        ("tag", "env=pord", "env=prod"),
    ]
    given = Filter(due="LATER", type="freeze", group=("Shop",), tag=("ENV=prod",), vm="WEB")
    assert rows.unknown_values(given, {**known, "vm": seen.read(rows.names_unlike, given.only("vm"))}) == []
    assert seen.read(rows.names_unlike, Filter(vm=seen.event().event_id[:8])) == []


def test_every_field_of_a_filter_has_an_example() -> None:
    assert all(field.metadata["example"] for field in fields(Filter))


@pytest.mark.parametrize("step", [1, -1], ids=["in order", "the other way round"])
def test_who_was_prepared_before_an_event_came_back_is_prepared_again_once_its_program_has_said_so(
    seen: Shown, step: int
) -> None:
    vms = [FleetVm("web-0"), FleetVm("web-1")]
    first, again = (event(vms=["web-0", "web-1"], minutes=minutes) for minutes in (15, 20))
    bodies = [
        vms[0].change("scheduled", first),
        *(vm.prepared(first, after(5)) for vm in vms),
        vms[0].change("canceled", first, after(10), previous=first),
        vms[0].change("scheduled", again, after(20)),
    ]
    seen.add(*bodies[::step])
    assert (seen.event().prepared, {vm.preparation for vm in seen.vms()}) == (0, {"waiting"})
    seen.add(vms[0].prepared(again, after(30)))
    prepared = {vm.name: vm.preparation for vm in seen.vms()}
    assert (seen.event().prepared, prepared) == (1, {"web-0": "prepared", "web-1": "waiting"})
    more = [
        vms[0].change("started", event(EventStatus="Started"), after(40), previous=again),
        vms[1].prepared(again, after(50)),
        vms[0].change("completed", again, after(60), previous=again),
    ]
    seen.add(*more[::step])
    assert (seen.event().status, seen.event().prepared) == ("Completed", 1)
    assert seen.read(rows.count_prepared, AT, Filter()) == (1, 2)
