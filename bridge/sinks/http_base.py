"""What the sinks over HTTP share: one exchange with its errors mapped, batches, and how a request is shown."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote_plus, urlsplit

from bridge.config.http import HttpSettings
from bridge.config.validators import check_proxy
from bridge.errors import DeliveryError, HttpFailure, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.http.client import Answer, HttpClient, clock_skew_seconds, origin, retry_after_seconds
from bridge.runtime.logging import redact, register_secret
from bridge.sinks.base import Request
from bridge.sinks.responses import RETRY_AFTER_LIMIT_SECONDS

log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 64 * 1024
EXCERPT_CHARACTERS = 500
LONG_WORD = 16  # in a URL; shorter ones may be settings, or words that logs need
TELL_SKEW_SECONDS = 60.0


class Poster:
    """HTTP as a sink's settings have it: certificates, proxy and time limit; for one thread at a time."""

    def __init__(self, settings: HttpSettings) -> None:
        """Prepare to send.

        Raises:
            OSError, ValueError: the proxy cannot be used.
        """
        self._settings = settings
        self._http = self._make_client()

    def reload(self) -> None:
        """Take the proxy and the certificates as they stand now; open connections are given up."""
        self._http.reset()
        try:
            self._http = self._make_client()
        except (OSError, ValueError) as error:
            log.warning("a secret file cannot be used; the old value stays: %s", error)

    def _make_client(self) -> HttpClient:
        settings = self._settings
        proxy = check_proxy(settings.proxy.read()) if settings.proxy else ""
        register_url(proxy)
        return HttpClient(
            ca_file=settings.ca_file,
            client_certificate_file=settings.client_certificate_file,
            client_key_file=settings.client_key_file,
            proxy=proxy,
        )

    def exchange(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Answer:
        """Send one request and read its answer.

        Raises:
            DeliveryError: no answer came.
        """
        try:
            request = self._http.prepare(method, url, headers=headers, body=body)
            return self._http.send(
                request,
                timeout_seconds=self._settings.timeout_seconds,
                max_body_bytes=MAX_ANSWER_BYTES,
                truncate=True,
            )
        except HttpFailure as error:
            kind = Misconfigured if error.permanent else Unavailable
            raise kind(f"{origin(url)}: {error}") from error

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def refusal(kind: type[DeliveryError], url: str, answer: Answer) -> DeliveryError:
    """Make the error for an answer that is no success, with what an operator needs of it."""
    skew = clock_skew_seconds(answer.headers, time.time()) or 0.0
    clock = f" (this VM's clock is {skew:+.0f} s off the receiver's)" if abs(skew) > TELL_SKEW_SECONDS else ""
    return kind(
        f"{origin(url)} answered {answer.status}{excerpt(answer.body)}{clock}",
        status=answer.status,
        retry_after_seconds=retry_after_seconds(answer.headers, limit_seconds=RETRY_AFTER_LIMIT_SECONDS),
    )


def post_batches(
    events: Sequence[StoredEvent], post: Callable[[Sequence[StoredEvent]], None], *, max_bytes: int
) -> None:
    """Post events in their order in as few batches as `max_bytes` allows.

    A batch that is refused is posted in halves, until the event that is meant stands alone.

    Raises:
        DeliveryError: with the number of events that were taken before.
    """
    delivered = 0
    waiting = _cut(events, max_bytes)[::-1]
    while waiting:
        batch = waiting.pop()
        try:
            post(batch)
        except DeliveryError as error:
            if not isinstance(error, Rejected) or len(batch) == 1:
                error.delivered = delivered
                raise
            half = len(batch) // 2
            waiting += [batch[half:], batch[:half]]
        else:
            delivered += len(batch)


def _cut(events: Sequence[StoredEvent], max_bytes: int) -> list[Sequence[StoredEvent]]:
    batches: list[Sequence[StoredEvent]] = []
    start, size = 0, 2
    for number, event in enumerate(events):
        size += len(event.body) + 1
        if size > max_bytes and number > start:
            batches.append(events[start:number])
            start, size = number, len(event.body) + 3
    return [*batches, events[start:]]


def shown(method: str, url: str, headers: Mapping[str, str], body: bytes) -> Request:
    """Show a request without the secrets in it: the URL's path may be one, too."""
    head = [f"{method} {origin(url)}/...", *(f"{name}: {redact(value)}" for name, value in headers.items())]
    return Request(head=tuple(head), body=redact(body.decode()).encode())


def register_url(url: str) -> None:
    """Keep out of every log what a receiver may repeat of a URL: path, query, and what is long in them."""
    parts = urlsplit(url)
    words = [word for word in re.split("[/?&=]", f"{parts.path}?{parts.query}") if len(word) >= LONG_WORD]
    user = parts.netloc.rpartition("@")[0]
    secrets = [f"{parts.path}?{parts.query}", parts.path, parts.query, user, parts.password or "", *words]
    for secret in (*secrets, *map(unquote_plus, secrets)):
        register_secret(secret)


def excerpt(body: bytes) -> str:
    """Show the beginning of an answer on one line, without secrets that it may repeat and what moves a cursor."""
    text = redact(body.decode("utf-8", errors="replace"))
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f": {text[:EXCERPT_CHARACTERS]}" if text else ""
