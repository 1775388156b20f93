"""What the pages show, built from rows."""

from __future__ import annotations

import csv
import io
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from bridge.console import fleet, history, now
from bridge.console.access import Person
from bridge.console.approve import Approvals, NotApproved, digest
from bridge.console.rows import DAY, EventRow, Filter, OpenRow, ReportRow, VmRow, read_filter
from bridge.console.story import notice_text, story, witnesses
from bridge.console.waves import Wave, wave_of, waves
from bridge.formats.text import format_duration
from bridge.imds.instance import Vm
from tests.support.clock import MovedClock
from tests.support.console import FleetVm, event, received
from tests.support.only import only

AT = 1_763_640_000.0
ROW = EventRow(
    event_id="E-1",
    event_type="Reboot",
    event_source="Platform",
    status="Scheduled",
    scope="s/shop",
    group="shop",
    not_before=AT + 600,
    duration_seconds=-1,
    resources=("web-0", "web-1"),
    first_seen_at=AT - 300,
    last_change_at=AT - 300,
    notice_seconds=900.0,
    starts_at=AT + 600,
    due="1h",
    key="e-1",
)
OPEN = OpenRow(
    key="e-1",
    due="1h",
    starts_at=AT + 600,
    event_type="Reboot",
    event_source="Platform",
    subscription="s",
    group="shop",
    status="Scheduled",
    duration_seconds=-1,
    prepared=None,
    resources='["web-0", "web-1"]',
)
VM = VmRow(name="web-0", group="shop", zone="1", alive_at=AT - 60, scope=1, folded="web-0")
WITH_EVENT: dict[str, Any] = {"event_id": "E-1", "event_type": "Reboot", "event": "Scheduled"}


def alone(**changes: Any) -> Wave:
    return Wave((OPEN._replace(**changes),))


def bars(lines: list[Wave], window: str = "24h") -> list[now.Bar]:
    return [*now.timeline(lines, AT, window).bars.values()]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "no event"),
        ({"missing": 3, "waiting": 12}, "no event, 12 events waiting, 3 missing"),
        ({"watch": "silent", "alive_at": AT - 7200}, "silent 2 h"),
        ({"watch": "unreachable", "unreachable_since": AT - 180}, "no IMDS 3 min"),
        ({**WITH_EVENT, "starts_at": AT + 600, "due": "1h"}, "Reboot in 10 min"),
        ({**WITH_EVENT, "starts_at": AT - 9, "due": "1h"}, "Reboot due"),
        ({**WITH_EVENT, "starts_at": AT - 900, "due": "overdue"}, "Reboot overdue"),
        ({**WITH_EVENT, "due": "1h"}, "Reboot"),
        ({**WITH_EVENT, "event": "Started", "due": "started"}, "Reboot now"),
        (
            {**WITH_EVENT, "starts_at": AT + 600, "watch": "silent", "alive_at": AT - 7200},
            "Reboot in 10 min, silent 2 h",
        ),
        ({**WITH_EVENT, "watch": "unknown", "alive_at": None}, "Reboot, never reported"),
        ({**WITH_EVENT, "due": "gone", "watch": "gone"}, "Reboot is over, probably gone"),
    ],
)
def test_a_vm_is_shown_with_its_event_and_with_who_watches_it(change: dict[str, Any], words: str) -> None:
    assert fleet.describe(replace(VM, **change), AT) == words


def test_a_group_says_how_many_of_its_vms_have_events_or_are_not_watched() -> None:
    vms = [replace(VM, **WITH_EVENT), replace(VM, watch="silent"), replace(VM, watch="unknown"), VM]
    group = only(fleet.groups(vms))
    assert group.states == (("Scheduled", 1), ("silent", 1), ("unknown", 1))


def test_a_bar_starts_at_not_before_and_is_hatched_if_the_duration_is_unknown() -> None:
    first, second = bars([alone(key="1"), alone(key="2", duration_seconds=9)])
    assert first.x == second.x == now.place(600, now.WINDOWS["24h"])
    assert (first.is_hatched, second.is_hatched) == (True, False)
    assert first.width > second.width > 0


@pytest.mark.parametrize("window", now.WINDOWS)
@pytest.mark.parametrize("start", [-1e9, -60.0, 0.0, 60.0, 3000.0])
def test_every_bar_lies_within_the_timeline(window: str, start: float) -> None:
    for given in ({}, {"status": "Started", "due": "started"}):
        bar = only(bars([alone(starts_at=AT + start, **given)], window))
        assert bar.x >= 0
        assert bar.x + bar.width <= 100.01


