"""Put VMs away that are silent or stopped, and events that nobody ends, until something new is heard of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from bridge.console import rows
from bridge.console.received import (
    DISMISSED,
    FORGOTTEN,
    MAX_TEXT,
    RESTORED,
    Received,
    hash_text,
    own_event,
    scope_id,
)
from bridge.console.rows import HOUR, EventRow, Filter, VmRow, Where
from bridge.imds.document import fold_name
from bridge.runtime.json import Json
from bridge.runtime.text import sanitize
from bridge.runtime.time import iso_utc

MAX_HOURS = 7 * 24
HOURS = (1, 4, 24, MAX_HOURS)  # that forms offer


@dataclass(frozen=True, kw_only=True)
class PutAway:
    """What a program puts away: an event, VMs that are silent or stopped, or both; an event for how many hours."""

    EventId: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    ResourceIds: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    Reason: Annotated[str, Field(min_length=1, max_length=MAX_TEXT, pattern=r"\S")]
    Hours: Annotated[float | None, Field(gt=0, le=MAX_HOURS)] = None


ORDER = TypeAdapter(PutAway)


def forgettable(store: sqlite3.Connection, wanted: Filter) -> list[VmRow]:
    """Return the VMs of a filter that may be put away: others are watched, or leave the lists on their own."""
    return rows.vms(store, wanted.of_vms() & Where("watch IN ('silent', 'stopped')", ()))


def digest(vms: Sequence[VmRow]) -> str:
    """Return what identifies the VMs of a form, so that no others are put away."""
    return str(hash_text(repr([(vm.scope, vm.folded, vm.alive_at) for vm in vms])))


def forgotten(vms: Iterable[VmRow], *, by: str, now: float, why: str = "") -> list[Received]:
    """Return the events that put VMs away; they are kept in the store, and nobody else may send them.

    Args:
        vms: that have reported.
        by: the person or program.
        now: seconds since 1970.
        why: a comment.
    """
    given = {"Reason": f"Forgotten by {by}" + (f": {why}" if why else ""), "By": by, "Comment": why}
    return [
        own_event(FORGOTTEN, {"Vm": _vm(vm), **given, "Covers": vm.heard, "Seen": vm.alive_at}, now=now)
        for vm in vms
    ]


def dismissed(event: EventRow, *, by: str, now: float, why: str, hours: float | None = None) -> Received:
    """Return the event that puts another away; arguments as of `forgotten`, and for how many hours at most.

    Raises:
        ValueError: it is still to come, and hours are not given.
    """
    if event.state.is_coming(now) and not hours:
        raise ValueError("The event is still to come: say for how many hours it is put away.")
    until = iso_utc(datetime.fromtimestamp(now + hours * HOUR, UTC)) if hours else None
    given = {"EventId": event.event_id, "By": by, "Reason": why, "Until": until}
    return own_event(DISMISSED, {**given, "Covers": event.heard, "Seen": event.last_change_at}, now=now)


def _vm(vm: VmRow) -> dict[str, Json]:
    return {"Name": vm.name, "ResourceId": vm.resource_id}


@dataclass(frozen=True, kw_only=True)
class Away:
    """What was put away at once and is still away: one event, the events of a wave, or VMs.

    Attributes:
        at: when.
        until: when it comes back on its own; infinite if it does not.
        by: the person or program.
        why: the comment.
        events: that are open.
        vms: that have reported.
    """

    at: float
    until: float
    by: str
    why: str
    events: tuple[EventRow, ...] = ()
    vms: tuple[VmRow, ...] = ()

    @property
    def key(self) -> str:
        """What a form names it by: as soon as a part of it is back, it is another."""
        return str(
            hash_text(
                repr((self.at, self.by, [one.key for one in self.events], [one.key for one in self.vms]))
            )
        )

    def coming(self, now: float) -> list[EventRow]:
        """Return those of its events that are still to come, the next one first."""
        found = (one for one in self.events if one.state.is_coming(now))
        return sorted(found, key=lambda one: one.starts_at or 0)


def away(store: sqlite3.Connection) -> list[Away]:
    """Return what people and programs have put away and nothing has brought back, the newest first."""
    acts = store.execute(
        "SELECT what, away.at, until, person, why FROM moment, away LEFT JOIN vm ON vm.id = what "
        "WHERE until > moment.at AND iif(vm.id IS NULL, EXISTS (SELECT 1 FROM hidden JOIN scheduled USING (key) "
        "WHERE key = what AND is_open), left_at = 0) ORDER BY away.at DESC, what"
    ).fetchall()
    names = json.dumps([row["what"] for row in acts])
    of_name = "SELECT value FROM json_each(?)"
    events = {one.key: one for one in rows.events_of(store, [row["what"] for row in acts])}
    vms = store.execute(f"SELECT id, name, resource_id FROM vm WHERE id IN ({of_name})", (names,))  # noqa: S608 - constants
    known = {
        row["id"]: VmRow(name=row["name"], resource_id=row["resource_id"], key=str(row["id"])) for row in vms
    }
    found: dict[tuple[bool, float, float, str, str], list[Any]] = {}
    for what, at, until, by, why in acts:
        found.setdefault((what in known, at, until, by, why), []).append(what)
    return [
        Away(
            at=at,
            until=until,
            by=sanitize(by, 200) or "unknown",
            why=sanitize(why),
            events=tuple(events[one] for one in some if one in events),
            vms=tuple(known[one] for one in some if one in known),
        )
        for (_, at, until, by, why), some in found.items()
    ]


def coming(found: Iterable[Away], now: float) -> Where:
    """Return the condition of the events among what was put away that are still to come."""
    keys = json.dumps([event.key for one in found for event in one.coming(now)])
    return Where("key IN (SELECT value FROM json_each(?))", (keys,))


def hidden(store: sqlite3.Connection, now: float) -> set[tuple[int, str]]:
    """Return scope and folded name of the VMs that events name which were put away and are still to come."""
    some = [event for one in away(store) for event in one.coming(now)]
    return {(scope_id(one.scope), fold_name(name)) for one in some for name in one.resources}


def restored(one: Away, *, by: str, now: float) -> list[Received]:
    """Return the events that bring back what was put away."""
    whats: list[dict[str, Json]] = [{"EventId": event.event_id} for event in one.events]
    whats += [{"Vm": _vm(vm)} for vm in one.vms]
    return [own_event(RESTORED, {**what, "By": by}, now=now) for what in whats]
