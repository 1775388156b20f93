"""What tests of the webhook sink share: sinks as the command builds them, and their failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bridge.config.sinks import WebhookSettings
from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent
from bridge.runtime.time import Clock
from bridge.sinks.base import Sink
from bridge.sinks.webhook import WebhookSink
from tests.support.process import stored_event
from tests.support.receivers import FORMATS
from tests.support.settings import read_settings

EVENT = stored_event(1, Description='100% "quoted" \ud800 €')

# The settings of each form in which a webhook can send an event.
FORMS = [
    *({"mode": name} for name in ("structured", "binary", "batch")),
    *({"format": name} for name in FORMATS),
]

# Makes a sink of the configuration's keys, and of `clock`; the first argument is the URL.
MakeWebhook = Callable[..., WebhookSink]


def sink(folder: Path, url: str, *, clock: Clock | None = None, **more: Any) -> WebhookSink:
    """Build a sink; a format gets what it needs."""
    needed = FORMATS[str(more.get("format", "cloudevents"))].needed
    given = {name: value for name, value in needed.items() if f"{name}_file" not in more}
    address = {} if "url_file" in more else {"url": url}
    settings = read_settings(folder, kind="webhook", **{**address, **given, **more})
    assert isinstance(settings, WebhookSettings)
    return WebhookSink(settings, clock=clock)


def failure(target: Sink, *events: StoredEvent) -> DeliveryError:
    """Send what is refused, and return the error."""
    with pytest.raises(DeliveryError) as raised:
        target.send(events or [EVENT])
    return raised.value
