"""Which messages the listener takes, passes on and refuses: shared queues, signatures, floods."""

from __future__ import annotations

import json
import logging
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from bridge.approvals.inbox import (
    MAX_WAITING_BYTES,
    PASS_ON_MANY_SECONDS,
    PASS_ON_SECONDS,
)
from bridge.approvals.pending import REJECTED_RECEIPTS_PER_MINUTE
from bridge.config.base import Secret
from bridge.http.signing import sign
from tests.support.bus import SECRET
from tests.support.listener import ListenerRig, MakeListener, command_body

OTHER_SECRET, WRONG_SECRET = ("whsec_" + text * 8 for text in ("QUJD", "REVG"))
MAX_WAITING = 10


# A queue that several listeners share


@pytest.mark.parametrize("given", [{"Vm": "web-1"}, {}], ids=["named", "of its resources"])
def test_a_command_for_another_vm_goes_back_to_a_shared_queue_for_ten_minutes(
    rig: ListenerRig, given: dict[str, Any]
) -> None:
    event = rig.imds.schedule("web-1")
    rig.send(event, **given, wait=PASS_ON_SECONDS - 1)
    assert (rig.is_abandoned, rig.receipts()) == (True, [])
    rig.run(2)
    assert (rig.reasons(), rig.queue.messages) == (["other_vm"], [])


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
    rig.send("E-1", Vm="web-1", wait=0)
    assert rig.is_abandoned


def test_what_is_left_of_a_command_goes_back_only_if_nothing_of_it_is_decided(rig: ListenerRig) -> None:
    own, other = rig.imds.schedule(), rig.imds.schedule("web-1")
    rig.send(own, other, wait=0)
    assert sorted(rig.reasons()) == ["approved", "other_vm"]
    assert len(rig.queue.completed) == 1


def test_a_command_goes_back_no_more_once_one_of_its_events_is_decided(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=60)
    rig.send(rig.imds.schedule(), "LATE", wait=5)
    assert rig.reasons() == ["approved"]
    rig.announce("web-1", event_id="LATE", wait=2)
    assert rig.reasons() == ["approved", "other_vm"]
    assert len(rig.queue.completed) == 1


@pytest.mark.parametrize("was_posted", [False, True])
def test_an_allowed_command_goes_back_if_its_event_moves_to_another_vm_before_the_first_post(
    rig: ListenerRig, was_posted: bool
) -> None:
    events = [rig.imds.schedule() for _ in range(3)]
    for number, event in enumerate(events):  # the third is the fourth call of IMDS within a second
        rig.send(event, id=f"c{number}", wait=0)
    if was_posted:
        rig.imds.fail(429, methods=["approve"])
        rig.run(1)
    rig.change(event, Resources=["web-1"], wait=3)
    assert len(rig.imds.posts) == 2 + was_posted
    assert rig.reasons("c2") == (["other_vm"] if was_posted else [])
    assert len(rig.queue.messages) == (not was_posted)


@pytest.mark.parametrize("settings", [{"session": "{vm}"}, {"queue": "", "topic": "t", "subscription": "s"}])
def test_a_command_for_another_vm_is_rejected_at_once_where_no_other_listener_can_take_it(
    make_listener: MakeListener, settings: dict[str, str]
) -> None:
    rig = make_listener(**settings)
    assert rig.decide("E-1", Vm="web-1")["Reason"] == "other_vm"


