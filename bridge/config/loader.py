"""Load the configuration: a TOML file, overridden by the environment; report all errors at once.

Each error says what was given, what was expected, and the nearest name.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.approvals import ApprovalSettings
from bridge.config.base import Secret, SecretUnreadable, Settings
from bridge.config.bus import ReceiverSettings, RelaySettings
from bridge.config.imds import ImdsSettings
from bridge.config.models import Config
from bridge.config.names import nearest
from bridge.config.registry import UnknownNameError, sink_settings
from bridge.config.servicebus import ServiceBusSettings
from bridge.config.sinks import SinkSettings
from bridge.config.validators import quote
from bridge.errors import ConfigError, SecretFault

DEFAULT_PATH = Path(
    r"C:\ProgramData\imds-bridge\config.toml" if sys.platform == "win32" else "/etc/imds-bridge/config.toml"
)
ENV_PREFIX = "IMDS_BRIDGE__"


def load_state_dir(path: Path | None, environ: Mapping[str, str]) -> Path:
    """Load `state_dir` alone: reading the state does not need the secrets to be readable.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    _overlay(given, environ)
    return Path(str(given.get("state_dir", Config.model_fields["state_dir"].default)))


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Load the configuration from `path` (None: the default path, which may be missing) and `environ`.

    Raises:
        ConfigError: with every error that was found.
    """
    origin = str(path or DEFAULT_PATH)
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    from_environment = _overlay(given, environ)
    faults: list[str] = []
    sinks = given.pop("sinks", {})
    parts: dict[str, Any] = {"sinks": _load_sinks(sinks, faults)}
    imds = given.pop("imds", {})
    parts["imds"] = _load_part(ImdsSettings, imds, "imds", faults) or ImdsSettings()
    if "approvals" in given:
        parts["approvals"] = _load_part(ApprovalSettings, given.pop("approvals"), "approvals", faults)
    if "relay" in given:
        parts["relay"] = _load_part(RelaySettings, given.pop("relay"), "relay", faults)
    faults += _circles(
        parts["sinks"], parts.get("approvals"), "the entity that [approvals] receives from", "a command"
    )
    faults += _circles(
        parts["sinks"], parts.get("relay"), "the entity that [relay] receives from", "a new event, endlessly"
    )
    config = _load_part(Config, {**given, **parts}, "", faults)
    if faults or config is None:
        raise ConfigError(origin, [_with_variable(fault, from_environment) for fault in faults])
    return config


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if not must_exist:
            return {}
        raise ConfigError(
            str(path), ["the file does not exist; expected a TOML file (see README.md)"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {error}"]) from None
    except tomllib.TOMLDecodeError as error:
        is_path = any(sign in str(error) for sign in ("\\", "hex value"))
        hint = r"; write a path with backslashes in single quotes: 'C:\folder'" if is_path else ""
        raise ConfigError(str(path), [f"is not valid TOML: {error}{hint}"]) from None


def _overlay(given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Let `IMDS_BRIDGE__SECTION__KEY` override the file's settings; return each key with its variable."""
    taken = {}
    for variable, value in sorted(environ.items()):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        *sections, key = variable[len(ENV_PREFIX) :].lower().split("__")
        table = given
        for number, section in enumerate(sections):
            # The file may write a sink's name in any letter case.
            name = next((name for name in table if name.lower() == section), section)
            sections[number] = name
            inner = table.get(name)
            table[name] = dict(inner) if isinstance(inner, dict) else {}
            table = table[name]
        key = next((name for name in table if name.lower() == key), key)
        for name in _spellings(key.removesuffix("_file")):
            table.pop(name, None)
            table.pop(f"{name}_file", None)
        table[key] = _from_text(value)
        taken[".".join((*sections, key))] = variable
    return taken


def _spellings(name: str) -> tuple[str, ...]:
    """Return every spelling of a key, so that the environment's value replaces all of the file's."""
    alike = ("signing_secret", "signing_secrets")
    return alike if name in alike else (name,)


def _from_text(value: str) -> Any:
    """Parse lists and tables, which the environment holds as JSON; leave the rest to the setting's type."""
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            # A template such as {event} starts like JSON.
            return value
    return value


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
        if (part := _load_part(model, table, where, faults)) is not None:
            loaded[name] = part
    return loaded


def _circles(
    sinks: Mapping[str, SinkSettings], source: ReceiverSettings | None, what: str, read_as: str
) -> Iterable[str]:
    """Find sinks that would send to the entity that the process receives from."""
    for name, sink in sinks.items():
        if source and isinstance(sink, ServiceBusSettings) and sink.address == source.address:
            key = "topic" if sink.topic else "queue"
            yield (
                f"sinks.{name}.{key}: given {quote(sink.entity)}, {what}; "
                f"expected another one: each event sent there would be received as {read_as}"
            )


S = TypeVar("S", bound=Settings)


def _load_part(model: type[S], given: Any, where: str, faults: list[str]) -> S | None:
    """Validate one part; add its errors to `faults`."""
    if not isinstance(given, dict):
        faults.append(f"{where}: given {_kind(given)}, expected a table: [{where}]")
        return None
    try:
        return model(**given)
    except ValidationError as error:
        faults += [_fault(model, where, details) for details in error.errors(include_url=False)]
        return None


def _kind(value: object) -> str:
    """Quote what was given instead of a table, but no text: it may be a broken table with secrets."""
    return "a text" if isinstance(value, str) else quote(value)


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    path = [str(step) for step in details["loc"]]
    name = path[0] if path else ""
    key = ".".join(filter(None, [where, *path])).replace("signing_secrets", "signing_secret")
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{model.hint(name) or nearest(name, model.known_keys())}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if f"{name}_file" in model.known_keys() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    expected = _PLAINER.get(details["type"], expected)
    # An error of the part as a whole, or of a secret in it.
    if not path:
        return f"{key or 'the file'}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        text = f"{key}_file: given {quote(given.file)}, {expected}"
        return SecretFault(text) if isinstance(details["ctx"]["error"], SecretUnreadable) else text
    shown = "***" if name in model.secret_names() else quote(given)
    return f"{key}: given {shown}, {expected}"


_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}


def _with_variable(fault: str, variables: Mapping[str, str]) -> str:
    key = fault.partition(":")[0]
    while key and key not in variables:
        key = key.rpartition(".")[0]
    return type(fault)(f"{fault} (from the environment variable {variables[key]})") if key else fault
