"""Types and `where`: which names and values they may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.contract.types import ATTRIBUTES, EVENT_TYPES, KNOWN_VALUES, PROPERTIES
from tests.support.settings import faults, read, stdout

FAMILIES = {f"{event_type.rsplit('.', 2)[0]}.*" for event_type in EVENT_TYPES}
ANYWHERE = ["*", "io.imdsbridge.*", "*.test.v1", "*scheduledevent*"]


def test_every_type_of_the_contract_and_a_star_anywhere_are_accepted_in_types(tmp_path: Path) -> None:
    types = [*EVENT_TYPES, *sorted(FAMILIES), *ANYWHERE]
    assert read(tmp_path, stdout(types=types)).sinks["ops"].types == tuple(types)


def test_every_attribute_and_property_of_the_contract_and_a_tag_are_accepted_in_where(tmp_path: Path) -> None:
    known: dict[str, Any] = {"AffectsThisVm": True, "Outcome": "Failed"}
    where = {name: known.get(name, "x") for name in (*ATTRIBUTES, *PROPERTIES, "Vm.Tags.team")}
    assert read(tmp_path, stdout(where=where)).sinks["ops"].where == where


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
def test_a_filter_that_never_matches_is_an_error(settings: dict[str, Any], hint: str, tmp_path: Path) -> None:
    (found,) = faults(tmp_path, stdout(**settings))
    assert hint in found


@pytest.mark.parametrize("name", ["EventType", "EventSource", "EventStatus"])
def test_a_value_that_azure_may_have_added_is_accepted_without_a_warning(tmp_path: Path, name: str) -> None:
    sink = read(tmp_path, stdout(where={name: ["LiveMigration", *KNOWN_VALUES[name]]})).sinks["ops"]
    assert sink.warnings() == []


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("EventType", "Rebot", "Reboot"),
        ("EventType", "REBOOT", "Reboot"),
        ("EventType", "Redploys", "Redeploy"),
        ("EventSource", "Plattform", "Platform"),
        ("EventStatus", "Cancelled", "Canceled"),
    ],
)
def test_a_value_that_is_nearly_known_has_a_warning(
    tmp_path: Path, name: str, value: str, meant: str
) -> None:
    sink = read(tmp_path, stdout(where={name: [value]})).sinks["ops"]
    assert sink.warnings() == [f'where.{name}: given "{value}", did you mean {meant}?']


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2019-01-01", "Description"),
        ("2019-04-01", "EventSource"),
        ("2019-08-01", "DurationInSeconds"),
        ("2019-04-01", "Previous.EventSource"),
    ],
)
def test_where_has_only_properties_of_the_api_version(tmp_path: Path, version: str, name: str) -> None:
    (fault,) = faults(tmp_path, f'imds.api_version = "{version}"\n{stdout(where={name: ["x"]})}')
    own = name.removeprefix("Previous.")
    assert fault.startswith(f"sinks.ops.where.{name}: {own} comes with api_version")


@pytest.mark.parametrize("value", ["nan", "2026-11-20"])
def test_a_template_holds_only_json_values(tmp_path: Path, value: str) -> None:
    sink = '[sinks.a]\nkind = "webhook"\nurl = "https://x/"\nformat = "template"'
    assert faults(tmp_path, f"{sink}\ntemplate = {{ a = {value} }}") == [
        "sinks.a.template: expected texts, numbers, true, false, tables and lists only"
    ]