def test_what_starts_after_the_window_is_a_mark_at_its_end() -> None:
    late = OPEN._replace(key="late", starts_at=AT + 2 * now.WINDOWS["24h"])
    assert [bar.is_after for bar in bars([alone(), Wave((late, late))])] == [False, True]


@pytest.mark.parametrize(
    ("hours", "shown"),
    [
        ([], 0.25),
        ([0.1, 0.2], 0.25),
        ([0.1, 0.2, 30], 48),  # all of up to three
        ([0.1, 0.2, 0.9, 30], 1),
        ([0.1] * 17 + [3.9, 30, 40], 4),  # all but a tenth
        ([0.1, 900], 168),
        ([-2], 0.25),
    ],
)
def test_the_timeline_fits_all_starts_but_a_tenth(hours: list[float], shown: float) -> None:
    lines = [alone(key=f"{place}", starts_at=AT + hour * 3600) for place, hour in enumerate(hours)]
    assert now.timeline(lines, AT, "").ticks[-1] == (100, f"+{format_duration(shown * 3600)}")


@pytest.mark.parametrize(
    ("starts", "changes", "expected"),
    [
        ((0, 899, 1798), {}, [3]),  # each within 15 minutes of the next
        ((0, 901), {}, [1, 1]),
        ((0, None, None), {}, [1, 1, 1]),
        *(
            ((0, 0), {name: "other"}, [1, 1])
            for name in ("event_type", "event_source", "subscription", "group")
        ),
        ((0, 60), {"due": "started", "status": "Started"}, [2]),
    ],
)
def test_events_of_one_type_source_and_group_are_a_wave_while_each_starts_soon_after_another(
    starts: tuple[float | None, ...], changes: dict[str, Any], expected: list[int]
) -> None:
    events = [OPEN._replace(key=f"{at}", starts_at=at) for at in starts]
    events[-1] = events[-1]._replace(**changes)
    assert [len(one.events) for one in waves(events)] == expected


def test_waves_are_in_the_order_of_their_most_urgent_event_and_so_are_the_events_of_each() -> None:
    late = OPEN._replace(key="late", due="later", starts_at=AT + 9000, group="other")
    events = [
        OPEN._replace(key="2", due="overdue", starts_at=AT),
        late,
        OPEN._replace(key="1", starts_at=AT - 9),
    ]
    found = waves(events)
    assert [[event.key for event in one.events] for one in found] == [["2", "1"], ["late"]]
    assert (found[0].key, found[0].starts) == ("1", (AT - 9, AT))
    assert [one and one.key for one in (wave_of(found, "2"), wave_of(found, "late"), wave_of(found, ""))] == [
        "1",
        None,
        None,
    ]


def test_a_wave_says_how_many_of_its_events_and_vms_are_in_each_state() -> None:
    events = [
        OPEN._replace(
            key=f"{number}",
            resources=f'["WEB-0", "vm-{number}"]',
            prepared=number % 2,
            notice_seconds=900.0 - number,
            starts_at=AT + 60 * number,
            approval="accepted" * (number == 2),
        )
        for number in range(24)
    ]
    dues = {0: "overdue", 1: "overdue", 2: "started"}
    found = only(waves(event._replace(due=dues.get(place, "1h")) for place, event in enumerate(events)))
    assert (found.title, len(found.resources)) == ("24 Reboots", 25)
    assert found.dues == {"overdue": 2, "started": 1, "1h": 21}
    assert (found.next_at(AT), found.next_at(AT + 9999)) == (AT + 180, AT + 1380)
    assert (found.prepared, found.notice_seconds, found.approvals) == ((12, 48), 877.0, {"accepted": 1})
    unknown = Wave((OPEN._replace(event_type="", due="gone"),) * 2)
    assert (unknown.title, unknown.prepared, unknown.next_at(AT)) == ("2 Events", None, None)


def test_a_turn_comes_when_the_events_before_it_in_the_scope_are_over() -> None:
    def one(key: str, minutes: float, **changes: Any) -> OpenRow:
        given = {"scope": "s", "prepared": 0, "duration_seconds": 300, **changes}
        return OPEN._replace(key=key, starts_at=AT + 60 * minutes, **given)

    events = [
        one("third", 30),
        one("first", 10),
        one("second", 20, duration_seconds=-1),
        one("running", 12, status="Started", due="started"),
        one("elsewhere", 15, scope="t"),
        one("deleted", 1, event_type="Terminate"),
        one("gone", 1, due="gone"),
        one("without", 1, prepared=None),
    ]
    assert now.turns(events) == {"first": AT + 1020, "second": AT + 1020, "third": AT + 1200}


