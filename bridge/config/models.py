"""Every setting, one frozen model for each part."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from bridge.config.base import DAY_SECONDS, Secret, Settings, SinkSettings
from bridge.config.tls import check_ca, check_certificate
from bridge.config.validators import (
    HOST,
    check_one_of,
    check_proxy,
    check_routing_key,
    check_signing_secrets,
    check_template,
    check_time_zone,
    check_token,
    check_url,
    parse_headers,
    read_template,
    show,
)

_TOKEN = re.compile(r"[!-~]+")
_TOPIC = re.compile(r"[A-Za-z0-9-]{3,50}")
CUSTOM_API_VERSION = "2018-01-01"
NAMESPACE_API_VERSION = "2024-06-01"

ApiVersion = Literal[
    "2017-03-01", "2017-08-01", "2017-11-01", "2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"
]


class ImdsSettings(Settings):
    """Where IMDS is and how often it is asked."""

    endpoint: str = "http://169.254.169.254"
    api_version: ApiVersion = "2020-07-01"
    poll_seconds: float = Field(default=1.0, ge=0.2, le=60)

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        return value if value == "discover" else check_url(value.rstrip("/"), allow_http=True)


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]


class HttpSettings(Settings):
    """How a receiver is reached over HTTP.

    With `ca_file`, only the authorities in it are trusted. `proxy` may hold user and password.
    """

    allow_http: bool = False
    ca_file: Path | None = None
    client_certificate_file: Path | None = None
    client_key_file: Path | None = None
    proxy: Secret | None = None
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    secret_checks: ClassVar = {"proxy": check_proxy}

    @model_validator(mode="after")
    def _check_certificates(self) -> HttpSettings:
        if self.client_key_file and not self.client_certificate_file:
            raise ValueError("client_key_file: expected a client_certificate_file, too")
        try:
            name = "client_certificate_file"
            if self.client_certificate_file:
                check_certificate(self.client_certificate_file, self.client_key_file)
            name = "ca_file"
            if self.ca_file:
                check_ca(self.ca_file)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return self


def _join_signing_secrets(given: Any) -> Any:
    """Take one signing secret or a list of them; a file holds one a line."""
    if not isinstance(given, dict):
        return given
    taken = dict(given)
    for suffix in ("", "_file"):
        if f"signing_secret{suffix}" in taken:
            taken[f"signing_secrets{suffix}"] = taken.pop(f"signing_secret{suffix}")
    if isinstance(taken.get("signing_secrets"), list):
        taken["signing_secrets"] = "\n".join(map(str, taken["signing_secrets"]))
    return taken


# What each format is made for: notices while they are news, of this VM, as fast as the receiver takes them.
_NOTICES: Mapping[str, Any] = {
    "types": ["io.imdsbridge.scheduledevent.*", "io.imdsbridge.approval.*"],
    "max_age_seconds": 3600.0,
}
_FORMAT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "teams": {**_NOTICES, "max_per_second": 4.0},
    "slack": {**_NOTICES, "max_per_second": 1.0},
    "pagerduty": {
        **_NOTICES,
        "types": ["io.imdsbridge.scheduledevent.*"],
        "max_per_second": 2.0,
        "url": "https://events.pagerduty.com/v2/enqueue",
    },
    "template": _NOTICES,
}


class WebhookSettings(SinkSettings, HttpSettings):
    """POST each event to a URL, as a CloudEvent or in a format for people.

    `mode` is of `format = "cloudevents"`. Formats for people take notices and receipts that are younger than an
    hour and name this VM, unless told otherwise. `time_zone` is an IANA name; without it Teams and Slack show
    each reader's own, others UTC. `routing_key` is PagerDuty's, `template` is of `format = "template"`.
    """

    kind: Literal["webhook"]
    url: Secret
    format: Literal["cloudevents", "teams", "slack", "pagerduty", "template"] = "cloudevents"
    mode: Literal["structured", "binary", "batch"] = "structured"
    bearer_token: Secret | None = None
    headers: Secret | None = None
    signing_secrets: Secret | None = None
    time_zone: str = ""
    routing_key: Secret | None = None
    template: Any = None
    secret_checks: ClassVar = {
        **HttpSettings.secret_checks,
        "bearer_token": check_token,
        "headers": parse_headers,
        "routing_key": check_routing_key,
        "signing_secrets": check_signing_secrets,
    }

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        """Fill in the format's defaults, and bring headers and templates into one form."""
        if not isinstance(given, dict):
            return given
        taken = dict(_join_signing_secrets(given))
        defaults = dict(_FORMAT_DEFAULTS.get(str(taken.get("format")), {}))
        if "url_file" in taken:
            defaults.pop("url", None)
        if isinstance(taken.get("headers"), dict):
            taken["headers"] = "\n".join(f"{name}: {value}" for name, value in taken["headers"].items())
        if "template_file" in taken:
            taken["template"] = read_template(Path(str(taken.pop("template_file"))))
        return {**defaults, **taken}

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: Secret, info: ValidationInfo) -> Secret:
        check_url(value.read(), allow_http=info.data.get("allow_http", True))
        return value

    @field_validator("time_zone")
    @classmethod
    def _check_time_zone(cls, value: str) -> str:
        return check_time_zone(value)

    @model_validator(mode="after")
    def _check_format(self) -> WebhookSettings:
        for format_, name in {"pagerduty": "routing_key", "template": "template"}.items():
            is_given = getattr(self, name) is not None
            if self.format == format_ and not is_given:
                raise ValueError(f'{name}: is missing (or {name}_file), which format = "{format_}" needs')
            if self.format != format_ and is_given:
                raise ValueError(f'{name}: expected format = "{format_}" with it, given "{self.format}"')
        try:
            json.dumps(self.template, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                "template: expected texts, numbers, true, false, tables and lists only"
            ) from None
        if self.mode != "structured" and self.format != "cloudevents":
            raise ValueError('mode: expected format = "cloudevents" with it')
        return self

    @property
    def is_chat_format(self) -> bool:
        """Whether the format is one for people."""
        return self.format != "cloudevents"


