"""The words of a notice: its title, its fields and its sentences."""

from __future__ import annotations

import re
from datetime import UTC, timedelta
from typing import Any, get_args

import pytest

from bridge.contract.types import RECEIPT_REASONS, ReceiptReason
from bridge.formats.notice import notice
from bridge.formats.reasons import REASONS
from bridge.imds.diff import EndReason
from tests.support.samples import EVENTS, NOW, fields, in_, scheduled, updated, with_data, written

TITLES = {
    "scheduledevent.scheduled": "🟧 Reboot of web-0, web-1 in 15 min (14:18 CET)",
    "scheduledevent.started": "🟥 Reboot of web-0, web-1 has started",
    "scheduledevent.updated": "🟧 Changed: Reboot of web-0, web-1 now in 10 min (14:13 CET)",
    "scheduledevent.advised": "🟦 Early warning of web-0, web-1: Azure may take this Spot VM back",
    "scheduledevent.completed": "🟩 Reboot of web-0, web-1 is over",
    "scheduledevent.canceled": "🟦 Reboot of web-0, web-1 is canceled: it did not happen",
    "scheduledevent.ended": "⬜ Reboot of web-0, web-1 is gone; whether it ran is unknown",
    "approval.accepted": "🟦 Approved: Reboot of web-0, web-1",
    "approval.rejected": "🟧 Approval rejected: Reboot of web-0, web-1 (it is not allowed)",
    "approval.failed": "🟥 Approval failed: Reboot of web-0, web-1 (IMDS did not take it in time)",
    "approval.prepared": "🟩 web-0 is prepared: Reboot of web-0, web-1",
    "approval.recovered": "🟩 web-0 is back at work after Reboot",
    "approval.outofwork": "🟥 web-0 is still out of work after Reboot",
    "imds.unreachable": "🟥 web-0 has not seen its Scheduled Events for 42 s",
    "imds.recovered": "🟩 web-0 sees its Scheduled Events again (after 42 s)",
    "bridge.heartbeat": "⬜ imds-bridge on web-0 is running",
    "bridge.loss": "🟥 imds-bridge on web-0 lost 20 events",
    "bridge.test": "🟦 TEST: imds-bridge on web-0 can send here; nothing is scheduled",
    "document.changed": "⬜ The Scheduled Events document of web-0 changed: it contains 1 event",
}


def test_the_first_line_of_every_type_of_event_says_all() -> None:
    assert {kind: written(event).headline for kind, event in EVENTS.items()} == TITLES


@pytest.mark.parametrize("data", [None, [], "text", 7, {"Vm": []}, {"Document": {"Events": None}}])
def test_every_type_of_event_has_a_title_even_where_the_data_are_nonsense(data: Any) -> None:
    assert all(written({**event, "data": data}).title for event in EVENTS.values())


def test_scheduled_started_and_each_end_have_colours_of_their_own() -> None:
    kinds = ("scheduled", "started", "completed", "canceled", "ended")
    assert len({written(EVENTS[f"scheduledevent.{kind}"]).tone for kind in kinds}) == len(kinds)
    assert written(updated({"EventStatus": "Started"})).tone == "warning"
    assert written(updated({"EventStatus": "Started"}, EventStatus="Started")).tone == "attention"


MEANINGS = {
    "Freeze": "memory and files are kept",
    "Reboot": "memory is lost, disks are kept",
    "Redeploy": "memory and the ephemeral (temporary) disk are lost",
    "Preempt": "it is deleted or deallocated",
    "Terminate": "The VM is deleted",
}


@pytest.mark.parametrize(("event_type", "meaning"), MEANINGS.items())
def test_the_meaning_of_an_event_is_shown(event_type: str, meaning: str) -> None:
    assert meaning in written(scheduled("scheduled", EventType=event_type)).text


@pytest.mark.parametrize("event_type", ["Reboot", "Preempt", "Terminate"])
def test_a_vm_that_is_gone_is_not_to_be_put_back(event_type: str) -> None:
    message = written(scheduled("completed", EventType=event_type, EventStatus="Started"))
    is_gone = event_type != "Reboot"
    assert message.title.endswith(" is over: the VM is gone" if is_gone else " is over")
    assert ("there is nothing to put back" in message.text) == is_gone
    assert (message.tone == "good") == (not is_gone)


