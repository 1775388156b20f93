"""The configuration's JSON Schema, and from it the reference in docs/configuration.md.

`python -m tools.packaging.config_page` writes both. What stands above the mark on the page is written by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from bridge.config.approvals import RuleSettings
from bridge.config.base import Secret, Settings, spellings
from bridge.config.bus import BusSettings, ReceiverSettings
from bridge.config.registry import FORMATS, SINK_KINDS
from bridge.config.sinks import ChatSettings, HttpSettings, IdentitySettings, SinkSettings, WebhookSettings
from bridge.formats.digest import DigestSettings
from tools.packaging.config_schema import FILE, Table, config_schema, config_schema_text, tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
MARK = "<!-- Generated from the docstrings in bridge/config by `python -m tools.packaging.config_page`. -->\n"
SCHEMA = config_schema()
# The tables that most configurations have come first.
ORDER = ("", "sinks", "approvals", "relay", "console", "imds", "metrics")
# What several tables have in common.
TITLES: Mapping[type[Settings], str] = {
    SinkSettings: "Every sink",
    WebhookSettings: "Every webhook",
    ChatSettings: "Every chat format",
    DigestSettings: "Digests",
    HttpSettings: "HTTP connections",
    IdentitySettings: "Identity",
    BusSettings: "Service Bus connections",
    ReceiverSettings: "Receiving from Service Bus",
    RuleSettings: "Rules",
}
REGISTERED = {(SinkSettings, "kind"): list(SINK_KINDS), (WebhookSettings, "format"): list(FORMATS)}
KINDS = {"boolean": "`true`, `false`"}
UNITS = {
    "days": "days",
    "seconds": "seconds",
    "mb": "MiB",
    "second": "requests a second",
    "unavailable": "VMs",
}


def page() -> str:
    """Return the whole page, with a current reference."""
    by_hand = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return f"{by_hand}{MARK}\n{reference()}"


def reference() -> str:
    """Return one section for each group of keys."""
    every = sorted(tables(), key=_place)
    groups = {model: None for table in every for model in groups_of(table.settings)}
    return "\n".join(
        _section(group, [one for one in every if issubclass(one.settings, group)]) for group in groups
    )


def groups_of(settings: type[Settings]) -> list[type[Settings]]:
    """Return the classes that a table's keys come from."""
    models = [model for model in reversed(settings.__mro__) if issubclass(model, Settings)]
    return [model for model in models if _own_fields(model) or model is settings]


def keys_of(group: type[Settings], table: Table) -> list[list[str]]:
    """Return the keys that a group adds to a table, each with its other spellings."""
    known = definition(table)["properties"]
    return [[key for key in _spellings(name) if key in known] for name in _own_fields(group)]


def definition(table: Table) -> dict[str, Any]:
    """Return the schema of a table; a webhook is never without a format."""
    name = table.settings.__name__.replace("WebhookSettings", "CloudEventsSettings")
    found: dict[str, Any] = SCHEMA["$defs"].get(name, SCHEMA)
    return found


def _place(table: Table) -> int:
    """Put sections in the order above."""
    section = table.name.partition(".")[0]
    return ORDER.index(section) if section in ORDER else len(ORDER)


def _own_fields(model: type[Settings]) -> list[str]:
    """Return what a class adds; `kind` and `format` of a single one are in its title."""
    own = [name for name in model.__annotations__ if name in model.model_fields]
    chosen_by = {"kind": SinkSettings, "format": WebhookSettings}
    return [name for name in own if chosen_by.get(name, model) is model]


def _spellings(name: str) -> list[str]:
    return [key for one in sorted(spellings(name)) for key in (one, f"{one}_file")]


