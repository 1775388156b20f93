"""HTTP with limits on time and size; redirects are not followed, and the environment's proxies are not used.

The time limit of an answer is the library's: it counts from byte to byte, but a body is not read after it is over.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from http.cookiejar import DefaultCookiePolicy
from typing import Any
from urllib.parse import unquote_plus, urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError as Urllib3Error

from bridge import __version__
from bridge.config.base import read_or_keep
from bridge.config.sinks import HttpSettings
from bridge.config.values import UNTRUSTED, UNTRUSTED_MARKS, check_proxy
from bridge.errors import DeliveryError, Misconfigured, Unavailable
from bridge.runtime.text import register_secret
from bridge.runtime.threads import extend_deadline, may_be_cut
from bridge.runtime.time import parse_http_date

CONNECT_SECONDS = 5.0
FIRST_SECONDS = 0.25
SLOW_FACTOR = 3
MAX_BODY_BYTES = 64 * 1024
LONG_PART = 16  # shorter parts of a URL may be words that logs need
USER_AGENT = f"imds-bridge/{__version__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer; its body may be cut off."""

    status: int
    headers: Mapping[str, str]
    body: bytes


_UNSENT = "nothing was sent"
_FORGOTTEN = "a connection that was open did not answer"
_open_seconds: ContextVar[float] = ContextVar(
    "how long an answer may take on a connection that was open before"
)


class _Connection(HTTPConnection):
    """Has CONNECT_SECONDS to connect; an error notes that the connection did not come about, so nothing was sent.

    An error also notes that an answer was late by the shorter limit of a connection that was open before.
    """

    _has_answered = False  # since it was connected: a TLS connection is open before its first request

    def connect(self) -> None:
        self._has_answered = False
        try:
            super().connect()
        except Exception as error:
            _root(error).add_note(_UNSENT)
            raise
        self.sock.settimeout(self.timeout)

    def getresponse(self) -> Any:
        limit_seconds = self.timeout
        is_short = self._has_answered and _open_seconds.get() < (limit_seconds or math.inf)
        self.timeout = _open_seconds.get() if is_short else limit_seconds
        try:
            response = super().getresponse()
        except TimeoutError as error:
            if is_short:
                error.add_note(_FORGOTTEN)
            raise
        else:
            self._has_answered = True
            return response
        finally:
            self.timeout = limit_seconds
            if self.sock:
                self.sock.settimeout(limit_seconds)

    def _new_conn(self) -> socket.socket:
        """Connect; of several addresses, each is tried for a short time first, and those that are silent for longer.

        Raises:
            OSError: why the last address failed.
        """
        found = socket.getaddrinfo(self._dns_host.strip("[]"), self.port, type=socket.SOCK_STREAM)
        first_seconds = FIRST_SECONDS if len(found) > 1 else CONNECT_SECONDS
        waiting: deque[tuple[Any, float]] = deque((address, first_seconds) for *_, address in found)
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            address, seconds = waiting.popleft()
            left_seconds = max(0.001, deadline - time.monotonic())
            try:
                connected = socket.create_connection(address[:2], min(seconds, left_seconds))
            except TimeoutError:
                if seconds >= left_seconds:
                    raise
                waiting.append((address, 2 * seconds))
            except OSError:
                if not waiting:
                    raise
            else:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.settimeout(CONNECT_SECONDS)
                return connected


class _TlsConnection(_Connection, HTTPSConnection):
    def request(self, *args: Any, **kwargs: Any) -> None:
        # The server may have sent the reason: in TLS 1.3 it refuses a certificate after the client's handshake ended.
        with contextlib.suppress(ssl.SSLEOFError):
            super().request(*args, **kwargs)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": _Pool, "https": _TlsPool}


class _Adapter(HTTPAdapter):
    """Use these connections; never retry, and never ask for a key's passphrase."""

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


