"""POST events to a URL, in the format that its settings name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from uuid import uuid5

from bridge.azure.credentials import Tokens
from bridge.config.base import read_or_keep
from bridge.config.registry import format_class
from bridge.config.sinks import WebhookSettings
from bridge.config.values import check_signing_secrets, check_token, check_url, parse_headers
from bridge.errors import DeliveryError, Misconfigured, Rejected
from bridge.events.builder import NAMESPACE
from bridge.events.model import StoredEvent
from bridge.formats.base import Encoded, Format
from bridge.http.client import Answer, HttpClient, origin, register_url
from bridge.http.signing import sign
from bridge.runtime.text import register_secret
from bridge.runtime.time import Clock
from bridge.sinks.base import Inconclusive, RequestPreview, Sink
from bridge.sinks.http import (
    MAX_BATCH_BYTES,
    answer_error,
    excerpt,
    patience_seconds,
    post_batches,
    preview,
    webhook_error,
)

_NO_ACCESS = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_LACK = (
    "the identity has a token, and lacks a role: Monitoring Metrics Publisher on the data collection rule, Azure "
    "Event Hubs Data Sender on the event hub, or an app role of the application"
)


@dataclass(frozen=True, kw_only=True)
class _Access:
    """What comes from secrets: where and how to send."""

    url: str
    headers: dict[str, str]
    signing_secrets: list[str]
    format: Format


class WebhookSink(Sink):
    """A URL that takes events, one in each request unless the format has batches."""

    knows_duplicates = True

    def __init__(self, settings: WebhookSettings, *, clock: Clock | None = None) -> None:
        """Prepare to send.

        Args:
            settings: of the format that is sent.
            clock: dates signatures and chat messages.

        Raises:
            OSError, ValueError: a secret cannot be used, or the template is faulty.
        """
        self._settings = settings
        self._clock = clock or Clock()
        self._http = HttpClient(settings)
        self._tokens = Tokens(settings, settings.token_scope)
        self._access = self._read_access()
        self._access.format.check(self._clock.now())
        self.max_batch = self._access.format.max_batch

    def reload(self) -> None:
        """Read URL, token, headers, signing secrets, key, proxy and certificates from their files again."""
        self._access = read_or_keep(self._read_access, self._access)
        self._http.reload()
        self._tokens.forget()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the events, one at a time, in batches or as one digest, whose size does not grow with them."""
        max_bytes = None if self._settings.is_chat_format else MAX_BATCH_BYTES
        post_batches(events, self._post, max_bytes=max_bytes)

    def check(self) -> str:
        """Ask with OPTIONS, which sends no event."""
        url, headers = self._access.url, {"WebHook-Request-Origin": _origin(), **self._access.headers}
        answer = self._http.exchange("OPTIONS", url, {**headers, **self._tokens.header()})
        result = f"{origin(url)}: reachable, it answered {answer.status} to OPTIONS"
        result += f" with a token for {self._settings.token_scope}" if self._settings.token_scope else ""
        if 300 <= answer.status < 400:  # noqa: PLR2004 - the redirects
            raise Misconfigured(
                f"{result}: redirects are not followed, set the final URL", status=answer.status
            )
        if answer.status >= 400:  # noqa: PLR2004 - errors, of which many receivers answer one to OPTIONS alone
            raise Inconclusive(result, status=answer.status)
        return result

    def preview(self, event: StoredEvent, *others: StoredEvent) -> RequestPreview:
        """Return the POST for an event, or for a digest of several."""
        headers, body = self._write([event, *others])
        if body is None:
            return RequestPreview(head=("nothing is sent for this event",), body=b"")
        url, secret = self._access.url, self._access.headers
        headers |= {"Authorization": "***"} if self._settings.token_scope else {}
        shown = {**headers, **dict.fromkeys(secret, "***")}
        return preview("POST", url, shown, body, keep=secret.values())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._tokens.forget()

    def _read_access(self) -> _Access:
        settings = self._settings
        url = check_url(settings.url.read(), allow_http=settings.allow_http and not settings.token_scope)
        headers = parse_headers(settings.headers.read()) if settings.headers else {}
        token = check_token(settings.bearer_token.read()) if settings.bearer_token else ""
        secrets = check_signing_secrets(settings.signing_secrets.read()) if settings.signing_secrets else []
        register_url(url)
        for secret in (*headers.values(), token, *secrets):
            register_secret(secret.removeprefix("whsec_"))  # receivers may show it without the prefix
        if token:
            headers["Authorization"] = f"Bearer {token}"
        format_: Format = format_class(settings.format)(settings)
        return _Access(url=url, headers=headers, signing_secrets=secrets, format=format_)

    def _post(self, events: Sequence[StoredEvent]) -> None:
        headers, body = self._write(events)
        if body is None:
            return
        limit_seconds = self._settings.timeout_seconds
        open_seconds = patience_seconds(events, self._clock.now(), limit_seconds=limit_seconds)
        headers |= self._tokens.header()
        answer = self._http.exchange("POST", self._access.url, headers, body, open_seconds=open_seconds)
        if error := self._error(answer):
            is_lack = self._settings.token_scope and answer.status in _NO_ACCESS
            raise answer_error(error, self._access.url, answer, f"; {_LACK}" if is_lack else "")

    def _error(self, answer: Answer) -> type[DeliveryError] | None:
        error = webhook_error(answer.status, answer.body, is_chat_format=self._settings.is_chat_format)
        if error is Rejected and self._access.signing_secrets and b"signature" in answer.body.lower():
            return Misconfigured  # many verifiers answer 400 to a rotated key or a wrong clock
        return error

    def _write(self, events: Sequence[StoredEvent]) -> Encoded:
        """Return the headers and the body for events."""
        headers, body = self._encode(events)
        if self._settings.content_type:
            headers["Content-Type"] = self._settings.content_type
        if secrets := self._access.signing_secrets:
            headers |= sign(secrets, _message_id(events), self._clock.now(), body or b"")
        return {"WebHook-Request-Origin": _origin(), **headers, **self._access.headers}, body

    def _encode(self, events: Sequence[StoredEvent]) -> Encoded:
        try:
            return self._access.format.encode(events, self._clock.now())
        except Exception as error:  # any error would be the same at each try
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise Rejected(
                f"the event cannot be shown as {self._settings.format}{excerpt(reason)}"
            ) from error


def _message_id(events: Sequence[StoredEvent]) -> str:
    """Return the id of a message, the same in every try: of its event, or of all events in a batch."""
    if len(events) == 1:
        return events[0].id
    return str(uuid5(NAMESPACE, "\n".join(event.id for event in events)))


def _origin() -> str:
    """Return this machine's name as a header can contain it."""
    return socket.gethostname().encode("ascii", "replace").decode()
