"""The console's pages of a large fleet whose VMs are replaced: most VMs of its store are gone for good."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from bridge.console.store import Store
from bridge.runtime.time import Clock
from tests.support.console import FleetVm, ask, event, received, web_of
from tools.bench.console import DAY, EVENTS, NOW, RENDERS, copy_events
from tools.bench.measure import Progress, Row

VMS = 10_000
REPLACED = VMS // 20  # a day
REBOOTS = 1_000  # a day
OPEN = 500
DAYS = 90
LIMIT_MS = 300
PATHS = {"Now": "/", "Fleet": "/fleet", "History": "/history?days=90"}
# What of the last day happened on each day before it, too: VMs that are gone, and events of these and of others.
_COPIED = {
    "vm": "name LIKE 'gone-%' AND name NOT LIKE '%d'",
    "run": "id IN (SELECT id FROM yesterdays)",
    "scheduled": "key IN (SELECT event_id FROM yesterday)",
    "affected": "key IN (SELECT event_id FROM yesterday)",
    "event": "n IN (SELECT n FROM yesterday)",
    "sighting": "id IN (SELECT sighting FROM yesterday)",
}
_YESTERDAY = """
CREATE TEMP TABLE yesterday AS SELECT n, event_id, sighting FROM event
WHERE event_id <> '' AND event_id NOT IN (SELECT key FROM scheduled WHERE status = 'Scheduled');
CREATE TEMP TABLE yesterdays AS SELECT run.id FROM run JOIN vm ON vm.id = run.vm WHERE name LIKE 'gone-%';
"""
_AGO = "|| '-' || :days || 'd'"
_TIMES = (
    "alive_at received_at heartbeat_at imds_at not_before first_seen_at last_change_at began_at started_at "
    "ended_at at"
)
_CHANGED = {
    **{name: f"{name} - :days * {DAY}" for name in (*_TIMES.split(), "over_at")},
    **{name: f"{name} {_AGO}" for name in ("resource_id", "event_id", "key")},
    **{name: f"iif({name} LIKE 'gone-%', {name} {_AGO}, {name})" for name in ("name", "folded", "natural")},
    **{
        name: f"iif({name} LIKE '%gone-%', replace({name}, '\"]', '' {_AGO} || '\"]'), {name})"
        for name in ("names", "resources")
    },
    "id": "id + :days",
    "place": "iif(folded LIKE 'gone-%', place + :days, place)",
    "sighting": "sighting + :days",
    "vm": "iif(vm IN (SELECT id FROM vm WHERE name LIKE 'gone-%'), vm + :days, vm)",
}


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Measure the pages that people open first."""
    progress.begin(f"console: {VMS:,} VMs, {REPLACED} of them replaced daily for {DAYS} days")
    with closing(Store(folder / "pages.db", clock=Clock())) as store:
        fill(store, folder / "pages.db")
        web = web_of(store, Clock())

        def measure(path: str) -> float:
            began = time.perf_counter()
            asyncio.run(ask(web, [path]))
            return 1000 * (time.perf_counter() - began)

        return [
            Row(
                f"console, page {name}, {VMS:,} VMs, 5 % replaced daily",
                statistics.median(measure(path) for _ in range(RENDERS)),
                "ms",
                f"median of {RENDERS}; {EVENTS:,} events in {DAYS} days, {REPLACED * DAYS:,} VMs gone, {OPEN} open",
                limit=LIMIT_MS,
            )
            for name, path in PATHS.items()
        ]


def fill(store: Store, path: Path) -> None:
    """Store the fleet, its last day, and the days before."""
    bodies = _last_day()
    while some := [*itertools.islice(bodies, 500)]:
        store.add(received(*some, now=NOW), received_at=NOW.timestamp())
    with closing(sqlite3.connect(path)) as database:
        database.executescript(_YESTERDAY)
        for table, condition in _COPIED.items():
            changed = _CHANGED | ({"key": "randomblob(16)"} if table == "event" else {})
            kept = [row[1] for row in database.execute(f"PRAGMA table_info({table})") if row[1] != "n"]
            names = ", ".join(f'"{name}"' for name in kept)
            values = ", ".join(changed.get(name, f'"{name}"') for name in kept)
            copy = f"INSERT INTO {table} ({names}) SELECT {values} FROM {table} WHERE {condition}"  # noqa: S608 - constants
            for days in range(1, DAYS):
                database.execute(copy, {"days": days})
        database.commit()
    copy_events(path, EVENTS)


def _last_day() -> Iterator[bytes]:
    vms = [
        FleetVm(
            f"vm-{number}", f"group-{number % 100}", str(number % 3 + 1), tags={"team": f"t{number % 40}"}
        )
        for number in range(VMS)
    ]
    for vm in vms:
        yield vm.heartbeat(NOW)
    for number, vm in enumerate(vms[:: VMS // OPEN]):
        yield vm.change("scheduled", event(f"open{number}", at=NOW, vms=[vm.name], minutes=number), NOW)
    for number, vm in enumerate(vms[:: VMS // REBOOTS]):
        at = NOW - timedelta(days=number / REBOOTS)
        one = event(f"past{number}", at=at, vms=[vm.name])
        yield vm.change("scheduled", one, at)
        yield vm.change("started", one, at + timedelta(minutes=15), previous=one)
        yield vm.change("completed", one, at + timedelta(minutes=25), previous=one)
    for number in range(REPLACED):
        at = NOW - timedelta(minutes=10, days=number / REPLACED)
        gone = FleetVm(f"gone-{number}", f"group-{number % 100}", str(number % 3 + 1))
        end = event(f"end{number}", at=at, vms=[gone.name], type="Terminate", minutes=5)
        last = event(f"end{number}", vms=[gone.name], type="Terminate", EventStatus="Started", NotBefore="")
        yield gone.heartbeat(at)
        yield gone.change("scheduled", end, at)
        yield gone.change("started", last, at + timedelta(minutes=5), previous=end)
