"""HTTP with limits: one session that bounds time and size, follows nothing and knows no proxy of its own.

A library's time limit counts from byte to byte, so a peer that sends a byte now and then could hold a thread for
ever. Here the whole exchange has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError as Urllib3Error

from bridge import __version__
from bridge.errors import HttpFailure

CONNECT_SECONDS = 5.0
USER_AGENT = f"imds-bridge/{__version__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer, read to its end or to the limit that was set."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """A session with kept-alive connections and verified TLS; for one thread at a time."""

    def __init__(self) -> None:
        session = _Session()
        session.trust_env = False
        session.headers.clear()
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        session.mount("http://", _Adapter())
        session.mount("https://", _Adapter())
        self._session = session

    def prepare(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
    ) -> requests.PreparedRequest:
        """Build a request that can be sent many times.

        Raises:
            HttpFailure: the URL or a header cannot be sent.
        """
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        try:
            "".join(sent.values()).encode("latin-1")  # what is sent otherwise fails only when it is too late
            return self._session.prepare_request(requests.Request(method, url, headers=sent, data=body))
        except (requests.RequestException, ValueError) as error:
            raise HttpFailure(
                f"cannot send to {origin(url)}: {type(error).__name__}", permanent=True
            ) from error

    def send(
        self,
        request: requests.PreparedRequest,
        *,
        timeout_seconds: float,
        max_body_bytes: int,
        truncate: bool = False,
    ) -> Answer:
        """Send and read the whole answer within `timeout_seconds` and `max_body_bytes`.

        Raises:
            HttpFailure: no connection, no complete answer in time, or a longer one (unless `truncate`).
        """
        connect_seconds = min(CONNECT_SECONDS, timeout_seconds)
        with _watchdog.limit(timeout_seconds) as watch:
            try:
                response = self._session.send(
                    request, stream=True, allow_redirects=False, timeout=(connect_seconds, timeout_seconds)
                )
                with contextlib.closing(response):
                    body = response.raw.read(max_body_bytes + 1, decode_content=False)
                    if len(body) > max_body_bytes and not truncate:
                        raise HttpFailure(f"an answer of more than {max_body_bytes} bytes")
            except (requests.RequestException, Urllib3Error, HTTPException, OSError, ValueError) as error:
                if watch.expired:
                    raise HttpFailure(f"no complete answer within {timeout_seconds:g} s") from error
                raise _failure(error, timeout_seconds) from error
            if watch.expired:  # a body without a length ends where its connection does
                raise HttpFailure(f"no complete answer within {timeout_seconds:g} s")
            if len(body) <= max_body_bytes and response.raw.length_remaining:
                raise HttpFailure("the connection closed in the middle of an answer")
        return Answer(status=response.status_code, headers=response.headers, body=body[:max_body_bytes])

    def close(self) -> None:
        """Close every connection."""
        self._session.close()


class _Session(requests.Session):
    """A session that does not even look where a redirect leads: that would read its whole body, unpacked."""

    def resolve_redirects(self, *_: Any, **__: Any) -> Any:
        """Find nothing to follow."""
        return iter(())


def origin(url: str) -> str:
    """Show where a URL leads without its path and query, which may hold secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "what is no URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def retry_after_seconds(headers: Mapping[str, str], *, limit_seconds: float) -> float | None:
    """Read `Retry-After`, in seconds or as a date; nonsense counts as absent, more than the limit as the limit."""
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return min(limit_seconds, max(0.0, seconds))


def _failure(error: Exception, timeout_seconds: float) -> HttpFailure:
    """Say why an exchange failed, without the URL that the library's own text would carry."""
    if isinstance(error, requests.ConnectTimeout):
        return HttpFailure(
            f"no connection within {min(CONNECT_SECONDS, timeout_seconds):g} s", unreached=True
        )
    if isinstance(error, requests.Timeout | TimeoutError):
        return HttpFailure(f"no answer within {timeout_seconds:g} s")
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return HttpFailure(f"the address cannot be used: {type(error).__name__}", permanent=True)
    cause = _root(error)
    if isinstance(error, requests.exceptions.SSLError):
        return HttpFailure(
            f"TLS failed: {getattr(cause, 'verify_message', '') or type(cause).__name__}", permanent=True
        )
    if isinstance(cause, socket.gaierror):
        return HttpFailure(f"the host name cannot be resolved: {cause.strerror}", unreached=True)
    if isinstance(cause, OSError) and cause.strerror:
        unreached = cause.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
        return HttpFailure(f"the connection failed: {cause.strerror}", unreached=unreached)
    return HttpFailure(f"the exchange broke off: {type(cause).__name__}")


def _root(error: BaseException) -> BaseException:
    """Find the first cause, through the libraries' wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((cause for cause in inner if isinstance(cause, BaseException)), error)
    return error


class _Limit:
    """The time that one thread's exchange has left."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.sock: socket.socket | None = None
        self.expired = False


class _Watchdog:
    """Shuts the socket of every exchange that has outlived its limit; looks once a second."""

    def __init__(self) -> None:
        self._limits: dict[int, _Limit] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Any:
        """Bound what this thread does with sockets that it attaches."""
        limit = _Limit(time.monotonic() + seconds)
        self._limits[threading.get_ident()] = limit
        if self._thread is None or not self._thread.is_alive():
            self._start()
        try:
            yield limit
        finally:
            del self._limits[threading.get_ident()]

    def attach(self, sock: socket.socket | None) -> None:
        """Name the socket that the calling thread now waits on."""
        if limit := self._limits.get(threading.get_ident()):
            limit.sock = sock

    def _start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="http-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(1.0):
            now = time.monotonic()
            for limit in list(self._limits.values()):
                if limit.sock is not None and now > limit.deadline:
                    limit.expired = True
                    # The plain socket's method: TLS's own would tear state from under the reading thread.
                    with contextlib.suppress(OSError):
                        socket.socket.shutdown(limit.sock, socket.SHUT_RDWR)


_watchdog = _Watchdog()


class _Connection(HTTPConnection):
    def getresponse(self) -> Any:
        _watchdog.attach(self.sock)
        return super().getresponse()


class _TlsConnection(HTTPSConnection):
    def getresponse(self) -> Any:
        _watchdog.attach(self.sock)
        return super().getresponse()


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _Adapter(HTTPAdapter):
    """Take connections whose answers the watchdog limits; never try again by itself."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
