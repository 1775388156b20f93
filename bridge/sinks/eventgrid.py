"""Send events to an Event Grid topic, custom or of a namespace or a domain, as batches of CloudEvents."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.azure.credentials import Tokens
from bridge.config.base import read_or_keep
from bridge.config.bus import EventGridSettings
from bridge.config.values import check_token
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent, encode_json
from bridge.formats.cloudevents import BATCH_CONTENT_TYPE, batch
from bridge.http.client import Answer, HttpClient, origin
from bridge.runtime.text import register_secret
from bridge.sinks.base import RequestPreview, Sink
from bridge.sinks.http import (
    MAX_BATCH_BYTES,
    answer_error,
    post_batches,
    preview,
    webhook_error,
)

SCOPE = "https://eventgrid.azure.net/.default"
MAX_BATCH_EVENTS = {"custom": 5000, "namespace": 1000}

_FORBIDDEN = 403
# What Event Grid answers with 400 if the topic is set up for other events, or the address is wrong.
_DOMAIN = b"the domain topic"
_SETUP_MARKS = (b"'EventGridEvent'", b"'CustomInputEvent'", b"UnsupportedApiVersion", b"api version", _DOMAIN)
_DOMAIN_ADVICE = "; set `topic` to the name of one of the domain's topics"


class EventGridSink(Sink):
    """An Event Grid topic; every request is a batch."""

    def __init__(self, settings: EventGridSettings) -> None:
        """Prepare to send.

        Raises:
            OSError, ValueError: the key's file cannot be used.
        """
        self._settings = settings
        self._flavor, self._url = settings.publish_url()
        self.max_batch = MAX_BATCH_EVENTS[self._flavor]
        self._http = HttpClient(settings)
        self._tokens = Tokens(settings, "" if settings.key else SCOPE)
        self._key = self._read_key()

    def reload(self) -> None:
        """Read the key again, and ask for a new token."""
        self._tokens.forget()
        self._key = read_or_keep(self._read_key, self._key)
        self._http.reload()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the events in as few batches as the topic takes."""
        post_batches(events, self._post, max_bytes=MAX_BATCH_BYTES)

    def check(self) -> str:
        """POST an empty batch: it sends no event, but needs the topic and the right to send."""
        answer = self._exchange(b"[]")
        error = event_grid_error(self._flavor, answer)
        if error in (Misconfigured, Unavailable):
            raise answer_error(error, self._url, answer)
        return f"{origin(self._url)}: ready to send, it answered {answer.status} to an empty batch"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the POST for an event."""
        name = next(iter(self._key), "Authorization")
        headers = {"Content-Type": BATCH_CONTENT_TYPE, name: "***"}
        return preview("POST", self._url, headers, self._batch([event]))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._tokens.forget()

    def _post(self, events: Sequence[StoredEvent]) -> None:
        body = self._batch(events)
        answer = self._exchange(body)
        if error := event_grid_error(self._flavor, answer, size=len(body)):
            raise answer_error(error, self._url, answer, _DOMAIN_ADVICE if _DOMAIN in answer.body else "")

    def _batch(self, events: Sequence[StoredEvent]) -> bytes:
        """Write events byte for byte, but for a domain, which takes their source for the topic."""
        if self._flavor == "namespace" or not self._settings.topic:
            return batch(events)
        return encode_json([{**event.envelope, "source": self._settings.topic} for event in events]).encode()

    def _exchange(self, body: bytes) -> Answer:
        headers = {"Content-Type": BATCH_CONTENT_TYPE, **self._key, **self._tokens.header()}
        return self._http.exchange("POST", self._url, headers, body)

    def _read_key(self) -> dict[str, str]:
        """Return the header with the key, none if the identity sends."""
        if not self._settings.key:
            return {}
        key = check_token(self._settings.key.read())
        register_secret(key)
        if self._flavor == "custom":
            return {"aeg-sas-key": key}
        return {"Authorization": f"SharedAccessKey {key}"}


def event_grid_error(flavor: str, answer: Answer, *, size: int = 0) -> type[DeliveryError] | None:
    """Return what Event Grid's answer means; None is success.

    A topic that is missing (404, or 410 of a namespace) may still be created: unlike a webhook's 410, it is retried.
    A namespace answers 403 if a role is missing, but also to what is too large and when its quota is used up; its
    text and the size of the request distinguish these.

    Args:
        flavor: custom or namespace.
        answer: if it has `Retry-After`, the request may be accepted later.
        size: of the request, in bytes.
    """
    error = webhook_error(answer.status)
    if error and "Retry-After" in answer.headers:
        return Unavailable
    if answer.status == _FORBIDDEN and flavor == "namespace":
        return _forbidden(answer.body.lower(), is_oversized=size > MAX_BATCH_BYTES)
    is_setup_error = any(mark in answer.body for mark in _SETUP_MARKS)
    return Misconfigured if error is Gone or (error is Rejected and is_setup_error) else error


def _forbidden(text: bytes, *, is_oversized: bool) -> type[DeliveryError]:
    if is_oversized:
        return Rejected
    if b"quota" in text or b"throttl" in text:
        return Unavailable
    return Rejected if b"maximum" in text or b"too large" in text else Misconfigured
