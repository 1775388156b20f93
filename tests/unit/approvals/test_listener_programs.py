"""Auto rules with a program, on doubles and with a clock that the test moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from bridge.errors import StateError
from tests.support.listener import ListenerRig, MakeListener
from tests.support.machine import program
from tests.support.only import only

DRAIN = program()


@pytest.fixture
def make_rig(make_listener: MakeListener) -> MakeListener:
    """Make a listener whose only auto rule, unless others are given, runs a program."""

    def make(*, auto: list[dict[str, Any]] | None = None, **rule: Any) -> ListenerRig:
        policy, dry_run = rule.pop("policy", {}), rule.pop("dry_run", False)
        rules = auto or [{"run": [DRAIN, "-v"], **rule}]
        return make_listener(policy=policy, dry_run=dry_run, auto=rules)

    return make


@pytest.fixture
def rig(make_rig: MakeListener) -> ListenerRig:
    return make_rig()


def reasons(rig: ListenerRig) -> list[tuple[str, str, str]]:
    """Return the outcome, reason and detail of each receipt."""
    return [
        (data["Outcome"], data["Reason"], data["Detail"])
        for data in (receipt["data"] for receipt in rig.receipts())
    ]


def test_an_event_is_approved_once_its_program_has_ended_with_0(rig: ListenerRig) -> None:
    event = rig.announce(wait=5)
    assert (rig.imds.posts, rig.receipts(), len(rig.machine.runs)) == ([], [], 1)
    rig.end_programs(wait=5)
    assert rig.imds.approved == [event]
    assert reasons(rig) == [("Accepted", "approved", "an auto rule")]
    assert (len(rig.machine.runs), len(rig.prepared())) == (1, 1)


def test_a_program_gets_the_event_as_it_is_published(rig: ListenerRig) -> None:
    event = rig.announce()
    run = only(rig.machine.runs)
    published = json.loads(run.body)
    assert published["type"] == "io.imdsbridge.scheduledevent.scheduled.v1"
    assert (published["subject"], published["data"]["AffectsThisVm"]) == (event, True)
    assert run.command == (DRAIN, "-v")
    assert (run.data["EventId"], run.data["NotBeforeUtc"]) == (event, "2037-01-19T22:26:58.000Z")
    assert run.timeout_seconds == 600


@pytest.mark.parametrize(
    ("end", "detail"),
    [
        ({"code": 3}, "exit code 3"),
        pytest.param(
            {"code": -9}, "it was ended by SIGKILL", marks=pytest.mark.posix("signals are of POSIX")
        ),
        ({"code": 0, "ended_by": "timeout"}, "it did not end in time"),
        ({"error": "No such file or directory"}, "it cannot be started: No such file or directory"),
    ],
)
def test_after_any_other_end_there_is_a_receipt_with_the_reason_and_the_program_is_tried_again_with_longer_pauses(
    rig: ListenerRig, end: dict[str, Any], detail: str
) -> None:
    event = rig.announce()
    for pause in (5, 10, 20):
        rig.machine.finish(**end)
        rig.run(pause - 1)
        assert rig.machine.running == []
        rig.run(2)
        assert len(rig.machine.running) == 1
        shown = only(rig.listener.status().auto or ())
        assert (shown.Why, shown.NeedsPerson) == (
            f"run {DRAIN} -v has failed, and is tried again: {detail}",
            True,
        )
    assert reasons(rig) == [("Rejected", "not_prepared", f"run {DRAIN}: {detail}")]
    assert (rig.imds.posts, rig.prepared(), rig.programs) == ([], [], {"failed": 3})
    rig.restart()
    rig.end_programs(wait=1)
    rig.end_programs()
    assert (rig.reasons(), rig.imds.approved) == (["not_prepared", "approved"], [event])


def test_a_program_that_ended_with_the_listener_runs_again(rig: ListenerRig) -> None:
    rig.announce()
    rig.finish()
    assert len(rig.machine.ended) == 1
    rig.restart(wait=0)
    assert len(rig.machine.runs) == 2


def test_a_listener_is_busy_while_a_program_runs_and_no_more_once_it_has_failed_itself(
    rig: ListenerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.prepare(wait=1)
    assert not rig.listener.is_busy()
    rig.announce(wait=1)
    assert rig.listener.is_busy()
    monkeypatch.setattr(rig.listener, "run_once", Mock(side_effect=StateError("damaged")))
    with pytest.raises(StateError):
        rig.listener.run()
    assert (rig.listener.is_busy(), len(rig.machine.ended)) == (False, 1)


@pytest.mark.parametrize("seconds", [100, 30, 9, -3, None])
@pytest.mark.parametrize("event_type", ["Preempt", "Reboot"])
def test_a_program_starts_at_once_and_has_its_whole_time_however_short_the_notice_and_goes_on_at_the_start(
    rig: ListenerRig, event_type: str, seconds: float | None
) -> None:
    not_before = "" if seconds is None else rig.notice(seconds)
    event = rig.announce(EventType=event_type, NotBefore=not_before, wait=1)
    assert [run.timeout_seconds for run in rig.machine.runs] == [600]
    rig.change(event, EventStatus="Started", NotBefore="", wait=20)
    rig.end_programs()
    assert (rig.machine.asked_to_end, rig.receipts(), rig.prepared(), rig.imds.posts) == ([], [], [], [])
    assert rig.programs == {"succeeded": 1, "unprepared": 1}


def test_no_program_starts_for_an_event_that_is_first_seen_started(rig: ListenerRig) -> None:
    rig.announce(EventStatus="Started", NotBefore="", wait=5)
    assert rig.machine.runs == []


@pytest.mark.parametrize(
    "change",
    [
        {"NotBefore": "Mon, 19 Jan 2037 22:26:59 GMT"},
        {"Description": "later"},
        {"DurationInSeconds": 60},
        {"Resources": ["web-0", "web-1"]},
    ],
    ids=str,
)
def test_a_change_that_leaves_the_event_this_vms_ends_no_program_and_its_result_counts_for_the_event_as_it_is(
    make_rig: MakeListener, change: dict[str, Any]
) -> None:
    rig = make_rig(group=True)
    event = rig.announce()
    rig.change(event, **change, wait=5)
    assert (len(rig.machine.runs), rig.machine.asked_to_end) == (1, [])
    rig.end_programs()
    assert (len(rig.machine.runs), len(rig.prepared())) == (1, 1)
    assert rig.imds.approved == ([] if "Resources" in change else [event])


def test_a_program_of_an_event_that_becomes_another_is_ended_and_runs_again(rig: ListenerRig) -> None:
    event = rig.announce()
    rig.machine.is_slow_to_end = True
    rig.change(event, EventType="Redeploy", wait=5)
    assert len(rig.machine.runs) == len(rig.machine.asked_to_end) == 1
    rig.end_programs(wait=1)
    assert (len(rig.machine.runs), rig.imds.posts, rig.prepared()) == (2, [], [])
    rig.end_programs(wait=1)
    assert rig.imds.posts == [(event,)]


def leave_and_return(rig: ListenerRig, event: str) -> None:
    events = rig.imds.events
    rig.remove(event, wait=3)
    rig.imds.show(*events)


def start_and_return(rig: ListenerRig, event: str) -> None:
    events = rig.imds.events
    rig.change(event, EventStatus="Started", NotBefore="", wait=3)
    rig.remove(event, wait=3)
    rig.imds.show(*events)


def start_and_be_scheduled_again(rig: ListenerRig, event: str) -> None:
    rig.change(event, EventStatus="Started", wait=3)
    rig.imds.change(event, EventStatus="Scheduled")


def return_unseen(rig: ListenerRig, _event: str) -> None:
    """Have IMDS fail while the event is away."""
    rig.imds.fail(500, methods=["document"])
    rig.run(6)
    rig.imds.restore()
    rig.imds.show(*rig.imds.events)


def return_during_a_restart(rig: ListenerRig, _event: str) -> None:
    rig.restart()
    rig.imds.show(*rig.imds.events)


def return_later(rig: ListenerRig, event: str) -> None:
    rig.remove(event, wait=3)
    rig.imds.schedule(event_id=event, NotBefore="Tue, 20 Jan 2037 22:26:58 GMT")


def change_in_place(rig: ListenerRig, event: str) -> None:
    rig.imds.change(event, NotBefore="Tue, 20 Jan 2037 22:26:58 GMT")


def change_and_restart(rig: ListenerRig, event: str) -> None:
    """Change the event while no listener runs, in a document that claims to be the same."""
    rig.imds.incarnation -= 1
    rig.imds.change(event, NotBefore="Tue, 20 Jan 2037 22:26:58 GMT")
    rig.restart()


def return_between_two_documents(rig: ListenerRig, event: str) -> None:
    """Have an event leave and return unseen: the incarnation is not the next one."""
    events = rig.imds.events
    rig.imds.remove(event)
    rig.imds.show(*events)


# What a preparation and an approval count for: how often the program runs, and the event is POSTed and answered.


@pytest.mark.parametrize(
    ("come_back", "counts"),
    [
        *((one, (2, 2, 2)) for one in (leave_and_return, start_and_return, return_later)),
        # prepared is the VM, approved the event as it is
        *((one, (1, 2, 2)) for one in (start_and_be_scheduled_again, change_in_place, change_and_restart)),
        # what nobody saw has put nothing back to work
        *((one, (1, 1, 1)) for one in (return_between_two_documents, return_unseen)),
        (return_during_a_restart, (1, 2, 1)),
    ],
)
def test_an_event_that_was_seen_to_leave_is_prepared_again_and_any_new_stay_is_approved_again(
    rig: ListenerRig,
    come_back: Callable[[ListenerRig, str], None],
    counts: tuple[int, int, int],
) -> None:
    runs, posts, receipts = counts
    event = rig.prepare()
    come_back(rig, event)
    rig.run(10)
    assert len(rig.machine.running) == runs - 1
    rig.end_programs()
    assert (len(rig.machine.runs), len(rig.imds.posts), rig.reasons()) == (
        runs,
        posts,
        ["approved"] * receipts,
    )
    assert (
        len({one["id"] for one in rig.receipts()}) == len({one["id"] for one in rig.prepared()}) == receipts
    )


@pytest.mark.parametrize("same_boot", [True, False])
def test_over_a_restart_a_preparation_counts_in_the_same_boot(
    make_rig: MakeListener, same_boot: bool
) -> None:
    rig = make_rig(group=True)
    rig.prepare("web-0", "web-1")
    rig.boot_id = rig.boot_id if same_boot else ""  # not known: each start counts as one
    rig.imds.show(*rig.imds.events)
    rig.restart(wait=5)
    assert len(rig.machine.runs) == (1 if same_boot else 2)


def test_a_drain_does_not_count_for_an_event_that_returns_before_it_was_posted(rig: ListenerRig) -> None:
    event = rig.announce()
    rig.imds.fail(429, methods=["approve"])
    rig.end_programs()
    leave_and_return(rig, event)
    rig.imds.restore()
    rig.run(10)
    assert (rig.imds.approved, len(rig.machine.running)) == ([], 1)


def test_a_post_without_an_outcome_is_answered_for_the_event_as_it_was_and_repeated_as_it_is(
    rig: ListenerRig,
) -> None:
    rig.imds.fail(500, methods=["approve"], count=1)
    event = rig.announce()
    rig.end_programs(wait=1)
    change_in_place(rig, event)
    rig.run(10)
    assert rig.reasons() == ["unknown_outcome", "approved"]
    assert "has changed or returned since" in reasons(rig)[0][2]
    assert (len(rig.imds.posts), len(rig.machine.runs), len(rig.prepared())) == (2, 1, 2)


def test_commands_are_decided_while_a_program_runs(make_rig: MakeListener) -> None:
    rig = make_rig(policy={"allow": [{"event_type": ["Freeze"]}]}, event_type=["Reboot"])
    rig.announce()
    other = rig.imds.schedule(EventType="Freeze")
    assert rig.decide(other)["Reason"] == "approved"
    assert len(rig.machine.running) == 1


def test_programs_for_two_events_run_at_the_same_time(rig: ListenerRig) -> None:
    events = {rig.imds.schedule(), rig.imds.schedule()}
    rig.run()
    assert {run.data["EventId"] for run in rig.machine.runs} == events
    assert len(rig.machine.running) == 2


@pytest.mark.parametrize("fails", [None, "document", "approve"])
def test_a_program_may_take_longer_than_commands_wait_for_imds(
    make_rig: MakeListener, fails: str | None
) -> None:
    rig = make_rig(run_timeout_seconds=3600)
    event = rig.announce()
    if fails:
        rig.imds.fail(429, methods=[fails])
    rig.run(700)
    rig.end_programs(wait=5)
    rig.imds.restore()
    rig.run(60)
    assert rig.imds.approved == [event]
    assert rig.reasons() == ["approved"]


def kill(rig: ListenerRig) -> None:
    """Kill the process, and the program with it."""
    rig.machine.finish(code=-9, ended_by="stop")
    rig.restart()


def boot(rig: ListenerRig) -> None:
    """Let the program succeed, and start the VM again."""
    rig.end_programs()
    rig.boot_id = "another"
    rig.restart()


def fail(rig: ListenerRig) -> None:
    """Let the program fail."""
    rig.end_programs(code=1, wait=5)


@pytest.mark.parametrize("lose", [kill, boot, fail])
def test_an_approved_event_is_prepared_for_as_long_as_it_is_scheduled(
    make_rig: MakeListener, lose: Callable[[ListenerRig], None]
) -> None:
    """Until every VM on the host has approved, it may take as long as its notice."""
    rig = make_rig(policy={"allow": [{}]})
    event = rig.announce(wait=1)
    rig.send(event, wait=1)
    assert rig.imds.approved == [event]
    lose(rig)
    rig.run(3)
    assert (len(rig.machine.runs), len(rig.machine.running)) == (2, 1)
    rig.end_programs(wait=3)
    assert (len(rig.machine.runs), rig.answers("c")) == (2, [("Accepted", "approved")])


def test_a_rule_has_to_match_also_when_its_program_has_ended(make_rig: MakeListener) -> None:
    rig = make_rig(min_notice_seconds=60)
    rig.announce(NotBefore=rig.notice(100), wait=45)
    rig.end_programs(wait=5)
    assert len(rig.machine.runs) == 1
    assert (rig.imds.posts, rig.receipts()) == ([], [])


def test_an_approval_that_falls_to_another_rule_waits_for_its_program(make_rig: MakeListener) -> None:
    rig = make_rig(auto=[{"min_notice_seconds": 60}, {"run": [DRAIN]}])
    rig.imds.fail(429, methods=["approve"])
    event = rig.announce(NotBefore=rig.notice(65), wait=10)
    assert len(rig.machine.runs) == 1
    rig.imds.restore()
    rig.run(5)
    assert rig.imds.approved == []
    rig.end_programs(wait=5)
    assert rig.imds.approved == [event]
