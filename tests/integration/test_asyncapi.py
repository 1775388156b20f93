"""schemas/asyncapi.yaml is a valid AsyncAPI document and has the types that are published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft7Validator

from bridge.approvals.command import COMMAND_APPROVE
from bridge.contract.schemas import file_name
from bridge.contract.types import EVENT_NAMES, type_of
from tests.support.npm import node_modules, run_script
from tests.support.only import only
from tests.support.paths import DATA
from tests.support.schemas import EXAMPLES, SCHEMAS
from tools.contract import asyncapi

pytestmark = pytest.mark.timeout(600)  # npm installs the parser

DOCUMENT = SCHEMAS / "asyncapi.yaml"
SCRIPT = DATA / "asyncapi" / "read_asyncapi.js"
WARNING = 1  # severities: 0 is an error, 2 and 3 are advice

PLAIN = f"{type_of(COMMAND_APPROVE)} (data alone)"
EVENTS = {type_of(name) for name in EVENT_NAMES if name != COMMAND_APPROVE}


def test_the_file_is_what_the_types_and_the_part_written_by_hand_give() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == asyncapi.text(), "python -m tools.contract.generate"


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    return dict(run_script(SCRIPT, str(DOCUMENT), modules=node_modules("@asyncapi/parser")))


@pytest.fixture(scope="module")
def document(parsed: dict[str, Any]) -> dict[str, Any]:
    assert parsed["document"], parsed["diagnostics"]
    return dict(_without_marks(parsed["document"]))


def _without_marks(value: Any) -> Any:
    """Leave out what the parser adds."""
    if isinstance(value, dict):
        return {name: _without_marks(one) for name, one in value.items() if not name.startswith("x-parser-")}
    return [_without_marks(one) for one in value] if isinstance(value, list) else value


def descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (one for name, one in value.items() if name == "description" and isinstance(one, str))
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from descriptions(one)


def names_in(messages: dict[str, Any]) -> set[str]:
    return {message["name"] for message in messages.values()}


def test_the_parser_of_asyncapi_finds_no_fault_and_no_description_is_cut_off(
    parsed: dict[str, Any], document: dict[str, Any]
) -> None:
    assert [fault for fault in parsed["diagnostics"] if fault["severity"] <= WARNING] == []
    assert [text for text in descriptions(document) if not text.strip().endswith(".")] == []


def test_every_type_has_a_message_that_every_transport_carries(document: dict[str, Any]) -> None:
    assert names_in(document["components"]["messages"]) == {*EVENTS, type_of(COMMAND_APPROVE), PLAIN}
    carried = {name: names_in(channel["messages"]) for name, channel in document["channels"].items()}
    commands = {type_of(COMMAND_APPROVE), PLAIN}
    assert carried == {"topic": EVENTS, "grid": EVENTS, "webhook": EVENTS, "approvals": commands}
    assert {operation["action"] for operation in document["operations"].values()} == {"send", "receive"}
    used = [operation["channel"] for operation in document["operations"].values()]
    assert [
        channel for channel in document["channels"].values() if channel not in used or not channel["servers"]
    ] == []


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_a_message_is_the_cloudevent_of_its_type(document: dict[str, Any], name: str) -> None:
    messages = document["components"]["messages"].values()
    message = only(one for one in messages if one["name"] == type_of(name))
    assert message["payload"]["properties"]["type"]["const"] == type_of(name)
    example = json.loads((EXAMPLES / file_name(name)).read_text())
    # AsyncAPI's own schemas are draft-07: ours must mean the same there.
    validator = Draft7Validator(message["payload"], format_checker=Draft7Validator.FORMAT_CHECKER)
    assert list(validator.iter_errors(example)) == []
    assert not validator.is_valid({**example, "data": {}})
    assert not validator.is_valid({**example, "type": "io.imdsbridge.other.v1"})
