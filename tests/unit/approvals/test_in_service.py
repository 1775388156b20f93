"""What a load balancer is told: from when until when this VM is out of work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bridge.config.approvals import AutoSettings, leaving
from bridge.errors import ImdsError
from bridge.outbox.rows import DAMAGE, Loss
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, MakeListener
from tests.support.machine import program

DRAIN, RECOVER = program(), program("recover")
OTHER_VM = replace(WEB_0, vm_id="99999999-bd52-4150-9748-7190aae1ff21")


@pytest.fixture(params=[(RECOVER,), ()], ids=["with recover", "without"])
def rig(make_listener: MakeListener, request: pytest.FixtureRequest) -> ListenerRig:
    rule = {"run": [DRAIN], **({"recover": [*request.param]} if request.param else {})}
    return make_listener(policy={}, auto=[rule])


def stay(_: ListenerRig) -> None:
    pass


def restart(rig: ListenerRig) -> None:
    rig.restart()


def boot(rig: ListenerRig) -> None:
    rig.boot_id = "boot-2"
    rig.restart()


def lose_imds(rig: ListenerRig) -> None:
    """Restart, and have no answer."""
    rig.imds.fail(ImdsError("down"))
    rig.restart(wait=5)


@pytest.mark.parametrize("then", [stay, restart, boot, lose_imds])
@pytest.mark.parametrize("ends", [True, False], ids=["prepared", "running"])
def test_a_vm_is_out_of_work_from_the_start_of_a_program_to_the_end_of_recover(
    rig: ListenerRig, then: Callable[[ListenerRig], None], *, ends: bool
) -> None:
    seen = [rig.listener.is_in_work()]
    rig.machine.on_start = lambda _: seen.append(rig.listener.is_in_work())
    event = rig.announce()
    if ends:
        rig.end_programs()
    then(rig)
    seen.append(rig.listener.is_in_work())
    rig.imds.restore()
    rig.change(event, EventStatus="Started", NotBefore="", wait=30)
    seen.append(rig.listener.is_in_work())
    rig.end_programs()
    rig.remove(event, wait=2)
    assert rig.listener.is_in_work() is (RECOVER not in rig.machine.names)
    rig.end_programs()
    assert ({*seen[1:]}, rig.listener.is_in_work()) == ({False}, True)


def test_a_program_that_fails_leaves_the_vm_out_of_work(rig: ListenerRig) -> None:
    rig.announce()
    rig.end_programs(code=1)
    assert not rig.listener.is_in_work()


def test_an_event_that_has_left_this_vm_keeps_nothing_out_of_work(rig: ListenerRig) -> None:
    event = rig.prepare()
    rig.change(event, Resources=["web-1"], wait=2)
    rig.end_programs()
    assert rig.listener.is_in_work()


def test_what_is_not_known_leaves_a_vm_in_work(rig: ListenerRig) -> None:
    rig.change(rig.prepare(), EventStatus="Started", NotBefore="", wait=1)
    assert not rig.listener.is_in_work()
    rig.restart(dry_run=True, wait=5)
    assert rig.listener.is_in_work()
    rig.restart(vm=OTHER_VM, wait=5)  # a clone
    assert rig.listener.is_in_work()


def test_after_a_lost_record_a_vm_is_in_work_until_a_document_tells_of_it(rig: ListenerRig) -> None:
    event = rig.prepare()
    loss = Loss(reason=DAMAGE, count=None)
    rig.outbox.storage.run(lambda database: database.note_losses([loss]), synced=True)
    rig.restart()
    assert rig.listener.is_in_work()
    rig.run(5)
    assert (rig.machine.names, rig.listener.is_in_work()) == (
        [DRAIN, DRAIN],
        False,
    )  # for the event once more
    rig.end_programs()
    rig.remove(event, wait=2)
    rig.end_programs()
    assert rig.listener.is_in_work()


def test_a_rule_that_was_given_recover_later_keeps_the_vm_out_of_work_until_it_has_succeeded(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(policy={}, auto=[{"run": [DRAIN]}])
    event = rig.prepare()
    rig.restart(auto=(AutoSettings(run=(DRAIN,), recover=(RECOVER,)),), wait=2)
    rig.remove(event, wait=2)
    assert (rig.machine.names[-1], rig.listener.is_in_work()) == (RECOVER, False)
    rig.end_programs()
    assert rig.listener.is_in_work()


def test_leave_seconds_are_programs_that_take_turns_and_are_owed(make_listener: MakeListener) -> None:
    rig = make_listener(policy={}, auto=[{"leave_seconds": 20, "max_unavailable": 1}])
    rig.announce(wait=10)
    rule, (run,) = rig.settings.auto[0], rig.machine.runs
    assert {"run": tuple(run.command), "recover": rule.recover} == leaving(20)
    assert "bridge" not in "".join(rule.recover[1:])  # the version before may have to run it
    assert (rule.run_timeout_seconds, rig.listener.is_in_work()) == (50, False)


def test_what_leave_seconds_owe_is_put_back_by_the_python_of_this_process(
    make_listener: MakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", program("python3.11"))
    rig = make_listener(policy={}, auto=[{"leave_seconds": 20}])
    event = rig.prepare()
    monkeypatch.setattr("sys.executable", program("python3.12"))
    rig.restart(auto=(), wait=2)
    rig.remove(event, wait=2)
    assert rig.machine.names[1:] == [program("python3.12")]
