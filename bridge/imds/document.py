"""The Scheduled Events document of IMDS, read leniently: what is readable is used, the rest is kept as received."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from bridge.runtime.json import BoundedDecoder, Json
from bridge.runtime.time import parse_instant

SCHEDULED = "scheduled"
STARTED = "started"

# Within these limits every Python can compare the values and write them back, and consumers can read them.
_MAX_DEPTH = 100
_MAX_DIGITS = 300
# IMDS sends GUIDs. Longer ids, and ids with blanks or control characters, cannot be sent as an attribute.
_EVENT_ID = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """One entry of a document's `Events`.

    `raw` is the entry as IMDS sent it; everything else is read from it. `event_id` is as received, which is how an
    approval has to spell it. `key` is the same in lower case, for comparing: the letter case differs between VMs.
    `status` is `EventStatus` in lower case: "scheduled", "started", or a value that Azure adds later. `not_before` is
    the earliest start in UTC, None if it is blank or unreadable. `resources` are the names of the affected VMs, as
    received. `content` are the properties in normal form: equal for different spellings of the same.
    """

    raw: Mapping[str, Json]
    event_id: str = field(init=False, compare=False)
    key: str = field(init=False, compare=False)
    status: str = field(init=False, compare=False)
    not_before: datetime | None = field(init=False, compare=False)
    resources: tuple[str, ...] = field(init=False, compare=False)
    content: Mapping[str, Json] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        raw = self.raw
        event_id, given = str(raw["EventId"]), raw.get("EventStatus")
        key, status = event_id.lower(), given.lower() if isinstance(given, str) else ""
        not_before, resources = parse_instant(raw.get("NotBefore")), names(raw.get("Resources"))
        content = {name: value for name, value in raw.items() if value is not None and value != ""}
        content["EventId"] = key
        if status:
            content["EventStatus"] = status
        if not_before:
            content["NotBefore"] = not_before.isoformat()
        if resources:
            content["Resources"] = sorted(map(fold_name, resources))
        # It is frozen, and cached properties would take a lock for each.
        vars(self).update(
            event_id=event_id,
            key=key,
            status=status,
            not_before=not_before,
            resources=resources,
            content=content,
        )


@dataclass(frozen=True, kw_only=True)
class Document:
    """One answer of IMDS.

    `incarnation` is None if IMDS sent none that is a number. `invalid_entries` are the entries of `Events` that could
    not be read as events.
    """

    raw: Mapping[str, Json]
    incarnation: int | None
    events: Mapping[str, ScheduledEvent]
    invalid_entries: tuple[Json, ...] = ()


def parse_document(body: bytes) -> Document:
    """Read an answer of IMDS.

    A byte order mark and other bytes before the JSON object are ignored: both occur in practice.

    Raises:
        ValueError: it is not a Scheduled Events document.
    """
    return read_document(_parse_object(body))


def read_document(raw: Mapping[str, Json]) -> Document:
    """Read a parsed answer of IMDS.

    Raises:
        ValueError: it is not a Scheduled Events document.
    """
    if "Events" not in raw:
        raise ValueError("a JSON object without `Events`")
    entries = raw["Events"] if raw["Events"] is not None else []
    if not isinstance(entries, list):
        raise ValueError("`Events` that is not a list")
    events: dict[str, ScheduledEvent] = {}
    invalid_entries: list[Json] = []
    for entry in entries:
        event = _event(entry)
        if event is None or event.key in events:
            invalid_entries.append(entry)
        else:
            events[event.key] = event
    return Document(
        raw=raw,
        incarnation=_integer(raw.get("DocumentIncarnation")),
        events=events,
        invalid_entries=tuple(invalid_entries),
    )


def names(value: Json) -> tuple[str, ...]:
    """Return the names in a list; a single string is one name, anything else none."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def fold_name(name: str) -> str:
    """Return a VM's name for comparing: without case, and without the `_` that 2017-03-01 puts before it."""
    return name.removeprefix("_").casefold()


def is_among(name: str, resources: Iterable[str]) -> bool:
    """Return whether the VM called `name` is one of `resources`."""
    return fold_name(name) in map(fold_name, resources)


def _parse_object(body: bytes) -> dict[str, Json]:
    """Return the JSON object that begins at the first brace."""
    text = body.decode(errors="replace")
    start = text.find("{")
    if start < 0:
        raise ValueError("an empty answer" if not text.strip() else "an answer without a JSON object")
    return _decoder.raw_decode(text, start)[0]  # type: ignore[no-any-return]  # what starts with a brace is an object


def _float(text: str) -> float | str:
    """Keep a number that JSON cannot write back (1e999) as text."""
    value = float(text)
    return value if math.isfinite(value) else text


def _int(text: str) -> int | str:
    """Keep a number that Python may refuse to read or write as text."""
    return int(text) if len(text) <= _MAX_DIGITS else text


# NaN and Infinity, which JSON does not have, become text.
_decoder = BoundedDecoder(max_depth=_MAX_DEPTH, parse_float=_float, parse_int=_int, parse_constant=str)


def _event(entry: Json) -> ScheduledEvent | None:
    if not isinstance(entry, dict):
        return None
    event_id = entry.get("EventId")
    if not isinstance(event_id, str) or not _EVENT_ID.fullmatch(event_id):
        return None
    return ScheduledEvent(raw=entry)


def _integer(value: Json) -> int | None:
    """Read an incarnation: a number, or a string with one, as in old versions."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
