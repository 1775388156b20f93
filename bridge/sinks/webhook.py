"""POST events to a URL: as CloudEvents over HTTP, or in a format for people."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from uuid import uuid5

from bridge.config.registry import format_class
from bridge.config.validators import check_signing_secrets, check_token, check_url, parse_headers
from bridge.config.webhook import WebhookSettings
from bridge.errors import Misconfigured, Rejected, Unavailable
from bridge.events.builder import NAMESPACE
from bridge.events.model import StoredEvent
from bridge.formats.base import Encoded, Format
from bridge.http.client import origin
from bridge.http.signing import sign
from bridge.runtime.clock import Clock
from bridge.runtime.logging import register_secret
from bridge.sinks.base import RETRY_LIMIT_SECONDS, Request
from bridge.sinks.http_base import Poster, excerpt, post_batches, refusal, register_url, shown
from bridge.sinks.responses import webhook_error

log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1_000_000

_DOWN = frozenset({408, 410, 425, 429, 502, 503, 504})  # others may only mean that OPTIONS is not known


class WebhookSink:
    """A URL that takes events, one in each request but for `mode = "batch"`."""

    retry_limit_seconds = RETRY_LIMIT_SECONDS

    def __init__(self, settings: WebhookSettings, *, clock: Clock | None = None) -> None:
        """Prepare to send.

        Raises:
            ValueError: the template is faulty.
        """
        self._settings = settings
        self._clock = clock or Clock()
        self._poster = Poster(settings)
        self._url = ""
        self._headers: dict[str, str] = {}
        self._signing_secrets: list[str] = []
        self._read_secrets()
        self.max_batch = self._format.max_batch

    def keep_alive(self) -> None:
        """Do nothing: a connection is made when it is needed."""

    def reload(self) -> None:
        """Read URL, token, headers, signing secrets, key, proxy and certificates from their files again."""
        try:
            self._read_secrets()
        except (OSError, ValueError) as error:
            log.warning("a secret file cannot be used; the old value stays: %s", error)
        self._poster.reload()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the events, each by itself or as batches."""
        post_batches(events, self._post, max_bytes=MAX_BATCH_BYTES)

    def check_format(self, events: Sequence[StoredEvent]) -> None:
        """Try the format on samples of the events that will come.

        Raises:
            ValueError: one cannot be shown, or the template names what no event has.
        """
        self._format.check([event.envelope for event in events], self._clock.now())

    def check(self) -> str:
        """Ask with OPTIONS, as the CloudEvents webhook handshake does: it sends no event."""
        headers = {"WebHook-Request-Origin": _origin(), **self._headers}
        answer = self._poster.exchange("OPTIONS", self._url, headers, None)
        found = f"{origin(self._url)} is reached, it answered {answer.status} to OPTIONS"
        if 300 <= answer.status < 400:  # noqa: PLR2004 - the redirects
            raise Misconfigured(f"{found}: redirects are not followed, give the final URL")
        if answer.status in (401, 403):
            raise Misconfigured(f"{found}: look at the URL, the token and the headers")
        if answer.status in _DOWN:
            raise Unavailable(found)
        return found

    def show(self, event: StoredEvent) -> Request:
        """Show the POST for an event."""
        headers, body = self._write([event])
        return shown("POST", self._url, {**headers, **dict.fromkeys(self._headers, "***")}, body)

    def close(self) -> None:
        """Close the connections."""
        self._poster.close()

    def _read_secrets(self) -> None:
        """Take all secrets as they stand now, or leave all as they were."""
        settings = self._settings
        url = check_url(settings.url.read(), allow_http=settings.allow_http)
        headers = parse_headers(settings.headers.read()) if settings.headers else {}
        token = check_token(settings.bearer_token.read()) if settings.bearer_token else ""
        secrets = check_signing_secrets(settings.signing_secrets.read()) if settings.signing_secrets else []
        self._format: Format = format_class(settings.format)(settings)
        register_url(url)
        for secret in (*headers.values(), token, *secrets):
            register_secret(secret.removeprefix("whsec_"))  # it is known without, too
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._url, self._headers, self._signing_secrets = url, headers, secrets

    def _post(self, events: Sequence[StoredEvent]) -> None:
        headers, body = self._write(events)
        answer = self._poster.exchange("POST", self._url, headers, body)
        error = webhook_error(answer.status, answer.body, is_chat_format=self._settings.is_chat_format)
        if error is Rejected and self._signing_secrets and b"signature" in answer.body.lower():
            error = Misconfigured  # many verifiers answer 400 to a rotated key or a wrong clock
        if error:
            raise refusal(error, self._url, answer)

    def _write(self, events: Sequence[StoredEvent]) -> tuple[dict[str, str], bytes]:
        """Return the headers and the body that carry the events."""
        headers, body = self._encode(events)
        if self._signing_secrets:
            headers |= sign(self._signing_secrets, _message_id(events), self._clock.now(), body)
        return {"WebHook-Request-Origin": _origin(), **headers, **self._headers}, body

    def _encode(self, events: Sequence[StoredEvent]) -> Encoded:
        try:
            return self._format.encode(events, self._clock.now())
        except Exception as error:  # whatever it is, it would be the same at each try
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise Rejected(
                f"the event cannot be shown as {self._settings.format}{excerpt(reason.encode(errors='replace'))}"
            ) from error


def _message_id(events: Sequence[StoredEvent]) -> str:
    """Name a message by its event, or by all events of a batch: the same in every try."""
    return (
        events[0].id if len(events) == 1 else str(uuid5(NAMESPACE, "\n".join(event.id for event in events)))
    )


def _origin() -> str:
    """Say who sends, in what may stand in a header."""
    return socket.gethostname().encode("ascii", "replace").decode()
