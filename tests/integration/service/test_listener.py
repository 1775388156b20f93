"""The approval listener: the real Service Bus client on the lab's bus, and the lab's IMDS, over real sockets."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from azure.servicebus.amqp import AmqpAnnotatedMessage

from bridge.config.base import Secret
from bridge.http.signing import sign
from bridge.lab.imds import EVENTS_PATH, INSTANCE_PATH, ImdsLab
from bridge.lab.servicebus import ServiceBusLab
from bridge.runtime.clock import Clock
from bridge.service.listener import not_recorded
from tests.support.bus import (
    FLEET,
    QUEUE,
    SECRET,
    SUBSCRIPTION,
    TOPIC,
    Rig,
    Sender,
    bus_config,
    command,
    in_seconds,
    message,
    posts,
    reasons,
    wait_settled,
)
from tests.support.process import LIMIT_SECONDS, wait_until

OTHER_SECRET = "whsec_" + "QUJD" * 8


@pytest.fixture
def imds() -> Iterator[ImdsLab]:
    with ImdsLab(vms=("web-0", "web-1")) as lab:
        yield lab


@pytest.fixture
def bus() -> Iterator[ServiceBusLab]:
    with ServiceBusLab(bus_config()) as lab:
        yield lab
        assert lab.failures == ()


@pytest.fixture
def sender(bus: ServiceBusLab) -> Iterator[Sender]:
    with Sender(bus) as one:
        yield one


NOT_RECORDED_DETAIL = not_recorded(None).detail


class ClockAhead(Clock):
    """A clock whose time of day is put forward, by less than what counts as a jump."""

    ahead_seconds = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_seconds


def asked_for_documents(imds: ImdsLab) -> int:
    return sum(one.path.startswith(EVENTS_PATH) for one in imds.requests())


def reboot(imds: ImdsLab, *resources: str, **changes: Any) -> str:
    return imds.schedule(**{"event_type": "Reboot", "resources": resources or ["web-0"], **changes})


# What becomes of a command: every reason


def test_an_approval_is_posted_told_and_settled(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds, "web-0", "web-1")
    with Rig(tmp_path, imds, bus, policy={"scope": "self", "allow": [{"event_type": ["Reboot"]}]}) as rig:
        sender.send(command(event, id="c", Reason="now", RequestedBy="jo"))
        (receipt,) = rig.receipts_of("c")
        wait_settled(bus)
    data = receipt["data"]
    assert (receipt["type"], data["Outcome"], data["Reason"]) == (
        "io.imdsbridge.approval.accepted.v1",
        "Accepted",
        "approved",
    )
    assert (receipt["subject"], receipt["correlationid"], receipt["causationid"]) == (event, event, "c")
    assert data["Resources"] == ["web-0", "web-1"]
    assert data["Command"]["RequestedBy"] == "jo"
    assert [one.event_id for one in imds.approvals] == [event]
    assert imds.events[0]["EventStatus"] == "Started"
    assert bus.entity(QUEUE).counts.completed == 1


def test_the_event_id_is_posted_as_imds_spelled_it(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds, event_id="4cAeA225-A741-474D-A72E-428C86FCD853")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event.upper(), id="c"))
        assert rig.receipt_of("c")["EventId"] == event
    assert posts(imds) == [{"StartRequests": [{"EventId": event}]}]


def test_the_oldest_api_version_gets_the_document_incarnation_as_it_came(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, api_version="2017-03-01") as rig:
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
    assert posts(imds) == [{"StartRequests": [{"EventId": event}], "DocumentIncarnation": "2"}]


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
def test_a_malformed_message_is_dead_lettered_and_told(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender, body: bytes
) -> None:
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(message(body, message_id="m"))
        data = rig.receipt_of("m")
        wait_settled(bus)
        assert rig.is_alive()
    assert (data["Outcome"], data["Reason"], data["EventId"]) == ("Rejected", "malformed", None)
    assert len(json.dumps(data)) < 2000
    (dead,) = bus.entity(QUEUE).dead_letters
    assert dead.dead_letter_reason == "malformed"
    assert dead.dead_letter_description == data["Detail"]


def test_a_body_in_several_pieces_is_put_together(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    text = json.dumps({"EventId": event}).encode()
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(AmqpAnnotatedMessage(data_body=[text[:9], text[9:]], properties={"message_id": "m"}))
        assert rig.receipt_of("m")["Reason"] == "approved"


def test_a_message_without_an_id_is_known_by_its_place_in_the_queue(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus) as rig:
        for _ in range(2):
            sender.send(message(json.dumps({"EventId": event})))
        receipts = rig.wait_for(lambda receipts: receipts if len(receipts) == 2 else None)
    assert len({one["id"] for one in receipts}) == 2


def signed(event: str, *, secret: str = SECRET, ago_seconds: float = 0, id: str = "c") -> Any:  # noqa: A002
    given = command(event, id=id)
    body = b"".join(given.body)
    at = datetime.now(UTC) - timedelta(seconds=ago_seconds)
    return command(event, id=id, properties=sign([secret], id, at, body))


def test_a_signed_command_is_taken_whichever_of_the_secrets_it_is_signed_with(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    events = [reboot(imds), reboot(imds)]
    with Rig(tmp_path, imds, bus, signing_secrets=Secret(f"{OTHER_SECRET}\n{SECRET}")) as rig:
        sender.send(signed(events[0]), signed(events[1], secret=OTHER_SECRET, ago_seconds=250, id="d"))
        assert reasons(rig.receipts_of("c", "d")) == ["approved", "approved"]


@pytest.mark.parametrize("fault", ["unsigned", "another secret", "too old", "from the future"])
def test_a_badly_signed_command_is_dead_lettered_and_told(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender, fault: str
) -> None:
    event = reboot(imds)
    given = {
        "unsigned": command(event, id="c"),
        "another secret": signed(event, secret=OTHER_SECRET),
        "too old": signed(event, ago_seconds=400),
        "from the future": signed(event, ago_seconds=-400),
    }[fault]
    with Rig(tmp_path, imds, bus, signing_secrets=Secret(SECRET)) as rig:
        sender.send(given)
        assert rig.receipt_of("c")["Reason"] == "bad_signature"
        wait_settled(bus)
    assert [one.dead_letter_reason for one in bus.entity(QUEUE).dead_letters] == ["bad_signature"]
    assert posts(imds) == []


def test_secrets_are_read_anew_and_a_broken_file_leaves_the_last_ones(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    file = tmp_path / "secrets"
    file.write_text(OTHER_SECRET)
    events = [reboot(imds), reboot(imds), reboot(imds)]
    with Rig(tmp_path / "state", imds, bus, signing_secrets=Secret(file=file)) as rig:
        sender.send(signed(events[0], secret=OTHER_SECRET, id="1"))
        assert rig.receipt_of("1")["Reason"] == "approved"
        file.write_text(SECRET)
        sender.send(signed(events[1], id="2"))
        assert rig.receipt_of("2")["Reason"] == "approved"
        file.write_text("whsec_!!!")
        sender.send(signed(events[2], id="3"))
        assert rig.receipt_of("3")["Reason"] == "approved"


def test_an_expired_command_is_rejected_without_asking_imds_for_the_document(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c", ExpiresAt=in_seconds(-1)))
        assert rig.receipt_of("c")["Reason"] == "expired"
        wait_settled(bus)
    assert not [one for one in imds.requests() if one.path.startswith(EVENTS_PATH)]


def test_an_unknown_event_is_rejected_after_its_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus, grace_seconds=0.5) as rig:
        sender.send(command("nobody-knows-it", id="c"))
        data = rig.receipt_of("c")
        wait_settled(bus)
    assert (data["Outcome"], data["Reason"], data["EventId"]) == (
        "Rejected",
        "unknown_event",
        "nobody-knows-it",
    )


@pytest.mark.parametrize("grace_seconds", [30, 0])
def test_a_command_for_an_event_that_appears_a_moment_later(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender, grace_seconds: float
) -> None:
    with Rig(tmp_path, imds, bus, grace_seconds=grace_seconds) as rig:
        sender.send(command("E-1", id="c"))
        imds.wait_for(lambda: asked_for_documents(imds), LIMIT_SECONDS)
        reboot(imds, event_id="E-1")
        expected = "approved" if grace_seconds else "unknown_event"
        assert rig.receipt_of("c")["Reason"] == expected


def test_no_event_is_called_unknown_by_a_document_from_before_the_command(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus, grace_seconds=0) as rig:
        first, second = reboot(imds), "E-2"
        sender.send(command(first, id="1"))
        rig.receipt_of("1")
        reboot(imds, event_id=second)
        sender.send(command(second, id="2"))
        assert rig.receipt_of("2")["Reason"] == "approved"


def test_an_event_that_has_started_is_rejected(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds, event_status="Started")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "already_started"


@pytest.mark.parametrize("given", [{"Vm": "web-1"}, {}])
def test_what_is_meant_for_another_vm_is_rejected(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender, given: dict[str, Any]
) -> None:
    event = reboot(imds, "web-0" if given else "web-1")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c", **given))
        assert rig.receipt_of("c")["Reason"] == "other_vm"
    assert posts(imds) == []


def test_scope_group_approves_what_concerns_other_vms_but_no_terminate(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    other, deletion = reboot(imds, "web-1"), reboot(imds, "web-1", event_type="Terminate")
    with Rig(tmp_path, imds, bus, policy={"scope": "group", "allow": [{}]}) as rig:
        sender.send(command(other, deletion, id="c"))
        receipts = rig.receipts_of("c", count=2)
    assert {one["subject"]: one["data"]["Reason"] for one in receipts} == {
        other: "approved",
        deletion: "other_vm",
    }


def test_what_a_deny_rule_matches_is_rejected(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds, event_source="Platform")
    policy = {"allow": [{}], "deny": [{"event_source": ["Platform"]}]}
    with Rig(tmp_path, imds, bus, policy=policy) as rig:
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "denied"
    assert posts(imds) == []


def test_what_imds_refuses_has_failed(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    imds.fault(400, method="POST")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c"))
        data = rig.receipt_of("c")
        wait_settled(bus)
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_refused")


def test_while_imds_fails_a_command_is_held_until_it_expires_and_has_failed_then(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    imds.fault(500, count=None, path=EVENTS_PATH)
    with Rig(tmp_path, imds, bus, clock=(clock := ClockAhead())) as rig:
        sender.send(command(event, id="c", ExpiresAt=in_seconds(LIMIT_SECONDS)))
        imds.wait_for(lambda: asked_for_documents(imds) >= 2, LIMIT_SECONDS)
        assert rig.receipts() == []
        clock.ahead_seconds = LIMIT_SECONDS
        data = rig.receipt_of("c")
        wait_settled(bus)
    assert (data["Outcome"], data["Reason"]) == ("Failed", "imds_unavailable")
    assert "500" in data["Detail"]


def test_a_second_command_for_an_approved_event_is_accepted_without_a_post(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender
) -> None:
    with ImdsLab(approvals="hold") as imds:
        event = reboot(imds)
        with Rig(tmp_path, imds, bus) as rig:
            sender.send(command(event, id="1"))
            rig.receipts_of("1")
            sender.send(command(event.lower(), id="2"))
            assert rig.receipt_of("2")["Reason"] == "already_approved"
            imds.release(event)
            sender.send(command(event, id="3"))
            data = rig.receipt_of("3")
        assert (data["Outcome"], data["Reason"]) == ("Accepted", "already_approved")
        assert len(posts(imds)) == 1


# The steps


def test_a_command_seen_before_gives_its_old_receipt_also_after_a_restart(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    rig = Rig(tmp_path, imds, bus)
    with rig:
        sender.send(command(event, id="c"))
        (first,) = rig.receipts_of("c")
    with rig:
        sender.send(command(event, id="c"))
        receipts = rig.receipts_of("c", count=2)
        wait_settled(bus)
    assert receipts == [first, first]
    assert len(posts(imds)) == 1


def test_several_events_are_approved_by_one_post(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    events = [reboot(imds), reboot(imds), reboot(imds, "web-1")]
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(*events, id="c"))
        receipts = rig.receipts_of("c", count=3)
    assert Counter(reasons(receipts)) == {"approved": 2, "other_vm": 1}
    assert posts(imds) == [{"StartRequests": [{"EventId": event} for event in events[:2]]}]


def test_after_a_refusal_of_several_each_is_posted_alone(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    """IMDS knows the middle one no more, although the document still shows it."""
    events = [reboot(imds), "gone", reboot(imds)]
    shown = [{**imds.events[0], "EventId": "gone"}, *imds.events]
    imds.serve_document({"DocumentIncarnation": 9, "Events": shown})
    imds.fault(400, method="POST")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(*events, id="c"))
        receipts = rig.receipts_of("c", count=3)
        wait_settled(bus)
    assert [len(post["StartRequests"]) for post in posts(imds)] == [3, 1, 1, 1]
    assert len(receipts) == 3


def test_an_event_decided_early_is_told_early(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, grace_seconds=600) as rig:
        sender.send(command("not-yet", event, id="c"))
        (receipt,) = rig.receipts_of("c")
        assert receipt["subject"] == event
        assert bus.entity(QUEUE).counts.locked == 1
        reboot(imds, event_id="not-yet")
        assert reasons(rig.receipts_of("c", count=2)) == ["approved", "approved"]
        wait_settled(bus)


def test_a_restart_goes_on_where_only_some_events_were_decided(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    rig = Rig(tmp_path, imds, bus, grace_seconds=1)
    rig.settings = rig.settings.model_copy(update={"grace_seconds": 600.0})
    with rig:
        sender.send(command("never", event, id="c"))
        rig.receipts_of("c")
    assert bus.entity(QUEUE).counts.locked == 0, "it was not given back"
    rig.settings = rig.settings.model_copy(update={"grace_seconds": 0.0})
    with rig:
        receipts = rig.receipts_of("c", count=2)
        wait_settled(bus)
    assert reasons(receipts) == ["approved", "unknown_event"]


def test_an_answer_of_imds_that_is_lost_is_not_told_as_a_rejection(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    """IMDS takes the approval and starts the event, and its answer never comes."""
    event = reboot(imds)
    imds.fault("lost_answer", method="POST")
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c"))
        data = rig.receipt_of("c")
    assert (data["Outcome"], data["Reason"]) == ("Accepted", "approved")
    assert "not recorded" in data["Detail"]


@pytest.mark.parametrize("fault", ["400", "429", "500", "drop", "timeout", "garbage"])
def test_whatever_imds_answers_meanwhile_a_command_waits_until_it_is_well(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender, fault: str
) -> None:
    with ImdsLab(approvals="hold") as imds:
        event = reboot(imds)
        hangs: dict[str, Any] = {"seconds": 0.5} if fault == "timeout" else {}
        imds.fault(fault, path=EVENTS_PATH, count=2, retry_after=1 if fault == "429" else None, **hangs)
        if fault != "400":
            imds.fault(fault if fault != "garbage" else "500", method="POST", count=1)
        with Rig(tmp_path, imds, bus) as rig:
            sender.send(command(event, id="c"))
            if fault == "timeout":
                imds.wait_for(imds.requests, LIMIT_SECONDS)
                imds.clear_faults()
            assert rig.receipt_of("c")["Reason"] == "approved"
            wait_settled(bus)


def test_a_waiting_command_holds_up_no_other(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, grace_seconds=600) as rig:
        sender.send(*[command(f"unknown-{number}", id=f"w{number}") for number in range(99)])
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 99)
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_until(lambda: bus.entity(QUEUE).counts.completed == 1)
        assert bus.entity(QUEUE).counts.locked == 99


def test_a_flood_for_unknown_events_delays_others_by_little_more_than_the_grace(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, grace_seconds=1) as rig:
        sender.send(*[command(f"unknown-{number}", id=f"w{number}") for number in range(400)])
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus)
        counted = Counter(reasons(rig.receipts()))
    assert counted == {"unknown_event": 400, "approved": 1}


def test_locks_are_renewed_while_commands_wait(tmp_path: Path, imds: ImdsLab) -> None:
    with ServiceBusLab(bus_config(LockDuration="PT10S")) as bus, Sender(bus) as sender:
        with Rig(tmp_path, imds, bus, grace_seconds=600) as rig:
            sender.send(*[command(f"unknown-{number}", id=f"w{number}") for number in range(10)])
            wait_until(lambda: bus.entity(QUEUE).counts.locked == 10)
            threading.Event().wait(12)  # longer than a lock
            assert bus.entity(QUEUE).counts.locked == 10
            assert {one.delivery_count for one in bus.entity(QUEUE).messages} <= {0, 1}
        assert rig.receipts() == []
        assert bus.entity(QUEUE).counts.locked == 0


def test_at_the_stop_what_waits_is_given_back(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus, grace_seconds=600):
        sender.send(command("unknown", id="c"))
        wait_until(lambda: bus.entity(QUEUE).counts.locked == 1)
    (waiting,) = bus.entity(QUEUE).messages
    assert not waiting.locked


def test_of_many_malformed_messages_ten_are_told_and_the_rest_is_counted(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    rig = Rig(tmp_path, imds, bus)
    with rig:
        sender.send(*[message(b"nonsense", message_id=f"m{number}") for number in range(25)])
        wait_settled(bus)
        assert len(rig.receipts()) == 10
    with rig:  # the stop tells the count
        receipts = rig.receipts()
    assert len(receipts) == 11
    assert receipts[-1]["data"]["Count"] == 15
    assert bus.entity(QUEUE).counts.dead_letters == 25


def test_a_dry_run_decides_and_tells_but_never_posts_and_leaves_nothing_that_counts(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    event = reboot(imds)
    with Rig(tmp_path, imds, bus, dry_run=True) as dry:
        sender.send(command(event, id="c"), command("unknown", id="d", Vm="web-9"))
        first, second = dry.receipts_of("c", "d")
        wait_settled(bus)
    assert (first["data"]["DryRun"], first["data"]["Reason"]) == (True, "approved")
    assert second["data"]["Reason"] == "other_vm"
    assert posts(imds) == []
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event, id="c"))
        (real,) = rig.receipts_of("c")
    assert (real["data"]["DryRun"], real["data"]["Reason"]) == (False, "approved")
    assert real["id"] != first["id"]
    assert len(posts(imds)) == 1


# Where commands come from


def test_commands_come_from_the_session_of_this_vm_alone(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    events = [reboot(imds), reboot(imds, "web-1")]
    with Sender(bus, FLEET) as sender:
        sender.send(command(events[1], id="other", session="lab.web-1"))
        sender.send(command(events[0], id="own", session="lab.web-0"))
        options: dict[str, Any] = {"queue": FLEET, "session": "{resource_group}.{vm}"}
        with Rig(tmp_path / "0", imds, bus, **options) as rig:
            assert rig.receipt_of("own")["Reason"] == "approved"
            wait_until(lambda: bus.entity(FLEET).counts.active == 1)
            with Rig(tmp_path / "1", imds, bus, vm="web-1", **options) as other:
                assert other.receipt_of("other")["Reason"] == "approved"
                wait_settled(bus, FLEET)


def test_commands_come_from_a_subscription(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    event = reboot(imds)
    with (
        Rig(tmp_path, imds, bus, topic=TOPIC, subscription=SUBSCRIPTION) as rig,
        Sender(bus, TOPIC) as sender,
    ):
        sender.send(command(event, id="c"))
        assert rig.receipt_of("c")["Reason"] == "approved"
        wait_settled(bus, f"{TOPIC}/Subscriptions/{SUBSCRIPTION}")


# Two listeners


@pytest.mark.parametrize("notices", [(300, 300), (300, 600)])
def test_two_deletions_are_approved_each_by_its_own_vm_and_the_first_waits_for_the_other(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, notices: tuple[int, int]
) -> None:
    deletions = [
        reboot(imds, f"web-{number}", event_type="Terminate", notice_seconds=notices[number])
        for number in range(2)
    ]
    options: dict[str, Any] = {"queue": FLEET, "session": "{vm}", "policy": {"scope": "group", "allow": [{}]}}
    with ExitStack() as stack:
        sender = stack.enter_context(Sender(bus, FLEET))
        rigs = [
            stack.enter_context(Rig(tmp_path / str(number), imds, bus, vm=f"web-{number}", **options))
            for number in range(2)
        ]
        sender.send(command(*deletions, id="first", session="web-0"))
        receipts = rigs[0].receipts_of("first", count=2)
        assert {one["subject"]: one["data"]["Reason"] for one in receipts} == {
            deletions[0]: "approved",
            deletions[1]: "other_vm",
        }
        assert {one["EventStatus"] for one in imds.events} == {"Scheduled"}
        sender.send(command(deletions[1], id="second", session="web-1"))
        assert rigs[1].receipt_of("second")["Reason"] == "approved"
        assert {one["EventStatus"] for one in imds.events} == {"Started"}
    assert [(one.vm, one.event_id) for one in imds.approvals] == [
        ("web-0", deletions[0]),
        ("web-1", deletions[1]),
    ]


# Without a command


def test_a_rule_approves_without_a_command_and_nothing_else(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    rule = {"event_source": ["User"], "max_duration_seconds": 10}
    fitting = reboot(imds, event_source="User", duration_seconds=0)
    reboot(imds, event_source="User", duration_seconds=-1)
    reboot(imds, event_source="User", duration_seconds=11)
    reboot(imds, event_source="Platform", duration_seconds=0)
    reboot(imds, "web-0", "web-1", event_source="User", duration_seconds=0)
    with Rig(tmp_path, imds, bus, policy={}, auto=[rule]) as rig:
        (receipt,) = rig.wait_for(lambda receipts: receipts or None)
        seen = len(imds.requests())
        imds.wait_for(lambda: len(imds.requests()) >= seen + 3, LIMIT_SECONDS)
        assert rig.receipts() == [receipt]
    assert (receipt["subject"], receipt["data"]["Detail"]) == (fitting, "an auto rule")
    assert [one.event_id for one in imds.approvals] == [fitting]


def test_a_deny_rule_wins_over_an_auto_rule_too(tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab) -> None:
    reboot(imds)
    with Rig(tmp_path, imds, bus, policy={"deny": [{}]}, auto=[{}]) as rig:
        imds.wait_for(lambda: len(imds.requests()) >= 4, LIMIT_SECONDS)
        assert rig.receipts() == []
    assert posts(imds) == []


def test_a_dry_run_of_auto_rules_tells_once_and_never_posts(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    reboot(imds)
    with Rig(tmp_path, imds, bus, auto=[{}], dry_run=True) as rig:
        rig.wait_for(lambda receipts: receipts or None)
        seen = len(imds.requests())
        imds.wait_for(lambda: len(imds.requests()) >= seen + 2, LIMIT_SECONDS)
        assert len(rig.receipts()) == 1
    assert posts(imds) == []


def test_what_no_rule_approves_any_more_is_not_posted(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab
) -> None:
    imds.fault(500, count=None, method="POST")
    event_id = reboot(imds)
    with Rig(tmp_path, imds, bus, auto=[{"event_type": ["Reboot"]}]) as rig:
        imds.wait_for(lambda: posts(imds), LIMIT_SECONDS)
        imds.update(event_id, EventType="Terminate")
        seen = len(imds.requests())
        imds.wait_for(lambda: len(imds.requests()) >= seen + 4, LIMIT_SECONDS)
        imds.clear_faults()
        seen = len(imds.requests())
        imds.wait_for(lambda: len(imds.requests()) >= seen + 4, LIMIT_SECONDS)
        assert {detail for one in rig.receipts() if (detail := one["data"]["Detail"])} <= {
            NOT_RECORDED_DETAIL
        }
    assert imds.approvals == []


# Who may not, may not in company either


def test_an_event_that_was_approved_before_excuses_no_other_command_for_it(
    tmp_path: Path, bus: ServiceBusLab, sender: Sender
) -> None:
    with ImdsLab(vms=["web-0"], approvals="hold") as held:
        event_id = reboot(held)
        with Rig(tmp_path, held, bus) as rig:
            sender.send(command(event_id))
            rig.wait_for(lambda receipts: receipts or None)
            sender.send(command(event_id, id="b"), command(event_id, id="c", Vm="web-9"))
            receipts = rig.wait_for(lambda receipts: receipts if len(receipts) == 3 else None)
    told = {one["causationid"]: one["data"]["Reason"] for one in receipts}
    assert (told["b"], told["c"]) == ("already_approved", "other_vm")


def test_a_vm_that_is_only_remembered_approves_nothing_until_imds_confirms_it(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    with Rig(tmp_path, imds, bus) as rig:
        wait_until(lambda: rig.outbox.meta("vm_id") != "")
    imds.fault(500, count=None, path=INSTANCE_PATH)
    event_id = reboot(imds)
    with Rig(tmp_path, imds, bus) as rig:
        sender.send(command(event_id))
        asked = len(imds.requests())
        imds.wait_for(lambda: len(imds.requests()) >= asked + 2, LIMIT_SECONDS)
        assert posts(imds) == []
        imds.clear_faults()
        (receipt,) = rig.wait_for(lambda receipts: receipts or None)
    assert receipt["data"]["Reason"] == "approved"


def test_the_same_nonsense_that_comes_at_once_gets_one_and_the_same_receipt(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    sender.send(*[message(b"nonsense", message_id="m") for _ in range(3)])
    with Rig(tmp_path, imds, bus) as rig:
        wait_until(lambda: len(bus.entity(QUEUE).dead_letters) == 3)
        receipts = rig.receipts()
    assert len({json.dumps(receipt, sort_keys=True) for receipt in receipts}) == 1


# Ten thousand


def test_ten_thousand_commands_half_of_them_nonsense_are_all_settled_and_answered(
    tmp_path: Path, imds: ImdsLab, bus: ServiceBusLab, sender: Sender
) -> None:
    events = [reboot(imds, notice_seconds=86_400) for _ in range(20)]
    sender.send(
        *[
            command(events[number // 2 % 20], id=f"c{number}")
            if number % 2
            else message(os.urandom(50), message_id=f"m{number}")
            for number in range(10_000)
        ]
    )
    begun = time.monotonic()
    with Rig(tmp_path, imds, bus) as rig:
        wait_until(lambda: bus.entity(QUEUE).counts.active == 0, timeout_seconds=600, apart_seconds=0.5)
        minutes = int((time.monotonic() - begun) // 60) + 1
        counted = Counter(reasons(rig.receipts()))
        answered = {one.get("causationid") for one in rig.receipts()}
        assert rig.listener.status()["waiting_commands"] == 0
    counts = bus.entity(QUEUE).counts
    assert (counts.completed, counts.dead_letters) == (5000, 5000)
    assert answered >= {f"c{number}" for number in range(1, 10_000, 2)}
    assert counted["approved"] + counted["already_approved"] == 5000
    assert counted["malformed"] <= 11 * minutes + 1  # ten of a minute, and their count
    assert sorted({one.event_id for one in imds.approvals}) == sorted(events)
    assert all(one.status != 429 for one in imds.requests())
