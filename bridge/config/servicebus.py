"""The settings of a Service Bus topic or queue that events are sent to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from bridge.config.bus import BusSettings
from bridge.config.sinks import SinkSettings
from bridge.config.validators import (
    check_template,
)


class ServiceBusSettings(SinkSettings, BusSettings):
    """Send each event to a Service Bus topic or queue."""

    kind: Literal["servicebus"]
    session: str = ""
    """The session id of each message, for entities that require sessions; it may contain `{event}`, `{vm}`,
    `{resource_group}` and `{type}`. Example: `"{event}"`."""
    timeout_seconds: float = Field(default=10.0, gt=0, le=120)
    """How long one send may take. Example: `5`."""

    @field_validator("session")
    @classmethod
    def _check_session(cls, value: str) -> str:
        return check_template(value, ("event", "vm", "resource_group", "type"))
