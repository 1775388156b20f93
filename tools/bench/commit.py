"""How long a commit takes: a notice, or a document and a receipt, for two sinks, against a bare synced insert."""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from bridge.events.model import CloudEvent, structured
from tools.bench import parts, sample
from tools.bench.measure import Progress, Row

COMMITS = 1_000
WARM_UP = 50


def rows(folder: Path, progress: Progress) -> list[Row]:
    """Commit events of both kinds and insert the same bodies, in turn."""
    kinds = {"a notice": sample.event, "an event without urgency": _heartbeat}
    return [
        _row(name, make, folder / str(number), progress) for number, (name, make) in enumerate(kinds.items())
    ]


def _heartbeat(number: int) -> CloudEvent:
    return sample.REPORTER.heartbeat(reason="Hourly", version=str(number), backlog={"a": 0, "b": 0})


def _row(name: str, make: Callable[[int], CloudEvent], folder: Path, progress: Progress) -> Row:
    progress.begin(f"commit: {COMMITS:,} of {name}")
    outbox = parts.open_outbox(folder, "a", "b")
    try:
        with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as bare:
            bare.execute("PRAGMA journal_mode = WAL")
            bare.execute("PRAGMA synchronous = FULL")
            bare.execute("CREATE TABLE event (seq INTEGER PRIMARY KEY, body BLOB)")
            own, other = zip(*_timed(lambda one: outbox.commit([one]), bare, make), strict=True)
    finally:
        outbox.close()
    ours, theirs = (1e6 * statistics.median(times[WARM_UP:]) for times in (own, other))
    how = f"{ours:,.0f} and {theirs:,.0f} us, medians of {COMMITS:,}, in turn"
    return Row(
        f"commit of {name} for two sinks, against a bare synced insert", ours / theirs, "x", how, limit=2.5
    )


def _timed(
    commit: Callable[[CloudEvent], object], bare: sqlite3.Connection, make: Callable[[int], CloudEvent]
) -> Iterator[tuple[float, float]]:
    for number in range(COMMITS + WARM_UP):
        event = make(number)
        body = structured(event)
        began_at = time.perf_counter()
        commit(event)
        between = time.perf_counter()
        bare.execute("INSERT INTO event (body) VALUES (?)", (body,))
        yield between - began_at, time.perf_counter() - between
