"""Read an event of any origin leniently, as of some instant; the texts are safe to show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo

from bridge.formats.text import format_relative, instant_of, join_names, length, sanitize, truncate
from bridge.imds.document import fold_name, names
from bridge.imds.instance import resource_group_of
from bridge.runtime.json import Json

NAME_LENGTH = 100
TITLE_LENGTH = 146  # with its symbol it is a Slack header of 150
_TITLE_NAMES = 3
_SHORT_VM_LENGTH = 64
_MAX_NAMES = 200  # more do not fit into any message
_EXACT_SECONDS = 120
_TYPE = re.compile(r"io\.imdsbridge\.([a-z]+\.[a-z]+)\.v1")

Part = str | datetime


@dataclass(frozen=True, kw_only=True)
class Field:
    """A labelled value.

    `text` is the whole value. `parts` are the same with instants kept as such, for receivers that show each reader's
    own time zone; in a value with an instant, the texts around it are never from outside. `is_code` marks a command
    to copy.
    """

    label: str
    text: str
    parts: tuple[Part, ...]
    is_code: bool = False

    @property
    def has_instant(self) -> bool:
        """Whether an instant is among the parts."""
        return any(isinstance(part, datetime) for part in self.parts)


def format_time(instant: datetime, now: datetime, zone: tzinfo = UTC) -> str:
    """Write the time of day with its zone, and the date unless it is today's."""
    local = instant.astimezone(zone)
    name = local.tzname() or ""
    date = "" if local.date() == now.astimezone(zone).date() else f"{local:%a %d %b} "
    is_near = abs((instant - now).total_seconds()) < _EXACT_SECONDS
    time = f"{local:%H:%M:%S}" if is_near else f"{local:%H:%M}"
    return f"{date}{time} {'UTC' if name[:1] in '+-' else ''}{name}"


class EventView:
    """What a CloudEvent says, as sanitized text; the attributes are what several types of events have.

    `kind` is the middle of the type, for example `scheduledevent.started`, "" for types of other programs. `status`
    is in lower case. `vm` reports the event; `short_vm` is short enough for a title. `resources` are the affected
    VMs, the reporting one first and at most some hundreds, of `count`. A text without a value is "".

    Args:
        event: of any type, known or not, with any data.
        now: the time of the attempt, from which "in 15 min" counts.
        zone: in which times are written; None is UTC.
    """

    def __init__(self, event: Mapping[str, Json], *, now: datetime, zone: tzinfo | None = None) -> None:
        self._now, self._zone = now, zone or UTC
        data = event.get("data")
        self.data: Mapping[str, Json] = data if isinstance(data, Mapping) else {}
        self.type = sanitize(event.get("type")) or "unknown"
        match = _TYPE.fullmatch(self.type)
        self.kind = match[1] if match else ""
        self.time = instant_of(event.get("time"))
        self.subject = sanitize(event.get("subject"))
        self.event_id = self.get("EventId")
        self.event_type = sanitize(self.data.get("EventType"), NAME_LENGTH)
        self.status = self.get("EventStatus").lower()
        self.not_before = instant_of(self.data.get("NotBeforeUtc")) or instant_of(self.data.get("NotBefore"))
        self.vm = self.of_vm("Name") or self.subject or "a VM"
        self.short_vm = truncate(self.vm, _SHORT_VM_LENGTH, mark="…")
        self.resource_group = resource_group_of(self.of_vm("ResourceId"))
        affected = names(self.data.get("Resources"))
        self.count = len(affected)
        this = fold_name(self.vm)
        first = sorted(affected, key=lambda name: fold_name(name[:NAME_LENGTH]) != this)[:_MAX_NAMES]
        self.resources = tuple(sanitize(name, NAME_LENGTH) or "(no name)" for name in first)

    def get(self, name: str) -> str:
        """Read a property of `data`."""
        return sanitize(self.data.get(name))

    def of_vm(self, name: str) -> str:
        """Read a property of the VM that reports the event."""
        vm = self.data.get("Vm")
        return sanitize(vm.get(name) if isinstance(vm, Mapping) else None)

    def vms(self, max_length: int, max_names: int | None = None) -> str:
        """Name the affected VMs, as many as fit."""
        return join_names(self.resources, max_length=max_length, max_names=max_names, total=self.count)

    def title(self, before: str, after: str) -> str:
        """Write a title with the affected VMs in its middle, as many as fit."""
        if not self.count:
            return truncate(f"{before} (no VM is named){after}", TITLE_LENGTH)
        max_length = TITLE_LENGTH - length(f"{before} of {after}")
        return f"{before} of {self.vms(max_length, _TITLE_NAMES)}{after}"

    def seconds_until(self, instant: datetime) -> float:
        """Return the seconds to an instant; negative once it is over."""
        return (instant - self._now).total_seconds()

    def relative(self, instant: datetime) -> str:
        """Write when that is: `in 15 min` or `3 min ago`."""
        return format_relative(self.seconds_until(instant))

    def clock(self, instant: datetime) -> str:
        """Write the time of day; see format_time."""
        return format_time(instant, self._now, self._zone)

    def field(self, label: str, *parts: Part, is_code: bool = False) -> Field:
        """Make a field of texts and instants."""
        text = "".join(self.clock(part) if isinstance(part, datetime) else part for part in parts)
        return Field(label=label, text=text, parts=parts, is_code=is_code)

    def fields(self, texts: Mapping[str, str]) -> Iterator[Field]:
        """Make a field of each text that is not blank."""
        return (self.field(label, text) for label, text in texts.items() if text)
