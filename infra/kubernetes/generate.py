"""The schema and the README's table of the chart's values, written from values.yaml.

`python -m infra.kubernetes.generate` writes both. Names, defaults and comments are of values.yaml; what a value may
be beyond the type of its default is here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
VALUES, SCHEMA, README = (FOLDER / name for name in ("values.yaml", "values.schema.json", "README.md"))
ROLES = ("forward", "listen", "drain", "relay")
HEAD = "| value | meaning |\n| --- | --- |\n"
Json = dict[str, Any]

_TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECTS: Json = {"type": "array", "items": {"type": "object"}}
_NAME: Json = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?)?$"}
_KINDS = (
    "ClusterRole",
    "ClusterRoleBinding",
    "ConfigMap",
    "DaemonSet",
    "Deployment",
    "PersistentVolumeClaim",
    "ServiceAccount",
)


def _object(properties: Json, *required: str) -> Json:
    more: Json = {"required": [*required]} if required else {}
    return {"type": "object", "additionalProperties": False, **more, "properties": properties}


_TEXT: Json = {"type": "string"}
_OBJECT: Json = {"type": "object"}
_VARIABLE = _object(
    {"name": {"type": "string", "minLength": 1}, "value": _TEXT, "valueFrom": _OBJECT}, "name"
)
# By the end of a value's name.
_NARROWER: dict[str, Json] = {
    "image.repository": {"type": "string", "minLength": 1},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["", "Always", "IfNotPresent", "Never"]},
    "imagePullSecrets": {"type": "array", "items": _object({"name": _TEXT}, "name")},
    "nameOverride": _NAME,
    "fullnameOverride": _NAME,
    "extraArgs": {"type": "array", "items": _TEXT},
    "env": {"type": "array", "items": _VARIABLE},
    "resources": _object({"requests": _OBJECT, "limits": _OBJECT}),
    "volumes": {"type": "array", "items": {"type": "object", "required": ["name"]}},
    "volumeMounts": {"type": "array", "items": {"type": "object", "required": ["name", "mountPath"]}},
    "affinity": _OBJECT,
    "updateStrategy": _OBJECT,
    "podMonitor.apiVersion": {"enum": ["monitoring.coreos.com/v1", "azmonitoring.coreos.com/v1"]},
    "podMonitor.port": {"type": "integer", "minimum": 1, "maximum": 65534},
    "podMonitor.interval": {"type": "string", "pattern": "^[0-9]+(s|m)$"},
    "patch": _object(dict.fromkeys(_KINDS, _OBJECT)),
}
_TYPES: dict[type, Json] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    str: _TEXT,
    list: _OBJECTS,
}


def _schema_of(path: str, default: Any) -> Json:
    """Return what a value may be, from the dots of its name and its default."""
    for name, schema in _NARROWER.items():
        if f".{path}".endswith(f".{name}"):
            return schema
    if isinstance(default, dict):
        children = {key: _schema_of(f"{path}.{key}", value) for key, value in default.items()}
        return _object(children) if children else _TEXTS
    return _TYPES[type(default)]


def schema() -> Json:
    """Return the schema of the values."""
    values = yaml.safe_load(VALUES.read_text(encoding="utf-8"))
    process: Json = {}
    for role in ROLES:
        process |= {key: _schema_of(f"{role}.{key}", value) for key, value in values[role].items()}
    shared = {key: _schema_of(key, value) for key, value in values.items() if key not in ROLES}
    own: Json = {
        role: {
            "allOf": [{"$ref": "#/definitions/process"}],
            # a value of other roles
            "properties": {key: False for key in process if key not in values[role]},
        }
        for role in ROLES
    }
    own["relay"]["properties"]["updateStrategy"] = {"maxProperties": 0}  # its pods share a disk
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$comment": "Generated from values.yaml: python -m infra.kubernetes.generate",
        **_object({"global": {}, **shared, **own}),
        "definitions": {"process": _object(process)},
    }


def table() -> str:
    """Return the rows of the README's table: each value with a comment."""
    rows: list[tuple[str, str]] = []
    role = ""
    for line in VALUES.read_text(encoding="utf-8").splitlines()[1:]:
        found = re.fullmatch(r"( *)(\w+):.*?(?: # (.*))?", line)
        if not found:
            continue
        indent, name, comment = found.groups()
        role = name if not indent and name in ROLES else role if indent else ""
        if comment:
            rows.append((f"`{role}.{name}`" if role and indent else f"`{name}`", comment))
    return HEAD + "".join(f"| {name} | {comment} |\n" for name, comment in rows)


def with_table(text: str) -> str:
    """Return the README's text with the table of now."""
    before, _, rest = text.partition(HEAD)
    after = rest.partition("\n\n")[2]
    return f"{before}{table()}\n{after}"


def main() -> None:
    """Write both."""
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n", encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
