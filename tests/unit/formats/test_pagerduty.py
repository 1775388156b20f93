from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.formats.pagerduty import PagerDuty
from tests.support.examples import EVENT_TYPES, EVENTS, scheduled, updated, with_data
from tests.support.receivers import NOW, ROUTING_KEY, check_pagerduty, pagerduty, settings

ACTIONS = {
    **dict.fromkeys(("scheduledevent.scheduled", "scheduledevent.updated", "imds.unreachable"), "trigger"),
    **dict.fromkeys(("scheduledevent.started", "approval.accepted"), "acknowledge"),
    **dict.fromkeys([f"scheduledevent.{end}" for end in ("completed", "canceled", "ended")], "resolve"),
    "imds.recovered": "resolve",
    "bridge.test": "trigger",
}
EVENT_ID = "602d9444-d2cd-49c7-8624-8643e7171297"


def write(event: dict[str, Any]) -> Any:
    return pagerduty().write(event, NOW)


@pytest.mark.parametrize(("kind", "action"), ACTIONS.items())
def test_every_type_has_its_action(kind: str, action: str) -> None:
    assert write(EVENTS[kind])["event_action"] == action


@pytest.mark.parametrize("kind", sorted(set(EVENTS) - set(ACTIONS)))
def test_a_type_without_an_action_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ValueError, match=f"io.imdsbridge.{kind}.v1") as refused:
        write(EVENTS[kind])
    assert ROUTING_KEY not in str(refused.value)


def test_a_type_of_others_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"com\.example\.order"):
        write({"type": "com.example.order"})


def test_a_dry_run_acknowledges_nothing() -> None:
    with pytest.raises(ValueError, match="dry run"):
        write(with_data(EVENTS["approval.accepted"], DryRun=True))


@pytest.mark.parametrize(
    "kind", [kind for kind in ACTIONS if kind.startswith("scheduledevent") or kind == "approval.accepted"]
)
def test_there_is_one_alert_for_each_event_whatever_the_letter_case_of_its_id(kind: str) -> None:
    assert write(EVENTS[kind])["dedup_key"] == EVENT_ID
    assert write(with_data(EVENTS[kind], EventId=EVENT_ID.upper()))["dedup_key"] == EVENT_ID


def test_what_was_never_seen_scheduled_triggers_because_an_acknowledgement_alone_is_dropped() -> None:
    assert write(scheduled("started", EventStatus="Started"))["event_action"] == "trigger"


def test_an_update_of_what_has_started_acknowledges() -> None:
    running = updated({"EventStatus": "Started"}, EventStatus="Started", Description="new")
    assert write(running)["event_action"] == "acknowledge"
    assert write(updated({"EventStatus": "Started"}))["event_action"] == "trigger"


def test_unreachable_imds_is_an_alert_of_the_vm_that_its_recovery_resolves_even_after_a_restart() -> None:
    unreachable = write(EVENTS["imds.unreachable"])
    recovered = write(EVENTS["imds.recovered"] | {"reporterepoch": "ffffffffffffffffffffffffffffffff"})
    assert unreachable["dedup_key"] == recovered["dedup_key"] == "imds-bridge:watch:web-0/forward"


def test_a_test_is_an_alert_of_its_own_that_asks_for_nothing() -> None:
    request = write(EVENTS["bridge.test"])
    assert request["dedup_key"] == "imds-bridge:test:web-0"
    assert request["payload"]["severity"] == "info"
    assert "resolve this alert" in request["payload"]["custom_details"]["Meaning"]


@pytest.mark.parametrize(
    ("event_type", "severity"),
    [
        *zip(EVENT_TYPES, ("info", "warning", "error", "critical", "error"), strict=True),
        ("Migrate", "warning"),
    ],
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
    format_ = PagerDuty(settings("pagerduty", routing_key_file=str(file)))
    assert format_.write(EVENTS["bridge.test"], NOW)["routing_key"] == ROUTING_KEY
