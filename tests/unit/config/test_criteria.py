"""Types, `where`, policies and templates: which names and values they may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.config.sinks import WebhookSettings
from bridge.contract.types import ATTRIBUTES, EVENT_TYPES, KNOWN_VALUES, PROPERTIES
from tests.support.settings import faults, read, stdout


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


@pytest.mark.parametrize("event_type", EVENT_TYPES)
def test_every_type_of_the_contract_is_accepted_in_types(file: Path, event_type: str) -> None:
    family = f"{event_type.rsplit('.', 2)[0]}.*"
    sink = read(file, stdout(types=[event_type, family])).sinks["ops"]
    assert sink.types == (event_type, family)


@pytest.mark.parametrize("pattern", ["*", "io.imdsbridge.*", "*.test.v1", "*scheduledevent*"])
def test_a_pattern_of_types_may_have_a_star_anywhere(file: Path, pattern: str) -> None:
    assert read(file, stdout(types=[pattern])).sinks["ops"].types == (pattern,)


@pytest.mark.parametrize("name", [*ATTRIBUTES, *PROPERTIES])
def test_every_attribute_and_property_of_the_contract_is_accepted_in_where(file: Path, name: str) -> None:
    wanted: Any = {"AffectsThisVm": True, "Outcome": "Failed"}.get(name, "x")
    assert read(file, stdout(where={name: wanted})).sinks["ops"].where == {name: wanted}


def test_a_tag_of_the_vm_is_accepted_in_where(file: Path) -> None:
    assert read(file, stdout(where={"Vm.Tags.team": "shop"})).sinks["ops"].where == {"Vm.Tags.team": "shop"}


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"types": ["io.imdsbridge.schedulevent.*"]}, "did you mean io.imdsbridge.scheduledevent.*?"),
        ({"types": ["io.imdsbridge.bridge.heartbeet.v1"]}, "did you mean io.imdsbridge.bridge.heartbeat.v1?"),
        ({"types": ["io.imdsbridge.scheduledevent.starte?.v1"]}, "expected existing event types"),
        ({"where": {"EventTyp": "Reboot"}}, "did you mean EventType?"),
        ({"where": {"eventtype": "Reboot"}}, "did you mean EventType?"),
        ({"where": {"Vm.Nam": "web-0"}}, "did you mean Vm.Name?"),
        ({"where": {"reporterid": "x"}}, "did you mean reporter"),
        ({"where": {"Outcome": "Denied"}}, "expected one of Accepted, Rejected, Failed"),
    ],
)
def test_a_filter_that_can_never_match_is_an_error_with_the_nearest_name(
    settings: dict[str, Any], hint: str, file: Path
) -> None:
    (found,) = faults(file, stdout(**settings))
    assert hint in found


@pytest.mark.parametrize("name", ["EventType", "EventSource", "EventStatus"])
def test_a_value_that_azure_may_have_added_is_accepted_without_a_warning(file: Path, name: str) -> None:
    sink = read(file, stdout(where={name: ["LiveMigration", *KNOWN_VALUES[name]]})).sinks["ops"]
    assert sink.warnings() == []


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("EventType", "Rebot", "Reboot"),
        ("EventType", "reboot", "Reboot"),
        ("EventType", "REBOOT", "Reboot"),
        ("EventType", "Redploys", "Redeploy"),
        ("EventSource", "Plattform", "Platform"),
        ("EventStatus", "Cancelled", "Canceled"),
    ],
)
def test_a_value_that_is_nearly_a_known_one_is_accepted_with_a_warning(
    file: Path, name: str, value: str, meant: str
) -> None:
    sink = read(file, stdout(where={name: [value]})).sinks["ops"]
    assert sink.warnings() == [f'where.{name}: given "{value}", did you mean {meant}?']


@pytest.mark.parametrize(
    ("rule", "meant"),
    [('event_type = ["Rebot"]', "Reboot"), ('event_source = ["Usr"]', "User")],
)
def test_a_slip_in_a_policy_is_an_error_and_permits_nothing(rule: str, meant: str, file: Path) -> None:
    (found,) = faults(file, approvals(rule))
    assert found.endswith(f"; did you mean {meant}?")


def test_a_policy_may_name_a_value_that_azure_may_have_added(file: Path) -> None:
    config = read(file, approvals('event_type = ["LiveMigrate"], event_source = ["reboot-service"]'))
    assert config.approvals is not None
    assert config.approvals.policy.deny[0].event_type == ("LiveMigrate",)


def approvals(rule: str) -> str:
    return (
        '[approvals]\nconnection_string = "Endpoint=sb://a.example/;SharedAccessKeyName=a;SharedAccessKey=b"\n'
        f'queue = "a"\n[approvals.policy]\ndeny = [{{ {rule} }}]\n'
    )


@pytest.mark.parametrize("value", ["nan", "2026-11-20"])
def test_a_template_holds_only_json_values(file: Path, value: str) -> None:
    text = (
        f'[sinks.a]\nkind = "webhook"\nurl = "https://x/"\nformat = "template"\ntemplate = {{ a = {value} }}'
    )
    assert faults(file, text) == [
        "sinks.a.template: expected texts, numbers, true, false, tables and lists only"
    ]


@pytest.mark.parametrize("name", ["signing_secret", "signing_secrets", "SIGNING_SECRET"])
@pytest.mark.parametrize("written", ["signing_secret", "signing_secrets", "signing_secret_file"])
def test_the_signing_secret_of_the_environment_replaces_the_files_however_it_is_spelled(
    file: Path, name: str, written: str
) -> None:
    old, new = "whsec_" + "QUJD" * 8, "whsec_" + "REVG" * 8
    file.write_text(f'[sinks.a]\nkind = "webhook"\nurl = "https://x/"\n{written} = "{old}"')
    sink = load(file, {f"IMDS_BRIDGE__SINKS__A__{name.upper()}": new}).sinks["a"]
    assert isinstance(sink, WebhookSettings)
    assert sink.signing_secrets is not None
    assert sink.signing_secrets.read() == new
