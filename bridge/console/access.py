"""Who may look and who may send events, decided by a request's headers; and the headers that protect every answer."""

from __future__ import annotations

import hmac
import logging
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from http import HTTPStatus
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bridge.config.console import ConsoleSettings, IngestSettings, ProxySettings
from bridge.config.values import is_loopback
from bridge.http.signing import signature_fault
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

Headers = Sequence[tuple[str, str]]
_EASY_AUTH = "x-ms-client-principal"
_MAX_NAME = 200
_OF_PROGRAMS = ("/metrics", "/api/v1/expected", "/api/v1/forget")  # the bearer token of senders is enough
# Whoever sends events authenticates to `/ingest`; the others say nothing about the fleet.
_OPEN = ("/ingest", "/livez", "/readyz")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who is signed in, and the person's roles."""

    name: str
    is_viewer: bool
    is_approver: bool


class Guard:
    """Answers who may look, and refuses the others; adds the headers that protect every answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ConsoleSettings,
        clock: Clock,
        refuse: Callable[[Request, HTTPStatus, str, Mapping[str, str] | None], Response],
        registry: CollectorRegistry,
    ) -> None:
        """Guard `app`; `refuse` makes the answer of an error, `registry` gets a metric."""
        self._app = app
        self._settings = settings
        self._clock = clock
        self._refuse = refuse
        text = "Requests whose sender is not known: they were answered with 401."
        self._unknown = Counter("imds_bridge_console_unauthenticated", text, registry=registry)
        self._log_limit = RepeatLimit(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        answer = self._app
        try:
            refusal = self._fault(request)
        except (OSError, ValueError):
            refusal = HTTPStatus.SERVICE_UNAVAILABLE, "a secret cannot be read at the moment", None
        if refusal:
            answer = self._refuse(request, *refusal)
        await answer(scope, receive, partial(_send_protected, send))

    def _fault(self, request: Request) -> tuple[HTTPStatus, str, Mapping[str, str] | None] | None:
        if fault := host_fault(self._settings, request.headers.get("host", "")):
            return HTTPStatus.MISDIRECTED_REQUEST, fault, None
        if "content-length" in request.headers and "transfer-encoding" in request.headers:
            # A proxy may see another end of this request, and so take a part of it for the next one (RFC 9112, 6.1).
            text = "expected one of Content-Length and Transfer-Encoding"
            return HTTPStatus.BAD_REQUEST, text, {"connection": "close"}
        path = request.url.path
        if path in _OPEN or path.startswith("/static/"):
            return None
        fault, ingest = "", self._settings.ingest
        if path in _OF_PROGRAMS and ingest.bearer_token and "authorization" in request.headers:
            fault = sender_fault(ingest, request.headers, b"", self._clock.now())
            if not fault:
                return None
        person = request.state.person = sign_in(self._settings, _headers(request))
        if person is None:
            self._unknown.inc()
            if (proxy := self._settings.proxy) and self._log_limit.is_due():
                reason = fault or proxy_fault(proxy, _headers(request))
                log.warning("a request is answered with 401, and perhaps others: %s", reason)
            return HTTPStatus.UNAUTHORIZED, fault or "You are not signed in; reload the page.", None
        text = "You are signed in, but in none of the groups that may look."
        return None if person.is_viewer else (HTTPStatus.FORBIDDEN, text, None)


async def _send_protected(send: Send, message: Message) -> None:
    if message["type"] == "http.response.start":
        given = {name for name, _ in message["headers"]}
        more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
        message["headers"] = [*message["headers"], *(one for one in more if one[0] not in given)]
    await send(message)


def _headers(request: Request) -> Headers:
    """Return every header; names of people and groups are UTF-8."""
    return [
        (name.decode("latin-1").lower(), value.decode("utf-8", "replace"))
        for name, value in request.headers.raw
    ]


def sign_in(settings: ConsoleSettings, headers: Headers) -> Person | None:
    """Return who is signed in; None if nothing proves it.

    Args:
        settings: say how people sign in, and which groups have which role.
        headers: every header of the request, with names in lower case: one that stands there twice proves nothing.
    """
    if settings.auth == "none":
        return Person(name="", is_viewer=True, is_approver=False)
    found = _from_easy_auth(headers) if settings.auth == "easyauth" else _from_proxy(settings, headers)
    if found is None or not found[0]:
        return None
    name, groups = found
    return Person(
        name=name[:_MAX_NAME],
        is_viewer=not settings.viewer_groups or not groups.isdisjoint(settings.viewer_groups),
        is_approver=not groups.isdisjoint(settings.approver_groups),
    )


def sender_fault(settings: IngestSettings, headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """Say why a sender may not send, "" if it may.

    Raises:
        OSError, ValueError: a secret's file cannot be read.
    """
    if not settings.has_secret:
        return ""
    if settings.bearer_token and "authorization" in headers:
        given, expected = headers["authorization"], f"Bearer {settings.bearer_token.read()}"
        return "" if hmac.compare_digest(given.encode(), expected.encode()) else "the token is wrong"
    if settings.signing_secrets is None:
        return "expected Authorization: Bearer TOKEN"
    if _is_binary(headers):
        return "in binary mode the signature does not cover the attributes; expected structured mode or batch"
    return signature_fault(settings.signing_secrets.read().split(), headers, body, signed_near=now)


def _is_binary(headers: Mapping[str, str]) -> bool:
    """Return whether the event's attributes are headers, which no signature covers."""
    return "ce-specversion" in headers and not headers.get("content-type", "").lower().startswith(
        "application/cloudevents"
    )


