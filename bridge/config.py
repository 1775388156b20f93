"""Every setting, one frozen model for each part, with secrets from files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bridge.checks import (
    HOST,
    check_one_of,
    check_signing_secrets,
    check_template,
    check_token,
    check_url,
    parse_headers,
    show,
)

DAY_SECONDS = 86_400.0
EVENT_TYPES = [
    f"io.imdsbridge.{name}.v1"
    for name in (
        *("scheduledevent.scheduled", "scheduledevent.started", "scheduledevent.updated"),
        *("scheduledevent.completed", "scheduledevent.canceled", "scheduledevent.ended"),
        *("document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat"),
        *("approval.accepted", "approval.rejected", "approval.failed"),
    )
]
# What an event can have: attributes, Microsoft's properties, and what is added to them.
WHERE_NAMES = (
    *("id", "source", "type", "subject", "dataschema", "correlationid", "causationid", "partitionkey"),
    *(
        "reporter",
        "reporterepoch",
        "EventId",
        "EventType",
        "EventStatus",
        "EventSource",
        "ResourceType",
        "Resources",
    ),
    *(
        "Description",
        "DurationInSeconds",
        "PreviousStatus",
        "Changed",
        "DocumentIncarnation",
        "AffectsThisVm",
        "ApprovalSession",
        "Vm",
    ),
    *("Outcome", "Reason", "DryRun", "Command", "Version"),
)

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


class SecretUnreadable(ValueError):
    """The file of a secret cannot be read, by this user or at all."""


def _check_readable(secret: Secret) -> None:
    try:
        secret.read()
    except OSError as error:
        raise SecretUnreadable(f"expected a file that can be read: {error.strerror}") from None
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
            if not any(fnmatchcase(known, pattern.replace("[", "[[]")) for known in EVENT_TYPES):
                close = get_close_matches(pattern, EVENT_TYPES, n=1)
                hint = f"; did you mean {close[0]}?" if close else f", for example {EVENT_TYPES[0]}"
                raise ValueError(f"expected types that there are{hint}")
        return value

    @field_validator("where")
    @classmethod
    def _check_where(cls, value: Mapping[str, Wanted]) -> Mapping[str, Wanted]:
        for name in value:
            if name.partition(".")[0] not in WHERE_NAMES:
                close = get_close_matches(name, WHERE_NAMES, n=1)
                hint = f"; did you mean {close[0]}?" if close else ", such as EventType or AffectsThisVm"
                raise ValueError(f"expected names of attributes or data{hint}")
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
        if self.namespace and not HOST.fullmatch(self.namespace):
            raise ValueError(f"namespace: given {show(self.namespace)}, expected NAME.servicebus.windows.net")
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


def _check_event_type(value: str) -> str:
    return check_one_of(value, ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"))


def _check_event_source(value: str) -> str:
    return check_one_of(value, ("Platform", "User"))


class RuleSettings(Settings):
    """One rule about events: all that it names must hold. Lists offer alternatives; `resource` takes * and ?."""

    event_type: tuple[Annotated[str, AfterValidator(_check_event_type)], ...] = ()
    event_source: tuple[Annotated[str, AfterValidator(_check_event_source)], ...] = ()
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
