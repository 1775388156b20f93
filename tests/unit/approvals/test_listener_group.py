"""Events of several VMs, and several events of one set: programs, turns and approvals of one listener."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.support.listener import ListenerRig, MakeListener
from tests.support.machine import program
from tests.support.only import only

DRAIN, FIRST, SECOND = program(), program("first"), program("second")
TIMEOUT = {"run_timeout_seconds": 60}


@pytest.fixture
def make_rig(make_listener: MakeListener) -> MakeListener:
    """Make a listener with one auto rule that prepares, unless others are given."""

    def make(*, auto: list[dict[str, Any]] | None = None, **rule: Any) -> ListenerRig:
        more = {name: rule.pop(name) for name in ("policy", "dry_run") if name in rule}
        rules = auto or [{"run": [DRAIN], "group": True, **TIMEOUT, **rule}]
        return make_listener(**{"policy": {"allow": [{}]}, **more}, auto=rules)

    return make


@pytest.fixture
def rig(make_rig: MakeListener) -> ListenerRig:
    return make_rig()


# Prepare, do not approve


@pytest.mark.parametrize("event_type", ["Reboot", "Terminate"])
def test_every_vm_prepares_for_an_event_of_several_and_none_approves_it(
    rig: ListenerRig, event_type: str
) -> None:
    event = rig.announce("web-1", "WEB-0", EventType=event_type, wait=2)
    assert len(rig.machine.running) == 1
    rig.clock.advance(7)
    rig.end_programs(wait=60)
    prepared = only(rig.prepared())
    data = prepared["data"]
    assert (prepared["subject"], prepared["correlationid"], prepared["partitionkey"]) == (event,) * 3
    assert (data["EventId"], data["EventType"], data["Resources"]) == (event, event_type, ["web-1", "WEB-0"])
    assert (data["NotBeforeUtc"], data["Vm"]["Name"]) == ("2037-01-19T22:26:58.000Z", "web-0")
    assert data["DurationSeconds"] >= 7
    assert (rig.imds.posts, rig.receipts(), len(rig.machine.runs)) == ([], [], 1)
    assert rig.why(event) == "prepared; it names several VMs, so no rule approves it"


@pytest.mark.parametrize("resources", [["web-0", ""], ["web-0", None], ["web-0", 7]])
def test_resources_that_cannot_be_read_may_be_other_vms(rig: ListenerRig, resources: list[Any]) -> None:
    rig.announce(Resources=resources, wait=2)
    rig.end_programs(wait=5)
    assert (rig.imds.posts, len(rig.prepared())) == ([], 1)


def test_a_command_approves_a_prepared_event_of_several_vms_and_one_whose_program_runs_or_failed(
    rig: ListenerRig,
) -> None:
    for result, detail in ((0, ""), (None, "its program had not ended"), (3, "its program had failed")):
        event = rig.announce("web-0", "web-1", wait=1)
        if result is not None:
            rig.end_programs(wait=2, code=result)
        assert rig.decide(event, id=f"c{result}")["Detail"] == detail
        rig.end_programs()
    assert len(rig.imds.approved) == 3
    assert len(rig.prepared()) == 2


@pytest.mark.parametrize(
    "change", [{"NotBefore": "Tue, 20 Jan 2037 22:26:58 GMT"}, {"Resources": ["web-0"]}], ids=str
)
def test_a_prepared_event_that_changes_is_so_as_it_is_and_one_that_shrinks_to_this_vm_is_approved(
    rig: ListenerRig, change: dict[str, Any]
) -> None:
    event = rig.prepare("web-0", "web-1")
    rig.change(event, **change, wait=3)
    assert (len(rig.machine.runs), len({one["id"] for one in rig.prepared()})) == (1, 2)
    assert rig.imds.approved == ([event] if "Resources" in change else [])


@pytest.mark.parametrize(
    ("rule", "resources"),
    [
        ({}, ["web-0", "_WEB-0"]),
        ({"run": [DRAIN], "group": True}, ["web-0", "WEB-0"]),
        ({"group": True}, ["web-1", "WEB-1", "web-0"]),
    ],
)
def test_a_vm_that_is_named_twice_is_one_vm(
    make_rig: MakeListener, rule: dict[str, Any], resources: list[str]
) -> None:
    rig = make_rig(auto=[rule])
    event = rig.announce(*resources, wait=2)
    rig.end_programs(wait=10)
    assert rig.imds.approved == [event]


# Which rule decides


def test_the_first_rule_in_the_file_decides_also_where_it_only_prepares(make_rig: MakeListener) -> None:
    rig = make_rig(auto=[{"run": [DRAIN], "group": True}, {"group": True}])
    rig.announce("web-0", "web-1", wait=2)
    rig.end_programs(wait=60)
    assert (rig.imds.posts, len(rig.prepared())) == ([], 1)


def test_the_first_rule_decides_although_a_later_one_waits_less(make_rig: MakeListener) -> None:
    rig = make_rig(auto=[{"group": True}, {"event_type": ["Reboot"], "group": True, "max_unavailable": 5}])
    event = rig.announce("web-1", "web-0", wait=8)
    assert rig.imds.posts == []
    rig.run(5)
    assert rig.imds.approved == [event]


def test_the_rule_that_began_decides_until_its_program_has_ended_and_a_result_counts_for_its_own_rule(
    make_rig: MakeListener,
) -> None:
    rig = make_rig(auto=[{"run": [FIRST], "min_notice_seconds": 60}, {"run": [SECOND]}])
    event = rig.announce(NotBefore=rig.notice(90), wait=40)
    assert rig.machine.names == [FIRST]
    rig.end_programs()
    assert (rig.machine.names, rig.imds.posts) == ([FIRST, SECOND], [])
    rig.end_programs()
    assert rig.imds.approved == [event]


def test_a_failure_of_one_rules_program_does_not_decide_for_the_next_rule(make_rig: MakeListener) -> None:
    rig = make_rig(auto=[{"run": [FIRST], "min_notice_seconds": 60}, {"run": [SECOND]}])
    event = rig.announce(NotBefore=rig.notice(90), wait=28)
    rig.end_programs(wait=4, code=1)
    assert rig.imds.posts == []
    rig.end_programs()
    assert (rig.machine.names, rig.imds.approved) == ([FIRST, SECOND], [event])
    assert rig.reasons() == ["not_prepared", "approved"]


@pytest.mark.parametrize(
    ("settings", "resources", "why"),
    [
        ({"auto": [{}], "policy": {"deny": [{}]}}, ["web-0"], "a deny rule matches"),
        ({"auto": [{"run": [DRAIN]}]}, ["web-0", "web-1"], "several VMs, and auto rule 1 is not for those"),
        ({"auto": [{"event_type": ["Freeze"]}]}, ["web-0"], "no auto rule matches"),
        ({"auto": [{"group": True}]}, ["web-1", "web-0"], "before this one in Resources approve it first"),
        ({"auto": [{"max_unavailable": 1}]}, ["web-0"], "settling"),
    ],
)
def test_what_a_rule_leaves_alone_has_its_reason_in_the_status_and_once_in_the_log_and_no_receipt(
    make_rig: MakeListener, caplog: pytest.LogCaptureFixture, settings: Any, resources: Any, why: str
) -> None:
    rig = make_rig(**settings)
    event_id = rig.imds.schedule(*resources)
    with caplog.at_level(logging.INFO):
        rig.run(4)
    assert why in rig.why(event_id)
    assert sum(why in line for line in caplog.messages) == 1
    assert (rig.receipts(), rig.imds.posts) == ([], [])


# Turns


def test_programs_wait_for_their_turn_and_say_behind_whom(make_rig: MakeListener) -> None:
    rig = make_rig(max_unavailable=1)
    first = rig.imds.schedule("web-3", NotBefore=rig.notice(600))
    own = rig.announce("web-0", NotBefore=rig.notice(900), wait=20)
    assert rig.machine.runs == []
    assert rig.why(own) == "waits for its turn behind web-3 (Reboot, in 10 min)"
    rig.remove(first, wait=4)
    assert (rig.machine.runs, rig.why(own)) == ([], "settling")
    rig.run(3)
    assert len(rig.machine.running) == 1
    rig.end_programs()
    assert rig.imds.approved == [own]


def test_at_the_deadline_a_program_starts_without_a_turn_but_nothing_is_approved_beside_others(
    make_rig: MakeListener,
) -> None:
    rig = make_rig(max_unavailable=1)
    rig.imds.schedule("web-3", EventStatus="Started", NotBefore="")
    own = rig.announce("web-0", NotBefore=rig.notice(100), wait=28)
    assert rig.machine.runs == []
    rig.run(5)
    assert len(rig.machine.running) == 1
    rig.end_programs(wait=10)
    assert rig.imds.posts == []
    assert rig.why(own).startswith("prepared, waits for its turn behind web-3 (Reboot")


def test_an_event_with_a_turn_is_not_approved_beside_one_that_is_past_its_deadline(
    make_rig: MakeListener,
) -> None:
    rig = make_rig(max_unavailable=1)
    own = rig.announce("web-0", NotBefore=rig.notice(900), wait=7)
    late = rig.imds.schedule("web-3", NotBefore=rig.notice(60))
    rig.end_programs(wait=10)
    assert rig.imds.posts == []
    assert rig.why(own).startswith("prepared, approval waits behind web-3")
    rig.remove(late, wait=2)
    assert rig.imds.approved == [own]


def test_a_turn_is_kept_over_a_restart(make_rig: MakeListener) -> None:
    rig = make_rig(max_unavailable=1)
    own = rig.announce("web-0", NotBefore=rig.notice(900), wait=7)
    rig.imds.schedule("web-3", NotBefore=rig.notice(300))
    rig.restart()
    rig.machine.runs.clear()
    rig.run(1)
    assert len(rig.machine.running) == 1
    rig.end_programs()
    assert rig.imds.approved == [own]


@pytest.mark.parametrize("status", ["Scheduled", "Started"])
def test_a_turn_of_another_vm_counts_for_five_minutes_after_a_reset_has_lost_its_event(
    make_rig: MakeListener, status: str
) -> None:
    rig = make_rig(max_unavailable=1)
    rig.imds.incarnation = 100
    other = rig.announce("web-3", NotBefore=rig.notice(3600), wait=7)
    rig.change(other, EventStatus=status, wait=2)
    rig.imds.incarnation = 0
    rig.show(wait=2)
    own = rig.announce("web-0", NotBefore=rig.notice(900), wait=290)
    assert (rig.machine.runs, "waits for its turn behind web-3" in rig.why(own)) == ([], True)
    rig.run(20)
    assert len(rig.machine.running) == 1


@pytest.mark.parametrize("not_before", [None, ""])
def test_an_event_without_a_not_before_is_prepared_at_once(
    make_rig: MakeListener, not_before: str | None
) -> None:
    rig = make_rig(max_unavailable=1)
    rig.imds.schedule("web-3", NotBefore=rig.notice(600))
    rig.announce("web-0", NotBefore=not_before)
    assert len(rig.machine.running) == 1


def test_a_not_before_at_the_begin_of_time_is_past_its_deadline(make_rig: MakeListener) -> None:
    """So .NET writes a time that nobody has set."""
    rig = make_rig(max_unavailable=1)
    rig.announce(NotBefore="0001-01-01T00:00:00Z", wait=1)
    assert len(rig.machine.runs) == 1


def test_a_terminate_neither_waits_nor_counts(make_rig: MakeListener) -> None:
    rig = make_rig(max_unavailable=1)
    rig.imds.schedule("web-3", NotBefore=rig.notice(600))
    own = rig.prepare("web-0", EventType="Terminate", NotBefore=rig.notice(900))
    assert rig.imds.approved == [own]


def test_a_rule_without_a_program_waits_for_its_turn_without_a_deadline(make_rig: MakeListener) -> None:
    rig = make_rig(auto=[{"max_unavailable": 1}])
    first = rig.imds.schedule("web-3", NotBefore=rig.notice(60))
    own = rig.announce("web-0", NotBefore=rig.notice(90), wait=85)
    assert rig.imds.posts == []
    rig.remove(first, wait=7)
    assert rig.imds.approved == [own]


def test_a_command_passes_by_the_turns(make_rig: MakeListener) -> None:
    rig = make_rig(max_unavailable=1)
    rig.imds.schedule("web-3", NotBefore=rig.notice(600))
    own = rig.announce("web-0", NotBefore=rig.notice(900), wait=2)
    data = rig.decide(own)
    assert (data["Reason"], data["Detail"]) == ("approved", "its program had not ended")


# Starting unprepared


@pytest.mark.parametrize("code", [0, 1, None])
def test_an_event_that_starts_unprepared_is_counted_and_logged_once(
    rig: ListenerRig, caplog: pytest.LogCaptureFixture, code: int | None
) -> None:
    event = rig.announce("web-0", "web-1")
    if code is not None:
        rig.machine.finish(code=code)
    rig.change(event, EventStatus="Started", NotBefore="", wait=10)
    is_prepared = code == 0
    assert rig.programs["unprepared"] == (not is_prepared)
    assert sum("has started unprepared" in line for line in caplog.messages) == (not is_prepared)
    assert len(rig.prepared()) == is_prepared
    for _ in range(2):  # also after a restart, until the event is over
        shown = [(one.Why, one.NeedsPerson) for one in rig.listener.status().auto or ()]
        why = "it started before its program had succeeded: look after what ran on this VM"
        assert shown == ([] if is_prepared else [(why, True)])
        rig.restart(wait=5)
    rig.remove(event, wait=5)
    assert rig.listener.status().auto == []


def test_what_a_program_has_prepared_is_committed_with_its_record_before_any_post(rig: ListenerRig) -> None:
    rig.announce()
    rig.end_programs(wait=1)
    prepared = only(rig.prepared())
    assert prepared["reporter"] == "web-0/listen"
    assert int(prepared["reporterseq"]) < int(rig.receipts()[0]["reporterseq"])


def test_a_dry_run_prepares_nothing(make_rig: MakeListener) -> None:
    rig = make_rig(dry_run=True, max_unavailable=1)
    rig.imds.schedule("web-0", "web-1")
    rig.announce(wait=20)
    assert (rig.machine.runs, rig.prepared(), rig.imds.posts) == ([], [], [])
