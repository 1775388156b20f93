"""The names that the contract gives: event types, attributes and properties."""

from __future__ import annotations

import pytest

from bridge.contract.data import DATA
from bridge.contract.properties import is_property, property_names
from bridge.contract.types import EVENT_NAMES, EVENT_TYPES


def test_every_named_type_has_a_model_and_every_model_a_name() -> None:
    assert tuple(DATA) == EVENT_NAMES
    assert "io.imdsbridge.bridge.test.v1" in EVENT_TYPES


def test_every_property_of_every_model_is_named() -> None:
    assert {name for model in DATA.values() for name in model.model_fields} <= set(property_names())


@pytest.mark.parametrize(
    "name",
    ["NotBeforeUtc", "Vm", "Vm.Name", "Vm.Tags.team", "Command.Id", "Backlog.audit", "Document.Events"],
)
def test_a_property_of_the_contract_is_known(name: str) -> None:
    assert is_property(name)


@pytest.mark.parametrize(
    "name", ["", "vm", "Vm.name", "Name", "Vm.", "Events", "EventType.x", "Vm.Name.x", ".*"]
)
def test_a_name_that_no_model_has_is_not_known(name: str) -> None:
    assert not is_property(name)
