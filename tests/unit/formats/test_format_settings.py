"""Each format brings its own settings: defaults, required ones, and the limits that every sink has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.config.registry import FORMATS
from bridge.config.sinks import SinkSettings
from bridge.errors import ConfigError
from tests.support.process import toml
from tests.support.webhook import NEEDED

NOTICES = ("io.imdsbridge.scheduledevent.*", "io.imdsbridge.approval.*")
DEFAULTS: dict[str, tuple[tuple[str, ...], float, float | None, bool]] = {
    "cloudevents": (("*",), 604_800.0, None, False),
    "pagerduty": (("io.imdsbridge.scheduledevent.*",), 3600.0, 2.0, True),
    "slack": (NOTICES, 3600.0, 1.0, True),
    "teams": (NOTICES, 3600.0, 4.0, True),
    "template": (NOTICES, 3600.0, None, True),
}


def read(tmp_path: Path, **given: Any) -> SinkSettings:
    file = tmp_path / "config.toml"
    file.write_text(toml({"sinks": {"ops": {"kind": "webhook", "url": "https://example.org/", **given}}}))
    return load(file, {}).sinks["ops"]


def faults(tmp_path: Path, **given: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, **given)
    return raised.value.faults


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_defaults_for_its_receiver(tmp_path: Path, name: str) -> None:
    sink = read(tmp_path, format=name, **NEEDED.get(name, {}))
    given = (sink.types, sink.max_age_seconds, sink.max_per_second, sink.is_chat_format)
    assert given == DEFAULTS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_the_limits_of_every_sink_hold_in_each_format(tmp_path: Path, name: str) -> None:
    found = faults(tmp_path, format=name, max_per_second=1e-11, max_age_seconds=-1, **NEEDED.get(name, {}))
    assert sorted(fault.partition(":")[0] for fault in found) == [
        "sinks.ops.max_age_seconds",
        "sinks.ops.max_per_second",
    ]


@pytest.mark.parametrize(("name", "setting"), [("pagerduty", "routing_key"), ("template", "template")])
def test_a_required_setting_is_missed_by_name(tmp_path: Path, name: str, setting: str) -> None:
    assert faults(tmp_path, format=name) == [f"sinks.ops.{setting}: is missing (or {setting}_file)"]


@pytest.mark.parametrize(
    ("name", "setting", "owner"),
    [
        ("teams", "routing_key", "pagerduty"),
        ("slack", "mode", "cloudevents"),
        ("cloudevents", "template_file", "template"),
    ],
)
def test_a_setting_of_another_format_is_refused_with_that_formats_name(
    tmp_path: Path, name: str, setting: str, owner: str
) -> None:
    (fault,) = faults(tmp_path, format=name, **{setting: "x"})
    assert fault.startswith(f"sinks.ops.{setting}: ")
    assert fault.endswith(
        f'; did you mean sinks.NAME.{setting} with kind = "webhook" and format = "{owner}"?'
    )


def test_an_unknown_format_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, format="team")
    assert fault.startswith('sinks.ops.format: given "team", expected one of cloudevents, pagerduty, ')
    assert fault.endswith("; did you mean teams?")
