"""Where the console listens, where its events come from, and who may look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from bridge.config.base import Fault, Secret, Settings
from bridge.config.bus import ReceiverSettings
from bridge.config.values import SigningSecrets, check_listen, check_token, is_loopback, socket_address

_SECRET_CHARACTERS = 24
_HEADER = "^[A-Za-z0-9-]+$"


class IngestSettings(Settings):
    """What a sender of events to `/ingest` has to show: a bearer token, or a signature."""

    bearer_token: Annotated[Secret | None, check_token] = None
    """The token that senders show as `Authorization: Bearer`. Example:
    `"aVqN3yRkT7wEo5xUz1mHcB8g"`."""
    signing_secrets: SigningSecrets = None
    """The Standard Webhooks secrets, one a line, of which one has to have signed each request. Example:
    `"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"`."""

    @property
    def has_secret(self) -> bool:
        """Whether a sender has to show anything."""
        return self.bearer_token is not None or self.signing_secrets is not None


class SourceSettings(ReceiverSettings):
    """The Service Bus subscription or queue that the console receives events from."""


def _check_length(secret: str) -> None:
    if len(secret) < _SECRET_CHARACTERS:
        raise ValueError(f"expected at least {_SECRET_CHARACTERS} characters")


class ProxySettings(Settings):
    """The headers in which an authenticating proxy says who is signed in, and the secret that proves the proxy."""

    secret: Annotated[Secret, _check_length]
    """The secret of at least 24 characters that only the proxy knows. Example:
    `"q8Zt2LmXv5Rn7KdYb3Wf9GhC"`."""
    secret_header: str = Field(default="X-Proxy-Secret", pattern=_HEADER)
    """The header in which the proxy sends the secret. Example: `"X-Gateway-Secret"`."""
    user_header: str = Field(default="X-Forwarded-User", pattern=_HEADER)
    """The header with the name of who is signed in. Example: `"X-Auth-Request-Email"`."""
    groups_header: str = Field(default="X-Forwarded-Groups", pattern=_HEADER)
    """The header with the groups, separated by commas. Example: `"X-Auth-Request-Groups"`."""


class ConsoleSettings(Settings):
    """Where `imds-bridge console` listens, where its events come from, and who may look."""

    listen: str = Field(default="127.0.0.1:8080", json_schema_extra={"pattern": r"^.+:[0-9]{1,5}$"})
    """The address and port of the pages; on any other than a loopback address people have to sign in. Example:
    `"0.0.0.0:8080"`."""
    auth: Literal["none", "easyauth", "proxy"] = "none"
    """Who signs people in: nobody, which is refused unless `listen` is a loopback address; Azure App Service or
    Container Apps; or an authenticating proxy."""
    public_url: str = ""
    """The address that people open in the browser. Example: `"https://console.contoso.example"`."""
    viewer_groups: tuple[str, ...] = ()
    """The groups that may look; empty for everybody who is signed in. Example: `["staff"]`."""
    approver_groups: tuple[str, ...] = ()
    """The groups that may approve; empty for nobody. Example: `["ops"]`."""
    runbook_url: str = Field(default="", pattern="^(https://.+)?$")
    """The page that says what to do; each event's page links to it. Example: `"https://wiki.contoso.example/vms"`."""
    retain_days: float = Field(default=90, ge=1, le=3660)
    """How long events are kept. Example: `30`."""
    put_away_days: float | None = Field(default=None, ge=1, le=3660)
    """After how many days without news VMs that are silent or stopped, and open events, are put away; never by
    default. Example: `14`."""
    form_key: Annotated[Secret | None, _check_length] = None
    """The key of forms, for consoles that answer at one address: each accepts the forms of the others. Example:
    `"p3Xr8KtW5mQz1VnYc7Bd9JfH"`."""
    ingest: IngestSettings = Field(default_factory=IngestSettings)
    """What a sender of events to `/ingest` has to show."""
    bus: SourceSettings | None = None
    """The Service Bus that events are received from."""
    proxy: ProxySettings | None = None
    """How the proxy says who is signed in, with `auth = "proxy"`."""
    _check_listen = field_validator("listen")(check_listen)

    @field_validator("public_url")
    @classmethod
    def _check_public_url(cls, value: str) -> str:
        if value and not value.startswith(("https://", "http://localhost", "http://127.0.0.1")):
            raise ValueError("expected https://HOST, as people see it in the browser")
        return value.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the console."""
        return is_loopback(socket_address(self.listen)[1][0])

    @property
    def takes_ingest(self) -> bool:
        """Whether events can be posted: without a secret only where nothing passes on requests of others."""
        return (self.is_local and self.auth == "none") or self.ingest.has_secret

    def find_faults(self) -> Iterator[Fault]:
        """Yield an address that others can reach without any proof of who they are."""
        yield from super().find_faults()
        if not self.is_local and self.auth == "none":
            expected = 'expected "easyauth" or "proxy", or listen on 127.0.0.1'
            yield "auth", f"other machines can reach {self.listen}; {expected}"
        if not self.takes_ingest and self.bus is None:
            expected = "expected bearer_token, signing_secret or [console.bus]"
            yield "ingest", f"other machines can reach {self.listen}, directly or through a proxy; {expected}"
        if (self.auth == "proxy") != (self.proxy is not None):
            yield "proxy", 'expected exactly with auth = "proxy", and with its secret'
        groups = (*self.viewer_groups, *self.approver_groups) if self.proxy else ()
        if odd := next((group for group in groups if "," in group), ""):
            text = f"{odd!r} has a comma, at which the header's groups are split; rename the group"
            yield "proxy", text
        if self.auth != "none" and not self.public_url:
            expected = f'expected with auth = "{self.auth}"'
            yield "public_url", f"{expected}: the address that people open, https://HOST"
