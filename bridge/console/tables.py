"""Write events, and the rows that the pages read: they are the same in whatever order the events arrive."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bridge.console import merge, received, runs
from bridge.console.merge import Report, ScheduledEvent
from bridge.console.received import Received, ReportingVm
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration
from bridge.imds.document import fold_name
from bridge.runtime.json import Json
from bridge.runtime.time import parse_iso

MAX_CHANGES = 200  # of one EventId that are merged
MAX_LISTED = 1000  # ids of one document
PRUNED_EVENTS = 2000  # at a time
ABSORBED_EVENTS = 500  # at a time
WRITTEN_VMS = 1000  # at a time

COLUMNS = ", ".join(f'"{field.name}"' for field in fields(ScheduledEvent))
SCHEDULED_TABLE = f"""
CREATE TABLE scheduled (key TEXT PRIMARY KEY, names TEXT, heard DEFAULT 0, {COLUMNS})
WITHOUT ROWID"""
_NOTED = (received.HEARTBEAT, received.DOCUMENT)  # of these no row is kept
_PREPARATIONS = {merge.PREPARED: "prepared", merge.RECOVERED: "recovered"}
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
_ADD_VM = """
INSERT INTO vm (id, place, scope, tags, name, folded, natural, zone, location, resource_id, alive_at, received_at,
    clock, heard, expected)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    place = excluded.place, scope = excluded.scope, tags = excluded.tags, name = excluded.name, zone = excluded.zone,
    location = excluded.location, alive_at = excluded.alive_at, received_at = excluded.received_at,
    clock = excluded.clock, heard = excluded.heard
WHERE excluded.alive_at > alive_at
"""
_ADD_HEARTBEAT = """
UPDATE vm SET heartbeat_at = ?2, is_stopped = ?3, version = ?4, waiting = ?5 WHERE id = ?1 AND heartbeat_at <= ?2
"""
_ADD_IMDS = """
UPDATE vm SET imds_at = ?2, unreachable_since = ?3
WHERE id = ?1 AND (imds_at < ?2 OR (imds_at = ?2 AND ?3 IS NOT NULL))
"""
_ADD_PREPARATION = """
INSERT INTO preparation VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    at = max(at, excluded.at), state = iif((excluded.at, excluded.state) > (at, state), excluded.state, state),
    detail = iif((excluded.at, excluded.state) > (at, state), excluded.detail, detail),
    prepared_at = min(ifnull(prepared_at, excluded.prepared_at), ifnull(excluded.prepared_at, prepared_at))
"""
_ADD_WORK = """
INSERT INTO work VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at = excluded.at, since = excluded.since
WHERE excluded.at > at OR (excluded.at = at AND excluded.since IS NULL)
"""
_CHANGED = ", ".join(f'"{field.name}" = excluded."{field.name}"' for field in fields(ScheduledEvent))
_MARKS = ", ".join("?" * (len(fields(ScheduledEvent)) + 2))
_ADD_SCHEDULED = f"""
INSERT INTO scheduled (key, names, {COLUMNS}) VALUES ({_MARKS}) ON CONFLICT DO UPDATE SET
    names = excluded.names, {_CHANGED}
"""  # noqa: S608 - constants
_ADD_AFFECTED = """
INSERT INTO affected VALUES (?1, ?2, ?3, ?4, (SELECT over_at FROM deletion WHERE deletion.key = ?1))
"""
# What decides: the first report, the newest ones, those of starts and ends before changes, and the last receipt.
_REPORTS = f"""
SELECT * FROM (SELECT kind, at, body FROM event WHERE event_id = ?1 AND event_id <> ''
    AND kind LIKE 'scheduledevent.%' ORDER BY at, key LIMIT 1)
UNION ALL SELECT * FROM (SELECT kind, at, body FROM event WHERE event_id = ?1 AND event_id <> ''
    AND kind LIKE 'scheduledevent.%' ORDER BY kind = 'scheduledevent.updated', at DESC, key LIMIT ?2)
