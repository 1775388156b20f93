"""Connections whose whole exchange has a limit, with verified TLS, and the failures of them mapped once.

The libraries' own limits count from byte to byte, and do not hold for a proxy's answer or a TLS handshake.
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
from http.client import HTTPException
from typing import Any

from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from bridge.errors import HttpFailure


def failure_of(cause: BaseException) -> HttpFailure:
    """Say why a connection failed or broke off."""
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return HttpFailure("TLS failed: the connection broke off")
    if isinstance(cause, ssl.SSLError):
        return HttpFailure(f"TLS failed: {_tls_reason(cause)}", permanent=True)
    if isinstance(cause, socket.gaierror):
        return HttpFailure(f"the host name cannot be resolved: {cause.strerror}", unreached=True)
    if isinstance(cause, OSError) and cause.strerror:
        unreached = cause.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return HttpFailure(f"the connection failed: {cause.strerror}", unreached=unreached)
    return HttpFailure(f"the exchange broke off: {type(cause).__name__}")


# What servers answer to who shows no certificate: TLS 1.3 has a word for it, TLS 1.2 has not.
_NO_CERTIFICATE = {
    "certificate required": "certificate required: it asks for a client certificate",
    "handshake failure": "handshake failure; perhaps it asks for a client certificate",
}


def _tls_reason(error: ssl.SSLError) -> str:
    """Say why TLS failed: what this side found, or what the other side answered."""
    if message := getattr(error, "verify_message", ""):
        return str(message)
    reason = (error.reason or type(error).__name__).replace("_", " ")
    _, alert, refusal = reason.lower().partition(" alert ")
    return f"the server refused: {_NO_CERTIFICATE.get(refusal, refusal)}" if alert else reason.lower()


def proxy_refusal(status: int) -> HttpFailure:
    """Say that a proxy let nothing through."""
    permanent = status in (HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
    return HttpFailure(f"the proxy refused the connection: {status}", permanent=permanent)


class _Limit:
    """The time that one thread's exchange has left, and a handle on the connection that it waits on."""

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._deadline = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._handle: socket.socket | None = None

    def attach(self, number: int) -> None:
        """Take a handle of its own: while TLS begins, the library shows nobody the socket that it uses."""
        handle = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)
        self.detach()
        self._handle = handle

    def detach(self) -> None:
        """Let go of the connection."""
        with self._lock:
            if self._handle is not None:
                self._handle.close()
            self._handle = None

    def enforce(self) -> None:
        """Shut the connection if the time is over."""
        with self._lock:
            if self._handle is not None and time.monotonic() > self._deadline:
                self.expired = True
                with contextlib.suppress(OSError):
                    self._handle.shutdown(socket.SHUT_RDWR)


class _Watchdog:
    """Shuts the socket of every exchange that has outlived its limit; looks once a second."""

    def __init__(self) -> None:
        self._limits: dict[int, _Limit] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Bound what this thread does with connections that it attaches.

        Raises:
            HttpFailure: the time was over before the exchange was.
        """
        limit = self._limits[threading.get_ident()] = _Limit(seconds)
        if self._thread is None or not self._thread.is_alive():
            self._start()
        late = HttpFailure(f"no complete answer within {seconds:g} s")
        try:
            yield
        except HttpFailure as failure:
            if limit.expired:
                raise late from failure
            raise
        finally:
            del self._limits[threading.get_ident()]
            limit.detach()
        if limit.expired:  # a body without a length ends where its connection does
            raise late

    def attach(self, sock: socket.socket) -> None:
        """Name the socket that the calling thread now waits on."""
        if limit := self._limits.get(threading.get_ident()):
            limit.attach(sock.fileno())

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="http-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(1.0):
            for limit in list(self._limits.values()):
                limit.enforce()


watchdog = _Watchdog()


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        sock = super()._new_conn()
        watchdog.attach(sock)
        return sock

    def request(self, *args: Any, **kwargs: Any) -> None:
        if self.sock is not None:  # one that was kept
            watchdog.attach(self.sock)
        super().request(*args, **kwargs)


class _TlsConnection(_Connection, HTTPSConnection):
    def connect(self) -> None:
        try:
            super().connect()
        except TimeoutError as error:
            who = "the proxy: " if self.proxy and not self.has_connected_to_proxy else ""
            raise HttpFailure(f"{who}no TLS handshake within {self.timeout:g} s") from error

    def request(self, *args: Any, **kwargs: Any) -> None:
        # A server that left may have said why: in TLS 1.3 it refuses certificates when the client is done already.
        with contextlib.suppress(ssl.SSLEOFError):
            super().request(*args, **kwargs)

    def _tunnel(self) -> None:
        try:
            super()._tunnel()
        except TimeoutError as error:
            raise HttpFailure(f"the proxy: no answer within {self.timeout:g} s") from error
        except (OSError, HTTPException) as error:
            if status := re.match(r"Tunnel connection failed: (\d+)", str(error)):  # it is told nowhere else
                raise proxy_refusal(int(status[1])) from error
            raise HttpFailure(f"the proxy: {failure_of(error)}") from error


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _Pool, "https": _TlsPool}


class Adapter(HTTPAdapter):
    """Take connections that the watchdog limits; never try again by itself, nor ask for a key's passphrase."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make our connections where there is no proxy."""
        super().init_poolmanager(*args, key_password="", **kwargs)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        """Make our connections where there is one."""
        manager = super().proxy_manager_for(proxy, key_password="", **kwargs)
        manager.pool_classes_by_scheme = _POOLS
        return manager

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Verify a proxy's TLS on the way to a plain http target as well, which the library would not."""
        super().cert_verify(conn, "https:" if conn.proxy else url, verify, cert)  # type: ignore[no-untyped-call]
