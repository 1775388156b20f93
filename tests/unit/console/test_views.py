"""What the pages show, built from rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.console import fleet, history, now
from bridge.console.filters import Filter, read_filter
from bridge.console.queries import EventRow, ReportRow, VmRow
from bridge.console.story import notice_text, story, witnesses
from tests.support.console import FleetVm, event, received

AT = 1_763_640_000.0
SCOPE = "/subscriptions/s/shop"
ROW = EventRow(
    event_id="e-1",
    scope=SCOPE,
    group_name="shop",
    shown_id="E-1",
    event_type="Reboot",
    event_source="Platform",
    status="Scheduled",
    not_before=AT + 600,
    duration_seconds=-1,
    resources=("web-0", "web-1"),
    first_seen_at=AT - 300,
    last_change_at=AT - 300,
    notice_seconds=900.0,
)
VM = VmRow(
    id=1,
    name="web-0",
    scope=SCOPE,
    group_name="shop",
    zone="1",
    location="westeurope",
    resource_id="/subscriptions/s",
    alive_at=AT - 60,
    heartbeat_at=AT - 60,
    is_stopped=False,
    version="0.3.0",
    backlog=0,
    unreachable_since=None,
    gaps=0,
)


def cells(*vms: VmRow, events: tuple[EventRow, ...] = ()) -> dict[str, tuple[str, str]]:
    groups = fleet.fleet(vms, events, AT)
    return {cell.name: (cell.state, cell.note) for group in groups for cell in group.cells}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "quiet"),
        ({"alive_at": AT - 3899}, "quiet"),
        ({"alive_at": AT - 3901}, "silent"),
        ({"alive_at": AT - 3901, "unreachable_since": AT - 9000}, "silent"),
        ({"unreachable_since": AT - 180}, "unreachable"),
        ({"is_stopped": True}, "stopped"),
        ({"is_stopped": True, "alive_at": AT}, "quiet"),
    ],
)
def test_a_vm_is_quiet_only_if_it_was_heard_of_within_an_hour_and_watches_imds(
    change: dict[str, Any], state: str
) -> None:
    assert cells(VM._replace(**change))["web-0"][0] == state


def test_a_silent_vm_with_an_event_is_shown_with_both() -> None:
    found = cells(VM._replace(alive_at=AT - 7200), events=(ROW,))
    assert found["web-0"] == ("Scheduled", "Reboot in 10 min, silent 2 h")


def test_a_vm_that_never_reported_but_is_named_by_an_event_is_not_fine() -> None:
    groups = fleet.fleet([VM], [ROW], AT)
    assert [(cell.name, cell.state) for cell in groups[0].cells] == [
        ("web-0", "Scheduled"),
        ("web-1", "unknown"),
    ]
    assert fleet.summary(groups)["vms"] == 1


def test_a_vm_of_the_same_name_in_another_group_is_not_affected() -> None:
    other = VM._replace(id=2, scope="/subscriptions/s/other", group_name="other")
    groups = {group.name: group for group in fleet.fleet([VM, other], [ROW], AT)}
    assert groups["other"].cells[0].state == "quiet"


def test_the_event_that_started_comes_before_the_next_one() -> None:
    later = replace(ROW, event_id="e-2", event_type="Freeze", status="Started", started_at=AT - 5)
    assert cells(VM, events=(ROW, later))["web-0"] == ("Started", "Freeze now")


def test_missing_and_waiting_events_are_named() -> None:
    assert cells(VM._replace(gaps=3, backlog=12))["web-0"] == ("quiet", "quiet, 12 waiting, 3 missing")


def test_vms_are_in_the_order_of_their_numbers() -> None:
    assert list(cells(*(VM._replace(id=n, name=f"web-{n}") for n in (10, 9, 1)))) == [
        "web-1",
        "web-9",
        "web-10",
    ]


def test_a_bar_starts_at_not_before_and_is_hatched_if_the_duration_is_unknown() -> None:
    found = now.timeline([ROW, replace(ROW, duration_seconds=9)], AT, "24h")
    first, second = found.bars
    assert first.x == second.x == now.place(600, now.WINDOWS["24h"])
    assert (first.is_hatched, second.is_hatched) == (True, False)
    assert first.width > second.width > 0


@pytest.mark.parametrize("window", now.WINDOWS)
@pytest.mark.parametrize("start", [-1e9, -60.0, 0.0, 60.0, 3000.0])
def test_every_bar_lies_within_the_timeline(window: str, start: float) -> None:
    for row in (replace(ROW, not_before=AT + start), replace(ROW, status="Started", started_at=AT + start)):
        (bar,) = now.timeline([row], AT, window).bars
        assert bar.x >= 0
        assert bar.x + bar.width <= 100.01


def test_events_after_the_window_are_counted() -> None:
    found = now.timeline([ROW, replace(ROW, not_before=AT + 2 * now.WINDOWS["24h"])], AT, "24h")
    assert (len(found.bars), found.later) == (1, 1)


def test_the_tiles_say_what_is_due_within_the_hour_on_how_many_vms_and_how_much_of_it_users_caused() -> None:
    hour = replace(ROW, event_id="e-2", not_before=AT + 3600, event_source="User", resources=("web-2",))
    started = replace(ROW, event_id="e-3", status="Started", started_at=AT - 5)
    unknown = replace(ROW, event_id="e-4", not_before=None, resources=("WEB-1",))
    found = now.tiles(
        [started, ROW, unknown, hour], {"quiet": 7, "silent": 1, "stopped": 2, "unknown": 1}, AT
    )
    assert [(number, text, detail) for number, text, detail, _, _ in found] == [
        (1, "in progress", "on 2 VMs"),
        (2, "due within 1 h", "on 2 VMs"),
        (1, "due later", "on 1 VM, 1 by users"),
        (7, "VMs quiet", "of 10 known"),
        (0, "cannot reach IMDS", "may miss events"),
        (3, "silent or stopped", "not watched"),
    ]


def test_what_has_started_comes_first_and_then_the_earliest_start() -> None:
    started = replace(ROW, event_id="started", status="Started", started_at=AT - 9000)
    later = replace(ROW, event_id="later", not_before=AT + 9000)
    unknown = replace(ROW, event_id="unknown", not_before=None)
    ordered = sorted([later, ROW, unknown, started], key=now.urgency)
    assert [one.event_id for one in ordered] == ["started", "unknown", "e-1", "later"]


def test_vms_on_which_events_may_be_missed_are_listed_the_last_heard_of_first() -> None:
    stopped = VM._replace(id=2, name="stopped", is_stopped=True, alive_at=AT - 99, heartbeat_at=AT - 99)
    silent = VM._replace(id=3, name="silent", alive_at=AT - 7200)
    unreachable = VM._replace(id=4, name="unreachable", unreachable_since=AT - 180)
    found = fleet.unwatched([VM, silent, stopped, unreachable], AT)
    assert [(vm.name, note) for vm, _, note in found] == [
        ("unreachable", "no IMDS 3 min"),
        ("stopped", "stopped 1 min 39 s"),
        ("silent", "silent 2 h"),
    ]


def test_a_group_says_how_many_of_its_vms_are_not_quiet() -> None:
    vms = [VM, VM._replace(id=2, name="db", alive_at=AT - 7200), VM._replace(id=3, name="x")]
    (group,) = fleet.fleet(vms, [ROW], AT)
    assert group.states == (("Scheduled", 1), ("silent", 1), ("unknown", 1))


def test_the_headline_says_what_is_next() -> None:
    started = replace(ROW, status="Started", started_at=AT - 5)
    assert now.headline([], AT, vms=0, is_filtered=False) == "No VM has reported yet"
    assert now.headline([], AT, vms=9, is_filtered=True) == "No open event matches the filter"
    assert now.headline([], AT, vms=9, is_filtered=False) == "Nothing is scheduled"
    assert now.headline([ROW], AT, vms=9, is_filtered=False) == "1 event, the next in 10 min"
    assert (
        now.headline([started, ROW], AT, vms=9, is_filtered=False)
        == "2 events, 1 in progress, the next in 10 min"
    )


@pytest.mark.parametrize(
    ("wanted", "is_shown"),
    [
        ({}, True),
        ({"type": "Reboot", "status": "Scheduled", "source": "Platform", "group": "shop"}, True),
        ({"type": "Freeze"}, False),
        ({"group": "other"}, False),
        ({"vm": "WEB-1"}, True),
        ({"vm": "E-1"}, True),
        ({"vm": "db"}, False),
    ],
)
def test_a_filter_shows_what_meets_all_of_it(wanted: dict[str, str], is_shown: bool) -> None:
    assert Filter(**wanted).matches(ROW) is is_shown


def test_a_filter_survives_the_way_through_an_address() -> None:
    assert read_filter({"vm": " web ", "unknown": "x"}).query(type="Reboot") == "?type=Reboot&vm=web"


def test_a_short_notice_is_named_as_one() -> None:
    assert notice_text(ROW) == "15 min notice, at least Microsoft's minimum of 15 min for a Reboot"
    short = replace(ROW, notice_seconds=600.0)
    assert notice_text(short) == "10 min notice, less than Microsoft's minimum of 15 min for a Reboot"


def test_the_story_names_who_saw_a_change_and_what_changed() -> None:
    vm, before = FleetVm("web-0"), event()
    planned = datetime(2026, 11, 20, 13, 15, tzinfo=UTC).timestamp()
    after = event(minutes=10)
    (change,) = received(vm.change("updated", after, previous=before, changed=["NotBefore"]))
    report = ReportRow(
        kind=change.kind, at=AT, vm="web-0", body=change.body, seen_by=(("web-0", AT), ("web-1", AT + 4))
    )
    updated, waiting = story(ROW, [report])
    assert updated.seen_by == "seen by 2 VMs within 4.0 s, last by web-1"
    assert updated.lines == (("NotBefore: ", planned, " → ", planned - 300),)
    assert waiting.title == "Waiting for NotBefore, or an approval"
    affected, other = witnesses(replace(ROW, resources=("web-1",)), [report], [VM])
    assert (affected.name, affected.is_affected, affected.place) == ("web-1", True, "")
    assert (other.name, other.is_affected, other.place) == ("web-0", False, "shop, zone 1")
    assert (affected.saw, other.saw) == ("Updated +4.0 s", "Updated")


def test_an_affected_vm_that_did_not_see_the_event_comes_first() -> None:
    (change,) = received(FleetVm("web-0").change("scheduled", event()))
    report = ReportRow(kind=change.kind, at=AT, vm="web-0", body=change.body, seen_by=(("web-0", AT),))
    found = witnesses(ROW, [report], [VM])
    assert [(one.name, one.first_at) for one in found] == [("web-1", None), ("web-0", AT)]


def test_a_receipt_names_who_asked_and_what_it_releases() -> None:
    (receipt,) = received(FleetVm("web-0").receipt(event(), outcome="rejected", reason="denied"))
    report = ReportRow(kind=receipt.kind, at=AT, vm="web-0", body=receipt.body, seen_by=())
    step = story(replace(ROW, is_open=False), [report])[0]
    assert (step.title, step.seen_by) == ("Approval rejected", "by web-0")
    assert step.lines == (
        ("Reason: denied",),
        ("Requested by ana@contoso.example: drained",),
        ("Releases web-0",),
    )


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", "\tx"])
def test_no_cell_of_the_csv_is_a_formula(name: str) -> None:
    line = list(history.write_csv([replace(ROW, resources=(name,))]))[1]
    assert f"'{name}" in line


def test_the_figures_of_now_are_those_of_the_fleet() -> None:
    vms = [VM, VM._replace(id=2, name="db", alive_at=AT - 7200), VM._replace(id=3, name="x", is_stopped=True)]
    counted = fleet.count_states(vms, [ROW], AT)
    assert counted == {"Scheduled": 1, "unknown": 1, "silent": 1, "stopped": 1}
    summary = fleet.summary(fleet.fleet(vms, [ROW], AT))
    assert {state: summary[state] for state in counted} == dict(counted)
