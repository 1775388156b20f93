"""Generate the JSON Schemas of `schemas/` from the models of the contract; what `imds-bridge schema` prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from bridge.contract.attributes import cloudevents
from bridge.contract.data import DATA, Part
from bridge.contract.types import TYPE_PREFIX, schema_id
from bridge.errors import UsageError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
CLOUDEVENT = "cloudevent"

Schema = dict[str, Any]


def schemas() -> dict[str, Schema]:
    """Return the schema of each type's data, by the type's name without prefix and version, and of any CloudEvent."""
    return {
        **{name: _titled(name, f"{model.__name__}V1", _data(model)) for name, model in DATA.items()},
        CLOUDEVENT: _titled(CLOUDEVENT, "ImdsBridgeEvent", _cloudevent()),
    }


def schema_text(name: str) -> str:
    """Return the text of one schema file.

    Args:
        name: `cloudevent`, or a type such as `scheduledevent.started`, with or without `io.imdsbridge.` and `.v1`.

    Raises:
        UsageError: the type does not exist.
    """
    short, known = name.removeprefix(TYPE_PREFIX).removesuffix(".v1"), schemas()
    if short not in known:
        raise UsageError(f"schema: given {name}, expected one of {', '.join(known)}")
    return _text(known[short])


def schema_files() -> dict[str, str]:
    """Return the text of each schema file, by its name."""
    return {file_name(name): _text(schema) for name, schema in schemas().items()}


def file_name(name: str) -> str:
    """Return the name of the file of a type's schema."""
    return f"{name}.v1.json"


def _text(schema: Schema) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


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


class _Generator(GenerateJsonSchema):
    """Write `type: [..., null]`, as the designers of Logic Apps need it, and neither defaults nor property titles."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {**inner, "type": [inner["type"], "null"]}

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
