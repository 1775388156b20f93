"""Load the configuration: a TOML file, overridden by the environment; report all errors at once.

Each error says what was given, what was expected, and the nearest name.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.base import Faults, Secret, Settings, VariableText, hint_of_encoding, spellings
from bridge.config.models import Config
from bridge.config.registry import SECTIONS, SINK, sink_settings
from bridge.config.sinks import SinkSettings
from bridge.config.values import nearest, quote, quote_path
from bridge.errors import ConfigError

S = TypeVar("S", bound=Settings)
DEFAULT_PATH = Path(
    r"C:\ProgramData\imds-bridge\config.toml" if sys.platform == "win32" else "/etc/imds-bridge/config.toml"
)
ENV_PREFIX = "IMDS_BRIDGE__"
# Single underscores where two are meant; Kubernetes names a service's variables so, and those of programs are others.
_SINGLE = re.compile(r"IMDS_BRIDGE_(SINKS|APPROVALS|RELAY|METRICS|IMDS)_(?!(.*_)?(SERVICE|PORT)(_|$))", re.I)
_FEW = 6  # keys that an error can list
_PATH_HINT = r"; write a path with backslashes in single quotes: 'C:\folder'"
_TOML_HINTS = {
    "\\": _PATH_HINT,
    "hex value": _PATH_HINT,
    "Invalid value": '; a text needs quotes: kind = "webhook"',
}
_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "model_type": "expected a table",
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}


def load(path: Path | None, environ: Mapping[str, str], *, with_tables: bool = True) -> Config:
    """Load the configuration from `path` (None: the default path, which may be missing) and `environ`.

    Without its tables, which reading the state does not need, no secret has to be readable.

    Raises:
        ConfigError: with every error that was found.
    """
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    from_environment = _override(given, environ)
    if not with_tables:
        given = {key: value for key, value in given.items() if not isinstance(value, dict)}
    _find_secrets(given, path or DEFAULT_PATH, environ.get("CREDENTIALS_DIRECTORY", ""))
    expected = "expected IMDS_BRIDGE__SECTION__KEY with two underscores, such as IMDS_BRIDGE__SINKS__OPS__URL"
    faults = [f"the environment variable {name}: {expected}" for name in environ if _SINGLE.match(name)]
    parts: dict[str, Any] = {"sinks": _load_sinks(given.pop("sinks", {}), faults)}
    for section, settings in SECTIONS.items():
        if section in given:
            parts[section] = _load_part(resolve_name(settings), given.pop(section), section, faults)
    config = _load_part(Config, {**given, **parts}, "", faults)
    if faults or config is None:
        named = [_name_variable(_say_where(fault, path), from_environment) for fault in faults]
        raise ConfigError(str(path or DEFAULT_PATH), named)
    return config.read_from(path or DEFAULT_PATH, from_environment)


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if must_exist:
            missing = "the file does not exist; expected a TOML file (see docs/configuration.md)"
            raise ConfigError(str(path), [missing]) from None
        return {}
    except UnicodeDecodeError as error:
        fault = f"cannot be read: expected UTF-8 text{hint_of_encoding(error)}"
        raise ConfigError(str(path), [fault]) from None
    except PermissionError:
        raise ConfigError(str(path), ["this user may not read it; use sudo, or another file"]) from None
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from None
    except tomllib.TOMLDecodeError as error:
        hint = next((hint for sign, hint in _TOML_HINTS.items() if sign in str(error)), "")
        raise ConfigError(str(path), [f"is not valid TOML: {error}{hint}"]) from None


def _override(given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Write the variables' values over the file's settings; return each key that was set with its variable."""
    variables: dict[str, str] = {}
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
        for name in spellings(key.removesuffix("_file")):
            table.pop(name, None)
            table.pop(f"{name}_file", None)
        table[key] = _from_text(value)
        variables[".".join((*sections, key))] = variable
    return variables


def _find_secrets(table: dict[str, Any], config: Path, credentials: str) -> None:
    """Write the full path of each file in the folder of secrets, which may be named without its path.

    A systemd unit gets a copy of each as `secrets_NAME`, beside the copy of its configuration; what a drop-in loads
    is NAME in the folder of its credentials.
    """
    for key, value in table.items():
        if isinstance(value, dict):
            _find_secrets(value, config, credentials)
        elif key.endswith("_file") and isinstance(value, str) and Path(value).parent.name in ("", "secrets"):
            name = Path(value).name
            copies = [config.parent / f"secrets_{name}", config.with_suffix(".secrets") / name]
            loaded = [Path(credentials, name)] if credentials else []
            places = [Path(value), *loaded, *copies, config.parent / "secrets" / name]
            with suppress(ValueError):  # a null byte, which the setting's type refuses
                table[key] = str(next((place for place in places if os.access(place, os.R_OK)), value))


