"""Rules, filters and programs: what cannot be meant is an error, and what is hardly meant is a warning."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bridge.approvals.policy import matches
from bridge.config.approvals import ApprovalSettings, AutoSettings, PolicySettings, RuleSettings
from bridge.contract.types import ATTRIBUTES, EVENT_TYPES, KNOWN_VALUES, PROPERTIES
from bridge.imds.document import ScheduledEvent
from bridge.sinks.exec import ExecSettings
from tests.support.settings import fault, faults, read, stdout

APPROVALS = '[approvals]\nnamespace = "contoso.servicebus.windows.net"\nqueue = "approvals"\n'
SECTIONS = ("policy.allow", "policy.deny", "auto")
RULES = {
    "event_type = []": "event_type: given [], expected at least one value",
    "event_source = []": "event_source: given [], expected at least one value",
    "resource = []": "resource: given [], expected at least one value",
    'event_type = ["Rebot"]': "; did you mean Reboot?",  # a slip must not permit, or fail to deny
    'event_source = ["Usr"]': "; did you mean User?",
    "min_duration_seconds = 2\nmax_duration_seconds = 1": "seconds: given 2, expected at most",
    "min_notice_seconds = 2.5\nmax_notice_seconds = 1": "seconds: given 2.5, expected at most",
    "min_notice_seconds = nan": "finite",
    "max_notice_seconds = inf": "finite",
}
# Criteria that come with a later api-version.
TOO_EARLY = {
    "2019-04-01": 'event_source = ["User"]',
    "2019-08-01": "min_duration_seconds = 1",
    "2017-03-01": "max_duration_seconds = 1",
}
NEVER_MATCHES: list[tuple[dict[str, Any], str]] = [
    ({"types": ["io.imdsbridge.schedulevent.*"]}, "did you mean io.imdsbridge.scheduledevent.*?"),
    ({"types": ["io.imdsbridge.bridge.heartbeet.v1"]}, "did you mean io.imdsbridge.bridge.heartbeat.v1?"),
    ({"types": ["io.imdsbridge.scheduledevent.starte?.v1"]}, "expected existing event types"),
    ({"where": {"EventTyp": "Reboot"}}, "did you mean EventType?"),
    ({"where": {"eventtype": "Reboot"}}, "did you mean EventType?"),
    ({"where": {"Vm.Nam": "web-0"}}, "did you mean Vm.Name?"),
    ({"where": {"reporterid": "x"}}, "did you mean reporter"),
    ({"where": {"Outcome": "Denied"}}, "expected one of Accepted, Rejected, Failed"),
]
UNKNOWN_THEN = {
    "Description": "2019-01-01",
    "EventSource": "2019-04-01",
    "DurationInSeconds": "2019-08-01",
    "Previous.EventSource": "2019-04-01",
}
TEMPLATE = '[sinks.a]\nkind = "webhook"\nurl = "https://x/"\nformat = "template"'
ONLY_JSON = ": expected texts, numbers, true, false, tables and lists only"
AUTO = "[[approvals.auto]]"
PROGRAMS = ["[]", '["drain"]', '[""]', '["/bin/a\\u0000b"]', '"/bin/drain"', "[1]"]
SECONDS = ["0", "-1", "inf", "nan", "90000"]
PROGRAM = Path("/bin/a.exe").absolute()  # on Windows a program needs a drive and this suffix
RUN = f"run = ['{PROGRAM}']"
TURNS = f"{AUTO}\n{RUN}\n{AUTO}\n{RUN}\nrecover = ['{PROGRAM}'"


def of_rule(section: str, rule: str, version: str = "2020-07-01") -> str:
    return f'imds.api_version = "{version}"\n{APPROVALS}[[approvals.{section}]]\n{rule}\n'


def key_of(section: str, rule: str) -> str:
    return f"approvals.{section}[0].{rule.partition(' ')[0]}"


FAULTS = [
    *((of_rule(where, rule), key_of(where, rule), why) for where in SECTIONS for rule, why in RULES.items()),
    *(
        (of_rule(where, rule, version), f"{key_of(where, rule)}: ", f"[imds] asks for {version}")
        for where in SECTIONS
        for version, rule in TOO_EARLY.items()
    ),
    *((stdout(**given), f"sinks.ops.{next(iter(given))}", hint) for given, hint in NEVER_MATCHES),
    *(
        (
            f'imds.api_version = "{version}"\n{stdout(where={name: ["x"]})}',
            f"sinks.ops.where.{name}: ",
            f": {name.removeprefix('Previous.')} comes with api_version",
        )
        for name, version in UNKNOWN_THEN.items()
    ),
    *(
        (f"{TEMPLATE}\ntemplate.a = {value}", "sinks.a.template", ONLY_JSON)
        for value in ("nan", "2026-11-20")
    ),
    *((f"{AUTO}\nrun = {run}\n", "approvals.auto[0].run", "expected") for run in PROGRAMS),
    *((f'[sinks.a]\nkind = "exec"\nrun = {run}\n', "sinks.a.run", "expected") for run in PROGRAMS),
    *(
        (f"{AUTO}\n{RUN}\nrun_timeout_seconds = {seconds}", "approvals.auto[0].run_timeout_sec", "")
        for seconds in SECONDS
    ),
    (f"{AUTO}\nrecover = ['{PROGRAM}']", "approvals.auto[0].recover: ", "expected only with run"),
    (f"{AUTO}\nleave_seconds = 20", "approvals.auto[0].leave_seconds: ", "only with [in_service]"),
    *(
        (f"[in_service]\n{AUTO}\nleave_seconds = {given}", f"approvals.auto[0].{key}", words)
        for given, key, words in (
            (f"20\n{RUN}", "leave_seconds: ", "beside run or recover"),
            (f"20\nrecover = ['{PROGRAM}']", "leave_seconds: ", "beside run or recover"),
            ("20\nrun_timeout_seconds = 20", "run_timeout_seconds: given 20, ", "more than leave_seconds"),
            ("0", "leave_seconds: ", "greater than 0"),
            ("'soon'", "leave_seconds: ", "expected a number"),
        )
    ),
    ("in_service.listen = '8084'", "in_service.listen: ", "expected an address and a port"),
    ("in_service.listen = ''", "in_service.listen: ", "expected an address and a port"),
    ("in_service.also = 'https://127.0.0.1/'", "in_service.also: ", "expected http://address"),
    ("in_service.also = 'HTTPS://127.0.0.1/'", "in_service.also: ", "expected http://address"),
    ("in_service.also = '/health'", "in_service.also: ", "expected a URL"),
    *(
        (f"{TURNS}{more}]", "approvals.auto[1].recover: ", "expected none, as the rule before it")
        for more in ("", ", '-v'")
    ),
]


@pytest.mark.parametrize(("text", "start", "words"), FAULTS)
def test_what_cannot_be_meant_is_an_error(tmp_path: Path, text: str, start: str, words: str) -> None:
    found = fault(tmp_path, text)
    assert found.startswith(start)
    assert words in found


def test_a_rule_with_turns_gives_its_program_less_time_by_default() -> None:
    given: list[dict[str, Any]] = [{}, {"max_unavailable": 1}]
    given += [{"max_unavailable": 1, "run_timeout_seconds": 400}]
    rules = [AutoSettings(run=(str(PROGRAM),), recover=(str(PROGRAM),), **one) for one in given]
    assert [rule.run_timeout_seconds for rule in rules] == [600, 300, 400]
    assert [len([*rule.warnings()]) for rule in rules] == [0, 0, 1]


@pytest.mark.parametrize(
    ("program", "is_one"),
    [
        (r"C:\Tools\drain.exe", True),
        (r"\\server\share\DRAIN.EXE", True),
        (r"C:\Tools\drain.cmd", False),
        (r"C:\Tools\drain.bat", False),
        ("drain.exe", False),
        (r"C:drain.exe", False),
        ("/bin/true", False),
    ],
)
def test_on_windows_a_program_is_the_absolute_path_of_an_exe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, is_one: bool
) -> None:
    monkeypatch.setattr("bridge.config.sinks.sys.platform", "win32")
    if is_one:
        assert ExecSettings(kind="exec", run=(program,)).run == (program,)
    else:
        assert "the absolute path of an .exe" in fault(tmp_path, f"{AUTO}\nrun = ['{program}']\n")


# Rules


@pytest.mark.parametrize("version", ["2020-07-01", "2019-08-01"])
def test_a_criterion_may_have_a_value_that_azure_may_have_added(tmp_path: Path, version: str) -> None:
    rule = 'event_source = ["User", "reboot-service"]\nevent_type = ["LiveMigrate"]\nmin_notice_seconds = 1\n'
    approvals = read(tmp_path, of_rule("policy.deny", rule, version)).approvals
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


@pytest.mark.parametrize("setting", RuleSettings.model_fields)
def test_every_setting_of_a_rule_is_a_criterion_for_the_policy_and_for_the_warning(setting: str) -> None:
    given: dict[str, Any] = {setting: ["Reboot"] if setting.startswith(("event_", "res")) else 1}
    rule = RuleSettings(**given)
    assert list(rule.criteria()) == [setting]
    unknown = ScheduledEvent(raw={"EventId": "A"})
    assert matches(rule, unknown, datetime.now(UTC)) is None
    approvals = ApprovalSettings(
        namespace="n.servicebus.windows.net",
        topic="t",
        subscription="s",
        policy=PolicySettings(allow=(rule,)),
    )
    assert list(approvals.warnings()) == []
    assert [key for key, _ in approvals.compared_properties()] == [f"policy.allow[0].{setting}"]


_NO_NAMESPACE = "approvals: give either namespace or connection_string (or connection_string_file)"
_NO_ENTITY = "approvals: give either topic or queue"


def test_approvals_with_an_auto_rule_need_no_bus_but_half_a_bus_is_an_error(tmp_path: Path) -> None:
    approvals = read(tmp_path, f'{AUTO}\nevent_source = ["User"]\n').approvals
    assert approvals is not None
    assert not approvals.has_bus
    assert faults(tmp_path, f'[approvals]\nqueue = "q"\n{AUTO}\n') == [_NO_NAMESPACE]
    for text in ("[approvals]\n", "[approvals]\nauto = []\n"):
        assert faults(tmp_path, text) == [_NO_NAMESPACE, _NO_ENTITY]


# Types and `where`


def test_every_name_of_the_contract_and_a_star_anywhere_are_accepted(tmp_path: Path) -> None:
    families = sorted({f"{event_type.rsplit('.', 2)[0]}.*" for event_type in EVENT_TYPES})
    types = [*EVENT_TYPES, *families, "*", "io.imdsbridge.*", "*.test.v1", "*scheduledevent*"]
    known: dict[str, Any] = {"AffectsThisVm": True, "Outcome": "Failed"}
    where = {name: known.get(name, "x") for name in (*ATTRIBUTES, *PROPERTIES, "Vm.Tags.team")}
    sink = read(tmp_path, stdout(types=types, where=where)).sinks["ops"]
    assert (sink.types, sink.where) == (tuple(types), where)


@pytest.mark.parametrize(
    ("name", "values", "meant"),
    [
        *((name, ["LiveMigration", *KNOWN_VALUES[name]], None) for name in KNOWN_VALUES if "Event" in name),
        ("EventType", ["Rebot"], "Reboot"),
        ("EventType", ["REBOOT"], "Reboot"),
        ("EventType", ["Redploys"], "Redeploy"),
        ("EventSource", ["Plattform"], "Platform"),
        ("EventStatus", ["Cancelled"], "Canceled"),
    ],
)
def test_a_value_that_azure_may_have_added_is_accepted_and_one_that_is_nearly_known_has_a_warning(
    tmp_path: Path, name: str, values: list[str], meant: str | None
) -> None:
    expected = [f'where.{name}: given "{values[0]}"; did you mean {meant}?'] if meant else []
    assert read(tmp_path, stdout(where={name: values})).sinks["ops"].warnings() == expected
