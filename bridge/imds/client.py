"""Ask IMDS: the Scheduled Events document, and who this VM is.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from http.client import (
    HTTP_PORT,
    BadStatusLine,
    HTTPException,
    HTTPResponse,
    IncompleteRead,
    RemoteDisconnected,
)
from urllib.parse import urlsplit

from bridge import __version__
from bridge.config.base import DAY_SECONDS
from bridge.config.models import ImdsSettings
from bridge.contract.types import API_VERSION
from bridge.errors import ImdsError
from bridge.imds.discovery import search
from bridge.imds.instance import Vm, parse_vm
from bridge.runtime.json import BoundedDecoder, Json, read_object
from bridge.runtime.text import one_line
from bridge.runtime.threads import extend_deadline, may_be_cut
from bridge.runtime.time import Clock, parse_instant

log = logging.getLogger(__name__)

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance/compute?api-version=2021-02-01"
HEADERS = (
    "Metadata: true\r\nAccept: application/json\r\nAccept-Encoding: identity\r\n"
    f"User-Agent: imds-bridge/{__version__}\r\n"
)

MAX_BODY_BYTES = 4 * 1024 * 1024
# The first call turns the service on and may take two minutes; a day without a call turns it off.
FIRST_CALL_SECONDS = 130.0
CALL_SECONDS = 10.0
OFF_AFTER_SECONDS = DAY_SECONDS
INSTANCE_SECONDS = 2.0
CONNECT_SECONDS = 2.0
# A request without an answer for so long is repeated on a fresh connection: IMDS may have lost it.
LATE_SECONDS = 2.0
# Polling pauses for no longer than this, whatever an answer asks for.
RETRY_AFTER_LIMIT_SECONDS = 5.0
# An api-version that IMDS does not know is asked for again after this: Azure may have enabled it.
VERSION_SECONDS = 3600.0
WORDS_CHARACTERS = 200  # of what IMDS says of an error

_PIECE_BYTES = 64 * 1024
MAX_LINE_BYTES, MAX_HEADERS = 64 * 1024, 100
_LEAST_SECONDS = 0.01
_decoder = BoundedDecoder(max_depth=10)
_UNKNOWN_VERSION = re.compile("invalid version requested|api-version is invalid", re.IGNORECASE)
_HINTS = {  # the first two are for answers without words
    400: "does this IMDS support api_version?",
    404: "the service is being updated, or this is not an Azure VM",
    410: "the service is being updated, for at most 70 s",
    429: "more than 5 requests a second from this VM: other programs use IMDS as well",
}


@dataclass(eq=False)
class ImdsClient:
    """IMDS as one VM sees it, on a kept connection, never through a proxy and never redirected.

    It is used from one thread at a time, except for `base`, the address in use ("" before the first call), and
    `version_error`, which any thread may read. Every failure is an ImdsError, with the status and the Retry-After of
    the answer if there was one; the next call may succeed. The caller sees to the limit of five requests a second for
    all processes of a VM.

    Args:
        settings: where IMDS is, and which api-version it is asked for.
        clock: the time.
        measured: makes a context around each request for the document.
    """

    settings: ImdsSettings
    _: KW_ONLY
    clock: Clock
    measured: Callable[[], AbstractContextManager[None]] = nullcontext

    def __post_init__(self) -> None:
        self._kept: socket.socket | None = None
        self._used_at = 0.0  # the kept connection, by the wall clock
        self._first: socket.socket | None = None  # with the first request, which turns the service on
        self._fallback: Fallback | None = None
        self._late_seconds = LATE_SECONDS
        self._dated = ("", 0.0)  # and when it came, monotonic
        self.base = ""

    def document(
        self, *, timeout_seconds: float = CALL_SECONDS, waiting: Callable[[], object] | None = None
    ) -> bytes:
        """Return the Scheduled Events document as received, not checked in any way.

        A request that is not answered within 2 s is repeated, then after twice the time and so on, which also lets a
        slow IMDS answer; the next call waits as long. Where the service may have to be turned on, the first request
        stays open beside the others, also if those fail.

        Args:
            timeout_seconds: the limit; where the service may have to be turned on first, FIRST_CALL_SECONDS.
            waiting: called before each repetition; what it raises ends the call.

        Raises:
            ImdsError: no status 200 with a complete body of at most 4 MiB in time.
        """
        deadline, keeps_first = time.monotonic() + timeout_seconds, timeout_seconds > CALL_SECONDS
        with self.measured():
            try:
                return self._ask_until(deadline, keeps_first, waiting)
            finally:
                self._close_first()

    def instance(self, limit_seconds: float = INSTANCE_SECONDS) -> Vm:
        """Return who this VM is, from instance data unless the settings name it.

        Raises:
            ImdsError: no readable instance data with a name in time.
        """
        if self.settings.vm_name:
            return Vm(name=self.settings.vm_name)
        try:
            return parse_vm(self._call(INSTANCE_PATH, limit_seconds=limit_seconds))
        except ValueError as error:
            raise ImdsError(f"IMDS sent instance data that cannot be read: {error}") from error

    def approve(
        self, event_ids: Sequence[str], *, incarnation: Json, limit_seconds: float = CALL_SECONDS
    ) -> None:
        """Approve the start of events. IMDS allows it to be repeated.

        Args:
            event_ids: as received in the document; IMDS compares them with their case.
            incarnation: DocumentIncarnation of that document as received; api-version 2017-03-01 asks for it.
            limit_seconds: how long to wait for the answer.

        Raises:
            ImdsError: no status 200 in time. `status` 400: IMDS refuses the request, nothing was approved.
                Without a status, the events may have been approved.
        """
        content: dict[str, Json] = {"StartRequests": [{"EventId": event_id} for event_id in event_ids]}
        if self._api_version == "2017-03-01":
            content["DocumentIncarnation"] = incarnation
        self.close()  # a kept connection may end while it carries the request, which is sent once
        self._ask(json.dumps(content), limit_seconds=limit_seconds)

    @property
    def version_error(self) -> str | None:
        """Why another api-version is asked for than the settings name; None if none is."""
        return self._fallback.reason if self._fallback else None

    @property
    def clock_ahead_seconds(self) -> float | None:
        """How far this VM's clock is ahead of IMDS's now, by the last good answer's `Date`; None if it had none."""
        date, at = self._dated
        sent = parse_instant(date)
        since = self.clock.monotonic() - at
        return round(self.clock.wall() - sent.timestamp() - since, 1) if sent else None

    def close(self) -> None:
        """Close the connection; a later call opens a new one."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def _close_first(self) -> None:
        if self._first is not None:
            self._first.close()
            self._first = None

    @property
    def _api_version(self) -> str:
        is_refused = self._fallback and self.clock.monotonic() < self._fallback.until
        return API_VERSION if is_refused else self.settings.api_version

    def _ask_until(self, deadline: float, keeps_first: bool, waiting: Callable[[], object] | None) -> bytes:
        """Ask for the document, again and again while there is no answer."""
        while (left := deadline - time.monotonic()) > self._late_seconds:
            try:
                return self._ask(limit_seconds=self._late_seconds, keeps_first=keeps_first)
            except ImdsError as error:
                if not isinstance(error, NoAnswerError):
                    if self._first is None:
                        raise
                    select.select([self._first], [], [], self._late_seconds)
                self._late_seconds *= 2
                if keeps_first:
                    self._late_seconds = min(self._late_seconds, CALL_SECONDS)
                if waiting:
                    waiting()
        self._late_seconds = min(self._late_seconds, CALL_SECONDS)
        return self._ask(limit_seconds=left, keeps_first=keeps_first)

    def _ask(self, content: str = "", *, limit_seconds: float, keeps_first: bool = False) -> bytes:
        """GET what is about Scheduled Events, or POST content, in the version that IMDS knows."""
        version = self._api_version
        path = f"{EVENTS_PATH}?api-version={version}"
        try:
            body = self._call(path, content, limit_seconds=limit_seconds, keeps_first=keeps_first)
        except ImdsError as error:
            # a try in between ends the other version only by an answer
            if version == API_VERSION or not (self._fallback or isinstance(error, UnknownVersionError)):
                raise
            reason = f"{API_VERSION} is asked for, and api_version {version} again every hour: {error}"
            if not self._fallback:
                log.warning("%s", reason)
            self._fallback = Fallback(reason=reason, until=self.clock.monotonic() + VERSION_SECONDS)
            return self._ask(content, limit_seconds=limit_seconds, keeps_first=keeps_first)
        if self._fallback and version != API_VERSION:
            log.info("IMDS knows api_version %s now", version)
            self._fallback = None
        return body

    def _call(
        self, path: str, content: str = "", *, limit_seconds: float, keeps_first: bool = False
    ) -> bytes:
        """Send a request and return the body of an answer with status 200."""
        extend_deadline(limit_seconds)
        began = time.monotonic()
        try:
            answer, body = self._exchange(path, content, began + limit_seconds, keeps_first)
        except TimeoutError as error:
            raise self._failed(f"no complete answer within {limit_seconds:.3g} s", NoAnswerError) from error
        except OSError as error:
            raise self._failed(f"the exchange was interrupted: {_reason(error)}") from error
        except (HTTPException, ValueError) as error:
            raise self._failed(f"the answer cannot be read: {_reason(error)}") from error
        if time.monotonic() - began < LATE_SECONDS:
            self._late_seconds = LATE_SECONDS
        if answer.status != HTTPStatus.OK:
            raise _refusal(answer, body, self.base)
        self._dated = answer.fields.get("date", ""), self.clock.monotonic()
        return body

    def _exchange(self, path: str, content: str, deadline: float, keeps_first: bool) -> tuple[_Answer, bytes]:
        """Send a request, again if the server has just closed the kept connection; return the answer and its body."""
        first = self._first if keeps_first else None
        if first and not select.select([first], [], [], 0)[0]:
            first = None  # its answer, if there is one, is read also if no other connection opens
        sock, is_kept = (first, False) if first else self._connect(deadline)
        try:
            if not first:
                sock.sendall(self._request(path, content))
            if keeps_first:
                sock, deadline = self._answering(sock, deadline)
            with _Answer(sock) as answer:
                answer.begin()
                body = _read(answer, deadline)
        except ConnectionError:
            self.close()
            if not is_kept:
                raise
            return self._exchange(path, content, deadline, keeps_first)
        self._used_at = self.clock.wall()
        if answer.will_close:
            self.close()
        return answer, body

    def _answering(self, sock: socket.socket, deadline: float) -> tuple[socket.socket, float]:
        """Wait for this answer or the first one; return the connection that has it, and until when it is read."""
        ready = select.select([sock, *filter(None, [self._first])], [], [], _left(deadline))[0]
        if not ready:
            if self._first is None:
                self._first, self._kept = sock, None
            raise TimeoutError
        if ready[-1] is self._first:
            self.close()
            self._kept, self._first, deadline = self._first, None, time.monotonic() + LATE_SECONDS
            self._kept.settimeout(LATE_SECONDS)
        return ready[-1], deadline

    def _request(self, path: str, content: str) -> bytes:
        method, parts = "POST" if content else "GET", urlsplit(self.base)
        length = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
        head = f"{method} {parts.path}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n{HEADERS}{length}\r\n"
        return (head + content).encode("ascii")

    def _connect(self, deadline: float) -> tuple[socket.socket, bool]:
        """Return a connection and whether it is the kept one."""
        # What is there to read before a request is the end of the connection, or would be taken for the next answer.
        is_cut = may_be_cut(self.clock.wall() - self._used_at)
        if self._kept and (is_cut or select.select([self._kept], [], [], 0)[0]):
            self.close()
        is_kept = self._kept is not None
        sock = self._kept or self._open(min(CONNECT_SECONDS, _left(deadline)))
        sock.settimeout(_left(deadline))
        return sock, is_kept

    def _open(self, limit_seconds: float) -> socket.socket:
        """Open a connection; the address is looked for first, as a new lease may have another one."""
        self.base = self._address()
        parts = urlsplit(self.base)
        address = (parts.hostname or "", parts.port or HTTP_PORT)
        try:
            self._kept = socket.create_connection(address, limit_seconds)
            self._kept.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, UnicodeError) as error:
            raise self._failed(f"the connection failed: {_reason(error)}") from error
        return self._kept

    def _address(self) -> str:
        if self.settings.endpoint != "discover":
            return self.settings.endpoint
        found = search(environ=os.environ)
        if found is None:
            raise ImdsError(
                'endpoint = "discover" found no address: no SCHEDULEDEVENTSIP and no lease with DHCP option 245'
            )
        return f"http://{found[0]}"

    def _failed(self, reason: str, kind: type[ImdsError] = ImdsError) -> ImdsError:
        """Close the connection and return the error."""
        self.close()
        return kind(f"IMDS at {self.base}: {reason}")


class _Answer(HTTPResponse):
    """An answer whose head is read without the parser of e-mail, which takes longer than all the rest."""

    fields: dict[str, str]
    """The headers, by their names in lower case."""

    def begin(self) -> None:
        """Read the status and the headers."""
        version, _, rest = self._line().partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
            raise BadStatusLine(f"{version} {rest}")
        self.status = int(rest[:3])
        self.fields = {}
        while line := self._line():
            name, _, value = line.partition(":")
            self.fields[name.strip().lower()] = value.strip()
            if len(self.fields) > MAX_HEADERS:
                raise HTTPException(f"more than {MAX_HEADERS} headers")
        length = self.fields.get("content-length", "")
        self.chunked = self.fields.get("transfer-encoding", "").lower() == "chunked"
        self.chunk_left = None
        self.length = int(length) if length.isdecimal() and not self.chunked else None
        if self.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.length = 0
        has_end = self.chunked or self.length is not None
        self.will_close = (
            version == "HTTP/1.0" or not has_end or self.fields.get("connection", "").lower() == "close"
        )

    def _line(self) -> str:
        line: bytes = self.fp.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise RemoteDisconnected("the connection ended within the head, or a line of it is too long")
        return line.decode("latin-1").strip("\r\n")


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Why another api-version is asked for than the settings name, and until when (monotonic)."""

    reason: str
    until: float


