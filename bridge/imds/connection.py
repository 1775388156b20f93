"""HTTP to IMDS: on a kept connection, within a limit, and with a second request beside one that is late.

I/O: HTTP and the clock.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from bridge.errors import HttpFailure
from bridge.imds.response import Response, ResponseReader
from bridge.runtime.threads import extend_deadline

CONNECT_SECONDS = 2.0
LATE_SECONDS = 2.0  # without an answer, until a second request is sent
REPEAT_SECONDS = 1.0  # between further ones: a request that IMDS has lost is never answered
LATE_CONNECT_SECONDS = 0.5

_HTTP_PORT = 80
_READ_SECONDS = 0.001
_RECEIVE_BYTES = 256 * 1024


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
                if _is_idle(kept):
                    self._add(kept, seconds)
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
        left = until - time.monotonic()
        while True:
            # At least once: the answer may be there although the process did not run for a while.
            for exchange in self._readable(max(_READ_SECONDS, left)):
                try:
                    answer = exchange.receive()
                except HttpFailure:
                    self._drop(exchange)
                    if self._open:
                        continue
                    if not self._is_kept or not exchange.reader.is_empty:
                        raise
                    # The server had closed the kept connection, which shows only now.
                    self._is_kept = False
                    self._connect(CONNECT_SECONDS)
                    continue
                if answer is not None:
                    self._done = exchange
                    return answer
            if (left := until - time.monotonic()) <= 0:
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
            self._add(sock, seconds)
        except OSError as error:
            sock.close()
            raise _broken(error) from error

    def _add(self, sock: socket.socket, seconds: float) -> None:
        sock.settimeout(seconds)
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
    """A request that was sent on a connection, and what was received so far."""

    def __init__(self, sock: socket.socket, max_body_bytes: int) -> None:
        self.socket = sock
        self.reader = ResponseReader(max_body_bytes)

    def receive(self) -> Response | None:
        """Read once; return the answer if it is complete."""
        try:
            received = self.socket.recv(_RECEIVE_BYTES)
        except TimeoutError:
            return None
        except OSError as error:
            raise _broken(error) from error
        return self.reader.feed(received)


def _is_idle(sock: socket.socket) -> bool:
    """Return whether a kept connection is open, with nothing to read that would be taken for the next answer.

    Raises:
        OSError: it is broken.
    """
    sock.settimeout(0)
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
