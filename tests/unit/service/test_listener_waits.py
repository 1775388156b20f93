"""Nothing that only prepares holds up a drain, and what was proved counts until it is contradicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest

from bridge.errors import ImdsError, StateError
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, MakeListener
from tests.support.machine import program

DRAIN, RECOVER = program(), program("recover")
RULE = {"run": [DRAIN], "recover": [RECOVER]}
OTHER_VM = replace(WEB_0, name="real", vm_id="99999999-bd52-4150-9748-7190aae1ff21")


@pytest.fixture
def auto(make_listener: MakeListener) -> ListenerRig:
    return make_listener(auto=[RULE])


def hang(rig: ListenerRig, seconds: float) -> Callable[..., Any]:
    """Return what takes as long as it is waited for, at most so many seconds, and answers nothing."""

    def answer(limit_seconds: float) -> Any:
        rig.clock.advance(min(seconds, limit_seconds))
        if seconds > limit_seconds:
            raise ImdsError(f"no complete answer within {limit_seconds:.3g} s")

    return answer


def note_limits(rig: ListenerRig, event_id: str, *, seconds: float) -> list[float]:
    """Let POSTs of an event take so long; return the list that gets how long each may take."""
    limits: list[float] = []

    def answer(limit_seconds: float) -> None:
        limits.append(limit_seconds)
        hang(rig, seconds)(limit_seconds)

    rig.imds.bad[event_id] = answer
    return limits


def starts_at(rig: ListenerRig) -> list[float]:
    """Return the list that gets when each program starts."""
    at: list[float] = []
    rig.machine.on_start = lambda _: at.append(rig.clock.monotonic())
    return at


# Who the VM is


def fail_instance_data(rig: ListenerRig, how: str) -> None:
    """Let instance data answer 503, or nothing in time."""
    if how == "503":
        rig.imds.fail(503, methods=["instance"])
    else:
        rig.imds.instance = hang(rig, 999.0)  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["503", "no answer"])
@pytest.mark.parametrize("after_seconds", [0.0, 0.5, 1.0, 2.9, 6.8, 14.9, 31.0])
def test_in_the_boot_in_which_it_was_named_a_vm_is_prepared_whatever_instance_data_does(
    auto: ListenerRig, how: str, after_seconds: float
) -> None:
    auto.run()
    fail_instance_data(auto, how)
    auto.restart(wait=after_seconds)
    at, announced_at = starts_at(auto), auto.clock.monotonic()
    event_id = auto.announce(NotBefore=auto.notice(30), EventType="Preempt", wait=3)
    assert [began - announced_at <= 1.5 for began in at] == [True]
    auto.end_programs()
    assert auto.imds.posts == [(event_id,)]
    auto.restart()
    auto.remove(event_id, wait=3)
    assert auto.machine.names == [DRAIN, RECOVER]


def test_after_another_boot_an_unconfirmed_name_prepares_and_approves_nothing(auto: ListenerRig) -> None:
    auto.run()
    auto.imds.fail(503, methods=["instance"])
    auto.boot_id = "boot-2"
    auto.restart()
    event_id = auto.announce(wait=1)
    auto.send(event_id, wait=1)
    auto.end_programs(wait=20)
    assert (auto.machine.names, auto.reasons(), auto.imds.posts) == ([DRAIN], [], [])
    auto.imds.restore()
    auto.run(40)
    assert auto.reasons() == ["approved"] * 2


def test_after_another_boot_an_unconfirmed_name_recovers_after_a_minute(auto: ListenerRig) -> None:
    auto.prepare("web-0")
    auto.imds.fail(503, methods=["instance"])
    auto.imds.show()
    auto.boot_id = "boot-2"
    auto.restart(wait=58)
    assert auto.machine.names == [DRAIN]
    (out,) = auto.listener.status().out_of_work or ()
    assert out.Why == "until instance data says which VM this is, or fails for a minute"
    auto.run(4)
    assert auto.machine.names == [DRAIN, RECOVER]


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
def test_heartbeats_say_at_once_that_instance_data_fails_and_that_it_is_there_again(
    auto: ListenerRig, boot_id: str
) -> None:
    auto.run()
    auto.imds.fail(503, methods=["instance"])
    auto.boot_id = boot_id
    auto.restart(wait=10)
    auto.imds.restore()
    auto.run(70)
    told = (one["data"]["IdentityError"] for one in auto.events() if "heartbeat" in one["type"])
    assert [error for error, _ in groupby(told)] == [None, "IMDS at http://imds.invalid answered 503", None]


def test_instance_data_that_contradicts_the_boot_ends_the_process_once_and_what_was_run_here_is_put_back(
    auto: ListenerRig,
) -> None:
    auto.prepare("web-0")
    auto.imds.show()
    auto.imds.vm = OTHER_VM
    auto.restart()
    with pytest.raises(StateError, match="moves it aside"):
        auto.run(2)
    auto.restart(wait=2)
    assert auto.listener.status().vm == "real"
    assert auto.machine.names == [DRAIN, RECOVER, RECOVER]  # the second start has ended the first one


def test_a_vm_that_becomes_another_one_while_the_process_runs_ends_it_once(auto: ListenerRig) -> None:
    auto.run(2)
    auto.imds.vm = OTHER_VM
    with pytest.raises(StateError, match="moves it aside"):
        auto.run(700)
    auto.restart(wait=700)
    assert auto.listener.status().vm == "real"


# POSTs


@pytest.mark.parametrize("seconds", [1.0, 2.0, 4.0, 10.0])
def test_while_a_post_has_no_answer_another_event_has_its_program_within_one_and_a_half_seconds(
    auto: ListenerRig, seconds: float
) -> None:
    at = starts_at(auto)
    first = auto.announce(NotBefore=auto.notice(900), wait=1)
    auto.machine.finish(code=0)
    announced: list[float] = []

    def on_post(limit_seconds: float) -> None:
        if not announced:
            announced.append(auto.clock.monotonic())
            auto.imds.schedule(EventType="Preempt", NotBefore=auto.notice(10))
        hang(auto, seconds)(limit_seconds)

    auto.imds.bad[first] = on_post
    auto.run(30)
    assert at[1] - announced[0] <= 1.5 + 0.25
    auto.end_programs(wait=60)
    assert auto.reasons().count("approved") == 2


def test_an_imds_that_needs_two_seconds_for_a_post_has_its_answer_read(auto: ListenerRig) -> None:
    limits = note_limits(auto, auto.announce(wait=1), seconds=2.0)
    auto.end_programs(wait=20)
    assert (limits, auto.reasons()) == ([1.5, 3.0], ["approved"])


def test_without_a_program_a_post_is_waited_for_as_long_as_imds_may_take(rig: ListenerRig) -> None:
    event_id = rig.imds.schedule()
    limits = note_limits(rig, event_id, seconds=9.0)
    rig.send(event_id, wait=2)
    assert (limits, rig.reasons()) == ([10.0], ["approved"])


def test_while_an_event_waits_for_its_program_no_post_takes_long(auto: ListenerRig) -> None:
    limits = note_limits(auto, auto.announce(wait=1), seconds=99.0)
    auto.machine.finish(code=0)
    auto.announce(wait=1)
    auto.end_programs(code=1, wait=30)
    auto.end_programs(code=1, wait=30)
    assert len(limits) > 3
    assert set(limits) == {1.5}


def test_what_is_no_longer_scheduled_after_a_post_without_an_answer_is_not_said_to_be_unrecorded(
    auto: ListenerRig,
) -> None:
    event_id = auto.announce(wait=1)

    def approve(limit_seconds: float) -> None:
        auto.imds.change(event_id, EventStatus="Started")
        hang(auto, 99)(limit_seconds)

    auto.imds.bad[event_id] = approve
    auto.end_programs(wait=5)
    (receipt,) = auto.receipts()
    assert (receipt["data"]["Outcome"], receipt["data"]["Reason"]) == ("Accepted", "not_recorded")
    assert receipt["data"]["Detail"].endswith("IMDS's answer is not known")
