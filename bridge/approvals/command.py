"""Read approve commands as CloudEvents (structured or binary), plain JSON or IMDS's own form; refuse all else."""

from __future__ import annotations

import json
import re
import struct
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256

from bridge.contract.types import type_of
from bridge.imds.document import is_event_id
from bridge.runtime.json import BoundedDecoder, Json, read_object
from bridge.runtime.text import printable
from bridge.runtime.time import parse_iso

COMMAND_APPROVE = "command.approve"
_KNOWN = ("EventId", "EventIds", "StartRequests", "Id", "Vm", "RequestedBy", "Reason", "ExpiresAt")
_FORMS = ("StartRequests", "EventIds", "EventId")
MAX_EVENT_IDS = 100
MAX_BODY_BYTES = 256 * 1024
_MAX_DEPTH = 100
_ATTRIBUTE = re.compile(r"cloudEvents[_:](.+)", re.IGNORECASE)
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
# What .NET's DataContractSerializer makes of a text: the start of the binary XML, and each part with its length.
_DOTNET = b"@\x06string\x083http://schemas.microsoft.com/2003/10/Serialization/"
_LENGTHS = {0x98: "<B", 0x9A: "<H", 0x9C: "<I"}


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return an object; of a name that is given twice it is not known which value is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{_show(twice)} is given twice")
    return found


def _refuse(name: str) -> Json:
    """Refuse NaN and Infinity, which Python reads."""
    raise ValueError(f"{name} is no value of JSON")


_decoder = BoundedDecoder(max_depth=_MAX_DEPTH, object_pairs_hook=_unique, parse_constant=_refuse)
_lenient = BoundedDecoder(max_depth=_MAX_DEPTH)


@dataclass(frozen=True, kw_only=True)
class Command:
    """A request to approve events.

    `key` identifies the command in the records: however often it is delivered, its key is the same.
    `requested_by` and `reason` are repeated in the receipt and never trusted.
    """

    id: str
    key: str
    event_ids: tuple[str, ...]
    vm: str = ""
    requested_by: str = ""
    reason: str = ""
    expires_at: datetime | None = None


def unwrap(body: bytes) -> bytes:
    """Return the text in a body that is a JSON string, as npm's client makes it, or .NET's; others unchanged."""
    if len(body) > MAX_BODY_BYTES:
        return body
    if body.startswith(_DOTNET):
        return _dotnet_text(body[len(_DOTNET) :]) or body
    if body.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b'"'):
        with suppress(ValueError):
            return str(json.loads(body.decode("utf-8-sig"))).encode(errors="surrogatepass")
    return body


def _dotnet_text(rest: bytes) -> bytes:
    """Return the text of binary XML behind its start, "" if that is something else."""
    text = b""
    while rest and (form := _LENGTHS.get(rest[0] & 0xFE)):
        size = struct.calcsize(form)
        with suppress(struct.error):
            (length,) = struct.unpack_from(form, rest, 1)
            text, rest = text + rest[1 + size : 1 + size + length], rest[1 + size + length :]
            continue
        return b""
    return text if rest in (b"", b"\x01") else b""


def find_id(body: bytes, properties: Mapping[str, str]) -> str:
    """Return the id that a message gives itself which is no command, "" if none can be read."""
    with suppress(ValueError):
        given = read_object(body, max_bytes=MAX_BODY_BYTES, decoder=_lenient, encoding="utf-8-sig")
        known = _attributes(properties).get("id") or given.get("id" if "specversion" in given else "Id")
        return printable(known)
    return ""


def parse_command(
    body: bytes, *, message_id: str, properties: Mapping[str, str] | None = None, signed_id: str = ""
) -> Command:
    """Read a command.

    Args:
        body: the message's body, unwrapped.
        message_id: the command's id if it has none itself.
        properties: the application properties, if any: they hold the attributes of a CloudEvent in binary mode.
        signed_id: the id that the message's signature covers; used in place of ids and sources outside the body.

    Raises:
        ValueError: it is not a command; the text says what was given and expected.
    """
    given = read_object(body, max_bytes=MAX_BODY_BYTES, decoder=_decoder, encoding="utf-8-sig")
    command_id, source = printable(given.get("Id")) or printable(signed_id or message_id), ""
    if attributes := _attributes(properties or {}):
        _check_type(attributes)
        if "specversion" not in given:  # binary mode: the body is the data alone
            signed = {"id": command_id, "source": ""} if signed_id else {}
            given = {**attributes, **signed, "specversion": "1.0", "data": given}
    data: Json = given
    if "specversion" in given:
        _check_type(given)
        _check_place(given, "beside data")
        data = _data(given)
        command_id, source = printable(given.get("id")), printable(given.get("source"))
        if not isinstance(data, dict):
            raise ValueError("a CloudEvent without an object as data")
        if not command_id:
            raise ValueError("a CloudEvent without an id")
    _check_names(data)
    event_ids = _event_ids(data)
    vm = _vm(data.get("Vm"))
    key = [command_id, sorted(event_id.lower() for event_id in event_ids), vm.casefold(), source]
    return Command(
        id=command_id,
        key=sha256(json.dumps(key).encode()).hexdigest(),
        event_ids=event_ids,
        vm=vm,
        requested_by=printable(data.get("RequestedBy")),
        reason=printable(data.get("Reason")),
        expires_at=_instant(data.get("ExpiresAt")),
    )


