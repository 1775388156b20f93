"""Simulate Event Grid: validate events as the service does, answer with its error texts, deliver to webhooks."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from bridge.lab.eventgrid.delivery import Subscription
from bridge.lab.eventgrid.rules import CUSTOM, CUSTOM_PATH, Refusal, flavor_of, key_refusal, refusal
from bridge.lab.httpd import Answer, HttpRequest, json_answer
from bridge.lab.inbox import Inbox, cloud_events

# constant, so that a configuration written for one run works with the next
KEYS = tuple(base64.b64encode(f"imds-bridge lab, key {number} of 2".encode()).decode() for number in (1, 2))


class EventGridLab(Inbox):
    """Simulate a custom topic and the topics of a namespace, all with the same keys.

    Every method may be called from any thread. Recording, waiting and faults work as in Inbox; a fault with an
    HTTP status and no body is answered with the service's error body.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        topics: Sequence[str] = ("maintenance",),
        keys: Sequence[str] = KEYS,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the server.

        Args:
            port: 0 for any free port.
            topics: the names of the namespace's topics.
            keys: the access keys, two as in the service.
            report: called with a sentence for each request, and for each delivery that failed.
        """
        self.keys = tuple(keys)
        self._topics = tuple(topics)
        self._lock = threading.Lock()
        self._subscriptions: list[Subscription] = []
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

    def subscribe(self, url: str, *, name: str = "webhook") -> Subscription:
        """Validate a webhook, then deliver each event to it that is accepted from now on.

        Raises: LabError if the webhook does not consent.
        """
        subscription = Subscription(url, name=name, report=self._report)
        with self._lock:
            self._subscriptions.append(subscription)
        return subscription

    def _handle(self, request: HttpRequest) -> Answer:
        answer = super()._handle(request)
        if answer.status < HTTPStatus.BAD_REQUEST or answer.body:
            return answer
        return _with_error_body(answer, request, Refusal(status=answer.status, message="A fault of the lab."))

    def _answer(self, request: HttpRequest) -> Answer:
        found = refusal(request, topics=self._topics, credential=self._credential_refusal)
        if found is not None:
            return _with_error_body(Answer(status=found.status), request, found)
        events = cloud_events(request)
        with self._lock:
            for subscription in self._subscriptions:
                for event in events:
                    subscription.offer(event)
        return Answer() if flavor_of(request.path) is CUSTOM else json_answer({})

    def _credential_refusal(self, request: HttpRequest) -> Refusal | None:
        return key_refusal(request, self.keys)


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
