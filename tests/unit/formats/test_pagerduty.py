"""PagerDuty: which alert an event triggers, acknowledges or resolves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bridge.contract.types import type_of
from bridge.formats import pagerduty
from tests.support.receivers import ROUTING_KEY, check_pagerduty, make_format
from tests.support.samples import EVENT_TYPES, EVENTS, NOW, scheduled, updated, with_data

EVENT_ID = "602d9444-d2cd-49c7-8624-8643e7171297"
VM = EVENTS["imds.unreachable"]["data"]["Vm"]["ResourceId"].lower()
WATCH, OUT_OF_WORK = (f"imds-bridge:{name}:{VM}:web-0/forward" for name in ("watch", "out-of-work"))
ACTIONS = {
    **dict.fromkeys(("scheduledevent.scheduled", "scheduledevent.updated"), ("trigger", EVENT_ID)),
    **dict.fromkeys(("scheduledevent.started", "approval.accepted"), ("acknowledge", EVENT_ID)),
    **{f"scheduledevent.{end}": ("resolve", EVENT_ID) for end in ("completed", "canceled", "ended")},
    "imds.unreachable": ("trigger", WATCH),
    "imds.recovered": ("resolve", WATCH),
    "approval.outofwork": ("trigger", OUT_OF_WORK),
    "approval.recovered": ("resolve", OUT_OF_WORK),
    **dict.fromkeys(
        ("approval.rejected", "approval.failed"), ("trigger", f"imds-bridge:approval:{EVENT_ID}")
    ),
    "approval.prepared": ("resolve", f"imds-bridge:drain:{VM}:web-0/forward:{EVENT_ID}"),
    "bridge.loss": ("trigger", f"imds-bridge:loss:{VM}:web-0/forward"),
    "bridge.test": ("trigger", "imds-bridge:test:web-0"),
}


def write(event: dict[str, Any]) -> Any:
    return make_format("pagerduty").write(event, NOW)


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_type_has_its_action_and_alert_whatever_its_letter_case_and_after_a_restart(kind: str) -> None:
    again = EVENTS[kind] | {"reporterepoch": "ffffffffffffffffffffffffffffffff"}
    if EVENT_ID in ACTIONS[kind][1]:
        again = with_data(again, EventId=EVENT_ID.upper())
    for event in (EVENTS[kind], again):
        assert (write(event)["event_action"], write(event)["dedup_key"]) == ACTIONS[kind]


WITHOUT_ACTION = ("bridge.heartbeat", "document.changed")


def test_of_every_type_it_is_known_whether_it_has_an_action() -> None:
    assert {*pagerduty.ACTIONS, *WITHOUT_ACTION} == EVENTS.keys()


@pytest.mark.parametrize(
    "pattern", ["*", "io.imdsbridge.*", "io.imdsbridge.bridge.*", "io.imdsbridge.scheduledevent.advised.v1"]
)
def test_types_may_match_more_than_what_has_an_action(pattern: str) -> None:
    assert make_format("pagerduty", types=[pattern])


@pytest.mark.parametrize("pattern", [type_of("bridge.heartbeat"), "io.imdsbridge.document.*"])
def test_types_that_name_only_what_has_no_action_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"PagerDuty has no action for {re.escape(pattern)}") as refused:
        make_format("pagerduty", types=["io.imdsbridge.scheduledevent.*", pattern])
    assert ROUTING_KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("event", "action"),
    [
        # What was never seen scheduled: an acknowledgement alone is dropped.
        (scheduled("started", EventStatus="Started"), "trigger"),
        (with_data(EVENTS["scheduledevent.started"], PreviousStatus="Advisory"), "trigger"),
        (updated({"EventStatus": "Started"}, EventStatus="Started", Description="new"), "acknowledge"),
        (updated({"EventStatus": "Started"}), "trigger"),
    ],
)
def test_the_action_depends_on_what_was_there_and_what_runs(event: dict[str, Any], action: str) -> None:
    assert write(event)["event_action"] == action


@pytest.mark.parametrize("kind", ["imds.recovered", "approval.recovered", "bridge.loss"])
def test_vms_of_one_name_have_alerts_of_their_own(kind: str) -> None:
    event = EVENTS[kind]
    vm = event["data"]["Vm"]
    keys = {
        write(
            with_data(event, Vm={**vm, "ResourceId": re.sub("resourceGroups/[^/]*", group, vm["ResourceId"])})
        )["dedup_key"]
        for group in ("resourceGroups/prod", "resourceGroups/staging", "RESOURCEGROUPS/Staging")
    }
    assert len(keys) == 2


def test_what_failed_has_an_alert_of_its_own_which_its_success_resolves() -> None:
    failed = with_data(EVENTS["approval.rejected"], Reason="not_prepared")
    accepted, types = EVENTS["approval.accepted"], ["io.imdsbridge.approval.*"]
    opens, closes = write(failed), write(EVENTS["approval.prepared"])
    assert (opens["event_action"], opens["payload"]["severity"]) == ("trigger", "error")
    assert (closes["event_action"], closes["dedup_key"]) == ("resolve", opens["dedup_key"])
    closes = make_format("pagerduty", types=types).write(accepted, NOW)
    assert (closes["event_action"], closes["dedup_key"]) == (
        "resolve",
        write(EVENTS["approval.failed"])["dedup_key"],
    )


@pytest.mark.parametrize(
    "event",
    [
        EVENTS["scheduledevent.advised"],
        *(EVENTS[kind] for kind in WITHOUT_ACTION),
        {**EVENTS["scheduledevent.scheduled"], "type": "io.imdsbridge.scheduledevent.later.v1"},
        {**EVENTS["scheduledevent.scheduled"], "type": "io.imdsbridge.scheduledevent.scheduled.v2"},
        {"type": "com.example.order"},
        {},
        updated({}, EventStatus="Paused"),
        with_data(EVENTS["scheduledevent.ended"], PreviousStatus="Advisory", EndReason="Advisory"),
        *(with_data(EVENTS[f"approval.{kind}"], DryRun=True) for kind in ("accepted", "rejected", "failed")),
    ],
)
def test_nothing_is_sent_for_what_is_no_alarm(event: dict[str, Any]) -> None:
    assert write(event) is None


def test_a_test_asks_for_nothing() -> None:
    payload = write(EVENTS["bridge.test"])["payload"]
    assert payload["severity"] == "info"
    assert "resolve this alert" in payload["custom_details"]["Meaning"]


SEVERITIES = dict(zip(EVENT_TYPES, ("info", "warning", "error", "critical", "error"), strict=True))


@pytest.mark.parametrize(
    ("event_type", "severity"), [*SEVERITIES.items(), ("Migrate", "info"), ("", "warning")]
)
def test_the_severity_is_that_of_what_is_lost(event_type: str, severity: str) -> None:
    assert write(scheduled("scheduled", EventType=event_type))["payload"]["severity"] == severity


def test_the_summary_reads_well_aloud_and_the_details_say_the_rest() -> None:
    payload = write(EVENTS["scheduledevent.scheduled"])["payload"]
    details = payload.pop("custom_details")
    assert payload == {
        "summary": "Reboot of web-0, web-1 in 15 min (13:18 UTC)",
        "source": "web-0",
        "severity": "warning",
        "timestamp": "2026-11-20T13:03:00.000Z",
        "component": "web-0, web-1",
        "group": "shop",
        "class": "Reboot",
    }
    assert details["Meaning"] == "A restart: memory is lost, disks are kept."
    assert details["Approve"].startswith("imds-bridge approve ")


@pytest.mark.parametrize("event_id", ["x" * 300, "a b", "\u202e", "\ud800"])
def test_an_id_that_cannot_be_a_key_gets_a_derived_key(event_id: str) -> None:
    request = write(scheduled("scheduled") | {"data": {"EventId": event_id}})
    check_pagerduty(request)
    assert request["dedup_key"] != EVENT_ID


def test_the_routing_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{ROUTING_KEY}\n")
    format_ = make_format("pagerduty", routing_key=None, routing_key_file=str(file))
    assert format_.write(EVENTS["bridge.test"], NOW)["routing_key"] == ROUTING_KEY
