"""What the pages read from the store."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, LifoQueue
from typing import Any, NamedTuple

from bridge.console.merge import ScheduledEvent
from bridge.console.store import Store, connect_reader
from bridge.console.tables import SCHEDULED_COLUMNS as _COLUMNS
from bridge.events.envelope import decode_event
from bridge.runtime.json import Json

DAY = 86_400.0
MAX_OPEN = 5000
UNRESOLVED_SECONDS = DAY  # an event that no VM has reported on for so long is no longer current
NOTICE_TOLERANCE_SECONDS = 5.0  # what polling takes of the notice
_MAX_CONNECTIONS = 8
_RECEIPTS = "'approval.accepted', 'approval.rejected', 'approval.failed'"
_INDEXED = "kind NOT IN ('bridge.heartbeat', 'document.changed')"  # the condition of the index by kind


class Where(NamedTuple):
    """A condition of constants and marks, and the values of the marks."""

    condition: str
    values: tuple[str, ...]


EVERY = Where("1", ())


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow(ScheduledEvent):
    """An event with its EventId in lower case."""

    event_id: str


class VmRow(NamedTuple):  # a fleet has thousands
    """A VM as its own events show it; see the table `vm`."""

    id: int
    name: str
    scope: str
    group_name: str
    zone: str
    location: str
    resource_id: str
    alive_at: float
    heartbeat_at: float
    is_stopped: bool
    version: str
    backlog: int
    unreachable_since: float | None
    gaps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportRow:
    """One CloudEvent about an EventId, with the VMs that saw it: name and time of each, the first one first."""

    kind: str
    at: float
    vm: str
    body: bytes
    seen_by: tuple[tuple[str, float], ...]

    @property
    def event(self) -> dict[str, Json]:
        """The CloudEvent, decoded; {} if the disk has changed it."""
        try:
            return decode_event(self.body)
        except ValueError:
            return {}

    @property
    def data(self) -> Mapping[str, Json]:
        """The event's data, {} if it is not an object."""
        data = self.event.get("data")
        return data if isinstance(data, dict) else {}


class Readers:
    """Connections that read the store, one for each thread that reads at the moment."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._idle: LifoQueue[tuple[int, sqlite3.Connection]] = LifoQueue(_MAX_CONNECTIONS)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection that sees one state of the store.

        Raises:
            sqlite3.Error: the store cannot be read.
        """
        generation, connection = self._take()
        try:
            connection.execute("BEGIN")
            yield connection
        except sqlite3.Error as error:
            self._store.report_damage(generation, error)
            raise
        finally:
            connection.rollback()
            self._give_back(generation, connection)

    def close(self) -> None:
        """Close the connections that nobody has."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait()[1].close()

    def _take(self) -> tuple[int, sqlite3.Connection]:
        with suppress(Empty):
            while True:
                generation, connection = self._idle.get_nowait()
                if generation == self._store.generation:
                    return generation, connection
                connection.close()
        generation = self._store.generation  # first: a file that is replaced meanwhile is of the next one
        return generation, connect_reader(self._store.path)

    def _give_back(self, generation: int, connection: sqlite3.Connection) -> None:
        if self._idle.full() or generation != self._store.generation:
            connection.close()
        else:
            self._idle.put_nowait((generation, connection))


def open_events(connection: sqlite3.Connection, now: float) -> list[EventRow]:
    """Return the events that have not ended, without those that no VM has reported on for long."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM scheduled WHERE is_open AND "  # noqa: S608 - constants
        "max(last_change_at, ifnull(not_before, 0)) > ? ORDER BY ifnull(not_before, started_at) LIMIT ?",
        (now - UNRESOLVED_SECONDS, MAX_OPEN),
    )
    return [_event_row(row) for row in rows]


def ended_events(connection: sqlite3.Connection, since: float, *, limit: int) -> list[EventRow]:
    """Return the events that ended after a time, the last one first."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM scheduled WHERE ended_at > ? ORDER BY ended_at DESC LIMIT ?",  # noqa: S608 - constants
        (since, limit),
    )
    return [_event_row(row) for row in rows]


def events_since(
    connection: sqlite3.Connection, since: float, where: Where = EVERY, *, limit: int = -1
) -> Iterator[EventRow]:
    """Yield the events that were first seen after a time, the last one first; all of them without a limit."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM scheduled WHERE first_seen_at > ? AND {where.condition} "  # noqa: S608 - constants
        "ORDER BY first_seen_at DESC LIMIT ?",
        (since, *where.values, limit),
    )
    return map(_event_row, rows)


