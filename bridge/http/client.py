"""HTTP with limits on time and size; redirects are not followed, and the environment's proxies are not used.

The time limit is the library's: it counts from byte to byte, but a body is no longer read when it is over.
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError as Urllib3Error

from bridge import __version__
from bridge.config.values import check_ca, check_certificate, check_proxy
from bridge.errors import HttpFailure
from bridge.runtime.threads import extend_deadline
from bridge.runtime.time import parse_http_date

CONNECT_SECONDS = 5.0
MAX_BODY_BYTES = 64 * 1024
USER_AGENT = f"imds-bridge/{__version__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer; its body may be cut off."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _TlsConnection(HTTPSConnection):
    def request(self, *args: Any, **kwargs: Any) -> None:
        # The server may have sent the reason: in TLS 1.3 it refuses a certificate after the client's handshake ended.
        with contextlib.suppress(ssl.SSLEOFError):
            super().request(*args, **kwargs)


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


_POOLS = {"http": HTTPConnectionPool, "https": _TlsPool}


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
    """A session with kept-alive connections and verified TLS; for one thread at a time.

    Args:
        ca_file: trust only these certificate authorities, instead of the public ones.
        client_certificate_file: PEM for servers that ask for a client certificate; contains the key unless
            `client_key_file` is given.
        client_key_file: the key, not encrypted.
        proxy: `http(s)://[user:password@]host[:port]` for every request.

    Each new connection reads the files again.

    Raises:
        ValueError: the proxy's URL cannot be used.
    """

    def __init__(
        self,
        *,
        ca_file: Path | None = None,
        client_certificate_file: Path | None = None,
        client_key_file: Path | None = None,
        proxy: str = "",
    ) -> None:
        self._ca_file = ca_file
        self._certificate_file = client_certificate_file
        self._key_file = client_key_file
        session = _Session()
        session.trust_env = False
        if ca_file:
            session.verify = str(ca_file)
        if client_certificate_file:
            certificate, key = str(client_certificate_file), client_key_file
            session.cert = (certificate, str(key)) if key else certificate
        if proxy:
            session.proxies = {"all": check_proxy(proxy)}
        session.headers.clear()
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        session.mount("http://", _Adapter())
        session.mount("https://", _Adapter())
        self._session = session

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_seconds: float,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> Answer:
        """Send a request and read its answer, whose body may be incomplete: the status is what matters.

        Args:
            method: of HTTP.
            url: where to send it.
            headers: in addition to the client's own.
            body: None for a request without one.
            timeout_seconds: for each wait for bytes, and for all of the body.
            max_body_bytes: how much of the answer's body is read.

        Raises:
            HttpFailure: the URL or a header cannot be sent, there is no connection, or no answer in time.
        """
        request = self._prepare(method, url, headers, body)
        extend_deadline(timeout_seconds)
        limits = (min(CONNECT_SECONDS, timeout_seconds), timeout_seconds)
        deadline = time.monotonic() + timeout_seconds
        try:
            response = self._session.send(request, stream=True, allow_redirects=False, timeout=limits)
        except _ERRORS as error:
            self._check_files()
            raise _failure(error, timeout_seconds, proxied=bool(self._session.proxies)) from error
        with contextlib.closing(response):
            answered = _read(response, max_body_bytes, deadline)
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
            raise HttpFailure(
                f"cannot send to {origin(url)}: {type(error).__name__}", permanent=True
            ) from error

    def _check_files(self) -> None:
        """Report the file that is the cause, if one is: the libraries do not name it."""
        try:
            if self._ca_file:
                check_ca(self._ca_file)
            if self._certificate_file:
                check_certificate(self._certificate_file, self._key_file)
        except ValueError as error:
            raise HttpFailure(str(error), permanent=True) from error

    def close(self) -> None:
        """Close every connection; the next request opens a new one, and reads the files again."""
        self._session.close()


class _Session(requests.Session):
    """A session that ignores redirects: to find their targets, the library would read and unpack the whole body."""

    def resolve_redirects(self, *_: Any, **__: Any) -> Any:
        """Return nothing to follow."""
        return iter(())


_ERRORS = (requests.RequestException, Urllib3Error, HTTPException, OSError, ValueError)


def _read(response: requests.Response, max_body_bytes: int, deadline: float) -> bytes:
    """Return what can be read of a body within the limits."""
    body = bytearray()
    with contextlib.suppress(*_ERRORS):
        # One byte more, so that the end of a body that is just as long is seen and the connection is kept.
        while (left := max_body_bytes + 1 - len(body)) and time.monotonic() < deadline:
            if not (piece := response.raw.read1(left, decode_content=False)):
                break
            body += piece
    return bytes(body[:max_body_bytes])


def origin(url: str) -> str:
    """Return a URL without path, query and user, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def retry_after_seconds(headers: Mapping[str, str], *, limit_seconds: float) -> float | None:
    """Read `Retry-After`, in seconds or as a date; an invalid value counts as absent, a longer time as the limit."""
    value = headers.get("Retry-After", "").strip()
    if value.isdecimal():
        return min(limit_seconds, float(value))
    instant = parse_http_date(value)
    return None if instant is None else min(limit_seconds, max(0.0, instant.timestamp() - time.time()))


def clock_skew_seconds(answer_headers: Mapping[str, str], now: float) -> float | None:
    """Return how far this machine's clock is ahead of the answer's `Date`; negative if it is behind."""
    instant = parse_http_date(answer_headers.get("Date", ""))
    return None if instant is None else now - instant.timestamp()


def _failure(error: Exception, timeout_seconds: float, *, proxied: bool) -> HttpFailure:
    """Return why an exchange failed, without the URL that the library's own text contains."""
    cause = _root(error)
    # The library reports a refusal nowhere else.
    if refused := re.match(r"Tunnel connection failed: (\d+)", str(cause)):
        return _proxy_refusal(int(refused[1]))
    failure = _failure_of(error, cause, timeout_seconds)
    if not proxied:
        return failure
    text = f"through the proxy: {failure}"
    return HttpFailure(text, permanent=failure.permanent, unreached=failure.unreached)


def _root(error: BaseException) -> BaseException:
    """Return the first cause inside the libraries' wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((cause for cause in inner if isinstance(cause, BaseException)), error)
    return error


def _failure_of(error: Exception, cause: BaseException, timeout_seconds: float) -> HttpFailure:
    if isinstance(error, requests.ConnectTimeout):
        limit_seconds = min(CONNECT_SECONDS, timeout_seconds)
        return HttpFailure(f"no connection within {limit_seconds:g} s", unreached=True)
    if isinstance(error, requests.Timeout) or isinstance(cause, TimeoutError):
        return HttpFailure(f"no answer within {timeout_seconds:g} s")
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return HttpFailure(f"the address cannot be used: {type(error).__name__}", permanent=True)
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


def _proxy_refusal(status: int) -> HttpFailure:
    """Return the failure for a proxy's refusal."""
    permanent = status in (HTTPStatus.FORBIDDEN, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED)
    return HttpFailure(f"the proxy refused the connection: {status}", permanent=permanent)
