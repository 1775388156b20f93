"""HTTP to IMDS: on a kept connection, within a limit, and with a second request beside one that is late.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from bridge.errors import HttpFailure
from bridge.runtime.threads import extend_deadline

CONNECT_SECONDS = 2.0
LATE_SECONDS = 2.0  # without an answer, until a second request is sent
REPEAT_SECONDS = 1.0  # between further ones: a request that IMDS has lost is never answered
LATE_CONNECT_SECONDS = 0.5

_HTTP_PORT = 80
_MAX_HEAD_BYTES = 64 * 1024
_RECEIVE_BYTES = 256 * 1024
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9]\d\d)(?: |$)")


@dataclass(frozen=True, kw_only=True)
class Response:
    """A complete answer; the names of `headers` are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_last: bool


class ImdsConnection:
    """Exchanges with one server, for one thread at a time.

    Args:
        base: the server's URL, with `http`.

    Raises:
        HttpFailure: the URL cannot be used.
    """

    _kept: socket.socket | None = None

    def __init__(self, base: str) -> None:
        try:
            parts = urlsplit(base)
            self._address = (parts.hostname or "", parts.port or _HTTP_PORT)
        except ValueError:
            raise HttpFailure(f"{base} is not a URL", permanent=True) from None
        if parts.scheme != "http" or not parts.hostname:
            raise HttpFailure(f"cannot send to {base}: expected http://address", permanent=True)
        self._host, self._path = parts.netloc, parts.path

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
        """Return a request as it is sent.

        Args:
            method: GET or POST.
            path: with the query.
            headers: further ones.
            body: of a POST.
        """
        sent = {"Host": self._host, "Accept-Encoding": "identity", **headers}
        if method != "GET":
            sent["Content-Length"] = str(len(body))
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        return f"{method} {self._path}{path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body

    def send(
        self,
        request: bytes,
        *,
        limit_seconds: float,
        max_body_bytes: int,
        waiting: Callable[[], object] | None = None,
        repeat: bool = False,
    ) -> Response:
        """Send a request and return the answer.

        Args:
            request: from `request`.
            limit_seconds: for the whole exchange.
            max_body_bytes: of the largest body that is read.
            waiting: called once a second while there is no answer after 2 s.
            repeat: whether to send the request again on fresh connections while there is none.

        Raises:
            HttpFailure: there was no complete answer in time, or a larger one.
        """
        extend_deadline(limit_seconds)
        deadline = time.monotonic() + limit_seconds
        exchanges = _Exchanges(self._address, request, max_body_bytes)
        try:
            exchanges.start(self._kept, seconds=min(CONNECT_SECONDS, limit_seconds))
            self._kept = None
            next_at = time.monotonic() + LATE_SECONDS
            while (answer := exchanges.receive(until=min(next_at, deadline))) is None:
                if time.monotonic() >= deadline:
                    raise HttpFailure(f"no complete answer within {limit_seconds:g} s")
                if waiting:
                    waiting()
                if repeat:
                    exchanges.repeat()
                next_at = time.monotonic() + REPEAT_SECONDS
            self._kept = exchanges.keep(answer)
        finally:
            exchanges.close()
        return answer

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connection."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


class _Exchanges:
    """The exchanges of one request: the first, and the latest of those that are sent beside it."""

    def __init__(self, address: tuple[str, int], request: bytes, max_body_bytes: int) -> None:
        self._address = address
        self._request = request
        self._max_body_bytes = max_body_bytes
        self._open: list[_Exchange] = []
        self._is_kept = False
        self._done: _Exchange | None = None

    def start(self, kept: socket.socket | None, *, seconds: float) -> None:
        """Send the request on the kept connection, or on a fresh one."""
        if kept is not None:
            with contextlib.suppress(OSError):
                self._add(kept)
                self._is_kept = True
                return
            kept.close()
        self._connect(seconds)

    def repeat(self) -> None:
        """Send the request on a fresh connection, in place of the last one that was sent so."""
        with contextlib.suppress(HttpFailure):
            self._connect(LATE_CONNECT_SECONDS)
        for exchange in self._open[1:-1]:
            self._drop(exchange)

    def receive(self, *, until: float) -> Response | None:
        """Return the first complete answer; None if there is none at `until` (monotonic)."""
        while (left := until - time.monotonic()) > 0:
            for exchange in self._readable(left):
                try:
                    answer = exchange.receive()
                except HttpFailure:
                    self._drop(exchange)
                    if self._open:
                        continue
                    if not self._is_kept or exchange.has_data:
                        raise
                    # The server had closed the kept connection, which shows only now.
                    self._is_kept = False
                    self._connect(CONNECT_SECONDS)
                    continue
                if answer is not None:
                    self._done = exchange
                    return answer
        return None

    def keep(self, answer: Response) -> socket.socket | None:
        """Return the connection of the answer, unless it cannot be used again."""
        if answer.is_last or self._done is None:
            return None
        self._open.remove(self._done)
        return self._done.socket

    def close(self) -> None:
        """Close the connections."""
        for exchange in list(self._open):
            self._drop(exchange)

    def _connect(self, seconds: float) -> None:
        try:
            sock = socket.create_connection(self._address, timeout=seconds)
        except (OSError, UnicodeError) as error:
            raise _no_connection(error, seconds) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._add(sock)
        except OSError as error:
            sock.close()
            raise _broken(error) from error

    def _add(self, sock: socket.socket) -> None:
        sock.sendall(self._request)
        self._open.append(_Exchange(sock, self._max_body_bytes))

    def _drop(self, exchange: _Exchange) -> None:
        self._open.remove(exchange)
        exchange.socket.close()

    def _readable(self, seconds: float) -> list[_Exchange]:
        """Wait for data; return the exchanges that have some."""
        if len(self._open) == 1:
            self._open[0].socket.settimeout(seconds)  # the call that reads waits
            return self._open[:]
        with selectors.DefaultSelector() as selector:
            for exchange in self._open:
                selector.register(exchange.socket, selectors.EVENT_READ, exchange)
            return [key.data for key, _ in selector.select(seconds)]


