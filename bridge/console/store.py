"""The console's database: events as received, and the rows that the pages read, in one transaction."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from bridge.console.merge import END_RANK, Report, ScheduledEvent, merge
from bridge.console.received import Received, clip, hash_text, receive
from bridge.errors import StateError
from bridge.events.envelope import decode_event
from bridge.outbox.sqlite import Damaged, is_damage, transaction
from bridge.runtime.instants import parse_iso

log = logging.getLogger(__name__)

VERSION = 1
MAX_REPORTS = 200  # of one EventId that are merged: the newest
MAX_LISTED = 1000  # ids of one document
SALVAGE_ROWS = 200
CHECKED_BYTES = 64 * 1024 * 1024  # a larger file takes too long to check at the start
_BUSY_SECONDS = 5.0
_CACHE_KIB = 8192
_LOG_PAGES = 4000
_CHANGE_KINDS = {"scheduled", "started", "updated", *END_RANK}

SCHEDULED_COLUMNS = ", ".join(
    ("event_id", "scope", "group_name", *(field.name for field in fields(ScheduledEvent)))
)
_ADD_EVENT = """
INSERT INTO event (key, id_hash, kind, event_id, reason, vm, at, received_at, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_ADD_SIGHTING = (
    "INSERT INTO sighting VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET at = min(at, excluded.at) "
    "WHERE excluded.at < at"
)
_ADD_REPORTER = """
INSERT INTO reporter VALUES (?, ?, ?, ?, ?, 1, ?) ON CONFLICT DO UPDATE SET
    first = min(first, excluded.first), last = max(last, excluded.last), received = received + 1,
    last_at = max(last_at, excluded.last_at)
"""
_ADD_VM = """
INSERT INTO vm (id, name, scope, group_name, zone, location, resource_id, first_seen_at, alive_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT DO UPDATE SET
    name = excluded.name, zone = excluded.zone, location = excluded.location,
    first_seen_at = min(first_seen_at, excluded.first_seen_at), alive_at = max(alive_at, excluded.alive_at)
"""
_ADD_HEARTBEAT = """
UPDATE vm SET heartbeat_at = ?2, is_stopped = ?3, version = ?4, backlog = ?5 WHERE id = ?1 AND heartbeat_at < ?2
"""
_ADD_IMDS = "UPDATE vm SET imds_at = ?2, unreachable_since = ?3 WHERE id = ?1 AND imds_at < ?2"


@dataclass(frozen=True, kw_only=True)
class Added:
    """What a commit did: how many events were new, and how many were known."""

    new: int
    repeated: int


class Store:
    """The database, for one thread that writes; `readers` gives connections that read beside it.

    It may be damaged or replaced at any time: then what can be read of it goes into a new one.
    """

    def __init__(self, path: Path) -> None:
        """Open the database, or make it.

        Raises:
            StateError: a newer version wrote it.
            OSError, sqlite3.Error: the disk does not allow it.
        """
        self.path = path
        self.generation = 0
        try:
            self._connection = _open(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._start_again(error)

    def add(self, events: Sequence[Received], *, received_at: float) -> Added:
        """Commit events and everything that is derived from them, or nothing.

        Raises:
            sqlite3.Error: the disk does not allow it, or the file is damaged.
        """
        unique = {event.key: event for event in events}
        with transaction(self._connection) as execute:
            known = self._known("key", list(unique))
            new = [event for key, event in unique.items() if key not in known]
            reported = [event for event in new if event.event_id]
            before = self._known("event_id", list({event.event_id for event in reported}))
            execute.executemany(_ADD_EVENT, [_event_row(event, received_at) for event in new])
            execute.executemany(_ADD_VM, [_vm_row(event) for event in _newest_of_each_vm(events)])
            execute.executemany(_ADD_SIGHTING, list(_sightings(events)))
            execute.executemany(_ADD_REPORTER, list(_reporters(new)))
            execute.executemany(_ADD_HEARTBEAT, list(_heartbeats(new)))
            execute.executemany(_ADD_IMDS, list(_imds_states(new)))
            self._merge(reported, before)
        return Added(new=len(new), repeated=len(events) - len(new))

    def prune(self, before: float) -> int:
        """Delete some of what was received before a time; return how many events.

        Raises:
            sqlite3.Error: the disk does not allow it.
        """
        with transaction(self._connection) as execute:
            rows = execute.execute(
                "SELECT n, id_hash, event_id FROM event WHERE received_at < ? ORDER BY received_at LIMIT 2000",
                (before,),
            ).fetchall()
            execute.executemany("DELETE FROM event WHERE n = ?", [row[:1] for row in rows])
            execute.executemany("DELETE FROM sighting WHERE id_hash = ?", [row[1:2] for row in rows])
            execute.executemany(
                "DELETE FROM scheduled WHERE event_id = ?1 AND last_change_at < ?2",
                {(row[2], before) for row in rows if row[2]},
            )
            execute.execute("DELETE FROM vm WHERE alive_at < ?", (before,))
            execute.execute("DELETE FROM reporter WHERE last_at < ?", (before,))
        return len(rows)

    def rebuild(self, error: Exception) -> None:
        """Move a damaged file aside and start a new one with every event that can still be read.

        Raises:
            OSError, sqlite3.Error: the disk does not allow it.
        """
        self.close()
        self._start_again(error)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _start_again(self, error: Exception) -> None:
        self.generation += 1
        stamp = datetime.now(UTC)
        aside = self.path.with_name(f"{self.path.name}.damaged-{stamp:%Y%m%dT%H%M%S%f}")
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").replace(f"{aside}{suffix}")
        self._connection = _open(self.path)
        recovered = 0
        for batch in _salvage(aside):
            for received_at, events in batch.items():
                recovered += self.add(events, received_at=received_at).new
        log.error("the store was damaged (%s); moved to %s; %d events recovered", error, aside, recovered)
        note = {"at": stamp.timestamp(), "recovered": recovered, "moved_to": aside.name}
        with transaction(self._connection) as execute:
            execute.execute("INSERT OR REPLACE INTO meta VALUES ('rebuilt', ?)", (json.dumps(note),))

    def _known(self, column: str, values: Sequence[Any]) -> set[Any]:
        """Return those of some keys or EventIds that events have."""
        known: set[Any] = set()
        for start in range(0, len(values), 500):
            some = values[start : start + 500]
            marks = ",".join("?" * len(some))
            rows = self._connection.execute(
                f"SELECT {column} FROM event WHERE {column} IN ({marks}) AND {column} <> ''",  # noqa: S608 - only marks
                some,
            )
            known.update(value for (value,) in rows)
        return known

    def _merge(self, new: Sequence[Received], before: set[str]) -> None:
        """Write the merged view of each event that got a report.

        Args:
            new: the reports that were added.
            before: the EventIds that had reports before.
        """
        by_event: dict[str, list[Received]] = {}
        for event in new:
            by_event.setdefault(event.event_id, []).append(event)
        rows = []
        for event_id, added in by_event.items():
            known = (
                self._stored(event_id) if event_id in before else [(one.kind, one.at, one) for one in added]
            )
            if merged := merge(reports(known)):
                vm = added[-1].vm
                place = (vm.scope, vm.group) if vm else ("", "")
                rows.append((event_id, *place, *_scheduled_row(merged)))
        marks = ",".join("?" * (SCHEDULED_COLUMNS.count(",") + 1))
        self._connection.executemany(
            f"INSERT OR REPLACE INTO scheduled ({SCHEDULED_COLUMNS}) VALUES ({marks})",  # noqa: S608 - constants
            rows,
        )

    def _stored(self, event_id: str) -> list[tuple[str, float, bytes]]:
        return self._connection.execute(
            "SELECT kind, at, body FROM event WHERE event_id = ? AND event_id <> '' ORDER BY at DESC LIMIT ?",
            (event_id, MAX_REPORTS),
        ).fetchall()


def reports(rows: Sequence[tuple[str, float, Any]]) -> Iterator[Report]:
    """Yield the reports that can be merged, from rows of kind, time and body, which need not be decoded again."""
    for kind, at, event in rows:
        name = kind.removeprefix("scheduledevent.")
        if name in _CHANGE_KINDS or name.startswith("approval."):
            data = event.data if isinstance(event, Received) else json.loads(event)["data"]
            yield Report(kind=name, at=at, data=data)


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that only reads.

    Raises:
        sqlite3.Error: the file cannot be opened.
    """
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA query_only = 1")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.row_factory = sqlite3.Row
    return connection


def _open(path: Path) -> sqlite3.Connection:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    connection = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    try:
        _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}")
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise StateError(f"{path} was written by a newer imds-bridge; install that version")
    if version == 0:
        connection.executescript(files("bridge.console").joinpath("schema.sql").read_text("utf-8"))
    if path.stat().st_size < CHECKED_BYTES:
        (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(found)
    connection.execute("SELECT count(*) FROM vm").fetchone()


def _salvage(path: Path) -> Iterator[dict[float, list[Received]]]:
    """Yield the events of a damaged file by the time of their arrival, and skip what cannot be read."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as damaged:
        last = damaged.execute("SELECT seq FROM sqlite_sequence WHERE name = 'event'").fetchone()[0]
        for start in range(0, min(int(last), 10**9) + 1, SALVAGE_ROWS):
            batch: dict[float, list[Received]] = {}
            with contextlib.suppress(sqlite3.Error):
                for received_at, body in damaged.execute(
                    "SELECT received_at, body FROM event WHERE n >= ? AND n < ?",
                    (start, start + SALVAGE_ROWS),
                ):
                    with contextlib.suppress(ValueError, TypeError):
                        event = receive(decode_event(body), body, now=received_at)
                        batch.setdefault(received_at, []).extend([event] if event else [])
            yield batch


def _event_row(event: Received, received_at: float) -> tuple[object, ...]:
    vm = event.vm.id if event.vm else None
    reason = clip(event.data.get("Reason"))
    place = (event.key, event.id_hash, event.kind, event.event_id, reason)
    return (*place, vm, event.at, received_at, event.body)


def _scheduled_row(event: ScheduledEvent) -> Iterator[object]:
    for field in fields(event):
        value = getattr(event, field.name)
        yield json.dumps(value) if isinstance(value, tuple) else value


def _newest_of_each_vm(events: Iterable[Received]) -> list[Received]:
    newest: dict[int, Received] = {}
    for event in events:
        if (
            event.vm
            and _is_of_forwarder(event)
            and (event.vm.id not in newest or event.at > newest[event.vm.id].at)
        ):
            newest[event.vm.id] = event
    return list(newest.values())


def _is_of_forwarder(event: Received) -> bool:
    """Return whether the event shows that the VM's forwarder works; changes of events name no process."""
    return event.reporter[0].endswith("/forward") or event.kind.startswith("scheduledevent.")


def _vm_row(event: Received) -> tuple[object, ...]:
    vm = event.vm
    assert vm is not None  # noqa: S101 - chosen by it
    return (vm.id, vm.name, vm.scope, vm.group, vm.zone, vm.location, vm.resource_id, event.at, event.at)


def _sightings(events: Iterable[Received]) -> Iterator[tuple[int, int, float]]:
    for event in events:
        if event.vm is None:
            continue
        if event.kind.startswith("scheduledevent."):
            yield event.id_hash, event.vm.id, event.at
        listed = event.data.get("CloudEventIds") if event.kind == "document.changed" else None
        for one in listed[:MAX_LISTED] if isinstance(listed, list) else ():
            if isinstance(one, str):
                yield hash_text(one), event.vm.id, event.at


def _reporters(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        name, epoch, number = event.reporter
        if event.vm and name and number is not None:
            yield name, epoch, event.vm.id, number, number, event.at


def _heartbeats(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        if event.kind == "bridge.heartbeat" and event.vm and _is_of_forwarder(event):
            waiting = event.data.get("Backlog")
            counts = waiting.values() if isinstance(waiting, dict) else ()
            backlog = sum(count for count in counts if isinstance(count, int) and abs(count) < 2**31)
            stopped = event.data.get("Reason") == "Stopping"
            yield event.vm.id, event.at, stopped, clip(event.data.get("Version")), backlog


def _imds_states(events: Iterable[Received]) -> Iterator[tuple[object, ...]]:
    for event in events:
        if event.vm is None:
            continue
        if event.kind == "imds.unreachable":
            since = parse_iso(event.data.get("Since"))
            yield event.vm.id, event.at, since.timestamp() if since else event.at
        elif event.kind in ("imds.recovered", "document.changed"):
            yield event.vm.id, event.at, None
