"""The JSON Schema of the configuration: current, and as strict as a schema can be."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from bridge.config.approvals import RuleSettings
from bridge.config.registry import SINK_KINDS
from bridge.config.sinks import check_pattern
from bridge.contract.types import EVENT_TYPES
from tests.support.only import only
from tests.support.pages import configurations
from tests.support.process import toml
from tests.support.settings import faults
from tools.packaging.config_schema import FILE, Table, config_schema_text, tables

SCHEMA = json.loads(FILE.read_text())
VALIDATOR = Draft7Validator(SCHEMA)


def errors(given: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(given)]


@pytest.mark.posix("its default paths are of POSIX")
def test_the_shipped_schema_is_the_generated_one_and_valid() -> None:
    assert FILE.read_text() == config_schema_text(), "run tools.packaging.config_page"
    Draft7Validator.check_schema(SCHEMA)


def test_every_key_of_every_table_is_in_the_schema() -> None:
    definitions = SCHEMA["$defs"]
    for table in tables():
        described = definitions.get(table.settings.__name__)
        if described:
            assert set(table.settings.known_keys()) <= set(described["properties"]), table


WEBHOOK = {"kind": "webhook", "url": "https://example.org"}


def ops(**settings: Any) -> dict[str, Any]:
    return {"sinks": {"ops": {**WEBHOOK, **settings}}}


PATTERNS = ("*", "i*", "io.*", "io.imdsbridge.imds.*", "*.v1", EVENT_TYPES[0])
VALID: list[dict[str, Any]] = [
    *map(tomllib.loads, configurations().values()),
    *(ops(types=[pattern]) for pattern in PATTERNS),
    {},
    ops(signing_secret=["whsec_a", "whsec_b"]),
    ops(signing_secrets_file="/x", headers_file="/y"),
    ops(format="template", template_file="/x"),
    {"sinks": {"ops": {"kind": "webhook", "url_file": "/x", "headers": {"X-Key": "a"}}}},
    {"sinks": {"ops": {"kind": "webhook", "format": "pagerduty", "routing_key_file": "/x"}}},
    {"sinks": {"ops": {"kind": "exec", "run": ["/bin/true"], "where": {"EventType": "Reboot"}}}},
    {"approvals": {"auto": [{"event_type": ["Reboot"]}]}},
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_loader_takes_every_pattern_that_the_schema_is_tried_with(pattern: str) -> None:
    assert check_pattern(pattern) == pattern


@pytest.mark.parametrize("given", VALID)
def test_a_valid_configuration_is_valid_by_the_schema(given: dict[str, Any]) -> None:
    assert errors(given) == []


SINKS: list[Any] = [
    5,
    {"ops": "text"},
    {"ops": {"url": "x"}},
    {"ops": {"kind": "webhok", "url": "x"}},
    {"ops": {"kind": "webhook"}},
    {"ops": {"kind": "stdout", "url": "x"}},
    {"ops": {"kind": "eventgrid"}},
    {"ops": {"kind": "exec"}},
]
IMDS: list[Any] = [
    5,
    {"poll_seconds": 0.1},
    {"endpoint": "169.254.169.254"},
    {"endpoint": "https://169.254.169.254"},
    {"api_version": "latest"},
    {"poll_second": 3},
]
INVALID: list[dict[str, Any]] = [
    *({"log_levl": "info"}, {"stop_seconds": 9999}, {"state_dir": 5}, {"log_level": "loud"}, {"sink": {}}),
    *({"metrics": {"listen": "9464"}}, {"metrics": {"listen": ":9464"}}, {"relay": {"session": "x"}}),
    *({"sinks": sinks} for sinks in SINKS),
    *({"imds": imds} for imds in IMDS),
    *(ops(format=name) for name in ("team", "pagerduty", "template")),
    ops(format="slack", mode="binary"),
    ops(format="teams", routing_key="x"),
    *(ops(url=5), ops(url_file="/x"), ops(mode="binari"), ops(allow_http="perhaps"), ops(haeders={})),
    *(ops(types="io.imdsbridge.*"), ops(types=["scheduledevent.started"])),
    *(ops(where={"EventType": value}) for value in ({"a": 1}, [], ["Reboot", ["Redeploy"]])),
    *(ops(timeout_seconds=0), ops(max_age_seconds=-1)),
    *(ops(headers={"X-Team": 5}), ops(bearer_token=["a", 5]), ops(signing_secrets=[5])),
    {"approvals": {"auto": [{"event_typ": ["Reboot"]}]}},
    {"approvals": {"policy": {"allow": [{"event_type": []}]}}},
    {"approvals": {"policy": {"deny": [{"min_duration_seconds": -1}]}}},
    {"approvals": {"policy": {"scope": "all"}}},
    {"approvals": {"connection_string": "a", "connection_string_file": "b"}},
]


@pytest.mark.parametrize("given", INVALID)
def test_what_the_loader_refuses_is_not_valid_by_the_schema(given: dict[str, Any], tmp_path: Path) -> None:
    assert errors(given)
    assert faults(tmp_path, toml(given))


TYPES: dict[str, tuple[str, list[Any]]] = {
    "number": ("a number", [True, False, "3"]),
    "integer": ("a whole number", [True, False, "3"]),
    "boolean": ("true or false", ["true", 1, 0.0]),
}


def typed_settings() -> list[tuple[Table, str, str]]:
    definitions = {**SCHEMA["$defs"], "Config": SCHEMA}
    return [
        (table, key, described["type"])
        for table in tables()
        for key, described in definitions.get(table.settings.__name__, {"properties": {}})[
            "properties"
        ].items()
        if described.get("type") in TYPES
    ]


@pytest.mark.parametrize(
    ("table", "key", "kind"), typed_settings(), ids=lambda one: getattr(one, "full_name", str)(one)
)
def test_a_number_is_no_text_and_a_boolean_neither_a_text_nor_a_number(
    tmp_path: Path, table: Table, key: str, kind: str
) -> None:
    expected, others = TYPES[kind]
    for value in others:
        given: Any = {**dict(re.findall(r'(\w+) = "(\w+)"', table.condition)), key: value}
        given = [given] if issubclass(table.settings, RuleSettings) else given
        for name in filter(None, reversed(table.name.split("."))):
            given = {name: given}
        place = f"{table.name}{'[0]' * issubclass(table.settings, RuleSettings)}.{key}".removeprefix(".")
        told = f"{place}: given {json.dumps(value)}, expected {expected}"
        assert [fault for fault in faults(tmp_path, toml(given)) if fault.startswith(told)]
        assert key in [
            error.absolute_path[-1] for error in VALIDATOR.iter_errors(given) if error.absolute_path
        ]


def test_the_walk_reaches_every_table_with_a_number_or_a_boolean() -> None:
    walked = typed_settings()
    assert {kind for _, _, kind in walked} == set(TYPES)
    assert {"approvals.auto", "approvals.policy.deny", "console", "imds", "relay", "sinks.NAME", ""} <= {
        table.name for table, _, _ in walked
    }


OPS = ["sinks", "ops"]
INVALID_UNDER = "should not be valid under {'title':"
UNKNOWN = f"1 {INVALID_UNDER} 'an unknown key'}}"


@pytest.mark.parametrize(
    ("sink", "path", "message"),
    [
        ({"kind": "webhok", "url": "x"}, [*OPS, "kind"], f"'webhok' is not one of {[*SINK_KINDS]}"),
        ({"url": "x"}, OPS, "'kind' is a required property"),
        ({"kind": "webhook"}, OPS, "'url' is a required property"),
        ({**WEBHOOK, "url": 5}, [*OPS, "url"], "5 is not of type 'string'"),
        ({**WEBHOOK, "haeders": 1}, [*OPS, "haeders"], UNKNOWN),
        ({**WEBHOOK, "format": "slak"}, [*OPS, "format"], "'slak' is not one of ['cloudevents', "),
        ({**WEBHOOK, "format": "slack", "mode": 1}, [*OPS, "mode"], UNKNOWN),
        (
            {**WEBHOOK, "url_file": "/x"},
            [*OPS, "url"],
            f"'{WEBHOOK['url']}' {INVALID_UNDER} 'given beside url_file'",
        ),
        (
            {**WEBHOOK, "proxy": "x", "proxy_file": "/x"},
            [*OPS, "proxy"],
            f"'x' {INVALID_UNDER} 'given beside proxy_",
        ),
        (
            {"kind": "stdout", "types": ["scheduledevent.started"]},
            [*OPS, "types", 0],
            "'scheduledevent.started' is not one of ['io.imdsbridge.scheduledevent.scheduled.v1', ",
        ),
        ({"kind": "stdout", "types": ["imds.*"]}, [*OPS, "types", 0], "'imds.*' does not match '^("),
        ("text", OPS, "'text' is not of type 'object'"),
    ],
)
def test_only_the_wrong_key_is_marked(sink: Any, path: list[str | int], message: str) -> None:
    error = only(VALIDATOR.iter_errors({"sinks": {"ops": sink}}))
    assert (list(error.absolute_path), error.message[: len(message)]) == (path, message)


def described() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (definition, key, text)
        for definition, one in {"": SCHEMA, **SCHEMA["$defs"]}.items()
        for key, text in one.get("properties", {}).items()
    ]


def test_every_key_says_what_it_is_for() -> None:
    assert [(definition, key) for definition, key, text in described() if "description" not in text] == []


def test_every_key_whose_values_are_not_listed_has_an_example_that_is_valid() -> None:
    for definition, key, text in described():
        has_values = {"enum", "const", "$ref"} & set(text) or text.get("type") in ("boolean", "object")
        is_list_of_tables = "$ref" in text.get("items", {})
        if not (has_values or is_list_of_tables or key.endswith("_file")) or "Secret" in str(
            text.get("$ref")
        ):
            schema = {**text, "$defs": SCHEMA["$defs"]}
            assert Draft7Validator(schema).is_valid(only(text["examples"])), (definition, key)


@pytest.mark.posix("its default paths are of POSIX")
def test_the_page_has_the_current_reference_of_every_key() -> None:
    from tools.packaging import config_page  # noqa: PLC0415 - it makes the whole schema

    assert config_page.PAGE.read_text(encoding="utf-8") == config_page.page(), (
        "run tools.packaging.config_page"
    )
    for table in tables():
        on_page = {
            key
            for group in config_page.groups_of(table.settings)
            for row in config_page.keys_of(group, table)
            for key in row
        }
        assert set(table.settings.known_keys()) - on_page <= {"kind", "format"}, table
