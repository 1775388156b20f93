"""Deliver events to a webhook as Event Grid does: validate the endpoint, send one event per request, retry."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import requests

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


class Subscription:
    """Deliver to one webhook, in order, on a separate thread. Every method may be called from any thread."""

    def __init__(self, url: str, *, name: str, report: Callable[[str], None]) -> None:
        """Validate the endpoint and start.

        Args:
            url: the webhook.
            name: sent in a header of each delivery, in upper case as the service does.
            report: called with a sentence for each attempt that failed.

        Raises:
            LabError: the URL is invalid, or the endpoint did not consent.
        """
        self._url = url
        self._name = name
        self._shown = url.partition("?")[0]  # the query can be a secret
        self._report = report
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue(MAX_WAITING)
        self._closed = threading.Event()
        self._session = requests.Session()
        self._session.trust_env = False  # no proxy of the environment stands before this machine
        status, allowed = self._call("OPTIONS", {})
        if allowed not in ("*", ORIGIN):
            given = f"status {status}, WebHook-Allowed-Origin {allowed}" if status else "no answer"
            raise LabError(
                f"url given: {self._shown}, which answered the handshake with {given}; "
                f"expected: WebHook-Allowed-Origin: {ORIGIN}"
            )
        threading.Thread(target=self._run, name=f"lab-deliver-{name}", daemon=True).start()

    def offer(self, event: dict[str, Any]) -> None:
        """Queue the event for delivery; never blocks."""
        with suppress(queue.Full):
            self._waiting.put_nowait(event)

    def close(self) -> None:
        """Stop: events that wait are dropped, and a delivery that hangs is left to its limit."""
        self._closed.set()
        self.offer({})

    def _run(self) -> None:
        while (event := self._waiting.get()) and not self._closed.is_set():
            self._deliver(event)
        self._session.close()

    def _deliver(self, event: dict[str, Any]) -> None:
        for count, pause_seconds in enumerate((*RETRY_SECONDS, 0.0)):
            headers = {
                "Content-Type": CONTENT_TYPE,
                "aeg-event-type": "Notification",
                "aeg-subscription-name": self._name.upper(),
                "aeg-delivery-count": str(count),
                "aeg-metadata-version": event["specversion"],
            }
            status, _ = self._call("POST", headers, event)
            if status in SUCCESSES:
                return
            self._report(
                f"delivery {count + 1} of {event['type']} to {self._shown} -> {status or 'no answer'}"
            )
            if status in NOT_RETRIED or self._closed.wait(pause_seconds):
                return

    def _call(self, method: str, headers: Mapping[str, str], body: Any = None) -> tuple[int, str]:
        """Return the answer's status, 0 for none, and its WebHook-Allowed-Origin."""
        try:
            answer = self._session.request(
                method,
                self._url,
                headers={"WebHook-Request-Origin": ORIGIN, **headers},
                json=body,
                timeout=ANSWER_SECONDS,
                allow_redirects=False,
            )
        except requests.RequestException:
            return NO_ANSWER, ""
        return answer.status_code, answer.headers.get("WebHook-Allowed-Origin", "")
