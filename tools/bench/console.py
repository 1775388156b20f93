"""The console with 5,000 VMs: its store, its pages with few and with many events, its ingest, its memory."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path

import requests

from bridge.console import tables
from bridge.console.received import Received
from bridge.console.store import Store
from bridge.runtime.time import Clock
from tests.support.console import (
    BATCH,
    TOKEN,
    ConsoleProcess,
    FleetVm,
    ask,
    batch,
    behind_proxy,
    event,
    received,
    signed_in,
    web_of,
)
from tests.support.usage import memory_mib
from tools.bench.measure import Progress, Row

VMS = 5_000
OPEN = 500
EVENTS = 2_500_000  # of which a tenth are Scheduled Events
FEW = 200_000
BATCH_EVENTS = 100
BATCHES = 100
DAY = 86_400.0
RENDERS = 15
SENDERS = 4
LIVE_ROUNDS = 20
NOW = datetime.now(UTC)
# Rows that no page reads one by one, made of those that were stored: only their number matters.
_COPY_EVENTS = """
INSERT INTO event (key, sighting, kind, event_id, reason, vm, at, received_at, body)
SELECT randomblob(16), random(), kind, '', reason, vm, at, received_at, x'7b7d' FROM event LIMIT ?
"""
_COPY_SCHEDULED = f"""
INSERT INTO scheduled (key, names, {tables.COLUMNS}) SELECT hex(randomblob(16)), names, {tables.COLUMNS}
FROM scheduled WHERE NOT is_open LIMIT ?
"""  # noqa: S608 - constants
# The tables that the store writes, each with the column by which a batch's rows are found.
_WRITTEN: dict[str, tuple[str, Callable[[Received], object]]] = {
    "event": ("key", lambda one: one.key),
    "sighting": ("id", lambda one: one.sighting),
    "scheduled": ("key", lambda one: one.event_id),
    "vm": ("id", lambda one: one.vm and one.vm.id),
    "run": ("vm", lambda one: one.vm and one.vm.id),
}


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Measure the store against a bare insert, then the pages, then the process."""
    progress.begin(f"console: {BATCHES} batches, and the same as bare inserts")
    found = [_store_row(folder)]
    progress.begin(f"console: {VMS:,} VMs are prepared")
    store = Store(folder / "pages.db", clock=Clock())
    _fill(store)
    for size in (FEW, EVENTS):
        progress.begin(f"console: pages with {size:,} events")
        _grow(folder / "pages.db", size)
        found += [_page_row(name, size, median) for name, median in _render(store).items()]
    store.close()
    progress.begin("console: the process")
    return [*found, *_process_rows(folder / "process")]


def _vms() -> list[FleetVm]:
    return [FleetVm(f"vm-{number}", f"group-{number % 25}", str(number % 3 + 1)) for number in range(VMS)]


def _fleet_events() -> Iterator[bytes]:
    """Yield what a fleet publishes: of ten events three changes, three documents and four heartbeats."""
    turns = itertools.cycle(_vms())
    for number in itertools.count():
        vm, at = next(turns), NOW - timedelta(seconds=number % 80 * DAY / 10)
        one = event(f"past{number}", at=at, vms=[vm.name])
        yield vm.change("scheduled", one, at)
        yield vm.document(one, [], at)
        yield vm.change("started", one, at + timedelta(minutes=15), previous=one)
        yield vm.document(one, [], at + timedelta(minutes=15))
        yield vm.change("completed", one, at + timedelta(minutes=25), previous=one)
        yield vm.document(one, [], at + timedelta(minutes=25))
        yield from (next(turns).heartbeat(at) for _ in range(4))


def _store_row(folder: Path) -> Row:
    bodies = _fleet_events()
    batches = [received(*itertools.islice(bodies, BATCH_EVENTS), now=NOW) for _ in range(BATCHES)]
    ours, bare = [], []
    with (
        closing(Store(folder / "store.db", clock=Clock())) as store,
        closing(_bare(folder / "bare.db")) as database,
    ):
        for events in batches:
            began = time.perf_counter()
            store.add(events, received_at=NOW.timestamp())
            ours.append(time.perf_counter() - began)
            with closing(sqlite3.connect(folder / "store.db")) as reader:
                written = {table: _rows_of(reader, table, events) for table in _WRITTEN}
            began = time.perf_counter()
            database.execute("BEGIN IMMEDIATE")
            for table, found in written.items():
                marks = ",".join("?" * len(found[0])) if found else ""
                database.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", found)  # noqa: S608 - constants
            database.execute("COMMIT")
            bare.append(time.perf_counter() - began)
    return Row(
        "console store, rate / bare insert",
        statistics.median(bare) / statistics.median(ours),
        "x",
        f"medians of {BATCHES} commits of {BATCH_EVENTS} events in turn; bare: the same rows of all tables; "
        f"{BATCH_EVENTS / statistics.median(ours):,.0f} events a second",
        limit=0.5,
        at_least=True,
    )


