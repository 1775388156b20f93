"""Rules that cannot be meant are errors, and rules that are hardly meant are warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.approvals import ApprovalSettings
from bridge.config.loader import load
from bridge.errors import ConfigError

APPROVALS = '[approvals]\nnamespace = "contoso.servicebus.windows.net"\nqueue = "approvals"\n'
SINK = '[sinks.hook]\nkind = "webhook"\nurl = "https://example.com/"\n'


def faults(folder: Path, text: str) -> list[str]:
    """Load a configuration that must fail; return its errors."""
    path = folder / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(path, {})
    return raised.value.faults


@pytest.mark.parametrize(
    ("rule", "key", "reason"),
    [
        ("event_type = []", "event_type", "given [], expected at least one value"),
        ("event_source = []", "event_source", "given [], expected at least one value"),
        ("resource = []", "resource", "given [], expected at least one value"),
        (
            "min_duration_seconds = 2\nmax_duration_seconds = 1",
            "min_duration_seconds",
            "given 2, expected at most",
        ),
        (
            "min_notice_seconds = 2.5\nmax_notice_seconds = 1",
            "min_notice_seconds",
            "given 2.5, expected at most",
        ),
        ("min_notice_seconds = nan", "min_notice_seconds", "finite"),
        ("max_notice_seconds = inf", "max_notice_seconds", "finite"),
    ],
)
@pytest.mark.parametrize("section", ["policy.allow", "policy.deny", "auto"])
def test_a_rule_that_cannot_be_meant_is_an_error(
    tmp_path: Path, section: str, rule: str, key: str, reason: str
) -> None:
    (fault,) = faults(tmp_path, f"{APPROVALS}[[approvals.{section}]]\n{rule}\n")
    assert fault.startswith(f"approvals.{section}[0]")
    assert key in fault
    assert reason in fault


@pytest.mark.parametrize(
    ("version", "rule"),
    [
        ("2019-04-01", 'event_source = ["User"]'),
        ("2019-08-01", "min_duration_seconds = 1"),
        ("2017-03-01", "max_duration_seconds = 1"),
    ],
)
@pytest.mark.parametrize("section", ["policy.allow", "policy.deny", "auto"])
def test_a_criterion_that_the_api_version_does_not_have_is_an_error(
    tmp_path: Path, section: str, version: str, rule: str
) -> None:
    text = f'[imds]\napi_version = "{version}"\n{APPROVALS}[[approvals.{section}]]\n{rule}\n'
    (fault,) = faults(tmp_path, text)
    assert fault.startswith(f"approvals.{section}[0].{rule.partition(' ')[0]}: ")
    assert f"[imds] asks for {version}" in fault


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2019-01-01", "Description"),
        ("2019-04-01", "EventSource"),
        ("2019-08-01", "DurationInSeconds"),
        ("2019-04-01", "Previous.EventSource"),
    ],
)
def test_a_property_that_the_api_version_does_not_have_is_an_error_in_where(
    tmp_path: Path, version: str, name: str
) -> None:
    text = f'[imds]\napi_version = "{version}"\n{SINK}where = {{ "{name}" = ["x"] }}\n'
    (fault,) = faults(tmp_path, text)
    assert fault.startswith(
        f"sinks.hook.where.{name}: {name.removeprefix('Previous.')} comes with api_version"
    )


@pytest.mark.parametrize("version", ["2020-07-01", "2019-08-01"])
def test_a_criterion_that_the_api_version_has_is_accepted(tmp_path: Path, version: str) -> None:
    path = tmp_path / "config.toml"
    rule = '[[approvals.policy.allow]]\nevent_source = ["User"]\nevent_type = ["Reboot"]\nmin_notice_seconds = 1\n'
    path.write_text(f'[imds]\napi_version = "{version}"\n{APPROVALS}{rule}')
    assert load(path, {}).approvals is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": {"allow": [{"event_type": ["Reboot"]}]}}, []),
        ({"auto": [{"event_source": ["User"], "group": True}]}, []),
        ({"policy": {"allow": [{}]}}, ["policy.allow[0]: the rule has no criteria"]),
        (
            {"policy": {"allow": [{"resource": ["*"]}], "deny": [{}]}},
            ["policy.deny[0]: the rule has no criteria"],
        ),
        ({"auto": [{"group": True}]}, ["auto[0]: the rule has no criteria"]),
        ({}, ["policy: no allow rule and no auto rule"]),
        ({"policy": {"deny": [{"event_type": ["Freeze"]}]}}, ["policy: no allow rule and no auto rule"]),
        ({"session": "", "policy": {"allow": [{"event_type": ["Freeze"]}]}}, ["session: without sessions"]),
        ({"session": "", "policy": {"allow": [{"event_type": ["Freeze"]}], "scope": "group"}}, []),
        (
            {"session": "", "queue": "", "topic": "t", "subscription": "s", "auto": [{"resource": ["*"]}]},
            [],
        ),
    ],
)
def test_rules_that_are_hardly_meant_are_warnings(given: dict[str, Any], expected: list[str]) -> None:
    bus = {"namespace": "contoso.servicebus.windows.net", "queue": "approvals", "session": "{vm}"}
    settings = ApprovalSettings(**{**bus, **given})
    warnings = list(settings.warnings())
    assert len(warnings) == len(expected)
    assert all(warning.startswith(start) for warning, start in zip(warnings, expected, strict=True))


# Without a bus


def test_approvals_with_an_auto_rule_need_no_bus(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[[approvals.auto]]\nevent_source = ["User"]\n')
    approvals = load(path, {}).approvals
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
def test_approvals_with_half_a_bus_or_without_auto_rules_are_an_error(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    assert faults(tmp_path, text) == expected


def test_a_name_that_no_vm_has_is_an_error(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, '[imds]\nvm_name = "web 0"\n')
    assert fault.startswith('imds.vm_name: given "web 0", expected a text that matches')


# Programs


@pytest.mark.parametrize("run", ["[]", '["drain"]', '[""]', '["/bin/a\\u0000b"]', '"/bin/drain"', "[1]"])
@pytest.mark.parametrize("section", ["[[approvals.auto]]", '[sinks.local]\nkind = "exec"'])
def test_a_program_is_a_list_that_begins_with_an_absolute_path(
    tmp_path: Path, section: str, run: str
) -> None:
    (fault,) = faults(tmp_path, f"{section}\nrun = {run}\n")
    assert ".run" in fault
    assert "expected" in fault


def test_a_rule_with_a_program_cannot_be_for_a_group(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, '[[approvals.auto]]\nrun = ["/bin/true"]\ngroup = true\n')
    assert "run: expected none with group = true" in fault


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan", "90000"])
def test_a_program_has_a_time_limit(tmp_path: Path, seconds: str) -> None:
    text = f'[[approvals.auto]]\nrun = ["/bin/true"]\nrun_timeout_seconds = {seconds}\n'
    (fault,) = faults(tmp_path, text)
    assert "run_timeout_seconds" in fault


def test_windows_has_no_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.config.sinks.sys.platform", "win32")
    (fault,) = faults(tmp_path, '[[approvals.auto]]\nrun = ["/bin/true"]\n')
    assert fault.endswith("programs are not supported on Windows")
