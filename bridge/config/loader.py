"""Load the configuration: a TOML file, overridden by the environment; report all errors at once.

Each error says what was given, what was expected, and the nearest name.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from bridge.config.base import Settings
from bridge.config.environment import name_variable, override
from bridge.config.faults import load_part
from bridge.config.imds import ImdsSettings
from bridge.config.metrics import MetricsSettings
from bridge.config.models import Config
from bridge.config.registry import UnknownNameError, sink_settings
from bridge.config.sinks import SinkSettings
from bridge.config.tables import SECTIONS
from bridge.config.validators import quote
from bridge.errors import ConfigError

if TYPE_CHECKING:
    from bridge.config.bus import ReceiverSettings

DEFAULT_PATH = Path(
    r"C:\ProgramData\imds-bridge\config.toml" if sys.platform == "win32" else "/etc/imds-bridge/config.toml"
)
_CORE_SECTIONS: dict[str, type[Settings]] = {"imds": ImdsSettings, "metrics": MetricsSettings}
# As what a section that receives from a bus would receive each event of a sink to the same entity.
_RECEIVED_AS = {"approvals": "a command", "relay": "a new event, endlessly"}


def load_state_dir(path: Path | None, environ: Mapping[str, str]) -> Path:
    """Load `state_dir` alone: reading the state does not need the secrets to be readable.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    override(given, environ)
    return Path(str(given.get("state_dir", Config.model_fields["state_dir"].default)))


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Load the configuration from `path` (None: the default path, which may be missing) and `environ`.

    Raises:
        ConfigError: with every error that was found.
    """
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    from_environment = override(given, environ)
    faults: list[str] = []
    parts: dict[str, Any] = {"sinks": _load_sinks(given.pop("sinks", {}), faults)}
    for section, model in _CORE_SECTIONS.items():
        if section in given:
            parts[section] = load_part(model, given.pop(section), section, faults) or model()
    for section, settings in SECTIONS.items():
        if section in given:
            source = load_part(resolve_name(settings), given.pop(section), section, faults)
            parts[section] = source
            if section in _RECEIVED_AS:
                faults += _find_loops(parts["sinks"], source, section)
    faults += _find_missing_properties(parts)
    config = load_part(Config, {**given, **parts}, "", faults)
    if faults or config is None:
        named = [name_variable(fault, from_environment) for fault in faults]
        raise ConfigError(str(path or DEFAULT_PATH), named)
    return config.read_from(path or DEFAULT_PATH)


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if not must_exist:
            return {}
        raise ConfigError(
            str(path), ["the file does not exist; expected a TOML file (see docs/configuration.md)"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {error}"]) from None
    except tomllib.TOMLDecodeError as error:
        is_path = any(sign in str(error) for sign in ("\\", "hex value"))
        hint = r"; write a path with backslashes in single quotes: 'C:\folder'" if is_path else ""
        raise ConfigError(str(path), [f"is not valid TOML: {error}{hint}"]) from None


def _load_sinks(given: Any, faults: list[str]) -> dict[str, SinkSettings]:
    if not isinstance(given, dict):
        faults.append("sinks: expected tables such as [sinks.ops]")
        return {}
    loaded = {}
    for name, table in given.items():
        where = f"sinks.{name}"
        if not isinstance(table, dict):
            faults.append(f"{where}: expected a table [sinks.{name}] with a kind")
            continue
        try:
            model: type[SinkSettings] = sink_settings(table.get("kind")).model_for(table)
        except UnknownNameError as unknown:
            faults.append(f"{where}.{unknown.key}: {unknown}")
            continue
        if (part := load_part(model, table, where, faults)) is not None:
            loaded[name] = part
    return loaded


def _find_missing_properties(parts: Mapping[str, Any]) -> Iterable[str]:
    """Find criteria that no document of the configured api-version can meet."""
    imds: ImdsSettings = parts.get("imds") or ImdsSettings()
    compared = [
        (f"sinks.{sink}.where.{name}", part)
        for sink, settings in parts["sinks"].items()
        for name in settings.where
        for part in name.split(".")
    ]
    if approvals := parts.get("approvals"):
        compared += [(f"approvals.{key}", name) for key, name in approvals.compared_properties()]
    for key, name in compared:
        if lack := imds.lack(name):
            yield f"{key}: {lack}; expected a newer api_version, or no such criterion"


def _find_loops(
    sinks: Mapping[str, SinkSettings], source: ReceiverSettings | None, section: str
) -> Iterable[str]:
    """Find sinks that would send to the entity that a section receives from."""
    from bridge.config.servicebus import ServiceBusSettings  # noqa: PLC0415 - few configurations need it

    for name, sink in sinks.items():
        if source and isinstance(sink, ServiceBusSettings) and sink.address == source.address:
            key = "topic" if sink.topic else "queue"
            yield (
                f"sinks.{name}.{key}: given {quote(sink.entity)}, the entity that [{section}] receives from; "
                f"expected another one: each event sent there would be received as {_RECEIVED_AS[section]}"
            )
