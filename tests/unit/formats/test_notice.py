from __future__ import annotations

import re
from datetime import UTC, timedelta
from typing import Any, get_args

import pytest

from bridge.formats.notice import notice
from bridge.imds.diff import EndReason
from tests.support.examples import EVENT_TYPES, EVENTS, fields, in_, scheduled, updated, with_data, written
from tests.support.receivers import NOW

TITLES = {
    "scheduledevent.scheduled": "🟧 Reboot of web-0, web-1 in 15 min (14:18 CET)",
    "scheduledevent.started": "🟥 Reboot of web-0, web-1 has started",
    "scheduledevent.updated": "🟧 Changed: Reboot of web-0, web-1 now in 10 min (14:13 CET)",
    "scheduledevent.completed": "🟩 Reboot of web-0, web-1 is over",
    "scheduledevent.canceled": "🟦 Reboot of web-0, web-1 is canceled: it did not happen",
    "scheduledevent.ended": "⬜ Reboot of web-0, web-1 is gone; whether it ran is unknown",
    "approval.accepted": "🟦 Approved: Reboot of web-0, web-1",
    "approval.rejected": "🟧 Approval rejected: Reboot of web-0, web-1 (the policy does not allow it)",
    "approval.failed": "🟥 Approval failed: Reboot of web-0, web-1 (IMDS did not answer)",
    "imds.unreachable": "🟥 web-0 has not seen its Scheduled Events for 42 s",
    "imds.recovered": "🟩 web-0 sees its Scheduled Events again (after 42 s)",
    "bridge.heartbeat": "⬜ imds-bridge on web-0 is running",
    "bridge.loss": "🟥 imds-bridge on web-0 lost 20 events",
    "bridge.test": "🟦 TEST: imds-bridge on web-0 can send here; nothing is scheduled",
    "document.changed": "⬜ The Scheduled Events document of web-0 changed: it contains 1 event",
}


def test_every_type_of_event_has_a_title_here() -> None:
    assert set(TITLES) == set(EVENTS)


@pytest.mark.parametrize("kind", EVENTS)
def test_the_first_line_says_all(kind: str) -> None:
    assert written(EVENTS[kind]).headline == TITLES[kind]


def test_scheduled_started_and_each_end_have_colours_of_their_own() -> None:
    kinds = ("scheduled", "started", "completed", "canceled", "ended")
    assert len({written(EVENTS[f"scheduledevent.{kind}"]).tone for kind in kinds}) == len(kinds)


def test_the_meaning_of_an_event_is_shown_and_is_another_for_each_type() -> None:
    texts = [written(scheduled("scheduled", EventType=event_type)).text for event_type in EVENT_TYPES]
    meanings = [
        "memory and files are kept",
        "memory is lost, disks are kept",
        "memory and the ephemeral (temporary) disk are lost",
        "its ephemeral disk is lost",
        "The VM is deleted",
    ]
    assert [meaning in text for meaning, text in zip(meanings, texts, strict=True)] == [True] * 5
    assert len(set(texts)) == 5


USUAL = "Reboot of web-0, web-1"
MANY = [f"vm-{number}" for number in range(1_000)]


@pytest.mark.parametrize(
    ("event", "title"),
    [
        (scheduled("scheduled", EventType="Migrate"), "Migrate of web-0, web-1 in 15 min (14:18 CET)"),
        (
            scheduled("scheduled", Resources=["db-1", "Web-0"]),
            "Reboot of Web-0, db-1 in 15 min (14:18 CET)",
        ),
        (
            scheduled("scheduled", Resources=MANY),
            "Reboot of vm-0, vm-1, vm-2 and 997 more in 15 min (14:18 CET)",
        ),
        (scheduled("scheduled", Resources=[]), "Reboot (no VM is named) in 15 min (14:18 CET)"),
        (scheduled("scheduled", NotBefore=in_(seconds=30)), f"{USUAL} in 30 s (14:03:30 CET)"),
        (scheduled("scheduled", NotBefore=in_(minutes=14, seconds=58)), f"{USUAL} in 15 min (14:17 CET)"),
        (scheduled("scheduled", NotBefore=in_(hours=2, minutes=5)), f"{USUAL} in 2 h 5 min (16:08 CET)"),
        (
            scheduled("scheduled", NotBefore=in_(days=6, hours=4)),
            f"{USUAL} in 6 d 4 h (Thu 26 Nov 18:03 CET)",
        ),
        (scheduled("scheduled", NotBefore=in_(minutes=-3)), f"{USUAL} was due 3 min ago (14:00 CET)"),
        (updated({}, EventStatus="Paused"), f"Changed: {USUAL}: its status is Paused"),
        (
            with_data(EVENTS["imds.unreachable"], Since=None),
            "web-0 has not seen its Scheduled Events since it started",
        ),
        (with_data(EVENTS["bridge.heartbeat"], Reason="Started"), "imds-bridge on web-0 has started"),
        (with_data(EVENTS["bridge.heartbeat"], Reason="Stopping"), "imds-bridge on web-0 is stopping"),
    ],
)
def test_the_title_names_what_whom_and_when_as_exactly_as_it_matters(
    event: dict[str, Any], title: str
) -> None:
    assert written(event).title == title