def _data(given: Mapping[str, Json]) -> Json:
    """Return the data of a CloudEvent, of which JSON may also stand in Base64."""
    encoded = given.get("data_base64")
    if encoded is None:
        return given.get("data")
    if "data" in given or not isinstance(encoded, str):
        raise ValueError("a CloudEvent with data_base64 that is no text, or beside data")
    try:
        body = b64decode(encoded, validate=True)
    except ValueError:
        raise ValueError("a CloudEvent with data_base64 that is not Base64") from None
    return read_object(body, max_bytes=MAX_BODY_BYTES, decoder=_decoder, encoding="utf-8-sig")


def _attributes(properties: Mapping[str, str]) -> dict[str, Json]:
    """Return the CloudEvents attributes among application properties: the AMQP binding allows two prefixes."""
    found = ((_ATTRIBUTE.fullmatch(name), value) for name, value in properties.items())
    return _unique([(match[1].lower(), value) for match, value in found if match])


def _check_type(attributes: Mapping[str, Json]) -> None:
    if attributes.get("type") != type_of(COMMAND_APPROVE):
        raise ValueError(
            f"a CloudEvent of type {_show(attributes.get('type'))}, expected {type_of(COMMAND_APPROVE)}"
        )


def _event_ids(data: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the ids in their order, each once, whatever its letter case."""
    forms = [name for name in _FORMS if data.get(name) is not None]
    if len(forms) != 1:
        found = f"{' and '.join(forms)} together" if forms else "no EventId, EventIds or StartRequests"
        raise ValueError(f'{found}, expected one of them, such as {{"EventId": "..."}}')
    (form,) = forms
    given: Json = [data["EventId"]] if form == "EventId" else data[form]
    if not isinstance(given, list):
        raise ValueError(f"{form} is not a list")
    if form == "StartRequests":
        requests = [one for one in given if isinstance(one, dict)]
        for one in requests:
            _check_names(one)
            _check_place(one, "inside StartRequests")
        given = [one.get("EventId") for one in requests] + [None] * (len(given) - len(requests))
    if not given or len(given) > MAX_EVENT_IDS:
        raise ValueError(f"{len(given)} EventIds, expected 1 to {MAX_EVENT_IDS}")
    for event_id in given:
        if not is_event_id(event_id):
            raise ValueError(f"an EventId {_show(event_id)}, expected 1 to 200 printable ASCII characters")
    return tuple({event_id.lower(): event_id for event_id in given}.values())


def _check_names(data: Mapping[str, Json]) -> None:
    """Refuse a property that is a known one but for its letter case: who misspells a restriction means it."""
    known = {name.lower(): name for name in _KNOWN}
    for name in data:
        if name not in _KNOWN and (meant := known.get(name.lower())):
            raise ValueError(f"{_show(name)}, expected {meant}: letter case matters")


def _check_place(found: Mapping[str, Json], where: str) -> None:
    """Refuse a restriction where it would restrict nothing."""
    for name, value in found.items():
        if name.lower() in ("vm", "expiresat") and value is not None:
            raise ValueError(f"{_show(name)} {where}, expected it beside the EventIds")


def _vm(value: Json) -> str:
    """Return the name of the VM; an unreadable name is refused, because an empty one means any VM."""
    if value is None or value == "":
        return ""
    name = printable(value).strip()
    if not name or name != value.strip():
        raise ValueError("Vm is not a name")
    return name


def _instant(value: Json) -> datetime | None:
    is_one = isinstance(value, str) and _INSTANT.fullmatch(value)
    instant = parse_iso(value) if is_one else None
    if instant is None and value is not None:
        text = f"ExpiresAt {_show(value)}, expected a time with its zone such as 2026-01-31T12:00:00Z"
        raise ValueError(text)
    return instant


def _show(value: Json) -> str:
    """Quote a value briefly."""
    if isinstance(value, str):
        return repr(printable(value)[:40])
    return f"that is not a text ({type(value).__name__})"
