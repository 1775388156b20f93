"""Write what the models of the contract say: `schemas/`, and the names that `bridge` reads.

`python -m tools.contract.generate`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from bridge.contract.schemas import CLOUDEVENT, STATUS, file_name
from bridge.contract.status import FLOWS, Status
from bridge.contract.types import KNOWN_VALUES, schema_id
from bridge.process.status import Report
from tools.contract import asyncapi
from tools.contract.attributes import cloudevents
from tools.contract.data import DATA, Part

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = _ROOT / "schemas"
NAMES_FILE = _ROOT / "bridge" / "contract" / "names.json"

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Return the schema of each type's data, by its name without prefix and version, any event, and a status."""
    return {
        **{name: _titled(name, f"{model.__name__}V1", _data(model)) for name, model in DATA.items()},
        CLOUDEVENT: _titled(CLOUDEVENT, "ImdsBridgeEvent", _cloudevent()),
        STATUS: _titled(STATUS, "ImdsBridgeStatus", _status()),
    }


def names() -> dict[str, Any]:
    """Return the names that `bridge.contract.types` reads: of events, attributes, properties and reasons."""
    attributes = dict.fromkeys(name for event in cloudevents() for name in event.model_fields)
    return {
        "events": list(DATA),
        "attributes": [name for name in attributes if name != "data"],
        "properties": list(properties()),
        "receipt_reasons": {
            outcome: _reasons(f"approval.{outcome.lower()}") for outcome in KNOWN_VALUES["Outcome"]
        },
        "loss_reasons": _reasons("bridge.loss"),
    }


def _reasons(name: str) -> list[Any]:
    return DATA[name].model_fields["Reason"].examples or []


def properties() -> tuple[str, ...]:
    """Return the names of all properties of events' data, in the form of `bridge.contract.types.PROPERTIES`."""
    return tuple(dict.fromkeys(name for model in DATA.values() for name in _properties(model)))


def text_of(content: Mapping[str, Any]) -> str:
    """Return the text of a file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _titled(name: str, title: str, body: Schema) -> Schema:
    """Complete a schema; each file has a title of its own, so that code of all of them has no name twice."""
    return {"$schema": DIALECT, "$id": schema_id(name), "title": title, **body}


def _data(model: type[Part]) -> Schema:
    """Return the schema of one type's data, without references and further titles."""
    generated = model.model_json_schema(schema_generator=_Generator)
    body: Schema = _inlined(generated, generated.pop("$defs", {}))
    body["description"] = " ".join(body["description"].split())
    return {name: value for name, value in body.items() if name != "title"}


def _cloudevent() -> Schema:
    """Return the schema of any CloudEvent: one of its definitions, of which generators of code make types.

    `definitions` instead of `$defs`, and nothing beside a reference: draft-07 knows it, too.
    """
    modes: list[tuple[type[Part], Literal["validation"]]] = [(model, "validation") for model in cloudevents()]
    references, generated = models_json_schema(
        modes, schema_generator=_Generator, ref_template="#/definitions/{model}"
    )
    return {
        "description": "Any CloudEvent that imds-bridge sends; `type` says which.",
        "oneOf": [references[mode] for mode in modes],
        "definitions": _bare(generated["$defs"]),
    }


def _status() -> Schema:
    """Return the schema of a report, beside whose fields those of a status stand, and those of each role."""
    parts: list[Schema] = []
    for part in (Report, Status, *FLOWS.values()):
        generated = TypeAdapter(part).json_schema(schema_generator=_Generator)
        parts.append(_inlined(generated, generated.pop("$defs", {})))
    names = {name for part in parts[:2] for name in part["required"]} - {"status", "flow"}
    described = {name: one for part in parts for name, one in part["properties"].items()}
    return {
        "description": "What `imds-bridge status --json` prints. A property that is missing is not known.",
        "type": "object",
        "properties": {name: one for name, one in described.items() if name not in ("status", "flow")},
        "required": sorted(names),
    }


class _Generator(GenerateJsonSchema):
    """Write `type: [..., null]`, as the designers of Logic Apps need it, and neither defaults nor property titles."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return (
            {**inner, "type": [inner["type"], "null"]} if "type" in inner else super().nullable_schema(schema)
        )

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - the base's signature
        return False


def _inlined(part: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by what they refer to: not every tool follows them."""
    if isinstance(part, list):
        return [_inlined(one, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    whole = dict(part)
    if reference := whole.pop("$ref", None):
        whole = {**definitions[reference.rpartition("/")[2]], **whole}
        del whole["title"]
    return {name: _inlined(value, definitions) for name, value in whole.items()}


def _bare(part: Any) -> Any:
    """Leave out what stands beside references."""
    if isinstance(part, list):
        return [_bare(one) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return {"$ref": part["$ref"]}
    return {name: _bare(value) for name, value in part.items()}


def _properties(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        yield from (f"{name}.{inner}" for inner in _inner_names(field.annotation))


def _inner_names(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _properties(annotation)
    elif get_origin(annotation) is dict:
        yield "*"
    elif get_origin(annotation) is not list:  # `where` does not look into lists of objects
        for choice in get_args(annotation):
            yield from _inner_names(choice)


if __name__ == "__main__":
    for schema_name, schema in schemas().items():
        (SCHEMAS / file_name(schema_name)).write_text(text_of(schema), encoding="utf-8", newline="\n")
    NAMES_FILE.write_text(text_of(names()), encoding="utf-8", newline="\n")
    (SCHEMAS / "asyncapi.yaml").write_text(asyncapi.text(), encoding="utf-8", newline="\n")