UNION ALL SELECT * FROM (SELECT kind, at, body FROM event WHERE event_id = ?1 AND event_id <> ''
    AND kind IN {merge.RECEIPTS} ORDER BY at DESC, key LIMIT 1)
"""  # noqa: S608 - constants
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
_OLD_VMS = """
SELECT id FROM vm WHERE expected <> 1 AND received_at < ?1 AND (
    (left_at = 9e99 AND alive_at < ?1 AND alive_at > 0) OR left_at < ?1) LIMIT ?2
"""
_OLD_EVENTS = "SELECT n, kind, at, body FROM event WHERE n > ? AND n <= ? ORDER BY n LIMIT ?"
_HEAR_OF = """
UPDATE scheduled SET heard = max(heard, ?2), last_change_at = ifnull((SELECT max(at) FROM event
    WHERE event_id = ?1 AND event_id <> '' AND kind NOT LIKE 'console.%'), last_change_at) WHERE key = ?1
"""
_PUT_AWAY = """
INSERT INTO away VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    number = excluded.number, covers = excluded.covers, seen = excluded.seen, at = excluded.at,
    until = excluded.until, person = excluded.person, why = excluded.why WHERE excluded.number >= number
"""
_LEAVE_OR_RETURN = "UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE id = ?"
_STEP_SECONDS = 0.001  # between the numbers of two commits, which grow whatever the clock does
_LEAVE = """
UPDATE vm SET left_at = (SELECT at FROM leaving WHERE leaving.id = vm.id) WHERE expected = 1 AND left_at < 9e99
"""
_ADD_META = "INSERT INTO meta VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = ?2"


@dataclass(frozen=True, kw_only=True)
class Added:
    """How many events were new, how many were known, and whether any row has changed."""

    new: int
    repeated: int
    is_change: bool


def add(connection: sqlite3.Connection, events: Sequence[Received], *, received_at: float | None) -> Added:
    """Write events and everything that is derived from them.

    Args:
        connection: in a transaction.
        events: in any order; any of them may be known.
        received_at: seconds since 1970; None for the own time of each.
    """
    changes, many = connection.total_changes, connection.executemany

    def arrived(event: Received) -> float:
        return event.at if received_at is None else received_at

    last_number = get_meta(connection, "number") or 0.0
    committed = None if received_at is None else max(received_at, last_number + _STEP_SECONDS)

    def number_of(event: Received) -> float:
        return event.at if committed is None else committed

    for event in events:
        if event.kind == received.EXPECTED:
            _expect(connection, event, number_of(event))
    events = [event for event in events if event.kind != received.EXPECTED]
    noted = [event for event in events if event.kind in _NOTED]
    kept = [event for event in events if event.kind not in _NOTED]
    known = _known(connection, kept)
    many(_ADD_EVENT, [_event_row(event, arrived(event)) for event in kept])
    _add_vms(connection, events, arrived, committed or 0.0)
    numbered = {id(event) for event in runs.note(connection, events)}
    new = [*{event.key: event for event in kept if event.key not in known}.values()]
    new += [event for event in noted if id(event) in numbered or event.reporter[2] is None]
    runs.note_starts(connection, [event for event in new if event.kind == received.HEARTBEAT])
    many(_ADD_SIGHTING, [*_sightings(kept), *_sightings(event for event in new if event.kind in _NOTED)])
    many(_ADD_HEARTBEAT, [*_heartbeats(new)])
    many(_ADD_IMDS, [*_imds_states(new)])
    many(_ADD_PREPARATION, [*_preparations(new)])
    types = {received.clip(one.data.get("EventType")) for one in new if one.kind == merge.PREPARED}
    many("INSERT OR IGNORE INTO program VALUES (?)", [(one,) for one in types])
    many(_ADD_WORK, [*_work(new)])
    changed = [event for event in kept if event.event_id and _order(event) < known.get(event.key, _LAST)]
    decoded = {event.body: event.data for event in kept}
    for key in {
        event.event_id for event in changed if event.kind in merge.CHANGES or event.kind in merge.RECEIPTS
    }:
        _write_scheduled(connection, key, decoded)
    fresh = {id(event) for event in new}
    for event in changed:
        is_news = id(event) in fresh and event.kind not in received.OF_PEOPLE
        connection.execute(_HEAR_OF, (event.event_id, committed or 0.0 if is_news else 0.0))
    acts = [one for one in new if one.kind in received.OF_PEOPLE]
    for act in sorted(acts, key=number_of):
        what = act.vm.id if act.vm else act.event_id
        covers = act.data.get("Covers") if committed else None
        connection.execute(_PUT_AWAY, _away_row(act, what, number_of(act), covers))
        connection.execute(_LEAVE_OR_RETURN, (what,))
    is_change = connection.total_changes > changes
    times = [*map(arrived, new)]
    for name, most in (("first_at", min), ("last_at", max)) if new else ():
        set_meta(connection, name, most(*times, get_meta(connection, name) or times[0]))
    if new:
        set_meta(connection, "number", max(last_number, *map(number_of, new)))
    return Added(new=len(new), repeated=len(events) - len(new), is_change=is_change)


def prune(connection: sqlite3.Connection, before: float) -> int:
    """Delete some of what was received before a time; return how many events and VMs, 0 once nothing is left.

    Args:
        connection: in a transaction.
        before: seconds since 1970.
    """
    found = connection.execute(_TOO_OLD, (before, PRUNED_EVENTS)).fetchall()
    connection.executemany("DELETE FROM event WHERE n = ?", [row[:1] for row in found])
    connection.executemany("DELETE FROM sighting WHERE id = ?", [row[1:2] for row in found])
    connection.executemany(_DELETE_SCHEDULED, {row[2:] for row in found})
    vms = connection.execute(_OLD_VMS, (before, PRUNED_EVENTS)).fetchall()
    connection.executemany("DELETE FROM vm WHERE id = ?", vms)
    connection.execute("DELETE FROM run WHERE missing > 0 AND at < ?", (before,))
    if vms:
        connection.execute("DELETE FROM tagged WHERE id NOT IN (SELECT tags FROM vm)")
    return len(found) + len(vms) + _absorb(connection)


def _absorb(connection: sqlite3.Connection) -> int:
    """Take what is needed out of some heartbeats and documents of the version before, and delete them.

    Returns:
        How many events were looked at, 0 once there are none.
    """
    until = get_meta(connection, "old_until")
    if until is None:
        return 0
    rows = connection.execute(
        _OLD_EVENTS, (get_meta(connection, "old_from") or 0, until, ABSORBED_EVENTS)
    ).fetchall()
    events = []
    for _, kind, at, body in rows:
        if kind in _NOTED:
            with contextlib.suppress(ValueError, LookupError, TypeError):  # a row that the disk has changed
                events.append(received.read_event(decode_event(body), body, now=at))
    runs.note_starts(connection, [event for event in events if event.kind == received.HEARTBEAT])
    connection.executemany(_ADD_SIGHTING, [*_sightings(events)])
    connection.executemany("DELETE FROM event WHERE n = ?", [row[:1] for row in rows if row[1] in _NOTED])
    if rows:
        set_meta(connection, "old_from", rows[-1][0])
    else:
        connection.execute("DELETE FROM meta WHERE name IN ('old_from', 'old_until')")
    return len(rows)


def get_meta(connection: sqlite3.Connection, name: str) -> Any:
    """Return a value that was noted, None if it was not."""
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return json.loads(row[0]) if row else None


def set_meta(connection: sqlite3.Connection, name: str, value: Json) -> None:
    """Note a value under a name."""
    connection.execute(_ADD_META, (name, json.dumps(value)))


def _away_row(act: Received, what: object, number: float, covers: Json) -> tuple[object, ...]:
    """Return what a person or a program has put away, or brought back."""
    until = parse_iso(act.data.get("Until"))
    ends_at = 0.0 if act.kind == received.RESTORED else until.timestamp() if until else math.inf
    why = act.data.get("Comment" if act.kind == received.FORGOTTEN else "Reason")
    texts = received.clip(act.data.get("By")), received.clip(why)
    limits = (one if isinstance(one, int | float) else number for one in (covers, act.data.get("Seen")))
    return what, number, *limits, act.at, ends_at, *texts


def _expect(connection: sqlite3.Connection, event: Received, number: float) -> None:
    """Replace the list of expected VMs by one that is newer.

    The next lists name nearly the same VMs: only those that join or leave cost anything.
    """
    if number < (get_meta(connection, "listed_number") or 0):
        return
    set_meta(connection, "number", max(number, get_meta(connection, "number") or 0.0))
    set_meta(connection, "listed_number", number)
    given = {received.vm_id(vm["Name"], vm["ResourceId"]): vm for vm in event.data["Vms"]}
    set_meta(connection, "listed_at", event.at)
    set_meta(connection, "listed", len(given))
    connection.execute("CREATE TEMP TABLE listed (id INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO listed VALUES (?)", ((one,) for one in given))
    connection.execute("UPDATE vm SET expected = -1 WHERE expected = 1 AND id NOT IN (SELECT id FROM listed)")
    connection.execute("DELETE FROM vm WHERE alive_at = 0 AND id IN (SELECT id FROM listed)")
    joined = connection.execute(
        "SELECT id FROM listed WHERE id NOT IN (SELECT id FROM vm WHERE expected = 1)"
    ).fetchall()
    connection.execute("DROP TABLE listed")
    for first in range(0, len(joined), WRITTEN_VMS):
        vms = [vm for (one,) in joined[first : first + WRITTEN_VMS] if (vm := received.read_vm(given[one]))]
        _write_vms(connection, [(vm, 0.0, math.inf, 0.0, 0.0, 1) for vm in vms])
    connection.executemany("UPDATE vm SET expected = 1 WHERE id = ?", joined)
    connection.execute(_LEAVE)


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
    merged = merge.merge(_reports(connection.execute(_REPORTS, (key, MAX_CHANGES)), decoded))
    connection.execute("DELETE FROM affected WHERE key = ?", (key,))
    if merged is None:
        return
    names = {fold_name(name): name for name in merged.resources}
    values = (getattr(merged, field.name) for field in fields(merged))
    row = (json.dumps(value) if isinstance(value, tuple) else value for value in values)
    connection.execute(_ADD_SCHEDULED, (key, json.dumps([*names], ensure_ascii=False), *row))
    affected = [
        (key, folded, name, received.place_of(merged.scope, folded)) for folded, name in names.items()
    ]
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
    place = event.key, event.sighting, event.kind, event.event_id, received.clip(event.data.get("Reason"))
    return *place, vm, event.at, received_at, event.body


def _is_of_forwarder(event: Received) -> bool:
    """Return whether the event shows that the VM's forwarder works; changes of events name no process."""
    return event.reporter[0].endswith("/forward") or event.kind.startswith("scheduledevent.")