@pytest.mark.parametrize(
    ("property_name", "value", "label", "words"),
    [
        ("DurationInSeconds", 9, "Lasts", "about 9 s"),
        ("DurationInSeconds", 0, "Lasts", "no impact on the VM is expected"),
        ("DurationInSeconds", -1, "Lasts", "unknown"),
        ("DurationInSeconds", 300, "Lasts", "about 5 min"),
        ("EventSource", "Platform", "Initiated by", "Azure (platform)"),
        ("EventSource", "User", "Initiated by", "a user or automation of yours"),
    ],
)
def test_the_duration_and_the_source_are_shown(
    property_name: str, value: Any, label: str, words: str
) -> None:
    assert fields(written(scheduled("scheduled", **{property_name: value})))[label] == words


def test_the_time_stays_in_the_title_when_the_names_are_long() -> None:
    title = written(scheduled("scheduled", Resources=["x" * 300, "y" * 300])).title
    assert title.endswith("… (cut) and 1 more in 15 min (14:18 CET)")
    three = written(scheduled("scheduled", Resources=["x" * 64, "y" * 64, "z" * 64])).title
    assert len(three) <= 146
    assert three.endswith("x and 2 more in 15 min (14:18 CET)")


def test_the_time_that_is_left_is_that_of_the_attempt() -> None:
    later = written(EVENTS["scheduledevent.scheduled"], now=NOW + timedelta(minutes=12))
    assert later.title == "Reboot of web-0, web-1 in 3 min (14:18 CET)"
    assert fields(later)["Seen at"] == "14:03 CET, 12 min ago"


def test_without_a_time_zone_times_are_utc() -> None:
    assert written(EVENTS["scheduledevent.scheduled"], zone=None).title.endswith("in 15 min (13:18 UTC)")


