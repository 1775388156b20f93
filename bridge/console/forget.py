"""Put VMs away that are silent or stopped, and events that nobody ends, until something new is heard of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

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
from bridge.console.rows import EventRow, Filter, VmRow, Where
from bridge.imds.document import fold_name
from bridge.runtime.json import Json
from bridge.runtime.text import sanitize


@dataclass(frozen=True, kw_only=True)
class PutAway:
    """What a program puts away: an event, VMs that are silent or stopped, or both."""

    EventId: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    ResourceIds: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    Reason: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


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
    reason = f"Forgotten by {by}" + (f": {why}" if why else "")
    of_vms = [{"Name": vm.name, "ResourceId": vm.resource_id} for vm in vms]
    given = {"Reason": reason, "By": by, "Comment": why}
    return [own_event(FORGOTTEN, {"Vm": vm, **given}, now=now) for vm in of_vms]


def dismissed(event: EventRow, *, by: str, now: float, why: str) -> Received:
    """Return the event that puts another away; arguments as of `forgotten`."""
    return own_event(DISMISSED, {"EventId": event.event_id, "By": by, "Reason": why}, now=now)


@dataclass(frozen=True, kw_only=True)
class Away:
    """What was put away at once and is still away: one event, the events of a wave, or VMs.

    Attributes:
        at: when.
        by: the person or program.
        why: the comment.
        events: that are open.
        vms: name and resource id.
    """

    at: float
    by: str
    why: str
    events: tuple[EventRow, ...] = ()
    vms: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """What a form names it by."""
        return str(hash_text(repr((self.at, self.by, self.why, bool(self.events)))))

    def coming(self, now: float) -> list[float]:
        """Return when those of its events start that are still to come."""
        return sorted(
            one.starts_at for one in self.events if one.starts_at is not None and one.starts_at > now
        )


_AWAY = {
    DISMISSED: """
        SELECT scheduled.key AS one, '' AS name, '' AS resource_id, event.at, body FROM event
        JOIN scheduled ON scheduled.key = event.event_id
        WHERE is_open AND dismissed_at >= scheduled.received_at""",
    FORGOTTEN: """
        SELECT vm.id AS one, name, resource_id, event.at, body FROM event JOIN vm ON vm.id = event.vm
        WHERE put_away_at > vm.received_at AND left_at = 0""",
}


def away(store: sqlite3.Connection) -> list[Away]:
    """Return what people and programs have put away and nothing has brought back, the newest first."""
    found: dict[tuple[str, float, str, str], list[sqlite3.Row]] = {}
    for kind, query in _AWAY.items():
        some = store.execute(f"{query} AND kind = ? AND {rows.INDEXED} ORDER BY event.at", (kind,))
        for row in {row["one"]: row for row in some}.values():
            data = rows.ReportRow(kind=kind, at=row["at"], vm="", body=row["body"]).data
            why = sanitize(data.get("Comment" if kind == FORGOTTEN else "Reason"))
            by = sanitize(data.get("By"), 200) or sanitize(data.get("Reason")).removeprefix("Forgotten by ")
            found.setdefault((kind, row["at"], by, why), []).append(row)
    keys = [row["one"] for (kind, *_), some in found.items() if kind == DISMISSED for row in some]
    events = {event.key: event for event in rows.events_of(store, keys)}
    done = [
        Away(at=at, by=by, why=why, events=tuple(events[row["one"]] for row in some))
        if kind == DISMISSED
        else Away(at=at, by=by, why=why, vms=tuple((row["name"], row["resource_id"]) for row in some))
        for (kind, at, by, why), some in found.items()
    ]
    return sorted(done, key=lambda one: -one.at)


def coming(found: Iterable[Away], now: float) -> Where:
    """Return the condition of the events among what was put away that are still to come."""
    keys = json.dumps([one.key for some in found for one in some.events if (one.starts_at or 0.0) > now])
    return Where("key IN (SELECT value FROM json_each(?))", (keys,))


def hidden(store: sqlite3.Connection, now: float) -> set[tuple[int, str]]:
    """Return scope and folded name of the VMs that events name which were put away and are still to come."""
    some = [one for each in away(store) for one in each.events if (one.starts_at or 0.0) > now]
    return {(scope_id(one.scope), fold_name(name)) for one in some for name in one.resources}


def restored(one: Away, *, by: str, now: float) -> list[Received]:
    """Return the events that bring back what was put away."""
    whats: list[dict[str, Json]] = [{"EventId": event.event_id} for event in one.events]
    whats += [{"Vm": {"Name": name, "ResourceId": resource_id}} for name, resource_id in one.vms]
    return [own_event(RESTORED, {**what, "By": by}, now=now) for what in whats]
