"""Read CloudEvents from HTTP requests: structured, binary and batch mode, within limits."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from bridge.console.received import Received, receive
from bridge.events.envelope import MAX_BODY_BYTES, decode_event, decoder
from bridge.runtime.json import Json

STRUCTURED, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
EXPECTED = (
    f"expected CloudEvents: Content-Type {STRUCTURED} or {BATCH}, or ce- headers (binary mode); "
    "https://github.com/cloudevents/spec/blob/v1.0.2/cloudevents/bindings/http-protocol-binding.md"
)
MAX_BATCH_EVENTS = 5000  # what Event Grid sends at most
_encode = json.JSONEncoder(separators=(",", ":")).encode


class UnsupportedContentError(ValueError):
    """The request holds no CloudEvents at all."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a request holds: events of imds-bridge, how many others, and what is wrong with those that are invalid."""

    events: list[Received]
    ignored: int
    faults: list[str]


def read_events(headers: Mapping[str, str], body: bytes, *, now: float) -> Content:
    """Read the events of a request.

    Args:
        headers: with names in lower case.
        body: as received.
        now: seconds since 1970.

    Raises:
        UnsupportedContentError: the content type is another one.
        ValueError: it is not valid, or has too much.
    """
    faults: list[str] = []
    found: list[Received | None] = []
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == STRUCTURED:
        found = [receive(decode_event(body), body, now=now)]
    elif content_type == BATCH:
        for number, given in enumerate(_decode_batch(body)):
            try:
                found.append(_receive_one(given, now))
            except ValueError as error:
                faults.append(f"event {number} of the batch: {error}")
    elif "ce-specversion" in headers:
        found = [_receive_one(_decode_binary(headers, content_type, body), now)]
    else:
        raise UnsupportedContentError(EXPECTED)
    return Content(events=[event for event in found if event], ignored=found.count(None), faults=faults)


def is_binary(headers: Mapping[str, str]) -> bool:
    """Return whether the event's attributes are headers, which no signature covers."""
    return "ce-specversion" in headers and not headers.get("content-type", "").lower().startswith(
        "application/cloudevents"
    )


def _receive_one(given: Json, now: float) -> Received | None:
    if not isinstance(given, dict):
        raise ValueError("it is not an object")
    return receive(given, _encode(given).encode("ascii"), now=now)


def _decode_batch(body: bytes) -> list[Json]:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"{len(body)} bytes, expected at most {MAX_BODY_BYTES}")
    batch = decoder.decode(body.decode("utf-8"))
    if not isinstance(batch, list) or len(batch) > MAX_BATCH_EVENTS:
        raise ValueError(f"expected a list of at most {MAX_BATCH_EVENTS} events")
    return batch


def _decode_binary(headers: Mapping[str, str], content_type: str, body: bytes) -> dict[str, Json]:
    given: dict[str, Json] = {
        name.removeprefix("ce-"): unquote(value) for name, value in headers.items() if name.startswith("ce-")
    }
    if content_type:
        given["datacontenttype"] = headers["content-type"]
    if content_type.endswith("json") and body:
        given["data"] = decoder.decode(body.decode("utf-8"))
    elif body:
        given["data_base64"] = b64encode(body).decode("ascii")
    return given