def find_event(connection: sqlite3.Connection, event_id: str) -> EventRow | None:
    """Return one event, None if it is not known."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM scheduled WHERE event_id = ?",  # noqa: S608 - constants
        (event_id.lower(),),
    ).fetchone()
    return _event_row(row) if row else None


def vms(connection: sqlite3.Connection) -> list[VmRow]:
    """Return every VM that has reported, in any order.

    A VM that was not identified for a while is left out once an identified one of its name has reported.
    """
    missing = dict(
        connection.execute(
            "SELECT vm, sum(last - first + 1 - received) FROM reporter "
            "WHERE last - first + 1 > received GROUP BY vm"
        ).fetchall()
    )
    cursor = connection.cursor()
    cursor.row_factory = None  # plain tuples: there are thousands
    found = [
        VmRow._make((*row, missing.get(row[0], 0)))
        for row in cursor.execute(
            "SELECT id, name, scope, group_name, zone, location, resource_id, alive_at, heartbeat_at, "
            "is_stopped, version, backlog, unreachable_since FROM vm"
        )
    ]
    alive_at: dict[str, float] = {}
    if any(not vm.resource_id for vm in found):
        for vm in found:
            name = vm.name.lower()
            alive_at[name] = max(alive_at.get(name, 0.0), vm.alive_at if vm.resource_id else 0.0)
    return [vm for vm in found if vm.resource_id or vm.alive_at > alive_at[vm.name.lower()]]


def reports_of(connection: sqlite3.Connection, event_id: str, *, limit: int = 500) -> list[ReportRow]:
    """Return the CloudEvents about an event in the order of their times, with the VMs that saw each."""
    rows = connection.execute(
        "SELECT event.kind, event.at, event.body, event.id_hash, vm.name FROM event "
        "LEFT JOIN vm ON vm.id = event.vm WHERE event.event_id = ? AND event.event_id <> '' "
        "ORDER BY event.at, event.n LIMIT ?",
        (event_id.lower(), limit),
    ).fetchall()
    return [
        ReportRow(
            kind=row["kind"],
            at=row["at"],
            vm=row["name"] or "",
            body=row["body"],
            seen_by=tuple(_seen_by(connection, row["id_hash"])),
        )
        for row in rows
    ]


def count_seen_by(connection: sqlite3.Connection, event_id: str) -> int:
    """Return how many VMs have seen an event."""
    row = connection.execute(
        "SELECT count(DISTINCT sighting.vm) FROM event JOIN sighting ON sighting.id_hash = event.id_hash "
        "WHERE event.event_id = ? AND event.event_id <> '' AND event.kind LIKE 'scheduledevent.%'",
        (event_id,),
    ).fetchone()
    return int(row[0])


def bodies_of_event(connection: sqlite3.Connection, event_id: str) -> list[bytes]:
    """Return every CloudEvent about an event as received, in the order of their times."""
    rows = connection.execute(
        "SELECT body FROM event WHERE event_id = ? AND event_id <> '' ORDER BY at, n", (event_id.lower(),)
    )
    return [bytes(body) for (body,) in rows]


def count_by_end(
    connection: sqlite3.Connection, since: float, where: Where = EVERY
) -> list[tuple[str, str, int]]:
    """Count the events that were first seen after a time, by type and end; an open one's end is Open."""
    rows = connection.execute(
        "SELECT event_type, iif(is_open, 'Open', status), count(*) FROM scheduled WHERE first_seen_at > ? "  # noqa: S608 - constants
        f"AND {where.condition} GROUP BY 1, 2",
        (since, *where.values),
    )
    return [tuple(row) for row in rows]


