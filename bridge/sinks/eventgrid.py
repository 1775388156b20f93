"""Send events to an Event Grid topic, custom or of a namespace, as batches of CloudEvents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge.azure.credentials import make_credential
from bridge.config.base import read_or_keep
from bridge.config.bus import EventGridSettings
from bridge.config.values import check_token
from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import BATCH_CONTENT_TYPE, batch
from bridge.http.client import Answer, HttpClient, origin
from bridge.runtime.text import redact, register_secret, register_token
from bridge.runtime.threads import extend_deadline
from bridge.sinks.base import RequestPreview, Sink
from bridge.sinks.http import MAX_BATCH_BYTES, answer_error, post_batches, preview, webhook_error

SCOPE = "https://eventgrid.azure.net/.default"
MAX_BATCH_EVENTS = {"custom": 5000, "namespace": 1000}
TOKEN_SECONDS = 30.0  # for all that "default" tries, before the thread counts as stalled

_FORBIDDEN = 403
# What Event Grid answers with 400 if the topic is set up for other events, or the address is wrong.
_SETUP_MARKS = (b"'EventGridEvent'", b"'CustomInputEvent'", b"UnsupportedApiVersion", b"api version")


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
        self._credential: Any = None
        self._key = self._read_key()

    def reload(self) -> None:
        """Read the key again, and ask for a new token."""
        self._forget_token()
        self._key = read_or_keep(self._read_key, self._key)
        self._http.reload()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the events in as few batches as the topic takes."""
        post_batches(events, self._post, max_bytes=MAX_BATCH_BYTES)

    def check(self) -> str:
        """POST an empty batch: it sends no event, but needs the topic and the right to send."""
        answer = self._exchange(b"[]")
        error = self._error(answer, 0)
        if error in (Misconfigured, Unavailable):
            raise answer_error(error, self._url, answer)
        return f"{origin(self._url)}: ready to send, it answered {answer.status} to an empty batch"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the POST for an event."""
        name = "aeg-sas-key" if self._key and self._flavor == "custom" else "Authorization"
        headers = {"Content-Type": BATCH_CONTENT_TYPE, name: "***"}
        return preview("POST", self._url, headers, batch([event]))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()
        self._forget_token()

    def _post(self, events: Sequence[StoredEvent]) -> None:
        body = batch(events)
        answer = self._exchange(body)
        if error := self._error(answer, len(body)):
            raise answer_error(error, self._url, answer)

    def _error(self, answer: Answer, size: int) -> type[DeliveryError] | None:
        return event_grid_error(
            self._flavor,
            answer.status,
            answer.body,
            asks_to_wait="Retry-After" in answer.headers,
            is_oversized=size > MAX_BATCH_BYTES,
        )

    def _exchange(self, body: bytes) -> Answer:
        headers = {"Content-Type": BATCH_CONTENT_TYPE, **self._authorization()}
        return self._http.exchange("POST", self._url, headers, body)

    def _authorization(self) -> dict[str, str]:
        if not self._key:
            return {"Authorization": f"Bearer {self._token()}"}
        if self._flavor == "custom":
            return {"aeg-sas-key": self._key}
        return {"Authorization": f"SharedAccessKey {self._key}"}

    def _read_key(self) -> str:
        """Return the key, or "" if the identity sends."""
        key = check_token(self._settings.key.read()) if self._settings.key else ""
        register_secret(key)
        return key

    def _token(self) -> str:
        """Return the identity's token, which the credential caches and renews in time.

        Raises:
            Misconfigured: no token came.
        """
        extend_deadline(TOKEN_SECONDS)
        try:
            self._credential = self._credential or make_credential(self._settings)
            token: str = self._credential.get_token(SCOPE).token
        except Exception as error:  # the libraries raise more than their own errors
            detail = redact(" ".join(str(error).split()))[:300]
            raise Misconfigured(
                f"no token for the identity; is one assigned to this VM, and does IMDS answer? ({detail})"
            ) from error
        register_token(token)
        return token

    def _forget_token(self) -> None:
        """Request a new token next time."""
        credential, self._credential = self._credential, None
        if credential is not None:
            credential.close()


def event_grid_error(
    flavor: str, status: int, body: bytes = b"", *, asks_to_wait: bool = False, is_oversized: bool = False
) -> type[DeliveryError] | None:
    """Return what Event Grid's answer means; None is success.

    A topic that is missing (404, or 410 of a namespace) may still be created: unlike a webhook's 410, it is retried.
    A namespace answers 403 if a role is missing, but also to what is too large and when its quota is used up; its
    text and the size of the request distinguish these.

    Args:
        flavor: custom or namespace.
        status: of HTTP.
        body: of the answer.
        asks_to_wait: whether the answer has `Retry-After`, so that the request may be accepted later.
        is_oversized: whether the request was larger than allowed.
    """
    error = webhook_error(status)
    if error and asks_to_wait:
        return Unavailable
    if status == _FORBIDDEN and flavor == "namespace":
        return _forbidden(body.lower(), is_oversized=is_oversized)
    is_setup_error = any(mark in body for mark in _SETUP_MARKS)
    return Misconfigured if error is Gone or (error is Rejected and is_setup_error) else error


def _forbidden(text: bytes, *, is_oversized: bool) -> type[DeliveryError]:
    if is_oversized:
        return Rejected
    if b"quota" in text or b"throttl" in text:
        return Unavailable
    return Rejected if b"maximum" in text or b"too large" in text else Misconfigured
