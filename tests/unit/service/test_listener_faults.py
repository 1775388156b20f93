"""The listener after repeated messages and kills, and while IMDS fails."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from bridge.errors import ImdsError
from bridge.outbox.rows import Loss
from bridge.service.listener import IMDS_WAIT_SECONDS
from tests.support.listener import ListenerRig, MakeListener
from tests.support.only import only


@pytest.fixture
def rig(make_listener: MakeListener) -> ListenerRig:
    return make_listener()


def test_a_loss_of_the_listener_is_published(rig: ListenerRig) -> None:
    loss = Loss(reason="SizeLimit", count=3, sink="audit", oldest=1e9, newest=1e9)
    rig.outbox._storage.run(lambda database: database.note_losses([loss]), synced=True)
    rig.run()
    assert [event["data"]["Count"] for event in rig.events() if "loss" in event["type"]] == [3]


# Repeated messages and restarts


def test_a_second_message_with_a_waiting_command_is_settled_with_it(rig: ListenerRig) -> None:
    for _ in range(2):
        rig.send("E-1")
        rig.run()
    assert len(rig.queue.messages) == 2
    rig.imds.schedule(event_id="E-1")
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert len(rig.queue.completed) == 2


def test_a_command_that_is_delivered_again_over_a_new_connection_is_settled_once(rig: ListenerRig) -> None:
    rig.send("E-1")
    rig.run()
    rig.receiver.disconnect()
    rig.run()
    rig.imds.schedule(event_id="E-1")
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert len(rig.queue.completed) == len(rig.receiver.settled) == 1


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
    rig.send(*events)
    rig.run()
    assert Counter(rig.reasons()) == {"approved": 2, "other_vm": 1}
    assert rig.imds.posts == [tuple(events[:2])]


def test_after_a_refusal_of_several_events_each_is_posted_alone(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(3)]
    rig.imds.fail(400, methods=["approve"], count=1)
    rig.send(*events)
    rig.run(5)
    assert [len(post) for post in rig.imds.posts] == [3, 1, 1, 1]
    assert rig.reasons() == ["approved"] * 3
    assert len(rig.queue.completed) == 1


def test_an_event_that_is_decided_early_has_its_receipt_early(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=600)
    event = rig.imds.schedule()
    rig.send("not-yet", event)
    rig.run()
    receipt = only(rig.receipts())
    assert receipt["subject"] == event
    assert len(rig.queue.messages) == 1
    rig.imds.schedule(event_id="not-yet")
    rig.run(2)
    assert rig.reasons() == ["approved", "approved"]
    assert len(rig.queue.completed) == 1


def test_a_restart_continues_where_only_some_events_were_decided(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=600)
    event = rig.imds.schedule()
    rig.send("never", event)
    rig.run()
    assert rig.reasons() == ["approved"]
    rig.restart(grace_seconds=0.0)
    rig.run()
    assert rig.reasons() == ["approved", "unknown_event"]
    assert len(rig.imds.posts) == 1
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("auto", [False, True], ids=["command", "auto rule"])
@pytest.mark.parametrize("since", ["gone", "started", "still scheduled"])
def test_an_event_that_was_posted_before_a_kill_is_accepted_and_posted_again_only_if_it_is_scheduled(
    make_listener: MakeListener, since: str, auto: bool
) -> None:
    rig = make_listener(auto=[{}]) if auto else make_listener()
    event = rig.imds.schedule()
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    if not auto:
        rig.send(event)
    rig.run()
    assert (rig.receipts(), len(rig.imds.posts)) == ([], 1)
    rig.restart()
    if since == "gone":
        rig.imds.remove(event)
    elif since == "started":
        rig.imds.change(event, EventStatus="Started")
    rig.run(2)
    reason = "approved" if since == "still scheduled" else "not_recorded"
    assert rig.answers() == [("Accepted", reason)]
    assert len(rig.imds.posts) == 1 + (since == "still scheduled")
    rig.restart()
    rig.run(2)
    assert len(rig.receipts()) == 1


@pytest.mark.parametrize(
    ("policy", "changes", "seconds"),
    [
        ({"allow": [{"min_notice_seconds": 100}]}, {}, 900),
        ({"allow": [{"event_type": ["Reboot"]}]}, {"EventType": "Redeploy"}, 0),
        ({"allow": [{}]}, {"Resources": ["web-1"]}, 0),
        ({"allow": [{}]}, {"EventStatus": "Paused"}, 0),
    ],
    ids=["notice", "type", "resources", "status"],
)
def test_an_event_that_was_posted_before_a_kill_and_is_not_allowed_any_more_is_never_rejected(
    make_listener: MakeListener, policy: dict[str, Any], changes: dict[str, Any], seconds: float
) -> None:
    rig = make_listener(policy=policy)
    event = rig.imds.schedule(NotBefore=rig.in_seconds(950))
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    assert len(rig.imds.posts) == 1
    rig.restart()
    rig.clock.advance(seconds)
    rig.imds.change(event, **changes)
    rig.run(2)
    receipt = only(rig.receipts())
    assert receipt["data"]["Outcome"] in ("Failed", "Accepted")
    if receipt["data"]["Outcome"] == "Failed":
        assert receipt["data"]["Reason"] == "unknown_outcome"
        assert "the outcome is not known" in receipt["data"]["Detail"]
    assert len(rig.imds.posts) == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (ImdsError("the answer was lost"), "Accepted", "not_recorded"),
        (500, "Accepted", "not_recorded"),
        (503, "Accepted", "not_recorded"),
        (404, "Rejected", "already_started"),
        (429, "Rejected", "already_started"),
    ],
    ids=str,
)
@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "restarted"])
def test_an_event_that_starts_after_a_failed_post_was_approved_unless_imds_refused_the_post(
    rig: ListenerRig, answer: ImdsError | int, outcome: str, reason: str, restarts: bool
) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(answer, methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    if restarts:
        rig.restart()
    rig.imds.change(event, EventStatus="Started")
    rig.run(3)
    assert rig.answers() == [(outcome, reason)]
    assert len(rig.imds.posts) == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("auto", [False, True], ids=["command", "auto rule"])
def test_a_refused_post_says_nothing_of_an_earlier_one_whose_answer_was_lost(
    make_listener: MakeListener, restarts: bool, auto: bool
) -> None:
    rig = make_listener(auto=[{}]) if auto else make_listener()
    event = rig.imds.schedule()
    rig.imds.fail(ImdsError("the answer was lost"), methods=["approve"], count=1)
    rig.imds.fail(429, methods=["approve"])
    if not auto:
        rig.send(event)
    rig.run()
    if restarts:
        rig.restart()
    rig.run(2)
    assert len(rig.imds.posts) > 1
    rig.imds.change(event, EventStatus="Started")
    rig.run(3)
    assert rig.answers() == [("Accepted", "not_recorded")]


@pytest.mark.parametrize("auto", [False, True], ids=["command", "auto rule"])
def test_an_event_may_be_approved_whose_post_is_refused_after_one_without_an_answer(
    make_listener: MakeListener, auto: bool
) -> None:
    rig = make_listener(auto=[{}]) if auto else make_listener()
    event = rig.imds.schedule()
    rig.imds.fail(ImdsError("the answer was lost"), methods=["approve"], count=1)
    rig.imds.fail(400, methods=["approve"], count=1)
    if not auto:
        rig.send(event)
    rig.run(20)
    assert rig.answers() == [("Failed", "unknown_outcome")]


def test_a_receipt_names_the_type_and_the_vms_of_an_event_that_is_known(rig: ListenerRig) -> None:
    event = rig.announce()
    rig.send(event, id="late", ExpiresAt="2020-01-01T00:00:00Z")
    rig.run(2)
    receipt = only(rig.receipts())
    assert receipt["data"]["Reason"] == "expired"
    assert (receipt["data"]["EventType"], receipt["data"]["Resources"]) == ("Reboot", ["web-0"])


def test_a_command_that_is_denied_does_not_depend_on_the_post_of_an_auto_rule(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(policy={"allow": [{"event_type": ["Freeze"]}]}, auto=[{}])
    event = rig.imds.schedule()
    rig.send(event)
    rig.run()
    assert rig.imds.approved == [event]
    assert [line for line in rig.journal if line.startswith("commit intent")] == [
        f"commit intent {event.lower()}"
    ]


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
    rig.send(event)
    rig.run(10)
    assert rig.receipts() == []
    assert rig.listener.status().last_error
    rig.imds.restore()
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert rig.listener.status().last_error is None
    assert len(rig.queue.completed) == 1


def test_a_document_that_is_not_one_is_a_failure_of_imds(rig: ListenerRig) -> None:
    rig.imds.serve(b"<html>")
    rig.send("E-1")
    rig.run(2)
    assert rig.receipts() == []
    rig.imds.schedule(event_id="E-1")
    rig.run(2)
    assert rig.reasons() == ["approved"]


def test_imds_is_left_alone_for_as_long_as_it_asks(rig: ListenerRig) -> None:
    rig.imds.fail(ImdsError("busy", status=429, retry_after_seconds=20.0), methods=["document"], count=1)
    rig.send(rig.imds.schedule())
    rig.run(19)
    assert rig.imds.asked() == 1
    rig.run(2)
    assert rig.reasons() == ["approved"]


def test_while_imds_fails_a_command_waits_until_it_expires_and_has_failed_then(rig: ListenerRig) -> None:
    rig.imds.fail(500, methods=["document"])
    rig.send(rig.imds.schedule(), ExpiresAt=rig.in_seconds(60))
    rig.run(59)
    assert rig.receipts() == []
    rig.run(2)
    data = only(rig.receipts())["data"]
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_unavailable")
    assert "500" in data["Detail"]
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
    rig.restart()
    rig.send(rig.imds.schedule())
    rig.run(IMDS_WAIT_SECONDS - 1)
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


def test_a_command_that_expires_while_imds_refuses_its_post_is_rejected_with_the_error_of_imds(
    rig: ListenerRig,
) -> None:
    rig.imds.fail(429, methods=["approve"])
    rig.send(rig.imds.schedule(), ExpiresAt=rig.in_seconds(10))
    rig.run(12)
    receipt = only(rig.receipts())
    assert (receipt["data"]["Outcome"], receipt["data"]["Reason"]) == ("Rejected", "expired")
    assert "429" in receipt["data"]["Detail"]
    assert len(rig.queue.completed) == 1


def test_a_command_that_expires_after_a_post_without_an_outcome_has_failed(rig: ListenerRig) -> None:
    rig.imds.fail(500, methods=["approve"])
    rig.send(rig.imds.schedule(), ExpiresAt=rig.in_seconds(10))
    rig.run(12)
    receipt = only(rig.receipts())
    assert (receipt["data"]["Outcome"], receipt["data"]["Reason"]) == ("Failed", "unknown_outcome")
    assert "the outcome is not known" in receipt["data"]["Detail"]


def test_an_auto_rule_does_not_give_up_while_imds_refuses_and_the_event_stays(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(auto=[{}])
    rig.imds.fail(500, methods=["approve"])
    event = rig.imds.schedule()
    rig.run(IMDS_WAIT_SECONDS + 60)
    assert rig.receipts() == []
    rig.imds.restore()
    rig.run(3)
    assert (rig.imds.approved, rig.reasons()) == ([event], ["approved"])


@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("since", ["changed", "other events", "an hour"])
def test_a_command_whose_post_has_no_outcome_is_posted_again_for_the_same_content_and_ten_minutes_at_most(
    rig: ListenerRig, since: str, restarts: bool
) -> None:
    event = rig.imds.schedule(EventType="Freeze")
    rig.imds.fail(500, methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    if restarts:
        rig.restart()
    if since == "changed":
        rig.imds.change(event, EventType="Redeploy", Resources=["web-0", "web-1"])
    elif since == "other events":  # which may have hidden that it left and returned
        rig.clock.advance(6)
        rig.imds.show(*rig.imds.events, {"EventId": "other"})
        rig.imds.show(*rig.imds.events)
    else:
        rig.clock.advance(3600)
    rig.run(5)
    data = only(rig.receipts())["data"]
    if since == "other events":
        assert (data["Reason"], len(rig.imds.posts)) == ("approved", 2)
        return
    assert (data["Outcome"], data["Reason"]) == ("Failed", "unknown_outcome")
    assert ("has changed or returned since" if since == "changed" else "the first try was") in data["Detail"]
    assert rig.imds.posts == [(event,)]


# One event whose POST fails


def failing(rig: ListenerRig, answer: int | str) -> Callable[[float], None]:
    def fail(limit_seconds: float) -> None:
        if isinstance(answer, int):
            raise ImdsError(f"answered {answer}", status=answer)
        rig.clock.advance(limit_seconds if answer == "no answer" else 0)
        raise ImdsError(answer)

    return fail


@pytest.mark.parametrize("answer", [500, 404, 401, 409, 503, 400, "reset"])
@pytest.mark.parametrize("count", [1, 20])
def test_events_whose_posts_fail_delay_a_valid_one_by_at_most_a_second(
    rig: ListenerRig, answer: int | str, count: int
) -> None:
    for _ in range(count):
        rig.imds.bad[rig.imds.schedule()] = failing(rig, answer)
    rig.send(*rig.imds.bad, id="bad")
    rig.run(5)
    for number in range(5):
        event = rig.imds.schedule()
        rig.send(event, id=f"c{number}")
        rig.run(1.5)
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
    rig.send(*events)
    rig.run(6)
    assert [len(post) for post in rig.imds.posts][:2] == [5, 1]
    assert rig.imds.approved == events[1:]


def test_a_post_that_hangs_delays_others_by_its_limit_once(rig: ListenerRig) -> None:
    event, other = rig.imds.schedule(), rig.imds.schedule()
    rig.imds.bad[event] = failing(rig, "no answer")
    began = rig.clock.monotonic()
    rig.send(event, other)
    rig.run(2)
    assert rig.imds.approved == [other]
    assert rig.clock.monotonic() - began < 15
    for number in range(10):
        began = rig.clock.monotonic()
        late = rig.imds.schedule()
        rig.send(late, id=f"c{number}")
        rig.run(1)
        assert rig.reasons(f"c{number}") == ["approved"]
        assert rig.clock.monotonic() - began <= 12


def test_a_429_pauses_all_and_the_events_stay_together(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(3)]
    rig.imds.fail(ImdsError("busy", status=429, retry_after_seconds=5.0), methods=["approve"], count=1)
    rig.send(*events)
    rig.run(4.5)
    assert len(rig.imds.posts) == 1
    rig.run(2)
    assert rig.imds.approved == events


def test_the_error_of_an_event_that_has_gone_is_shown_no_more(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.imds.bad[event] = failing(rig, 500)
    rig.send(event)
    rig.run(2)
    assert rig.listener.status().last_error == "answered 500"
    rig.remove(event, 2)
    assert rig.listener.status().last_error is None
