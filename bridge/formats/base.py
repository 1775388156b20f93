"""What a webhook format is: it writes events as the body that one kind of receiver takes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar

from bridge.config.sinks import ChatSettings, WebhookSettings
from bridge.events.model import StoredEvent
from bridge.runtime.json import Json

if TYPE_CHECKING:
    from bridge.formats.notice import Notice

Encoded = tuple[dict[str, str], bytes | None]
"""Headers, the content type among them, and a body, None if nothing is to be sent."""

encode_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""Writes JSON as chat formats send it."""


class Format(ABC):
    """A way to write events; made from its settings, without I/O except for secrets in files.

    Duties: pure and quick; whatever an event contains, the result is within the receiver's published limits, and
    text from outside stays text: no markup, no mention, no broken JSON. What is shortened shows it.
    """

    settings: ClassVar[type[WebhookSettings]]
    """The settings that it is made from; with its defaults."""
    max_batch = 1
    """How many events one body takes at most."""

    @abstractmethod
    def encode(self, events: Sequence[StoredEvent], now: datetime) -> Encoded:
        """Write the events of one request, as of `now` (UTC).

        Raises:
            ValueError: an event cannot be written in this format.
        """

    def check(self, now: datetime) -> None:  # noqa: B027 - only what an operator writes can fail
        """Try the format on samples of the events that will come.

        Raises:
            ValueError: one cannot be written.
        """


class ChatFormat(Format):
    """A format for people: each event is a JSON document of its own."""

    def __init__(self, settings: ChatSettings) -> None:
        self._zone = settings.zone
        self._link = settings.link
        self._settings = settings

    @abstractmethod
    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the JSON for an event (a CloudEvent as a dictionary), as of `now` (UTC); None for nothing to send.

        Raises:
            ValueError: this event cannot be shown in this format.
        """

    def _notice(self, event: Mapping[str, Json], now: datetime) -> Notice:
        from bridge.formats.notice import notice  # noqa: PLC0415 - not for CloudEvents, which need less memory so

        return notice(event, now=now, zone=self._zone, tags=self._settings.show_tags)

    def encode(self, events: Sequence[StoredEvent], now: datetime) -> Encoded:
        """Write the one event."""
        (event,) = events
        written = self.write(event.envelope, now)
        body = None if written is None else encode_json(written).encode()
        return {"Content-Type": "application/json"}, body
