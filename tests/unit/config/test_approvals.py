"""Rules that cannot be meant are errors, and rules that are hardly meant are warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.approvals import ApprovalSettings
from tests.support.settings import faults, read

APPROVALS = '[approvals]\nnamespace = "contoso.servicebus.windows.net"\nqueue = "approvals"\n'


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("event_type = []", "event_type: given [], expected at least one value"),
        ("event_source = []", "event_source: given [], expected at least one value"),
        ("resource = []", "resource: given [], expected at least one value"),
        ('event_type = ["Rebot"]', "; did you mean Reboot?"),  # a slip must not permit, or fail to deny
        ('event_source = ["Usr"]', "; did you mean User?"),
        ("min_duration_seconds = 2\nmax_duration_seconds = 1", "seconds: given 2, expected at most"),
        ("min_notice_seconds = 2.5\nmax_notice_seconds = 1", "seconds: given 2.5, expected at most"),
        ("min_notice_seconds = nan", "finite"),
        ("max_notice_seconds = inf", "finite"),
    ],
)
@pytest.mark.parametrize("section", ["policy.allow", "policy.deny", "auto"])
def test_what_cannot_be_meant_is_an_error(tmp_path: Path, section: str, rule: str, expected: str) -> None:
    (fault,) = faults(tmp_path, f"{APPROVALS}[[approvals.{section}]]\n{rule}\n")
    assert fault.startswith(f"approvals.{section}[0].{rule.partition(' ')[0]}")
    assert expected in fault


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("2019-04-01", 'event_source = ["User"]'),
        ("2019-08-01", "min_duration_seconds = 1"),
        ("2017-03-01", "max_duration_seconds = 1"),
    ],
)
@pytest.mark.parametrize("section", ["policy.allow", "policy.deny", "auto"])
def test_criteria_are_those_of_the_api_version(tmp_path: Path, section: str, version: str, rule: str) -> None:
    text = f'[imds]\napi_version = "{version}"\n{APPROVALS}[[approvals.{section}]]\n{rule}\n'
    (fault,) = faults(tmp_path, text)
    assert fault.startswith(f"approvals.{section}[0].{rule.partition(' ')[0]}: ")
    assert f"[imds] asks for {version}" in fault


@pytest.mark.parametrize("version", ["2020-07-01", "2019-08-01"])
def test_a_criterion_may_have_a_value_that_azure_may_have_added(tmp_path: Path, version: str) -> None:
    rule = 'event_source = ["User", "reboot-service"]\nevent_type = ["LiveMigrate"]\nmin_notice_seconds = 1\n'
    text = f'[imds]\napi_version = "{version}"\n{APPROVALS}[[approvals.policy.deny]]\n{rule}'
    approvals = read(tmp_path, text).approvals
    assert approvals is not None
    assert approvals.policy.deny[0].event_type == ("LiveMigrate",)


NO_CRITERIA = "the rule has no criteria"
NOTHING = "policy: no allow rule and no auto rule"
FREEZE = {"event_type": ["Freeze"]}
TOPIC = {"session": "", "queue": "", "topic": "t", "subscription": "s"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": {"allow": [{"event_type": ["Reboot"]}]}}, []),
        ({"auto": [{"event_source": ["User"], "group": True}]}, []),
        ({"policy": {"allow": [{}]}}, [f"policy.allow[0]: {NO_CRITERIA}"]),
        ({"policy": {"allow": [{"resource": ["*"]}], "deny": [{}]}}, [f"policy.deny[0]: {NO_CRITERIA}"]),
        ({"auto": [{"group": True}]}, [f"auto[0]: {NO_CRITERIA}"]),
        ({}, [NOTHING]),
        ({"policy": {"deny": [FREEZE]}}, [NOTHING]),
        ({"session": "", "policy": {"allow": [FREEZE]}}, ["session: without sessions"]),
        ({"session": "", "policy": {"allow": [FREEZE], "scope": "group"}}, []),
        ({**TOPIC, "auto": [{"resource": ["*"]}]}, []),
    ],
)
def test_rules_that_are_hardly_meant_are_warnings(given: dict[str, Any], expected: list[str]) -> None:
    bus = {"namespace": "contoso.servicebus.windows.net", "queue": "approvals", "session": "{vm}"}
    warnings = list(ApprovalSettings(**{**bus, **given}).warnings())
    assert len(warnings) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(warnings, expected, strict=True))


# Without a bus


def test_approvals_with_an_auto_rule_need_no_bus(tmp_path: Path) -> None:
    approvals = read(tmp_path, '[[approvals.auto]]\nevent_source = ["User"]\n').approvals
    assert approvals is not None
    assert not approvals.has_bus


_NO_NAMESPACE = "approvals: give either namespace or connection_string (or connection_string_file)"
_NO_ENTITY = "approvals: give either topic or queue"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[approvals]\n", [_NO_NAMESPACE, _NO_ENTITY]),
        ('[approvals]\nqueue = "q"\n[[approvals.auto]]\n', [_NO_NAMESPACE]),
        ("[approvals]\nauto = []\n", [_NO_NAMESPACE, _NO_ENTITY]),
    ],
)
def test_half_a_bus_is_an_error_and_so_are_no_auto_rules(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    assert faults(tmp_path, text) == expected


# Programs


@pytest.mark.parametrize("run", ["[]", '["drain"]', '[""]', '["/bin/a\\u0000b"]', '"/bin/drain"', "[1]"])
@pytest.mark.parametrize("section", ["[[approvals.auto]]", '[sinks.local]\nkind = "exec"'])
def test_a_program_is_a_list_and_begins_with_an_absolute_path(tmp_path: Path, section: str, run: str) -> None:
    (fault,) = faults(tmp_path, f"{section}\nrun = {run}\n")
    assert ".run" in fault
    assert "expected" in fault


LIMITS = [f"run_timeout_seconds = {seconds}" for seconds in ("0", "-1", "inf", "nan", "90000")]


@pytest.mark.parametrize("rest", ["group = true", *LIMITS])
def test_a_program_is_not_for_a_group_and_has_a_time_limit(tmp_path: Path, rest: str) -> None:
    (fault,) = faults(tmp_path, f'[[approvals.auto]]\nrun = ["/bin/true"]\n{rest}\n')
    assert ("run: expected none with group = true" if rest == "group = true" else "run_timeout_sec") in fault


def test_windows_has_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.config.sinks.sys.platform", "win32")
    (fault,) = faults(tmp_path, '[[approvals.auto]]\nrun = ["/bin/true"]\n')
    assert fault.endswith("programs are not supported on Windows")
