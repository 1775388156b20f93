"""The Scheduled Events document of IMDS, read leniently: what is readable is used, the rest is kept as received."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from bridge.runtime.json import BoundedDecoder, Json
from bridge.runtime.time import parse_instant

SCHEDULED = "scheduled"
STARTED = "started"
ADVISORY = "advisory"  # an early warning, for which nothing can be approved

# Within these limits every Python can compare the values and write them back, and consumers can read them.
_MAX_DEPTH = 100
_MAX_DIGITS = 300
# IMDS sends GUIDs. Longer ids, and ids with blanks or control characters, cannot be sent as an attribute.
_EVENT_ID = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """One entry of a document's `Events`: `raw` is the entry as IMDS sent it, everything else is read from it."""

    raw: Mapping[str, Json]

    @cached_property
    def event_id(self) -> str:
        """The EventId as received, which is how an approval has to spell it."""
        return str(self.raw["EventId"])

    @cached_property
    def key(self) -> str:
        """The EventId in lower case, for comparing: the letter case differs between VMs."""
        return self.event_id.lower()

    @cached_property
    def status(self) -> str:
        """`EventStatus` in lower case: "scheduled", "started", "advisory", or a value that Azure adds later."""
        given = self.raw.get("EventStatus")
        return given.lower() if isinstance(given, str) else ""

    @cached_property
    def not_before(self) -> datetime | None:
        """The earliest start in UTC, None if it is blank or unreadable."""
        return parse_instant(self.raw.get("NotBefore"))

    @cached_property
    def duration_seconds(self) -> int | None:
        """How long the impact is expected to last, None if that is unknown (-1) or unreadable."""
        given = self.raw.get("DurationInSeconds")
        return given if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else None

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """The names of the affected VMs, as received."""
        return names(self.raw.get("Resources"))

    @cached_property
    def vms(self) -> tuple[str, ...]:
        """The affected VMs by their folded names, each once, in the order of `Resources`."""
        return tuple(dict.fromkeys(map(fold_name, self.resources)))

    @cached_property
    def names_all_vms(self) -> bool:
        """Whether `vms` are all that it affects: `Resources` has names, and nothing else."""
        given = self.raw.get("Resources")
        return 0 < len(self.resources) == len(given if isinstance(given, list) else [given])

    @cached_property
    def content(self) -> Mapping[str, Json]:
        """The properties in normal form: equal for different spellings of the same."""
        normal = {
            "EventId": self.key,
            "EventStatus": self.status,
            "NotBefore": self.not_before and self.not_before.isoformat(),
            "Resources": sorted(map(fold_name, self.resources)),
        }
        given = {name: value for name, value in self.raw.items() if value is not None and value != ""}
        return {**given, **{name: value for name, value in normal.items() if value}}


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
        is_event = isinstance(entry, dict) and is_event_id(entry.get("EventId"))
        if is_event and (event := ScheduledEvent(raw=entry)).key not in events:
            events[event.key] = event
        else:
            invalid_entries.append(entry)
    return Document(
        raw=raw,
        incarnation=_integer(raw.get("DocumentIncarnation")),
        events=events,
        invalid_entries=tuple(invalid_entries),
    )


def is_event_id(value: Json) -> bool:
    """Return whether a value is an EventId that can be sent as an attribute."""
    return isinstance(value, str) and _EVENT_ID.fullmatch(value) is not None


def names(value: Json) -> tuple[str, ...]:
    """Return the names in a list; a single string is one name, anything else, and an empty text, none."""
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(name for name in value if name and isinstance(name, str)) if isinstance(value, list) else ()


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


def _integer(value: Json) -> int | None:
    """Read an incarnation: a number, or a string with one, as in old versions."""
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,18}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
