"""What consumers do with the schemas in Node: generate TypeScript and C#, and validate events."""

from __future__ import annotations

import shutil
from collections import Counter
from typing import Any

import pytest

from bridge.contract.types import EVENT_NAMES
from tests.support.npm import node_modules, run_script
from tests.support.paths import DATA
from tests.support.schemas import BY_NAME, EXAMPLES, SCHEMAS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]  # npm installs the generators

PACKAGES = (
    *("ajv@8.20.0", "ajv-formats@3.0.1"),
    *("json-schema-to-typescript@15.0.4", "quicktype-core@26.0.0", "typescript@5.9.3"),
)
SOURCES = DATA / "codegen"
DATA_NAMES = {BY_NAME[name]["title"].removesuffix("V1") for name in EVENT_NAMES}
EVENTS = {name.removesuffix("Data") for name in DATA_NAMES}
PARTS = {"CommandData", "ReceivedDocument", "StartRequest", "VmData"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("types")
    shutil.copy(SOURCES / "consumer.ts", folder)
    constants = (
        f"export const example{number}: ImdsBridgeEvent = {path.read_text()};"
        for number, path in enumerate(sorted(EXAMPLES.iterdir()))
    )
    text = "\n".join(['import type { ImdsBridgeEvent } from "./events";', *constants])
    (folder / "examples.ts").write_text(text)
    schemas = map(str, sorted(SCHEMAS.glob("*.json")))
    return dict(
        run_script(
            SOURCES / "generate.js", str(folder), str(EXAMPLES), *schemas, modules=node_modules(*PACKAGES)
        )
    )


def test_typescript_of_all_schemas_is_one_strict_module_and_every_example_has_its_type(
    generated: dict[str, Any],
) -> None:
    assert generated["typescript"]["faults"] == []


def test_the_types_of_typescript_are_named_after_the_types_of_events(generated: dict[str, Any]) -> None:
    files = {f"{name}V1" for name in DATA_NAMES}
    wanted = Counter([*EVENTS, *DATA_NAMES, *PARTS, *files, "ImdsBridgeEvent", "ImdsBridgeStatus"])
    assert Counter(generated["typescript"]["names"]) == wanted
    assert {
        "EventScheduled",
        "DocumentChanged",
        "ImdsRecovered",
        "ApprovalAccepted",
        "CommandApprove",
    } < EVENTS


def test_the_classes_of_csharp_have_the_same_names(generated: dict[str, Any]) -> None:
    assert {*generated["csharp"]} == EVENTS | DATA_NAMES | PARTS


def test_a_strict_validator_accepts_the_schemas_and_every_example(generated: dict[str, Any]) -> None:
    assert generated["invalid"] == []
