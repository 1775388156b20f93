"""The settings of sinks: what every sink has, what HTTP adds, and each kind without Azure's identity."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import tzinfo
from fnmatch import translate
from functools import partial
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import quote
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, WithJsonSchema, field_validator

from bridge.config import values
from bridge.config.base import DAY_SECONDS, Fault, Faults, Secret, Settings, try_setting
from bridge.contract.types import ATTRIBUTES, EVENT_TYPES, KNOWN_VALUES, PROPERTIES, is_property

_FAMILIES = tuple(dict.fromkeys(f"{known.rsplit('.', 2)[0]}.*" for known in EVENT_TYPES))


def expression_of(pattern: str) -> str:
    """Return the regular expression of a pattern with `*` for any text, which takes linear time."""
    return translate(re.sub(r"[\[?]", r"[\g<0>]", pattern))


def check_pattern(pattern: str) -> str:
    """Refuse a pattern that matches no type of event.

    Raises:
        ValueError: with the nearest type.
    """
    expression = expression_of(pattern)
    if not any(re.fullmatch(expression, known) for known in EVENT_TYPES):
        hint = values.nearest(pattern, [*EVENT_TYPES, *_FAMILIES]) or f", for example {EVENT_TYPES[0]}"
        raise ValueError(f"expected existing event types{hint}")
    return pattern


def alternatives(wanted: Any) -> Sequence[Any]:
    """Return the values that a setting allows, which may be written without a list if there is only one."""
    return wanted if isinstance(wanted, list | tuple) else [wanted]


def _check_wanted(value: Any) -> Any:
    if isinstance(value, dict):
        raise ValueError('expected no table; the name of an inner property needs quotes: "Vm.Name"')
    items = alternatives(value)
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise ValueError("expected a text, a number, true or false, or a list of them")
    return value


_VALUE = {"type": ["string", "boolean", "number"]}
Wanted = Annotated[
    Any,
    AfterValidator(_check_wanted),
    WithJsonSchema({"anyOf": [_VALUE, {"type": "array", "items": _VALUE, "minItems": 1}]}),
]


Pattern = Annotated[
    str,
    AfterValidator(check_pattern),
    WithJsonSchema(
        {
            "type": "string",
            "if": {"pattern": r"\*"},
            "then": {"pattern": r"^(\*|io?\*|io\.)"},
            "else": {"enum": list(EVENT_TYPES)},
            "anyOf": [{"enum": ["*", *_FAMILIES, *EVENT_TYPES]}, True],  # for editors to complete
        }
    ),
]
PositiveSeconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0.001, le=10_000)]


def _find_criterion_faults(name: str, wanted: Any) -> Iterator[Fault]:
    if name not in ATTRIBUTES and not is_property(name):
        hint = values.nearest(name, [*ATTRIBUTES, *PROPERTIES]) or ", such as EventType or AffectsThisVm"
        yield name, f"expected an attribute or a property of an event's data{hint}"
    if name == "AffectsThisVm" and not isinstance(wanted, bool):
        yield name, f"given {values.quote(wanted)}, expected true or false"
    known = KNOWN_VALUES["Outcome"]  # unlike IMDS's values, these are imds-bridge's own
    for value in alternatives(wanted) if name == "Outcome" else ():
        if value not in known:
            expected = f"expected one of {', '.join(known)}{values.nearest(value, known)}"
            yield name, f"given {values.quote(value)}, {expected}"


class SinkSettings(Settings):
    """The settings of every sink: which events it takes, and how old they may become."""

    kind: str
    """What the sink sends to."""
    types: tuple[Pattern, ...] = ("*",)
    """The types of the events to send; `*` matches any text. Example: `["io.imdsbridge.scheduledevent.*"]`."""
    where: Mapping[str, Wanted] = Field(default_factory=dict)
    """The values that attributes and properties of `data` must have; a list gives alternatives, `Vm.Name` names an
    inner property. Example: `{ EventType = ["Reboot", "Redeploy"], AffectsThisVm = true }`."""
    scope: Literal["self", "first", "all"] | None = None
    """`self`: events that name this VM or no VM; `first`: events that name it first or no VM; `all`. The default is
    `self` for chat formats and exec, else `all`; a relay's sinks have no scope."""
    max_age_seconds: PositiveSeconds = 7 * DAY_SECONDS
    """Older events become dead letters. Example: `86400`."""
    from_start: bool = False
    """Whether a new sink also gets the events that are already stored."""
    max_per_second: Rate | None = None
    """The most requests a second, each of one event or one batch; by default without a limit. Example: `10`."""
    is_chat_format: ClassVar[bool] = False
    """Whether people read it: then it gets only events that name this VM, unless `scope` says otherwise."""
    acts_on_this_vm: ClassVar[bool] = False
    """Whether it changes this VM, which other VMs' events must not do, unless `scope` says otherwise."""
    drops_copies: ClassVar[bool] = False
    """Whether the receiver keeps one of the copies that a fleet sends, so that most need not be sent."""
    has_formats: ClassVar[bool] = False
    """Whether the settings of each `format` are read instead, which are subclasses of these."""
    _check_types = field_validator("types")(values.check_some)
    _console_url: str = PrivateAttr(default="")
    _signing_secrets: Secret | None = PrivateAttr(default=None)

    def linked(self, console_url: str, signing_secrets: Secret | None = None) -> Self:
        """Return the settings with the address of the console, for links, and what messages are signed with."""
        linked = self.model_copy()
        linked._console_url, linked._signing_secrets = console_url, signing_secrets
        return linked

    @property
    def gather_seconds(self) -> float | None:
        """How long a relay gathers events for one message, None if each is one."""
        return None

    @field_validator("where")
    @classmethod
    def _check_where(cls, value: Mapping[str, Wanted]) -> Mapping[str, Wanted]:
        found = [fault for criterion in value.items() for fault in _find_criterion_faults(*criterion)]
        if found:
            raise Faults(found)
        return value

    def warnings(self) -> list[str]:
        """Describe what is accepted but looks like a slip: Azure may add values, so none is refused."""
        return [
            f"where.{name}: given {values.quote(value)}{hint}"
            for name, wanted in self.where.items()
            for value in alternatives(wanted)
            if value not in (known := KNOWN_VALUES.get(name, ()))
            and (hint := values.nearest(value, known, similarity=values.LIKELY))
        ]


