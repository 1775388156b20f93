"""Nothing that only prepares holds up a drain, and what was proved counts until it is contradicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from bridge.config.base import Secret
from bridge.errors import ImdsError, StateError
from bridge.http.signing import sign
from bridge.outbox.rows import REQUEST, STATE
from tests.support.bus import SECRET
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, MakeListener, command_body
from tests.support.machine import program

DRAIN, OTHER, RECOVER = program(), program("other"), program("recover")
RULE = {"run": [DRAIN], "recover": [RECOVER]}
OTHER_VM = replace(WEB_0, name="real", vm_id="99999999-bd52-4150-9748-7190aae1ff21")

OTHER_SECRET = "whsec_" + "QUJD" * 8


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
    assert at[1] - announced[0] <= 1.5
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


@pytest.mark.parametrize("status", [400, 429, 500])
def test_after_a_failure_each_of_several_events_is_tried_alone_and_the_most_urgent_first(
    rig: ListenerRig, status: int
) -> None:
    posts: list[list[str]] = []

    def on_post(ids: list[str]) -> None:
        posts.append(ids)
        if len(ids) > 1:
            raise ImdsError("busy", status=status)

    rig.imds.on_post = on_post
    for number, notice in enumerate((300, 100, 200)):
        rig.imds.schedule(event_id=f"E-{number}", NotBefore=rig.notice(notice))
    rig.send("E-0", "E-1", "E-2", wait=8)
    assert rig.reasons() == ["approved"] * 3
    assert posts == [["E-0", "E-1", "E-2"], ["E-1"], ["E-2"], ["E-0"]]


def test_urgent_events_whose_posts_always_fail_do_not_hold_up_the_others(rig: ListenerRig) -> None:
    def fail(_: float) -> None:
        raise ImdsError("no", status=500)

    ids = [rig.imds.schedule(event_id=f"E-{number}", NotBefore=rig.notice(number)) for number in range(9)]
    rig.imds.bad = dict.fromkeys(ids[:5], fail)
    rig.send(*ids, wait=20)
    assert rig.reasons() == ["approved"] * 4


# Commands


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.write_text(SECRET)
    return path


@pytest.fixture
def signed(make_listener: MakeListener, secrets: Path) -> ListenerRig:
    rig = make_listener(signing_secrets=Secret(file=secrets))
    rig.imds.schedule("web-0", event_id="E-1")
    rig.run(1)
    return rig


def send_signed(rig: ListenerRig, *, wait: float, secret: str = SECRET) -> None:
    body = command_body("E-1", id="c")
    rig.queue.send(body, message_id="c", properties=sign([secret], "c", rig.clock.now(), body))
    rig.run(wait)


@pytest.mark.parametrize("signed_again_by", ["nobody", "the new secret"])
@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_command_that_has_waited_is_verified_again_right_before_its_post(
    signed: ListenerRig, secrets: Path, is_withdrawn: bool, signed_again_by: str
) -> None:
    signed.imds.fail(503)
    signed.run(3)
    send_signed(signed, wait=60)
    if is_withdrawn:
        secrets.write_text(OTHER_SECRET)
    is_good = not is_withdrawn
    if is_withdrawn and signed_again_by != "nobody":
        send_signed(signed, wait=1, secret=OTHER_SECRET)
        is_good = True
    signed.imds.restore()
    signed.run(5)
    assert signed.reasons() == ["approved" if is_good else "bad_signature"]
    assert len(signed.imds.posts) == is_good
    assert signed.queue.messages == []


def test_a_decided_command_that_comes_again_after_a_rotation_has_its_old_receipt(
    signed: ListenerRig, secrets: Path
) -> None:
    send_signed(signed, wait=2)
    secrets.write_text(OTHER_SECRET)
    send_signed(signed, wait=2)
    first, again = signed.receipts()
    assert (first["id"], first["data"]["Reason"]) == (again["id"], "approved")


def test_a_forged_copy_of_a_command_that_waits_is_refused_and_changes_nothing(signed: ListenerRig) -> None:
    signed.imds.fail(503)
    signed.run(3)
    send_signed(signed, wait=2)
    send_signed(signed, wait=2, secret=OTHER_SECRET)
    assert (signed.reasons(), signed.dead_letter_reasons) == (["bad_signature"], ["bad_signature"])
    signed.imds.restore()
    signed.run(3)
    assert signed.reasons() == ["bad_signature", "approved"]


@pytest.mark.parametrize(
    ("status", "reason"), [("Scheduled", "unknown_outcome"), ("Started", "not_recorded")]
)
def test_a_command_with_an_unknown_outcome_is_not_contradicted_after_a_rotation(
    signed: ListenerRig, secrets: Path, status: str, reason: str
) -> None:
    signed.imds.fail(ImdsError("no answer"), methods=["approve"])
    send_signed(signed, wait=1)
    posts = len(signed.imds.posts)
    secrets.write_text(OTHER_SECRET)
    signed.imds.restore()
    signed.imds.change("E-1", EventStatus=status)
    signed.restart(wait=5)
    assert (signed.reasons(), len(signed.imds.posts)) == ([reason], posts)


@pytest.mark.parametrize("scope", ["self", "group"])
@pytest.mark.parametrize("restarts", ["never", "after the event was seen", "before", "before and after"])
def test_a_command_from_long_before_its_event_is_refused_over_restarts(
    make_listener: MakeListener, restarts: str, scope: str
) -> None:
    rig = make_listener(grace_seconds=30, policy={"allow": [{}], "scope": scope})
    rig.run(90)
    sent_at = rig.clock.now() - timedelta(seconds=1800)
    rig.queue.send(command_body("E-1", id="old"), message_id="old", enqueued_at=sent_at)

    def restart() -> None:
        rig.restart()
        rig.receiver.last_error = "down"

    rig.receiver.last_error = "down"
    if "before" in restarts:
        restart()
    rig.announce("web-0" if scope == "self" else "web-1", event_id="E-1", wait=2)
    if "after" in restarts:
        restart()
    rig.receiver.last_error = ""
    rig.receiver.disconnect()
    rig.run(3)
    assert (rig.reasons(), rig.imds.posts) == (["unknown_event"], [])


@pytest.mark.parametrize("scope", ["self", "group"])
def test_a_command_that_is_younger_than_its_event_counts_after_a_restart(
    make_listener: MakeListener, scope: str
) -> None:
    rig = make_listener(grace_seconds=30, policy={"allow": [{}], "scope": scope})
    rig.run(90)
    rig.receiver.last_error = "down"
    rig.announce("web-0" if scope == "self" else "web-1", event_id="E-1", wait=5)
    rig.send("E-1", wait=100)
    for _ in range(2):
        rig.restart()
        rig.receiver.last_error = "down"
        rig.run(70)
    rig.restart(wait=3)
    assert rig.reasons() == ["approved"]


def test_a_restart_neither_shortens_nor_repeats_the_wait_for_the_vms_before_this_one(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(policy={}, auto=[{"group": True}])
    rig.announce("web-1", "web-0", wait=6)
    rig.restart(wait=2)
    assert rig.imds.posts == []
    rig.restart(wait=4)
    assert len(rig.imds.posts) == 1


@pytest.mark.parametrize("name", ["Vm", "ExpiresAt", "vm"])
def test_a_restriction_in_a_wrong_place_is_refused(rig: ListenerRig, name: str) -> None:
    rig.imds.schedule("web-0", event_id="E-1")
    inside = f'{{"StartRequests": [{{"EventId": "E-1", "{name}": "x"}}]}}'
    beside = command_body("E-1").replace(b'"data"', f'"{name}": "x", "data"'.encode())
    rig.queue.send(inside.encode(), message_id="1")
    rig.queue.send(beside, message_id="2")
    rig.run(2)
    assert (rig.reasons(), rig.imds.posts) == (["malformed"] * 2, [])


def test_a_restriction_that_is_null_is_as_if_it_were_absent(rig: ListenerRig) -> None:
    rig.imds.schedule("web-0", event_id="E-1")
    rig.queue.send(b'{"StartRequests": [{"EventId": "E-1", "Vm": null}]}', message_id="1")
    rig.run(2)
    assert rig.reasons() == ["approved"]


# Rules


@pytest.mark.parametrize("event_type", [None, "", 7])
def test_a_rule_without_criteria_prepares_for_an_event_without_a_type_and_does_not_approve_it(
    auto: ListenerRig, event_type: Any
) -> None:
    auto.prepare(EventType=event_type)
    auto.run(5)
    assert (auto.machine.names, auto.imds.posts) == ([DRAIN], [])


@pytest.mark.parametrize("recover", [RECOVER, None])
def test_a_rule_that_matches_later_does_not_prepare_once_more_what_has_the_same_recover(
    make_listener: MakeListener, recover: str | None
) -> None:
    more: dict[str, Any] = {"recover": [recover]} if recover else {}
    short = {"run": [OTHER], "max_notice_seconds": 60, **more}
    rig = make_listener(policy={}, auto=[short, {"run": [DRAIN], **more}])
    event_id = rig.announce(NotBefore=rig.notice(100), wait=2)
    rig.end_programs(wait=50)
    assert rig.machine.names == [DRAIN] + [OTHER] * (recover is None)
    rig.end_programs(code=1, wait=1)
    rig.change(event_id, EventStatus="Started", wait=2)
    assert rig.programs["unprepared"] == (recover is None)


def test_what_a_person_did_says_nothing_of_a_later_time(auto: ListenerRig) -> None:
    auto.remove(auto.prepare("web-0"), wait=1)
    auto.end_programs(wait=1, code=1)
    auto.outbox.commit([], records={(STATE, REQUEST): "done 2020-01-01T00:00:00.000Z"})
    auto.run(1)
    assert auto.listener.status().out_of_work


@pytest.mark.parametrize("boots", [False, True])
def test_an_event_that_is_shown_again_after_a_kill_at_the_start_of_recover_holds_it_up(
    auto: ListenerRig, boots: bool
) -> None:
    auto.imds.incarnation = 100
    event_id = auto.prepare("web-0")
    auto.change(event_id, EventStatus="Started", wait=2)
    (event,) = auto.imds.events

    def kill(_: object) -> None:
        raise KeyboardInterrupt

    auto.machine.on_start, auto.imds.incarnation = kill, 0
    with pytest.raises(KeyboardInterrupt):
        auto.show(wait=2)
    auto.machine.on_start = lambda _: None
    auto.boot_id += "+" * boots
    auto.imds.show(event)
    auto.restart(wait=20)
    assert auto.machine.names == [DRAIN, RECOVER]  # the second one was killed before it began
    auto.remove(event_id, wait=2)
    assert auto.machine.names == [DRAIN, RECOVER, RECOVER]
