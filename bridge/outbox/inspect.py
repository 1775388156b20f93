"""What `imds-bridge outbox` does: look at stored events and dead letters, beside a running process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, TypeVar

from bridge.config.names import nearest
from bridge.errors import StateError, UsageError
from bridge.outbox.sqlite import ERRORS, Database
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.instants import iso_utc

T = TypeVar("T")
_SEQ = re.compile(r"[0-9]{1,18}")


def _read(folder: StateFolder, query: Callable[[Database], T]) -> T:
    """Ask the file, also beside the process that holds it.

    Raises:
        UsageError: there is no file.
        StateError: it cannot be read.
    """
    path = folder.database
    try:
        if not path.exists():
            raise UsageError(
                f"there is no outbox in {folder.path}: has `imds-bridge forward` run with this state_dir?"
            )
        with closing(Database(path, read_only=True)) as database:
            return query(database)
    except PermissionError:
        raise StateError(f"{path}: you may not read it; try as root or as its owner") from None
    except (OSError, *ERRORS) as error:
        raise StateError(f"{path}: {error}") from error


def newest(folder: StateFolder, limit: int) -> list[dict[str, Any]]:
    """Return the newest events, oldest of them first, without their bodies."""
    rows = _read(folder, lambda database: database.execute("newest-events", limit).fetchall())
    return [
        {"seq": seq, "id": event_id, "type": event_type, "stored_at": _time(stored_at), "bytes": size}
        for seq, event_id, event_type, stored_at, size in reversed(rows)
    ]


def dead_letters(folder: StateFolder, sink: str | None = None) -> list[dict[str, Any]]:
    """Return the dead letters, of one sink or all, without their bodies."""
    names = ("number", "sink", "id", "type", "reason", "detail", "dead_at", "retry", "can_be_sent")
    rows = _read(folder, lambda database: database.execute("dead-letters").fetchall())
    requested = set(folder.requests())
    found = []
    for row in rows:
        dead = dict(zip(names, row, strict=True))
        dead["dead_at"] = _time(dead["dead_at"])
        dead["retry"] = bool(dead["retry"]) or ("mark-retry", dead["number"]) in requested
        dead["can_be_sent"] = bool(dead["can_be_sent"])
        if sink in (None, dead["sink"]) and ("drop-dead-letter", dead["number"]) not in requested:
            found.append(dead)
    return found


def check_sink(folder: StateFolder, sink: str) -> None:
    """Refuse the name of a sink that has never had an event.

    Raises:
        UsageError: with the names that there are.
    """
    stored = {name for (name,) in _read(folder, lambda database: database.execute("sinks").fetchall())}
    known = sorted(stored | set((folder.read_status() or {}).get("sinks", ())))
    if sink not in known:
        expected = ", ".join(known) or "none: no sink has had an event yet"
        raise UsageError(f"outbox: given --sink {sink}, expected {expected}{nearest(sink, known)}")


def show(folder: StateFolder, which: str) -> dict[str, Any]:
    """Return a stored event, by its CloudEvents id or its seq, as the CloudEvent that is sent."""
    seq = int(which) if _SEQ.fullmatch(which) else -1
    row = _read(
        folder,
        lambda database: (
            database.execute("event-body", which, seq).fetchone()
            or database.execute("dead-letter-body", which).fetchone()
        ),
    )
    if row is None:
        raise UsageError(f"{which}: no such event is stored; `imds-bridge outbox list` shows which are")
    try:
        event: dict[str, Any] = json.loads(row[0])
    except ValueError as error:
        raise StateError(f"{folder.database}: the event is damaged: {error}") from error
    return event


def mark(folder: StateFolder, action: str, numbers: list[int]) -> int:
    """Have dead letters sent again ("mark-retry") or forget them ("drop-dead-letter"); return how many.

    The process does so within a second or two, or when it starts.
    """
    found = [
        dead["number"]
        for dead in dead_letters(folder)
        if dead["number"] in numbers and (dead["can_be_sent"] or action != "mark-retry")
    ]
    for number in found:
        try:
            folder.request(action, number)
        except OSError as error:
            raise StateError(f"{folder.path}: {error.strerror or error}") from error
    return len(found)


def _time(seconds: float) -> str:
    return iso_utc(datetime.fromtimestamp(seconds, UTC))
