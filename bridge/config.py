"""Every setting: a TOML file, overridden by the environment, with secrets from files.

`load` finds all faults at once and says of each what was given, what was expected and what comes near.
"""

from __future__ import annotations

import json
import re
import tomllib
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from bridge.errors import ConfigError, SecretFault

DEFAULT_PATH = Path("/etc/imds-bridge/config.toml")
ENV_PREFIX = "IMDS_BRIDGE__"
DAY_SECONDS = 86_400.0
EVENT_TYPES = "io.imdsbridge."

_TOKEN = re.compile(r"[!-~]+")

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
        try:
            text = self.file.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} is no UTF-8 text") from None
        if not text:
            raise ValueError(f"{self.file} is empty")
        return text


class Settings(BaseModel):
    """The base of every part: frozen, no unknown keys, and `x_file` wherever `x` is a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for name in cls.secret_names():
            file, value = taken.pop(f"{name}_file", None), taken.get(name)
            if file is not None:
                taken[name] = Secret(value="" if value is None else str(value), file=Path(str(file)))
            elif isinstance(value, str):
                taken[name] = Secret(value)
        return taken

    @field_validator("*")
    @classmethod
    def _check_secret(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Secret):
            if value.file and value.value:
                raise ValueError(f"expected either {info.field_name} or {info.field_name}_file, not both")
            _check_readable(value)
        return value

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


class _SecretUnreadable(ValueError):
    """The file of a secret cannot be read, by this user or at all."""


def _check_readable(secret: Secret) -> None:
    try:
        secret.read()
    except OSError as error:
        raise _SecretUnreadable(f"expected a file that can be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"expected a file that holds the secret: {error}") from None


class ImdsSettings(Settings):
    """Where IMDS is and how often it is asked."""

    endpoint: str = "http://169.254.169.254"
    api_version: ApiVersion = "2020-07-01"
    poll_seconds: float = Field(default=1.0, ge=0.2, le=60)

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        return value if value == "discover" else check_url(value.rstrip("/"), allow_http=True)


def _check_wanted(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise ValueError("expected a text, a number, true or false, or a list of them")
    return value


Wanted = Annotated[Any, AfterValidator(_check_wanted)]


class SinkSettings(Settings):
    """What every sink has: which events it takes, and for how long they are worth sending.

    `types` may hold `*`; `where` asks for equality with an attribute or a property of `data`, with one of
    several where a list is given. A new sink starts with the next event unless `from_start`.
    """

    kind: str
    types: tuple[str, ...] = ("*",)
    where: Mapping[str, Wanted] = Field(default_factory=dict)
    max_age_seconds: float = Field(default=7 * DAY_SECONDS, gt=0)
    from_start: bool = False

    @field_validator("types")
    @classmethod
    def _check_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('expected at least one pattern, for example ["io.imdsbridge.scheduledevent.*"]')
        for pattern in value:
            head = pattern.partition("*")[0]
            if not (head.startswith(EVENT_TYPES) or ("*" in pattern and EVENT_TYPES.startswith(head))):
                raise ValueError(f"expected types that begin with {EVENT_TYPES}, for example {EVENT_TYPES}*")
        return value


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]


class WebhookSettings(SinkSettings):
    """POST each event to a URL."""

    kind: Literal["webhook"]
    allow_http: bool = False
    url: Secret
    mode: Literal["structured", "binary"] = "structured"
    bearer_token: Secret | None = None
    headers: Secret | None = None
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)

    @model_validator(mode="before")
    @classmethod
    def _write_headers(cls, given: Any) -> Any:
        """Bring a table of headers into the form that a file has, one `Name: value` a line."""
        if isinstance(given, dict) and isinstance(given.get("headers"), dict):
            lines = "\n".join(f"{name}: {value}" for name, value in given["headers"].items())
            return {**given, "headers": lines}
        return given

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: Secret, info: ValidationInfo) -> Secret:
        check_url(value.read(), allow_http=info.data.get("allow_http", True))
        return value

    @field_validator("bearer_token")
    @classmethod
    def _check_token(cls, value: Secret | None) -> Secret | None:
        if value:
            check_token(value.read())
        return value

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, value: Secret | None) -> Secret | None:
        if value:
            parse_headers(value.read())
        return value


class BusSettings(Settings):
    """How to reach a Service Bus: a namespace with an identity, or a connection string.

    `credential` is "managed_identity" (of the VM; `client_id` chooses a user-assigned one) or "default",
    which tries the environment, workload identity, managed identity and the developer's tools in turn.
    """

    namespace: str = ""
    connection_string: Secret | None = None
    credential: Literal["managed_identity", "default"] = "managed_identity"
    client_id: str = ""
    transport: Literal["amqp", "websocket"] = "amqp"
    http_proxy: str = ""
    topic: str = ""
    queue: str = ""

    @model_validator(mode="after")
    def _check_bus(self) -> BusSettings:
        if bool(self.namespace) == (self.connection_string is not None):
            raise ValueError("give either namespace or connection_string (or connection_string_file)")
        if self.namespace and not _HOST.fullmatch(self.namespace):
            raise ValueError(
                f"namespace: given {_show(self.namespace)}, expected NAME.servicebus.windows.net"
            )
        if self.connection_string and "Endpoint=" not in self.connection_string.read():
            raise ValueError(
                "connection_string: expected Endpoint=sb://...;SharedAccessKeyName=...;SharedAccessKey=..."
            )
        if bool(self.topic) == bool(self.queue):
            raise ValueError("give either topic or queue")
        if self.http_proxy:
            if self.transport != "websocket":
                raise ValueError('http_proxy: expected transport = "websocket", AMQP itself knows no proxy')
            check_url(self.http_proxy, allow_http=True)
        return self

    @property
    def entity(self) -> str:
        """The topic's or queue's name."""
        return self.topic or self.queue

    @property
    def address(self) -> tuple[str, str]:
        """The namespace's host and the entity, so that the same place compares equal however it is written."""
        host = self.namespace
        if self.connection_string:
            endpoint = re.search(r"(?i)(?:^|;)\s*Endpoint=([^;]+)", self.connection_string.read())
            host = urlsplit(endpoint[1].strip()).netloc if endpoint else ""
        return host.lower().removesuffix(":5671"), self.entity.strip("/").lower()


