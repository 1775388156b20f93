"""POST each event to a URL, as CloudEvents over HTTP in structured or binary mode."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from bridge.config import WebhookSettings, check_url, parse_headers
from bridge.delivery import RETRY_AFTER_LIMIT_SECONDS, webhook_error
from bridge.errors import HttpFailure, Misconfigured, Unavailable
from bridge.formats import cloudevents
from bridge.http import Answer, HttpClient, origin, retry_after_seconds
from bridge.logs import hide, redact
from bridge.model import StoredEvent

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 1024
EXCERPT_CHARACTERS = 500


class WebhookSink:
    """A URL that takes CloudEvents; every `send` is one request."""

    max_batch = 1

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._http = HttpClient()
        self._url = ""
        self._headers: dict[str, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read URL, token and headers from their files again."""
        settings = self._settings
        try:
            url = check_url(settings.url.read(), allow_http=settings.allow_http)
            headers = parse_headers(settings.headers.read()) if settings.headers else {}
            if settings.bearer_token:
                headers["Authorization"] = f"Bearer {settings.bearer_token.read()}"
        except (OSError, ValueError) as error:
            log.warning("a secret file cannot be used; the old value stays: %s", error)
            return
        for secret in (urlsplit(url).query, *headers.values()):
            hide(secret)
        if settings.url.file:
            hide(url)
        if settings.bearer_token:
            hide(settings.bearer_token.read())
        self._url, self._headers = url, headers

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the one event."""
        (event,) = events
        if self._settings.mode == "binary":
            headers, body = cloudevents.binary(event.envelope)
        else:
            headers, body = {"Content-Type": cloudevents.CONTENT_TYPE}, event.body
        answer = self._exchange("POST", {**headers, **self._headers}, body)
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
        headers = {"WebHook-Request-Origin": socket.gethostname(), **self._headers}
        answer = self._exchange("OPTIONS", headers, None)
        found = f"{origin(self._url)} is reached, it answered {answer.status} to OPTIONS"
        if 300 <= answer.status < 400:  # noqa: PLR2004 - the redirects
            raise Misconfigured(f"{found}: redirects are not followed, give the final URL")
        if answer.status in (401, 403):
            raise Misconfigured(f"{found}: look at the token or headers")
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


def _excerpt(body: bytes) -> str:
    """Show the beginning of an answer on one line, without secrets that it may repeat."""
    text = " ".join(redact(body.decode("utf-8", errors="replace")).split())
    return f": {text[:EXCERPT_CHARACTERS]}" if text else ""