def count_by_day(
    connection: sqlite3.Connection, since: float, now: float, where: Where = EVERY
) -> list[tuple[int, str, int]]:
    """Count the events that were first seen after a time, by days before now and by type."""
    rows = connection.execute(
        "SELECT CAST((? - first_seen_at) / 86400 AS INTEGER), event_type, count(*) FROM scheduled "  # noqa: S608 - constants
        f"WHERE first_seen_at > ? AND {where.condition} GROUP BY 1, 2",
        (now, since, *where.values),
    )
    return [tuple(row) for row in rows]


def count_by_notice(
    connection: sqlite3.Connection, since: float, limits: Sequence[float], where: Where = EVERY
) -> list[tuple[str, int, int]]:
    """Count events by type and notice: the number of the first limit that is larger, or that of all limits."""
    steps = " ".join(
        f"WHEN notice_seconds + {NOTICE_TOLERANCE_SECONDS} < {limit:f} THEN {step}"
        for step, limit in enumerate(limits)
    )
    rows = connection.execute(
        f"SELECT event_type, CASE {steps} ELSE {len(limits)} END, count(*) FROM scheduled "  # noqa: S608 - numbers
        f"WHERE first_seen_at > ? AND notice_seconds IS NOT NULL AND {where.condition} GROUP BY 1, 2",
        (since, *where.values),
    )
    return [tuple(row) for row in rows]


def count_receipts(
    connection: sqlite3.Connection, since: float, where: Where = EVERY
) -> list[tuple[str, str, int]]:
    """Count the receipts after a time for some events, by kind and reason."""
    chosen = f"event_id IN (SELECT event_id FROM scheduled WHERE {where.condition})"  # noqa: S608 - constants
    rows = connection.execute(
        f"SELECT kind, reason, count(*) FROM event WHERE kind IN ({_RECEIPTS}) AND at > ? AND {_INDEXED} "  # noqa: S608 - constants
        f"AND {'1' if where == EVERY else chosen} GROUP BY 1, 2 ORDER BY 1, 3 DESC",
        (since, *where.values),
    )
    return [tuple(row) for row in rows]


def losses_since(
    connection: sqlite3.Connection, since: float, where: Where = EVERY, *, limit: int
) -> list[ReportRow]:
    """Return the newest events of some VMs that say that others were lost, or that IMDS was not watched."""
    rows = connection.execute(
        "SELECT kind, event.at, body, vm.name FROM event LEFT JOIN vm ON vm.id = event.vm "  # noqa: S608 - constants
        f"WHERE kind IN ('bridge.loss', 'imds.recovered') AND event.at > ? AND {_INDEXED} "
        f"AND {where.condition} ORDER BY event.at DESC LIMIT ?",
        (since, *where.values, limit),
    )
    return [
        ReportRow(kind=kind, at=at, vm=name or "", body=body, seen_by=()) for kind, at, body, name in rows
    ]


def rebuilt_note(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """Return when a damaged store was replaced and what was recovered; None if it never was."""
    row = connection.execute("SELECT value FROM meta WHERE name = 'rebuilt'").fetchone()
    return dict(json.loads(row[0])) if row else None


def first_received_at(connection: sqlite3.Connection) -> float | None:
    """Return when the oldest event that is kept was received."""
    row = connection.execute("SELECT received_at FROM event ORDER BY received_at LIMIT 1").fetchone()
    return float(row[0]) if row else None


def last_received_at(connection: sqlite3.Connection) -> float | None:
    """Return when the last event was received."""
    row = connection.execute("SELECT received_at FROM event ORDER BY n DESC LIMIT 1").fetchone()
    return float(row[0]) if row else None


def _seen_by(connection: sqlite3.Connection, id_hash: int) -> Iterator[tuple[str, float]]:
    rows = connection.execute(
        "SELECT ifnull(vm.name, ''), sighting.at FROM sighting LEFT JOIN vm ON vm.id = sighting.vm "
        "WHERE id_hash = ? ORDER BY sighting.at",
        (id_hash,),
    )
    return ((name, at) for name, at in rows)


def _event_row(row: sqlite3.Row) -> EventRow:
    values = dict(row)
    values["resources"] = tuple(json.loads(values["resources"]))
    values["is_open"] = bool(values["is_open"])
    return EventRow(**values)