class ServiceBusSettings(SinkSettings, BusSettings):
    """Send each event to a Service Bus topic or queue.

    `session` is a template for the session id, of {event}, {vm}, {resource_group} and {type}.
    """

    kind: Literal["servicebus"]
    session: str = ""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)

    @field_validator("session")
    @classmethod
    def _check_session(cls, value: str) -> str:
        return check_template(value, ("event", "vm", "resource_group", "type"))


class RuleSettings(Settings):
    """One rule about events: all that it names must hold. Lists offer alternatives; `resource` takes * and ?."""

    event_type: tuple[str, ...] = ()
    event_source: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()
    min_duration_seconds: int | None = Field(default=None, ge=0)
    max_duration_seconds: int | None = Field(default=None, ge=0)
    min_notice_seconds: float | None = None
    max_notice_seconds: float | None = None


class AutoSettings(RuleSettings):
    """A rule by which events are approved without a command.

    `group` also takes events that concern other VMs: the first of Resources approves at once, each next one
    ten seconds later.
    """

    group: bool = False


class PolicySettings(Settings):
    """What commands may approve: deny wins, and what no allow rule matches is denied."""

    scope: Literal["self", "group"] = "self"
    allow: tuple[RuleSettings, ...] = ()
    deny: tuple[RuleSettings, ...] = ()


