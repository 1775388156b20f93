"""Send events to an Event Grid topic, custom or of a namespace, as batches of CloudEvents."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from bridge.azure.credentials import make_credential
from bridge.config.eventgrid import EventGridSettings
from bridge.config.validators import check_token
from bridge.errors import DeliveryError, HungError, Misconfigured, Unavailable
from bridge.events.model import StoredEvent
from bridge.formats.cloudevents import BATCH_CONTENT_TYPE, batch
from bridge.http.client import Answer, origin
from bridge.runtime.logging import redact, register_secret, register_token
from bridge.runtime.worker import Worker
from bridge.sinks.base import RETRY_LIMIT_SECONDS, Request
from bridge.sinks.http_base import Poster, post_batches, refusal, shown
from bridge.sinks.responses import event_grid_error

log = logging.getLogger(__name__)

SCOPE = "https://eventgrid.azure.net/.default"
MAX_BATCH_EVENTS = {"custom": 5000, "namespace": 1000}
MAX_BATCH_BYTES = 1_000_000  # of the documented 1 MB
# The libraries' limits do not bound a token endpoint that answers byte by byte, nor all that "default" tries.
TOKEN_SECONDS = 30.0

_UNAUTHORIZED = 401


class EventGridSink:
    """An Event Grid topic; every request is a batch."""

    retry_limit_seconds = RETRY_LIMIT_SECONDS

    def __init__(self, settings: EventGridSettings) -> None:
        """Prepare to send.

        Raises:
            OSError, ValueError: the key's file cannot be used.
        """
        self._settings = settings
        self._flavor, self._url = settings.publish_url()
        self.max_batch = MAX_BATCH_EVENTS[self._flavor]
        self._poster = Poster(settings)
        self._tokens = _Tokens(settings)
        self._key = self._read_key()

    def keep_alive(self) -> None:
        """Do nothing: a connection is made when it is needed."""

    def reload(self) -> None:
        """Read the key again, and forget the token."""
        self._forget()
        self._poster.reload()

    def send(self, events: Sequence[StoredEvent]) -> None:
        """POST the events in as few batches as the topic takes."""
        post_batches(events, self._post, max_bytes=MAX_BATCH_BYTES)

    def check(self) -> str:
        """POST an empty batch: it sends no event, but needs the topic and the right to send."""
        answer = self._exchange(b"[]")
        error = self._error(answer, 0)
        if error in (Misconfigured, Unavailable):
            raise refusal(error, self._url, answer)
        return f"{origin(self._url)} lets us send, it answered {answer.status} to an empty batch"

    def show(self, event: StoredEvent) -> Request:
        """Show the POST for an event."""
        name = "aeg-sas-key" if self._key and self._flavor == "custom" else "Authorization"
        headers = {"Content-Type": BATCH_CONTENT_TYPE, name: "***"}
        return shown("POST", self._url, headers, batch([event]))

    def close(self) -> None:
        """Close the connections."""
        self._poster.close()
        self._tokens.close()

    def _post(self, events: Sequence[StoredEvent]) -> None:
        body = batch(events)
        answer = self._exchange(body)
        if error := self._error(answer, len(body)):
            raise refusal(error, self._url, answer)

    def _error(self, answer: Answer, size: int) -> type[DeliveryError] | None:
        return event_grid_error(
            self._flavor,
            answer.status,
            answer.body,
            asks_to_wait="Retry-After" in answer.headers,
            oversized=size > MAX_BATCH_BYTES,
        )

    def _exchange(self, body: bytes) -> Answer:
        """POST a body; where the key was rotated, or a clock took a token for valid, once more with a new one."""
        headers = self._headers()
        answer = self._poster.exchange("POST", self._url, headers, body)
        if answer.status == _UNAUTHORIZED:
            self._forget()
            if (renewed := self._headers()) != headers:
                answer = self._poster.exchange("POST", self._url, renewed, body)
        return answer

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": BATCH_CONTENT_TYPE, **self._authorization()}

    def _authorization(self) -> dict[str, str]:
        if not self._key:
            return {"Authorization": f"Bearer {self._tokens.get()}"}
        if self._flavor == "custom":
            return {"aeg-sas-key": self._key}
        return {"Authorization": f"SharedAccessKey {self._key}"}

    def _forget(self) -> None:
        """Take the key as it stands now, and no token that is known."""
        self._tokens.forget()
        try:
            self._key = self._read_key()
        except (OSError, ValueError) as error:
            log.warning("a secret file cannot be used; the old value stays: %s", error)

    def _read_key(self) -> str:
        """Return the key, or "" where the identity sends."""
        key = check_token(self._settings.key.read()) if self._settings.key else ""
        register_secret(key)
        return key


class _Tokens:
    """The identity's tokens, asked for on a thread of their own because the libraries can block without bound."""

    def __init__(self, settings: EventGridSettings) -> None:
        self._settings = settings
        self._worker = Worker("eventgrid-token")
        self._credential: Any = None

    def get(self) -> str:
        """Return a token; the credential keeps it and renews it in time.

        Raises:
            DeliveryError: there is none.
            HungError: too many calls hang.
        """
        try:
            credential = self._credential = self._credential or make_credential(self._settings)
            token: str = self._worker.call(
                lambda: credential.get_token(SCOPE).token,
                limit_seconds=TOKEN_SECONDS,
                afterwards=credential.close,
            )
        except HungError as error:
            self._credential = None  # it stays with the thread that hangs
            if error.final:
                raise
            raise Unavailable(f"no token for the identity: {error}") from error
        except Exception as error:  # the libraries raise more than their own errors
            told = redact(" ".join(str(error).split()))[:300]
            raise Misconfigured(
                f"no token for the identity; is one assigned to this VM, and does IMDS answer? ({told})"
            ) from error
        register_token(token)
        return token

    def forget(self) -> None:
        """Ask for a new token next time."""
        credential, self._credential = self._credential, None
        if credential is not None:
            credential.close()

    def close(self) -> None:
        """Let the thread end."""
        self.forget()
        self._worker.close()
