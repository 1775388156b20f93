"""The listener after repeated messages and kills, and while IMDS fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bridge.approvals.inbox import IMDS_WAIT_SECONDS
from bridge.errors import ImdsError
from bridge.outbox.rows import Loss
from tests.support.listener import ListenerRig, MakeListener
from tests.support.only import only

LOST = ImdsError("the answer was lost")
by_command_or_rule = pytest.mark.parametrize("auto", [(), ({},)], ids=["command", "auto rule"])
in_one_process_or_two = pytest.mark.parametrize("restarts", [False, True], ids=["same process", "restarted"])


def post(rig: ListenerRig, *answers: ImdsError | int, restarts: bool = False, **event: Any) -> str:
    """Have an event POSTed by a command or a rule, answer the first POSTs so, and perhaps restart after the first."""
    event_id = rig.imds.schedule(**event)
    for answer in answers:
        rig.imds.fail(answer, methods=["approve"], count=1)
    if not rig.settings.auto:
        rig.send(event_id)
    rig.run()
    assert len(rig.imds.posts) == 1
    if restarts:
        rig.restart()
    return event_id


def test_a_loss_of_the_listener_is_published(rig: ListenerRig) -> None:
    loss = Loss(reason="SizeLimit", count=3, sink="audit", oldest=1e9, newest=1e9)
    rig.outbox.storage.run(lambda database: database.note_losses([loss]), synced=True)
    rig.run()
    assert [event["data"]["Count"] for event in rig.events() if "loss" in event["type"]] == [3]


# Repeated messages and restarts


def test_a_second_message_with_a_waiting_command_is_settled_with_it(rig: ListenerRig) -> None:
    for _ in range(2):
        rig.send("E-1", wait=0)
    assert len(rig.queue.messages) == 2
    rig.announce(event_id="E-1", wait=2)
    assert (rig.reasons(), len(rig.queue.completed)) == (["approved"], 2)


def test_a_command_that_is_delivered_again_over_a_new_connection_is_settled_once(rig: ListenerRig) -> None:
    rig.send("E-1", wait=0)
    rig.receiver.disconnect()
    rig.run()
    rig.announce(event_id="E-1", wait=2)
    assert (rig.reasons(), len(rig.queue.completed), len(rig.receiver.settled)) == (["approved"], 1, 1)


def test_a_command_seen_before_gives_its_old_receipt_also_after_a_restart(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.decide(event)
    rig.decide(event)
    rig.restart()
    rig.decide(event)
    first, second, third = rig.receipts("c")
    assert first == second == third
    assert len(rig.imds.posts) == 1
    assert len(rig.queue.completed) == 3


def test_the_same_malformed_message_sent_three_times_gets_the_same_receipt(rig: ListenerRig) -> None:
    for _ in range(3):
        rig.queue.send(b"nonsense", message_id="m")
    rig.run()
    receipts = rig.receipts()
    assert len(receipts) == len(rig.queue.dead_letters) == 3
    assert len({json.dumps(receipt, sort_keys=True) for receipt in receipts}) == 1


def test_several_events_are_approved_by_one_post(rig: ListenerRig) -> None:
    events = [rig.imds.schedule(), rig.imds.schedule(), rig.imds.schedule("web-1")]
    rig.send(*events, wait=0)
    assert Counter(rig.reasons()) == {"approved": 2, "other_vm": 1}
    assert rig.imds.posts == [tuple(events[:2])]


def test_after_a_refusal_of_several_events_each_is_posted_alone(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(3)]
    rig.imds.fail(400, methods=["approve"], count=1)
    rig.send(*events, wait=5)
    assert [len(post) for post in rig.imds.posts] == [3, 1, 1, 1]
    assert rig.reasons() == ["approved"] * 3
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["appears", "is refused after a restart"])
def test_an_event_that_is_decided_early_has_its_receipt_early_and_the_command_goes_on_until_the_other(
    make_listener: MakeListener, restarts: bool
) -> None:
    rig = make_listener(grace_seconds=600)
    event = rig.imds.schedule()
    rig.send("late", event, wait=0)
    assert only(rig.receipts())["subject"] == event
    assert len(rig.queue.messages) == 1
    if restarts:
        rig.restart(grace_seconds=0.0, wait=0)
    else:
        rig.announce(event_id="late", wait=2)
    assert rig.reasons() == ["approved", "unknown_event" if restarts else "approved"]
    assert (len(rig.imds.posts), len(rig.queue.completed)) == (1 if restarts else 2, 1)


@by_command_or_rule
@pytest.mark.parametrize("since", ["gone", "started", "still scheduled"])
def test_an_event_that_was_posted_before_a_kill_is_accepted_and_posted_again_only_if_it_is_scheduled(
    make_listener: MakeListener, since: str, auto: Any
) -> None:
    rig = make_listener(auto=auto)
    event = post(rig, LOST, restarts=True)
    if since == "gone":
        rig.imds.remove(event)
    elif since == "started":
        rig.imds.change(event, EventStatus="Started")
    rig.run(2)
    posts, reason = (2, "approved") if since == "still scheduled" else (1, "not_recorded")
    assert (rig.answers(), len(rig.imds.posts)) == ([("Accepted", reason)], posts)
    rig.restart(wait=2)
    assert len(rig.receipts()) == 1


@pytest.mark.parametrize(
    ("rule", "changes", "seconds", "answer"),
    [
        ({"min_notice_seconds": 100}, {}, 900, ("Failed", "unknown_outcome")),
        ({"event_type": ["Reboot"]}, {"EventType": "Redeploy"}, 0, ("Failed", "unknown_outcome")),
        ({}, {"Resources": ["web-1"]}, 0, ("Failed", "unknown_outcome")),
        ({}, {"EventStatus": "Paused"}, 0, ("Accepted", "not_recorded")),
    ],
    ids=["notice", "type", "resources", "status"],
)
def test_an_event_that_was_posted_before_a_kill_and_is_not_allowed_any_more_is_never_rejected(
    make_listener: MakeListener, rule: Any, changes: Any, seconds: float, answer: tuple[str, str]
) -> None:
    rig = make_listener(policy={"allow": [rule]})
    event = post(rig, LOST, restarts=True, NotBefore=rig.in_seconds(950))
    rig.clock.advance(seconds)
    rig.change(event, **changes, wait=2)
    assert (rig.answers(), len(rig.imds.posts)) == ([answer], 1)


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        *((lost, "Accepted", "not_recorded") for lost in (LOST, 500, 503)),
        *((refused, "Rejected", "already_started") for refused in (404, 429)),
    ],
    ids=str,
)
@in_one_process_or_two
def test_an_event_that_starts_after_a_failed_post_was_approved_unless_imds_refused_the_post(
    rig: ListenerRig, answer: ImdsError | int, outcome: str, reason: str, restarts: bool
) -> None:
    event = post(rig, answer, restarts=restarts)
    rig.change(event, EventStatus="Started", wait=3)
    assert (rig.answers(), len(rig.imds.posts)) == ([(outcome, reason)], 1)


@in_one_process_or_two
@by_command_or_rule
def test_a_refused_post_says_nothing_of_an_earlier_one_whose_answer_was_lost(
    make_listener: MakeListener, restarts: bool, auto: Any
) -> None:
    rig = make_listener(auto=auto)
    event = post(rig, LOST, *[429] * 9, restarts=restarts)
    rig.run(2)
    assert len(rig.imds.posts) > 1
    rig.change(event, EventStatus="Started", wait=3)
    assert rig.answers() == [("Accepted", "not_recorded")]


@by_command_or_rule
def test_an_event_may_be_approved_whose_post_is_refused_after_one_without_an_answer(
    make_listener: MakeListener, auto: Any
) -> None:
    rig = make_listener(auto=auto)
    post(rig, LOST, 400)
    rig.run(20)
    assert rig.answers() == [("Failed", "unknown_outcome")]


def test_a_receipt_names_the_type_and_the_vms_of_an_event_that_is_known(rig: ListenerRig) -> None:
    event = rig.announce()
    rig.send(event, id="late", ExpiresAt="2020-01-01T00:00:00Z", wait=2)
    data = only(rig.receipts())["data"]
    assert (data["Reason"], data["EventType"], data["Resources"]) == ("expired", "Reboot", ["web-0"])


def test_a_command_that_is_denied_does_not_depend_on_the_post_of_an_auto_rule(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(policy={"allow": [{"event_type": ["Freeze"]}]}, auto=[{}])
    event = rig.imds.schedule()
    rig.send(event, wait=0)
    assert rig.imds.approved == [event]
    intents = [line for line in rig.journal if line.startswith("commit intent")]
    assert intents == [f"commit intent {event.lower()}"]


# While IMDS fails


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        *(("document", fault) for fault in (ImdsError("no answer"), 400, 410, 429, 500)),
        # a POST that IMDS answers with 400 has failed for good
        *(("approve", fault) for fault in (ImdsError("no answer"), 410, 429, 500)),
    ],
    ids=str,
)
def test_a_command_waits_until_imds_answers_well_again(
    rig: ListenerRig, method: str, fault: ImdsError | int
) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(fault, methods=[method])
    rig.send(event, wait=10)
    assert rig.receipts() == []
    assert rig.listener.status().last_error
    rig.imds.restore()
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert rig.listener.status().last_error is None
    assert len(rig.queue.completed) == 1


def test_a_document_that_is_not_one_is_a_failure_of_imds(rig: ListenerRig) -> None:
    rig.imds.serve(b"<html>")
    rig.send("E-1", wait=2)
    assert rig.receipts() == []
    rig.announce(event_id="E-1", wait=2)
    assert rig.reasons() == ["approved"]


def test_imds_is_left_alone_for_as_long_as_it_asks(rig: ListenerRig) -> None:
    rig.imds.fail(ImdsError("busy", status=429, retry_after_seconds=20.0), methods=["document"], count=1)
    rig.send(rig.imds.schedule(), wait=19)
    assert rig.imds.asked() == 1
    rig.run(2)
    assert rig.reasons() == ["approved"]


@pytest.mark.parametrize(
    ("method", "status", "answer", "detail"),
    [
        ("document", 500, ("Failed", "imds_unavailable"), "500"),
        ("approve", 429, ("Rejected", "expired"), "429"),
        ("approve", 500, ("Failed", "unknown_outcome"), "the outcome is not known"),
    ],
)
def test_while_imds_fails_a_command_waits_until_it_expires_and_is_answered_by_what_may_have_been_posted(
    rig: ListenerRig, method: str, status: int, answer: tuple[str, str], detail: str
) -> None:
    rig.imds.fail(status, methods=[method])
    rig.send(rig.imds.schedule(), ExpiresAt=rig.in_seconds(60), wait=59)
    assert rig.receipts() == []
    rig.run(3)
    assert rig.answers() == [answer]
    assert detail in rig.receipts()[0]["data"]["Detail"]
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("document", "imds_unavailable"),
        ("approve", "unknown_outcome"),
        ("instance", "imds_unavailable"),
    ],
)
def test_a_command_that_never_expires_waits_for_imds_for_ten_minutes(
    rig: ListenerRig, method: str, reason: str
) -> None:
    rig.imds.fail(500, methods=[method])
    rig.boot_id = "boot-2"
    rig.restart()
    rig.send(rig.imds.schedule(), wait=IMDS_WAIT_SECONDS - 1)
    assert rig.receipts() == []
    rig.run(2)
    assert rig.reasons() == [reason]
    assert len(rig.queue.completed) == 1


def test_imds_is_asked_at_most_five_times_a_second_whatever_waits(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(20)]
    rig.imds.fail(400, methods=["approve"], count=1)
    rig.send(*events)
    for _ in range(20):
        before = len(rig.imds.calls)
        rig.run(0.75)
        rig.clock.advance(0.25)
        assert len(rig.imds.calls) - before <= 4  # with `forward`'s poll, five
    assert rig.reasons() == ["approved"] * 20


def test_an_auto_rule_does_not_give_up_while_imds_refuses_and_the_event_stays(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(auto=[{}])
    rig.imds.fail(500, methods=["approve"])
    event = rig.announce(wait=IMDS_WAIT_SECONDS + 60)
    assert rig.receipts() == []
    rig.imds.restore()
    rig.run(3)
    assert (rig.imds.approved, rig.reasons()) == ([event], ["approved"])


@in_one_process_or_two
@pytest.mark.parametrize(
    ("since", "posts", "detail"),
    [
        ("changed", 1, "has changed or returned since"),
        ("an hour", 1, "the first try was"),
        ("other events", 2, ""),
    ],
)
def test_a_command_whose_post_has_no_outcome_is_posted_again_for_the_same_content_and_ten_minutes_at_most(
    rig: ListenerRig, since: str, restarts: bool, posts: int, detail: str
) -> None:
    event = post(rig, 500, restarts=restarts, EventType="Freeze")
    if since == "changed":
        rig.imds.change(event, EventType="Redeploy", Resources=["web-0", "web-1"])
    elif since == "an hour":
        rig.clock.advance(3600)
    else:  # which may have hidden that it left and returned
        rig.clock.advance(6)
        rig.imds.show(*rig.imds.events, {"EventId": "other"})
        rig.imds.show(*rig.imds.events)
    rig.run(5)
    answer = ("Failed", "unknown_outcome") if posts == 1 else ("Accepted", "approved")
    assert (rig.answers(), rig.imds.posts) == ([answer], [(event,)] * posts)
    assert detail in rig.receipts()[0]["data"]["Detail"]


# One event whose POST fails


def failing(rig: ListenerRig, answer: int | str) -> Callable[[float], None]:
    def fail(limit_seconds: float) -> None:
        if isinstance(answer, int):
            raise ImdsError(f"answered {answer}", status=answer)
        rig.clock.advance(limit_seconds if answer == "no answer" else 0)
        raise ImdsError(answer)

    return fail


@pytest.mark.parametrize(
    ("count", "answer"),
    [*((1, answer) for answer in (500, 404, 401, 409, 503, 400, "reset")), (20, 500), (20, 400)],
)
def test_events_whose_posts_fail_delay_a_valid_one_by_at_most_a_second(
    rig: ListenerRig, answer: int | str, count: int
) -> None:
    for _ in range(count):
        rig.imds.bad[rig.imds.schedule()] = failing(rig, answer)
    rig.send(*rig.imds.bad, id="bad", wait=5)
    for number in range(5):
        event = rig.imds.schedule()
        rig.send(event, id=f"c{number}", wait=1.5)
        assert rig.reasons(f"c{number}") == ["approved"]
    if answer != 400:
        assert rig.receipts("bad") == []
        rig.imds.bad.clear()
        rig.run(2 + 1.5 * count)
        assert set(rig.reasons("bad")) == {"approved"}


def test_valid_events_beside_a_failing_one_are_approved_alone_once_their_joint_post_has_failed(
    rig: ListenerRig,
) -> None:
    events = [rig.imds.schedule() for _ in range(5)]
    rig.imds.bad[events[0]] = failing(rig, 500)
    rig.send(*events, wait=6)
    assert [len(post) for post in rig.imds.posts][:2] == [5, 1]
    assert rig.imds.approved == events[1:]


def test_a_post_that_hangs_delays_others_by_its_limit_once(rig: ListenerRig) -> None:
    event, other = rig.imds.schedule(), rig.imds.schedule()
    rig.imds.bad[event] = failing(rig, "no answer")
    began = rig.clock.monotonic()
    rig.send(event, other, wait=2)
    assert rig.imds.approved == [other]
    assert rig.clock.monotonic() - began < 15
    for number in range(10):
        began = rig.clock.monotonic()
        late = rig.imds.schedule()
        rig.send(late, id=f"c{number}", wait=1)
        assert rig.reasons(f"c{number}") == ["approved"]
        assert rig.clock.monotonic() - began <= 12


def test_a_429_pauses_all_and_the_events_stay_together(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(3)]
    rig.imds.fail(ImdsError("busy", status=429, retry_after_seconds=5.0), methods=["approve"], count=1)
    rig.send(*events, wait=4.5)
    assert len(rig.imds.posts) == 1
    rig.run(2)
    assert rig.imds.approved == events


def test_the_error_of_an_event_that_has_gone_is_shown_no_more(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.imds.bad[event] = failing(rig, 500)
    rig.send(event, wait=2)
    assert rig.listener.status().last_error == "answered 500"
    rig.remove(event, wait=2)
    assert rig.listener.status().last_error is None
