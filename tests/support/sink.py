"""What tests of the Service Bus sink share: a lab with entities, the sink's settings, and a token endpoint."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

import pytest
from azure.servicebus import ServiceBusClient

from bridge.azure import servicebus as bus
from bridge.config.bus import ServiceBusSettings
from bridge.sinks.servicebus import ServiceBusSink
from tests.support.servicebus import ServiceBusLab, StoredMessage

QUEUE = "notices"
TOPIC = "events"
TOKEN = "a-token-that-must-not-be-shown"  # noqa: S105 - a test's

Json = Mapping[str, Any]
# Makes a Service Bus sink for the lab with these settings, and `clock`.
Connect = Callable[..., ServiceBusSink]


def entities(
    *, queues: Sequence[Json] = ({"Name": QUEUE},), subscriptions: Sequence[Json] = (), **properties: Any
) -> Json:
    """Return a configuration of queues, and of one topic with subscriptions and properties."""
    topic = {"Name": TOPIC, "Properties": properties, "Subscriptions": subscriptions or [{"Name": "all"}]}
    return {"UserConfig": {"Namespaces": [{"Name": "lab", "Queues": queues, "Topics": [topic]}]}}


def settings(lab: ServiceBusLab, **more: Any) -> ServiceBusSettings:
    """Return settings for the lab's queue, or for what `more` names."""
    given = {"connection_string": lab.connection_string, "timeout_seconds": 10.0, **more}
    if "topic" not in given:
        given.setdefault("queue", QUEUE)
    return ServiceBusSettings(kind="servicebus", **given)


def ids(messages: Sequence[StoredMessage]) -> list[str]:
    """Return the message ids in order."""
    return [message.message_id for message in messages]


def with_identity(monkeypatch: pytest.MonkeyPatch, lab: ServiceBusLab, **more: Any) -> ServiceBusSettings:
    """Return settings with a namespace for the lab, which has no TLS: which the SDK has to know."""
    monkeypatch.setattr(bus, "ServiceBusClient", partial(ServiceBusClient, use_tls=False))
    return ServiceBusSettings(
        kind="servicebus", namespace=f"127.0.0.1:{lab.port}", queue=QUEUE, timeout_seconds=10.0, **more
    )


def set_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let the environment ask for a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, url)
        monkeypatch.setenv(name.upper(), url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


class TokenEndpoint:
    """IMDS as far as it hands out tokens: not the real one, and its tokens are not checked.

    `answers` holds statuses (and seconds to wait before them) of the next requests; afterwards it gives `token`.
    """

    def __init__(self, *answers: tuple[int, float]) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []
        self.token = TOKEN
        self.expires_in = 86400
        self.ended = False
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.requests.append(self.path)
                status, seconds = endpoint.answers.pop(0) if endpoint.answers else (200, 0.0)
                deadline = time.monotonic() + seconds
                while time.monotonic() < deadline and not endpoint.ended:
                    time.sleep(0.01)
                expires_on = int(time.time()) + endpoint.expires_in
                token = {
                    "access_token": endpoint.token,
                    "expires_in": str(endpoint.expires_in),
                    "expires_on": str(expires_on),
                }
                body = json.dumps(
                    {**token, "token_type": "Bearer"}
                    if status == 200
                    else {"error": "invalid_request", "error_description": "Identity not found"}
                ).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client has gone
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=partial(self._server.serve_forever, 0.02), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self._server.shutdown()
        self._server.server_close()


def write(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.write_text(text)
    return path
