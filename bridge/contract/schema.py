"""Generate the JSON Schemas of `schemas/` from the models of the contract; what `imds-bridge schema` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from bridge.contract.data import DATA, Part
from bridge.contract.types import TYPE_PREFIX, type_of
from bridge.errors import UsageError

DIALECT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Return the schema of each type's data, by the type's name without prefix and version."""
    return {name: _schema(name, model) for name, model in DATA.items()}


def schema_text(name: str) -> str:
    """Return the text of one schema file.

    Args:
        name: a type such as `scheduledevent.started`, with or without `io.imdsbridge.` and `.v1`.

    Raises:
        UsageError: the type does not exist.
    """
    short = name.removeprefix(TYPE_PREFIX).removesuffix(".v1")
    if short not in DATA:
        raise UsageError(f"schema: given {name}, expected one of {', '.join(DATA)}")
    return _text(_schema(short, DATA[short]))


def schema_files() -> dict[str, str]:
    """Return the text of each schema file, by its name."""
    return {file_name(name): _text(schema) for name, schema in schemas().items()}


def file_name(name: str) -> str:
    """Return the name of the file of a type's schema."""
    return f"{name}.v1.json"


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _schema(name: str, model: type[Part]) -> Schema:
    generated = model.model_json_schema(schema_generator=_Generator)
    body = _inlined(generated, generated.pop("$defs", {}))
    return {
        "$schema": DIALECT,
        "$id": f"urn:imds-bridge:schema:{name}:1",
        **body,
        "title": f"Data of {type_of(name)}",
        "description": " ".join(body["description"].split()),
    }


class _Generator(GenerateJsonSchema):
    """Write `type: [..., null]` and no defaults, which the designers of Logic Apps can read."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {**inner, "type": [inner["type"], "null"]}

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _inlined(part: Any, definitions: Mapping[str, Any]) -> Any:
    """Replace references by what they refer to: not every tool follows them."""
    if isinstance(part, list):
        return [_inlined(one, definitions) for one in part]
    if not isinstance(part, dict):
        return part
    whole = dict(part)
    if reference := whole.pop("$ref", None):
        whole = {**definitions[reference.rpartition("/")[2]], **whole}
    return {name: _inlined(value, definitions) for name, value in whole.items()}