def test_very_many_commands_for_another_vm_do_not_hold_up_the_queue(
    make_listener: MakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 20
    monkeypatch.setattr("bridge.approvals.inbox.PASSED_ON_LONG", limit)
    rig = make_listener()
    for number in range(2 * limit):
        rig.send("E-1", id=f"c{number}", Vm="web-1")
    rig.run(PASS_ON_MANY_SECONDS - 1)
    assert rig.receipts() == []
    rig.run(2)
    assert len(rig.queue.messages) <= limit
    assert set(rig.reasons()) == {"other_vm"}


# Signatures


def send_signed(
    rig: ListenerRig,
    event: str,
    *,
    id: str = "c",  # noqa: A002 - the attribute is called so
    ago_seconds: float = 0,
    secret: str = SECRET,
    **message: Any,
) -> None:
    """Send a command that was signed so long ago; `message` are other values of the message."""
    body = command_body(event, id=id)
    headers = sign([secret], "c", rig.clock.now() - timedelta(seconds=ago_seconds), body)
    rig.queue.send(**{"body": body, "message_id": id, "properties": headers, **message})


@pytest.mark.parametrize(
    ("message", "enqueued_ago", "reason"),
    [
        pytest.param({}, 0, "approved", id="one secret"),
        pytest.param({"secret": OTHER_SECRET, "ago_seconds": 250}, 0, "approved", id="the other, in time"),
        pytest.param({"ago_seconds": 3600}, 3600, "approved", id="in time when the broker accepted it"),
        pytest.param({}, 3600, "bad_signature", id="long after the broker accepted it"),
        pytest.param({"properties": {}}, 0, "bad_signature", id="unsigned"),
        pytest.param({"secret": WRONG_SECRET}, 0, "bad_signature", id="a wrong secret"),
        pytest.param({"ago_seconds": 400}, 0, "bad_signature", id="too old"),
        pytest.param({"ago_seconds": -400}, 0, "bad_signature", id="from the future"),
    ],
)
def test_a_command_is_decided_if_it_was_signed_in_time_with_any_secret_and_dead_lettered_with_a_receipt_if_not(
    make_listener: MakeListener, message: dict[str, Any], enqueued_ago: float, reason: str
) -> None:
    rig = make_listener(signing_secrets=Secret(f"{OTHER_SECRET}\n{SECRET}"))
    enqueued_at = rig.clock.now() - timedelta(seconds=enqueued_ago)
    send_signed(rig, rig.imds.schedule(), enqueued_at=enqueued_at, **message)
    rig.run()
    is_good = reason == "approved"
    assert (rig.reasons("c"), len(rig.imds.posts)) == ([reason], is_good)
    assert rig.dead_letter_reasons == ([] if is_good else [reason])


def test_a_signed_command_without_an_id_is_decided_once_whatever_its_message_ids(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(signing_secrets=Secret(SECRET))
    body = json.dumps({"EventId": rig.imds.schedule()}).encode()
    headers = {name.title(): value for name, value in sign([SECRET], "c", rig.clock.now(), body).items()}
    for message_id in ("one", "another", ""):
        rig.queue.send(body, message_id=message_id, properties=headers)
    rig.run()
    assert len({json.dumps(receipt) for receipt in rig.receipts()}) == 1
    assert len(rig.queue.completed) == 3


def test_a_signed_text_may_be_encoded_as_json_once_more(make_listener: MakeListener) -> None:
    rig = make_listener(signing_secrets=Secret(SECRET))
    event = rig.imds.schedule()
    send_signed(rig, event, body=json.dumps(command_body(event).decode()).encode())
    rig.run()
    assert rig.reasons("c") == ["approved"]


def test_a_cloud_event_of_another_type_in_binary_mode_is_dead_lettered(rig: ListenerRig) -> None:
    attributes = {"type": "com.example.other", "id": "c", "source": "urn:x"}
    properties = {f"cloudEvents_{name}": value for name, value in attributes.items()}
    rig.queue.send(json.dumps({"EventId": rig.imds.schedule()}).encode(), properties=properties)
    rig.run()
    assert (rig.reasons(), rig.imds.posts) == (["malformed"], [])


def test_signing_secrets_are_read_again_for_each_command(make_listener: MakeListener, tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(OTHER_SECRET)
    rig = make_listener(signing_secrets=Secret(file=file))
    send_signed(rig, rig.imds.schedule(), id="1", secret=OTHER_SECRET)
    rig.run()
    file.write_text(SECRET)
    send_signed(rig, rig.imds.schedule(), id="2")
    send_signed(rig, rig.imds.schedule(), id="3", secret=OTHER_SECRET)
    rig.run(1)
    assert [rig.reasons(name) for name in "123"] == [["approved"], ["approved"], ["bad_signature"]]


@pytest.mark.parametrize("content", [None, "", "\n", "whsec_!!!"], ids=["gone", "empty", "blank", "invalid"])
def test_while_the_signing_secrets_cannot_be_used_every_command_is_refused(
    make_listener: MakeListener,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    content: str | None,
) -> None:
    file = tmp_path / "secrets"
    file.write_text(SECRET)
    rig = make_listener(signing_secrets=Secret(file=file))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    event = rig.imds.schedule()
    send_signed(rig, event)
    send_signed(rig, event, id="u", properties={})
    with caplog.at_level(logging.ERROR):
        rig.run(2)
    assert (rig.reasons(), rig.imds.posts) == (["bad_signature"] * 2, [])
    assert "the signing secrets cannot be used" in caplog.text
    file.write_text(SECRET)
    send_signed(rig, event, id="d")
    rig.run(1)
    assert rig.reasons("d") == ["approved"]


# Floods


@pytest.mark.parametrize("stops", [False, True])
def test_of_many_refused_messages_ten_a_minute_have_receipts_and_the_others_are_counted_then_or_at_the_stop(
    rig: ListenerRig, stops: bool
) -> None:
    for number in range(25):
        rig.queue.send(b"nonsense", message_id=f"m{number}")
    rig.run()
    assert len(rig.receipts()) == 10
    if stops:
        rig.finish()
        assert rig.events()[-1]["data"]["Reason"] == "Stopping"
    else:
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
    rig.send(event, id="c", wait=0)
    assert len(rig.receipts("c")) == 12
    assert len(rig.imds.posts) == 1


def test_at_the_stop_a_waiting_command_is_abandoned(rig: ListenerRig) -> None:
    rig.send("unknown", wait=0)
    rig.finish()
    assert rig.is_abandoned
    assert rig.receipts() == []


@pytest.fixture
def few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.approvals.inbox.MAX_WAITING", MAX_WAITING)


@pytest.mark.usefixtures("few_may_wait")
def test_many_commands_that_wait_for_their_events_do_not_hold_up_the_queue(
    make_listener: MakeListener,
) -> None:
    rig = make_listener(grace_seconds=600)
    for number in range(3 * MAX_WAITING):
        rig.send(f"unknown-{number}", id=f"w{number}")
    rig.run(2)
    assert len(rig.queue.messages) == MAX_WAITING
    assert set(rig.reasons()) == {"unknown_event"}
    rig.announce(event_id=f"unknown-{3 * MAX_WAITING - 1}", wait=1)
    assert rig.reasons(f"w{3 * MAX_WAITING - 1}") == ["approved"]


def test_large_commands_that_wait_give_way_to_newer_ones(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=600)
    for number in range(30):
        rig.send(f"unknown-{number}", id=f"w{number}", Reason="x" * 200_000)
    rig.run(2)
    waiting = sum(len(message.body) for message in rig.queue.messages)
    assert MAX_WAITING_BYTES - 201_000 < waiting <= MAX_WAITING_BYTES
    assert set(rig.reasons()) == {"unknown_event"}
    assert rig.reasons("w29") == []


def test_a_command_that_names_this_vm_is_not_passed_on(rig: ListenerRig) -> None:
    assert rig.decide(rig.imds.schedule("web-1"), Vm="WEB-0")["Reason"] == "other_vm"


@pytest.mark.usefixtures("few_may_wait")
def test_a_command_is_not_cut_short_by_a_document_from_before_it(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=600)
    rig.decide(rig.imds.schedule(), id="1")
    rig.clock.advance(0.5)
    for number in range(2 * MAX_WAITING):
        rig.send("E-2", id=f"w{number}")
    rig.run()
    assert len(rig.queue.messages) == 2 * MAX_WAITING
    rig.announce(event_id="E-2", wait=1)
    assert set(rig.reasons()) == {"approved"}


def test_of_many_rejected_commands_a_hundred_a_minute_have_receipts_and_the_others_are_dead_lettered(
    make_listener: MakeListener, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_listener(grace_seconds=0)
    for number in range(REJECTED_RECEIPTS_PER_MINUTE + 50):
        rig.send(f"unknown-{number}", id=f"w{number}")
    rig.run()
    event = rig.imds.schedule()
    assert rig.decide(event)["Reason"] == "approved"
    assert Counter(rig.reasons()) == {"unknown_event": REJECTED_RECEIPTS_PER_MINUTE, "approved": 1}
    assert rig.dead_letter_reasons == ["unknown_event"] * 50
    rig.run(61)
    data = rig.receipts()[-1]["data"]
    assert (data["Reason"], data["Count"]) == ("unknown_event", 50)
    assert "commands were rejected without a receipt" in caplog.text
    rig.send("unknown", id="later", wait=1)
    assert rig.reasons("later") == ["unknown_event"]


def test_a_command_without_a_receipt_leaves_no_record(make_listener: MakeListener) -> None:
    rig = make_listener(grace_seconds=0)
    for number in range(150):
        rig.send(*[str(uuid4()).upper() for _ in range(100)], id=f"w{number}")
    rig.run(1)
    assert len(rig.records()) == 1


def test_the_log_at_debug_level_says_why_a_command_is_not_decided(
    rig: ListenerRig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        rig.send("late", id="c1", wait=1)
        rig.imds.fail(429, methods=["approve", "document"])
        rig.send(rig.imds.schedule(), id="c2", wait=5)
    text = caplog.text
    assert "command c1 for late waits: the document does not have the event yet" in text
    assert "command c2" in text
    assert "answered 429" in text
