"""HTTP to IMDS: on a kept connection, within a limit, and with a second request beside one that is late.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from bridge.errors import HttpFailure
from bridge.imds.response import Response, ResponseReader
from bridge.runtime.threads import extend_deadline

CONNECT_SECONDS = 2.0
LATE_SECONDS = 2.0  # without an answer, until a second request is sent
REPEAT_SECONDS = 1.0  # between further ones: a request that IMDS has lost is never answered
LATE_CONNECT_SECONDS = 0.5

_HTTP_PORT = 80
_RECEIVE_BYTES = 16 * 1024


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
        self._selector = selectors.DefaultSelector()

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
        exchanges = _Exchanges(self._address, self._selector, request, max_body_bytes)
        try:
            kept, self._kept = self._kept, None
            exchanges.start(kept, seconds=min(CONNECT_SECONDS, limit_seconds))
            next_at = time.monotonic() + LATE_SECONDS
            while (answer := exchanges.receive(until=min(next_at, deadline))) is None:
                if time.monotonic() >= deadline:
                    raise HttpFailure(f"no complete answer within {limit_seconds:g} s")
                if waiting:
                    waiting()
                if repeat:
                    exchanges.repeat()
                next_at = time.monotonic() + REPEAT_SECONDS
            self._kept = exchanges.reusable
        finally:
            exchanges.close()
        return answer

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept connection."""
        if self._kept is not None:
            self._selector.unregister(self._kept)
            self._kept.close()
            self._kept = None


class _Exchanges:
    """The exchanges of one request: the first, and the latest of those that are sent beside it.

    `reusable` is the connection of the answer, unless it cannot be used again.
    """

    def __init__(
        self,
        address: tuple[str, int],
        selector: selectors.BaseSelector,
        request: bytes,
        max_body_bytes: int,
    ) -> None:
        self._address = address
        self._selector = selector
        self._request = request
        self._max_body_bytes = max_body_bytes
        self._open: dict[socket.socket, ResponseReader] = {}
        self._is_kept = False
        self.reusable: socket.socket | None = None

    def start(self, kept: socket.socket | None, *, seconds: float) -> None:
        """Send the request on the kept connection, or on a fresh one."""
        if kept is not None:
            self._open[kept] = ResponseReader(self._max_body_bytes)
            with contextlib.suppress(OSError):
                if _is_idle(kept):
                    kept.sendall(self._request)
                    self._is_kept = True
                    return
            self._drop(kept)
        self._connect(seconds)

    def repeat(self) -> None:
        """Send the request on a fresh connection, in place of the last one that was sent so."""
        with contextlib.suppress(HttpFailure):
            self._connect(LATE_CONNECT_SECONDS)
        for sock in list(self._open)[1:-1]:
            self._drop(sock)

    def receive(self, *, until: float) -> Response | None:
        """Return the first complete answer; None if there is none at `until` (monotonic)."""
        while True:
            # Once in any case: the answer may be there although the process did not run for a while.
            left = max(0.0, until - time.monotonic())
            for key, _ in self._selector.select(left):
                if answer := self._read(cast(socket.socket, key.fileobj)):
                    return answer
            if not left:
                return None

    def close(self) -> None:
        """Close the connections."""
        for sock in list(self._open):
            self._drop(sock)

    def _connect(self, seconds: float) -> None:
        try:
            sock = socket.create_connection(self._address, timeout=seconds)
        except (OSError, UnicodeError) as error:
            raise _no_connection(error, seconds) from error
        self._open[sock] = ResponseReader(self._max_body_bytes)
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(self._request)
            sock.setblocking(False)
        except OSError as error:
            self._drop(sock)
            raise _broken(error) from error

    def _drop(self, sock: socket.socket) -> None:
        del self._open[sock]
        self._selector.unregister(sock)
        sock.close()

    def _read(self, sock: socket.socket) -> Response | None:
        """Read once; return the answer if it is complete."""
        reader = self._open[sock]
        try:
            answer = reader.feed(_receive(sock))
        except BlockingIOError:
            return None
        except HttpFailure:
            self._drop(sock)
            if self._open:
                return None
            if not self._is_kept or not reader.is_empty:
                raise
            # The server had closed the kept connection, which shows only now.
            self._is_kept = False
            self._connect(CONNECT_SECONDS)
            return None
        if answer and not answer.is_last:
            del self._open[sock]
            self.reusable = sock
        return answer


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(_RECEIVE_BYTES)
    except BlockingIOError:
        raise
    except OSError as error:
        raise _broken(error) from error


def _is_idle(sock: socket.socket) -> bool:
    """Return whether a kept connection is open, with nothing to read that would be taken for the next answer.

    Raises:
        OSError: it is broken.
    """
    try:
        sock.recv(1)
    except BlockingIOError:
        return True
    return False


def _no_connection(error: OSError | UnicodeError, seconds: float) -> HttpFailure:
    if isinstance(error, TimeoutError):
        return HttpFailure(f"no connection within {seconds:g} s", unreached=True)
    return HttpFailure(f"the connection failed: {_reason(error)}", unreached=True)


def _broken(error: OSError) -> HttpFailure:
    return HttpFailure(f"the exchange was interrupted: {_reason(error)}")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
