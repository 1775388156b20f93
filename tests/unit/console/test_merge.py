"""One event out of what several VMs reported, in whatever order."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bridge.console.merge import Report, ScheduledEvent, merge
from tests.support.only import only

START = 1_763_640_000.0  # 12:00:00
_STATUS = {"completed": "Completed", "ended": "Ended", "canceled": "Canceled", "started": "Started"}


def report(kind: str, seconds: float = 0.0, **data: Any) -> Report:
    given = {"EventId": "E-1", "EventType": "Reboot", "EventStatus": _STATUS.get(kind, "Scheduled"), **data}
    return Report(kind=kind, at=START + seconds, data=given)


def merged(*reports: Report) -> ScheduledEvent:
    found = merge(reports)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("ends", "believed"),
    [
        ({"canceled": {}, "ended": {}}, "Ended"),
        ({"ended": {}, "completed": {}}, "Completed"),
        ({"canceled": {}, "completed": {}, "ended": {}}, "Completed"),
        ({"canceled": {}}, "Canceled"),
        # A VM that watched without interruption is believed first.
        ({"canceled": {}, "ended": {"EndReason": "Restart"}}, "Canceled"),
        ({"canceled": {}, "completed": {"VmRebooted": True}}, "Canceled"),
        ({"ended": {"EndReason": "NotBeforePassed"}, "canceled": {}}, "Ended"),
        ({"ended": {"EndReason": "Gap"}, "completed": {"VmRebooted": True}}, "Completed"),
    ],
)
def test_of_several_ends_completed_is_believed_before_ended_before_canceled(
    ends: dict[str, dict[str, Any]], believed: str
) -> None:
    reports = [report(kind, 10 + number, **data) for number, (kind, data) in enumerate(ends.items())]
    for order in itertools.permutations([report("scheduled"), *reports]):
        found = merged(*order)
        assert (found.status, found.is_open) == (believed, False)


def test_reports_give_the_same_event_in_every_order() -> None:
    reports = [
        report("scheduled", 0, Resources=["web-0"], NotBeforeUtc="2025-11-20T12:15:00Z"),
        report("updated", 5, Resources=["web-0", "web-1"], NotBeforeUtc="2025-11-20T12:14:00Z"),
        report("started", 9, NotBefore=""),
        report("approval.accepted", 3),
        report("completed", 20),
    ]
    view = only({merged(*order) for order in itertools.permutations(reports)})
    assert (view.resources, view.approval) == (("web-0", "web-1"), "accepted")
    assert (view.first_seen_at, view.started_at, view.ended_at) == (START, START + 9, START + 20)


SEEN, STARTED, AGAIN = report("scheduled"), report("started", 5), report("scheduled", 400)
BACK = report("updated", 7, PreviousStatus="Started")
STATUSES: dict[str, tuple[list[Report], str, bool]] = {
    "a VM that lags behind does not take back a start": (
        [SEEN, STARTED, report("updated", 7, PreviousStatus="Scheduled")],
        "Started",
        True,
    ),
    "a start that IMDS takes back is scheduled again": ([SEEN, STARTED, BACK], "Scheduled", True),
    "a late report of another VM does not reopen it": (
        [SEEN, report("completed", 10), report("updated", 40)],
        "Completed",
        False,
    ),
    "one that is reported long after its end is open again": (
        [SEEN, report("ended", 10), AGAIN],
        "Scheduled",
        True,
    ),
    "the end after a return is the one that counts": (
        [SEEN, report("ended", 10), AGAIN, report("canceled", 500)],
        "Canceled",
        False,
    ),
    "a status is read in any case": ([SEEN, report("started", 5, EventStatus="STARTED")], "Started", True),
}


@pytest.mark.parametrize(("reports", "status", "is_open"), STATUSES.values(), ids=STATUSES)
def test_an_event_has_the_status_of_its_reports(reports: list[Report], status: str, is_open: bool) -> None:
    found = merged(*reports)
    assert (found.status, found.is_open, found.ended_at is None) == (status, is_open, is_open)


def test_the_notice_is_from_the_first_report_to_the_first_not_before() -> None:
    found = merged(
        report("scheduled", NotBeforeUtc="2025-11-20T12:15:00Z"), report("started", 60, NotBeforeUtc=None)
    )
    assert found.notice_seconds == 900.0
    assert found.not_before == START + 900


def test_receipts_alone_are_no_event() -> None:
    assert merge([report("approval.rejected")]) is None


@pytest.mark.parametrize("value", [None, 7, "x", {"a": 1}, [1, None], 2**80, "\ud800"])
@pytest.mark.parametrize(
    "name", ["EventType", "Resources", "DurationInSeconds", "NotBeforeUtc", "Description"]
)
def test_a_property_may_have_any_value(name: str, value: object) -> None:
    merged(Report(kind="scheduled", at=START, data={"EventId": "E-1", name: value}))


def test_reports_of_the_same_time_are_in_the_order_of_an_events_life() -> None:
    reports = [
        report("scheduled", Resources=["web-0"]),
        report("updated", Resources=["web-0", "web-1"]),
        report("started", Resources=["web-0", "web-1", "web-2"]),
    ]
    views = {merged(*order) for order in itertools.permutations(reports)}
    assert [view.resources for view in views] == [("web-0", "web-1", "web-2")]


def test_the_group_is_that_of_a_vm_that_is_identified() -> None:
    known = {"Name": "web-0", "ResourceId": "/subscriptions/S/resourceGroups/Shop/providers/x"}
    found = merged(report("scheduled", Vm=known), report("started", 5, Vm={"Name": "web-1"}))
    assert (found.scope, found.subscription, found.group) == ("s/shop", "s", "shop")


def test_a_vm_that_is_prepared_is_no_outcome_of_a_command() -> None:
    reports = [report("scheduled"), report("approval.accepted", 1), report("approval.prepared", 2)]
    assert merged(*reports).approval == "accepted"
    assert merged(reports[0], reports[2]).approval == ""
