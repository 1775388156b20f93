"""The policy: deny wins, what is not allowed is denied, and a Terminate is approved only by the VM it names."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.approvals.command import Command
from bridge.approvals.policy import Decision, auto_wait_seconds, judge, judge_event, matches, names_other_vm
from bridge.config.approvals import AutoSettings, PolicySettings, RuleSettings
from bridge.imds.document import ScheduledEvent, is_among, read_document
from bridge.runtime.time import iso_utc
from tests.support.diff import steady

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
NOTICE_SECONDS = 900


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
    return judge(
        document.events.get("a"),
        vm_name=vm,
        policy=PolicySettings(**(policy or {"allow": [{}]})),
        now=NOW,
    )


def test_an_event_that_a_rule_allows_is_accepted() -> None:
    assert (decide().outcome, decide().reason) == ("accepted", "approved")


def test_without_rules_nothing_is_allowed() -> None:
    assert decide({"scope": "self"}).reason == "denied"


def test_deny_wins_over_allow() -> None:
    assert decide({"allow": [{}], "deny": [{"event_type": ["reboot"]}]}).reason == "denied"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"EventId": "B"}, "unknown_event"),
        ({"EventStatus": "Started"}, "already_started"),
        ({"EventStatus": "Paused"}, "denied"),
        ({"EventStatus": ...}, "denied"),
        ({"Resources": ["web-1"]}, "other_vm"),
        ({"Resources": []}, "other_vm"),
        ({"Resources": ...}, "other_vm"),
    ],
)
def test_each_reason_to_reject(changes: dict[str, Any], reason: str) -> None:
    decision = decide(**changes)
    assert (decision.outcome, decision.reason) == ("rejected", reason)


def test_vm_names_are_compared_without_letter_case_and_without_the_leading_underscore() -> None:
    assert decide(Resources=["_WEB-0"]).outcome == "accepted"
    command = Command(id="c", key="k", event_ids=("a",), vm="Web-0")
    assert not names_other_vm(command, "_WEB-0")
    assert names_other_vm(command, "web-1")


def test_scope_group_approves_events_of_other_vms() -> None:
    assert decide({"scope": "group", "allow": [{}]}, Resources=["web-1"]).outcome == "accepted"


def test_a_terminate_is_approved_only_by_the_vm_that_it_names() -> None:
    policy = {"scope": "group", "allow": [{}]}
    assert decide(policy, EventType="TERMINATE", Resources=["web-1"]).reason == "other_vm"
    assert decide(policy, EventType="Terminate", Resources=["web-1", "web-0"]).outcome == "accepted"


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


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ({"min_duration_seconds": 60}, {"DurationInSeconds": -1}),
        ({"min_duration_seconds": 60}, {"DurationInSeconds": ...}),
        ({"event_source": ["Platform"]}, {"EventSource": ...}),
        ({"event_type": ["Redeploy"]}, {"EventType": ...}),
        ({"max_notice_seconds": 60}, {"NotBefore": ""}),
        ({"resource": ["db-*"]}, {"Resources": []}),
        ({"resource": ["db-*"]}, {"Resources": None}),
        ({"resource": ["db-*"]}, {"Resources": ["web-0", {"Name": "db-1"}]}),
    ],
)
def test_an_event_without_the_value_that_a_deny_rule_compares_is_denied(
    rule: dict[str, Any], changes: dict[str, Any]
) -> None:
    policy = {"scope": "group", "allow": [{}]}
    own = {"EventType": "Reboot", "Resources": ["web-0"]}
    assert decide(policy, **{**own, **changes}).outcome == "accepted"
    denied = decide({**policy, "deny": [rule]}, **{**own, **changes})
    assert (denied.reason, denied.detail) == ("denied", "a deny rule may match: the event lacks a value")


@pytest.mark.parametrize("event_type", [..., "", None, 7])
def test_an_event_that_may_be_a_deletion_is_approved_only_by_the_vm_that_it_names(event_type: Any) -> None:
    policy = {"scope": "group", "allow": [{}]}
    assert decide(policy, EventType=event_type, Resources=["web-1"]).reason == "other_vm"
    assert decide(policy, EventType=event_type).outcome == "accepted"


@pytest.mark.parametrize("unreadable", [[], [7], [None]])
def test_one_resource_is_enough_to_deny(unreadable: list[Any]) -> None:
    policy = {"allow": [{}], "deny": [{"resource": ["db-*"]}]}
    decision = decide(policy, Resources=["web-0", "db-0", *unreadable])
    assert (decision.reason, decision.detail) == ("denied", "a deny rule matches")


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


def _is_valid(given: dict[str, Any]) -> bool:
    pairs = (("min_duration_seconds", "max_duration_seconds"), ("min_notice_seconds", "max_notice_seconds"))
    return all(given[low] <= given[high] for low, high in pairs if low in given and high in given)


RULES = (
    st.fixed_dictionaries(
        {},
        optional={
            "event_type": st.lists(
                st.sampled_from(["Freeze", "Reboot", "Terminate"]), min_size=1, max_size=2
            ),
            "event_source": st.lists(st.sampled_from(["User", "Platform"]), min_size=1, max_size=1),
            "resource": st.lists(st.sampled_from(["*", "web-*", "db-0", "?eb-0"]), min_size=1, max_size=2),
            "max_duration_seconds": st.integers(0, 30),
            "min_duration_seconds": st.integers(0, 30),
            "min_notice_seconds": st.integers(0, 1000),
            "max_notice_seconds": st.integers(0, 1000),
        },
    )
    .filter(_is_valid)
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
@given(EVENTS, POLICIES)
def test_whatever_a_deny_rule_matches_or_may_match_is_never_accepted(
    given_event: ScheduledEvent, policy: PolicySettings
) -> None:
    decision = judge_event(given_event, vm_name="web-0", policy=policy, now=NOW)
    if any(matches(rule, given_event, NOW, every_resource=False) is not False for rule in policy.deny):
        assert decision.outcome == "rejected"


@steady
@given(EVENTS, POLICIES)
def test_nothing_is_accepted_that_no_rule_allows(given_event: ScheduledEvent, policy: PolicySettings) -> None:
    decision = judge_event(given_event, vm_name="web-0", policy=policy, now=NOW)
    if decision.outcome == "accepted":
        assert any(matches(rule, given_event, NOW) for rule in policy.allow)


@steady
@given(EVENTS, POLICIES, st.sampled_from(["web-0", "WEB-1", "db-0"]))
def test_no_vm_accepts_the_terminate_of_others_or_leaves_its_scope(
    given_event: ScheduledEvent, policy: PolicySettings, vm: str
) -> None:
    decision = judge_event(given_event, vm_name=vm, policy=policy, now=NOW)
    must_be_named = policy.scope == "self" or str(given_event.raw.get("EventType")).lower() == "terminate"
    if decision.outcome == "accepted" and must_be_named:
        assert is_among(vm, given_event.resources)


@steady
@given(EVENTS, RULES, POLICIES)
def test_a_further_deny_rule_never_makes_anything_accepted(
    given_event: ScheduledEvent, rule: RuleSettings, policy: PolicySettings
) -> None:
    stricter = policy.model_copy(update={"deny": (*policy.deny, rule)})
    before, after = (
        judge_event(given_event, vm_name="web-0", policy=one, now=NOW) for one in (policy, stricter)
    )
    assert before.outcome == "accepted" or after.outcome == "rejected"


@steady
@given(EVENTS, st.booleans())
def test_without_group_an_auto_rule_approves_only_events_of_this_vm_alone(
    given_event: ScheduledEvent, group: bool
) -> None:
    rule = AutoSettings(group=group)
    wait_seconds = auto_wait_seconds(given_event, vm_name="web-0", group=rule.group)
    if wait_seconds is not None:
        assert is_among("web-0", given_event.resources)
        assert rule.group or len(given_event.resources) == 1
