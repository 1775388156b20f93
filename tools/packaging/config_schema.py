"""Generate the JSON Schema of the configuration from its settings; tools/packaging/config_page.py writes it."""

from __future__ import annotations

import ast
import inspect
import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from bridge.config.base import Secret, Settings, spellings
from bridge.config.models import Config
from bridge.config.registry import FORMATS, SECTIONS, SINK, SINK_KINDS, format_class
from bridge.config.sinks import WebhookSettings

FILE = Path(__file__).resolve().parents[2] / "bridge/config/schema.json"
DIALECT = "http://json-schema.org/draft-07/schema#"  # the newest that Taplo, and so editors of TOML, know
_TEXT = {"type": "string"}
_HEADERS = {"type": "object", "additionalProperties": _TEXT}
_SIGNING_SECRETS = "signing_secrets"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the configuration: its full name, the condition under which it is so, and its settings."""

    name: str
    condition: str = ""
    settings: type[Settings]


def tables() -> Iterator[Table]:
    """Yield every table, those that a table contains, or that its formats make of it, after it."""
    yield from _with_inner(Table(name="", settings=Config))
    for section, settings in SECTIONS.items():
        yield from _with_inner(Table(name=section, settings=resolve_name(settings)))
    for kind, (place, _) in SINK_KINDS.items():
        settings, condition = resolve_name(place), f' with kind = "{kind}"'
        yield Table(name=SINK, condition=condition, settings=settings)
        for name in FORMATS if settings.has_formats else ():
            of_format = f'{condition} and format = "{name}"'
            yield Table(name=SINK, condition=of_format, settings=format_class(name).settings)


def _with_inner(table: Table) -> Iterator[Table]:
    yield table
    for key in table.settings.model_fields:
        if inner := table.settings.inner_settings(key):
            name = f"{table.name}.{key}" if table.name else key
            yield from _with_inner(Table(name=name, settings=inner))


def config_schema() -> dict[str, Any]:
    """Return the schema of the whole configuration."""
    sinks = [table for table in tables() if table.name == SINK and table.settings is not WebhookSettings]
    sections = [table for table in tables() if table.name in SECTIONS]
    models: list[type[BaseModel]] = [Config, *(table.settings for table in (*sections, *sinks))]
    refs, generated = models_json_schema(
        [(model, "validation") for model in models], schema_generator=_Generator
    )
    definitions = generated["$defs"]
    whole = definitions.pop(Config.__name__)
    for table in sections:
        whole["properties"][table.name] |= refs[table.settings, "validation"]
    one_sink = _one_sink({name: definitions[name] for name in (table.settings.__name__ for table in sinks)})
    whole["properties"]["sinks"] |= {"type": "object", "additionalProperties": one_sink}
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


def _one_sink(definitions: dict[str, JsonSchemaValue]) -> JsonSchemaValue:
    """Choose a sink's settings by its kind and format, so that an error is about the key that is wrong."""
    refs = {name: {"$ref": f"#/$defs/{name}"} for name in definitions}
    return {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(SINK_KINDS)}, "format": {"enum": list(FORMATS)}},
        "allOf": [{"if": _is_meant(definitions[name]), "then": ref} for name, ref in refs.items()],
        "anyOf": [*refs.values(), True],  # refuses nothing: editors complete keys by it, and not by `then`
    }


def _is_meant(definition: JsonSchemaValue) -> JsonSchemaValue:
    keys = [key for key in ("kind", "format") if key in definition["properties"]]
    constants = {key: {"const": definition["properties"][key]["const"]} for key in keys}
    required = [key for key in keys if key in definition["required"]]
    return {"type": "object", "properties": constants, "required": required}


@cache
def describe_keys(settings: type[Settings]) -> dict[str, JsonSchemaValue]:
    """Return the description and the example of each key: the docstrings below the fields."""
    texts: dict[str, JsonSchemaValue] = {}
    for model in reversed(settings.__mro__):
        if issubclass(model, Settings):
            texts |= {key: _describe(text) for key, text in _docstrings(model).items()}
    for key in settings.known_keys():
        if key not in settings.model_fields:
            texts[key] = {"description": f"The file that contains `{key.removesuffix('_file')}`."}
    if _SIGNING_SECRETS in settings.model_fields:
        file = "The file that contains the secrets, one a line."
        texts |= {"signing_secret": texts[_SIGNING_SECRETS], "signing_secret_file": {"description": file}}
        texts |= {f"{_SIGNING_SECRETS}_file": {"description": file}}
    return texts


@cache
def _docstrings(model: type[Settings]) -> dict[str, str]:
    """Read the source: at run time, docstrings of fields do not exist and cost nothing."""
    (definition,) = ast.parse(inspect.getsource(model)).body
    found: dict[str, str] = {}
    for field, text in pairwise(getattr(definition, "body", ())):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                found[key] = " ".join(text.split())
    return found


def _describe(text: str) -> JsonSchemaValue:
    meaning, _, example = text.partition(" Example: `")
    if not example:
        return {"description": meaning}
    return {"description": meaning, "examples": [tomllib.loads(f"x = {example.removesuffix('`.')}")["x"]]}


class _Generator(GenerateJsonSchema):
    """Describe what a file may contain: secrets as texts or files, and nothing of how they are kept."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        described["additionalProperties"] = {
            "not": {"title": "an unknown key"}
        }  # unlike false, marks the key
        model: type[Settings] = schema["cls"]
        for name in model.known_keys():
            if name.endswith("_file") and name not in model.model_fields:
                _add_file(described, name)
        if "headers" in described["properties"]:
            described["properties"]["headers"] = {"anyOf": [_TEXT, _HEADERS]}
        if _SIGNING_SECRETS in described["properties"]:
            _add_signing_secret(described)
        texts = describe_keys(model)
        for key, part in described["properties"].items():
            part.pop("title", None)
            part.update(texts.get(key, {}))
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
    only_the_file = {"properties": {setting: {"not": {"title": f"given beside {name}"}}}}
    if setting in described.get("required", []):
        described["required"].remove(setting)
        described |= {"if": {"required": [name]}, "then": only_the_file, "else": {"required": [setting]}}
    else:
        described.setdefault("dependencies", {})[name] = only_the_file


def _add_signing_secret(described: JsonSchemaValue) -> None:
    """Add the other spelling, and lists."""
    given = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
    described["properties"] |= dict.fromkeys(spellings(_SIGNING_SECRETS), given)