@pytest.mark.parametrize("not_before", ["", None, "soon", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", 7])
def test_a_start_that_cannot_be_read_is_unknown(not_before: Any) -> None:
    event = with_data(scheduled("scheduled", NotBefore=not_before), NotBeforeUtc=None)
    assert written(event).title == "Reboot of web-0, web-1 is scheduled (its start is unknown)"


def test_the_approve_command_and_what_it_releases_are_shown() -> None:
    message = written(EVENTS["scheduledevent.scheduled"])
    assert message.command == (
        "imds-bridge approve 602d9444-d2cd-49c7-8624-8643e7171297 --vm web-0 --resource-group shop"
    )
    assert fields(message)["Approval releases"] == "both VMs: web-0, web-1"
    three = scheduled("scheduled", Resources=["web-0", "web-1", "web-2"])
    assert fields(written(three))["Approval releases"] == "all 3 VMs: web-0, web-1, web-2"
    assert fields(message)["Starts"] == "automatically in 15 min, at 14:18 CET"


def test_the_command_goes_to_the_vm_whose_session_it_is() -> None:
    assert " --vm db-1 " in written(scheduled("scheduled", Resources=["db-1", "web-0"])).command


def test_without_approvals_the_message_says_so() -> None:
    message = written(with_data(EVENTS["scheduledevent.scheduled"], ApprovalSession=None))
    assert message.command == ""
    assert fields(message)["Approval"].startswith("not set up over Service Bus")


@pytest.mark.parametrize("bad", ["$(reboot)", "-x", "a b", "a;b", "`x`", "ё", "x" * 500])
def test_a_name_that_a_shell_might_act_on_stands_in_no_command(bad: str) -> None:
    assert written(scheduled("scheduled", Resources=[bad])).command == ""
    assert written(with_data(EVENTS["scheduledevent.scheduled"], EventId=bad)).command == ""


def test_a_deletion_can_only_be_approved_by_the_vm_itself() -> None:
    message = written(scheduled("scheduled", EventType="Terminate", Resources=["web-0"]))
    assert fields(message)["Approval"] == "only the VM itself can approve its own deletion"


@pytest.mark.parametrize("kind", ["started", "completed", "canceled", "ended"])
def test_what_has_started_or_is_gone_is_not_offered_for_approval(kind: str) -> None:
    message = written(EVENTS[f"scheduledevent.{kind}"])
    assert not message.command
    assert not {"Approve", "Approval", "Approval releases", "Starts"} & set(fields(message))


def test_days_of_notice_by_the_platform_advise_to_redeploy_now() -> None:
    text = written(scheduled("scheduled", NotBefore=in_(days=6))).text
    assert "may fail sooner" in text
    assert (
        "Microsoft advises to redeploy the VM now (az vm redeploy --resource-group shop --name web-0)" in text
    )


@pytest.mark.parametrize(
    "properties",
    [{"NotBefore": in_(hours=23)}, {"NotBefore": in_(days=6), "EventSource": "User"}],
)
def test_less_notice_or_a_user_s_event_brings_no_advice(properties: dict[str, Any]) -> None:
    assert "Microsoft advises" not in written(scheduled("scheduled", **properties)).text


def test_an_update_says_what_changed_from_what_to_what() -> None:
    assert (
        fields(written(EVENTS["scheduledevent.updated"]))["Changed"] == "start, from 14:18 CET to 14:13 CET"
    )
    smaller = updated({"EventType": "Reboot"}, EventType="Freeze")
    assert written(smaller).title == "Changed: Freeze of web-0, web-1 in 15 min (14:18 CET)"
    assert fields(written(smaller))["Changed"] == "EventType, from Reboot to Freeze"


def test_an_update_says_that_an_event_goes_back_to_scheduled_or_runs() -> None:
    back = written(updated({"EventStatus": "Started"}))
    assert back.title == f"Back to scheduled: {USUAL} in 15 min (14:18 CET)"
    runs = written(updated({"EventStatus": "Started"}, EventStatus="Started", Description="new"))
    assert runs.title == f"Changed: {USUAL}, which has started"
    assert (back.tone, runs.tone) == ("warning", "attention")


def test_an_end_has_its_reason_and_says_that_this_vm_has_rebooted() -> None:
    text = written(EVENTS["scheduledevent.ended"]).text
    assert "It was removed while imds-bridge was restarted; this VM has rebooted since." in text
    completed = with_data(EVENTS["scheduledevent.completed"], VmRebooted=True)
    assert "this VM has rebooted since" in written(completed).text


@pytest.mark.parametrize("reason", get_args(EndReason))
@pytest.mark.parametrize("rebooted", [False, None])
def test_every_reason_of_an_end_has_a_text(reason: str, rebooted: bool | None) -> None:
    event = with_data(EVENTS["scheduledevent.ended"], EndReason=reason, VmRebooted=rebooted)
    sentence = written(event).text.splitlines()[1]
    assert re.fullmatch(r"(It|IMDS|The document|An entry) [^;]+[.]|Its [^;]+[.]", sentence)


def test_a_receipt_says_who_asked_what_is_released_and_what_may_still_delay_it() -> None:
    message = written(EVENTS["approval.accepted"])
    assert fields(message)["Requested by"] == "ops@example.org"
    assert fields(message)["Because"] == "drained"
    assert fields(message)["Releases"] == "web-0, web-1"
    assert "may still wait for other VMs on the host" in message.text


def test_a_dry_run_says_that_nothing_was_sent() -> None:
    message = written(with_data(EVENTS["approval.accepted"], DryRun=True))
    assert message.title == "Dry run, not sent: Approved: Reboot of web-0, web-1"
    assert "nothing was sent to IMDS" in message.text
    assert "may still wait" not in message.text


def test_a_command_that_cannot_be_read_has_a_receipt_without_an_event() -> None:
    nothing: dict[str, Any] = {
        "EventId": None,
        "EventType": None,
        "Resources": [],
        "Reason": "malformed",
        "Detail": "no JSON",
    }
    message = written(with_data(EVENTS["approval.rejected"], **nothing))
    assert message.title == "Approval rejected (the command cannot be read)"
    assert fields(message)["Detail"] == "no JSON"


def test_a_receipt_of_what_was_due_already_names_no_start() -> None:
    assert "Starts automatically" in fields(written(EVENTS["approval.accepted"]))
    assert "Starts automatically" not in fields(
        written(EVENTS["approval.accepted"], now=NOW + timedelta(hours=1))
    )


@pytest.mark.parametrize("data", [None, [], "text", 7, {"Vm": []}, {"Document": {"Events": None}}])
@pytest.mark.parametrize("kind", EVENTS)
def test_nonsense_as_data_has_a_title_all_the_same(kind: str, data: Any) -> None:
    assert written({**EVENTS[kind], "data": data}).title


@pytest.mark.parametrize("event", [{}, {"type": 7}, {"type": "com.example.order", "subject": "17"}])
def test_a_type_of_others_is_named(event: dict[str, Any]) -> None:
    message = written(event)
    assert message.kind == ""
    assert message.title == f"{event.get('type', 'unknown')} about {event.get('subject', 'a VM')}"


def test_text_from_outside_is_one_line_without_what_acts() -> None:
    hostile = "first\r\nsecond\x00\x1b[31m\u202etxt.exe\u2066 \ud800 end"
    described_text = fields(written(scheduled("scheduled", Description=hostile)))["Azure says"]
    assert described_text == "first second��[31m�txt.exe� � end"


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
    ("resources", "named"), [(["web-1"], "--name web-1)"), (["web-1", "web-2"], "now."), ([], "now.")]
)
def test_the_advice_to_redeploy_never_names_a_vm_that_is_not_concerned(
    resources: list[str], named: str
) -> None:
    text = written(scheduled("scheduled", NotBefore=in_(days=6), Resources=resources)).text
    assert named in text
    assert "--name web-0" not in text
