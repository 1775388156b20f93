"""The settings of a webhook, in every format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from bridge.config.base import Secret
from bridge.config.http import HttpSettings
from bridge.config.sinks import SinkSettings
from bridge.config.validators import (
    check_routing_key,
    check_signing_secrets,
    check_time_zone,
    check_token,
    check_url,
    join_signing_secrets,
    parse_headers,
    read_template,
)

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
        taken = dict(join_signing_secrets(given))
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