class NoAnswerError(ImdsError):
    """There was a connection, but no complete answer in time."""


class UnknownVersionError(ImdsError):
    """IMDS does not know the api-version."""


def _read(answer: _Answer, deadline: float) -> bytes:
    """Read a body within the limits of size and time."""
    body = bytearray()
    while answer.length != 0 and (piece := answer.read1(_PIECE_BYTES)):
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(f"an answer of more than {MAX_BODY_BYTES} bytes")
        # A complete one counts, however long the process slept.
        if answer.length != 0 and time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:
        raise IncompleteRead(bytes(body), answer.length)
    return bytes(body)


def _left(deadline: float) -> float:
    return max(_LEAST_SECONDS, deadline - time.monotonic())


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or one_line(str(error), 100)


def _refusal(answer: _Answer, body: bytes, base: str) -> ImdsError:
    words, asked = _words(body), answer.fields.get("retry-after", "")
    hint = "" if words and answer.status in (400, 404) else _HINTS.get(answer.status)
    kind = UnknownVersionError if _UNKNOWN_VERSION.search(words) else ImdsError
    return kind(
        f"IMDS at {base} answered {answer.status}"
        + (f" ({hint})" if hint else "")
        + (words and f": {words}"),
        status=answer.status,
        retry_after_seconds=min(RETRY_AFTER_LIMIT_SECONDS, float(asked)) if asked.isdecimal() else None,
    )


def _words(body: bytes) -> str:
    """Return the start of what IMDS says of an error in a text or in JSON, made safe; "" for a page."""
    text = body[: 8 * WORDS_CHARACTERS].decode(errors="replace")
    with suppress(ValueError):
        error = read_object(body, max_bytes=len(body), decoder=_decoder).get("error")
        error = error.get("message") if isinstance(error, dict) else error
        text = error if isinstance(error, str) else text
    return "" if text.lstrip().startswith("<") else one_line(text, WORDS_CHARACTERS)