def _add_vms(
    connection: sqlite3.Connection,
    events: Iterable[Received],
    arrived: Callable[[Received], float],
    committed: float,
) -> None:
    """Write what the newest event of each VM says about it."""
    newest: dict[int, tuple[ReportingVm, float, float, float, float]] = {}
    for event in events:
        if (vm := event.vm) and _is_of_forwarder(event) and event.at > newest.get(vm.id, (vm, -1.0))[1]:
            received_at = arrived(event)
            clock = event.at - event.late_by - received_at
            newest[vm.id] = vm, event.at, received_at, clock, committed
    rows = [(*row, 0) for row in newest.values()]
    _write_vms(connection, rows)


def _write_vms(
    connection: sqlite3.Connection, rows: Sequence[tuple[ReportingVm, float, float, float, float, int]]
) -> None:
    """Write VMs: when each was alive, when that was received, its clock, the commit, and whether it is expected."""
    scopes = {vm.scope: (vm.scope, vm.subscription, vm.group, vm.scale_set) for vm, *_ in rows}
    connection.executemany(
        "INSERT OR IGNORE INTO scope VALUES (?, ?, ?, ?, ?)",
        [(received.scope_id(one), *row) for one, row in scopes.items()],
    )
    tags = {vm.tags for vm, *_ in rows}
    connection.executemany(
        "INSERT OR IGNORE INTO tagged VALUES (?, ?)", [(received.hash_text(one), one) for one in tags]
    )
    connection.executemany(_ADD_VM, [_vm_row(vm, *more) for vm, *more in rows])


