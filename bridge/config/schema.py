"""Generate the JSON Schema of the configuration from its settings; what `imds-bridge config schema` prints."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from bridge.config.base import Secret
from bridge.config.models import Config
from bridge.config.registry import sink_settings
from bridge.config.tables import RECEIVERS, sink_tables, tables

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string"}
_HEADERS = {"type": "object", "additionalProperties": _TEXT}
_SIGNING_SECRETS = "signing_secrets"


def config_schema() -> dict[str, Any]:
    """Return the schema of the whole configuration."""
    sinks = [table for table in sink_tables() if table.settings is not sink_settings("webhook")]
    sections = [table for table in tables() if table.name in RECEIVERS]
    models: list[type[BaseModel]] = [Config, *(table.settings for table in (*sections, *sinks))]
    refs, generated = models_json_schema(
        [(model, "validation") for model in models], schema_generator=_Generator
    )
    definitions = generated["$defs"]
    whole = definitions.pop(Config.__name__)
    for table in sections:
        whole["properties"][table.name] = refs[table.settings, "validation"]
    one_sink = {"oneOf": [refs[table.settings, "validation"] for table in sinks]}
    whole["properties"]["sinks"] = {"type": "object", "additionalProperties": one_sink}
    return {
        "$schema": DIALECT,
        "$id": "urn:imds-bridge:schema:config:1",
        **whole,
        "title": "Configuration of imds-bridge",
        "$defs": definitions,
    }


def config_schema_text() -> str:
    """Return the text of the schema's file."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


class _Generator(GenerateJsonSchema):
    """Describe what a file may contain: secrets as texts or files, and nothing of how they are kept."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        model = schema["cls"]
        for name in model.known_keys():
            if name.endswith("_file") and name not in model.model_fields:
                _add_file(described, name)
        if "headers" in described["properties"]:
            described["properties"]["headers"] = {"anyOf": [_TEXT, _HEADERS]}
        if _SIGNING_SECRETS in described["properties"]:
            _add_signing_secret(described)
        for part in described["properties"].values():
            part.pop("title", None)
        return described

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return dict(_TEXT) if schema["cls"] is Secret else super().dataclass_schema(schema)

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        # TOML has no null: what is optional is left out.
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default", ...) is None or isinstance(schema.get("default"), Secret):
            described.pop("default", None)
        return described


def _add_file(described: JsonSchemaValue, name: str) -> None:
    """Add the file that may hold a setting instead."""
    setting = name.removesuffix("_file")
    described["properties"][name] = dict(_TEXT)
    required = described.get("required", [])
    if setting in required:
        required.remove(setting)
        rule: JsonSchemaValue = {"oneOf": [{"required": [setting]}, {"required": [name]}]}
    else:
        rule = {"not": {"required": [setting, name]}}
    described.setdefault("allOf", []).append(rule)


def _add_signing_secret(described: JsonSchemaValue) -> None:
    """Add the other spelling, and lists."""
    given = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
    for name in (_SIGNING_SECRETS, "signing_secret"):
        described["properties"] |= {name: given, f"{name}_file": dict(_TEXT)}
