"""What tests of the HTTP client share: clients, and an exchange whose address and answers hold secrets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bridge.config.base import Secret
from bridge.config.sinks import HttpSettings
from bridge.errors import DeliveryError
from bridge.http.client import Answer, HttpClient
from tests.support.process import LIMIT_SECONDS

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

# Makes a client that is closed at the end, with these settings.
MakeClient = Callable[..., HttpClient]


def http_client(*, proxy: str = "", **settings: Any) -> HttpClient:
    """MakeClient a client; files of the settings need not be there yet."""
    given = {"timeout_seconds": LIMIT_SECONDS, "proxy": Secret(proxy) if proxy else None, **settings}
    return HttpClient(HttpSettings().model_copy(update=given))


def ask(
    client: HttpClient, url: str, *, method: str = "POST", body: bytes | None = None, **limits: float
) -> Answer:
    """Send a request."""
    headers = {"X-Key": "secret-header"}
    return client.exchange(method, f"{url}/secret-path?secret=query", headers, body, **limits)


def failure(
    kind: type[DeliveryError],
    client: HttpClient,
    url: str,
    *,
    body: bytes | None = None,
) -> str:
    """Send a request that fails; return what the error says, which is no secret."""
    with pytest.raises(DeliveryError) as raised:
        ask(client, url, body=body)
    assert type(raised.value) is kind
    assert "secret" not in str(raised.value)
    return str(raised.value)
