"""Every setting: a TOML file, overridden by the environment, with secrets from files.

`load` finds all faults at once and says of each what was given, what was expected and what comes near.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from bridge.errors import ConfigError

DEFAULT_PATH = Path("/etc/imds-bridge/config.toml")
ENV_PREFIX = "IMDS_BRIDGE__"
DAY_SECONDS = 86_400.0

ApiVersion = Literal[
    "2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"
]


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file that holds it; never shown, and read anew whenever it is asked for."""

    value: str = field(default="", repr=False)
    file: Path | None = None

    def read(self) -> str:
        """Return the secret as it stands now.

        Raises:
            OSError, ValueError: its file cannot be read, is empty or is no text.
        """
        if self.file is None:
            return self.value
        text = self.file.read_text(encoding="utf-8").strip()
        if not text:
            raise ValueError(f"{self.file} is empty")
        return text


class Settings(BaseModel):
    """The base of every part: frozen, no unknown keys, and `x_file` wherever `x` is a secret."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, validate_default=False
    )

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for name in cls.secret_names():
            file = taken.pop(f"{name}_file", None)
            if file is not None and name in taken:
                raise ValueError(f"give either {name} or {name}_file, not both")
            if file is not None:
                taken[name] = _readable(Secret(file=Path(str(file))), f"{name}_file")
            elif isinstance(taken.get(name), str):
                taken[name] = Secret(taken[name])
        return taken

    @classmethod
    def secret_names(cls) -> list[str]:
        """Name the settings that are secrets."""
        return [
            name
            for name, info in cls.model_fields.items()
            if info.annotation is Secret or Secret in get_args(info.annotation)
        ]

    @classmethod
    def known_keys(cls) -> list[str]:
        """Name every key that may be written."""
        return [*cls.model_fields, *(f"{name}_file" for name in cls.secret_names())]


def _readable(secret: Secret, key: str) -> Secret:
    try:
        secret.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{key}: cannot read {secret.file}: {reason}") from None
    return secret


class ImdsSettings(Settings):
    """Where IMDS is and how often it is asked."""

    endpoint: str = "http://169.254.169.254"
    api_version: ApiVersion = "2020-07-01"
    poll_seconds: float = Field(default=1.0, ge=0.2, le=60)

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        return value if value == "discover" else check_url(value.rstrip("/"), allow_http=True)


class SinkSettings(Settings):
    """What every sink has: which events it takes, and for how long they are worth sending.

    `types` may hold `*`; `where` asks for equality with an attribute or a property of `data`, with one of
    several where a list is given. A new sink starts with the next event unless `from_start`.
    """

    kind: str
    types: tuple[str, ...] = ("*",)
    where: Mapping[str, str | bool | int | float | tuple[str | bool | int | float, ...]] = Field(
        default_factory=dict
    )
    max_age_seconds: float = Field(default=7 * DAY_SECONDS, gt=0)
    from_start: bool = False

    @field_validator("types")
    @classmethod
    def _check_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('expected at least one pattern, for example ["io.imdsbridge.scheduledevent.*"]')
        return value


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]


class WebhookSettings(SinkSettings):
    """POST each event to a URL."""

    kind: Literal["webhook"]
    url: Secret
    mode: Literal["structured", "binary"] = "structured"
    bearer_token: Secret | None = None
    headers: Secret | None = None
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    allow_http: bool = False

    @model_validator(mode="before")
    @classmethod
    def _write_headers(cls, given: Any) -> Any:
        """Bring a table of headers into the form that a file has, one `Name: value` a line."""
        if isinstance(given, dict) and isinstance(given.get("headers"), dict):
            lines = "\n".join(f"{name}: {value}" for name, value in given["headers"].items())
            return {**given, "headers": lines}
        return given

    @model_validator(mode="after")
    def _check(self) -> WebhookSettings:
        check_url(self.url.read(), allow_http=self.allow_http)
        if self.headers:
            parse_headers(self.headers.read())
        return self


SINK_KINDS: dict[str, type[SinkSettings]] = {"stdout": StdoutSettings, "webhook": WebhookSettings}


class Config(Settings):
    """The whole configuration.

    `source` and `vm_source` override the CloudEvents source of the group's and of the VM's own events.
    """

    state_dir: Path = Path("/var/lib/imds-bridge")
    stop_seconds: float = Field(default=5.0, ge=0, le=600)
    max_outbox_mb: float = Field(default=1024, gt=0)
    retain_seconds: float = Field(default=7 * DAY_SECONDS, ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "text"] = "auto"
    source: str = ""
    vm_source: str = ""
    imds: ImdsSettings = ImdsSettings()
    sinks: Mapping[str, SinkSettings] = Field(default_factory=dict)


def check_url(url: str, *, allow_http: bool) -> str:
    """Refuse what is no http(s) URL, and plain http to anywhere but this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or url != url.strip():
        raise ValueError("expected a URL such as https://host/path")
    if parts.username or parts.password:
        raise ValueError("expected a URL without user and password; use bearer_token or headers")
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        raise ValueError("expected https; set allow_http = true to send in the clear")
    return url


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_headers(text: str) -> dict[str, str]:
    """Read headers, one `Name: value` a line; blank lines and lines that begin with # do not count."""
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip().replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise ValueError(f"headers, line {number}: expected `Name: value`")
        headers[name.strip()] = value.strip()
    return headers