RECEIPT = EVENTS["approval.accepted"]
UNREADABLE: dict[str, Any] = {"EventId": None, "EventType": None, "Resources": [], "Detail": "no JSON"}
COMMAND = "imds-bridge approve 602d9444-d2cd-49c7-8624-8643e7171297 --vm web-0 --resource-group shop"
THREE = ["web-0", "web-1", "web-2"]
USUAL = "Reboot of web-0, web-1"
MANY, FIRST_OF_MANY = [f"vm-{number}" for number in range(1_000)], "vm-0, vm-1, vm-2 and 997 more"
UNSEEN = with_data(EVENTS["imds.unreachable"], Since=None)
MALFORMED = with_data(EVENTS["approval.rejected"], Reason="malformed", **UNREADABLE)
FROZEN = updated({"EventType": "Reboot"}, EventType="Freeze")
HOSTILE = "first\r\nsecond\x00\x1b[31m\u202etxt.exe\u2066 \ud800 end"
DELETION = scheduled("scheduled", EventType="Terminate")
ADVICE = EVENTS["scheduledevent.advised"]
NO_BUS = with_data(scheduled("scheduled"), ApprovalSession=None)
OTHERS = {"type": "com.example.order", "subject": "17"}


@pytest.mark.parametrize(
    ("event", "title"),
    [
        (scheduled("scheduled", EventType="Migrate"), "Migrate of web-0, web-1 in 15 min (14:18 CET)"),
        (scheduled("scheduled", Resources=["db-1", "Web-0"]), "Reboot of Web-0, db-1 in 15 min (14:18 CET)"),
        (scheduled("scheduled", Resources=MANY), f"Reboot of {FIRST_OF_MANY} in 15 min (14:18 CET)"),
        (scheduled("scheduled", Resources=[]), "Reboot (no VM is named) in 15 min (14:18 CET)"),
        (scheduled("scheduled", NotBefore=in_(seconds=30)), f"{USUAL} in 30 s (14:03:30 CET)"),
        (scheduled("scheduled", NotBefore=in_(minutes=14, seconds=58)), f"{USUAL} in 15 min (14:17 CET)"),
        (scheduled("scheduled", NotBefore=in_(hours=2, minutes=5)), f"{USUAL} in 2 h 5 min (16:08 CET)"),
        (scheduled("scheduled", NotBefore=in_(days=6.167)), f"{USUAL} in 6 d 4 h (Thu 26 Nov 18:03 CET)"),
        (scheduled("scheduled", NotBefore=in_(minutes=-3)), f"{USUAL} was due 3 min ago (14:00 CET)"),
        (
            with_data(EVENTS["scheduledevent.ended"], EndReason="Advisory"),
            "Early warning of web-0, web-1 is over",
        ),
        (updated({}, EventStatus="Paused"), f"Changed: {USUAL}: its status is Paused"),
        (updated({"EventStatus": "Started"}), f"Back to scheduled: {USUAL} in 15 min (14:18 CET)"),
        (
            updated({"EventStatus": "Started"}, EventStatus="Started", Description="new"),
            f"Changed: {USUAL}, which has started",
        ),
        (UNSEEN, "web-0 has not seen its Scheduled Events since it started"),
        (with_data(RECEIPT, DryRun=True), f"Dry run, not sent: Approved: {USUAL}"),
        (MALFORMED, "Approval rejected on web-0 (it is no valid command)"),
        (FROZEN, "Changed: Freeze of web-0, web-1 in 15 min (14:18 CET)"),
        (with_data(EVENTS["bridge.heartbeat"], Reason="Started"), "imds-bridge on web-0 has started"),
        (with_data(EVENTS["bridge.heartbeat"], Reason="Stopping"), "imds-bridge on web-0 is stopping"),
        ({}, "unknown about a VM"),
        ({"type": 7}, "7 about a VM"),
        (OTHERS, "com.example.order about 17"),
    ],
)
def test_the_title_names_what_whom_and_when_as_far_as_it_matters(event: dict[str, Any], title: str) -> None:
    assert written(event).title == title


@pytest.mark.parametrize(
    ("event", "label", "words"),
    [
        (scheduled("scheduled", DurationInSeconds=9), "Lasts", "about 9 s"),
        (scheduled("scheduled", DurationInSeconds=0), "Lasts", "no impact on the VM is expected"),
        (scheduled("scheduled", DurationInSeconds=-1), "Lasts", "unknown"),
        (scheduled("scheduled", DurationInSeconds=300), "Lasts", "about 5 min"),
        (scheduled("scheduled", EventSource="Platform"), "Initiated by", "Azure (platform)"),
        (scheduled("scheduled", EventSource="User"), "Initiated by", "a user or automation of yours"),
        (scheduled("scheduled"), "Reported by", "web-0, westeurope, zone 1"),
        (scheduled("scheduled"), "Fleet", "resource group shop"),
        (scheduled("scheduled"), "Starts", "automatically in 15 min, at 14:18 CET"),
        (scheduled("scheduled"), "Approve", COMMAND),
        (scheduled("scheduled"), "Approval releases", "both VMs: web-0, web-1"),
        (scheduled("scheduled", Resources=THREE), "Approval releases", "all 3 VMs: web-0, web-1, web-2"),
        (DELETION, "Approval", "only the VM itself can approve its own deletion"),
        (
            NO_BUS,
            "Approval",
            "not set up over Service Bus; POST to IMDS on the VM to start the event earlier",
        ),
        (EVENTS["scheduledevent.updated"], "Changed", "start, from 14:18 CET to 14:13 CET"),
        (FROZEN, "Changed", "EventType, from Reboot to Freeze"),
        (with_data(FROZEN, Changed=[f"Property{n}" for n in range(99)]), "Changed", "and more"),
        (scheduled("scheduled", Resources=["web-0"]), "VM", "web-0"),
        (EVENTS["imds.unreachable"], "Reason", "no answer within 10 s"),
        (with_data(UNSEEN, Reason=""), "Reason", "unknown"),
        (RECEIPT, "Requested by", "ops@example.org"),
        (RECEIPT, "Because", "drained"),
        (RECEIPT, "Releases", "web-0, web-1"),
        (RECEIPT, "Starts automatically", "in 15 min, at 14:18 CET"),
        (MALFORMED, "Detail", "no JSON"),
        (scheduled("scheduled", Description=HOSTILE), "Azure says", "first second��[31m�txt.exe� � end"),
    ],
)
def test_each_field_says_what_the_event_says(event: dict[str, Any], label: str, words: str) -> None:
    assert fields(written(event))[label] == words


