"""The settings of a webhook that every format has; each format's own are in its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from bridge.config.base import Secret
from bridge.config.http import HttpSettings
from bridge.config.registry import DEFAULT_FORMAT, format_class
from bridge.config.sinks import SinkSettings
from bridge.config.validators import (
    check_signing_secrets,
    check_token,
    check_url,
    join_signing_secrets,
    parse_headers,
)


class WebhookSettings(SinkSettings, HttpSettings):
    """POST each event to a URL, as a CloudEvent or in a chat format."""

    kind: Literal["webhook"]
    url: Secret
    """The URL that events are sent to. Example: `"https://example.org/hook"`."""
    format: str
    """How the body of a request is written."""
    bearer_token: Secret | None = None
    """The token of the `Authorization` header; its file is read again when the receiver refuses it. Example:
    `"eyJhbGciOi..."`."""
    headers: Secret | None = None
    """Headers of each request; in a file one `Name: value` a line. Example: `{ X-Team = "ops" }`."""
    signing_secrets: Secret | None = None
    """Sign requests with Standard Webhooks; several secrets during a rotation, in a file one a line. Example:
    `"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"`."""
    secret_checks: ClassVar = {
        **HttpSettings.secret_checks,
        "bearer_token": check_token,
        "headers": parse_headers,
        "signing_secrets": check_signing_secrets,
    }

    @classmethod
    def model_for(cls, given: Mapping[str, Any]) -> type[SinkSettings]:
        """Return the settings of the format that a sink's table names."""
        model: type[WebhookSettings] = format_class(given.get("format", DEFAULT_FORMAT)).settings
        return model

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, given: Any) -> Any:
        """Bring signing secrets and headers into one form."""
        if not isinstance(given, dict):
            return given
        taken = dict(join_signing_secrets(given))
        if isinstance(taken.get("headers"), dict):
            taken["headers"] = "\n".join(f"{name}: {value}" for name, value in taken["headers"].items())
        return taken

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: Secret, info: ValidationInfo) -> Secret:
        check_url(value.read(), allow_http=info.data.get("allow_http", True))
        return value
