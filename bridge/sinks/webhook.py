"""POST each event to a URL, as CloudEvents over HTTP in structured or binary mode."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence
from urllib.parse import unquote_plus, urlsplit

from bridge.checks import check_token, check_url, parse_headers
from bridge.config import WebhookSettings
from bridge.delivery import RETRY_AFTER_LIMIT_SECONDS, RETRY_LIMIT_SECONDS, webhook_error
from bridge.errors import HttpFailure, Misconfigured, Unavailable
from bridge.formats import cloudevents
from bridge.http import Answer, HttpClient, origin, retry_after_seconds
from bridge.logs import hide, redact
from bridge.model import StoredEvent

log = logging.getLogger(__name__)

_DOWN = frozenset({408, 410, 425, 429, 502, 503, 504})  # others may only mean that OPTIONS is not known

MAX_ANSWER_BYTES = 64 * 1024
EXCERPT_CHARACTERS = 500
LONG_WORD = 16  # in a URL; shorter ones may be settings, or words that logs need


class WebhookSink:
    """A URL that takes CloudEvents; every `send` is one request."""

    max_batch = 1
    retry_limit_seconds = RETRY_LIMIT_SECONDS

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._http = HttpClient()
        self._url = ""
        self._headers: dict[str, str] = {}
        self.reload()

    def rest(self) -> None:
        """Do nothing: a connection is made when it is needed."""

    def reload(self) -> None:
        """Read URL, token and headers from their files again."""
        settings = self._settings
        try:
            url = check_url(settings.url.read(), allow_http=settings.allow_http)
            headers = parse_headers(settings.headers.read()) if settings.headers else {}
            token = check_token(settings.bearer_token.read()) if settings.bearer_token else ""
        except (OSError, ValueError) as error:
            log.warning("a secret file cannot be used; the old value stays: %s", error)
            return
        for secret in (*_secrets_of(url), *headers.values(), token):
            hide(secret)
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._url, self._headers = url, headers

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the one event."""
        (event,) = events
        if self._settings.mode == "binary":
            headers, body = cloudevents.binary(event.envelope)
        else:
            headers, body = {"Content-Type": cloudevents.CONTENT_TYPE}, event.body
        answer = self._exchange(
            "POST", {"WebHook-Request-Origin": _origin(), **headers, **self._headers}, body
        )
        if error := webhook_error(answer.status):
            raise error(
                f"{origin(self._url)} answered {answer.status}{_excerpt(answer.body)}",
                status=answer.status,
                retry_after_seconds=retry_after_seconds(
                    answer.headers, limit_seconds=RETRY_AFTER_LIMIT_SECONDS
                ),
            )

    def check(self) -> str:
        """Ask with OPTIONS, as the CloudEvents webhook handshake does: it sends no event."""
        answer = self._exchange("OPTIONS", {"WebHook-Request-Origin": _origin(), **self._headers}, None)
        found = f"{origin(self._url)} is reached, it answered {answer.status} to OPTIONS"
        if 300 <= answer.status < 400:  # noqa: PLR2004 - the redirects
            raise Misconfigured(f"{found}: redirects are not followed, give the final URL")
        if answer.status in (401, 403):
            raise Misconfigured(f"{found}: look at the token or headers")
        if answer.status in _DOWN:
            raise Unavailable(found)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _exchange(self, method: str, headers: dict[str, str], body: bytes | None) -> Answer:
        try:
            request = self._http.prepare(method, self._url, headers=headers, body=body)
            return self._http.send(
                request,
                timeout_seconds=self._settings.timeout_seconds,
                max_body_bytes=MAX_ANSWER_BYTES,
                truncate=True,
            )
        except HttpFailure as error:
            kind = Misconfigured if error.permanent else Unavailable
            raise kind(f"{origin(self._url)}: {error}") from error


def _origin() -> str:
    """Say who sends, in what may stand in a header."""
    return socket.gethostname().encode("ascii", "replace").decode()


def _secrets_of(url: str) -> list[str]:
    """Name what a receiver may repeat of a URL: path, query, and what is long in them, spelled in any way."""
    parts = urlsplit(url)
    words = [word for word in re.split("[/?&=]", f"{parts.path}?{parts.query}") if len(word) >= LONG_WORD]
    return [f"{parts.path}?{parts.query}", parts.path, parts.query, *words, *map(unquote_plus, words)]


def _excerpt(body: bytes) -> str:
    """Show the beginning of an answer on one line, without secrets that it may repeat and what moves a cursor."""
    text = redact(body.decode("utf-8", errors="replace"))
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f": {text[:EXCERPT_CHARACTERS]}" if text else ""
