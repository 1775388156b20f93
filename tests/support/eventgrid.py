"""The lab's Event Grid with what tests need: tokens, rotation of keys, redirects, and a look for leaked secrets."""

from __future__ import annotations

import base64
import secrets
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from bridge.lab import eventgrid
from bridge.lab.eventgrid import Refusal, is_topic
from bridge.lab.httpd import Answer, HttpRequest
from tests.support.inbox import Inbox

CREDENTIAL_HEADERS = ("aeg-sas-key", "aeg-sas-token", "authorization")
RESOURCE = "/subscriptions/lab/resourceGroups/lab/providers/Microsoft.EventGrid/topics/lab"
_TOKEN = "The access token presented with the incoming request"  # noqa: S105 - a part of errors


class EventGridLab(eventgrid.EventGridLab, Inbox):
    """The lab's Event Grid, for tests."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.redirect_location = "/redirected"  # where a fault's 3xx points
        self._access: tuple[str | None, bool] = (None, True)

    def require_token(self, token: str | None, *, permitted: bool = True) -> None:
        """Accept only this Bearer token from now on, besides the keys; None to accept no token.

        Args:
            token: the expected token.
            permitted: whether its owner has the role to send.
        """
        self._access = (token, permitted)

    def regenerate_key(self, number: int) -> str:
        """Replace key 1 or 2 and return the new value; the old one is refused from now on."""
        keys = list(self.keys)
        keys[number - 1] = base64.b64encode(secrets.token_bytes(32)).decode()
        self.keys = tuple(keys)
        return keys[number - 1]

    @property
    def leaked(self) -> list[HttpRequest]:
        """Return the requests with a key or token in the URL, or sent to an address that is not a topic."""
        return [one for one in self.received if self._leaks(one)]

    def _leaks(self, request: HttpRequest) -> bool:
        asked = f"{request.path}?{request.query}"
        known = filter(None, (*self.keys, self._access[0]))
        if any(secret in text for secret in known for text in (asked, unquote(asked))):
            return True
        return not is_topic(request.path) and any(name in request.headers for name in CREDENTIAL_HEADERS)

    def _handle(self, request: HttpRequest) -> Answer:
        answer = super()._handle(request)
        if "location" not in answer.headers:
            return answer
        return replace(answer, headers={**answer.headers, "location": self.redirect_location})

    def _check_credential(self, request: HttpRequest) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            super()._check_credential(request)
            return
        token, permitted = self._access
        if given != token:
            raise Refusal(401, f"{_TOKEN} is invalid.")
        if not permitted:  # 401, not 403, as issues of Microsoft's SDKs show
            raise Refusal(
                401,
                f"The principal associated with {_TOKEN[4:]} does not have permission to send data to {RESOURCE}.",
            )
