"""Write CloudEvents 1.0 as JSON (structured mode) and as HTTP headers with a body (binary mode)."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Sequence
from datetime import datetime
from typing import ClassVar, Literal
from urllib.parse import quote

from bridge.config.sinks import WebhookSettings
from bridge.events.model import StoredEvent, encode_json
from bridge.formats.base import Encoded, Format
from bridge.runtime.json import Json

CONTENT_TYPE = "application/cloudevents+json; charset=utf-8"
MAX_BATCH_EVENTS = 100
BATCH_CONTENT_TYPE = "application/cloudevents-batch+json; charset=utf-8"
_IS_JSON = re.compile(r"[\w.-]+/([\w.-]+\+)?json\b", re.IGNORECASE)
# HTTP binding, "Header values": printable ASCII stays but for the quote and the percent sign.
_HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


class CloudEventsSettings(WebhookSettings):
    """CloudEvents over HTTP, in one of the three modes of its HTTP binding."""

    format: Literal["cloudevents"] = "cloudevents"
    mode: Literal["structured", "binary", "batch"] = "structured"
    """One event as JSON, one with its attributes as `ce-` headers (percent-encoded, which several SDKs do not
    decode), or lists of up to 100 events."""


class CloudEvents(Format):
    """Events as they are stored, as headers and data, or several in a batch."""

    settings: ClassVar = CloudEventsSettings

    def __init__(self, settings: CloudEventsSettings) -> None:
        self._mode = settings.mode
        if settings.mode == "batch":
            self.max_batch = MAX_BATCH_EVENTS

    def encode(self, events: Sequence[StoredEvent], now: datetime) -> Encoded:  # noqa: ARG002 - no times are shown
        """Write the events in the mode that is set."""
        if self._mode == "batch":
            return {"Content-Type": BATCH_CONTENT_TYPE}, batch(events)
        (event,) = events
        if self._mode == "structured":
            return {"Content-Type": CONTENT_TYPE}, event.body
        return binary(event.envelope)


def batch(events: Sequence[StoredEvent]) -> bytes:
    """Write events as a batch, each byte for byte as it is stored."""
    return b"[" + b",".join(event.body for event in events) + b"]"


def binary(envelope: dict[str, Json]) -> tuple[dict[str, str], bytes]:
    """Split a structured event into `ce-` headers and the data as the body.

    Events that a relay takes off a bus may have no data, bytes, or data that is no JSON.
    """
    content_type = str(envelope.get("datacontenttype") or "application/json")
    headers = {
        f"ce-{name}": quote(
            value if isinstance(value, str) else json.dumps(value), safe=_HEADER_SAFE, errors="replace"
        )
        for name, value in envelope.items()
        if name not in ("data", "data_base64", "datacontenttype") and value is not None
    }
    headers["Content-Type"] = content_type
    if "data_base64" in envelope:
        return headers, b64decode(envelope["data_base64"])
    if "data" not in envelope:
        return headers, b""
    data = envelope["data"]
    if isinstance(data, str) and not _IS_JSON.match(content_type):
        return headers, data.encode("utf-8", "replace")
    return headers, encode_json(data).encode("ascii")