class _Exchange:
    """What one connection has received so far."""

    def __init__(self, sock: socket.socket, max_body_bytes: int) -> None:
        self.socket = sock
        self._max_body_bytes = max_body_bytes
        self._data = bytearray()

    @property
    def has_data(self) -> bool:
        """Whether anything was received."""
        return bool(self._data)

    def receive(self) -> Response | None:
        """Read once; return the answer if it is complete."""
        try:
            received = self.socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return None
        except OSError as error:
            raise _broken(error) from error
        self._data += received
        answer = _parse(self._data, self._max_body_bytes, is_end=not received)
        if answer is None and not received:
            raise HttpFailure("the connection closed in the middle of an answer")
        return answer


def _parse(data: bytearray, max_body_bytes: int, *, is_end: bool) -> Response | None:
    """Return the answer in `data` if it is complete; interim ones (1xx) are removed."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        if len(data) > _MAX_HEAD_BYTES:
            raise HttpFailure("an answer that is not HTTP")
        return None
    status_line, *lines = data[:end].decode("latin-1").split("\r\n")
    match = _STATUS_LINE.match(status_line)
    if match is None:
        raise HttpFailure("an answer that is not HTTP")
    status = int(match[2])
    if status < HTTPStatus.OK:
        del data[: end + 4]
        return _parse(data, max_body_bytes, is_end=is_end)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    body: bytes | None = b""
    if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
        body = _body(headers, data, end + 4, is_end=is_end, max_body_bytes=max_body_bytes)
    if body is None:
        return None
    is_last = is_end or match[1] == "0" or "close" in headers.get("connection", "").lower()
    return Response(status=status, headers=headers, body=body, is_last=is_last)


def _body(
    headers: Mapping[str, str], data: bytearray, start: int, *, is_end: bool, max_body_bytes: int
) -> bytes | None:
    """Return the body that starts at `start` if it is complete."""
    if len(data) - start > max_body_bytes:
        raise HttpFailure(f"an answer of more than {max_body_bytes} bytes")
    if "transfer-encoding" in headers:
        return _chunks(data, start)
    length = headers.get("content-length")
    if length is None:
        return bytes(data[start:]) if is_end else None
    if not length.isdecimal():
        raise HttpFailure("an answer that is not HTTP")
    if int(length) > max_body_bytes:
        raise HttpFailure(f"an answer of more than {max_body_bytes} bytes")
    end = start + int(length)
    return bytes(data[start:end]) if len(data) >= end else None


def _chunks(data: bytearray, start: int) -> bytes | None:
    """Return the body in chunks that starts at `start` if its last chunk is there."""
    body = bytearray()
    while (end := data.find(b"\r\n", start)) >= 0:
        try:
            size = int(data[start:end].partition(b";")[0], 16)
        except ValueError:
            raise HttpFailure("an answer that is not HTTP") from None
        if size == 0:
            return bytes(body)
        start = end + 2 + size + 2
        if len(data) < start:
            return None
        body += data[end + 2 : end + 2 + size]
    return None


def _no_connection(error: OSError | UnicodeError, seconds: float) -> HttpFailure:
    if isinstance(error, TimeoutError):
        return HttpFailure(f"no connection within {seconds:g} s", unreached=True)
    return HttpFailure(f"the connection failed: {_reason(error)}", unreached=True)


def _broken(error: OSError) -> HttpFailure:
    return HttpFailure(f"the exchange was interrupted: {_reason(error)}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
