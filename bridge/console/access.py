"""Who may look and who may send events, decided by a request's headers."""

from __future__ import annotations

import hmac
import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlsplit

from bridge.config.console import ConsoleSettings, IngestSettings
from bridge.config.values import is_loopback
from bridge.console.content import is_binary
from bridge.http.signing import signature_fault
from bridge.runtime.json import Json

Headers = Sequence[tuple[str, str]]
_EASY_AUTH = "x-ms-client-principal"
_MAX_NAME = 200


@dataclass(frozen=True, kw_only=True)
class Person:
    """Who is signed in, and the person's roles."""

    name: str
    is_viewer: bool
    is_approver: bool


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
    if is_binary(headers):
        return "in binary mode the signature does not cover the attributes; expected structured mode or batch"
    return signature_fault(settings.signing_secrets.read().split(), headers, body, signed_near=now)


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
    if proxy is None:
        return None
    secret = _single(headers, proxy.secret_header.lower())
    if not secret or not hmac.compare_digest(secret.encode(), proxy.secret.read().encode()):
        return None
    user = _single(headers, proxy.user_header.lower())
    groups = _single(headers, proxy.groups_header.lower()) or ""
    return (user, {group.strip() for group in groups.split(",")} - {""}) if user else None


def _from_easy_auth(headers: Headers) -> tuple[str, set[str]] | None:
    """Read the principal that App Service or Container Apps adds; both remove it from what comes from outside."""
    try:
        principal = json.loads(b64decode(_single(headers, _EASY_AUTH) or "", validate=True))
        claims = [(claim["typ"], claim["val"]) for claim in principal["claims"]]
    except (ValueError, TypeError, LookupError):
        return None
    names = [value for kind, value in claims if kind in (principal.get("name_typ"), "preferred_username")]
    name = _single(headers, f"{_EASY_AUTH}-name") or next(iter(names), "")
    kinds = ("groups", "roles", principal.get("role_typ"))
    groups: set[Json] = {value for kind, value in claims if kind in kinds}
    return name, {group for group in groups if isinstance(group, str)}


def _single(headers: Headers, wanted: str) -> str | None:
    values = [value for name, value in headers if name == wanted]
    return values[0] if len(values) == 1 else None