REDEPLOY = "Microsoft advises to redeploy the VM now"


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (scheduled("scheduled", NotBefore=in_(days=6)), f"it may fail sooner. {REDEPLOY}."),
        (scheduled("scheduled", NotBefore=in_(days=6), Resources=[]), f"{REDEPLOY}."),
        (
            EVENTS["scheduledevent.ended"],
            "It was removed while imds-bridge was restarted; this VM has rebooted since.",
        ),
        (with_data(EVENTS["scheduledevent.completed"], VmRebooted=True), "; this VM has rebooted since."),
        (with_data(UNSEEN, Cause="Restart"), "imds-bridge did not run meanwhile."),
        (UNSEEN, "IMDS gives no good answer."),
        (RECEIPT, "may still wait for other VMs on the host"),
        (with_data(RECEIPT, DryRun=True), "nothing was sent to IMDS"),
        (scheduled("scheduled", NotBefore=in_(hours=23)), f"not: {REDEPLOY}"),
        (scheduled("scheduled", NotBefore=in_(days=6), EventSource="User"), f"not: {REDEPLOY}"),
        (with_data(RECEIPT, DryRun=True), "not: may still wait"),
    ],
)
def test_sentences_explain_what_follows_and_nothing_that_does_not_apply(
    event: dict[str, Any], words: str
) -> None:
    assert (words.removeprefix("not: ") in written(event).text) is not words.startswith("not: ")


def test_the_time_stays_in_the_title_when_the_names_are_long() -> None:
    title = written(scheduled("scheduled", Resources=["x" * 300, "y" * 300])).title
    assert title.endswith("… (cut) and 1 more in 15 min (14:18 CET)")
    three = written(scheduled("scheduled", Resources=["x" * 64, "y" * 64, "z" * 64])).title
    assert len(three) <= 146
    assert three.endswith("x and 2 more in 15 min (14:18 CET)")


def test_the_time_that_is_left_is_that_of_the_attempt_and_utc_without_a_time_zone() -> None:
    later = written(EVENTS["scheduledevent.scheduled"], now=NOW + timedelta(minutes=12))
    assert later.title == "Reboot of web-0, web-1 in 3 min (14:18 CET)"
    assert fields(later)["Seen at"] == "14:03 CET, 12 min ago"
    assert written(EVENTS["scheduledevent.scheduled"], zone=None).title.endswith("in 15 min (13:18 UTC)")
    assert "Starts automatically" not in fields(written(RECEIPT, now=NOW + timedelta(hours=1)))


