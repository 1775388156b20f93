"""Simulate whoever receives webhooks: record deliveries, shake hands, misbehave on demand."""

from __future__ import annotations

import base64
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self, TypeVar, overload
from urllib.parse import unquote

from bridge.lab.faults import Fault, Faults
from bridge.lab.httpd import KEPT_REQUESTS, Answer, Request, Server, control, json_answer, wait_for

T = TypeVar("T")
Received = Request

STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
ATTRIBUTE_NAME = re.compile(r"[a-z0-9]{1,20}")
REQUIRED = ("id", "source", "specversion", "type")
CONTROL_PATH = "/lab/"


def cloud_events(received: Received) -> list[dict[str, Any]]:
    """Return the CloudEvents of a delivery in structured, batch or binary mode; none where it has none."""
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


def problem(received: Received) -> tuple[int, str] | None:
    """Return the status and the reason with which a strict receiver of CloudEvents refuses, or None."""
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


def _binary_event(received: Received) -> dict[str, Any]:
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
    media_type = _media_type(received)
    if media_type == "application/json" or media_type.endswith("+json"):
        return {**event, "data": received.json()}
    try:
        return {**event, "data": received.body.decode()}
    except UnicodeDecodeError:
        return {**event, "data_base64": base64.b64encode(received.body).decode()}


def _media_type(received: Received) -> str:
    return received.headers.get("content-type", "").partition(";")[0].strip().lower()


class Inbox:
    """Receive webhooks on any path. Every method may be called from any thread.

    Paths below /lab/ are the control API and are not recorded: GET /lab/received, POST /lab/fault,
    POST /lab/clear.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        status: int = 200,
        strict: bool = False,
        token: str | None = None,
        allowed_origin: str | None = "*",
        allowed_rate: str = "120",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Start to serve.

        Args:
            port: 0 for any free one.
            status: of an accepted delivery.
            strict: whether what is no faultless CloudEvent is refused by 415 or 400.
            token: see require_token.
            allowed_origin: what the handshake consents to; None for no consent.
            allowed_rate: deliveries a minute that the handshake consents to, or "*".
            tell: gets a sentence for each request.
        """
        self._status = status
        self._strict = strict
        self._token = token
        self._allowed_origin = allowed_origin
        self._allowed_rate = allowed_rate
        self._tell = tell or (lambda _: None)
        self._changed = threading.Condition()
        self._received: deque[Received] = deque(maxlen=KEPT_REQUESTS)
        self._faults = Faults()
        self._control = control(
            {
                ("GET", "/lab/received"): lambda: [one.summary() for one in self.received],
                ("POST", "/lab/fault"): self.fault,
                ("POST", "/lab/clear"): self.clear,
            }
        )
        self._closed = False
        self._server = Server("inbox", self._handle, port=port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End at once, also while requests hang. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._faults.close()
            self._server.close()

    @property
    def base_url(self) -> str:
        """Return the address without a path."""
        return self._server.url

    @property
    def url(self) -> str:
        """Return an address to deliver to; any other path does as well."""
        return f"{self._server.url}/hook"

    @property
    def received(self) -> list[Received]:
        """Return all requests in order of arrival, handshakes too; each is there before its answer."""
        with self._changed:
            return list(self._received)

    @property
    def accepted(self) -> list[Received]:
        """Return the deliveries answered by 2xx, or processed and their answer lost."""
        return [one for one in self.received if one.method != "OPTIONS" and 200 <= one.status < 300]  # noqa: PLR2004

    def events(self) -> list[dict[str, Any]]:
        """Return the CloudEvents of all accepted deliveries."""
        return [event for one in self.accepted for event in cloud_events(one)]

    @property
    def problems(self) -> list[str]:
        """Return what a strict receiver would refuse in the accepted deliveries."""
        found = [problem(one) for one in self.accepted]
        return [one[1] for one in found if one is not None]

    @overload
    def wait_for(self, expected: int, timeout: float = 10) -> bool: ...
    @overload
    def wait_for(self, expected: Callable[[], T], timeout: float = 10) -> T: ...
    def wait_for(self, expected: int | Callable[[], Any], timeout: float = 10) -> Any:
        """Wait for so many accepted deliveries, or until the predicate holds.

        Raises: AssertionError that tells what arrived, after `timeout` seconds.
        """
        if isinstance(expected, int):
            count = expected
            return wait_for(lambda: len(self.accepted) >= count, timeout, self._changed, self._what_arrived)
        return wait_for(expected, timeout, self._changed, self._what_arrived)

    def fault(
        self,
        kind: str | int | None = None,
        *,
        status: int | None = None,
        count: int | None = 1,
        retry_after: str | int | None = None,
        body: bytes | str = b"",
        seconds: float | None = None,
        path: str | None = None,
        method: str | None = "POST",
    ) -> None:
        """Answer the next deliveries wrongly, after the faults that wait before this one.

        Args:
            kind: one of FAULT_KINDS, or an HTTP status by number or name.
            status: the same as a number; with neither, the right answer after `seconds`, or 503.
            count: how many requests; None for ever.
            retry_after: goes into the header of an HTTP status.
            body: of an HTTP status.
            seconds: real ones before the answer, whichever it is; 5 for `slow`.
            path: only paths that begin so.
            method: only these; None for any.
        """
        if kind is None:
            kind = status if status is not None else ("slow" if seconds else 503)
        content = body.encode() if isinstance(body, str) else body
        fault = Fault.of(
            kind, seconds=seconds, retry_after=retry_after, body=content, path=path, method=method
        )
        self._faults.add(fault, count=count)

    def clear_faults(self) -> None:
        """Forget all faults; requests that one of them holds are let go."""
        self._faults.clear()

    def clear(self) -> None:
        """Forget all faults and all that was received."""
        self._faults.clear()
        with self._changed:
            self._received.clear()

    def require_token(self, token: str | None) -> None:
        """Answer 401 from now on unless a delivery carries the token as `Authorization: Bearer`."""
        self._token = token

    def _handle(self, request: Request) -> Answer:
        if request.path.startswith(CONTROL_PATH):
            return self._control(request)
        answer = self._faults.apply(request, lambda: self._answer(request))
        with self._changed:
            self._received.append(replace(request, status=answer.status))
            self._changed.notify_all()
        self._tell(f"{request.method} {request.path} {_subject(request)} -> {answer.status or 'no answer'}")
        return answer

    def _answer(self, request: Request) -> Answer:
        if request.method == "OPTIONS":
            return self._handshake(request)
        if self._token is not None and request.headers.get("authorization") != f"Bearer {self._token}":
            return Answer(status=401, headers={"www-authenticate": "Bearer"})
        if self._strict and (found := problem(request)):
            return json_answer({"error": found[1]}, found[0])
        return Answer(status=self._status)

    def _handshake(self, request: Request) -> Answer:
        headers = {"allow": "OPTIONS, POST"}
        if self._allowed_origin is not None and "webhook-request-origin" in request.headers:
            headers["webhook-allowed-origin"] = self._allowed_origin
            headers["webhook-allowed-rate"] = self._allowed_rate
        return Answer(headers=headers)

    def _what_arrived(self) -> str:
        lines = [
            f"{one.method} {one.path} {_subject(one)} -> {one.status or 'no answer'}" for one in self.received
        ]
        return f"{len(lines)} requests arrived" + "".join(f"\n  {line}" for line in lines[-50:])


def _subject(request: Request) -> str:
    """Return a few words on what the request carries."""
    events = cloud_events(request)
    if events:
        return ", ".join(str(event.get("type", "?")) for event in events)
    return f"{len(request.body)} bytes"