class HttpClient:
    """Kept-alive connections with verified TLS, as a receiver's settings describe them; for one thread at a time.

    One that was idle for more than 2 s is not used again: a pause of the VM may have cut it. Each new one reads the
    files again, and `reload` the proxy's.

    Raises:
        OSError, ValueError: the proxy cannot be used.
    """

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._session = self._make_session()
        self._used_at, self._took_seconds = 0.0, 0.0

    def reload(self) -> None:
        """Read the proxy again; open connections are closed."""
        self.close()
        self._session = read_or_keep(self._make_session, self._session)

    def close(self) -> None:
        """Close every connection; the next request opens a new one."""
        self._session.close()

    def exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        open_seconds: float = math.inf,
    ) -> Answer:
        """Send a request and read its answer, whose body may be incomplete: the status is what matters.

        Args:
            method: of HTTP.
            url: where to send it; only its origin appears in errors.
            headers: in addition to the client's own.
            body: None for a request without one.
            open_seconds: how long the answer may take on a connection that was open before, which a NAT may have
                forgotten. The next one is new; a receiver that answers as slowly has SLOW_FACTOR times as long.

        Raises:
            DeliveryError: the URL or a header cannot be sent, there is no connection, or no answer in time.
        """
        _open_seconds.set(max(open_seconds, SLOW_FACTOR * self._took_seconds))
        try:
            return self._exchange(method, url, headers, body)
        except DeliveryError as error:
            way = " through the proxy" if self._session.proxies else ""
            error.args = (f"{origin(url)}{way}: {error}",)
            raise

    def _exchange(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        request = self._prepare(method, url, headers, body)
        if may_be_cut(time.time() - self._used_at):
            self.close()
        limit_seconds = self._settings.timeout_seconds
        extend_deadline(CONNECT_SECONDS + limit_seconds)
        began_at = time.monotonic()
        try:
            response = self._session.send(request, stream=True, allow_redirects=False, timeout=limit_seconds)
        except _ERRORS as error:
            for _, fault in self._settings.find_file_faults():  # the libraries do not name the file
                raise _fault(fault) from error
            is_unsent = _UNSENT in getattr(_root(error), "__notes__", ())
            missing, seconds = ("connection", CONNECT_SECONDS) if is_unsent else ("answer", limit_seconds)
            if _FORGOTTEN in getattr(_root(error), "__notes__", ()):
                missing, seconds = "answer on an open connection", _open_seconds.get()
            failure = _failure(error, f"no {missing} within {seconds:g} s")
            failure.is_unreached |= is_unsent
            raise failure from error
        self._took_seconds = time.monotonic() - began_at
        with contextlib.closing(response):
            answered = _read(response, began_at + limit_seconds)
        self._used_at = time.time()
        if self._session.proxies and response.status_code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            raise _proxy_refusal(response.status_code)
        return Answer(status=response.status_code, headers=response.headers, body=answered)

    def _prepare(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> requests.PreparedRequest:
        sent = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity", **headers}
        try:
            "".join(sent.values()).encode("latin-1")  # otherwise it fails only when the request is sent
            return self._session.prepare_request(requests.Request(method, url, headers=sent, data=body))
        except (requests.RequestException, ValueError) as error:
            raise _fault(f"the request cannot be sent: {type(error).__name__}") from error

    def _make_session(self) -> requests.Session:
        settings, session = self._settings, _Session()
        session.trust_env = False
        if settings.ca_file:
            session.verify = str(settings.ca_file)
        if settings.client_certificate_file:
            certificate, key = str(settings.client_certificate_file), settings.client_key_file
            session.cert = (certificate, str(key)) if key else certificate
        if settings.proxy:
            proxy = check_proxy(settings.proxy.read())
            register_url(proxy)
            session.proxies = {"all": proxy}
        session.headers.clear()
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        session.mount("http://", _Adapter())
        session.mount("https://", _Adapter())
        return session


class _Session(requests.Session):
    """A session that ignores redirects: to find their targets, the library would read and unpack the whole body."""

    def resolve_redirects(self, *_: Any, **__: Any) -> Any:
        """Return nothing to follow."""
        return iter(())


_ERRORS = (requests.RequestException, Urllib3Error, HTTPException, OSError, ValueError)


def _read(response: requests.Response, deadline: float) -> bytes:
    """Return what can be read of a body within the limits."""
    body = bytearray()
    with contextlib.suppress(*_ERRORS):
        # One byte more, so that the end of a body that is just as long is seen and the connection is kept.
        while (left := MAX_BODY_BYTES + 1 - len(body)) and time.monotonic() < deadline:
            if not (piece := response.raw.read1(left, decode_content=False)):
                break
            body += piece
    return bytes(body[:MAX_BODY_BYTES])


def origin(url: str) -> str:
    """Return a URL without path, query and user, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def register_url(url: str) -> None:
    """Keep out of the logs what a receiver may repeat of a URL: path, query, user, and long parts of them."""
    parts = urlsplit(url)
    target = f"{parts.path}?{parts.query}"
    long_parts = [part for part in re.split("[/?&=]", target) if len(part) >= LONG_PART]
    user = parts.netloc.rpartition("@")[0]
    secrets = [target, parts.path, parts.query, user, parts.password or "", *long_parts]
    for secret in (*secrets, *map(unquote_plus, secrets)):
        register_secret(secret)


def retry_after_seconds(headers: Mapping[str, str], *, limit_seconds: float) -> float | None:
    """Read `Retry-After`, in seconds or as a date; an invalid value counts as absent, a longer time as the limit.

    Of several values, the first counts: a proxy may add its own.
    """
    value = headers.get("Retry-After", "").strip()
    if seconds := re.match(r"(\d+(?:\.\d+)?) *(?:,|$)", value):
        return min(limit_seconds, float(seconds[1]))
    instant = parse_http_date(value)
    return None if instant is None else min(limit_seconds, max(0.0, instant.timestamp() - time.time()))


def _fault(text: str) -> DeliveryError:
    """Return a failure that other settings can end."""
    return Misconfigured(text, is_unreached=True)


def _failure(error: Exception, timed_out: str) -> DeliveryError:
    """Return why an exchange failed, without the URL that the library's own text contains."""
    cause = _root(error)
    # The library reports a refusal nowhere else.
    if refused := re.match(r"Tunnel connection failed: (\d+)", str(cause)):
        return _proxy_refusal(int(refused[1]))
    if isinstance(error, requests.Timeout) or isinstance(cause, TimeoutError):
        return Unavailable(timed_out)
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return _fault(f"the address cannot be used: {type(error).__name__}")
    return _failure_of(cause)


def _root(error: BaseException) -> BaseException:
    """Return the first cause inside the libraries' wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((cause for cause in inner if isinstance(cause, BaseException)), error)
    return error


def _failure_of(cause: BaseException) -> DeliveryError:
    """Return why a connection failed or was interrupted."""
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return Unavailable("TLS failed: the connection was interrupted")
    if isinstance(cause, ssl.SSLError):
        return _fault(f"TLS failed: {_tls_reason(cause)}")
    if isinstance(cause, socket.gaierror):
        return Unavailable(f"the host name cannot be resolved: {cause.strerror}")
    if isinstance(cause, OSError) and cause.strerror:
        return Unavailable(f"the connection failed: {cause.strerror}")
    return Unavailable(f"the exchange was interrupted: {type(cause).__name__}")


def _tls_reason(error: ssl.SSLError) -> str:
    """Return why TLS failed: what this side found, or what the other side answered."""
    if message := str(getattr(error, "verify_message", "")):
        return f"{message}; {UNTRUSTED}" if any(mark in message for mark in UNTRUSTED_MARKS) else message
    reason = (error.reason or type(error).__name__).replace("_", " ")
    _, alert, refusal = reason.lower().partition(" alert ")
    return f"the server refused: {refusal}" if alert else reason.lower()


def _proxy_refusal(status: int) -> DeliveryError:
    text = f"the proxy refused the connection: {status}"
    is_final = status in (HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
    return _fault(text) if is_final else Unavailable(text)
