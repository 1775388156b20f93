"""Configurations as text, and what loading them says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridge.config.loader import load
from bridge.config.models import Config
from bridge.config.sinks import SinkSettings
from bridge.errors import ConfigError
from tests.support.only import only
from tests.support.process import toml

SECRET = "topsecret"  # noqa: S105 - made up


def read(folder: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    """Load a configuration that is written to `folder`."""
    file = folder / "config.toml"
    file.write_text(text)
    return load(file, environ or {})


def read_settings(folder: Path, **given: Any) -> SinkSettings:
    """Read the settings of a sink."""
    return read(folder, toml({"sinks": {"ops": given}})).sinks["ops"]


def faults(folder: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    """Return the errors of a configuration, which never show the secret."""
    with pytest.raises(ConfigError) as raised:
        read(folder, text, environ)
    assert SECRET not in str(raised.value)
    assert str(raised.value).startswith(f"{folder / 'config.toml'}: {len(raised.value.faults)} error")
    return raised.value.faults


def fault(folder: Path, text: str) -> str:
    """Return the one error of a configuration."""
    return only(faults(folder, text))


def webhook(**settings: Any) -> str:
    """Write a configuration with a webhook; None leaves a setting out."""
    given = {"kind": "webhook", "url": "https://example.org/hook", **settings}
    return toml({"sinks": {"ops": {name: value for name, value in given.items() if value is not None}}})


def stdout(**settings: Any) -> str:
    """Write a configuration with a sink to standard output."""
    return toml({"sinks": {"ops": {"kind": "stdout", **settings}}})
