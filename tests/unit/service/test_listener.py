"""The listener's decisions, on doubles and with a clock that the test moves."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bridge.approvals.pending import REJECTED_RECEIPTS_PER_MINUTE
from bridge.approvals.policy import not_recorded
from bridge.config.base import Secret
from bridge.errors import ImdsError
from bridge.http.signing import sign
from bridge.imds.instance import Vm
from bridge.service.listener import (
    IMDS_WAIT_SECONDS,
    MAX_WAITING,
    PASS_ON_MANY_SECONDS,
    PASS_ON_SECONDS,
)
from tests.support.bus import SECRET
from tests.support.listener import ListenerRig, command_body

OTHER_SECRET = "whsec_" + "QUJD" * 8
NOT_RECORDED_DETAIL = not_recorded(None).detail

MakeRig = Callable[..., ListenerRig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[ListenerRig] = []

    def make(**options: Any) -> ListenerRig:
        rigs.append(ListenerRig(tmp_path / f"state-{len(rigs)}", **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> ListenerRig:
    return make_rig()


# Outcomes and reasons


def test_an_approval_is_posted_and_has_a_receipt_with_all_resources(rig: ListenerRig) -> None:
    event = rig.imds.schedule("web-0", "web-1")
    rig.send(event, id="c", Reason="now", RequestedBy="jo")
    rig.run()
    (receipt,) = rig.receipts("c")
    data = receipt["data"]
    assert (receipt["type"], data["Outcome"], data["Reason"]) == (
        "io.imdsbridge.approval.accepted.v1",
        "Accepted",
        "approved",
    )
    assert (receipt["subject"], receipt["correlationid"], receipt["causationid"]) == (event, event, "c")
    assert data["Resources"] == ["web-0", "web-1"]
    assert data["Command"] == {
        "Id": "c",
        "RequestedBy": "jo",
        "Reason": "now",
        "Vm": "",
        "ExpiresAt": None,
    }
    assert rig.imds.approved == [event]
    assert len(rig.queue.completed) == 1


def test_the_time_from_a_command_to_its_approval_is_measured_once(rig: ListenerRig) -> None:
    rig.send("E-1", "E-2", id="late")
    rig.run(3.0)
    rig.imds.schedule(event_id="e-1")
    rig.imds.schedule(event_id="e-2")
    rig.send("E-3", id="unknown")
    rig.run(4.0)
    (seconds,) = rig.approved_after
    assert 3.0 <= seconds <= 6.0


def test_the_intent_is_committed_before_the_post_and_the_receipt_before_the_message_is_settled(
    rig: ListenerRig,
) -> None:
    event = rig.imds.schedule(event_id="e-1")
    rig.send(event, id="c")
    rig.run()
    assert rig.journal == ["commit intent e-1", "POST e-1", "commit receipt e-1", "settle c"]


def test_the_event_id_is_posted_as_imds_spells_it(rig: ListenerRig) -> None:
    event = rig.imds.schedule(event_id="4cAeA225-A741-474D-A72E-428C86FCD853")
    assert rig.decide(event.upper())["EventId"] == event
    assert rig.imds.posts == [(event,)]


def test_the_document_incarnation_is_posted_as_received(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.imds.serve({"DocumentIncarnation": "7", "Events": rig.imds.events})
    rig.decide(event)
    assert [call.incarnation for call in rig.imds.calls if call.method == "approve"] == ["7"]


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
def test_a_malformed_message_is_dead_lettered_with_a_short_receipt(rig: ListenerRig, body: bytes) -> None:
    rig.queue.send(body, message_id="m")
    rig.run()
    (receipt,) = rig.receipts("m")
    data = receipt["data"]
    assert (data["Outcome"], data["Reason"], data["EventId"]) == ("Rejected", "malformed", None)
    assert len(json.dumps(data)) < 2000
    (dead,) = rig.queue.dead_letters
    assert dead.settlement is not None
    assert (dead.settlement.dead_letter_reason, dead.settlement.description) == ("malformed", data["Detail"])


def test_messages_without_an_id_are_different_commands(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    for _ in range(2):
        rig.queue.send(json.dumps({"EventId": event}).encode())
    rig.run()
    assert len({one["id"] for one in rig.receipts()}) == 2


def test_an_expired_command_is_rejected_without_reading_the_document(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    assert rig.decide(event, ExpiresAt=rig.in_seconds(-1))["Reason"] == "expired"
    assert rig.imds.asked() == 0
    assert rig.queue.messages == []


def test_an_unknown_event_is_rejected_after_its_grace(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=30)
    rig.send("unknown")
    rig.run(29)
    assert rig.receipts() == []
    rig.run(2)
    (receipt,) = rig.receipts("c")
    data = receipt["data"]
    assert (data["Outcome"], data["Reason"], data["EventId"]) == ("Rejected", "unknown_event", "unknown")
    assert rig.queue.messages == []


def test_the_grace_counts_from_when_the_broker_accepted_the_command(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=30)
    rig.queue.send(
        command_body("unknown"), message_id="c", enqueued_at=rig.clock.now() - timedelta(seconds=29)
    )
    rig.run(0.5)
    assert rig.receipts() == []
    rig.run(1)
    assert rig.reasons() == ["unknown_event"]


def test_a_broker_whose_clock_is_ahead_does_not_prolong_the_grace(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=30)
    rig.queue.send(command_body("unknown"), message_id="c", enqueued_at=rig.clock.now() + timedelta(hours=1))
    rig.run(32)
    assert rig.reasons() == ["unknown_event"]


@pytest.mark.parametrize(("grace_seconds", "reason"), [(30, "approved"), (0, "unknown_event")])
def test_an_event_that_appears_within_the_grace_is_approved(
    make_rig: MakeRig, grace_seconds: float, reason: str
) -> None:
    rig = make_rig(grace_seconds=grace_seconds)
    rig.send("E-1")
    rig.run(1)
    rig.imds.schedule(event_id="E-1")
    rig.run(2)
    assert rig.reasons() == [reason]


def test_an_event_is_not_unknown_because_of_a_document_from_before_the_command(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=0)
    assert rig.decide(rig.imds.schedule(), id="1")["Reason"] == "approved"
    rig.imds.schedule(event_id="E-2")
    rig.clock.advance(0.5)  # within the second for which the last document is used
    rig.send("E-2", id="2")
    rig.run()
    assert rig.receipts("2") == []
    rig.run(1)
    assert rig.reasons("2") == ["approved"]


@pytest.mark.parametrize("auto", [[], [{"event_type": ["Freeze"]}]], ids=["commands", "auto rules too"])
@pytest.mark.parametrize("pace", [1.1, 4.0])
def test_a_command_for_an_event_newer_than_the_document_is_decided_at_once(
    make_rig: MakeRig, auto: list[dict[str, Any]], pace: float
) -> None:
    rig = make_rig(auto=auto)
    for _ in range(10):
        event = rig.imds.schedule()
        rig.send(event, id=event)
        rig.run()
        assert rig.imds.posts[-1] == (event,)
        rig.imds.remove(event)
        rig.run(1)
        rig.clock.advance(pace - 1)


def test_commands_for_unknown_events_leave_one_call_in_a_second_for_a_post(rig: ListenerRig) -> None:
    known = rig.imds.schedule()
    for number in range(40):
        rig.send(f"unknown-{number}", id=str(number))
        rig.run()
        rig.clock.advance(0.02)
    assert rig.imds.asked() == 2
    assert 0 < rig.listener.wait_seconds < 0.25
    rig.send(known)
    rig.run()
    assert rig.imds.posts == [(known,)]


def test_an_event_that_has_started_is_rejected(rig: ListenerRig) -> None:
    assert rig.decide(rig.imds.schedule(EventStatus="Started"))["Reason"] == "already_started"
    assert rig.imds.posts == []


@pytest.mark.parametrize("given", [{"Vm": "web-1"}, {}])
def test_a_command_or_an_event_for_another_vm_is_rejected(make_rig: MakeRig, given: dict[str, str]) -> None:
    rig = make_rig(session="{vm}")
    event = rig.imds.schedule("web-0" if given else "web-1")
    assert rig.decide(event, **given)["Reason"] == "other_vm"
    assert rig.imds.posts == []


def test_scope_group_approves_events_of_other_vms_except_terminate(make_rig: MakeRig) -> None:
    rig = make_rig(policy={"scope": "group", "allow": [{}]})
    other, deletion = rig.imds.schedule("web-1"), rig.imds.schedule("web-1", EventType="Terminate")
    rig.send(other, deletion)
    rig.run()
    assert {one["subject"]: one["data"]["Reason"] for one in rig.receipts()} == {
        other: "approved",
        deletion: "other_vm",
    }


def test_an_event_that_a_deny_rule_matches_is_rejected(make_rig: MakeRig) -> None:
    rig = make_rig(policy={"allow": [{}], "deny": [{"event_source": ["Platform"]}]})
    assert rig.decide(rig.imds.schedule(EventSource="Platform"))["Reason"] == "denied"
    assert rig.imds.posts == []


def test_a_post_that_imds_refuses_has_failed(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(400, methods=["approve"], count=1)
    data = rig.decide(event)
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_refused")
    assert (data["EventType"], data["Resources"]) == ("Reboot", ["web-0"])
    assert len(rig.queue.completed) == 1


def test_a_second_command_for_an_approved_event_is_accepted_without_a_post(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="1")
    assert rig.decide(event.lower(), id="2")["Reason"] == "already_approved"
    rig.imds.change(event, EventStatus="Started")
    data = rig.decide(event, id="3")
    assert (data["Outcome"], data["Reason"]) == ("Accepted", "already_approved")
    assert len(rig.imds.posts) == 1


def test_a_minute_after_its_approval_a_new_command_for_a_scheduled_event_is_posted(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="1")
    rig.clock.advance(58)
    assert rig.decide(event, id="2")["Reason"] == "already_approved"
    rig.clock.advance(2)
    assert rig.decide(event, id="3")["Reason"] == "approved"
    assert rig.decide(event, id="4")["Reason"] == "already_approved"
    assert len(rig.imds.posts) == 2


def test_an_approval_in_the_future_of_a_clock_that_was_set_back_does_not_count(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="c")
    rig.clock.jump(-3600)
    rig.clock.advance(90)
    assert rig.decide(event, id="d")["Reason"] == "approved"
    assert len(rig.imds.posts) == 2


def test_a_minute_after_its_approval_a_command_for_a_started_event_is_rejected(rig: ListenerRig) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="1")
    rig.imds.change(event, EventStatus="Started", NotBefore="")
    assert rig.decide(event, id="2")["Reason"] == "already_approved"
    rig.clock.advance(60)
    assert rig.decide(event, id="3")["Reason"] == "already_started"


@pytest.mark.parametrize(
    "changes",
    [
        {"NotBefore": "Tue, 20 Jan 2037 22:26:58 GMT"},
        {"Resources": ["web-0", "web-1"]},
        {"EventType": "Redeploy"},
    ],
    ids=["NotBefore", "Resources", "EventType"],
)
def test_an_event_that_has_changed_since_its_approval_is_posted_again(
    rig: ListenerRig, changes: dict[str, Any]
) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="1")
    rig.imds.change(event, **changes)
    assert rig.decide(event, id="2")["Reason"] == "approved"
    assert len(rig.imds.posts) == 2


def test_an_event_that_is_spelled_differently_is_not_posted_again(rig: ListenerRig) -> None:
    event = rig.imds.schedule("web-0", "web-1")
    rig.decide(event, id="1")
    rig.imds.change(event, NotBefore="2037-01-19T22:26:58Z", Resources=["WEB-1", "web-0"])
    assert rig.decide(event, id="2")["Reason"] == "already_approved"


@pytest.mark.parametrize("restart", [True, False])
def test_an_event_that_is_scheduled_again_after_it_has_started_is_posted_again(
    rig: ListenerRig, restart: bool
) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="1")
    rig.imds.change(event, EventStatus="Started")
    rig.decide(event, id="2")
    if restart:
        rig.restart()
    rig.imds.change(event, EventStatus="Scheduled")
    assert rig.decide(event, id="3")["Reason"] == "approved"
    assert len(rig.imds.posts) == 2


def test_an_event_that_was_approved_before_does_not_excuse_a_command_for_another_vm(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(session="{vm}")
    event = rig.imds.schedule()
    rig.decide(event, id="a")
    assert rig.decide(event, id="b")["Reason"] == "already_approved"
    assert rig.decide(event, id="c", Vm="web-9")["Reason"] == "other_vm"


# A queue that several listeners share


@pytest.mark.parametrize("given", [{"Vm": "web-1"}, {}], ids=["named", "of its resources"])
def test_a_command_for_another_vm_goes_back_to_a_shared_queue_for_ten_minutes(
    rig: ListenerRig, given: dict[str, Any]
) -> None:
    event = rig.imds.schedule("web-1")
    rig.send(event, **given)
    rig.run(PASS_ON_SECONDS - 1)
    (waiting,) = rig.queue.messages
    assert waiting.locked_by is None
    assert rig.receipts() == []
    rig.run(2)
    assert rig.reasons() == ["other_vm"]
    assert rig.queue.messages == []


@pytest.mark.parametrize("ahead_seconds", [30 * 86_400, -30 * 86_400], ids=["ahead", "behind"])
def test_a_wrong_clock_neither_takes_a_command_from_another_vm_nor_passes_it_on_for_ever(
    rig: ListenerRig, ahead_seconds: float
) -> None:
    enqueued_at = rig.clock.now() - timedelta(seconds=ahead_seconds)
    rig.queue.send(command_body("E-1", Vm="web-1"), message_id="c", enqueued_at=enqueued_at)
    rig.run(PASS_ON_SECONDS - 1)
    assert (len(rig.queue.messages), rig.receipts()) == (1, [])
    rig.run(2)
    assert rig.reasons() == ["other_vm"]


def test_a_command_for_another_vm_goes_back_while_imds_does_not_answer(rig: ListenerRig) -> None:
    rig.run()
    rig.imds.fail(500, methods=["document"])
    rig.send("E-1", Vm="web-1")
    rig.run()
    (waiting,) = rig.queue.messages
    assert waiting.locked_by is None


def test_what_is_left_of_a_command_goes_back_only_if_nothing_of_it_is_decided(rig: ListenerRig) -> None:
    own, other = rig.imds.schedule(), rig.imds.schedule("web-1")
    rig.send(own, other)
    rig.run()
    assert sorted(rig.reasons()) == ["approved", "other_vm"]
    assert len(rig.queue.completed) == 1


def test_a_command_goes_back_no_more_once_one_of_its_events_is_decided(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=60)
    rig.send(rig.imds.schedule(), "LATE")
    rig.run(5)
    assert rig.reasons() == ["approved"]
    rig.imds.schedule("web-1", event_id="LATE")
    rig.run(2)
    assert rig.reasons() == ["approved", "other_vm"]
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("settings", [{"session": "{vm}"}, {"queue": "", "topic": "t", "subscription": "s"}])
def test_a_command_for_another_vm_is_rejected_at_once_where_no_other_listener_can_take_it(
    make_rig: MakeRig, settings: dict[str, str]
) -> None:
    rig = make_rig(**settings)
    assert rig.decide("E-1", Vm="web-1")["Reason"] == "other_vm"


def test_very_many_commands_for_another_vm_do_not_hold_up_the_queue(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 100
    monkeypatch.setattr("bridge.service.listener.PASSED_ON_LONG", limit)
    rig = make_rig()
    for number in range(2 * limit):
        rig.send("E-1", id=f"c{number}", Vm="web-1")
    rig.run(PASS_ON_MANY_SECONDS - 1)
    assert rig.receipts() == []
    rig.run(2)
    assert len(rig.queue.messages) <= limit
    assert set(rig.reasons()) == {"other_vm"}


# Signatures


def signed_headers(
    rig: ListenerRig, body: bytes, *, at: datetime | None = None, secret: str = SECRET
) -> dict[str, str]:
    return sign([secret], "c", at or rig.clock.now(), body)


def send_signed(
    rig: ListenerRig,
    event: str,
    *,
    id: str = "c",  # noqa: A002 - the attribute is called so
    ago_seconds: float = 0,
    secret: str = SECRET,
) -> None:
    body = command_body(event, id=id)
    at = rig.clock.now() - timedelta(seconds=ago_seconds)
    rig.queue.send(body, message_id=id, properties=signed_headers(rig, body, at=at, secret=secret))


def test_a_command_may_be_signed_with_any_of_the_secrets(make_rig: MakeRig) -> None:
    rig = make_rig(signing_secrets=Secret(f"{OTHER_SECRET}\n{SECRET}"))
    send_signed(rig, rig.imds.schedule(), id="c")
    send_signed(rig, rig.imds.schedule(), id="d", secret=OTHER_SECRET, ago_seconds=250)
    rig.run()
    assert rig.reasons() == ["approved", "approved"]


@pytest.mark.parametrize("fault", ["unsigned", "another secret", "too old", "from the future"])
def test_a_badly_signed_command_is_dead_lettered_with_a_receipt(make_rig: MakeRig, fault: str) -> None:
    rig = make_rig(signing_secrets=Secret(SECRET))
    event = rig.imds.schedule()
    if fault == "unsigned":
        rig.send(event)
    else:
        changes: dict[str, dict[str, Any]] = {
            "another secret": {"secret": OTHER_SECRET},
            "too old": {"ago_seconds": 400},
            "from the future": {"ago_seconds": -400},
        }
        send_signed(rig, event, **changes[fault])
    rig.run()
    assert rig.reasons("c") == ["bad_signature"]
    (dead,) = rig.queue.dead_letters
    assert dead.settlement is not None
    assert dead.settlement.dead_letter_reason == "bad_signature"
    assert rig.imds.posts == []


@pytest.mark.parametrize(("signed_ago_seconds", "reason"), [(3600, "approved"), (0, "bad_signature")])
def test_the_age_of_a_signature_counts_until_the_broker_accepted_the_message(
    make_rig: MakeRig, signed_ago_seconds: float, reason: str
) -> None:
    rig = make_rig(signing_secrets=Secret(SECRET))
    event, now = rig.imds.schedule(), rig.clock.now()
    body = command_body(event)
    rig.queue.send(
        body,
        message_id="c",
        properties=signed_headers(rig, body, at=now - timedelta(seconds=signed_ago_seconds)),
        enqueued_at=now - timedelta(seconds=3600),
    )
    rig.run()
    assert rig.reasons("c") == [reason]


def test_a_signed_command_without_an_id_is_decided_once_whatever_its_message_ids(make_rig: MakeRig) -> None:
    rig = make_rig(signing_secrets=Secret(SECRET))
    body = json.dumps({"EventId": rig.imds.schedule()}).encode()
    headers = {name.title(): value for name, value in signed_headers(rig, body).items()}
    for message_id in ("one", "another", ""):
        rig.queue.send(body, message_id=message_id, properties=headers)
    rig.run()
    assert len({json.dumps(receipt) for receipt in rig.receipts()}) == 1
    assert len(rig.queue.completed) == 3


def test_a_signed_text_may_be_encoded_as_json_once_more(make_rig: MakeRig) -> None:
    rig = make_rig(signing_secrets=Secret(SECRET))
    body = command_body(rig.imds.schedule())
    wrapped = json.dumps(body.decode()).encode()
    rig.queue.send(wrapped, message_id="c", properties=signed_headers(rig, body))
    rig.run()
    assert rig.reasons("c") == ["approved"]


def test_a_cloud_event_of_another_type_in_binary_mode_is_dead_lettered(rig: ListenerRig) -> None:
    properties = {
        "cloudEvents_type": "com.example.other",
        "cloudEvents_id": "c",
        "cloudEvents_source": "urn:x",
    }
    rig.queue.send(json.dumps({"EventId": rig.imds.schedule()}).encode(), properties=properties)
    rig.run()
    assert rig.reasons() == ["malformed"]
    assert rig.imds.posts == []


def test_signing_secrets_are_read_again_for_each_command(make_rig: MakeRig, tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(OTHER_SECRET)
    rig = make_rig(signing_secrets=Secret(file=file))
    send_signed(rig, rig.imds.schedule(), id="1", secret=OTHER_SECRET)
    rig.run()
    file.write_text(SECRET)
    send_signed(rig, rig.imds.schedule(), id="2")
    send_signed(rig, rig.imds.schedule(), id="3", secret=OTHER_SECRET)
    rig.run(1)
    assert [rig.reasons(name) for name in "123"] == [["approved"], ["approved"], ["bad_signature"]]


@pytest.mark.parametrize("content", [None, "", "\n", "whsec_!!!"], ids=["gone", "empty", "blank", "invalid"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_while_the_signing_secrets_cannot_be_used_every_command_is_refused(
    make_rig: MakeRig,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
    is_signed: bool,
) -> None:
    file = tmp_path / "secrets"
    file.write_text(SECRET)
    rig = make_rig(signing_secrets=Secret(file=file))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    event = rig.imds.schedule()
    if is_signed:
        send_signed(rig, event)
    else:
        rig.send(event)
    with caplog.at_level(logging.ERROR):
        rig.run(2)
    assert rig.reasons("c") == ["bad_signature"]
    assert rig.imds.posts == []
    assert "the signing secrets cannot be used" in caplog.text
    file.write_text(SECRET)
    send_signed(rig, event, id="d")
    rig.run(1)
    assert rig.reasons("d") == ["approved"]


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


def test_an_event_that_is_decided_early_has_its_receipt_early(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=600)
    event = rig.imds.schedule()
    rig.send("not-yet", event)
    rig.run()
    (receipt,) = rig.receipts()
    assert receipt["subject"] == event
    assert len(rig.queue.messages) == 1
    rig.imds.schedule(event_id="not-yet")
    rig.run(2)
    assert rig.reasons() == ["approved", "approved"]
    assert len(rig.queue.completed) == 1


def test_a_restart_continues_where_only_some_events_were_decided(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=600)
    event = rig.imds.schedule()
    rig.send("never", event)
    rig.run()
    assert rig.reasons() == ["approved"]
    rig.restart(grace_seconds=0.0)
    rig.run()
    assert rig.reasons() == ["approved", "unknown_event"]
    assert len(rig.imds.posts) == 1
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("gone", [True, False])
def test_an_event_that_was_posted_before_a_kill_and_started_since_is_accepted(
    rig: ListenerRig, gone: bool
) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    assert rig.receipts() == []
    rig.restart()
    if gone:
        rig.imds.remove(event)
    else:
        rig.imds.change(event, EventStatus="Started")
    rig.run(2)
    (receipt,) = rig.receipts()
    assert receipt["data"]["Outcome"] == "Accepted"
    assert receipt["data"]["Detail"] == NOT_RECORDED_DETAIL
    assert len(rig.imds.posts) == 1


def test_an_event_that_was_posted_before_a_kill_and_is_still_scheduled_is_posted_again(
    rig: ListenerRig,
) -> None:
    event = rig.imds.schedule()
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    rig.restart()
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert len(rig.imds.posts) == 2


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
    make_rig: MakeRig, policy: dict[str, Any], changes: dict[str, Any], seconds: float
) -> None:
    rig = make_rig(policy=policy)
    event = rig.imds.schedule(NotBefore=rig.in_seconds(950))
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    rig.send(event)
    rig.run()
    assert len(rig.imds.posts) == 1
    rig.restart()
    rig.clock.advance(seconds)
    rig.imds.change(event, **changes)
    rig.run(2)
    (receipt,) = rig.receipts()
    assert receipt["data"]["Outcome"] in ("Failed", "Accepted")
    if receipt["data"]["Outcome"] == "Failed":
        assert receipt["data"]["Reason"] == "imds_unavailable"
        assert "the outcome is not known" in receipt["data"]["Detail"]
    assert len(rig.imds.posts) == 1


@pytest.mark.parametrize(
    ("answer", "outcome", "reason"),
    [
        (ImdsError("the answer was lost"), "Accepted", "approved"),
        (500, "Accepted", "approved"),
        (503, "Accepted", "approved"),
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
    (receipt,) = rig.receipts()
    data = receipt["data"]
    assert (data["Outcome"], data["Reason"]) == (outcome, reason)
    assert (data["Detail"] == NOT_RECORDED_DETAIL) == (outcome == "Accepted")


@pytest.mark.parametrize("restarts", [False, True], ids=["same process", "restarted"])
@pytest.mark.parametrize("auto", [False, True], ids=["command", "auto rule"])
def test_a_refused_post_says_nothing_of_an_earlier_one_whose_answer_was_lost(
    make_rig: MakeRig, restarts: bool, auto: bool
) -> None:
    rig = make_rig(auto=[{}]) if auto else make_rig()
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
    (receipt,) = rig.receipts()
    assert (receipt["data"]["Outcome"], receipt["data"]["Detail"]) == ("Accepted", NOT_RECORDED_DETAIL)


def test_a_command_that_is_denied_does_not_depend_on_the_post_of_an_auto_rule(make_rig: MakeRig) -> None:
    rig = make_rig(policy={"allow": [{"event_type": ["Freeze"]}]}, auto=[{}])
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
    assert rig.listener.status()["last_error"]
    rig.imds.restore()
    rig.run(2)
    assert rig.reasons() == ["approved"]
    assert rig.listener.status()["last_error"] is None
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
    (receipt,) = rig.receipts()
    data = receipt["data"]
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_unavailable")
    assert "500" in data["Detail"]
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("method", ["document", "approve", "instance"])
def test_a_command_that_never_expires_waits_for_imds_for_ten_minutes(rig: ListenerRig, method: str) -> None:
    rig.imds.fail(500, methods=[method])
    rig.restart()
    rig.send(rig.imds.schedule())
    rig.run(IMDS_WAIT_SECONDS - 1)
    assert rig.receipts() == []
    rig.run(2)
    assert rig.reasons() == ["imds_unavailable"]
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


# Floods


def test_a_waiting_command_delays_no_other(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=600)
    for number in range(99):
        rig.send(f"unknown-{number}", id=f"w{number}")
    rig.run()
    assert rig.decide(rig.imds.schedule(), id="c")["Reason"] == "approved"
    assert len(rig.queue.completed) == 1
    assert len(rig.queue.messages) == 99


def test_of_many_refused_messages_ten_a_minute_have_receipts_and_the_others_are_counted(
    rig: ListenerRig,
) -> None:
    for number in range(25):
        rig.queue.send(b"nonsense", message_id=f"m{number}")
    rig.run()
    assert len(rig.receipts()) == 10
    rig.run(61)
    assert len(rig.receipts()) == 11
    assert rig.receipts()[-1]["data"]["Count"] == 15
    assert len(rig.queue.dead_letters) == 25


def test_of_many_repeats_of_a_decided_command_ten_a_minute_get_its_receipt(
    rig: ListenerRig, caplog: pytest.LogCaptureFixture
) -> None:
    event = rig.imds.schedule()
    rig.decide(event, id="c")
    for _ in range(30):
        rig.send(event, id="c")
    rig.run()
    assert len(rig.receipts("c")) == 11
    assert len(rig.queue.completed) == 31
    rig.run(61)
    assert "came again without a receipt" in caplog.text
    rig.send(event, id="c")
    rig.run()
    assert len(rig.receipts("c")) == 12
    assert len(rig.imds.posts) == 1


def test_at_the_stop_the_refused_messages_without_a_receipt_are_counted(rig: ListenerRig) -> None:
    for number in range(25):
        rig.queue.send(b"nonsense", message_id=f"m{number}")
    rig.run()
    rig.finish()
    assert rig.receipts()[-1]["data"]["Count"] == 15
    assert rig.events()[-1]["data"]["Reason"] == "Stopping"


def test_at_the_stop_a_waiting_command_is_abandoned(rig: ListenerRig) -> None:
    rig.send("unknown")
    rig.run()
    rig.finish()
    (waiting,) = rig.queue.messages
    assert waiting.locked_by is None
    assert rig.receipts() == []


def test_many_commands_that_wait_for_their_events_do_not_hold_up_the_queue(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=600)
    for number in range(3 * MAX_WAITING):
        rig.send(f"unknown-{number}", id=f"w{number}")
    rig.run(2)
    assert len(rig.queue.messages) == MAX_WAITING
    assert set(rig.reasons()) == {"unknown_event"}
    rig.imds.schedule(event_id=f"unknown-{3 * MAX_WAITING - 1}")
    rig.run(1)
    assert rig.reasons(f"w{3 * MAX_WAITING - 1}") == ["approved"]


def test_a_command_is_not_cut_short_by_a_document_from_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=600)
    rig.decide(rig.imds.schedule(), id="1")
    rig.clock.advance(0.5)
    for number in range(2 * MAX_WAITING):
        rig.send("E-2", id=f"w{number}")
    rig.run()
    assert len(rig.queue.messages) == 2 * MAX_WAITING
    rig.imds.schedule(event_id="E-2")
    rig.run(1)
    assert set(rig.reasons()) == {"approved"}


def test_of_many_rejected_commands_a_hundred_a_minute_have_receipts_and_the_others_are_dead_lettered(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(grace_seconds=0)
    for number in range(REJECTED_RECEIPTS_PER_MINUTE + 50):
        rig.send(f"unknown-{number}", id=f"w{number}")
    rig.run()
    event = rig.imds.schedule()
    assert rig.decide(event)["Reason"] == "approved"
    assert Counter(rig.reasons()) == {"unknown_event": REJECTED_RECEIPTS_PER_MINUTE, "approved": 1}
    settlements = [dead.settlement for dead in rig.queue.dead_letters]
    assert {one.dead_letter_reason for one in settlements if one} == {"unknown_event"}
    assert len(settlements) == 50
    rig.run(61)
    data = rig.receipts()[-1]["data"]
    assert (data["Reason"], data["Count"]) == ("unknown_event", 50)
    assert "commands were rejected without a receipt" in caplog.text
    rig.send("unknown", id="later")
    rig.run(1)
    assert rig.reasons("later") == ["unknown_event"]


def test_a_command_without_a_receipt_leaves_no_record(make_rig: MakeRig) -> None:
    rig = make_rig(grace_seconds=0)
    for number in range(150):
        rig.send(*[str(uuid4()).upper() for _ in range(100)], id=f"w{number}")
    rig.run(1)
    assert len(rig.records()) == 1


# Dry run


def test_a_dry_run_decides_and_publishes_but_never_posts_and_leaves_nothing_that_counts(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(dry_run=True, session="{vm}")
    event = rig.imds.schedule()
    rig.send(event, id="c")
    rig.send("unknown", id="d", Vm="web-9")
    rig.run(1)
    (first,), (second,) = rig.receipts("c"), rig.receipts("d")
    assert (first["data"]["DryRun"], first["data"]["Reason"]) == (True, "approved")
    assert second["data"]["Reason"] == "other_vm"
    assert rig.imds.posts == []
    rig.restart()
    rig.send(event, id="c")
    rig.run(1)
    real = rig.receipts("c")[-1]
    assert (real["data"]["DryRun"], real["data"]["Reason"]) == (False, "approved")
    assert real["id"] != first["id"]
    assert len(rig.imds.posts) == 1


def test_a_dry_run_of_auto_rules_publishes_once_for_an_event_as_it_is_and_never_posts(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(auto=[{}], dry_run=True)
    event = rig.imds.schedule()
    rig.run(90)
    assert len(rig.receipts()) == 1
    rig.imds.change(event, NotBefore="Tue, 20 Jan 2037 22:26:58 GMT")
    rig.run(90)
    assert len(rig.receipts()) == 2
    assert rig.imds.posts == []


# Auto rules


def test_an_auto_rule_approves_what_it_matches_and_nothing_else(make_rig: MakeRig) -> None:
    rig = make_rig(policy={}, auto=[{"event_source": ["User"], "max_duration_seconds": 10}])
    matching = rig.imds.schedule(EventSource="User", DurationInSeconds=0)
    rig.imds.schedule(EventSource="User", DurationInSeconds=-1)
    rig.imds.schedule(EventSource="User", DurationInSeconds=11)
    rig.imds.schedule(EventSource="Platform", DurationInSeconds=0)
    rig.imds.schedule("web-0", "web-1", EventSource="User", DurationInSeconds=0)
    rig.run(60)
    (receipt,) = rig.receipts()
    assert (receipt["subject"], receipt["data"]["Detail"]) == (matching, "an auto rule")
    assert rig.imds.approved == [matching]


def test_an_auto_rule_for_a_group_leaves_an_event_to_the_vm_before_for_ten_seconds(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(auto=[{"group": True}])
    event = rig.imds.schedule("web-1", "web-0")
    rig.run(9)
    assert rig.imds.posts == []
    rig.run(2)
    assert rig.imds.approved == [event]


def test_a_deny_rule_wins_over_an_auto_rule(make_rig: MakeRig) -> None:
    rig = make_rig(policy={"deny": [{}]}, auto=[{}])
    rig.imds.schedule()
    rig.run(5)
    assert rig.receipts() == []
    assert rig.imds.posts == []


def test_an_event_that_no_auto_rule_matches_any_more_is_not_posted_again(make_rig: MakeRig) -> None:
    rig = make_rig(auto=[{"event_type": ["Reboot"]}])
    rig.imds.fail(500, methods=["approve"])
    event = rig.imds.schedule()
    rig.run(3)
    rig.imds.change(event, EventType="Terminate")
    rig.run(4)
    rig.imds.restore()
    rig.run(4)
    (receipt,) = rig.receipts()
    assert (receipt["data"]["Outcome"], receipt["data"]["Reason"]) == ("Failed", "imds_unavailable")
    assert "the outcome is not known" in receipt["data"]["Detail"]
    assert rig.imds.approved == []


@pytest.mark.parametrize("has_started", [True, False])
def test_a_post_of_an_auto_rule_without_an_outcome_is_followed_up_after_a_restart(
    make_rig: MakeRig, has_started: bool
) -> None:
    rig = make_rig(auto=[{}])
    rig.imds.fail(ImdsError("killed here"), methods=["approve"], count=1)
    event = rig.imds.schedule()
    rig.run()
    assert len(rig.imds.posts) == 1
    rig.restart()
    if has_started:
        rig.imds.change(event, EventStatus="Started")
    rig.run(2)
    (receipt,) = rig.receipts()
    assert (receipt["subject"], receipt["data"]["Outcome"]) == (event, "Accepted")
    assert (receipt["data"]["Detail"] == NOT_RECORDED_DETAIL) == has_started
    assert len(rig.imds.posts) == 1 + (not has_started)
    rig.restart()
    rig.run(2)
    assert len(rig.receipts()) == 1


@pytest.mark.parametrize(
    "changes", [{"NotBefore": "Tue, 20 Jan 2037 22:26:58 GMT"}, {"EventType": "Redeploy"}], ids=str
)
def test_an_auto_rule_approves_an_event_again_that_has_changed(
    make_rig: MakeRig, changes: dict[str, Any]
) -> None:
    rig = make_rig(auto=[{}])
    event = rig.imds.schedule()
    rig.run(90)
    assert rig.reasons() == ["approved"]
    rig.imds.change(event, **changes)
    rig.run(90)
    assert rig.reasons() == ["approved", "approved"]
    assert len({one["id"] for one in rig.receipts()}) == len(rig.imds.posts) == 2


@pytest.mark.parametrize("restart", [True, False])
def test_an_auto_rule_approves_an_event_again_that_has_started_and_is_scheduled_again(
    make_rig: MakeRig, restart: bool
) -> None:
    rig = make_rig(auto=[{}])
    event = rig.imds.schedule()
    rig.run(90)
    for _ in range(2):
        rig.imds.change(event, EventStatus="Started")
        rig.run(90)
        if restart:
            rig.restart()
        rig.imds.change(event, EventStatus="Scheduled")
        rig.run(90)
    assert rig.reasons() == ["approved"] * 3
    assert len({one["id"] for one in rig.receipts()}) == len(rig.imds.posts) == 3


# Who this VM is


def test_nothing_is_approved_until_imds_has_confirmed_a_remembered_identity(rig: ListenerRig) -> None:
    rig.run()
    rig.imds.fail(500, methods=["instance"])
    rig.restart()
    rig.send(rig.imds.schedule())
    rig.run(10)
    assert rig.imds.posts == []
    assert rig.receipts() == []
    rig.imds.restore()
    rig.run(40)
    assert rig.reasons() == ["approved"]


def test_on_another_vm_nothing_is_continued_that_the_state_began(make_rig: MakeRig) -> None:
    rig = make_rig(auto=[{"event_source": ["User"]}])
    rig.imds.fail(ImdsError("killed here"), methods=["approve"])
    rig.imds.schedule(EventSource="User")
    rig.run()
    posted = len(rig.imds.posts)
    assert posted == 1
    rig.imds.restore()
    rig.restart(vm=Vm(name="web-0", vm_id="a-clone"))
    rig.imds.show()
    rig.run(3)
    assert rig.listener.status()["waiting_commands"] == 0
    assert rig.receipts() == []
    assert len(rig.imds.posts) == posted


# Ten thousand


def test_ten_thousand_commands_half_of_them_nonsense_are_all_settled_and_answered(rig: ListenerRig) -> None:
    events = [rig.imds.schedule() for _ in range(20)]
    for number in range(10_000):
        if number % 2:
            rig.send(events[number // 2 % 20], id=f"c{number}")
        else:
            rig.queue.send(number.to_bytes(4) + b"\xff nonsense", message_id=f"m{number}")
    rig.run(62)
    counted = Counter(rig.reasons())
    assert rig.listener.status()["waiting_commands"] == 0
    assert (len(rig.queue.completed), len(rig.queue.dead_letters)) == (5000, 5000)
    answered = {one.get("causationid") for one in rig.receipts()}
    assert answered >= {f"c{number}" for number in range(1, 10_000, 2)}
    assert counted["approved"] + counted["already_approved"] == 5000
    assert counted["malformed"] == 11  # ten of the minute, and their count
    assert sorted(rig.imds.approved) == sorted(events)
