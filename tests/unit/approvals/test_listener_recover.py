"""Auto rules with `recover`: who has prepared the VM puts it back to work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from bridge.approvals.receipts import STAY
from bridge.approvals.state import OutOfWorkReason
from bridge.config.approvals import AutoSettings
from bridge.contract.status import OutOfWork
from bridge.errors import ImdsError, StateError
from bridge.outbox.rows import DAMAGE, OWED, REQUEST, SIZE_LIMIT, STATE, STATE_FOLDER_GONE, Loss
from bridge.process.status import find_urgent
from bridge.runtime.program import Result
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, MakeListener
from tests.support.machine import program
from tests.support.only import only
from tests.support.outbox import FailingDisk, abandon, failing_disk, kill
from tests.support.status import process_status

DRAIN, RECOVER, NEW = program(), program("recover"), program("new")
RULE = {"run": [DRAIN], "recover": [RECOVER], "group": True}
OTHER_VM = replace(WEB_0, vm_id="99999999-bd52-4150-9748-7190aae1ff21")


@pytest.fixture
def disk() -> Iterator[FailingDisk]:
    with failing_disk() as disk:
        yield disk


@pytest.fixture
def make_rig(make_listener: MakeListener) -> MakeListener:
    def make(**rule: Any) -> ListenerRig:
        given = {name: value for name, value in {**RULE, **rule}.items() if value != ()}
        return make_listener(policy={}, auto=[given])

    return make


@pytest.fixture
def rig(make_rig: MakeListener) -> ListenerRig:
    return make_rig()


def told(rig: ListenerRig, name: str) -> list[dict[str, Any]]:
    """Return the data of the events of a type."""
    return [one["data"] for one in rig.events() if one["type"] == f"io.imdsbridge.approval.{name}.v1"]


def out_of_work(rig: ListenerRig) -> list[OutOfWork]:
    return [*(rig.listener.status().out_of_work or ())]


def urgent(rig: ListenerRig) -> str:
    status = process_status(rig.clock.now(), "listen")
    return str(find_urgent(replace(status, flow=rig.listener.status()), rig.clock.now()))


def restart(rig: ListenerRig, *rules: dict[str, Any], **more: Any) -> None:
    rig.restart(auto=tuple(AutoSettings(**one) for one in rules), **more)


def ask(rig: ListenerRig, what: str, *, wait: float) -> None:
    """Ask for what `imds-bridge recover` does, and wait."""
    since = min((str(one.Since) for one in out_of_work(rig)), default="")
    rig.outbox.commit([], records={(STATE, REQUEST): f"done {since}" if what == "done" else what})
    rig.run(wait)


def test_recover_runs_once_the_event_is_over_and_is_published(rig: ListenerRig) -> None:
    event = rig.prepare()
    rig.change(event, EventStatus="Started", NotBefore="", wait=30)
    assert rig.machine.names == [DRAIN]
    assert out_of_work(rig)[0].Why == f"until Reboot {event} is over"
    rig.remove(event, wait=1)
    assert rig.machine.names == [DRAIN, RECOVER]
    data = rig.machine.runs[1].data
    assert (data["EventId"], data["EventStatus"], data["VmRebooted"]) == (event, "Ended", False)
    rig.end_programs(wait=1)
    recovered = only(told(rig, "recovered"))
    assert (recovered["EventId"], recovered["EventType"], out_of_work(rig)) == (event, "Reboot", [])
    rig.restart(wait=30)
    assert rig.machine.names == [DRAIN, RECOVER]
    assert rig.programs == {"succeeded": 1, "recover succeeded": 1}


def test_what_is_owed_is_committed_before_the_program_starts_and_forgotten_with_what_tells_of_it(
    rig: ListenerRig,
) -> None:
    owed: list[Any] = []
    rig.machine.on_start = lambda _: owed.append(rig.outbox.record(STATE, OWED))
    event = rig.prepare()
    rig.remove(event, wait=1)
    assert [[one["keys"] for one in each] for each in owed] == [[[event.lower()]]] * 2
    rig.end_programs(wait=1)
    assert (rig.outbox.record(STATE, OWED), len(told(rig, "recovered"))) == ([], 1)


def test_an_event_that_leaves_in_the_middle_of_the_program_recovers_after_the_program_has_ended(
    rig: ListenerRig,
) -> None:
    rig.machine.is_slow_to_end = True
    event = rig.announce()
    rig.remove(event, wait=4)
    assert (rig.machine.names, len(rig.machine.asked_to_end), rig.receipts()) == ([DRAIN], 1, [])
    assert out_of_work(rig)[0].Why == f"until run {DRAIN} has ended"
    rig.end_programs(wait=1)
    assert rig.machine.names == [DRAIN, RECOVER]


def test_recover_waits_for_the_last_event_whatever_has_become_of_it(make_rig: MakeListener) -> None:
    rig = make_rig(max_duration_seconds=60)
    first, second = rig.prepare(), rig.prepare()
    rig.imds.remove(first)
    for change in ({"DurationInSeconds": 90}, {"Resources": ["web-0", None]}, {"EventStatus": "Odd"}):
        rig.change(second, **change, wait=5)
        assert rig.machine.names == [DRAIN, DRAIN]
    rig.change(second, Resources=["web-1"], wait=2)
    assert rig.machine.names == [DRAIN, DRAIN, RECOVER]


def test_what_cannot_be_read_is_not_absent(rig: ListenerRig) -> None:
    rig.imds.incarnation = 100
    event = rig.prepare()
    rig.show({"EventId": 7}, wait=30)
    assert (rig.machine.names, "it is certain" in str(out_of_work(rig)[0].Why)) == ([DRAIN], True)
    rig.imds.incarnation = 0
    rig.show({"EventId": 7}, wait=1)
    rig.boot_id = "another"
    rig.restart(wait=5)
    assert rig.machine.names == [DRAIN]
    rig.show({"EventId": 7}, {"EventId": event, "Resources": ["web-0"], "EventStatus": "Started"}, wait=1)
    rig.imds.show({"EventId": 7})  # one that never could
    rig.run(1)
    assert rig.machine.names == [DRAIN, RECOVER]


def test_an_entry_that_cannot_be_read_holds_nothing_that_came_after_it(rig: ListenerRig) -> None:
    rig.announce("web-9", wait=1)
    rig.imds.show({"EventId": 7})  # perhaps the event of the other VM
    rig.run(1)
    rig.prepare()
    rig.show({"EventId": 7}, wait=3)
    assert rig.machine.names == [DRAIN, RECOVER]


@pytest.mark.parametrize("status", ["Scheduled", "Started"])
@pytest.mark.parametrize("boots", [True, False])
def test_after_a_reset_in_the_same_boot_an_event_that_had_not_started_may_come_back_for_five_minutes(
    rig: ListenerRig, boots: bool, status: str
) -> None:
    rig.imds.incarnation = 100
    event = rig.prepare()
    rig.change(event, EventStatus=status, wait=2)
    if boots:
        rig.boot_id = "another"
        rig.restart()
    rig.imds.incarnation = 0
    rig.show(wait=5)
    is_over = boots or status == "Started"
    assert rig.machine.names == ([DRAIN, RECOVER] if is_over else [DRAIN])
    rig.restart(wait=290)
    assert (RECOVER in rig.machine.names) == is_over
    rig.run(10)
    assert RECOVER in rig.machine.names


def test_a_reset_is_seen_over_a_restart_also_after_changes_that_concern_others(rig: ListenerRig) -> None:
    event = rig.prepare()
    for _ in range(5):  # documents that change nothing for this VM
        rig.show(*rig.imds.events, wait=1)
    shown, rig.imds.incarnation = rig.imds.events, rig.imds.incarnation - 4
    rig.restart()
    rig.show(wait=30)
    assert (rig.machine.names, out_of_work(rig)[0].IsHeld) == ([DRAIN], True)
    rig.show(*shown, wait=1)
    assert out_of_work(rig)[0].Why == f"until Reboot {event} is over"


def test_what_was_prepared_on_a_full_disk_is_put_back_after_a_kill(
    rig: ListenerRig, disk: FailingDisk
) -> None:
    disk.fail()
    event = rig.prepare()
    disk.recover()
    rig.folder = kill(rig.outbox, rig.folder, rig.folder.parent / "killed")
    rig.imds.remove(event)
    rig.start()
    rig.run(1)
    assert rig.machine.names == [DRAIN, RECOVER]


def test_what_recover_puts_back_counts_as_prepared_no_more(rig: ListenerRig) -> None:
    event = rig.prepare()
    shown = rig.imds.events
    rig.remove(event, wait=1)
    rig.show(*shown, wait=1)
    rig.end_programs(wait=1)
    assert rig.machine.names == [DRAIN, RECOVER, DRAIN]


def test_recover_is_repeated_with_longer_pauses_and_needs_a_person_until_it_works(rig: ListenerRig) -> None:
    event = rig.prepare()
    rig.imds.remove(event)
    for pause in (0, 5, 10, 20):
        rig.run(pause + 1)
        assert len(rig.machine.running) == 1
        assert ("has failed" in urgent(rig)) == (pause > 0)  # also while it runs once more
        rig.end_programs(wait=1, code=1)
    assert rig.machine.names == [DRAIN] + [RECOVER] * 4
    data = only(told(rig, "outofwork"))
    expected = (event, "RecoverFails", f"recover {RECOVER}: exit code 1")
    assert (data["EventId"], data["Reason"], data["Detail"]) == expected
    assert f"recover {RECOVER} has failed 4 time(s): exit code 1" in urgent(rig).replace(r"\\", "\\")
    rig.run(60)
    rig.end_programs()
    assert (urgent(rig), len(told(rig, "recovered"))) == ("[]", 1)


@pytest.mark.parametrize("seconds", [900, 30, -3])
def test_a_new_event_waits_for_recover_unless_it_starts_anyway(
    make_rig: MakeListener, seconds: float
) -> None:
    rig = make_rig(run_timeout_seconds=60)
    rig.remove(rig.prepare(), wait=1)
    rig.announce(NotBefore=rig.in_seconds(seconds), wait=5)
    is_late = seconds < 900
    assert (rig.machine.names, len(rig.machine.ended)) == ([DRAIN, RECOVER] + [DRAIN] * is_late, is_late)
    rig.end_programs()
    assert rig.machine.names == [DRAIN, RECOVER, DRAIN]


def test_what_is_prepared_is_recorded_also_where_its_rule_had_no_recover_then(make_rig: MakeListener) -> None:
    """So recover never begins while the VM is prepared for an event."""
    rig = make_rig(recover=())
    first = rig.prepare("web-0", "web-1")
    restart(rig, RULE, wait=2)
    assert (rig.machine.names, out_of_work(rig)[0].Why) == ([DRAIN], f"until Reboot {first} is over")
    rig.remove(rig.prepare(), wait=5)
    assert rig.machine.names == [DRAIN, DRAIN]
    rig.remove(first, wait=1)
    assert rig.machine.names == [DRAIN, DRAIN, RECOVER]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], RECOVER),
        ([{"run": [DRAIN], "recover": [NEW]}], NEW),
        ([{"run": [DRAIN]}], RECOVER),
        ([{"run": [NEW]}], RECOVER),
    ],
)
def test_what_is_owed_is_paid_also_where_the_rule_was_changed_or_removed(
    rig: ListenerRig, rules: list[dict[str, Any]], expected: str
) -> None:
    event = rig.prepare()
    restart(rig, *rules, wait=2)
    rig.end_programs()
    rig.remove(event, wait=2)
    assert rig.machine.names[-1] == expected
    rig.end_programs()
    assert out_of_work(rig) == []


def test_rules_with_the_same_recover_share_it_and_the_longest_time(make_listener: MakeListener) -> None:
    short = {"event_type": ["Preempt"], "run": [NEW], "recover": [RECOVER], "run_timeout_seconds": 25}
    rig = make_listener(policy={}, auto=[short, {**RULE, "run_timeout_seconds": 600}])
    first, second = rig.prepare(), rig.prepare(EventType="Preempt")
    rig.remove(first, wait=2)
    rig.remove(second, wait=2)
    assert rig.machine.names == [DRAIN, NEW, RECOVER]
    assert [run.timeout_seconds for run in rig.machine.runs] == [600, 25, 600]


FREEZE_RULE = {"event_type": ["Freeze"], "run": [NEW], "recover": [NEW], "group": True}


def test_the_vm_is_back_at_work_once_no_other_recover_is_owed(make_listener: MakeListener) -> None:
    """So an alert of one that fails is not resolved by another, nor by a Freeze within a Reboot."""
    rig = make_listener(policy={}, auto=[FREEZE_RULE, RULE])
    reboot = rig.prepare()
    since = out_of_work(rig)[0].Since
    freeze = rig.prepare(EventType="Freeze", wait=1)
    rig.remove(freeze, wait=1)
    rig.end_programs()
    assert (rig.machine.names, told(rig, "recovered")) == ([DRAIN, NEW, NEW], [])
    freeze = rig.prepare(EventType="Freeze", wait=1)
    rig.imds.remove(reboot)
    rig.remove(freeze, wait=1)
    rig.machine.finish(code=1)
    rig.run(6)
    rig.machine.running[0].result = Result(code=0)
    rig.run(2)
    assert told(rig, "recovered") == []
    rig.end_programs()
    assert (len(told(rig, "outofwork")), out_of_work(rig)) == (2, [])
    assert [one["Since"] for one in told(rig, "recovered")] == [since]


def test_the_vm_is_back_at_work_if_a_person_has_done_all_that_is_owed(make_listener: MakeListener) -> None:
    rig = make_listener(policy={}, auto=[FREEZE_RULE, RULE])
    reboot, freeze = rig.prepare("web-0", "web-1"), rig.prepare(EventType="Freeze", wait=1)
    rig.remove(freeze, wait=1)
    rig.end_programs(wait=1, code=1)
    ask(rig, "done", wait=2)
    assert (len(out_of_work(rig)), told(rig, "recovered")) == (1, [])
    rig.remove(reboot, wait=2)
    rig.end_programs(wait=1, code=1)
    ask(rig, "done", wait=2)
    assert (out_of_work(rig), len(told(rig, "recovered"))) == ([], 1)


# A disk of another VM, and lost records


def clone(rig: ListenerRig) -> None:
    """Start on the disk of a VM that was out of work."""
    rig.imds.remove(rig.prepare())
    rig.restart(vm=OTHER_VM, wait=30)


def test_on_the_disk_of_another_vm_nothing_runs_and_it_is_told(rig: ListenerRig) -> None:
    clone(rig)
    assert rig.machine.names == [DRAIN]
    data = only(told(rig, "outofwork"))
    assert (data["Reason"], data["Detail"]) == ("OtherVm", "this disk comes from a VM that was out of work")
    assert "another VM owed it" in urgent(rig)


@pytest.mark.parametrize("request_", ["try", "done"])
def test_a_person_decides_with_the_command_what_becomes_of_it(rig: ListenerRig, request_: str) -> None:
    clone(rig)
    ask(rig, request_, wait=2)
    rig.end_programs(wait=30)
    assert rig.machine.names == [DRAIN] + [RECOVER] * (request_ == "try")
    data = only(told(rig, "recovered"))
    assert (out_of_work(rig), data["DurationSeconds"] is None) == ([], request_ == "done")


def test_a_request_ends_the_pause_and_what_a_person_did_is_forgotten_as_prepared(rig: ListenerRig) -> None:
    rig.remove(rig.prepare(), wait=1)
    rig.end_programs(wait=1, code=1)
    ask(rig, "try", wait=1)
    assert rig.machine.names == [DRAIN, RECOVER, RECOVER]


def test_a_request_is_not_carried_out_while_an_event_stands_and_not_later(rig: ListenerRig) -> None:
    event = rig.prepare("web-0", "web-1")
    assert out_of_work(rig)[0].IsHeld
    ask(rig, "done", wait=5)
    rig.remove(event, wait=2)
    assert rig.machine.names == [DRAIN, RECOVER]


def test_a_request_that_comes_after_the_vm_is_back_at_work_says_nothing_of_what_is_owed_later(
    rig: ListenerRig,
) -> None:
    ask(rig, "done", wait=2)  # its command has read the status of a few seconds before
    rig.imds.remove(rig.announce(wait=1))
    rig.restart(wait=2)
    assert rig.machine.names == [DRAIN, RECOVER]


@pytest.mark.parametrize(
    ("reason", "recovers"), [(DAMAGE, True), (STATE_FOLDER_GONE, True), (SIZE_LIMIT, False)]
)
def test_where_records_were_lost_every_rule_recovers_once_after_the_events_that_are_there(
    make_listener: MakeListener, reason: str, recovers: bool
) -> None:
    rules = [
        {"event_type": ["Preempt"], "run": [DRAIN], "recover": [RECOVER]},
        {"run": [NEW], "recover": [NEW]},
    ]
    rig = make_listener(policy={"deny": [{}]}, auto=rules)
    event = rig.imds.schedule()
    loss = Loss(reason=reason, count=None)
    rig.outbox.storage.run(lambda database: database.note_losses([loss]), synced=True)
    rig.run(8)
    assert (rig.machine.names, [one["keys"] for one in rig.outbox.record(STATE, OWED) or ()]) == (
        [],
        [[event.lower()]] * 2 * recovers,
    )
    rig.remove(event, wait=2)
    assert rig.machine.names == [RECOVER, NEW] * recovers
    rig.end_programs(wait=8)
    assert (rig.machine.names, out_of_work(rig)) == ([RECOVER, NEW] * recovers, [])


def test_what_the_version_before_had_prepared_is_owed(rig: ListenerRig) -> None:
    event = rig.imds.schedule(EventStatus="Started", NotBefore="")
    stay = {"stay": "s", "place": [1, "x"], "at": None, "prepared_by": "a hash"}
    rig.outbox.commit([], records={(STAY, event.lower()): stay})
    rig.run(5)
    assert rig.machine.names == []
    rig.remove(event, wait=1)
    assert rig.machine.names == [RECOVER]


# Told


@pytest.mark.parametrize("is_dry_run", [False, True])
def test_a_vm_that_is_out_of_work_for_two_hours_without_an_event_is_told_once(
    rig: ListenerRig, is_dry_run: bool
) -> None:
    event = rig.prepare()
    if is_dry_run:
        rig.restart(dry_run=True)
    rig.clock.advance(3 * 3600)  # in which the event stands
    rig.run(2)
    rig.remove(event, wait=2)
    for _ in range(4):
        rig.clock.advance(2400)
        rig.run(2)
    reasons: list[OutOfWorkReason] = [one["Reason"] for one in told(rig, "outofwork")]
    assert reasons == ["TwoHours"]
    assert rig.machine.names == [DRAIN] + [RECOVER] * (not is_dry_run)
    assert out_of_work(rig)[0].Why == ("dry run: nothing is run" if is_dry_run else f"recover {RECOVER} runs")
    assert "out of work" in urgent(rig)


def test_log_and_status_name_a_program_with_its_arguments_and_what_is_published_without(
    make_rig: MakeListener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    query = "http://127.0.0.1/{}?key=1"
    rig = make_rig(run=[DRAIN, query.format("out")], recover=[RECOVER, query.format("in")])
    event = rig.prepare()
    rig.remove(event, wait=1)
    rig.end_programs(wait=1, code=1)
    rig.clock.advance(7200)
    rig.run(1)
    run, recover = f"run {DRAIN} http://127.0.0.1/out?***", f"recover {RECOVER} http://127.0.0.1/in?***"
    assert [one.name for one in rig.machine.runs] == [run, *[recover] * (len(rig.machine.runs) - 1)]
    assert {f"{run} starts", f"{recover} starts"} <= {one.getMessage() for one in caplog.records}
    assert out_of_work(rig)[0].Why == f"{recover} has failed 1 time(s): exit code 1"
    details = [one["Detail"] for one in told(rig, "outofwork")]
    assert details == [
        f"recover {RECOVER}: exit code 1",
        f"recover {RECOVER} has failed 1 time(s): exit code 1",
    ]


def test_recover_that_a_stop_has_ended_runs_again_and_counts_as_no_failure(rig: ListenerRig) -> None:
    rig.remove(rig.prepare(), wait=1)
    rig.finish()
    rig.restart(wait=2)
    assert (rig.machine.names, told(rig, "outofwork")) == ([DRAIN, RECOVER, RECOVER], [])


REBALANCE = "SpotRebalanceRecommendation"
ADVICE = {"EventType": REBALANCE, "EventStatus": "Advisory", "NotBefore": ""}


def test_a_rule_that_names_an_early_warning_prepares_for_it_and_nobody_approves_it(
    make_rig: MakeListener,
) -> None:
    rig = make_rig(event_type=[REBALANCE])
    key = rig.prepare(**ADVICE)
    rig.run(3)
    assert rig.machine.names == [DRAIN]
    assert json.loads(rig.machine.runs[0].body)["type"] == "io.imdsbridge.scheduledevent.advised.v1"
    assert [one["EventId"] for one in told(rig, "prepared")] == [key]
    assert rig.imds.posts == []
    rig.remove(key, wait=2)
    assert rig.machine.names == [DRAIN, RECOVER]


@pytest.mark.parametrize("rule", [{}, {"event_type": [REBALANCE], "run": (), "recover": ()}])
def test_a_rule_that_does_not_name_an_early_warning_or_only_approves_does_nothing_for_it(
    make_rig: MakeListener, rule: dict[str, Any]
) -> None:
    rig = make_rig(**rule)
    rig.announce(**ADVICE, wait=3)
    assert (rig.machine.names, rig.imds.posts) == ([], [])
    assert not any("approval" in one["type"] for one in rig.events())


def test_a_rule_that_does_not_name_an_unknown_type_prepares_for_it_and_does_not_approve_it(
    rig: ListenerRig,
) -> None:
    rig.prepare(EventType="Migrate")
    rig.run(3)
    assert rig.imds.posts == []


# What only a person who looks for faults finds


def test_one_program_for_both_is_told_what_it_is_to_do(make_rig: MakeListener) -> None:
    rig = make_rig(run=[RECOVER], recover=[RECOVER])
    event = rig.prepare()
    rig.remove(event, wait=1)
    assert [run.data["EventStatus"] for run in rig.machine.runs] == ["Scheduled", "Ended"]


def test_where_the_boot_is_not_known_recover_is_not_told_that_there_was_one(rig: ListenerRig) -> None:
    rig.boot_id = ""
    rig.restart()
    event = rig.prepare()
    rig.change(event, EventStatus="Started", wait=2)
    rig.restart(wait=2)
    rig.remove(event, wait=2)
    assert rig.machine.runs[-1].data["VmRebooted"] is None


def test_a_rule_that_has_lost_its_recover_owes_the_recorded_one(rig: ListenerRig) -> None:
    first = rig.prepare()
    restart(rig, {"run": [DRAIN], "group": True}, wait=2)
    second = rig.announce(wait=1)
    rig.remove(first, wait=1)
    assert [run.command[0] for run in rig.machine.running] == [DRAIN]
    rig.end_programs()
    rig.remove(second, wait=2)
    assert rig.machine.names == [DRAIN, DRAIN, RECOVER]


def test_a_command_that_imds_refuses_ends_no_preparation(make_listener: MakeListener) -> None:
    rig = make_listener(auto=[{**RULE, "max_unavailable": 1}])
    event = rig.announce(wait=1)
    rig.imds.fail(400, methods=["approve"], count=1)
    rig.send(event, wait=62)
    assert (rig.reasons(), rig.machine.names) == (["imds_refused"], [DRAIN])


def test_a_slow_imds_approves_all_the_same(make_listener: MakeListener) -> None:
    rig = make_listener()
    rig.imds.on_read = lambda: rig.clock.advance(0.5)
    event = rig.announce(wait=5)
    rig.send(event, wait=30)
    assert len(rig.imds.posts) == 1


def test_a_command_without_an_outcome_is_not_answered_while_its_event_may_be_in_an_unreadable_entry(
    make_listener: MakeListener,
) -> None:
    rig = make_listener()
    event = rig.announce(wait=1)
    rig.imds.fail(ImdsError("timed out"), methods=["approve"])
    rig.send(event, wait=0.5)
    assert len(rig.imds.posts) == 1
    rig.show({"EventId": 7}, wait=2)
    assert rig.receipts() == []


def hide_state(rig: ListenerRig) -> Callable[[], None]:
    """Start without the state, which cannot be read; return what lets it be read again."""
    rig.events()
    rig.receiver.disconnect()
    rig.outbox.close()
    file = rig.outbox.folder.database
    hidden = file.with_suffix(".hidden")
    file.rename(hidden)
    file.mkdir()  # SQLite cannot open it
    rig.start()

    def show() -> None:
        file.rmdir()
        hidden.rename(file)

    return show


def test_what_a_file_owes_that_could_not_be_read_at_the_start_is_put_back_once_it_can(
    rig: ListenerRig,
) -> None:
    event = rig.prepare()
    rig.change(event, EventStatus="Started", wait=2)
    show = hide_state(rig)
    rig.run(2)
    show()
    with pytest.raises(StateError, match="the next start goes on with it"):
        rig.outbox.recover()
    rig.outbox.close()
    rig.start()
    rig.remove(event, wait=120)
    assert rig.machine.names == [DRAIN, RECOVER]


@pytest.mark.parametrize("are_delivered", [True, False])
@pytest.mark.parametrize("end", ["killed", "killed, and not read at the next start", "stopped"])
def test_a_vm_that_was_prepared_while_the_state_could_not_be_read_is_put_back_by_the_next_start(
    rig: ListenerRig, end: str, are_delivered: bool
) -> None:
    rig.run(2)
    show = hide_state(rig)
    event = rig.prepare()
    rig.change(event, EventStatus="Started", wait=2)
    if are_delivered:
        rig.events()
    abandon(rig.outbox) if end != "stopped" else rig.outbox.close()
    if "not read" not in end:
        show()
    rig.start()
    rig.run(2)
    rig.remove(event, wait=120)
    rig.run(700)
    assert rig.machine.names == [DRAIN, RECOVER]
    rig.restart(wait=200)
    told = [one["data"]["Reason"] for one in rig.events() if ".bridge.loss." in one["type"]]
    assert told == ["NotWritten"] * (2 if "not read" in end else 1)  # for each run without the state


def test_what_was_recovered_while_the_store_was_in_memory_is_not_prepared_after_a_kill(
    rig: ListenerRig, disk: FailingDisk
) -> None:
    event = rig.prepare()
    shown = rig.imds.events
    rig.events()
    disk.fail()
    rig.remove(event, wait=2)
    rig.end_programs()
    disk.recover()
    posts = len(rig.imds.posts)
    rig.imds.show(*shown)
    rig.folder = kill(rig.outbox, rig.folder, rig.folder.parent / "killed")
    rig.start()
    rig.run(3)
    assert (rig.machine.names, rig.imds.posts[posts:]) == ([DRAIN, RECOVER, DRAIN], [])