def _section(group: type[Settings], where: Sequence[Table]) -> str:
    is_list = issubclass(group, RuleSettings)
    names = list(dict.fromkeys(table.name for table in where))
    tables = ", ".join(_place_of(name, where, is_list=is_list) for name in names)
    first = (group.__doc__ or "").partition("\n")[0]
    others = [one for one in TITLES if group not in TITLES and one in groups_of(where[0].settings)]
    also = f" Also: {', '.join(map(_link, others))}." if others else ""
    rows = [f"| {' | '.join(cells)} |\n" for cells in _rows(group, where[0])]
    header = (
        "\n| key | value | default | example | meaning |\n| --- | --- | --- | --- | --- |\n" if rows else ""
    )
    return f"""\
## {TITLES.get(group) or _title(where[0])}

{first}{f" In {tables}." if group in TITLES else ""}{also}
{header}{"".join(rows)}"""


def _place_of(name: str, where: Sequence[Table], *, is_list: bool) -> str:
    """Name a table, with the kinds of sinks if only some have the keys."""
    kinds = sorted(
        {
            kind
            for table in where
            for kind in SINK_KINDS
            if f'"{kind}"' in table.condition and table.name == name
        }
    )
    some = f" of kind {' and '.join(kinds)}" if len(kinds) < len(SINK_KINDS) and kinds else ""
    return _code(f"[[{name}]]" if is_list else f"[{name}]") + some


def _link(group: type[Settings]) -> str:
    return f"[{TITLES[group]}](#{TITLES[group].lower().replace(' ', '-')})"


def _title(table: Table) -> str:
    if table.condition:
        *_, keyword, _, value = table.condition.replace('"', "").split()
        return f"{keyword.capitalize()} {value}"
    name = f"[{table.name}]" if issubclass(table.settings, RuleSettings) else table.name
    return f"[{name}]" if name else "Before the first table"


def _rows(group: type[Settings], table: Table) -> Iterator[tuple[str, ...]]:
    known = definition(table)["properties"]
    sections = {one.name for one in tables()}
    for keys in keys_of(group, table):
        described = known[keys[0]]
        field = group.model_fields.get(keys[0]) or group.model_fields["signing_secrets"]
        value, default = _value(group, keys[0], described), _default(field, described)
        name = "<br>".join(map(_code, keys))
        if keys[0] == "sinks" or f"{table.name}.{keys[0]}".strip(".") in sections:
            continue  # a section describes it
        if any(keys[0] in one.model_fields for one in TITLES if one in group.__bases__):
            yield name, value, default, "", "as above, with this default"
            continue
        is_shown = default in ("", "required") or described.get("type") == "array"
        examples = described.get("examples", ()) if is_shown else ()
        yield name, value, default, "".join(map(_literal, examples)), described["description"]


def _default(field: FieldInfo, described: Mapping[str, Any]) -> str:
    if field.is_required():
        return _literal(described.get("default")) or "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Secret):
        return _literal(value.value)
    if isinstance(value, Settings):
        return ""
    return _literal(
        str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    )


def _value(group: type[Settings], key: str, described: Mapping[str, Any]) -> str:
    if values := REGISTERED.get((group, key)) or described.get("enum"):
        return ", ".join(map(_literal, values))
    kind = described.get("type")
    if kind in ("number", "integer"):
        return f"{UNITS.get(key.rpartition('_')[2], 'number')}{_range(described)}"
    if kind == "array":
        return "list of tables" if "$ref" in described["items"] else "list of texts"
    reference = str(described.get("$ref", ""))
    if kind == "object" or (reference and not reference.endswith("/Secret")):
        return "table"
    return KINDS.get(str(kind), "text or list of texts" if key.startswith("signing") else "text")


def _range(described: Mapping[str, Any]) -> str:
    """Write the limits of a number."""
    least = described.get("minimum", described.get("exclusiveMinimum"))
    above = "above " if "exclusiveMinimum" in described else ""
    most = described.get("maximum")
    if least is None:
        return ""
    return f", {above}{least:g}" + (f" to {most:,}" if most else " or more" if not above else "")


def _literal(value: Any) -> str:
    """Write a value as in TOML; nothing for one that is not there."""
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, dict):
        return _code(f"{{ {', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())} }}")
    return _code(_toml(value))


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, list):
        return f"[{', '.join(_literal(inner).strip('`') for inner in value)}]"
    return json.dumps(value)


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    FILE.write_text(config_schema_text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
