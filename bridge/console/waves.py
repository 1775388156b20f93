"""Waves: many events of one type, source and group, one soon after the other, are one line of the page Now."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bridge.console import rows
from bridge.console.received import hash_text
from bridge.console.rows import MINUTE, EventRow, Filter, OpenRow
from bridge.formats.text import plural
from bridge.imds.document import fold_name
from bridge.runtime.text import sanitize

WAVE_SECONDS = 15 * MINUTE  # at most, between one start and the next


@dataclass(frozen=True)
class Wave:
    """Events of one type, source and group, the most urgent first; of only one, `row` is what the page shows."""

    events: tuple[OpenRow, ...]
    row: EventRow | None = None

    @property
    def key(self) -> str:
        """What an address names it by: an event that is one of the last to leave it."""
        return self.events[-1].key

    @property
    def first(self) -> OpenRow:
        """The most urgent event."""
        return self.events[0]

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """The VMs that the events name, each once."""
        named = (name for event in self.events for name in json.loads(event.resources))
        return tuple({fold_name(name): name for name in named}.values())

    @property
    def digest(self) -> str:
        """What identifies its events, so that no others are put away."""
        return str(hash_text(repr([(one.key, one.status, one.starts_at) for one in self.events])))

    @cached_property
    def starts(self) -> tuple[float, float]:
        """When the first and the last of several events starts."""
        known = [event.starts_at for event in self.events if event.starts_at is not None]
        return min(known), max(known)

    @cached_property
    def dues(self) -> Counter[str]:
        """How many of its events are in each state."""
        return Counter(event.due for event in self.events)

    def next_at(self, now: float) -> float | None:
        """When the next event starts; of those that are due and not overdue yet, the last one."""
        states = [event.state for event in self.events]
        due = [one.starts_at for one in states if one.starts_at and one.is_due]
        return min((at for at in due if at > now), default=max(due, default=None))

    @cached_property
    def prepared(self) -> tuple[int, int] | None:
        """How many VMs are prepared, and how many the events name that have programs; None without programs."""
        some = [event for event in self.events if event.prepared is not None]
        vms = sum(len(json.loads(event.resources)) for event in some)
        return (sum(event.prepared or 0 for event in some), vms) if some else None

    @cached_property
    def notice_seconds(self) -> float | None:
        """The shortest notice of its events."""
        return min(
            (one.notice_seconds for one in self.events if one.notice_seconds is not None), default=None
        )

    @cached_property
    def approvals(self) -> Counter[str]:
        """How many of its events have each outcome."""
        return Counter(event.approval for event in self.events if event.approval)

    @property
    def title(self) -> str:
        """Its events in words: `16 Reboots`, of whichever VMs."""
        return plural(len(self.events), sanitize(self.first.event_type, 40) or "Event")


def waves(events: Iterable[OpenRow]) -> list[Wave]:
    """Group events that are in the order of their urgency, and return the groups in that order.

    An event whose start is unknown is alone.
    """
    given, kinds = [*events], defaultdict(list)
    starts = [math.inf if event.starts_at is None else event.starts_at for event in given]
    for place, event in enumerate(given):
        kinds[event.kind].append(place)
    found: list[list[int]] = []
    for places in kinds.values():
        last = -math.inf
        for place in sorted(places, key=starts.__getitem__):
            if not starts[place] - last <= WAVE_SECONDS:  # of two unknown ones, it is not a number
                found.append([])
            found[-1].append(place)
            last = starts[place]
    return [Wave(tuple(given[place] for place in some)) for some in sorted(map(sorted, found))]


def with_rows(store: sqlite3.Connection, found: Sequence[Wave], wanted: Filter) -> list[Wave]:
    """Return waves with the row of each that is of one event."""
    alone = rows.events_of(store, [wave.key for wave in found if len(wave.events) == 1])
    of_keys = {row.key: row for row in rows.mine_first(store, alone, wanted)}
    return [replace(wave, row=of_keys.get(wave.key)) for wave in found]


def wave_of(found: Sequence[Wave], key: str) -> Wave | None:
    """Return the wave that has an event, None if none of several events has it."""
    some = (one for one in found if len(one.events) > 1 and any(event.key == key for event in one.events))
    return next(some, None)


def wave_after(found: Sequence[Wave], ended: EventRow | None) -> Wave | None:
    """Return the wave that an event has left, None if it still goes on or there is none."""
    if ended is None or ended.state.is_followed or ended.not_before is None:
        return None
    kind = ended.event_type, ended.event_source, ended.subscription, ended.group
    some = (one for one in found if len(one.events) > 1 and one.first.kind == kind)
    return next((one for one in some if _is_near(ended.not_before, *one.starts)), None)


def _is_near(start: float, first: float, last: float) -> bool:
    return first - WAVE_SECONDS <= start <= last + WAVE_SECONDS
