"""What a webhook format is: it writes events as the body that one kind of receiver takes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import ClassVar
from urllib.parse import quote
from zoneinfo import ZoneInfo

from pydantic import field_validator

from bridge.config.sinks import Pattern, PositiveSeconds, WebhookSettings
from bridge.events.model import StoredEvent
from bridge.runtime.json import Json

Encoded = tuple[dict[str, str], bytes]
"""Headers, the content type among them, and a body."""

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

    def check(self, events: Iterable[Mapping[str, Json]], now: datetime) -> None:  # noqa: B027 - most cannot fail
        """Try the format on one event of every type that will come.

        Raises:
            ValueError: one cannot be written.
        """


MAX_ID_LENGTH = 100  # percent-encoded; IMDS's are UUIDs


class ChatSettings(WebhookSettings):
    """What all chat formats have in common: by default, notices and receipts of this VM of the last hour."""

    types: tuple[Pattern, ...] = ("io.imdsbridge.scheduledevent.*", "io.imdsbridge.approval.*")
    max_age_seconds: PositiveSeconds = 3600.0
    time_zone: str = ""
    """The IANA name of the time zone; by default each reader's own in Teams and Slack, else UTC. Example:
    `"Europe/Berlin"`."""

    is_chat_format: ClassVar = True

    @field_validator("time_zone")
    @classmethod
    def _check_time_zone(cls, value: str) -> str:
        try:
            if value:
                ZoneInfo(value)
        except (KeyError, OSError, ValueError):  # the library's own is a KeyError
            raise ValueError("expected an IANA time zone such as Europe/Berlin") from None
        return value

    def link(self, event_id: str) -> str:
        """Return the address of an event's page on the console, "" if there is none.

        The id is percent-encoded, also what is markup in a chat, so that it can only be the last part of the path. An
        id of dots would be another path even so: it has no link.
        """
        quoted = (
            quote(event_id.strip(".") and event_id.lower(), safe="", errors="replace")
            .replace("_", "%5F")
            .replace("~", "%7E")
        )
        is_linked = self._console_url and 0 < len(quoted) <= MAX_ID_LENGTH
        return f"{self._console_url}/event/{quoted}" if is_linked else ""

    @property
    def zone(self) -> tzinfo | None:
        """The time zone to write times in, if one is set."""
        return ZoneInfo(self.time_zone) if self.time_zone else None


class ChatFormat(Format):
    """A format for people: each event is a JSON document of its own."""

    def __init__(self, settings: ChatSettings) -> None:
        self._zone = settings.zone
        self._link = settings.link

    @abstractmethod
    def write(self, event: Mapping[str, Json], now: datetime) -> Json:
        """Return the JSON for an event (a CloudEvent as a dictionary), as of `now` (UTC).

        Raises:
            ValueError: this event cannot be shown in this format.
        """

    def encode(self, events: Sequence[StoredEvent], now: datetime) -> Encoded:
        """Write the one event."""
        (event,) = events
        return {"Content-Type": "application/json"}, encode_json(self.write(event.envelope, now)).encode()

    def check(self, events: Iterable[Mapping[str, Json]], now: datetime) -> None:
        """Write each of the events."""
        for event in events:
            self.write(event, now)