def test_the_bar_of_a_wave_reaches_from_its_first_start_to_its_last_end_with_its_density() -> None:
    events = [OPEN._replace(starts_at=AT + at, duration_seconds=60) for at in (3600, 3600, 3600, 4200)]
    bar = only(bars(waves(events)))
    assert bar.x == now.place(3600, DAY)
    assert bar.x + bar.width == pytest.approx(max(now.place(4260, DAY), now.place(4200, DAY) + 0.8))
    assert [(x, height) for x, _, height in bar.columns] == [
        (bar.x, now.BAR_HEIGHT),
        (pytest.approx(now.place(4200, DAY), abs=now.COLUMN_WIDTH), now.BAR_HEIGHT // 3),
    ]


def test_the_tiles_count_what_they_link_to() -> None:
    dues = {"started": (1, 0, 2), "1h": (2, 0, 2), "later": (1, 1, 1)}
    vms = Counter(
        {"Scheduled": 3, "Started": 1, "unwatched": 3, "unwatched with event": 1, "stopped": 2, "": 13}
    )
    found = now.tiles(dues, vms, Filter(group=("shop",)))
    assert [(tile.number, tile.text, tile.detail, tile.address) for tile in found] == [
        (0, "overdue", "0 VMs", "/?group=shop&due=overdue"),
        (1, "in progress", "2 VMs", "/?group=shop&due=started"),
        (2, "within 1 h", "2 VMs", "/?group=shop&due=1h"),
        (1, "later", "1 VM, 1 by users", "/?group=shop&due=later"),
        (3, "not watched", "1 with an event", "/fleet?group=shop&status=unwatched"),
        (13, "VMs", "4 with events", "/fleet?group=shop"),
    ]


@pytest.mark.parametrize(
    ("dues", "given", "text"),
    [
        ({}, {"vms": 0}, "No VM has reported yet"),
        ({}, {"is_filtered": True}, "No open event matches the filter"),
        *(
            ({}, {"is_filtered": True, "unmatched": what}, f"No {what} matches the filter")
            for what in ("VM", "event")
        ),
        ({}, {}, "Nothing is scheduled"),
        (
            {"started": (46, 0, 50), "1h": (192, 0, 350), "overdue": (5, 0, 5), "later": (9, 0, 9)},
            {},
            "5 overdue, 46 in progress, 192 within the hour",
        ),
        ({"1h": (1, 0, 1)}, {}, "1 within the hour"),
        ({"later": (2, 0, 1)}, {}, "Nothing within the hour, 2 later"),
        ({"gone": (2, 0, 1)}, {}, "Nothing is scheduled"),
    ],
)
def test_the_headline_says_what_is_urgent(
    dues: dict[str, tuple[int, int, int]], given: dict[str, Any], text: str
) -> None:
    assert now.headline(dues, **{"vms": 9, "is_filtered": False, **given}) == text


@pytest.mark.parametrize(
    ("unwatched", "text"),
    [(0, ""), (1, "; 1 VM not watched"), (27, "; 27 VMs not watched")],
)
def test_the_headline_says_how_many_vms_nobody_watches(unwatched: int, text: str) -> None:
    assert now.unwatched(Counter({"unwatched": unwatched, "": 48})) == text


def test_a_filter_survives_the_way_through_an_address() -> None:
    given = [("vm", " web "), ("unknown", "x"), ("group", "b"), ("group", "a"), ("group", "b"), ("vm", "db")]
    found = read_filter(given)
    assert found == Filter(vm="web", group=("b", "a"))
    assert found.query(type="Reboot", page="2") == "?vm=web&group=b&group=a&type=Reboot&page=2"
    assert found.query(without=("group", "b")) == "?vm=web&group=a"


def test_a_short_notice_is_named_as_one() -> None:
    assert notice_text(ROW) == ("15 min", "at least Microsoft's 15 min")
    short = replace(ROW, notice_seconds=600.0)
    assert notice_text(short) == ("10 min", "less than Microsoft's 15 min")
    late = replace(short, seen_late=True)
    assert notice_text(late) == ("10 min or more", "the VM started to watch only then")


def test_the_story_names_who_saw_a_change_and_what_changed() -> None:
    vm, before = FleetVm("web-0"), event()
    planned = datetime(2026, 11, 20, 13, 15, tzinfo=UTC).timestamp()
    after = event(minutes=10)
    change = only(received(vm.change("updated", after, previous=before, changed=["NotBefore"])))
    report = ReportRow(
        kind=change.kind, at=AT, vm="web-0", body=change.body, seen_by=(("web-0", AT), ("web-1", AT + 4))
    )
    updated, waiting = story(ROW, [report], [VM], AT)
    assert updated.seen_by == "seen by 2 VMs within 4.0 s, last by web-1"
    assert updated.lines == (("NotBefore: ", planned, " → ", planned - 300),)
    assert waiting.title == "Waiting for NotBefore, or an approval"
    affected, other = witnesses(replace(ROW, resources=("web-1",)), [report], [VM], {})
    assert (affected.name, affected.is_affected, affected.vm) == ("web-1", True, None)
    assert (other.name, other.is_affected, other.vm) == ("web-0", False, VM)
    assert (affected.saw, other.saw) == ("Updated +4.0 s", "Updated")


def test_an_affected_vm_that_did_not_see_the_event_comes_first() -> None:
    change = only(received(FleetVm("web-0").change("scheduled", event())))
    report = ReportRow(kind=change.kind, at=AT, vm="web-0", body=change.body, seen_by=(("web-0", AT),))
    found = witnesses(ROW, [report], [VM], {})
    assert [(one.name, one.first_at) for one in found] == [("web-1", None), ("web-0", AT)]
    came_back = replace(ROW, first_seen_at=AT + 20)
    assert [one.saw for one in witnesses(came_back, [report], [VM], {})] == ["", ""]


def test_a_receipt_names_who_asked_and_what_it_releases() -> None:
    receipt = only(received(FleetVm("web-0").receipt(event(), outcome="rejected", reason="denied")))
    report = ReportRow(kind=receipt.kind, at=AT, vm="web-0", body=receipt.body, seen_by=())
    step = story(replace(ROW, is_open=False), [report], [], AT)[0]
    assert (step.title, step.seen_by) == ("Approval rejected", "by web-0")
    assert step.lines == (
        ("Reason: denied",),
        ("Requested by ana@contoso.example: drained",),
        ("Releases web-0",),
    )


RUNNING: dict[str, Any] = {"due": "started", "starts_at": AT - 300}
OVERDUE = "Overdue: NotBefore was 5 h ago, no start reported"


@pytest.mark.parametrize(
    ("changes", "vms", "title"),
    [
        ({}, {}, "Waiting for NotBefore, or an approval"),
        ({"due": "overdue", "not_before": AT - 5 * 3600}, {}, OVERDUE),
        (RUNNING, {}, "Started 5 min ago, no end reported"),
        (
            {**RUNNING, "starts_at": AT - 25 * 3600, "resources": ("web-0",)},
            {"watch": "silent"},
            "Started 1 d 1 h ago, no end reported, the VM is silent",
        ),
        (RUNNING, {"watch": "stopped"}, "Started 5 min ago, no end reported, 1 of 2 VMs are stopped"),
        (
            {"due": "gone", "event_type": "Preempt", "starts_at": AT - 3600},
            {},
            "The VM is probably gone: nothing was heard of it since, and nobody reported the end",
        ),
    ],
)
def test_the_story_ends_with_what_the_event_waits_for(
    changes: dict[str, Any], vms: dict[str, Any], title: str
) -> None:
    waiting = only(story(replace(ROW, **changes), [], [replace(VM, **vms)], AT))
    assert waiting.title == title


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *((text, f"'{text}") for text in ("=1+1", "+1", "-1", "@x", "\tx", " =1", "\uff1d1")),
        ("web-0;=1+1", "web-0;'=1+1"),
        ("web-0\n=1+1", "web-0\n'=1+1"),
        ("web-0, -1", "web-0,' -1"),
    ],
)
def test_no_cell_of_the_csv_nor_a_part_of_one_is_a_formula(name: str, cell: str) -> None:
    _, line = history.write_csv(iter([replace(ROW, resources=(name,))]))
    assert next(csv.reader(io.StringIO(line, newline="")))[9] == cell


