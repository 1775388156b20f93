"""What tests of the sinks share: webhooks and Service Bus sinks, their failures, and where tokens come from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from bridge.config.bus import ServiceBusSettings
from bridge.config.sinks import WebhookSettings
from bridge.errors import DeliveryError
from bridge.events.model import StoredEvent
from bridge.runtime.time import Clock
from bridge.sinks.base import Sink
from bridge.sinks.servicebus import ServiceBusSink
from bridge.sinks.webhook import WebhookSink
from tests.support.process import RawServer, stored_event
from tests.support.receivers import FORMATS
from tests.support.servicebus import ServiceBusLab
from tests.support.settings import read_settings

QUEUE = "notices"
TOPIC = "events"
TOKEN = "a-token-that-must-not-be-shown"  # noqa: S105 - a test's

# Makes a Service Bus sink for the lab with these settings, and `clock`.
Connect = Callable[..., ServiceBusSink]


def bus_settings(lab: ServiceBusLab, **more: Any) -> ServiceBusSettings:
    """Return settings for the lab's queue, or for what `more` names."""
    given = {"connection_string": lab.connection_string, "timeout_seconds": 10.0, **more}
    if "topic" not in given:
        given.setdefault("queue", QUEUE)
    return ServiceBusSettings(kind="servicebus", **given)


def set_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let the environment ask for a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, url)
        monkeypatch.setenv(name.upper(), url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


# --- webhooks ---

EVENT = stored_event(1, Description='100% "quoted" \ud800 €')

# The settings of each form in which a webhook can send an event.
FORMS = [
    *({"mode": name} for name in ("structured", "binary", "batch")),
    *({"format": name} for name in FORMATS),
]

# Makes a sink of the configuration's keys, and of `clock`; the first argument is the URL.
MakeWebhook = Callable[..., WebhookSink]


def webhook_sink(folder: Path, url: str, *, clock: Clock | None = None, **more: Any) -> WebhookSink:
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


# --- tokens ---


class TokenEndpoint(RawServer):
    """IMDS as far as it hands out tokens: not the real one, and its tokens are not checked.

    `answers` holds statuses (and seconds to wait before them) of the next requests; afterwards it gives `token`.
    """

    def __init__(self, *answers: tuple[int, float]) -> None:
        self.answers = list(answers)
        self.token = TOKEN
        self.expires_in = 86400
        super().__init__(lambda _, connection: self._hand_out(connection))

    def _hand_out(self, connection: socket) -> None:
        while self.read_head(connection):
            status, seconds = self.answers.pop(0) if self.answers else (200, 0.0)
            self.ended.wait(seconds)
            token = {
                "access_token": self.token,
                "expires_in": str(self.expires_in),
                "expires_on": str(int(time.time()) + self.expires_in),
                "token_type": "Bearer",
            }
            fault = {"error": "invalid_request", "error_description": "Identity not found"}
            if status >= 429:
                fault = {
                    "error": "unknown",
                    "error_description": "Failed to retrieve token from Active Directory",
                }
            body = json.dumps(token if status == 200 else fault).encode()
            head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
