"""Simulate Event Grid: validate events as the service does, answer with its error texts, deliver to webhooks."""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote
from uuid import uuid4

from bridge.lab.eventgrid.delivery import Subscription
from bridge.lab.eventgrid.rules import CUSTOM, CUSTOM_PATH, Access, Refusal, flavor_of, is_topic, refusal
from bridge.lab.httpd import Answer, HttpRequest, LabError, control, json_answer
from bridge.lab.inbox import CONTROL_PATH, Inbox, cloud_events

# constant, so that a configuration written for one run works with the next
KEYS = tuple(base64.b64encode(f"imds-bridge lab, key {number} of 2".encode()).decode() for number in (1, 2))
CREDENTIAL_HEADERS = ("aeg-sas-key", "aeg-sas-token", "authorization")


class EventGridLab(Inbox):
    """Simulate a custom topic and the topics of a namespace, all with the same keys.

    Every method may be called from any thread. Recording, waiting and faults work as in Inbox; a fault with an
    HTTP status and no body is answered with the service's error body. The control API also has
    POST /lab/subscribe and POST /lab/regenerate-key.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        topics: Sequence[str] = ("maintenance",),
        keys: Sequence[str] = KEYS,
        token: str | None = None,
        clock: Callable[[], float] = time.time,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """Start the server.

        Args:
            port: 0 for any free port.
            topics: the names of the namespace's topics.
            keys: the access keys, two as in the service; empty if only tokens may publish.
            token: see require_token.
            clock: returns the Unix time, for a token's expiry.
            report: called with a sentence for each request, and for each delivery that failed.
        """
        self.redirect_location = "/redirected"  # where a fault's 3xx points
        self._topics = tuple(topics)
        self._access = Access(keys=tuple(keys), token=token)
        self._clock = clock
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
        self._grid_control = control(
            {
                ("POST", "/lab/subscribe"): self._subscribe,
                ("POST", "/lab/regenerate-key"): lambda number: {"key": self.regenerate_key(number)},
            }
        )
        super().__init__(port=port, report=report)

    def close(self) -> None:
        """Stop immediately, even while requests and deliveries hang. A second call does nothing."""
        super().close()
        with self._lock:
            subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            subscription.close()

    @property
    def url(self) -> str:
        """Return the address of the custom topic."""
        return self.custom_endpoint

    @property
    def custom_endpoint(self) -> str:
        """Return the address of the custom topic, without the api-version."""
        return f"{self.base_url}{CUSTOM_PATH}"

    def namespace_endpoint(self, topic: str) -> str:
        """Return the address of a topic of the namespace, without the api-version."""
        return f"{self.base_url}/topics/{topic}:publish"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the current keys."""
        return self._access.keys

    @property
    def leaked(self) -> list[HttpRequest]:
        """Return the requests with a key or token in the URL, or sent to an address that is not a topic."""
        return [one for one in self.received if self._leaks(one)]

    def regenerate_key(self, number: int) -> str:
        """Replace key 1 or 2 and return the new value; the old one is refused from now on."""
        with self._lock:
            keys = list(self._access.keys)
            if number not in range(1, len(keys) + 1):
                raise LabError(f"number given: {number!r}; expected: 1 to {len(keys)}")
            keys[number - 1] = base64.b64encode(secrets.token_bytes(32)).decode()
            self._access = replace(self._access, keys=tuple(keys))
            return keys[number - 1]

    def require_token(
        self, token: str | None, *, expires: float | None = None, permitted: bool = True
    ) -> None:
        """Accept only this Bearer token from now on, besides the keys.

        Args:
            token: the expected token; None to accept no token.
            expires: the Unix time from which it is refused; None for never.
            permitted: whether its owner has the role to send.
        """
        with self._lock:
            self._access = replace(
                self._access, token=token, token_expires=expires, token_permitted=permitted
            )

    def subscribe(self, url: str, *, name: str = "webhook") -> Subscription:
        """Validate a webhook, then deliver each event to it that is accepted from now on.

        Raises: LabError if the webhook does not consent.
        """
        subscription = Subscription(url, name=name, report=self._report)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    def _subscribe(self, url: str, name: str = "webhook") -> None:
        self.subscribe(url, name=name)

    def _handle(self, request: HttpRequest) -> Answer:
        if request.path in ("/lab/subscribe", "/lab/regenerate-key"):
            return self._grid_control(request)
        answer = super()._handle(request)
        if request.path.startswith(CONTROL_PATH):
            return answer
        if "location" in answer.headers:
            return replace(answer, headers={**answer.headers, "location": self.redirect_location})
        if answer.status >= HTTPStatus.BAD_REQUEST and not answer.body:
            return _with_error_body(
                answer, request, Refusal(status=answer.status, message="A fault of the lab.")
            )
        return answer

    def _answer(self, request: HttpRequest) -> Answer:
        found = refusal(request, topics=self._topics, access=self._access, now=self._clock())
        if found is not None:
            return _with_error_body(Answer(status=found.status), request, found)
        events = cloud_events(request)
        with self._lock:
            for subscription in self._subscriptions:
                for event in events:
                    subscription.offer(event)
        return Answer() if flavor_of(request.path) is CUSTOM else json_answer({})

    def _leaks(self, request: HttpRequest) -> bool:
        asked = f"{request.path}?{request.query}"
        known = filter(None, (*self._access.keys, self._access.token))
        if any(secret in text for secret in known for text in (asked, unquote(asked))):
            return True
        return not is_topic(request.path) and any(name in request.headers for name in CREDENTIAL_HEADERS)


def _with_error_body(answer: Answer, request: HttpRequest, found: Refusal) -> Answer:
    """Return the answer with the body that the service sends for such an error."""
    now, number = datetime.now(UTC), str(uuid4())
    error: dict[str, Any] = {"code": found.code, "message": found.message}
    if flavor_of(request.path) is CUSTOM:
        when = now.strftime("%m/%d/%Y %I:%M:%S %p (UTC)")
        error["message"] += (
            f" Report '{number}:0:{when}' to our forums for assistance or raise a support ticket."
        )
        error["details"] = [{"code": found.detail or found.code, "message": error["message"]}]
    else:  # without details [S], see rules.py
        error |= {"timestamp_utc": now.isoformat(), "tracking_id": number}
    body = json_answer({"error": error}, x_ms_request_id=number)
    return replace(answer, body=body.body, headers={**body.headers, **answer.headers})
