"""Simulate a webhook receiver: record deliveries, answer the handshake, send faults on demand."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self
from urllib.parse import unquote

from bridge.lab.httpd import KEPT_REQUESTS, Answer, Fault, Faults, HttpRequest, Server, json_answer

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
ATTRIBUTE_NAME = re.compile(r"[a-z0-9]{1,20}")
REQUIRED = ("id", "source", "specversion", "type")
RECEIVED_PATH = "/lab/received"


def cloud_events(received: HttpRequest) -> list[dict[str, Any]]:
    """Return the CloudEvents of a delivery in structured, batch or binary mode; empty if it has none."""
    media_type = _media_type(received)
    try:
        if media_type == STRUCTURED:
            content = [received.json()]
        elif media_type == BATCH:
            content = received.json()
        elif "ce-specversion" in received.headers:
            content = [_binary_event(received)]
        else:
            return []
    except ValueError:
        return []
    return [event for event in content if isinstance(event, dict)] if isinstance(content, list) else []


def problem(received: HttpRequest) -> tuple[int, str] | None:
    """Return the status and the reason with which a strict CloudEvents receiver refuses, or None."""
    media_type = _media_type(received)
    if received.method != "POST":
        return 405, f"method given: {received.method}; expected: POST"
    if media_type not in (STRUCTURED, BATCH):
        if "ce-specversion" not in received.headers:
            return 415, f"content type given: {media_type or 'none'}; expected: {STRUCTURED}, or ce- headers"
        if "ce-datacontenttype" in received.headers:
            return 400, "header given: ce-datacontenttype; expected: Content-Type alone"
    try:
        content = _binary_event(received) if media_type not in (STRUCTURED, BATCH) else received.json()
    except ValueError as error:
        return 400, f"body given: not JSON ({error}); expected: JSON"
    if media_type == BATCH and not isinstance(content, list):
        return 400, "body given: no list; expected: a list of CloudEvents"
    for event in content if media_type == BATCH else [content]:
        if fault := _event_problem(event):
            return 400, fault
    return None


def _event_problem(event: Any) -> str:
    if not isinstance(event, dict):
        return f"event given: {type(event).__name__}; expected: an object"
    for name in REQUIRED:
        if not isinstance(event.get(name), str) or not event[name]:
            return f"attribute {name} given: {event.get(name)!r}; expected: a text"
    if event["specversion"] != "1.0":
        return f"specversion given: {event['specversion']!r}; expected: '1.0'"
    for name, value in event.items():
        if name in ("data", "data_base64"):
            continue
        if not ATTRIBUTE_NAME.fullmatch(name):
            return f"attribute name given: {name!r}; expected: 1 to 20 of a-z, 0-9"
        if not isinstance(value, (str, int)):
            return f"attribute {name} given: {type(value).__name__}; expected: a text, a number or a boolean"
    return ""


def _binary_event(received: HttpRequest) -> dict[str, Any]:
    event: dict[str, Any] = {
        name.removeprefix("ce-"): unquote(value.removeprefix('"').removesuffix('"'))
        for name, value in received.headers.items()
        if name.startswith("ce-")
    }
    content_type = received.headers.get("content-type", "")
    if content_type:
        event["datacontenttype"] = content_type
    if not received.body:
        return event
    return {**event, "data": received.json()}


def _media_type(received: HttpRequest) -> str:
    return received.headers.get("content-type", "").partition(";")[0].strip().lower()


class Inbox:
    """Receive webhooks on any path. Every method may be called from any thread.

    GET /lab/received is not recorded, but answered with what was received.
    """

    fault_class = Fault

    def __init__(
        self,
        *,
        port: int = 0,
        strict: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the server.

        Args:
            port: 0 for any free port.
            strict: whether to refuse an invalid CloudEvent with 415 or 400.
            report: called with a sentence for each request.
        """
        self._strict = strict
        self._report = report
        self._changed = threading.Condition()
        self._received: deque[HttpRequest] = deque(maxlen=KEPT_REQUESTS)
        self._faults = Faults()
        self._closed = False
        self._server = Server("inbox", self._handle, port=port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop immediately, even while requests hang. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._faults.clear()
            self._server.close()

    @property
    def base_url(self) -> str:
        """Return the address without a path."""
        return self._server.url

    @property
    def url(self) -> str:
        """Return an address to deliver to; any other path works as well."""
        return f"{self._server.url}/hook"

    @property
    def received(self) -> list[HttpRequest]:
        """Return all requests in order of arrival, with handshakes; each is recorded before its answer is sent."""
        with self._changed:
            return list(self._received)

    @property
    def accepted(self) -> list[HttpRequest]:
        """Return the deliveries that were answered with 2xx, or processed without an answer (`lost_answer`)."""
        return [one for one in self.received if one.method != "OPTIONS" and 200 <= one.status < 300]  # noqa: PLR2004

    def events(self) -> list[dict[str, Any]]:
        """Return the CloudEvents of all accepted deliveries."""
        return [event for one in self.accepted for event in cloud_events(one)]

    def fault(
        self, kind: str | int, *, count: int | None = 1, method: str | None = "POST", **values: Any
    ) -> None:
        """Answer the next deliveries wrongly, after the faults that are already queued.

        Args:
            kind: see `Fault.of`.
            count: the number of requests; None for no limit.
            method: only requests with this method; None for any.
            values: the other fields of Fault, such as retry_after, or path, a prefix.
        """
        self._faults.add(self.fault_class.of(kind, method=method, **values), count=count)

    def clear_faults(self) -> None:
        """Remove all faults; requests that one of them delays are answered."""
        self._faults.clear()

    def _handle(self, request: HttpRequest) -> Answer:
        if request.path == RECEIVED_PATH:
            return json_answer([one.summary() for one in self.received])
        answer = self._faults.apply(request, lambda: self._answer(request))
        with self._changed:
            self._received.append(replace(request, status=answer.status))
            self._changed.notify_all()
        self._report(
            f"{request.method} {request.path} {subject_of(request)} -> {answer.status or 'no answer'}"
        )
        return answer

    def _answer(self, request: HttpRequest) -> Answer:
        if request.method == "OPTIONS":
            return self._handshake(request)
        if self._strict and (found := problem(request)):
            return json_answer({"error": found[1]}, found[0])
        return Answer()

    def _handshake(self, request: HttpRequest) -> Answer:
        headers = {"allow": "OPTIONS, POST"}
        if "webhook-request-origin" in request.headers:
            headers |= {"webhook-allowed-origin": "*", "webhook-allowed-rate": "120"}
        return Answer(headers=headers)


def subject_of(request: HttpRequest) -> str:
    """Return a short description of the request's content."""
    events = cloud_events(request)
    if events:
        return ", ".join(str(event.get("type", "?")) for event in events)
    return f"{len(request.body)} bytes"
