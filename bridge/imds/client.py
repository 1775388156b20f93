"""Ask IMDS: the Scheduled Events document, and who this VM is.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus

from bridge import __version__
from bridge.config.base import DAY_SECONDS
from bridge.config.models import ImdsSettings
from bridge.errors import HttpFailure, ImdsError
from bridge.imds.connection import ImdsConnection
from bridge.imds.discovery import search
from bridge.imds.instance import Vm, parse_vm
from bridge.imds.response import Response
from bridge.runtime.json import Json
from bridge.runtime.time import Clock

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance/compute?api-version=2021-02-01"
HEADERS = {"Metadata": "true", "Accept": "application/json", "User-Agent": f"imds-bridge/{__version__}"}
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
    """IMDS over HTTP, on a kept connection, never through a proxy and never redirected.

    Args:
        settings: where IMDS is, and which api-version it is asked for.
        clock: the time.
        environ: where discovery looks for SCHEDULEDEVENTSIP.
    """

    def __init__(
        self, settings: ImdsSettings, *, clock: Clock, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._environ = environ
        self._connection: ImdsConnection | None = None
        self._document_request = b""
        self._last_call_at: float | None = None
        self.base = ""
        self.found_in = "the configuration"

    def document(
        self, *, timeout_seconds: float | None = None, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Request the document; see Imds. The first call, and the first after a day without one, may take 130 s.

        A request that is not answered within 2 s is repeated on a fresh connection, once a second.
        """
        before = self._last_call_at
        limit_seconds = timeout_seconds or self._time_limit()
        try:
            connection = self._connect()
            if not self._document_request:
                self._document_request = connection.request("GET", self._events_path, HEADERS)
            answer = connection.send(
                self._document_request,
                limit_seconds=limit_seconds,
                max_body_bytes=MAX_DOCUMENT_BYTES,
                waiting=waiting,
                repeat=True,
            )
        except HttpFailure as failure:
            if failure.unreached:
                self._last_call_at = before  # the service was not reached, so it may still be off
            raise self._failed(failure) from failure
        return self._body(answer)

    def instance(self) -> Vm:
        """Request the instance data, unless the settings name the VM; see Imds."""
        if self._settings.vm_name:
            return Vm(name=self._settings.vm_name)
        try:
            connection = self._connect()
            answer = connection.send(
                connection.request("GET", INSTANCE_PATH, HEADERS),
                limit_seconds=INSTANCE_SECONDS,
                max_body_bytes=MAX_INSTANCE_BYTES,
            )
        except HttpFailure as failure:
            raise self._failed(failure) from failure
        try:
            return parse_vm(self._body(answer))
        except ValueError as error:
            raise ImdsError(f"IMDS sent instance data that cannot be read: {error}") from error

    def approve(self, event_ids: Sequence[str], *, incarnation: Json) -> None:
        """Approve events; see Imds."""
        content: dict[str, Json] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if self._settings.api_version == "2017-03-01":
            content["DocumentIncarnation"] = incarnation
        try:
            connection = self._connect()
            body = json.dumps(content).encode("ascii")
            answer = connection.send(
                connection.request("POST", self._events_path, {**HEADERS, **JSON_BODY}, body),
                limit_seconds=CALL_SECONDS,
                max_body_bytes=MAX_DOCUMENT_BYTES,
            )
        except HttpFailure as failure:
            raise self._failed(failure) from failure
        self._body(answer)

    def close(self) -> None:
        """Close the connection; see Imds."""
        if self._connection is not None:
            self._connection.close()

    @property
    def _events_path(self) -> str:
        return f"{EVENTS_PATH}?api-version={self._settings.api_version}"

    def _time_limit(self) -> float:
        now = self._clock.monotonic()
        may_be_off = self._last_call_at is None or now - self._last_call_at >= OFF_AFTER_SECONDS
        self._last_call_at = now
        return FIRST_CALL_SECONDS if may_be_off else CALL_SECONDS

    def _connect(self) -> ImdsConnection:
        """Return the connection to IMDS, which is looked for first where it was not found or did not answer."""
        if self._connection is None:
            self._locate()
            self._connection = ImdsConnection(self.base)
        return self._connection

    def _failed(self, failure: HttpFailure) -> ImdsError:
        """Map a failure; a new lease may have another address, so that a discovered one is looked for again."""
        if self._settings.endpoint == "discover":
            self.close()
            self._connection, self._document_request = None, b""
        return ImdsError(f"IMDS at {self.base}: {failure}")

    def _body(self, answer: Response) -> bytes:
        """Return the body of an answer with status 200."""
        if answer.status == HTTPStatus.OK:
            return answer.body
        hint = _HINTS.get(answer.status)
        raise ImdsError(
            f"IMDS at {self.base} answered {answer.status}" + (f" ({hint})" if hint else ""),
            status=answer.status,
            retry_after_seconds=_retry_after_seconds(answer.headers.get("retry-after", "")),
        )

    def _locate(self) -> None:
        if self._settings.endpoint != "discover":
            self.base = self._settings.endpoint
            return
        result = search(environ=self._environ)
        if result.found is None:
            raise ImdsError(
                'endpoint = "discover" found no address: no SCHEDULEDEVENTSIP and no lease with DHCP option 245'
            )
        self.base, self.found_in = f"http://{result.found.address}", result.found.found_in


def _retry_after_seconds(value: str) -> float | None:
    """Read Retry-After in seconds; None for anything else, as IMDS sends no dates."""
    return min(RETRY_AFTER_LIMIT_SECONDS, float(value)) if value.isdecimal() else None
