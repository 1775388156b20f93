"""Read CloudEvents that others have written, and refuse what not every sink could carry on."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import NoReturn

from bridge.runtime.json import Json, is_deeper

EXPECTED = "one CloudEvent 1.0 as a JSON object (structured mode)"
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DEPTH = 200  # twice what a forwarder takes from IMDS
MAX_TEXT_CHARACTERS = 2048
# Attributes that a sink sends as more than a text in JSON: in headers as they are, and as ids on Service Bus.
_REQUIRED = {
    "specversion": (re.compile(r"1\.0"), '"1.0"'),
    "id": (re.compile(r"[!-~](?:[ -~]{0,126}[!-~])?"), "1 to 128 printable ASCII characters"),
    "source": (re.compile(r".+"), "a text"),
    "type": (re.compile(r".+"), "a text"),
}
_OPTIONAL = {
    "datacontenttype": (re.compile(r"[!-~](?:[ -~]*[!-~])?"), "printable ASCII characters"),
    "dataschema": (re.compile(r".*"), "a text"),
    "subject": (re.compile(r".*"), "a text"),
    "time": (re.compile(r".*"), "a text"),
}
_NAME = re.compile(r"[a-z0-9]+")
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What names a CloudEvent: two with the same `source` and `id` are the same event."""

    id: str
    source: str
    type: str

    @property
    def key(self) -> str:
        """The event's name in the records."""
        return sha256(json.dumps([self.source, self.id]).encode()).hexdigest()


def read_event(body: bytes) -> Envelope:
    """Read what names an event, and make sure that any sink can carry it.

    Raises:
        ValueError: it is no structured CloudEvent; the text says what was given.
    """
    given = _parse(body)
    for name, value in given.items():
        if name not in ("data", "data_base64"):
            _check_attribute(name, value)
    for name, (pattern, expected) in (_REQUIRED | _OPTIONAL).items():
        value = given.get(name)
        if value is None and name in _REQUIRED:
            raise ValueError(f"given no {name}")
        if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ValueError(f"given {name} that is not {expected}")
    return Envelope(id=given["id"], source=given["source"], type=given["type"])


def _check_attribute(name: str, value: Json) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"given an attribute {name[:40]!a}, whose name is not of a-z and 0-9 alone")
    if isinstance(value, dict | list | float):
        raise ValueError(f"given an attribute {name[:40]} that is no text, integer or boolean")
    if isinstance(value, str) and (len(value) > MAX_TEXT_CHARACTERS or _UNFIT.search(value)):
        raise ValueError(
            f"given an attribute {name[:40]} with control characters, half a surrogate pair, or more than "
            f"{MAX_TEXT_CHARACTERS} characters"
        )


def _parse(body: bytes) -> dict[str, Json]:
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(f"given {len(body)} bytes, more than {MAX_BODY_BYTES}")
    try:
        given = _decoder.decode(body.decode())
    except UnicodeDecodeError:
        raise ValueError("given no UTF-8 text") from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"given no JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError("given JSON that is no object")
    if is_deeper(given, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return given


_TOO_DEEP = "given JSON that is nested too deeply"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is none")


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_no_number)
