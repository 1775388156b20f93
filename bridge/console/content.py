"""Read CloudEvents from HTTP requests: structured, binary and batch mode, within limits."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
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


def read_events(headers: Mapping[str, str], body: bytes, *, now: float) -> tuple[list[Received], int]:
    """Read the events of a request; return those of imds-bridge, and the number of others.

    Args:
        headers: with names in lower case.
        body: as received.
        now: seconds since 1970.

    Raises:
        UnsupportedContentError: the content type is another one.
        ValueError: an event is not valid; none of the batch counts then.
    """
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type == STRUCTURED:
        found = [receive(decode_event(body), body, now=now)]
    elif content_type == BATCH:
        found = [_receive_one(number, given, now) for number, given in enumerate(_decode_batch(body))]
    elif "ce-specversion" in headers:
        given = _decode_binary(headers, content_type, body)
        found = [receive(given, _encode(given).encode("ascii"), now=now)]
    else:
        raise UnsupportedContentError(EXPECTED)
    return [event for event in found if event], found.count(None)


def is_binary(headers: Mapping[str, str]) -> bool:
    """Return whether the event's attributes are headers, which no signature covers."""
    return "ce-specversion" in headers and not headers.get("content-type", "").lower().startswith(
        "application/cloudevents"
    )


def _receive_one(number: int, given: Json, now: float) -> Received | None:
    if not isinstance(given, dict):
        raise ValueError(f"event {number} of the batch is not an object")
    try:
        return receive(given, _encode(given).encode("ascii"), now=now)
    except ValueError as error:
        raise ValueError(f"event {number} of the batch: {error}") from None


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