class ApprovalSettings(BusSettings):
    """Where approve commands come from, and what they may do.

    `session` is a template of {resource_group} and {vm}, in lower case. With `signing_secrets`, one a line, a
    command needs a Standard Webhooks signature. A command for an event that does not stand in the document
    yet waits for `grace_seconds`. `receipts_subscription` is where `approve --wait` looks for the receipt.
    """

    subscription: str = ""
    session: str = ""
    grace_seconds: float = Field(default=30.0, ge=0, le=600)
    signing_secrets: Secret | None = None
    receipts_topic: str = ""
    receipts_subscription: str = ""
    policy: PolicySettings = PolicySettings()
    auto: tuple[AutoSettings, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _join_secrets(cls, given: Any) -> Any:
        """Take one secret or a list of them; a file holds one a line."""
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for suffix in ("", "_file"):
            if f"signing_secret{suffix}" in taken:
                taken[f"signing_secrets{suffix}"] = taken.pop(f"signing_secret{suffix}")
        if isinstance(taken.get("signing_secrets"), list):
            taken["signing_secrets"] = "\n".join(map(str, taken["signing_secrets"]))
        return taken

    @field_validator("session")
    @classmethod
    def _check_session(cls, value: str) -> str:
        return check_template(value, ("vm", "resource_group"))

    @model_validator(mode="after")
    def _check_approvals(self) -> ApprovalSettings:
        if bool(self.topic) != bool(self.subscription):
            raise ValueError("a topic needs a subscription, and a subscription a topic")
        if self.signing_secrets:
            check_signing_secrets(self.signing_secrets.read())
        return self


def check_signing_secrets(text: str) -> list[str]:
    """Read Standard Webhooks secrets, one a line: `whsec_` and base64 of 24 to 64 bytes."""
    secrets = [line.strip() for line in text.splitlines() if line.strip()]
    for secret in secrets:
        try:
            size = len(b64decode(secret.removeprefix("whsec_"), validate=True))
        except ValueError:
            size = 0
        if not 24 <= size <= 64:  # noqa: PLR2004 - Standard Webhooks 1.0.0
            raise ValueError("signing_secret: expected whsec_ and the base64 of 24 to 64 bytes")
    if not secrets:
        raise ValueError("signing_secret: expected at least one")
    return secrets


SINK_KINDS: dict[str, type[SinkSettings]] = {
    "servicebus": ServiceBusSettings,
    "stdout": StdoutSettings,
    "webhook": WebhookSettings,
}


def _check_source(value: str) -> str:
    if value and not _TOKEN.fullmatch(value):
        raise ValueError("expected a URI without blanks, for example urn:contoso:fleet")
    return value


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
    source: Annotated[str, AfterValidator(_check_source)] = ""
    vm_source: Annotated[str, AfterValidator(_check_source)] = ""
    imds: ImdsSettings = ImdsSettings()
    sinks: Mapping[str, SinkSettings] = Field(default_factory=dict)
    approvals: ApprovalSettings | None = None


_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9-]+)*(:\d+)?")


def check_template(template: str, names: tuple[str, ...]) -> str:
    """Refuse a template with placeholders other than `names`."""
    unknown = [name for name in re.findall(r"\{([^{}]*)\}", template) if name not in names]
    if unknown or template.count("{") != template.count("}"):
        expected = ", ".join(f"{{{name}}}" for name in names)
        raise ValueError(f"expected only the placeholders {expected}")
    return template


def check_url(url: str, *, allow_http: bool) -> str:
    """Refuse what is no http(s) URL, and plain http to anywhere but this machine."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or not _TOKEN.fullmatch(url):
        raise ValueError("expected a URL such as https://host/path")
    if parts.username or parts.password:
        raise ValueError("expected a URL without user and password; use bearer_token or headers")
    if parts.scheme == "http" and not allow_http and not _is_loopback(host):
        raise ValueError("expected https; set allow_http = true to send in the clear")
    return url


def check_token(token: str) -> str:
    """Refuse what cannot stand in an Authorization header."""
    if not _TOKEN.fullmatch(token):
        raise ValueError("expected a token: one word of ASCII letters, digits and signs")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_HEADER_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


def parse_headers(text: str) -> dict[str, str]:
    """Read headers, one `Name: value` a line; blank lines and lines that begin with # do not count."""
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, value = line.partition(":")
        if (
            not colon
            or not _HEADER_NAME.fullmatch(name.strip())
            or not _HEADER_VALUE.fullmatch(value.strip())
        ):
            raise ValueError(f"headers, line {number}: expected `Name: value` in printable ASCII")
        headers[name.strip()] = value.strip()
    return headers