def host_fault(settings: ConsoleSettings, host: str) -> str:
    """Say why a Host header is refused, "" if it is not.

    Without sign-in only this machine may look: another website's name that points to it (DNS rebinding) is refused.
    """
    if settings.auth != "none" or is_loopback(_host_name(host)):
        return ""
    return "expected a loopback address as the Host, such as 127.0.0.1 or localhost"


def _host_name(host: str) -> str:
    """Return the name in a Host header, "" if it holds anything else than a name and a port."""
    try:
        parts = urlsplit(f"//{host}")
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""


def _from_proxy(settings: ConsoleSettings, headers: Headers) -> tuple[str, set[str]] | None:
    proxy = settings.proxy
    if proxy is None or proxy_fault(proxy, headers):
        return None
    groups = _single(headers, proxy.groups_header.lower()) or ""
    user = _single(headers, proxy.user_header.lower()) or ""
    return user, {group.strip() for group in groups.split(",")} - {""}


def proxy_fault(proxy: ProxySettings, headers: Headers) -> str:
    """Say what is missing of what an authenticating proxy has to send, "" if nothing is.

    Raises:
        OSError, ValueError: the secret's file cannot be read.
    """
    secret = _single(headers, proxy.secret_header.lower())
    if not secret or not hmac.compare_digest(secret.encode(), proxy.secret.read().encode()):
        return f"{proxy.secret_header} is not the secret of [console.proxy]; both ends need the same one"
    user = _single(headers, proxy.user_header.lower())
    return "" if user else f"the proxy's secret is right, but {proxy.user_header} names nobody"


class _Claim(BaseModel):
    typ: str
    val: str


class _Principal(BaseModel):
    claims: list[_Claim]
    name_typ: str | None = None
    role_typ: str | None = None


def _from_easy_auth(headers: Headers) -> tuple[str, set[str]] | None:
    """Read the principal that App Service or Container Apps adds; both remove it from what comes from outside."""
    try:
        given = b64decode(_single(headers, _EASY_AUTH) or "", validate=True)
        principal = _Principal.model_validate_json(given)
    except ValueError:
        return None
    claims = [(claim.typ, claim.val) for claim in principal.claims]
    names = [value for kind, value in claims if kind in (principal.name_typ, "preferred_username")]
    name = _single(headers, f"{_EASY_AUTH}-name") or next(iter(names), "")
    return name, {value for kind, value in claims if kind in ("groups", "roles", principal.role_typ)}


def _single(headers: Headers, wanted: str) -> str | None:
    values = [value for name, value in headers if name == wanted]
    return values[0] if len(values) == 1 else None