def _rows_of(reader: sqlite3.Connection, table: str, events: Sequence[Received]) -> list[tuple[object, ...]]:
    """Return the rows of a table that a batch has written."""
    column, value = _WRITTEN[table]
    values = {value(one) for one in events} - {None, ""}
    marks = ",".join("?" * len(values))
    return reader.execute(f"SELECT * FROM {table} WHERE {column} IN ({marks})", [*values]).fetchall()  # noqa: S608 - constants


def _bare(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute(tables.SCHEDULED_TABLE)
    for name in ("schema.sql", "derived.sql", "indexes.sql"):
        database.executescript(files("bridge.console").joinpath(name).read_text("utf-8"))
    for (trigger,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        database.execute(f"DROP TRIGGER {trigger}")  # the rows have what it would derive
    return database


def _fill(store: Store) -> None:
    """Store every VM and many events, of which some are open."""
    vms = _vms()
    bodies = [vm.heartbeat(NOW) for vm in vms]
    for number, vm in enumerate(vms[:: VMS // OPEN]):
        bodies.append(
            vm.change("scheduled", event(f"open{number}", at=NOW, vms=[vm.name], minutes=number), NOW)
        )
    bodies += itertools.islice(_fleet_events(), 10_000)
    for start in range(0, len(bodies), 500):
        store.add(received(*bodies[start : start + 500], now=NOW), received_at=NOW.timestamp())


def _grow(path: Path, size: int) -> None:
    copy_events(path, size)
    _copy(path, _COPY_SCHEDULED, "scheduled", size // 10)


def copy_events(path: Path, size: int) -> None:
    """Fill the store up to a number of events."""
    _copy(path, _COPY_EVENTS, "event", size)


def _copy(path: Path, statement: str, table: str, wanted: int) -> None:
    with closing(sqlite3.connect(path)) as database:
        while (missing := wanted - database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) > 0:  # noqa: S608 - constants
            if not database.execute(statement, (missing,)).rowcount:
                break
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _render(store: Store) -> dict[str, float]:
    """Return the median milliseconds of each page."""
    paths = {"Now": "/", "Fleet": "/fleet", "History": "/history?days=90"}
    web = web_of(store, Clock())

    def measure(path: str) -> float:
        began = time.perf_counter()
        asyncio.run(ask(web, [path]))
        return 1000 * (time.perf_counter() - began)

    return {name: statistics.median(measure(path) for _ in range(RENDERS)) for name, path in paths.items()}


def _page_row(name: str, size: int, median: float) -> Row:
    return Row(
        f"console, page {name}, {size:,} events",
        median,
        "ms",
        f"median of {RENDERS}; {VMS:,} VMs, {OPEN} open events",
        limit=500 if name == "History" else 150,
    )


def _process_rows(folder: Path) -> list[Row]:
    bodies = [*itertools.islice(_fleet_events(), 15_000), *(vm.heartbeat(NOW) for vm in _vms())]
    batches = [batch(bodies[start : start + 50]) for start in range(0, len(bodies), 50)]
    with ConsoleProcess(folder, **behind_proxy()) as console:
        rate = 50 * _posts_per_second(console.url, batches)
        visible = [_visible_ms(console.url, number) for number in range(LIVE_ROUNDS)]
        assert console.process
        rss = memory_mib(pid=console.process.pid)
    return [
        Row(
            "console ingest over HTTP, batches of 50",
            rate,
            "/s",
            f"{len(bodies):,} events from {SENDERS} senders on this machine, answered after their commit",
            limit=2000,
            at_least=True,
        ),
        Row(
            "console, sent to visible",
            statistics.median(visible),
            "ms",
            f"median of {LIVE_ROUNDS}: an event is posted, an open stream is notified, the page is fetched again",
            limit=300,
        ),
        Row("console, RSS", rss, "MiB", "after these events, without Service Bus", limit=120),
    ]


def _posts_per_second(url: str, bodies: Sequence[bytes]) -> float:
    with ThreadPoolExecutor(SENDERS) as pool:
        began = time.perf_counter()
        sent = sum(pool.map(lambda one: _post(url, one), bodies))
        return sent / (time.perf_counter() - began)


def _post(url: str, body: bytes) -> bool:
    headers = {**BATCH, "Authorization": f"Bearer {TOKEN}"}
    return requests.post(f"{url}/ingest", body, headers=headers, timeout=30).ok


def _visible_ms(url: str, number: int) -> float:
    """Return the time from a post to a page that shows it, for an open page."""
    name = f"visible{number}-"
    with requests.get(f"{url}/live", headers=signed_in("ana"), stream=True, timeout=30) as stream:
        lines = (line for line in stream.iter_lines(chunk_size=1) if line.startswith(b"data"))
        next(lines)
        began = time.perf_counter()
        at = datetime.now(UTC)
        _post(url, batch([FleetVm(name).change("scheduled", event(name, at=at, vms=[name]), at)]))
        next(lines)
        assert name in requests.get(url, headers=signed_in("ana"), timeout=30).text
        return 1000 * (time.perf_counter() - began)
