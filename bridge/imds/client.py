"""Ask IMDS: the Scheduled Events document, and who this VM is.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence

import requests

from bridge.config.base import DAY_SECONDS
from bridge.config.imds import ImdsSettings
from bridge.errors import HttpFailure, ImdsError
from bridge.http.client import Answer, HttpClient, retry_after_seconds
from bridge.imds.discovery import search
from bridge.imds.instance import Vm, parse_vm
from bridge.runtime.clock import Clock
from bridge.runtime.json import Json

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance/compute?api-version=2021-02-01"
HEADERS = {"Metadata": "true", "Accept": "application/json"}
JSON_BODY = {"Content-Type": "application/json"}

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
MAX_INSTANCE_BYTES = 1024 * 1024
# The first call turns the service on and may take two minutes; a day without a call turns it off.
FIRST_CALL_SECONDS = 130.0
CALL_SECONDS = 10.0
OFF_AFTER_SECONDS = DAY_SECONDS
INSTANCE_SECONDS = 2.0
# Polling pauses for no longer than this, whatever an answer asks for.
RETRY_AFTER_LIMIT_SECONDS = 5.0

_HINTS = {
    400: "does this IMDS support api_version?",
    404: "the service is being updated, or this is not an Azure VM",
    410: "the service is being updated, for at most 70 s",
    429: "more than 5 requests a second from this VM: other programs use IMDS as well",
}


class ImdsClient:
    """IMDS over HTTP, on a kept-alive connection, never through a proxy and never redirected."""

    def __init__(
        self, settings: ImdsSettings, *, clock: Clock, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._environ = environ
        self._http = HttpClient()
        self._last_call_at: float | None = None
        self._request: requests.PreparedRequest | None = None
        self.base = ""
        self.found_in = "the configuration"

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Request the document; see Imds. The first call, and the first after a day without one, may take 130 s."""
        del waiting
        before = self._last_call_at
        limit = timeout_seconds or self._time_limit()
        if self._request is None:
            self._request = self._prepare(f"{EVENTS_PATH}?api-version={self._settings.api_version}")
        try:
            return self._send(self._request, limit, MAX_DOCUMENT_BYTES).body
        except ImdsError as error:
            if isinstance(error.__cause__, HttpFailure) and error.__cause__.unreached:
                self._last_call_at = before  # the service was not reached, so it may still be off
            raise

    def instance(self) -> Vm:
        """Request the instance data; see Imds."""
        answer = self._send(self._prepare(INSTANCE_PATH), INSTANCE_SECONDS, MAX_INSTANCE_BYTES)
        try:
            return parse_vm(answer.body)
        except ValueError as error:
            raise ImdsError(f"IMDS sent instance data that cannot be read: {error}") from error

    def approve(self, event_ids: Sequence[str], *, incarnation: Json) -> None:
        """Approve events; see Imds."""
        content: dict[str, Json] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if self._settings.api_version == "2017-03-01":
            content["DocumentIncarnation"] = incarnation
        path = f"{EVENTS_PATH}?api-version={self._settings.api_version}"
        request = self._prepare(path, body=json.dumps(content).encode("ascii"))
        self._send(request, CALL_SECONDS, MAX_DOCUMENT_BYTES)

    def close(self) -> None:
        """Close the connection; see Imds."""
        self._http.close()

    def _time_limit(self) -> float:
        now = self._clock.monotonic()
        may_be_off = self._last_call_at is None or now - self._last_call_at >= OFF_AFTER_SECONDS
        self._last_call_at = now
        return FIRST_CALL_SECONDS if may_be_off else CALL_SECONDS

    def _prepare(self, path: str, *, body: bytes | None = None) -> requests.PreparedRequest:
        """Build a GET, or a POST of JSON."""
        base = self._locate()
        method, headers = ("GET", HEADERS) if body is None else ("POST", {**HEADERS, **JSON_BODY})
        try:
            return self._http.prepare(method, base + path, headers=headers, body=body)
        except HttpFailure as error:
            raise ImdsError(f"IMDS at {base}: {error}") from error

    def _send(self, request: requests.PreparedRequest, limit_seconds: float, max_bytes: int) -> Answer:
        try:
            answer = self._http.send(request, timeout_seconds=limit_seconds, max_body_bytes=max_bytes)
        except HttpFailure as error:
            if self._settings.endpoint == "discover":
                self._request = None  # a new lease may have another address
            raise ImdsError(f"IMDS at {self.base}: {error}") from error
        if answer.status == requests.codes.ok:
            return answer
        hint = _HINTS.get(answer.status)
        raise ImdsError(
            f"IMDS at {self.base} answered {answer.status}" + (f" ({hint})" if hint else ""),
            status=answer.status,
            retry_after_seconds=retry_after_seconds(answer.headers, limit_seconds=RETRY_AFTER_LIMIT_SECONDS),
        )

    def _locate(self) -> str:
        if self._settings.endpoint != "discover":
            self.base = self._settings.endpoint
            return self.base
        result = search(environ=self._environ)
        if result.found is None:
            raise ImdsError(
                'endpoint = "discover" found no address: no SCHEDULEDEVENTSIP and no lease with DHCP option 245'
            )
        self.base, self.found_in = f"http://{result.found.address}", result.found.found_in
        return self.base