# What has to be right before an approval is sent

ANA = Person(name="ana", is_viewer=True, is_approver=True)
BEN = Person(name="ben", is_viewer=True, is_approver=True)
EVE = Person(name="eve", is_viewer=True, is_approver=False)
SESSION = "session"
REBOOT = replace(ROW, event_id="4CAEA225-FCD853", key="4caea225-fcd853")


class RecordedApprovals:
    """Approvals that record what would be sent."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.sent: list[tuple[str, str, str, str, str]] = []
        self.approvals = Approvals(send=self._send, clock=self.clock)
        resource_id = "/subscriptions/s/resourceGroups/shop/providers/x/web-0"
        self.vms = [replace(VM, resource_id=resource_id, subscription="s")]

    def _send(self, event_id: str, vm: Vm, reason: str, person: str) -> str:
        self.sent.append((event_id, vm.name, f"{vm.subscription_id}.{vm.resource_group}", reason, person))
        return "command"

    def fields(self, **changes: str) -> dict[str, str]:
        given = {
            "token": self.approvals.token(SESSION, ANA),
            "shown": digest(REBOOT),
            "confirm": "D853",
            "reason": "drained",
        }
        return {**given, **changes}

    def approve(
        self, given: dict[str, str], event: EventRow = REBOOT, person: Person = ANA, session: str = SESSION
    ) -> str:
        return self.approvals.approve(event, self.vms, person, session, given)


@pytest.fixture
def rig() -> RecordedApprovals:
    return RecordedApprovals()


def test_the_form_and_the_command_name_the_vm_whose_listener_gets_it(rig: RecordedApprovals) -> None:
    assert rig.approvals.receiver(REBOOT, rig.vms, ANA) == "web-0"
    assert rig.approve(rig.fields()) == "command"
    assert rig.sent == [("4CAEA225-FCD853", "web-0", "s.shop", "drained", "ana")]


def test_the_command_goes_to_a_vm_that_is_heard_of(rig: RecordedApprovals) -> None:
    vm = only(rig.vms)
    rig.vms = [replace(vm, watch="silent"), replace(vm, name="web-1", folded="web-1")]
    rig.approve(rig.fields())
    assert rig.sent[0][1] == "web-1"


@pytest.mark.parametrize(
    "event",
    [
        replace(REBOOT, status="Started"),
        replace(REBOOT, is_open=False, status="Canceled"),
        replace(REBOOT, resources=()),
    ],
)
def test_only_what_is_scheduled_can_be_approved(rig: RecordedApprovals, event: EventRow) -> None:
    assert rig.approvals.receiver(event, rig.vms, ANA) is None
    with pytest.raises(NotApproved):
        rig.approve(rig.fields(), event)
    assert not rig.sent


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token": ""}, "session has expired"),
        ({"token": "guessed"}, "session has expired"),
        ({"token": "\u00e9\ud800"}, "session has expired"),
        ({"reason": " "}, "needs a reason"),
        ({"shown": "x"}, "has changed"),
        ({"confirm": "D85"}, "last 4 characters"),
        ({"confirm": ""}, "last 4 characters"),
    ],
)
def test_a_form_that_is_not_filled_in_sends_nothing(
    rig: RecordedApprovals, changes: dict[str, str], why: str
) -> None:
    with pytest.raises(NotApproved, match=why):
        rig.approve(rig.fields(**changes))
    assert not rig.sent


@pytest.mark.parametrize(
    "change",
    [
        {"resources": ("web-0", "web-1", "db-0")},
        {"event_type": "Redeploy"},
        {"event_source": "User"},
        {"duration_seconds": 3600},
        {"not_before": AT + 60},
        {"description": "Another host"},
        {"group": "other"},
        {"first_seen_at": AT + 60},  # it was canceled, and announced again
    ],
)
def test_an_event_that_has_changed_meanwhile_is_not_approved(
    rig: RecordedApprovals, change: dict[str, Any]
) -> None:
    with pytest.raises(NotApproved, match="has changed"):
        rig.approve(rig.fields(), replace(REBOOT, **change))
    assert not rig.sent


def test_receipts_and_the_time_leave_the_form_as_it_is(rig: RecordedApprovals) -> None:
    rig.approve(rig.fields(), replace(REBOOT, approval="rejected", last_change_at=AT, due="overdue", seen=2))
    assert rig.sent


def test_the_form_of_another_person_or_session_does_not_count(rig: RecordedApprovals) -> None:
    for person, session in ((BEN, SESSION), (ANA, "another"), (ANA, "")):
        with pytest.raises(NotApproved, match="session has expired"):
            rig.approve(rig.fields(), person=person, session=session)


def test_who_may_not_approve_gets_no_form_and_sends_nothing(rig: RecordedApprovals) -> None:
    assert rig.approvals.receiver(REBOOT, rig.vms, EVE) is None
    with pytest.raises(NotApproved, match="none of the groups"):
        rig.approve(rig.fields(), person=EVE)


def test_approvals_are_limited_in_a_minute(rig: RecordedApprovals) -> None:
    for _ in range(20):
        rig.approve(rig.fields())
    with pytest.raises(NotApproved, match="wait a moment"):
        rig.approve(rig.fields())
    rig.clock.advance(61)
    rig.approve(rig.fields())
