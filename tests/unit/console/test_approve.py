"""What has to be right before an approval is sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge.console.access import Person
from bridge.console.approve import Approvals, NotApproved
from bridge.console.rows import EventRow
from bridge.imds.instance import Vm
from tests.support.clock import MovedClock
from tests.unit.console.test_views import AT, VM
from tests.unit.console.test_views import ROW as AT_OTHER_TIME

ANA = Person(name="ana", is_viewer=True, is_approver=True)
BEN = Person(name="ben", is_viewer=True, is_approver=True)
EVE = Person(name="eve", is_viewer=True, is_approver=False)
SESSION = "session"
ROW = replace(AT_OTHER_TIME, event_id="4CAEA225-FCD853", key="4caea225-fcd853")


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
        form = self.approvals.form(ROW, self.vms, ANA)
        assert form
        given = {
            "token": self.approvals.token(SESSION, ANA),
            "shown": form.shown,
            "confirm": "D853",
            "reason": "drained",
        }
        return {**given, **changes}

    def approve(
        self, given: dict[str, str], event: EventRow = ROW, person: Person = ANA, session: str = SESSION
    ) -> str:
        return self.approvals.approve(event, self.vms, person, session, given)


def test_the_command_names_who_asks_why_and_the_listener() -> None:
    rig = RecordedApprovals()
    assert rig.approve(rig.fields()) == "command"
    assert rig.sent == [("4CAEA225-FCD853", "web-0", "s.shop", "drained", "ana")]


def test_the_form_names_the_vm_whose_listener_gets_the_command() -> None:
    rig = RecordedApprovals()
    form = rig.approvals.form(ROW, rig.vms, ANA)
    assert form
    assert form.vm == "web-0"


def test_the_command_goes_to_a_vm_that_is_heard_of() -> None:
    rig = RecordedApprovals()
    (vm,) = rig.vms
    rig.vms = [replace(vm, watch="silent"), replace(vm, name="web-1", folded="web-1")]
    rig.approve(rig.fields())
    assert rig.sent[0][1] == "web-1"


@pytest.mark.parametrize(
    "event",
    [
        replace(ROW, status="Started"),
        replace(ROW, is_open=False, status="Canceled"),
        replace(ROW, resources=()),
    ],
)
def test_only_what_is_scheduled_can_be_approved(event: EventRow) -> None:
    rig = RecordedApprovals()
    assert rig.approvals.form(event, rig.vms, ANA) is None
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
def test_a_form_that_is_not_filled_in_sends_nothing(changes: dict[str, str], why: str) -> None:
    rig = RecordedApprovals()
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
        {"stay": AT - 60},  # it was canceled, and announced again
    ],
)
def test_an_event_that_has_changed_meanwhile_is_not_approved(change: dict[str, Any]) -> None:
    rig = RecordedApprovals()
    with pytest.raises(NotApproved, match="has changed"):
        rig.approve(rig.fields(), replace(ROW, **change))
    assert not rig.sent


def test_receipts_and_the_time_leave_the_form_as_it_is() -> None:
    rig = RecordedApprovals()
    rig.approve(rig.fields(), replace(ROW, approval="rejected", last_change_at=AT, due="overdue", seen=2))
    assert rig.sent


def test_the_form_of_another_person_or_session_does_not_count() -> None:
    rig = RecordedApprovals()
    for person, session in ((BEN, SESSION), (ANA, "another"), (ANA, "")):
        with pytest.raises(NotApproved, match="session has expired"):
            rig.approve(rig.fields(), person=person, session=session)


def test_who_may_not_approve_gets_no_form_and_sends_nothing() -> None:
    rig = RecordedApprovals()
    assert rig.approvals.form(ROW, rig.vms, EVE) is None
    with pytest.raises(NotApproved, match="none of the groups"):
        rig.approve(rig.fields(), person=EVE)


def test_approvals_are_limited_in_a_minute() -> None:
    rig = RecordedApprovals()
    for _ in range(20):
        rig.approve(rig.fields())
    with pytest.raises(NotApproved, match="wait a moment"):
        rig.approve(rig.fields())
    rig.clock.advance(61)
    rig.approve(rig.fields())
