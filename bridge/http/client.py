"""HTTP with limits on time and size; redirects are not followed, and the environment's proxies are not used.

A library's time limit counts from byte to byte, so that a peer that sends a byte now and then could block a thread
forever. Here the whole exchange has a limit.
"""

from __future__ import annotations

import contextlib
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
from urllib3.exceptions import HTTPError as Urllib3Error

from bridge import __version__
from bridge.config.values import check_ca, check_certificate, check_proxy
from bridge.errors import HttpFailure
from bridge.http.deadline import Adapter, failure_of, proxy_refusal, watchdog
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
        session.mount("http://", Adapter())
        session.mount("https://", Adapter())
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
            timeout_seconds: for the whole exchange.
            max_body_bytes: how much of the answer's body is read.

        Raises:
            HttpFailure: the URL or a header cannot be sent, there is no connection, or no answer in time.
        """
        request = self._prepare(method, url, headers, body)
        extend_deadline(timeout_seconds)
        limits = (min(CONNECT_SECONDS, timeout_seconds), timeout_seconds)
        with watchdog.limit(timeout_seconds) as limit:
            try:
                response = self._session.send(request, stream=True, allow_redirects=False, timeout=limits)
                limit.is_answered = not limit.expired
                with contextlib.closing(response):
                    answered = _read(response, max_body_bytes)
            except _ERRORS as error:
                self._check_files()
                raise _failure(error, timeout_seconds) from error
        if self._session.proxies and response.status_code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            raise proxy_refusal(response.status_code)
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


def _read(response: requests.Response, max_body_bytes: int) -> bytes:
    try:
        # One byte more, so that the end of a body that is just as long is seen and the connection is kept.
        body: bytes = response.raw.read(max_body_bytes + 1, decode_content=False)
    except _ERRORS:
        return b""
    return body[:max_body_bytes]


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


def _failure(error: Exception, timeout_seconds: float) -> HttpFailure:
    """Return why an exchange failed, without the URL that the library's own text contains."""
    cause = _root(error)
    no_connection = f"no connection within {min(CONNECT_SECONDS, timeout_seconds):g} s"
    if isinstance(error, requests.exceptions.ProxyError):
        failure = HttpFailure(no_connection) if isinstance(cause, TimeoutError) else failure_of(cause)
        return HttpFailure(f"the proxy: {failure}", permanent=failure.permanent)
    if isinstance(error, requests.ConnectTimeout):
        return HttpFailure(no_connection, unreached=True)
    if isinstance(error, requests.Timeout | TimeoutError):
        return HttpFailure(f"no answer within {timeout_seconds:g} s")
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return HttpFailure(f"the address cannot be used: {type(error).__name__}", permanent=True)
    return failure_of(cause)


def _root(error: BaseException) -> BaseException:
    """Return the first cause inside the libraries' wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((cause for cause in inner if isinstance(cause, BaseException)), error)
    return error
