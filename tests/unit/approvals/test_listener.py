"""What the listener decides, on doubles and with a clock that the test moves."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bridge.errors import ImdsError
from bridge.imds.instance import Vm
from bridge.outbox.rows import STATE, VM
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, MakeListener, command_body
from tests.support.machine import program
from tests.support.only import only

# Outcomes and reasons


def test_an_approval_is_posted_and_has_a_receipt_with_all_resources(rig: ListenerRig) -> None:
    event = rig.imds.schedule("web-0", "web-1")
    rig.send(event, id="c", Reason="now", RequestedBy="jo", wait=0)
    receipt = only(rig.receipts("c"))
    data = receipt["data"]
    assert receipt["type"] == "io.imdsbridge.approval.accepted.v1"
    assert (receipt["subject"], receipt["correlationid"], receipt["causationid"]) == (event, event, "c")
    assert (rig.answers(), data["Resources"]) == ([("Accepted", "approved")], ["web-0", "web-1"])
    assert data["Command"] == {"Id": "c", "RequestedBy": "jo", "Reason": "now", "Vm": "", "ExpiresAt": None}
    assert rig.imds.approved == [event]
    assert len(rig.queue.completed) == 1


def test_the_time_from_a_command_to_its_approval_is_measured_once(rig: ListenerRig) -> None:
    rig.send("E-1", "E-2", id="late", wait=3.0)
    rig.imds.schedule(event_id="e-1")
    rig.imds.schedule(event_id="e-2")
    rig.send("E-3", id="unknown", wait=4.0)
    seconds = only(rig.approved_after)
    assert 3.0 <= seconds <= 6.0


def test_the_intent_is_committed_before_the_post_and_the_receipt_before_the_message_is_settled(
    rig: ListenerRig,
) -> None:
    event = rig.imds.schedule(event_id="e-1")
    rig.send(event, id="c", wait=0)
    assert rig.journal == ["commit intent e-1", "POST e-1", "commit receipt e-1", "settle c"]


def test_the_event_id_and_the_document_incarnation_are_posted_as_imds_spells_them(rig: ListenerRig) -> None:
    event = rig.imds.schedule(event_id="4cAeA225-A741-474D-A72E-428C86FCD853")
    rig.imds.serve({"DocumentIncarnation": "7", "Events": rig.imds.events})
    assert rig.decide(event.upper())["EventId"] == event
    posts = [(call.event_ids, call.incarnation) for call in rig.imds.calls if call.method == "approve"]
    assert posts == [((event,), "7")]


@pytest.mark.parametrize(
    "body",
    [
        b"nonsense",
        b"",
        b"\xff\xfe" * 50,
        b"[" * 200_000,
        b'{"EventId": "' + b"x" * 200 * 1024 + b'"}',
        '{"EventId": "A"}'.encode("utf-16"),
        b'{"specversion": "1.0", "type": "com.example.other", "id": "1", "data": {}}',
        b'{"EventId": "A", "ExpiresAt": "0001-01-01T00:00:00+14:00"}',
    ],
    ids=["text", "empty", "bytes", "deep", "200 KiB", "UTF-16", "another event", "odd time"],
)
@pytest.mark.usefixtures("without_collection")
def test_a_malformed_message_is_dead_lettered_with_a_short_receipt(rig: ListenerRig, body: bytes) -> None:
    rig.queue.send(body, message_id="m")
    rig.run()
    command_id = "1" if b'"id": "1"' in body else "m"  # the command's, else the message's
    data = only(rig.receipts(command_id))["data"]
    assert (data["Outcome"], data["Reason"], data["EventId"]) == ("Rejected", "malformed", None)
    assert len(json.dumps(data)) < 2000
    assert rig.dead_letter_reasons == ["malformed"]
    assert rig.receiver.settled[0][1].description == data["Detail"]


def test_messages_without_an_id_are_different_commands(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    for _ in range(2):
        rig.queue.send(json.dumps({"EventId": event}).encode())
    rig.run()
    assert len({one["id"] for one in rig.receipts()}) == 2


def test_an_expired_command_is_rejected_also_while_imds_does_not_answer(rig: ListenerRig) -> None:
    rig.imds.fail(500)
    assert rig.decide("e-1", ExpiresAt=rig.in_seconds(-1))["Reason"] == "expired"
    assert rig.queue.messages == []


@pytest.mark.parametrize(
    ("enqueued_in", "waits"), [(0, 30), (-29, 1), (3600, 30)], ids=["now", "earlier", "by a clock ahead"]
)
def test_an_unknown_event_is_rejected_when_its_grace_is_over_since_the_broker_accepted_the_command(
    make_listener: MakeListener, enqueued_in: float, waits: float
) -> None:
    rig = make_listener(grace_seconds=30)
    at = rig.clock.now() + timedelta(seconds=enqueued_in)
    rig.queue.send(command_body("unknown"), message_id="c", enqueued_at=at)
    rig.run(waits - 0.5)
    assert rig.receipts() == []
    rig.run(1)
    data = only(rig.receipts("c"))["data"]
    assert (data["Outcome"], data["Reason"], data["EventId"]) == ("Rejected", "unknown_event", "unknown")
    assert rig.queue.messages == []


def test_an_event_is_not_unknown_because_of_a_document_from_before_the_command(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(grace_seconds=0)
    assert rig.decide(rig.imds.schedule(), id="1")["Reason"] == "approved"
    rig.imds.schedule(event_id="E-2")
    rig.clock.advance(0.5)  # within the second for which the last document is used
    rig.send("E-2", id="2", wait=0)
    assert rig.receipts("2") == []
    rig.run(1)
    assert rig.reasons("2") == ["approved"]


@pytest.mark.parametrize("auto", [[], [{"event_type": ["Freeze"]}]], ids=["commands", "auto rules too"])
@pytest.mark.parametrize("pace", [1.1, 4.0])
def test_a_command_for_an_event_newer_than_the_document_is_decided_at_once(
    make_listener: MakeListener, auto: list[dict[str, Any]], pace: float
) -> None:
    rig = make_listener(auto=auto)
    for _ in range(10):
        event = rig.imds.schedule()
        rig.send(event, id=event, wait=0)
        assert rig.imds.posts[-1] == (event,)
        rig.remove(event, wait=1)
        rig.clock.advance(pace - 1)


@pytest.mark.parametrize("auto", [[], [{"event_type": ["Freeze"]}]], ids=["commands", "auto rules too"])
def test_one_command_after_the_other_waits_no_longer_than_two_calls_of_three_a_second_take(
    make_listener: MakeListener, auto: list[dict[str, Any]]
) -> None:
    """The next command comes 0.3 s after the answer; IMDS takes 2 ms for each call."""
    rig, waited = make_listener(auto=auto), []
    rig.imds.on_read = lambda: rig.clock.advance(0.002)
    rig.imds.on_post = lambda _: rig.clock.advance(0.002)

    def run_until(at: float, event: str = "") -> None:
        while rig.clock.monotonic() < at and event not in rig.imds.approved:
            rig.clock.advance(min(max(0.001, rig.listener.wait_seconds), at - rig.clock.monotonic()))
            rig.listener.run_once(0.0)

    for number in range(20):
        run_until(rig.clock.monotonic() + 0.3)
        event, began = rig.imds.schedule(), rig.clock.monotonic()
        rig.send(event, id=str(number))
        run_until(began + 2, event)
        waited.append(rig.clock.monotonic() - began)
    assert sum(waited) / len(waited) < 0.5


def test_commands_for_unknown_events_leave_a_call_for_a_post_soon(rig: ListenerRig) -> None:
    known = rig.imds.schedule()
    for number in range(40):
        rig.send(f"unknown-{number}", id=str(number), wait=0)
        rig.clock.advance(0.02)
    assert rig.imds.asked() == 3  # the last one 0.25 s before a POST is possible
    assert 0 < rig.listener.wait_seconds < 0.25
    rig.send(known)
    rig.run(0.5)  # the document is read again just before the POST
    assert rig.imds.posts == [(known,)]


@pytest.mark.parametrize(
    ("settings", "event", "command", "reason"),
    [
        ({}, {"EventStatus": "Started"}, {}, "already_started"),
        ({"session": "{vm}"}, {}, {"Vm": "web-1"}, "other_vm"),
        ({"session": "{vm}"}, {"Resources": ["web-1"]}, {}, "other_vm"),
        ({"policy": {}}, {}, {}, "denied"),
    ],
)
def test_a_command_that_is_not_permitted_is_rejected_with_the_reason_and_nothing_is_posted(
    make_listener: MakeListener, settings: dict[str, Any], event: Any, command: Any, reason: str
) -> None:
    rig = make_listener(**settings)
    rig.decide(rig.imds.schedule(**event), **command)
    assert rig.answers() == [("Rejected", reason)]
    assert (rig.imds.posts, rig.queue.messages) == ([], [])


def test_a_post_that_imds_refuses_has_failed(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(400, methods=["approve"], count=1)
    data = rig.decide(event)
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_refused")
    assert (data["EventType"], data["Resources"]) == ("Reboot", ["web-0"])
    assert len(rig.queue.completed) == 1


STARTED: dict[str, Any] = {"EventStatus": "Started", "NotBefore": ""}


def approved(rig: ListenerRig, *resources: str) -> str:
    """Have an event approved by command 1."""
    event = rig.imds.schedule(*resources)
    assert rig.decide(event, id="1")["Reason"] == "approved"
    return event


@pytest.mark.parametrize(
    ("changes", "seconds", "jump", "reason"),
    [
        pytest.param({}, 58, 0, "already_approved", id="within a minute"),
        pytest.param({}, 60, 0, "approved", id="after a minute"),
        pytest.param({}, 90, -3600, "approved", id="approved in the future of a clock that was set back"),
        pytest.param(STARTED, 58, 0, "already_approved", id="started within a minute"),
        pytest.param(STARTED, 60, 0, "already_started", id="started and after a minute"),
        pytest.param({"NotBefore": "Tue, 20 Jan 2037 22:26:58 GMT"}, 0, 0, "approved", id="NotBefore"),
        pytest.param({"Resources": ["web-0", "web-2"]}, 0, 0, "approved", id="Resources"),
        pytest.param({"EventType": "Redeploy"}, 0, 0, "approved", id="EventType"),
        pytest.param(
            {"NotBefore": "2037-01-19T22:26:58Z", "Resources": ["WEB-1", "web-0"]},
            *(0, 0, "already_approved"),
            id="spelled differently",
        ),
    ],
)
def test_an_approved_event_is_posted_again_only_after_a_minute_or_once_it_has_changed(
    rig: ListenerRig, changes: dict[str, Any], seconds: float, jump: float, reason: str
) -> None:
    event = approved(rig, "web-0", "web-1")
    rig.imds.change(event, **changes)
    rig.clock.jump(jump)
    rig.clock.advance(seconds)
    assert rig.decide(event.lower(), id="2")["Reason"] == reason
    assert len(rig.imds.posts) == 1 + (reason == "approved")
    outcome = "Rejected" if reason == "already_started" else "Accepted"
    assert rig.answers("2") == [(outcome, reason)]
    if reason == "approved":
        assert rig.decide(event, id="3")["Reason"] == "already_approved"


@pytest.mark.parametrize("since", ["changed", "changed at its start", "returned"])
def test_a_started_event_whose_stay_nobody_approved_is_not_already_approved(
    rig: ListenerRig, since: str
) -> None:
    event = approved(rig)
    changes: dict[str, Any] = {"Resources": ["web-0", "web-1"]}
    if since == "returned":
        shown = rig.imds.events
        rig.imds.remove(event)
        rig.send("unknown", id="looks", wait=1)
        rig.imds.show(*shown)
        changes = {}
    if since != "changed at its start":
        rig.imds.change(event, **changes)
        rig.clock.advance(1)
        rig.send("later", id="looks again", wait=1)
    rig.imds.change(event, **changes, **STARTED)
    assert rig.decide(event, id="2")["Reason"] == "already_started"


@pytest.mark.parametrize("restart", [True, False])
def test_an_event_that_is_scheduled_again_after_it_has_started_is_posted_again(
    rig: ListenerRig, restart: bool
) -> None:
    event = approved(rig)
    rig.imds.change(event, EventStatus="Started")
    rig.decide(event, id="2")
    if restart:
        rig.restart()
    rig.imds.change(event, EventStatus="Scheduled")
    assert rig.decide(event, id="3")["Reason"] == "approved"
    assert len(rig.imds.posts) == 2


def test_an_event_that_was_approved_before_does_not_excuse_a_command_for_another_vm(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(session="{vm}")
    event = approved(rig)
    assert rig.decide(event, id="b")["Reason"] == "already_approved"
    assert rig.decide(event, id="c", Vm="web-9")["Reason"] == "other_vm"


# The document just before a POST


@pytest.mark.parametrize("ago_seconds", [0.1, 0.9])
def test_the_document_is_read_again_before_a_post_unless_it_was_read_after_the_command_came(
    make_listener: MakeListener, ago_seconds: float
) -> None:
    rig = make_listener(policy={"allow": [{}], "deny": [{"resource": ["db-*"]}]})
    event = rig.imds.schedule()
    rig.decide(rig.imds.schedule(), id="first")
    rig.clock.advance(ago_seconds)
    rig.imds.change(event, Resources=["web-0", "db-1"])
    rig.send(event, id="second", wait=1)
    assert rig.reasons("second") == ["denied"]
    assert len(rig.imds.posts) == 1


def test_a_command_for_an_event_of_a_fresh_document_costs_one_request_and_its_post(rig: ListenerRig) -> None:
    rig.decide(rig.imds.schedule())
    assert [call.method for call in rig.imds.calls if call.method != "instance"] == ["document", "approve"]


def test_while_the_limit_of_requests_allows_no_fresh_document_a_post_waits(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(2)]
    rig.decide(events[0], id="c0")
    rig.clock.advance(0.2)
    rig.send(events[1], id="c1", wait=0)
    assert len(rig.imds.posts) == 1
    rig.run(1)
    assert rig.reasons() == ["approved", "approved"]


# Dry run


def test_a_dry_run_decides_and_publishes_but_never_posts_and_leaves_nothing_that_counts(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(dry_run=True, session="{vm}")
    event = rig.imds.schedule()
    rig.send(event, id="c")
    rig.send("unknown", id="d", Vm="web-9", wait=1)
    first = only(rig.receipts("c"))
    assert (first["data"]["DryRun"], first["data"]["Reason"]) == (True, "approved")
    assert (rig.reasons("d"), rig.imds.posts) == (["other_vm"], [])
    rig.restart()
    rig.send(event, id="c", wait=1)
    real = rig.receipts("c")[-1]
    assert (real["data"]["DryRun"], real["data"]["Reason"]) == (False, "approved")
    assert real["id"] != first["id"]
    assert len(rig.imds.posts) == 1


def test_a_dry_run_of_auto_rules_publishes_once_for_an_event_as_it_is_and_never_posts(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(auto=[{}], dry_run=True)
    event = rig.announce(wait=90)
    assert len(rig.receipts()) == 1
    rig.change(event, NotBefore="Tue, 20 Jan 2037 22:26:58 GMT", wait=90)
    assert len(rig.receipts()) == 2
    assert rig.imds.posts == []


# Auto rules


def test_an_auto_rule_approves_what_it_matches_and_nothing_else(make_listener: MakeListener) -> None:
    rig = make_listener(policy={}, auto=[{"event_source": ["User"], "max_duration_seconds": 10}])
    matching = rig.imds.schedule(EventSource="User", DurationInSeconds=0)
    rig.imds.schedule(EventSource="User", DurationInSeconds=-1)
    rig.imds.schedule(EventSource="User", DurationInSeconds=11)
    rig.imds.schedule(EventSource="Platform", DurationInSeconds=0)
    rig.announce("web-0", "web-1", EventSource="User", DurationInSeconds=0, wait=60)
    receipt = only(rig.receipts())
    assert (receipt["subject"], receipt["data"]["Detail"]) == (matching, "an auto rule")
    assert rig.imds.approved == [matching]


def test_an_event_that_no_auto_rule_matches_any_more_is_not_posted_again(make_listener: MakeListener) -> None:
    rig = make_listener(auto=[{"event_type": ["Reboot"]}])
    rig.imds.fail(500, methods=["approve"])
    event = rig.announce(wait=3)
    rig.change(event, EventType="Terminate", wait=4)
    rig.imds.restore()
    rig.run(4)
    receipt = only(rig.receipts())
    assert (receipt["data"]["Outcome"], receipt["data"]["Reason"]) == ("Failed", "unknown_outcome")
    assert "the outcome is not known" in receipt["data"]["Detail"]
    assert rig.imds.approved == []


# Who this VM is


def test_after_another_boot_nothing_is_approved_until_imds_has_confirmed_a_remembered_identity(
    rig: ListenerRig,
) -> None:
    rig.run()
    rig.imds.fail(500, methods=["instance"])
    rig.boot_id = "boot-2"
    rig.restart()
    rig.send(rig.imds.schedule(), wait=10)
    assert (rig.receipts(), rig.imds.posts) == ([], [])
    rig.imds.restore()
    rig.run(40)
    assert rig.reasons() == ["approved"]


def test_after_a_silent_start_the_first_good_document_names_the_vm_and_the_next_start_prepares_it(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(auto=[{"run": [program()]}])
    rig.imds.fail(500)
    rig.outbox.commit([], records={(STATE, VM): None})
    rig.restart(wait=100)
    rig.imds.restore()
    rig.imds.fail(500, methods=["instance"], count=1)
    rig.announce("web-0", EventType="Preempt", wait=2)
    assert rig.listener._must_end()
    rig.restart(wait=1)
    assert len(rig.machine.runs) == 1


def test_another_name_ends_the_process_once_no_program_runs_and_no_command_waits(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(auto=[{"run": [program()], "event_type": ["Redeploy"]}])
    rig.announce("web-0", EventType="Redeploy", wait=1)
    epoch, rig.imds.vm = rig.outbox.epoch, replace(WEB_0, resource_group="other", scale_set="web")
    rig.run(600)
    rig.send("AAAAAAAA-0000-4000-8000-000000000001")  # it waits for its event
    rig.run(2)
    assert not rig.listener._must_end()
    rig.end_programs()
    rig.run(2)
    assert (rig.listener._must_end(), rig.listener.status().waiting_commands) == (False, 1)
    rig.run(40)
    assert rig.events()[-1]["data"]["Reason"] == "unknown_event"
    assert rig.listener._must_end()
    rig.listener.run()  # ends by itself
    assert rig.events()[-1]["data"]["Reason"] == "Stopping"
    rig.restart()
    assert rig.outbox.epoch != epoch
    assert rig.decide(rig.imds.schedule("web-0"))["Outcome"] == "Accepted"


def test_on_another_vm_nothing_is_continued_that_the_state_began(make_listener: MakeListener) -> None:
    rig = make_listener(auto=[{"event_source": ["User"]}])
    rig.imds.fail(ImdsError("killed here"), methods=["approve"])
    rig.announce(EventSource="User")
    assert len(rig.imds.posts) == 1
    rig.imds.restore()
    rig.restart(vm=Vm(name="web-0", vm_id="a-clone"))
    rig.show(wait=3)
    assert (rig.listener.status().waiting_commands, rig.receipts(), len(rig.imds.posts)) == (0, [], 1)
