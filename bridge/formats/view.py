"""Read an event leniently, whoever made it: what can be made out is there in clean words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property

from bridge.formats.text import clean, cut, instant_of, length, listing
from bridge.imds.document import fold_name, names
from bridge.imds.instance import resource_group_of
from bridge.runtime.json import Json

NAME_LENGTH = 100
TITLE_LENGTH = 146  # with its symbol it is a Slack header of 150
_TITLE_NAMES = 3
_TELLER_LENGTH = 64
# Names beyond these stand in no message anyway.
_MOST_NAMES = 200
_TYPE = re.compile(r"io\.imdsbridge\.([a-z]+\.[a-z]+)\.v1")


class Reading:
    """What a CloudEvent says, as text that is safe to show as far as it came from outside.

    `get` and `is_true` read `data`; the rest is what several kinds of events have.
    """

    def __init__(self, event: Mapping[str, Json]) -> None:
        self._event = event
        data = event.get("data")
        self.data: Mapping[str, Json] = data if isinstance(data, Mapping) else {}

    def get(self, name: str) -> str:
        """Read a property of `data`."""
        return clean(self.data.get(name))

    @cached_property
    def type(self) -> str:
        """The CloudEvents type."""
        return clean(self._event.get("type")) or "unknown"

    @cached_property
    def kind(self) -> str:
        """The type's own part, for example `scheduledevent.started`; "" if it is none of this program's."""
        match = _TYPE.fullmatch(self.type)
        return match[1] if match else ""

    @cached_property
    def time(self) -> datetime | None:
        """When it was seen."""
        return instant_of(self._event.get("time"))

    @cached_property
    def event_id(self) -> str:
        """The EventId, "" if none is told."""
        return self.get("EventId")

    @cached_property
    def subject(self) -> str:
        """What the event is about, whatever that is."""
        return clean(self._event.get("subject"))

    @cached_property
    def event_type(self) -> str:
        """`EventType` as told."""
        return clean(self.data.get("EventType"), NAME_LENGTH)

    @cached_property
    def status(self) -> str:
        """`EventStatus` in lower case."""
        return self.get("EventStatus").lower()

    @cached_property
    def not_before(self) -> datetime | None:
        """When the event starts at the earliest."""
        return instant_of(self.data.get("NotBeforeUtc")) or instant_of(self.data.get("NotBefore"))

    def of_vm(self, name: str) -> str:
        """Read a property of the VM that tells."""
        vm = self.data.get("Vm")
        return clean(vm.get(name) if isinstance(vm, Mapping) else None)

    @cached_property
    def vm(self) -> str:
        """The VM that tells."""
        return self.of_vm("Name") or self.subject or "a VM"

    @property
    def teller(self) -> str:
        """The VM that tells, short enough for a title."""
        return cut(self.vm, _TELLER_LENGTH, sign="…")

    @cached_property
    def resource_group(self) -> str:
        """The resource group of the VM that tells."""
        return resource_group_of(self.of_vm("ResourceId"))

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """The VMs concerned, the telling one first; only the first hundreds (see `count`)."""
        told = names(self.data.get("Resources"))
        this = fold_name(self.vm)
        first = [name for name in told if fold_name(name[:NAME_LENGTH]) == this]
        rest = [name for name in told if fold_name(name[:NAME_LENGTH]) != this]
        return tuple(clean(name, NAME_LENGTH) or "(no name)" for name in (first + rest)[:_MOST_NAMES])

    @cached_property
    def count(self) -> int:
        """How many VMs are concerned."""
        return len(names(self.data.get("Resources")))

    def vms(self, room: int, most: int | None = None) -> str:
        """Name the VMs concerned, as many as fit into `room`."""
        return listing(self.resources, room=room, most=most, of=self.count)

    def title(self, before: str, after: str) -> str:
        """Write a line with the VMs concerned in its middle; they give way when it gets too long."""
        if not self.count:
            return cut(f"{before} (no VM is named){after}", TITLE_LENGTH)
        room = TITLE_LENGTH - length(f"{before} of {after}")
        return f"{before} of {self.vms(room, _TITLE_NAMES)}{after}"
