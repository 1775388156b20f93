"""What tests of the Service Bus sink share: a lab with entities, the sink's settings, and a token endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from socket import socket
from typing import Any

import pytest

from bridge.config.bus import ServiceBusSettings
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.process import RawServer
from tests.support.servicebus import ServiceBusLab

QUEUE = "notices"
TOPIC = "events"
TOKEN = "a-token-that-must-not-be-shown"  # noqa: S105 - a test's

# Makes a Service Bus sink for the lab with these settings, and `clock`.
Connect = Callable[..., ServiceBusSink]


def settings(lab: ServiceBusLab, **more: Any) -> ServiceBusSettings:
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
            body = json.dumps(token if status == 200 else fault).encode()
            head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