def _say_where(fault: str, config: Path | None) -> str:
    """Add to an error of a missing file where it was looked for."""
    if not re.search(r'given ("[^/\\]*"|a name[^"]*), expected a file that can be read: No such', fault):
        return fault
    path = config or DEFAULT_PATH
    return f"{fault}; it was looked for in {path.with_suffix('.secrets')} and {path.parent / 'secrets'}"


def _from_text(value: str) -> Any:
    """Parse lists and tables, which the environment holds as JSON; leave the rest to the setting's type."""
    if value[:1] in ("[", "{"):
        with suppress(ValueError):  # a template such as {event} starts like JSON
            return json.loads(value)
    return VariableText(value)


def _load_sinks(given: Any, faults: list[str]) -> dict[str, SinkSettings]:
    if not isinstance(given, dict):
        faults.append("sinks: expected tables such as [sinks.ops]")
        return {}
    loaded = {name: _load_sink(table, f"sinks.{name}", faults) for name, table in given.items()}
    return {name: sink for name, sink in loaded.items() if sink}


def _load_sink(given: Any, where: str, faults: list[str]) -> SinkSettings | None:
    try:
        return _load_part(sink_settings(given), given, where, faults)
    except Faults as unknown:
        faults += [f"{where}.{key}: {text}" for key, text in unknown.found]
        return None


def _load_part(model: type[S], given: Any, where: str, faults: list[str]) -> S | None:
    """Validate one part of the configuration.

    Args:
        model: its settings.
        given: what was written.
        where: its key, "" for the top level.
        faults: gets a line for each error.
    """
    if not isinstance(given, dict):
        name = SINK if where.startswith("sinks.") else where
        shown = "a text" if isinstance(given, str) else quote(given)  # a broken table may hold secrets
        faults.append(f"{where}: given {shown}, expected a table: [{name}]")
        return None
    try:
        return model(**given)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            faults += _describe(model, where, details)
        return None


def _describe(model: type[Settings], where: str, details: ErrorDetails) -> Iterator[str]:
    if isinstance(cause := details.get("ctx", {}).get("error"), Faults):
        for name, text in cause.found:
            yield f"{_key(where, [*details['loc'], *filter(None, [name])])}: {text}"
    else:
        yield _fault(model, where, details)


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    settings, name = _owner(model, details["loc"])
    key = _key(where, details["loc"])
    if details["type"] == "extra_forbidden" and name in settings.known_keys():
        return f"{key}: expected only one of {' and '.join(spellings(name))}"
    if details["type"] == "extra_forbidden":
        known = settings.known_keys()
        few = f"; expected {', '.join(known)}" if len(known) <= _FEW else ""
        return f"{key}: unknown key{nearest(name, known, similarity=0.8) or few}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if f"{name}_file" in settings.known_keys() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    expected = expected.replace("String should match", "expected a text that matches")
    expected = _PLAINER.get(details["type"], expected)
    if details["type"] == "tuple_type" and not name:
        expected = f"expected tables: [[{key}]]"
    # An error of the part as a whole, or of a secret in it.
    if not details["loc"]:
        return f"{key}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        return f"{key}_file: given {quote_path(given.file)}, {expected}"
    shown = "***" if name in settings.secret_names() or name.endswith("_file") else quote(given)
    return f"{key}: given {shown}, {expected}"


def _owner(model: type[Settings], path: Sequence[int | str]) -> tuple[type[Settings], str]:
    """Return the innermost settings that a path leads to, and the key in them, "" for all of them."""
    for step in path:
        if isinstance(step, str):
            inner = model.inner_settings(step)
            if inner is None:
                return model, step
            model = inner
    return model, ""


def _key(where: str, path: Sequence[int | str]) -> str:
    """Return the full name of a setting: `approvals.policy.allow[0].event_type`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return "".join([where, *steps]).removeprefix(".") or "the file"


def _name_variable(fault: str, variables: Mapping[str, str]) -> str:
    """Add to an error the environment variable that its value came from, if it came from one."""
    key = fault.partition(":")[0]
    while key and key not in variables:
        key = re.sub(r"(\[[^\[]*|(\A|\.)[^.\[]*)\Z", "", key)  # shorter in any case: a key may have brackets
    return f"{fault} (from the environment variable {variables[key]})" if key else fault