def load(path: Path | None, environ: Mapping[str, str]) -> Config:
    """Read the configuration from `path` (None: the usual place, where it may be missing) and `environ`.

    Raises:
        ConfigError: with every fault that was found.
    """
    origin = str(path or DEFAULT_PATH)
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    from_environment = _overlay(given, environ)
    faults: list[str] = []
    sinks = given.pop("sinks", {})
    parts: dict[str, Any] = {"sinks": _load_sinks(sinks, faults)}
    imds = given.pop("imds", {})
    parts["imds"] = _load_part(ImdsSettings, imds, "imds", faults) or ImdsSettings()
    config = _load_part(Config, {**given, **parts}, "", faults)
    if faults or config is None:
        raise ConfigError(origin, [_with_variable(fault, from_environment) for fault in faults])
    return config


def _read_toml(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not must_exist:
            return {}
        raise ConfigError(
            str(path), ["there is no such file; expected a TOML file (see README.md)"]
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {error}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), [f"is no valid TOML: {error}"]) from None


def _overlay(given: dict[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Write `IMDS_BRIDGE__SECTION__KEY` over the file's settings; return each key with its variable."""
    taken = {}
    for variable, value in sorted(environ.items()):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        *sections, key = variable[len(ENV_PREFIX) :].lower().split("__")
        table = given
        for section in sections:
            inner = table.get(section)
            table[section] = dict(inner) if isinstance(inner, dict) else {}
            table = table[section]
        if key.endswith("_file"):
            table.pop(key.removesuffix("_file"), None)
        else:
            table.pop(f"{key}_file", None)
        table[key] = _from_text(value)
        taken[".".join((*sections, key))] = variable
    return taken


def _from_text(value: str) -> Any:
    """Read lists and tables, which the environment holds as JSON; leave the rest to the setting's type."""
    if value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # a template such as {event} begins like this, too
    return value


def _load_sinks(given: Any, faults: list[str]) -> dict[str, SinkSettings]:
    if not isinstance(given, dict):
        faults.append(f"sinks: given {_show(given)}, expected tables such as [sinks.ops]")
        return {}
    loaded = {}
    for name, table in given.items():
        where = f"sinks.{name}"
        kind = table.get("kind") if isinstance(table, dict) else None
        model = SINK_KINDS.get(kind) if isinstance(kind, str) else None
        if not isinstance(table, dict):
            faults.append(f"{where}: given {_show(table)}, expected a table: [sinks.{name}]")
        elif model is None:
            kinds = ", ".join(sorted(SINK_KINDS))
            faults.append(
                f"{where}.kind: given {_show(kind)}, expected one of {kinds}{_nearest(kind, SINK_KINDS)}"
            )
        elif (part := _load_part(model, table, where, faults)) is not None:
            loaded[name] = part
    return loaded


S = TypeVar("S", bound=Settings)


def _load_part(model: type[S], given: Any, where: str, faults: list[str]) -> S | None:
    """Build one part; add its faults to `faults`."""
    if not isinstance(given, dict):
        faults.append(f"{where}: given {_show(given)}, expected a table: [{where}]")
        return None
    try:
        return model(**given)
    except ValidationError as error:
        faults += [_fault(model, where, details) for details in error.errors(include_url=False)]
        return None


def _fault(model: type[Settings], where: str, details: ErrorDetails) -> str:
    path = [str(step) for step in details["loc"]]
    name = path[0] if path else ""
    key = ".".join(filter(None, [where, *path]))
    if details["type"] == "extra_forbidden":
        return f"{key}: is no setting{_nearest(name, model.known_keys())}"
    if details["type"] == "missing":
        also = f" (or {name}_file)" if name in model.secret_names() else ""
        return f"{key}: is missing{also}"
    expected = details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if not path:  # the fault is of the part as a whole, or of a secret in it
        return f"{key or 'the file'}: {expected}"
    given = "***" if name in model.secret_names() else _show(details["input"])
    return f"{key}: given {given}, {expected}"


def _nearest(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - a line's worth


def _with_variable(fault: str, variables: Mapping[str, str]) -> str:
    key = fault.partition(":")[0]
    variable = variables.get(key)
    return f"{fault} (from the environment variable {variable})" if variable else fault