@pytest.mark.parametrize("not_before", ["", None, "soon", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", 7])
def test_a_start_that_cannot_be_read_is_unknown(not_before: Any) -> None:
    event = with_data(scheduled("scheduled", NotBefore=not_before), NotBeforeUtc=None)
    assert written(event).title == "Reboot of web-0, web-1 is scheduled (its start is unknown)"


def test_the_command_goes_to_the_vm_whose_session_it_is() -> None:
    assert written(EVENTS["scheduledevent.scheduled"]).command == COMMAND
    assert " --vm db-1 " in written(scheduled("scheduled", Resources=["db-1", "web-0"])).command
    assert written(NO_BUS).command == ""


@pytest.mark.parametrize("bad", ["$(reboot)", "-x", "a b", "a;b", "`x`", "ё", "x" * 500])
def test_a_name_that_a_shell_might_act_on_stands_in_no_command(bad: str) -> None:
    assert written(scheduled("scheduled", Resources=[bad])).command == ""
    assert written(with_data(EVENTS["scheduledevent.scheduled"], EventId=bad)).command == ""


@pytest.mark.parametrize("kind", ["started", "completed", "canceled", "ended"])
def test_what_has_started_or_is_gone_is_not_offered_for_approval(kind: str) -> None:
    message = written(EVENTS[f"scheduledevent.{kind}"])
    assert not message.command
    assert not {"Approve", "Approval", "Approval releases", "Starts"} & set(fields(message))


@pytest.mark.parametrize("reason", get_args(EndReason))
@pytest.mark.parametrize("rebooted", [False, None])
def test_every_reason_of_an_end_has_a_text(reason: str, rebooted: bool | None) -> None:
    event = with_data(EVENTS["scheduledevent.ended"], EndReason=reason, VmRebooted=rebooted)
    sentence = written(event).text.splitlines()[1]
    assert re.fullmatch(r"(It|IMDS|The document|An entry) [^;]+[.]|Its [^;]+[.]", sentence)


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "😀" * 100_000, "\n" * 100_000 + "x", "x" + " " * 100_000 + "y"]
)
def test_a_text_of_more_than_400_letters_is_cut_visibly(text: str) -> None:
    cut, whole = (
        fields(written(scheduled("scheduled", Description=one)))["Azure says"] for one in (text, "x" * 400)
    )
    assert len(cut.encode("utf-16-le")) <= 2 * 400
    assert cut.endswith("… (cut)")
    assert whole == "x" * 400


def test_facts_keep_instants_for_receivers_that_show_each_reader_s_own_time() -> None:
    message = notice(EVENTS["scheduledevent.scheduled"], now=NOW, zone=UTC)
    starts = next(field for field in message.fields if field.label == "Starts")
    assert starts.parts == ("automatically in 15 min, at ", NOW + timedelta(minutes=15))


@pytest.mark.parametrize(
    ("event", "tone"),
    [
        (ADVICE, "accent"),
        (updated({}, EventStatus="Paused"), "accent"),
        (scheduled("scheduled", EventType="Migrate"), "accent"),
        (scheduled("scheduled", EventType=""), "warning"),
        (scheduled("started", EventStatus="Started"), "attention"),
    ],
)
def test_what_is_unknown_and_an_early_warning_are_no_alarm(event: dict[str, Any], tone: str) -> None:
    message = notice(event, now=NOW, zone=None)
    assert message.tone == tone
    assert not (message.command and event is ADVICE)


# Receipts: a walk over every reason that the code can give, and what the message claims

# Each reason: whether the event is approved by it, and what helps. "no" holds where the decision is made only while
# nothing was POSTed for the command, or IMDS has refused it.
CLAIMS = {
    "approved": ("yes", "nothing"),
    "already_approved": ("yes", "nothing"),
    "not_recorded": ("may", "nothing"),
    "malformed": ("no", "command"),
    "bad_signature": ("no", "command"),
    "expired": ("no", "command"),
    "unknown_event": ("no", "command"),
    "already_started": ("", "nothing"),
    "other_vm": ("no", "command"),
    "advisory": ("", "nothing"),
    "denied": ("no", "nothing"),
    "not_prepared": ("", "program"),
    "imds_refused": ("no", "command"),
    "imds_unavailable": ("no", "command"),
    "unknown_outcome": ("may", "command"),
}
WORDS = {"yes": "Approved: ", "may": "It may be approved", "no": "This did not approve it"}
HELP = {"command": "(a new command|a new id)", "program": "The program runs again"}


def test_the_code_gives_no_reason_that_the_contract_and_the_texts_lack() -> None:
    typed = {reason for part in get_args(ReceiptReason) for reason in get_args(part) or [part]}
    assert typed == {reason for reasons in RECEIPT_REASONS.values() for reason in reasons}
    assert typed == set(REASONS) == set(CLAIMS)


@pytest.mark.parametrize(
    ("outcome", "reason"), [(outcome, one) for outcome, reasons in RECEIPT_REASONS.items() for one in reasons]
)
def test_a_receipt_claims_what_is_known_and_names_the_vm_and_the_type(outcome: str, reason: str) -> None:
    event = with_data(EVENTS[f"approval.{outcome.lower()}"], Reason=reason)
    message = notice(event, now=NOW, zone=None)
    said = f"{message.title}\n{' '.join(message.sentences)}"
    found = (
        {claim for claim, words in WORDS.items() if re.search(words, said)},
        {help_ for help_, words in HELP.items() if re.search(words, said)},
    )
    approved, help_ = CLAIMS[reason]
    assert found == ({approved} - {""}, {help_} - {"nothing"})
    assert ": Reboot of web-0, web-1" in message.title
    assert not message.title.startswith("Approval failed") or approved == "no"
    unknown = with_data(event, EventType=None, Resources=[])
    assert " on web-0" in notice(unknown, now=NOW, zone=None).title