def load_state_dir(path: Path | None, environ: Mapping[str, str]) -> Path:
    """Read only where the state is: whoever looks at it need not be able to read the secrets.

    Raises:
        ConfigError: the file cannot be read.
    """
    given = _read_toml(path or DEFAULT_PATH, must_exist=path is not None)
    _overlay(given, environ)
    return Path(str(given.get("state_dir", Config.model_fields["state_dir"].default)))


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
    if "approvals" in given:
        parts["approvals"] = _load_part(ApprovalSettings, given.pop("approvals"), "approvals", faults)
    faults += _circles(parts["sinks"], parts.get("approvals"))
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
        for number, section in enumerate(sections):
            # the file may have written the name of a sink in any letter case
            name = next((name for name in table if name.lower() == section), section)
            sections[number] = name
            inner = table.get(name)
            table[name] = dict(inner) if isinstance(inner, dict) else {}
            table = table[name]
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
        faults.append("sinks: given no table, expected tables such as [sinks.ops]")
        return {}
    loaded = {}
    for name, table in given.items():
        where = f"sinks.{name}"
        kind = table.get("kind") if isinstance(table, dict) else None
        model = SINK_KINDS.get(kind) if isinstance(kind, str) else None
        if not isinstance(table, dict):
            faults.append(f"{where}: given no table, expected [sinks.{name}] with a kind")
        elif model is None:
            kinds = ", ".join(sorted(SINK_KINDS))
            faults.append(
                f"{where}.kind: given {_show(kind)}, expected one of {kinds}{_nearest(kind, SINK_KINDS)}"
            )
        elif (part := _load_part(model, table, where, faults)) is not None:
            loaded[name] = part
    return loaded


def _circles(sinks: Mapping[str, SinkSettings], approvals: ApprovalSettings | None) -> Iterable[str]:
    """Find sinks that would send receipts to where commands are read."""
    for name, sink in sinks.items():
        if approvals and isinstance(sink, ServiceBusSettings) and sink.address == approvals.address:
            key = "topic" if sink.topic else "queue"
            yield (
                f"sinks.{name}.{key}: given {_show(sink.entity)}, which is the approvals entity itself; "
                "expected another: what is published there would be read as commands"
            )


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
    expected = _PLAINER.get(details["type"], expected)
    if not path:  # the fault is of the part as a whole, or of a secret in it
        return f"{key or 'the file'}: {expected}"
    given = details["input"]
    if isinstance(given, Secret) and given.file:
        text = f"{key}_file: given {_show(given.file)}, {expected}"
        return SecretFault(text) if isinstance(details["ctx"]["error"], _SecretUnreadable) else text
    shown = "***" if name in model.secret_names() else _show(given)
    return f"{key}: given {shown}, {expected}"


_PLAINER = {
    "tuple_type": 'expected a list, for example ["a", "b"]',
    "mapping_type": "expected a table",
    "dataclass_type": "expected a text",
    "path_type": "expected a path",
    "string_type": "expected a text",
}


def _nearest(name: object, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


# What of a URL may be secret: its query, and user and password.
_SECRET_IN_URL = re.compile(r'(?<=://)[^\s"/@]*(?=@)|(?<=\?)[^\s"]+')


def _show(value: object) -> str:
    text = _SECRET_IN_URL.sub("***", json.dumps(value, default=str))
    return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - a line's worth


def _with_variable(fault: str, variables: Mapping[str, str]) -> str:
    key = fault.partition(":")[0]
    while key and key not in variables:
        key = key.rpartition(".")[0]
    return type(fault)(f"{fault} (from the environment variable {variables[key]})") if key else fault
