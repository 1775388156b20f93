"""Load the configuration: a TOML file, overridden by the environment; report all errors at once.

Each error says what was given, what was expected, and the nearest name.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bridge.config.base import Faults, Secret, SecretUnreadable, Settings
from bridge.config.models import Config, ImdsSettings, MetricsSettings
from bridge.config.registry import SECTIONS, UnknownNameError, sink_settings, tables
from bridge.config.sinks import SinkSettings
from bridge.config.values import closest, nearest, quote, quote_path
from bridge.errors import ConfigError, SecretFault

S = TypeVar("S", bound=Settings)


def load_part(model: type[S], given: Any, where: str, faults: list[str]) -> S | None:
    """Validate one part of the configuration.

    Args:
        model: its settings.
        given: what was written.
        where: its key, "" for the top level.
        faults: gets a line for each error.
    """
    if not isinstance(given, dict):
        faults.append(f"{where}: given {_kind(given)}, expected a table: [{where}]")
        return None
    try:
        return model(**given)
    except ValidationError as error:
        found = error.errors(include_url=False)
        texts = [text for details in found for text in _describe(model, where, details)]
        texts += _find_hidden(model, given, where, found)
        faults += dict.fromkeys(texts)
        return None


def _kind(value: object) -> str:
    """Quote what was given instead of a table, but no text: it may be a broken table with secrets."""
    return "a text" if isinstance(value, str) else quote(value)


def _find_hidden(
    model: type[Settings], given: Any, where: str, found: Sequence[ErrorDetails]
) -> Iterator[str]:
    """Yield the errors of settings together, which pydantic looks for only where each alone is right.

    They are looked for without the faulty ones, and do not count if they are about those.
    """
    for details in reversed(found):
        given = _without(given, details["loc"])
    about = {name for details in found for name in _about(model, details)}
    try:
        model(**given)
    except ValidationError as error:
        hidden = [one for one in error.errors(include_url=False) if isinstance(_cause(one), Faults)]
        for details in hidden:
            texts = _describe(model, where, details)
            yield from (text for text in texts if about.isdisjoint(re.findall(r"\w+", text)))
        if any(details["loc"] for details in hidden):
            yield from _find_hidden(model, given, where, hidden)


def _about(model: type[Settings], details: ErrorDetails) -> Iterator[str]:
    """Yield the key that an error is about, and the one that was meant."""
    settings, key = _owner(model, details["loc"])
    yield key
    yield closest(key, settings.known_keys()) or key


def _without(given: Any, path: Sequence[int | str]) -> Any:
    """Return tables and lists without what is at a path in them."""
    if not path:
        return given
    step, *rest = path
    if isinstance(given, dict):
        others = {key: inner for key, inner in given.items() if key not in (step, f"{step}_file")}
        return {**others, step: _without(given[step], rest)} if rest and step in given else others
    if isinstance(given, list) and isinstance(step, int):
        # An empty table stands for a faulty one: that there is one may matter.
        kept = [_without(given[step], rest)] if rest else [{}] if isinstance(given[step], dict) else []
        return [*given[:step], *kept, *given[step + 1 :]]
    return given


def _owner(model: type[Settings], path: Sequence[int | str]) -> tuple[type[Settings], str]:
    """Return the innermost settings that a path leads to, and the key in them, "" for all of them."""
    for step in path:
        if isinstance(step, str):
            inner = model.inner_settings(step)
            if inner is None:
                return model, step
            model = inner
    return model, ""


def _describe(model: type[Settings], where: str, details: ErrorDetails) -> Iterator[str]:
    cause = _cause(details)
    if isinstance(cause, Faults):
        for name, text in cause.found:
            yield f"{_key(where, [*details['loc'], *filter(None, [name])])}: {text}"
    else:
        yield _fault(model, where, details)


def _cause(details: ErrorDetails) -> object:
    return details.get("ctx", {}).get("error")


def _key(where: str, path: Sequence[int | str]) -> str:
    """Return the full name of a setting: `approvals.policy.allow[0].event_type`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
    return (
        "".join([where, *steps]).removeprefix(".").replace("signing_secrets", "signing_secret") or "the file"
    )


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    settings, name = _owner(model, details["loc"])
    key = _key(where, details["loc"])
    if details["type"] == "extra_forbidden":
        return f"{key}: unknown key{_hint(settings, name, where)}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if f"{name}_file" in settings.known_keys() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    expected = _PLAINER.get(details["type"], expected)
    # An error of the part as a whole, or of a secret in it.
    if not details["loc"]:
        return f"{key}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        text = f"{key}_file: given {quote_path(given.file)}, {expected}"
        return SecretFault(text) if isinstance(_cause(details), SecretUnreadable) else text
    shown = "***" if name in settings.secret_names() or name.endswith("_file") else quote(given)
    return f"{key}: given {shown}, {expected}"


def _hint(settings: type[Settings], name: str, where: str) -> str:
    """Return the key that an unknown one is likely to mean: of the same table, else of another one."""
    if near := closest(name, settings.known_keys(), similarity=0.75):
        return f"; did you mean {near}?"
    elsewhere: dict[str, str] = {}
    section = where.partition(".")[0]
    for table in sorted(tables(), key=lambda table: table.name.partition(".")[0] != section):
        for key in table.settings.known_keys():
            elsewhere.setdefault(key, table.full_name(key))
    if far := closest(name, elsewhere, similarity=0.8):
        return f"; did you mean {elsewhere[far]}?"
    return nearest(name, settings.known_keys())


_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "model_type": "expected a table",
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}


ENV_PREFIX = "IMDS_BRIDGE__"


def override(given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
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
        for name in _spellings(key.removesuffix("_file")):
            table.pop(name, None)
            table.pop(f"{name}_file", None)
        table[key] = _from_text(value)
        variables[".".join((*sections, key))] = variable
    return variables


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


def name_variable(fault: str, variables: Mapping[str, str]) -> str:
    """Add to an error the environment variable that its value came from, if it came from one."""
    key = fault.partition(":")[0]
    while key and key not in variables:
        key = re.sub(r"(\[[^\[]*|(\A|\.)[^.\[]*)\Z", "", key)  # shorter in any case: a key may have brackets
    return type(fault)(f"{fault} (from the environment variable {variables[key]})") if key else fault


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
    from bridge.config.bus import ServiceBusSettings  # noqa: PLC0415 - few configurations need it

    for name, sink in sinks.items():
        if source and isinstance(sink, ServiceBusSettings) and sink.address == source.address:
            key = "topic" if sink.topic else "queue"
            yield (
                f"sinks.{name}.{key}: given {quote(sink.entity)}, the entity that [{section}] receives from; "
                f"expected another one: each event sent there would be received as {_RECEIVED_AS[section]}"
            )