MAX_ID_LENGTH = 100  # percent-encoded; IMDS's are UUIDs


class ChatSettings(Settings):
    """What all messages for people have in common: by default, notices and receipts of this VM of the last hour."""

    types: tuple[Pattern, ...] = ("io.imdsbridge.scheduledevent.*", "io.imdsbridge.approval.*")
    max_age_seconds: PositiveSeconds = 3600.0
    time_zone: str = ""
    """The IANA name of the time zone; by default each reader's own in Teams and Slack, else UTC. Example:
    `"Europe/Berlin"`."""
    show_tags: tuple[str, ...] = ()
    """The names of the VM's tags that each message shows, beside its resource group and scale set. Example:
    `["env"]`."""

    is_chat_format: ClassVar = True
    _console_url: str = PrivateAttr(default="")

    @field_validator("time_zone")
    @classmethod
    def _check_time_zone(cls, value: str) -> str:
        try:
            if value:
                ZoneInfo(value)
        except (KeyError, OSError, ValueError):  # the library's own is a KeyError
            raise ValueError("expected an IANA time zone such as Europe/Berlin") from None
        return value

    def link(self, event_id: str) -> str:
        """Return the address of an event's page on the console, "" if there is none.

        The id is percent-encoded, also what is markup in a chat, so that it can only be the last part of the path. An
        id of dots would be another path even so: it has no link.
        """
        quoted = (
            quote(event_id.strip(".") and event_id.lower(), safe="", errors="replace")
            .replace("_", "%5F")
            .replace("~", "%7E")
        )
        is_linked = self._console_url and 0 < len(quoted) <= MAX_ID_LENGTH
        return f"{self._console_url}/event/{quoted}" if is_linked else ""

    @property
    def zone(self) -> tzinfo | None:
        """The time zone to write times in, if one is set."""
        return ZoneInfo(self.time_zone) if self.time_zone else None


class HttpSettings(Settings):
    """How a receiver is reached over HTTP."""

    allow_http: bool = False
    """Whether plain http to another machine is allowed."""
    ca_file: Path | None = None
    """A PEM file of the only authorities that are trusted. Example: `"ca.pem"`."""
    client_certificate_file: Path | None = None
    """A PEM file of the certificate for mutual TLS, with or without its key. Example:
    `"client.pem"`."""
    client_key_file: Path | None = None
    """A PEM file of the key, if it is not in the certificate's file. Example:
    `"client-key.pem"`."""
    proxy: Annotated[Secret | None, values.check_proxy] = None
    """The HTTP proxy; it may contain user and password. Example: `"http://proxy.contoso.com:3128"`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """How long a request may wait for the receiver each time, as from byte to byte of an answer; to connect, it has
    5 s. Example: `5`."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield certificates and keys that cannot be used."""
        yield from super().find_faults()
        if self.client_key_file and not self.client_certificate_file:
            yield "client_key_file", "expected a client_certificate_file, too"
        yield from self.find_file_faults()

    def find_file_faults(self) -> Iterator[Fault]:
        """Yield files that cannot be used now: they may have changed since the start."""
        certificate, key = self.client_certificate_file, self.client_key_file
        if certificate:
            yield from try_setting(
                "client_certificate_file", partial(values.check_certificate, certificate, key)
            )
        if self.ca_file:
            yield from try_setting("ca_file", partial(values.check_ca, self.ca_file))