def _vm_row(vm: ReportingVm, *more: float) -> tuple[object, ...]:
    folded = fold_name(vm.name)
    ids = vm.id, received.place_of(vm.scope, folded), received.scope_id(vm.scope), received.hash_text(vm.tags)
    return *ids, vm.name, folded, received.natural(vm.name), vm.zone, vm.location, vm.resource_id, *more


def _sightings(events: Iterable[Received]) -> Iterator[tuple[int, int, float]]:
    for event in events:
        if event.vm is None:
            continue
        if event.kind.startswith("scheduledevent."):
            yield event.sighting, event.vm.id, event.at
        listed = event.data.get("CloudEventIds") if event.kind in _NOTED else None
        for one in listed[:MAX_LISTED] if isinstance(listed, list) else ():
            if isinstance(one, str):
                yield received.sighting_of(event.vm, one), event.vm.id, event.at


def _heartbeats(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        if event.kind == received.HEARTBEAT and event.vm and _is_of_forwarder(event):
            waiting = event.data.get("Backlog")
            counts = waiting.values() if isinstance(waiting, dict) else ()
            backlog = sum(count for count in counts if isinstance(count, int) and abs(count) < 2**31)
            stopped = event.data.get("Reason") == "Stopping"
            yield event.vm.id, event.at, stopped, received.clip(event.data.get("Version")), backlog


def _imds_states(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    """Yield since when IMDS can or cannot be reached: an outage counts from the last usable answer.

    A gap that was noticed at its end is published as an outage and its end at the same time, or nearly.
    """
    for event in events:
        if event.vm is None:
            continue
        if event.kind == "imds.unreachable":
            since = _since(event)
            yield event.vm.id, since, since
        elif event.kind in ("imds.recovered", received.DOCUMENT):
            yield event.vm.id, event.at, None


def _since(event: Received) -> float:
    """Return since when what an event says is so, by a clock that is corrected as its time is."""
    since = parse_iso(event.data.get("Since"))
    return min(event.at, since.timestamp() + event.late_by) if since else event.at


def _preparations(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    """Yield what the programs of VMs have done for an event."""
    for event in events:
        state = _PREPARATIONS.get(event.kind, "")
        if event.kind == merge.REJECTED and merge.is_by_rule(event.data):
            state = "failed"
        if state and event.vm and event.event_id:
            took = event.data.get("DurationSeconds")
            detail = received.clip(event.data.get("Detail") or event.data.get("Reason"))
            if state != "failed":
                detail = format_duration(min(took, 1e9)) if isinstance(took, int | float) else ""
            at = event.at if state == "prepared" else None
            yield event.event_id, fold_name(event.vm.name), event.at, state, detail, at


def _work(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        if event.vm and event.kind in (merge.OUT_OF_WORK, merge.RECOVERED):
            yield event.vm.id, event.at, _since(event) if event.kind == merge.OUT_OF_WORK else None
