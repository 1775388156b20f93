"""The names and files of the contract are those of the models."""

from __future__ import annotations

from bridge.contract.schemas import NAMES, schema
from bridge.contract.types import (
    API_VERSION,
    EVENT_NAMES,
    EVENT_TYPES,
    FIRST_VERSIONS,
    KNOWN_VALUES,
    PROPERTIES,
    is_property,
)
from bridge.events.builder import END_STATUS
from bridge.lab import rendering
from tools.contract.data import DATA
from tools.contract.generate import NAMES_FILE, names, properties, schemas, text_of


def test_every_named_type_has_a_model_and_every_model_a_name() -> None:
    assert tuple(DATA) == EVENT_NAMES
    assert "io.imdsbridge.bridge.test.v1" in EVENT_TYPES


def test_the_named_properties_are_those_of_the_models() -> None:
    assert sorted(PROPERTIES) == sorted(properties())


def test_the_file_of_the_names_is_what_the_models_give() -> None:
    assert NAMES_FILE.read_text(encoding="utf-8") == text_of(names()), "python -m tools.contract.generate"


def test_the_schemas_are_those_that_the_models_give() -> None:
    generated = {name: text_of(one).encode() for name, one in schemas().items()}
    assert generated == {name: schema(name) for name in NAMES}, "python -m tools.contract.generate"


KNOWN = ["NotBeforeUtc", "Vm", "Vm.Name", "Vm.Tags.team", "Command.Id", "Backlog.audit", "Document.Events"]
UNKNOWN = ["", "vm", "Vm.name", "Name", "Vm.", "Events", "EventType.x", "Vm.Name.x", ".*"]


def test_a_property_is_known_if_a_model_has_its_name() -> None:
    assert [name for name in KNOWN + UNKNOWN if is_property(name)] == KNOWN


def test_the_lab_knows_the_same_versions_types_and_statuses() -> None:
    assert {**rendering.TYPE_SINCE, **rendering.FIELD_SINCE} == FIRST_VERSIONS
    assert {API_VERSION, *FIRST_VERSIONS.values()} <= {*rendering.EVENT_VERSIONS}
    assert KNOWN_VALUES["EventType"] == rendering.EVENT_TYPES
    assert tuple(END_STATUS.values()) == KNOWN_VALUES["EventStatus"][-len(END_STATUS) :]
