"""What the outbox's tests share: a clock that they move, events, and the files as a kill would leave them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bridge.delivery.queue import Queue
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.outbox import inspect
from bridge.outbox.outbox import REJECTED
from bridge.outbox.rows import STATE
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.runtime.time import Clock
from tests.support.clock import MovedClock

if sys.platform != "win32":
    import resource

TYPE = "io.imdsbridge.scheduledevent.scheduled.v1"
OTHER_TYPE = "io.imdsbridge.document.changed.v1"
EVERYTHING = (Filter(), False)
IN_PLACE_BYTES = 48
ALL: Mapping[str, tuple[Filter, bool]] = {"a": EVERYTHING}
TWO: Mapping[str, tuple[Filter, bool]] = {"a": EVERYTHING, "b": EVERYTHING}


def event(name: str, *, type_: str = TYPE, size: int = 0, subject: str = "", **data: str) -> StoredEvent:
    """Make an event called `name`, about `subject` or itself, with a body of at least `size` bytes."""
    body = {
        "specversion": "1.0",
        "id": name,
        "type": type_,
        "subject": subject or name,
        "data": {**data, "Filling": "x" * size},
    }
    return StoredEvent(id=name, type=type_, body=json.dumps(body).encode())


def open_outbox(
    path: Path,
    *,
    sinks: Mapping[str, tuple[Filter, bool]] = ALL,
    clock: Clock | None = None,
    max_bytes: int = 2**30,
    retain_seconds: float = 3600.0,
    held: Mapping[str, Callable[[StoredEvent], float | None]] | None = None,
) -> KeptOutbox:
    """Open the outbox in the folder `path`."""
    return KeptOutbox(
        StateFolder(path),
        clock=clock or MovedClock(),
        sinks=sinks,
        max_bytes=max_bytes,
        retain_seconds=retain_seconds,
        held=held or {},
    )


def commit(outbox: KeptOutbox, *names: str, size: int = 0) -> bool:
    """Commit events of these names, one transaction each; return whether the file has the last."""
    durable = True
    for name in names:
        durable = outbox.commit([event(name, size=size)], records={(STATE, "watch"): name})
    return durable


def waiting(outbox: KeptOutbox, sink: str = "a", limit: int = 1000) -> list[str]:
    """Return the ids of what waits for a sink."""
    return [stored.id for stored in outbox.pending(sink, limit)]


def committed(outbox: KeptOutbox) -> list[bytes]:
    """Return the events that are stored, whether or not they wait for a sink."""
    return [row[4] for row in outbox.storage.database.rows("event")]


def deliver(outbox: KeptOutbox, sink: str = "a", *, limit: int = 1000) -> list[str]:
    """Let a sink have the next page, and acknowledge it; return the ids."""
    page = outbox.pending(sink, limit)
    outbox.acknowledge(sink, page)
    return [stored.id for stored in page]


def dead_letter(outbox: KeptOutbox, sink: str = "a", detail: str = "400") -> None:
    """Let the oldest event that waits for a sink become a dead letter."""
    outbox.acknowledge(sink, outbox.pending(sink, 1), dead=(REJECTED, detail))


def losses_of(outbox: KeptOutbox) -> list[tuple[str, int | None]]:
    """Return the reason and the count of each loss that is not published yet."""
    return [(loss.reason, loss.count) for loss in outbox.losses()]


def rows(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask the file in the folder `path` beside the process that holds it."""
    with closing(Database(path / "outbox.db", mode="read")) as database:
        return database._connection.execute(sql).fetchall()


def retry_dead_letters(outbox: KeptOutbox, path: Path, *numbers: int) -> None:
    """Have dead letters sent again as an operator does."""
    assert inspect.retry(StateFolder(path), list(numbers)) == len(numbers)
    outbox.recover()


def trace(outbox: KeptOutbox, callback: Callable[[str], object] | None) -> None:
    """Call back with every statement that SQLite runs."""
    outbox.storage.database._connection.set_trace_callback(callback)


def used_bytes(outbox: KeptOutbox) -> int:
    """Return how large the outbox is."""
    return outbox.storage.database.used_bytes()


def abandon(outbox: KeptOutbox) -> None:
    """Let go of the files without writing anything more."""
    outbox.storage.close()
    outbox.folder.release()


def kill(outbox: KeptOutbox, path: Path, image: Path) -> Path:
    """Leave in `image` what the folder `path` would hold after a kill -9 at this instant; return `image`."""
    shutil.copytree(path, image)
    abandon(outbox)
    return image


def older_state(path: Path, *names: str, had: int = 0, size: int = 0, image: Path | None = None) -> Path:
    """Leave a state with events of which sink `a` has had `had`; with `image`, as a kill would leave it there."""
    outbox = open_outbox(path)
    commit(outbox, *names, size=size)
    if had:
        deliver(outbox, limit=had)
    if image:
        return kill(outbox, path, image)
    outbox.close()
    return path


def drain(outbox: KeptOutbox, sink: str = "a") -> list[str]:
    """Let a sink have all that waits, one event at a time."""
    got: list[str] = []
    while page := deliver(outbox, sink, limit=1):
        got += page
    return got


def send(outbox: KeptOutbox, sink: str = "a") -> list[str]:
    """Let a sink have, one by one, what is its turn as long as nothing fails."""
    queue, got = Queue(sink, outbox.storage), []
    while heads := queue.ready(outbox.now(), 1).fresh:
        taken = queue.take(heads, 1, is_noted=False)
        outbox.acknowledge(sink, taken.events)
        got += [one.id for one in taken.events]
    return got


def check_recovered(path: Path, *expected: str) -> None:
    """Check that a restart finds these events waiting for sink `a`, and a disk that is well."""
    with closing(open_outbox(path)) as outbox:
        assert outbox.storage_error is None
        assert drain(outbox) == list(expected)


class FailingDisk:
    """Every write that makes a file longer fails while `is_failing`, by RLIMIT_FSIZE, which needs no root.

    As on a full disk, the few bytes of the number of the last event can be written in place.
    """

    def __init__(self) -> None:
        if sys.platform == "win32":
            pytest.skip("posix: Windows has no limits of a process")
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.is_failing = False

    def fail(self, in_place_bytes: int = IN_PLACE_BYTES) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (in_place_bytes, self._limits[1]))
        self.is_failing = True

    def recover(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        self.is_failing = False


@contextmanager
def failing_disk() -> Iterator[FailingDisk]:
    """Give a disk that can fail, and that is well in the end."""
    disk = FailingDisk()
    try:
        yield disk
    finally:
        disk.recover()
