"""Connections with a time limit on the whole exchange and verified TLS; their failures are mapped once.

The libraries' own limits count from byte to byte, and do not apply to a proxy's answer or a TLS handshake. The only
module that overrides private methods of urllib3 and http.client: `_new_conn`, because the socket of a connection is
known nowhere else while TLS starts, and `_tunnel`, because a proxy's refusal is reported nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, HTTPResponse
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from bridge.errors import HttpFailure

CHECK_SECONDS = 1.0


def failure_of(cause: BaseException) -> HttpFailure:
    """Return why a connection failed or was interrupted."""
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return HttpFailure("TLS failed: the connection was interrupted")
    if isinstance(cause, ssl.SSLError):
        return HttpFailure(f"TLS failed: {_tls_reason(cause)}", permanent=True)
    if isinstance(cause, socket.gaierror):
        return HttpFailure(f"the host name cannot be resolved: {cause.strerror}", unreached=True)
    if isinstance(cause, OSError) and cause.strerror:
        unreached = cause.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return HttpFailure(f"the connection failed: {cause.strerror}", unreached=unreached)
    return HttpFailure(f"the exchange was interrupted: {type(cause).__name__}")


# What servers answer to a client without a certificate: TLS 1.3 has an alert of its own for it, TLS 1.2 does not.
_NO_CERTIFICATE = {
    "certificate required": "certificate required: it asks for a client certificate",
    "handshake failure": "handshake failure; perhaps it asks for a client certificate",
}


def _tls_reason(error: ssl.SSLError) -> str:
    """Return why TLS failed: what this side found, or what the other side answered."""
    if message := getattr(error, "verify_message", ""):
        return str(message)
    reason = (error.reason or type(error).__name__).replace("_", " ")
    _, alert, refusal = reason.lower().partition(" alert ")
    return f"the server refused: {_NO_CERTIFICATE.get(refusal, refusal)}" if alert else reason.lower()


def proxy_refusal(status: int) -> HttpFailure:
    """Return the failure for a proxy's refusal."""
    permanent = status in (HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
    return HttpFailure(f"the proxy refused the connection: {status}", permanent=permanent)


class _Limit:
    """The time that one thread's exchange has left, and a handle on its connection."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self.is_answered = False
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None

    def attach(self, number: int) -> None:
        """Duplicate the descriptor of a connection: while TLS starts, the library has the only socket object."""
        handle = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)
        self.detach()
        self._handle = handle

    def detach(self) -> None:
        """Close the handle."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
            self._handle = None

    def enforce(self) -> None:
        """Shut down the connection if the time is over."""
        with self._lock:
            if self._handle is not None and time.monotonic() > self._deadline:
                self.expired = True
                with contextlib.suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)


class Watchdog:
    """Shuts down the socket of every exchange that exceeds its limit; checks once a second while there is one."""

    def __init__(self) -> None:
        self._limits: dict[int, _Limit] = {}
        self._has_limits = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether its thread waits for the next exchange."""
        return not self._has_limits.is_set()

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[_Limit]:
        """Limit what this thread does with the connections that it attaches.

        Raises:
            HttpFailure: the time was over before the exchange, unless the limit knows that it `is_answered`.
        """
        limit = self._limits[threading.get_ident()] = _Limit(seconds)
        self._has_limits.set()
        if self._thread is None or not self._thread.is_alive():
            self._start()
        late = HttpFailure(f"no complete answer within {seconds:g} s")
        try:
            yield limit
        except HttpFailure as failure:
            if limit.expired:
                raise late from failure
            raise
        finally:
            del self._limits[threading.get_ident()]
            limit.detach()
        if limit.expired and not limit.is_answered:  # a body without a length ends with its connection
            raise late

    def attach(self, sock: socket.socket) -> None:
        """Set the socket that the calling thread waits on."""
        if limit := self._limits.get(threading.get_ident()):
            limit.attach(sock.fileno())

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="http-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._has_limits.wait():
            time.sleep(CHECK_SECONDS)
            self._has_limits.clear()  # first, so that no limit that begins now is missed
            for limit in list(self._limits.values()):
                self._has_limits.set()
                limit.enforce()


watchdog = Watchdog()


class _Response(HTTPResponse):
    """An answer that is known by its status: interim answers are skipped, and odd headers do not make it fail."""

    def begin(self) -> None:
        while True:
            self.status = 0
            try:
                super().begin()
            except HTTPException:
                if not self.status:  # otherwise only the headers cannot be read
                    raise
                self._ignore_headers()
            if self.status == HTTPStatus.SWITCHING_PROTOCOLS or not 100 <= self.status < 200:  # noqa: PLR2004
                break
            self.headers = self.msg = None  # type: ignore[assignment]
        lengths = ",".join(self.headers.get_all("Content-Length", [])).split(",")
        if len({length.strip() for length in lengths}) > 1:
            self._ignore_headers()

    def _ignore_headers(self) -> None:
        """Take the answer for one without headers and body."""
        self.headers = self.msg = HTTPMessage()
        self.chunked = False
        self.length = 0
        self.will_close = True


class _Connection(HTTPConnection):
    response_class = _Response

    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        watchdog.attach(sock)
        return sock

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:  # a kept-alive connection
            watchdog.attach(self.sock)
        super().request(*args, **kwargs)


class _TlsConnection(_Connection, HTTPSConnection):
    def connect(self) -> None:
        try:
            super().connect()
        except TimeoutError as error:
            where = "the proxy: " if self.proxy and not self.has_connected_to_proxy else ""
            raise HttpFailure(f"{where}no TLS handshake within {self.timeout:g} s") from error

    def request(self, *args: Any, **kwargs: Any) -> None:
        # The server may have sent the reason: in TLS 1.3 it refuses a certificate after the client's handshake ended.
        with contextlib.suppress(ssl.SSLEOFError):
            super().request(*args, **kwargs)

    def _tunnel(self) -> None:
        try:
            super()._tunnel()
        except TimeoutError as error:
            raise HttpFailure(f"the proxy: no answer within {self.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            if status := re.match(r"Tunnel connection failed: (\d+)", str(error)):  # the only place
                raise proxy_refusal(int(status[1])) from error
            raise HttpFailure(f"the proxy: {failure_of(error)}") from error


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _Pool, "https": _TlsPool}


class Adapter(HTTPAdapter):
    """Use connections that the watchdog limits; never retry, and never ask for a key's passphrase."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Use these connections without a proxy."""
        super().init_poolmanager(*args, key_password="", **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """Use these connections with a proxy."""
        manager = super().proxy_manager_for(proxy, key_password="", **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Verify a proxy's TLS for plain http targets as well, which the library would not."""
        super().cert_verify(conn, "https:" if conn.proxy else url, verify, cert)  # type: ignore[no-untyped-call]