class IdentitySettings(Settings):
    """Who this process is to Azure.

    `credential` is "managed_identity" (of the VM; `client_id` chooses a user-assigned one) or "default",
    which tries the environment, workload identity, managed identity and the developer's tools in turn.
    """

    credential: Literal["managed_identity", "default"] = "managed_identity"
    client_id: str = ""


class EventGridSettings(SinkSettings, HttpSettings, IdentitySettings):
    """Send the events to an Event Grid topic, custom or of a namespace, with a key or the identity.

    `endpoint` is the topic's URL as the portal shows it: `https://.../api/events` of a custom topic, or a
    namespace's address with `topic`. `flavor` says which it is where the endpoint does not.
    """

    kind: Literal["eventgrid"]
    endpoint: str
    flavor: Literal["custom", "namespace"] | None = None
    topic: str = ""
    key: Secret | None = None
    secret_checks: ClassVar = {**HttpSettings.secret_checks, "key": check_token}

    @model_validator(mode="after")
    def _check_topic(self) -> EventGridSettings:
        try:
            check_url(self.endpoint, allow_http=self.allow_http)
            self.publish_url()
        except ValueError as error:
            raise ValueError(f"endpoint: given {show(self.endpoint)}, {error}") from None
        return self

    def publish_url(self) -> tuple[str, str]:
        """Return the flavor and the URL to post batches to.

        Raises:
            ValueError: the endpoint does not say which kind of topic it is.
        """
        parts = urlsplit(self.endpoint)
        path = parts.path.rstrip("/")
        named = re.fullmatch(r"/topics/([^/:]+)(:publish)?", path)
        flavor = self.flavor or (
            "namespace" if self.topic or named else "custom" if path == "/api/events" else ""
        )
        if flavor == "custom" and path in ("", "/api/events") and not self.topic:
            return flavor, f"{parts.scheme}://{parts.netloc}/api/events?api-version={CUSTOM_API_VERSION}"
        topic = self.topic or (named[1] if named else "")
        if flavor == "namespace" and _TOPIC.fullmatch(topic) and (named or not path):
            query = f"api-version={NAMESPACE_API_VERSION}"
            return flavor, f"{parts.scheme}://{parts.netloc}/topics/{topic}:publish?{query}"
        if self.topic and path:
            raise ValueError(
                "a custom topic's; leave topic out, or give a namespace's address without a path"
            )
        raise ValueError(
            "expected https://TOPIC.REGION-1.eventgrid.azure.net/api/events (a custom topic), or "
            'https://NAMESPACE.REGION-1.eventgrid.azure.net with topic = "..."'
        )


class BusSettings(IdentitySettings):
    """How to reach a Service Bus: a namespace with an identity, or a connection string."""

    namespace: str = ""
    connection_string: Secret | None = None
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


class ReceiverSettings(BusSettings):
    """What is received from: a queue, or a topic's subscription."""

    subscription: str = ""

    @model_validator(mode="after")
    def _check_subscription(self) -> ReceiverSettings:
        if bool(self.topic) != bool(self.subscription):
            raise ValueError("a topic needs a subscription, and a subscription a topic")
        return self


class RelaySettings(ReceiverSettings):
    """Where `imds-bridge relay` takes events from, for the same sinks."""


class ApprovalSettings(ReceiverSettings):
    """Where approve commands come from, and what they may do.

    `session` is a template of {resource_group} and {vm}, in lower case. With `signing_secrets`, one a line, a
    command needs a Standard Webhooks signature. A command for an event that does not stand in the document
    yet waits for `grace_seconds`. `receipts_subscription` is where `approve --wait` looks for the receipt.
    """

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
        return _join_signing_secrets(given)

    @field_validator("session")
    @classmethod
    def _check_session(cls, value: str) -> str:
        return check_template(value, ("vm", "resource_group"))

    @model_validator(mode="after")
    def _check_approvals(self) -> ApprovalSettings:
        if self.signing_secrets:
            check_signing_secrets(self.signing_secrets.read())
        return self


SINK_KINDS: dict[str, type[SinkSettings]] = {
    "eventgrid": EventGridSettings,
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

    state_dir: Path = Path(
        r"C:\ProgramData\imds-bridge\state" if sys.platform == "win32" else "/var/lib/imds-bridge"
    )
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
    relay: RelaySettings | None = None