class IdentitySettings(Settings):
    """Who this process is to Azure."""

    credential: Literal["managed_identity", "default"] = "managed_identity"
    """`managed_identity` of the VM, or `default`, which tries the environment, workload identity, managed identity
    and developer tools in turn."""
    client_id: str = ""
    """The client id of a user-assigned managed identity, by default that of the environment variable AZURE_CLIENT_ID.
    Example: `"11111111-2222-3333-4444-555555555555"`."""


class WebhookSettings(SinkSettings, HttpSettings, IdentitySettings):
    """POST each event to a URL, as a CloudEvent or in a chat format."""

    has_formats: ClassVar = True
    kind: Literal["webhook"]
    url: Secret
    """The URL that events are sent to. Example: `"https://example.org/hook"`."""
    format: str
    """How the body of a request is written."""
    content_type: str = Field(default="", pattern=r"^([!-~]+/[ -~]+)?$")
    """The content type of each request, for receivers that do not take that of the format. Example:
    `"application/json"`."""
    bearer_token: Annotated[Secret | None, values.check_token] = None
    """The token of the `Authorization` header; its file is read again when the receiver refuses it. Example:
    `"eyJhbGciOi..."`."""
    headers: Annotated[Secret | None, values.parse_headers] = None
    """Headers of each request; in a file one `Name: value` a line. Example: `{ X-Team = "ops" }`."""
    signing_secrets: values.SigningSecrets = None
    """Sign requests with Standard Webhooks; several secrets during a rotation, in a file one a line. Example:
    `"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"`."""

    token_scope: str = Field(default="", pattern=r"^([!-~]+/\.default)?$")
    """Send a Microsoft Entra token of the identity for this scope with each request. Example:
    `"https://monitor.azure.com/.default"`."""

    def find_faults(self) -> Iterator[Fault]:
        """Yield URLs that take no such messages, and what contradicts another token or would show it."""
        yield from super().find_faults()
        url = self.url.read()
        retired = r"(?i)https://([^/]+\.)?(webhook\.office\.com|outlook\.office(365)?\.com(:\d+)?/webhook)"
        if re.match(retired, url):
            yield "url", "given a connector of Teams, which are retired; expected the URL of a workflow"
        if self.format == "slack" and re.match(r"https://[^/]*discord(app)?\.com/(?![^?]*/slack(\?|$))", url):
            yield "url", "given a webhook of Discord; expected its URL with /slack at the end"
        headers = values.parse_headers(self.headers.read()) if self.headers else {}
        has_header = "authorization" in map(str.lower, headers)
        if self.bearer_token and has_header:
            yield "headers", "given Authorization beside bearer_token, which writes it; expected one of them"
        if not self.token_scope:
            return
        if self.bearer_token or has_header:
            yield "token_scope", "expected neither bearer_token nor a header Authorization beside it"
        yield from try_setting("url", partial(values.check_url, url, allow_http=False))

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: Secret, info: ValidationInfo) -> Secret:
        values.check_url(value.read(), allow_http=info.data.get("allow_http", True))
        return value


def _check_program(value: tuple[str, ...]) -> tuple[str, ...]:
    if sys.platform == "win32":
        # A .cmd or .bat runs what the text of an event says, wherever it expands a variable.
        is_one = value and PureWindowsPath(value[0]).is_absolute() and value[0].lower().endswith(".exe")
        expected = (
            r"the absolute path of an .exe such as 'C:\Tools\drain.exe'; a script goes after its interpreter"
        )
    else:
        is_one = value and value[0].startswith("/")
        expected = 'an absolute path and its arguments, for example ["/usr/local/bin/drain", "-v"]'
    if not is_one or any("\0" in part for part in value):
        raise ValueError(f"expected {expected}")
    return value


Program = Annotated[tuple[str, ...], AfterValidator(_check_program)]
RunSeconds = Annotated[float, Field(gt=0, le=86_400)]
