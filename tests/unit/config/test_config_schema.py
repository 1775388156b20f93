"""The JSON Schema of the configuration: current, and as strict as a schema can be."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from bridge.config.loader import load
from bridge.config.schema import config_schema, config_schema_text
from bridge.config.tables import tables
from bridge.errors import ConfigError
from tests.support.paths import ROOT
from tests.support.process import toml

SHIPPED = ROOT / "infra" / "config.schema.json"
VALIDATOR = Draft202012Validator(config_schema())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "infra").rglob("*.md"))]
CLOUD_INIT = ROOT / "infra" / "systemd" / "cloud-init.yaml"


def examples() -> dict[str, str]:
    """Return the text of every configuration that the repository shows, by its place."""
    files = {path: path.read_text() for path in sorted((ROOT / "infra").rglob("*.toml"))}
    found = {str(path.relative_to(ROOT)): text for path, text in files.items()}
    for page in PAGES:
        for number, block in enumerate(
            re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        ):
            for part, text in enumerate(
                re.split(r"^(?=# imds-bridge (?:forward|listen))", block, flags=re.MULTILINE)
            ):
                if text.strip():
                    found[f"{page.relative_to(ROOT)}-{number}-{part}"] = text
    for written in yaml.safe_load(CLOUD_INIT.read_text())["write_files"]:
        if written["path"].endswith(".toml"):
            found[f"cloud-init-{written['path']}"] = written["content"]
    return found


def errors(given: Any) -> list[str]:
    return [error.message for error in VALIDATOR.iter_errors(given)]


def test_the_shipped_schema_is_the_generated_one_and_valid() -> None:
    assert SHIPPED.read_text() == config_schema_text()
    Draft202012Validator.check_schema(json.loads(SHIPPED.read_text()))


def test_there_are_examples_of_every_place() -> None:
    places = {re.split(r"-\d|-/", name)[0] for name in examples()}
    assert {"README.md", "docs/operations.md", "cloud-init"} <= places
    assert {place.rpartition("/")[0] for place in places} >= {
        "infra/systemd",
        "infra/kubernetes",
        "infra/bicep",
    }


@pytest.mark.parametrize("name", examples())
def test_every_example_is_valid(name: str) -> None:
    given = tomllib.loads(examples()[name])
    for sink in given.get("sinks", {}).values():
        # A fragment that shows only a setting of a sink.
        if list(sink) == ["template"]:
            sink |= {"kind": "webhook", "format": "template", "url": "https://example.org"}
    assert errors(given) == []


def test_every_key_of_every_table_is_in_the_schema() -> None:
    definitions = config_schema()["$defs"]
    for table in tables():
        described = definitions.get(table.settings.__name__)
        if described:
            assert set(table.settings.known_keys()) <= set(described["properties"]), table


WEBHOOK = {"kind": "webhook", "url": "https://example.org"}
VALID: list[dict[str, Any]] = [
    {},
    {"sinks": {"ops": WEBHOOK}},
    {"sinks": {"ops": {"kind": "webhook", "url_file": "/x", "headers": {"X-Key": "a"}}}},
    {"sinks": {"ops": {**WEBHOOK, "signing_secret": ["whsec_a", "whsec_b"]}}},
    {"sinks": {"ops": {**WEBHOOK, "signing_secrets_file": "/x", "headers_file": "/y"}}},
    {"sinks": {"ops": {"kind": "webhook", "format": "pagerduty", "routing_key_file": "/x"}}},
    {"sinks": {"ops": {**WEBHOOK, "format": "template", "template_file": "/x"}}},
    {"sinks": {"ops": {"kind": "exec", "run": ["/bin/true"], "where": {"EventType": "Reboot"}}}},
    {"approvals": {"auto": [{"event_type": ["Reboot"]}]}},
]


@pytest.mark.parametrize("given", VALID)
def test_a_valid_configuration_is_valid_by_the_schema(given: dict[str, Any]) -> None:
    assert errors(given) == []


def ops(**settings: Any) -> dict[str, Any]:
    return {"sinks": {"ops": {**WEBHOOK, **settings}}}


INVALID: list[dict[str, Any]] = [
    {"log_levl": "info"},
    {"stop_seconds": 9999},
    {"state_dir": 5},
    {"log_level": "loud"},
    {"sinks": 5},
    {"sinks": {"ops": "text"}},
    {"sink": {}},
    {"imds": 5},
    {"imds": {"poll_seconds": 0.1}},
    {"imds": {"endpoint": "169.254.169.254"}},
    {"imds": {"endpoint": "https://169.254.169.254"}},
    {"imds": {"api_version": "latest"}},
    {"imds": {"poll_second": 3}},
    {"metrics": {"listen": "9464"}},
    {"metrics": {"listen": ":9464"}},
    {"sinks": {"ops": {"url": "x"}}},
    {"sinks": {"ops": {"kind": "webhok", "url": "x"}}},
    {"sinks": {"ops": {"kind": "webhook"}}},
    {"sinks": {"ops": {"kind": "stdout", "url": "x"}}},
    {"sinks": {"ops": {"kind": "eventgrid"}}},
    {"sinks": {"ops": {"kind": "exec"}}},
    ops(url=5),
    ops(url_file="/x"),
    ops(format="team"),
    ops(format="slack", mode="binary"),
    ops(format="teams", routing_key="x"),
    ops(format="pagerduty"),
    ops(format="template"),
    ops(mode="binari"),
    ops(types="io.imdsbridge.*"),
    ops(types=["scheduledevent.started"]),
    ops(where={"EventType": {"a": 1}}),
    ops(where={"EventType": []}),
    ops(where={"EventType": ["Reboot", ["Redeploy"]]}),
    ops(timeout_seconds=0),
    ops(max_age_seconds=-1),
    ops(allow_http="perhaps"),
    ops(haeders={}),
    {"approvals": {"auto": [{"event_typ": ["Reboot"]}]}},
    {"approvals": {"policy": {"allow": [{"event_type": []}]}}},
    {"approvals": {"policy": {"deny": [{"min_duration_seconds": -1}]}}},
    {"approvals": {"policy": {"scope": "all"}}},
    {"approvals": {"connection_string": "a", "connection_string_file": "b"}},
    {"relay": {"session": "x"}},
]


@pytest.mark.parametrize("given", INVALID)
def test_what_the_loader_refuses_by_key_type_or_range_is_not_valid(
    given: dict[str, Any], tmp_path: Path
) -> None:
    assert errors(given)
    file = tmp_path / "config.toml"
    file.write_text(toml(given))
    with pytest.raises(ConfigError):
        load(file, {})
