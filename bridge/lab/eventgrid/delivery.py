"""Deliver events to a webhook as Event Grid does: validate the endpoint, send one event per request, retry."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from bridge.lab.httpd import NO_ANSWER, LabError

ORIGIN = "eventgrid.azure.net"
CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
ANSWER_SECONDS = 10.0
RETRY_SECONDS = (0.1, 0.3, 1.0)  # the service waits 10, 30, 60 seconds and longer
SUCCESSES = range(200, 205)
NOT_RETRIED = (
    400,
    401,
    413,
)  # Microsoft Learn, delivery-and-retry: a webhook that answers these gets no retry
MAX_WAITING = 10_000  # events per subscription; further events are dropped
KEPT_UNDELIVERED = 1000


class Subscription:
    """Deliver to one webhook, in order, on a separate thread. Every method may be called from any thread."""

    def __init__(
        self, url: str, *, name: str = "webhook", report: Callable[[str], None] | None = None
    ) -> None:
        """Validate the endpoint and start.

        Args:
            url: the webhook, plain http.
            name: sent in a header of each delivery, in upper case as the service does.
            report: called with a sentence for each attempt that failed.

        Raises:
            LabError: the URL is invalid, or the endpoint did not consent.
        """
        self.url = url
        self.name = name
        self._host, self._port, self._target = _split(url)
        self._shown = url.partition("?")[0]  # the query can be a secret
        self._report = report or (lambda _: None)
        self._changed = threading.Condition()
        self._waiting: deque[dict[str, Any]] = deque()
        self._undelivered: deque[dict[str, Any]] = deque(maxlen=KEPT_UNDELIVERED)
        self._connection: http.client.HTTPConnection | None = None
        self._closed = threading.Event()
        self._validate()
        self._thread = threading.Thread(target=self._run, name=f"lab-deliver-{name}", daemon=True)
        self._thread.start()

    @property
    def undelivered(self) -> list[dict[str, Any]]:
        """Return the events that were not delivered: refused, retried too often, or over the limit."""
        with self._changed:
            return list(self._undelivered)

    def offer(self, event: dict[str, Any]) -> None:
        """Queue the event for delivery; never blocks."""
        with self._changed:
            (self._waiting if len(self._waiting) < MAX_WAITING else self._undelivered).append(event)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop immediately, even during a delivery; events that wait are dropped."""
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(ANSWER_SECONDS)

    def _validate(self) -> None:
        status, allowed = self._call("OPTIONS", {"WebHook-Request-Origin": ORIGIN})
        if allowed not in ("*", ORIGIN):
            given = f"status {status}, WebHook-Allowed-Origin {allowed}" if status else "no answer"
            raise LabError(
                f"url given: {self._shown}, which answered the handshake with {given}; "
                f"expected: WebHook-Allowed-Origin: {ORIGIN}"
            )

    def _run(self) -> None:
        while (event := self._next()) is not None:
            if not self._deliver(event):
                with self._changed:
                    self._undelivered.append(event)

    def _next(self) -> dict[str, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed.is_set())
            return None if self._closed.is_set() else self._waiting.popleft()

    def _deliver(self, event: dict[str, Any]) -> bool:
        for count, pause_seconds in enumerate((*RETRY_SECONDS, 0.0)):
            status, _ = self._call("POST", self._headers(event, count), json.dumps(event).encode())
            if status in SUCCESSES:
                return True
            self._report(
                f"delivery {count + 1} of {event['type']} to {self._shown} -> {status or 'no answer'}"
            )
            if status in NOT_RETRIED or self._closed.wait(pause_seconds):
                break
        return False

    def _headers(self, event: dict[str, Any], count: int) -> dict[str, str]:
        return {
            "Content-Type": CONTENT_TYPE,
            "WebHook-Request-Origin": ORIGIN,
            "aeg-event-type": "Notification",
            "aeg-subscription-name": self.name.upper(),
            "aeg-delivery-count": str(count),
            "aeg-metadata-version": event["specversion"],
        }

    def _call(self, method: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, str]:
        """Return the answer's status, 0 for none, and its WebHook-Allowed-Origin."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)
        try:
            connection.connect()
            with self._changed:
                self._connection = connection
                if self._closed.is_set():
                    return NO_ANSWER, ""
            connection.request(method, self._target, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.getheader("WebHook-Allowed-Origin", "")
        except (OSError, http.client.HTTPException, ValueError):
            return NO_ANSWER, ""
        finally:
            with self._changed:
                self._connection = None
            connection.close()


def _split(url: str) -> tuple[str, int, str]:
    """Return the host, the port, and the path with the query."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            return parts.hostname, parts.port or 80, target
    except ValueError:
        pass  # the port is not a number, or an IPv6 address lacks its bracket
    raise LabError(f"url given: {url!r}; expected: http://HOST:PORT/PATH")
