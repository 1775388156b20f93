"""The policy: deny wins, what is not allowed is denied, and a Terminate is approved only by the VM it names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.approvals.command import Command
from bridge.approvals.policy import (
    Decision,
    auto_wait_seconds,
    decide_command,
    matches,
    names_other_vm,
)
from bridge.config.approvals import AutoSettings, PolicySettings, RuleSettings
from bridge.imds.document import ScheduledEvent, fold_name, is_among, read_document
from bridge.runtime.time import iso_utc
from tests.support.diff import steady

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOTICE_SECONDS = 900
DELETIONS: list[Any] = ["TERMINATE", ..., "", None, 7]


def raw(**changes: Any) -> dict[str, Any]:
    given = {
        "EventId": "A",
        "EventType": "Reboot",
        "EventSource": "Platform",
        "EventStatus": "Scheduled",
        "Resources": ["web-0"],
        "DurationInSeconds": 9,
        "NotBefore": iso_utc(NOW + timedelta(seconds=NOTICE_SECONDS)),
        **changes,
    }
    return {name: value for name, value in given.items() if value is not ...}


def event(**changes: Any) -> ScheduledEvent:
    return ScheduledEvent(raw=raw(**changes))


def decide(policy: dict[str, Any] | None = None, *, vm: str = "web-0", **changes: Any) -> Decision:
    document = read_document({"DocumentIncarnation": 1, "Events": [raw(**changes)]})
    settings = PolicySettings(**(policy or {"allow": [{}]}))
    return decide_command(document.events.get("a"), vm_name=vm, policy=settings, now=NOW)


GROUP = {"scope": "group", "allow": [{}]}
NOT_IN_IT = "web-0 is not among its Resources"


@pytest.mark.parametrize(
    ("policy", "changes", "reason", "detail"),
    [
        (None, {}, "approved", ""),
        (None, {"Resources": ["_WEB-0"]}, "approved", ""),
        ({"scope": "self"}, {}, "denied", "no allow rule matches"),
        ({"allow": [{}], "deny": [{"event_type": ["reboot"]}]}, {}, "denied", "a deny rule matches"),
        (None, {"EventId": "B"}, "unknown_event", "this VM's document does not contain it"),
        (None, {"EventStatus": "Started"}, "already_started", ""),
        (None, {"EventStatus": "Paused"}, "denied", "its status is 'Paused'"),
        (None, {"EventStatus": "Advisory"}, "advisory", "it is an early warning: approving it has no effect"),
        (None, {"EventType": "Migrate"}, "denied", "no allow rule matches"),
        ({"allow": [{"event_type": ["migrate"]}]}, {"EventType": "Migrate"}, "approved", ""),
        (None, {"EventStatus": ...}, "denied", "its status is None"),
        *((None, {"Resources": names}, "other_vm", NOT_IN_IT) for names in (["web-1"], [], ...)),
        (GROUP, {"Resources": ["web-1"]}, "approved", ""),
        (GROUP, {"EventType": "Terminate", "Resources": ["web-1", "web-0"]}, "approved", ""),
        # What is or may be a deletion is approved only by the VM that it names.
        *((GROUP, {"EventType": kind, "Resources": ["web-1"]}, "other_vm", NOT_IN_IT) for kind in DELETIONS),
        (GROUP, {"EventType": "TERMINATE"}, "approved", ""),
        # An unknown type never permits.
        *((GROUP, {"EventType": kind}, "denied", "no allow rule matches") for kind in (None, "", 7, ...)),
    ],
)
def test_each_reason_to_approve_or_reject(
    policy: dict[str, Any] | None, changes: dict[str, Any], reason: str, detail: str
) -> None:
    decision = decide(policy, **changes)
    assert (decision.reason, decision.detail) == (reason, detail)
    assert decision.outcome == ("allowed" if reason == "approved" else "rejected")
    assert decision.event == (None if reason == "unknown_event" else event(**changes))


def test_a_command_for_this_vm_names_it_without_letter_case_and_the_leading_underscore() -> None:
    command = Command(id="c", key="k", event_ids=("a",), vm="Web-0")
    assert not names_other_vm(command, "_WEB-0")
    assert names_other_vm(command, "web-1")


@pytest.mark.parametrize(
    ("rule", "changes", "expected"),
    [
        ({}, {}, True),
        ({"event_type": ["Freeze", "REBOOT"]}, {}, True),
        ({"event_type": ["Freeze"]}, {}, False),
        ({"event_type": ["Reboot"]}, {"EventType": ...}, None),
        ({"event_type": ["Reboot"]}, {"EventType": ""}, None),
        ({"event_source": ["user"]}, {"EventSource": "User"}, True),
        ({"event_source": ["User"]}, {}, False),
        ({"event_source": ["User"]}, {"EventSource": ...}, None),
        ({"event_source": ["User"]}, {"EventSource": 7}, None),
        ({"max_duration_seconds": 9}, {}, True),
        ({"max_duration_seconds": 8}, {}, False),
        ({"max_duration_seconds": 0}, {"DurationInSeconds": 0}, True),
        ({"max_duration_seconds": 99}, {"DurationInSeconds": -1}, None),
        ({"max_duration_seconds": 99}, {"DurationInSeconds": ...}, None),
        ({"max_duration_seconds": 99}, {"DurationInSeconds": True}, None),
        ({"max_duration_seconds": 99}, {"DurationInSeconds": "9"}, None),
        ({"min_duration_seconds": 9}, {}, True),
        ({"min_duration_seconds": 10}, {}, False),
        ({"min_duration_seconds": 0}, {"DurationInSeconds": -1}, None),
        ({"min_notice_seconds": 900}, {}, True),
        ({"min_notice_seconds": 901}, {}, False),
        ({"max_notice_seconds": 900}, {}, True),
        ({"max_notice_seconds": 899}, {}, False),
        ({"min_notice_seconds": -5}, {"NotBefore": ""}, None),
        ({"resource": ["WEB-*"]}, {}, True),
        ({"resource": ["web-?"]}, {"Resources": ["_web-3"]}, True),
        ({"resource": ["db-*"]}, {}, False),
        ({"resource": ["*"]}, {"Resources": []}, None),
        ({"resource": ["web-*"]}, {"Resources": ["web-0", "db-0"]}, False),
        ({"resource": ["web-*", "db-*"]}, {"Resources": ["web-0", "db-0"]}, True),
        ({"resource": ["web-*"]}, {"Resources": "web-0"}, True),
        ({"resource": ["web-*"]}, {"Resources": ["web-0", {"Name": "db-1"}]}, None),
        ({"resource": ["web-*"]}, {"Resources": ["db-0", {"Name": "db-1"}]}, False),
        ({"resource": ["*"]}, {"Resources": None}, None),
        ({"resource": ["*"]}, {"Resources": {"Name": "web-0"}}, None),
        ({"event_type": ["Reboot"], "event_source": ["User"]}, {}, False),
        ({"event_type": ["Freeze"], "max_duration_seconds": 9}, {"DurationInSeconds": -1}, False),
        ({"event_type": ["Reboot"], "max_duration_seconds": 9}, {"DurationInSeconds": -1}, None),
    ],
)
def test_a_rule_matches_if_every_criterion_is_met_and_may_match_if_one_is_unknown(
    rule: dict[str, Any], changes: dict[str, Any], expected: bool | None
) -> None:
    assert matches(RuleSettings(**rule), event(**changes), NOW) is expected


MAY_MATCH = "a deny rule may match: the event lacks a value"
NO_DB = {"resource": ["db-*"]}


@pytest.mark.parametrize(
    ("rule", "changes", "detail"),
    [
        ({"min_duration_seconds": 60}, {"DurationInSeconds": -1}, MAY_MATCH),
        ({"min_duration_seconds": 60}, {"DurationInSeconds": ...}, MAY_MATCH),
        ({"event_source": ["Platform"]}, {"EventSource": ...}, MAY_MATCH),
        ({"max_notice_seconds": 60}, {"NotBefore": ""}, MAY_MATCH),
        *((NO_DB, {"Resources": names}, MAY_MATCH) for names in ([], None, ["web-0", {"Name": "db-1"}])),
        # One resource is enough, whatever cannot be read.
        *(
            (NO_DB, {"Resources": ["web-0", "db-0", *odd]}, "a deny rule matches")
            for odd in ([], [7], [None])
        ),
    ],
)
def test_what_a_deny_rule_may_match_is_denied(rule: Any, changes: dict[str, Any], detail: str) -> None:
    assert decide(GROUP, **changes).outcome == "allowed"
    denied = decide({**GROUP, "deny": [rule]}, **changes)
    assert (denied.outcome, denied.reason, denied.detail) == ("rejected", "denied", detail)


@pytest.mark.parametrize(
    ("resources", "event_type", "group", "expected"),
    [
        (["web-0"], "Reboot", False, 0.0),
        (["web-1"], "Reboot", False, None),
        (["web-1"], "Reboot", True, None),
        ([], "Reboot", True, None),
        (["web-0", "web-1"], "Reboot", False, None),
        (["web-0", "web-1"], "Reboot", True, 0.0),
        (["web-1", "web-2", "WEB-0"], "Freeze", True, 20.0),
        # A VM that is named twice is one VM, however its name is spelled.
        (["web-0", "_WEB-0"], "Reboot", False, 0.0),
        (["web-0", "WEB-0"], "Terminate", True, 0.0),
        (["web-1", "WEB-1", "web-0"], "Reboot", True, 10.0),
        (["web-1", "WEB-1"], "Reboot", True, None),
        (["web-0", "WEB-0", "web-1"], "Reboot", False, None),
        (["web-0", "WEB-0", "web-1"], "Terminate", True, None),
        (["web-0", "WEB-0", 7], "Reboot", True, None),
        (["web-0"], "Terminate", True, 0.0),
        (["web-1", "web-0"], "Terminate", True, None),
        (["web-0", {"Name": "web-1"}], "Reboot", False, None),
        ([{"Name": "web-1"}, "web-0"], "Reboot", True, None),
    ],
)
def test_an_auto_rule_waits_ten_seconds_for_each_place_in_resources(
    resources: list[Any], event_type: str, group: bool, expected: float | None
) -> None:
    given = event(Resources=resources, EventType=event_type)
    assert auto_wait_seconds(given, vm_name="web-0", group=group) == expected


CRITERIA: dict[str, st.SearchStrategy[Any]] = {
    "event_type": st.lists(st.sampled_from(["Freeze", "Reboot", "Terminate"]), min_size=1, max_size=2),
    "event_source": st.lists(st.sampled_from(["User", "Platform"]), min_size=1, max_size=1),
    "resource": st.lists(st.sampled_from(["*", "web-*", "db-0", "?eb-0"]), min_size=1, max_size=2),
    **dict.fromkeys(("max_duration_seconds", "min_duration_seconds"), st.integers(0, 30)),
    **dict.fromkeys(("min_notice_seconds", "max_notice_seconds"), st.integers(0, 1000)),
}
assert CRITERIA.keys() == RuleSettings.model_fields.keys()
RULES = (
    st.fixed_dictionaries({}, optional=CRITERIA)
    .filter(
        lambda rule: all(
            rule.get(f"min_{of}_seconds", 0) <= rule.get(f"max_{of}_seconds", 1000)
            for of in ("duration", "notice")
        )
    )
    .map(RuleSettings.model_validate)
)
POLICIES = st.builds(
    PolicySettings,
    scope=st.sampled_from(["self", "group"]),
    allow=st.lists(RULES, max_size=3).map(tuple),
    deny=st.lists(RULES, max_size=2).map(tuple),
)
ODD = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=1)
EVENTS = st.builds(
    event,
    EventType=st.sampled_from(["Freeze", "Reboot", "Terminate", "terminate", ...]) | ODD,
    EventSource=st.sampled_from(["User", "Platform", ...]) | ODD,
    Resources=st.lists(st.sampled_from(["web-0", "_web-0", "web-1", "db-0"]), max_size=3) | ODD,
    DurationInSeconds=st.integers(-1, 40) | ODD,
    NotBefore=st.sampled_from([..., "", "Mon, 11 Apr 2022 22:26:58 GMT", "2026-11-20T12:05:00Z"]) | ODD,
)


@steady
@given(EVENTS, POLICIES, st.sampled_from(["web-0", "WEB-1", "db-0"]))
def test_nothing_is_accepted_that_a_deny_rule_may_match_no_rule_allows_or_scope_and_terminate_forbid(
    given_event: ScheduledEvent, policy: PolicySettings, vm: str
) -> None:
    if decide_command(given_event, vm_name=vm, policy=policy, now=NOW).outcome == "rejected":
        return
    assert any(matches(rule, given_event, NOW) for rule in policy.allow)
    assert {matches(rule, given_event, NOW, every_resource=False) for rule in policy.deny} <= {False}
    if policy.scope == "self" or str(given_event.raw.get("EventType")).lower() == "terminate":
        assert is_among(vm, given_event.resources)


@steady
@given(EVENTS, st.booleans())
def test_without_group_only_events_of_this_vm_alone_are_approved(
    given_event: ScheduledEvent, group: bool
) -> None:
    rule = AutoSettings(group=group)
    wait_seconds = auto_wait_seconds(given_event, vm_name="web-0", group=rule.group)
    if wait_seconds is not None:
        assert is_among("web-0", given_event.resources)
        assert rule.group or {fold_name(name) for name in given_event.resources} == {"web-0"}
