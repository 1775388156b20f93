"""Write events, and the rows that the pages read: they are the same in whatever order the events arrive."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from bridge.console.merge import Report, ScheduledEvent, merge
from bridge.console.received import (
    EXPECTED,
    MAX_SEQUENCE,
    Received,
    ReportingVm,
    clip,
    natural,
    read_vm,
    sighting_of,
)
from bridge.imds.document import fold_name
from bridge.runtime.json import Json
from bridge.runtime.time import parse_iso

MAX_CHANGES = 200  # of one EventId that are merged: the newest
MAX_LISTED = 1000  # ids of one document
PRUNED_EVENTS = 2000  # at a time

COLUMNS = ", ".join(f'"{field.name}"' for field in fields(ScheduledEvent))
SCHEDULED_TABLE = f"CREATE TABLE scheduled (key TEXT PRIMARY KEY, names TEXT, {COLUMNS}) WITHOUT ROWID"
_LAST = (math.inf, b"")
# Of copies with the same source and id, the one of the VM that saw it first is kept.
_ADD_EVENT = """
INSERT INTO event (key, sighting, kind, event_id, reason, vm, at, received_at, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (key) DO UPDATE SET vm = excluded.vm, at = excluded.at, body = excluded.body
WHERE (excluded.at, excluded.body) < (at, body) AND (excluded.kind, excluded.event_id) = (kind, event_id)
"""
_ADD_SIGHTING = """
INSERT INTO sighting VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at = excluded.at WHERE excluded.at < at
"""
_ADD_REPORTER = """
INSERT INTO reporter VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    first = min(first, excluded.first), last = max(last, excluded.last), received = received + excluded.received,
    received_at = excluded.received_at, at = max(at, excluded.at)
"""
_ADD_VM = """
INSERT INTO vm (id, name, folded, natural, scope, subscription, "group", scale_set, zone, location, resource_id, tags,
    alive_at, received_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    name = excluded.name, scope = excluded.scope, "group" = excluded."group", scale_set = excluded.scale_set,
    zone = excluded.zone, location = excluded.location, tags = excluded.tags,
    alive_at = excluded.alive_at, received_at = excluded.received_at
WHERE excluded.alive_at > alive_at
"""
_ADD_HEARTBEAT = """
UPDATE vm SET heartbeat_at = ?2, is_stopped = ?3, version = ?4, waiting = ?5 WHERE id = ?1 AND heartbeat_at <= ?2
"""
_ADD_IMDS = """
UPDATE vm SET imds_at = ?2, unreachable_since = ?3
WHERE id = ?1 AND (imds_at < ?2 OR (imds_at = ?2 AND ?3 IS NOT NULL))
"""
_MARKS = ", ".join("?" * (len(fields(ScheduledEvent)) + 2))
_ADD_SCHEDULED = f"INSERT OR REPLACE INTO scheduled (key, names, {COLUMNS}) VALUES ({_MARKS})"  # noqa: S608 - constants
_ADD_AFFECTED = """
INSERT INTO affected SELECT ?1, ?2, ?3, ?4, is_open, (SELECT over_at FROM deletion WHERE deletion.key = ?1)
FROM scheduled WHERE key = ?1
"""
# The newest changes, and the last receipt.
_REPORTS = """
SELECT * FROM (SELECT kind, at, body FROM event WHERE event_id = ?1 AND event_id <> ''
    AND kind LIKE 'scheduledevent.%' ORDER BY at DESC, key LIMIT ?2)
UNION ALL SELECT * FROM (SELECT kind, at, body FROM event WHERE event_id = ?1 AND event_id <> ''
    AND kind IN ('approval.accepted', 'approval.rejected', 'approval.failed') ORDER BY at DESC, key LIMIT 1)
"""
# What was reported about an EventId stays as long as its last change, or what is still to come, is not too old.
_TOO_OLD = """
SELECT n, sighting, event_id FROM event WHERE received_at < ?1 AND NOT EXISTS (
    SELECT 1 FROM scheduled WHERE scheduled.key = event.event_id
    AND max(last_change_at, iif(is_open, ifnull(not_before, 0), 0)) >= ?1)
ORDER BY received_at LIMIT ?2
"""
_DELETE_SCHEDULED = """
DELETE FROM scheduled WHERE key = ?1 AND NOT EXISTS (
    SELECT 1 FROM event WHERE event.event_id = ?1 AND event.event_id <> '')
"""
_DELETE_AFFECTED = (
    "DELETE FROM affected WHERE key = ?1 AND NOT EXISTS (SELECT 1 FROM scheduled WHERE key = ?1)"
)


@dataclass(frozen=True, kw_only=True)
class Added:
    """How many events were new, how many were known, and whether any row has changed."""

    new: int
    repeated: int
    is_change: bool


def add(connection: sqlite3.Connection, events: Sequence[Received], *, received_at: float) -> Added:
    """Write events and everything that is derived from them.

    Args:
        connection: in a transaction.
        events: in any order; any of them may be known.
        received_at: seconds since 1970.
    """
    changes, many = connection.total_changes, connection.executemany
    for event in events:
        if event.kind == EXPECTED:
            connection.execute("DELETE FROM vm WHERE alive_at = 0")
            many(_ADD_VM, [_vm_row(vm, 0.0, math.inf) for vm in map(read_vm, event.data["Vms"]) if vm])
    events = [event for event in events if event.kind != EXPECTED]
    known = _known(connection, events)
    new = {event.key: event for event in events if event.key not in known}.values()
    many(_ADD_EVENT, [_event_row(event, received_at) for event in events])
    many(_ADD_VM, list(_vm_rows(events, received_at)))
    many(_ADD_SIGHTING, list(_sightings(events)))
    many(_ADD_REPORTER, list(_reporters(new, received_at)))
    many(_ADD_HEARTBEAT, list(_heartbeats(new)))
    many(_ADD_IMDS, list(_imds_states(new)))
    changed = {event.event_id for event in events if _order(event) < known.get(event.key, _LAST)} - {""}
    decoded = {event.body: event.data for event in events}
    for key in changed:
        _write_scheduled(connection, key, decoded)
    is_change = connection.total_changes > changes
    return Added(new=len(new), repeated=len(events) - len(new), is_change=is_change)


def prune(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of what was received before a time; return how many events.

    Args:
        connection: in a transaction.
        before: seconds since 1970.
    """
    rows = connection.execute(_TOO_OLD, (before, PRUNED_EVENTS)).fetchall()
    connection.executemany("DELETE FROM event WHERE n = ?", [row[:1] for row in rows])
    connection.executemany("DELETE FROM sighting WHERE id = ?", [row[1:2] for row in rows])
    for delete in (_DELETE_SCHEDULED, _DELETE_AFFECTED):
        connection.executemany(delete, {row[2:] for row in rows})
    connection.execute("DELETE FROM vm WHERE received_at < ?", (before,))
    connection.execute("DELETE FROM reporter WHERE received_at < ?", (before,))
    return len(rows)


def _order(event: Received) -> tuple[float, bytes]:
    """Return what decides which copy of an event is kept: the least."""
    return event.at, event.body


def _known(connection: sqlite3.Connection, events: Iterable[Received]) -> dict[bytes, tuple[float, bytes]]:
    """Return the kept copies of those events that are known, by their keys."""
    find = "SELECT at, body FROM event WHERE key = ?"
    return {event.key: row for event in events for row in connection.execute(find, (event.key,))}


def _write_scheduled(
    connection: sqlite3.Connection, key: str, decoded: Mapping[bytes, Mapping[str, Json]]
) -> None:
    """Merge what was reported about an EventId; `decoded` has the data of some bodies."""
    merged = merge(_reports(connection.execute(_REPORTS, (key, MAX_CHANGES)), decoded))
    connection.execute("DELETE FROM affected WHERE key = ?", (key,))
    if merged is None:
        return
    names = {fold_name(name): name for name in merged.resources}
    values = (getattr(merged, field.name) for field in fields(merged))
    row = (json.dumps(value) if isinstance(value, tuple) else value for value in values)
    connection.execute(_ADD_SCHEDULED, (key, json.dumps([*names], ensure_ascii=False), *row))
    affected = [(key, merged.scope, folded, name) for folded, name in names.items()]
    connection.executemany(_ADD_AFFECTED, affected)


def _reports(
    rows: Iterable[tuple[str, float, bytes]], decoded: Mapping[bytes, Mapping[str, Json]]
) -> Iterator[Report]:
    for kind, at, body in rows:
        with contextlib.suppress(ValueError, LookupError, TypeError):  # a row that the disk has changed
            data = decoded[body] if body in decoded else json.loads(body)["data"]
            yield Report(kind=kind.removeprefix("scheduledevent."), at=at, data=data)


def _event_row(event: Received, received_at: float) -> tuple[object, ...]:
    vm = event.vm.id if event.vm else None
    is_read = event.kind != "bridge.heartbeat" or _is_of_forwarder(event)
    reason = clip(event.data.get("Reason")) if is_read else ""
    place = (event.key, event.sighting, event.kind, event.event_id, reason)
    return (*place, vm, event.at, received_at, event.body)


def _is_of_forwarder(event: Received) -> bool:
    """Return whether the event shows that the VM's forwarder works; changes of events name no process."""
    return event.reporter[0].endswith("/forward") or event.kind.startswith("scheduledevent.")


def _vm_rows(events: Iterable[Received], received_at: float) -> Iterator[tuple[object, ...]]:
    for event in events:
        if (vm := event.vm) and _is_of_forwarder(event):
            yield _vm_row(vm, event.at, received_at)


def _vm_row(vm: ReportingVm, *alive_and_received_at: float) -> tuple[object, ...]:
    names = (vm.name, fold_name(vm.name), natural(vm.name))
    place = (vm.scope, vm.subscription, vm.group, vm.scale_set, vm.zone, vm.location)
    return vm.id, *names, *place, vm.resource_id, vm.tags, *alive_and_received_at


def _sightings(events: Iterable[Received]) -> Iterator[tuple[int, int, float]]:
    for event in events:
        if event.vm is None:
            continue
        if event.kind.startswith("scheduledevent."):
            yield event.sighting, event.vm.id, event.at
        lists = event.kind in ("document.changed", "bridge.heartbeat")
        listed = event.data.get("CloudEventIds") if lists else None
        for one in listed[:MAX_LISTED] if isinstance(listed, list) else ():
            if isinstance(one, str):
                yield sighting_of(event.vm, one), event.vm.id, event.at


def _reporters(events: Iterable[Received], received_at: float) -> Iterator[tuple[object, ...]]:
    """Yield each number, and the last one of the run before, which the first heartbeat of a run names.

    The time is when the run was last there: that of a run before is the start of the next one.
    """
    for event in events:
        name, epoch, number = event.reporter
        if not event.vm or not name or number is None:
            continue
        yield name, epoch, event.vm.id, number, number, 1, received_at, event.at
        before, last = event.data.get("PreviousEpoch"), event.data.get("PreviousLastReporterSeq")
        if isinstance(before, str) and isinstance(last, int) and 0 < last < MAX_SEQUENCE:
            yield name, clip(before), event.vm.id, last + 1, last, 0, received_at, event.at


def _heartbeats(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        if event.kind == "bridge.heartbeat" and event.vm and _is_of_forwarder(event):
            waiting = event.data.get("Backlog")
            counts = waiting.values() if isinstance(waiting, dict) else ()
            backlog = sum(count for count in counts if isinstance(count, int) and abs(count) < 2**31)
            stopped = event.data.get("Reason") == "Stopping"
            yield event.vm.id, event.at, stopped, clip(event.data.get("Version")), backlog


def _imds_states(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    """Yield since when IMDS can or cannot be reached: an outage counts from the last usable answer.

    A gap that was noticed at its end is published as an outage and its end at the same time, or nearly.
    """
    for event in events:
        if event.vm is None:
            continue
        if event.kind == "imds.unreachable":
            since = parse_iso(event.data.get("Since"))
            at = min(event.at, since.timestamp() + event.late_by) if since else event.at
            yield event.vm.id, at, at
        elif event.kind in ("imds.recovered", "document.changed"):
            yield event.vm.id, event.at, None
