"""Read CloudEvents that others have written, and refuse those that some sink could not send."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import NoReturn

from bridge.events.model import StoredEvent
from bridge.runtime.json import BoundedDecoder, Json, read_object

EXPECTED = "one CloudEvent 1.0 as a JSON object (structured mode)"
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 200  # twice that of a document, which may be part of an event
MAX_TEXT_CHARACTERS = 2048
# Some sinks send these attributes as headers, or as the message id of Service Bus.
_REQUIRED = ("specversion", "id", "source", "type")
_EXPECTED = {
    "specversion": (re.compile(r"1\.0"), '"1.0"'),
    "id": (re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?"), "1 to 128 printable ASCII characters"),
    "source": (re.compile(r".+"), "a text"),
    "type": (re.compile(r".+"), "a text"),
    "datacontenttype": (re.compile(r"[!-~](?:[ -~]*[!-~])?"), "printable ASCII characters"),
    **dict.fromkeys(("dataschema", "subject", "time"), (re.compile(r".*"), "a text")),
}
_NAME = re.compile(r"[a-z0-9]+")
_INVALID = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def read_event(body: bytes) -> StoredEvent:
    """Read an event, and check that every sink can send it.

    Raises:
        ValueError: it is not a structured CloudEvent; the text says why.
    """
    given = decode_event(body)
    check_event(given)
    return StoredEvent(id=given["id"], type=given["type"], body=body)


def event_key(event: StoredEvent) -> str:
    """Return a key of an event: two with the same `source` and `id` are the same event."""
    return sha256(json.dumps([event.envelope["source"], event.id]).encode()).hexdigest()


def decode_event(body: bytes) -> dict[str, Json]:
    """Decode a structured CloudEvent, whose attributes are still to be checked.

    Raises:
        ValueError: it is not a JSON object.
    """
    return read_object(body, max_bytes=MAX_BODY_BYTES, decoder=decoder)


def check_event(given: Mapping[str, Json]) -> None:
    """Check the attributes of a decoded event.

    Raises:
        ValueError: an attribute is missing or wrong.
    """
    for name, value in given.items():
        if name not in ("data", "data_base64"):
            _check_attribute(name, value)
    for name, (pattern, expected) in _EXPECTED.items():
        value = given.get(name)
        if value is None and name in _REQUIRED:
            raise ValueError(f"the attribute {name} is missing")
        if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ValueError(f"the attribute {name} is not {expected}")


def _check_attribute(name: str, value: Json) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of the attribute {name[:40]!a} has characters other than a-z and 0-9")
    if isinstance(value, dict | list | float):
        raise ValueError(f"the attribute {name[:40]} is not a text, an integer or a boolean")
    if isinstance(value, str) and (len(value) > MAX_TEXT_CHARACTERS or _INVALID.search(value)):
        raise ValueError(
            f"the attribute {name[:40]} has control characters, an unpaired surrogate, or more than "
            f"{MAX_TEXT_CHARACTERS} characters"
        )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


decoder = BoundedDecoder(max_depth=MAX_DEPTH, parse_float=_finite, parse_constant=_refuse_constant)
