"""HTTP with limits: one session that bounds time and size, follows nothing and asks no environment for a proxy.

A library's time limit counts from byte to byte, so a peer that sends a byte now and then could hold a thread for
ever. Here the whole exchange has a limit.
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
from bridge.config.tls import check_ca, check_certificate
from bridge.config.validators import check_proxy
from bridge.errors import HttpFailure
from bridge.http.deadline import Adapter, failure_of, proxy_refusal, watchdog
from bridge.runtime.instants import parse_http_date
from bridge.runtime.threads import extend_deadline

CONNECT_SECONDS = 5.0
USER_AGENT = f"imds-bridge/{__version__}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An HTTP answer, read to its end or to the limit that was set."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpClient:
    """A session with kept-alive connections and verified TLS; for one thread at a time.

    Args:
        ca_file: trust only these certificate authorities, instead of the public ones.
        client_certificate_file: PEM to show to a server that asks; with the key in it, or
        client_key_file: the key in a file of its own; not encrypted.
        proxy: `http(s)://[user:password@]host[:port]` that every request goes through.

    Each new connection reads the files anew.

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
        extend_deadline(timeout_seconds)
        with watchdog.limit(timeout_seconds):
            return self._exchange(request, timeout_seconds, max_body_bytes, truncate=truncate)

    def _exchange(
        self,
        request: requests.PreparedRequest,
        timeout_seconds: float,
        max_body_bytes: int,
        *,
        truncate: bool,
    ) -> Answer:
        limits = (min(CONNECT_SECONDS, timeout_seconds), timeout_seconds)
        try:
            response = self._session.send(request, stream=True, allow_redirects=False, timeout=limits)
            with contextlib.closing(response):
                body = response.raw.read(max_body_bytes + 1, decode_content=False)
        except (requests.RequestException, Urllib3Error, HTTPException, OSError, ValueError) as error:
            self._check_files()
            raise _failure(error, timeout_seconds) from error
        if len(body) > max_body_bytes and not truncate:
            raise HttpFailure(f"an answer of more than {max_body_bytes} bytes")
        if len(body) <= max_body_bytes and response.raw.length_remaining:
            raise HttpFailure("the connection closed in the middle of an answer")
        if self._session.proxies and response.status_code == HTTPStatus.PROXY_AUTHENTICATION_REQUIRED:
            raise proxy_refusal(response.status_code)
        return Answer(status=response.status_code, headers=response.headers, body=body[:max_body_bytes])

    def _check_files(self) -> None:
        """Name the file that is at fault, if one is: the libraries do not."""
        try:
            if self._ca_file:
                check_ca(self._ca_file)
            if self._certificate_file:
                check_certificate(self._certificate_file, self._key_file)
        except ValueError as error:
            raise HttpFailure(str(error), permanent=True) from error

    def reset(self) -> None:
        """Drop the kept connections, so that the next request reads the files anew."""
        self._session.close()

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
    if value.isdecimal():
        return min(limit_seconds, float(value))
    instant = parse_http_date(value)
    return None if instant is None else min(limit_seconds, max(0.0, instant.timestamp() - time.time()))


def clock_skew_seconds(answer_headers: Mapping[str, str], now: float) -> float | None:
    """Tell how far this machine's clock is ahead of the answer's `Date`, or behind it (less than 0)."""
    instant = parse_http_date(answer_headers.get("Date", ""))
    return None if instant is None else now - instant.timestamp()


def _failure(error: Exception, timeout_seconds: float) -> HttpFailure:
    """Say why an exchange failed, without the URL that the library's own text would carry."""
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
    """Find the first cause, through the libraries' wrappers."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((cause for cause in inner if isinstance(cause, BaseException)), error)
    return error
