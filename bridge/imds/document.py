"""What the program speaks of: documents and events of IMDS, their changes, and CloudEvents.

All values are frozen. IMDS is read leniently: whatever can be made out is used, the rest is kept as it came.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from bridge.runtime.instants import parse_instant
from bridge.runtime.json import BoundedDecoder, Json

SCHEDULED = "scheduled"
STARTED = "started"

# Within these, what was read can be compared and written back in any Python; consumers take no more either.
_MAX_DEPTH = 100
_MAX_DIGITS = 300
_EVENT_ID = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """One entry of a document's `Events`.

    `raw` is the entry as IMDS sent it; everything else is read from it.
    """

    raw: Mapping[str, Json]

    @cached_property
    def event_id(self) -> str:
        """The EventId as IMDS spelled it, which is how it must be posted back."""
        return str(self.raw["EventId"])

    @property
    def key(self) -> str:
        """The EventId for comparing: IMDS uses any letter case."""
        return self.event_id.lower()

    @property
    def status(self) -> str:
        """`EventStatus` in lower case: "scheduled", "started", or something that IMDS has come to say."""
        status = self.raw.get("EventStatus")
        return status.lower() if isinstance(status, str) else ""

    @cached_property
    def not_before(self) -> datetime | None:
        """When the event starts at the earliest, in UTC; None when blank or unreadable."""
        return parse_instant(self.raw.get("NotBefore"))

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """The names of the VMs that the event concerns, as received."""
        return names(self.raw.get("Resources"))

    @cached_property
    def content(self) -> Mapping[str, Json]:
        """What the event says, in a form in which different spellings of the same are equal."""
        said = {name: value for name, value in self.raw.items() if value is not None and value != ""}
        said["EventId"] = self.key
        if self.status:
            said["EventStatus"] = self.status
        if instant := self.not_before:
            said["NotBefore"] = instant.isoformat()
        if resources := self.resources:
            said["Resources"] = sorted(fold_name(name) for name in resources)
        return said


@dataclass(frozen=True, kw_only=True)
class Document:
    """One answer of IMDS.

    `incarnation` is None when IMDS sent none that is a number. `invalid_entries` holds the entries of `Events` that
    no event could be made of.
    """

    raw: Mapping[str, Json]
    incarnation: int | None
    events: Mapping[str, ScheduledEvent]
    invalid_entries: tuple[Json, ...] = ()


def parse_document(body: bytes) -> Document:
    """Read an answer of IMDS.

    A byte order mark, or bytes before the JSON object, are passed over: both have been seen.

    Raises:
        ValueError: it is no Scheduled Events document.
    """
    return read_document(_parse_object(body))


def read_document(raw: Mapping[str, Json]) -> Document:
    """Make a document of an answer that is parsed already.

    Raises:
        ValueError: it is no Scheduled Events document.
    """
    if "Events" not in raw:
        raise ValueError("a JSON object without `Events`")
    entries = raw["Events"] if raw["Events"] is not None else []
    if not isinstance(entries, list):
        raise ValueError("`Events` is no list")
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


def _parse_object(body: bytes) -> dict[str, Json]:
    text = body.decode(errors="replace")
    start = text.find("{")
    if start < 0:
        raise ValueError("an empty answer" if not text.strip() else "an answer that holds no JSON object")
    raw, _ = _decoder.raw_decode(text, start)
    return raw  # type: ignore[no-any-return]  # what starts with a brace is an object


def _float(text: str) -> float | str:
    """Keep what JSON cannot write back (1e999) as text."""
    value = float(text)
    return value if math.isfinite(value) else text


def _int(text: str) -> int | str:
    """Keep what Python may refuse to read or write as text."""
    return int(text) if len(text) <= _MAX_DIGITS else text


# NaN and Infinity, which are no JSON, become text.
_decoder = BoundedDecoder(max_depth=_MAX_DEPTH, parse_float=_float, parse_int=_int, parse_constant=str)


def _event(entry: Json) -> ScheduledEvent | None:
    if not isinstance(entry, dict):
        return None
    event_id = entry.get("EventId")
    if not isinstance(event_id, str) or not _EVENT_ID.fullmatch(event_id):
        return None
    return ScheduledEvent(raw=entry)


def _integer(value: Json) -> int | None:
    """Read an incarnation: a number, or one written as a string as in old versions."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def names(value: Json) -> tuple[str, ...]:
    """Read a list of names; a single string counts as one, anything else as none."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(name for name in value if isinstance(name, str)) if isinstance(value, list) else ()


def fold_name(name: str) -> str:
    """Bring a VM's name into the form that is compared: no case, no `_` before it as 2017-03-01 has."""
    return name.removeprefix("_").casefold()


def is_among(name: str, resources: Iterable[str]) -> bool:
    """Tell whether the VM called `name` is one of `resources`."""
    return fold_name(name) in map(fold_name, resources)
