"""What `imds-bridge outbox` does: look at stored events and dead letters, beside a running process."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from bridge.database import Database
from bridge.errors import StateError, UsageError
from bridge.model import iso_utc
from bridge.state import StateFolder


@contextmanager
def _opened(folder: StateFolder) -> Iterator[Database]:
    if not folder.database.exists():
        raise UsageError(
            f"there is no outbox in {folder.path}: has `imds-bridge forward` run with this state_dir?"
        )
    try:
        database = Database(folder.database)
    except sqlite3.Error as error:
        raise StateError(f"{folder.database} cannot be opened: {error}") from error
    try:
        yield database
    except sqlite3.Error as error:
        raise StateError(f"{folder.database}: {error}") from error
    finally:
        database.close()


def newest(folder: StateFolder, limit: int) -> list[dict[str, Any]]:
    """Return the newest events, oldest of them first, without their bodies."""
    with _opened(folder) as database:
        rows = database.execute("newest-events", limit).fetchall()
    return [
        {"seq": seq, "id": event_id, "type": event_type, "stored_at": _time(stored_at), "bytes": len(body)}
        for seq, event_id, event_type, stored_at, body in reversed(rows)
    ]


def dead_letters(folder: StateFolder, sink: str | None = None) -> list[dict[str, Any]]:
    """Return the dead letters, of one sink or all, without their bodies."""
    names = ("number", "sink", "id", "type", "reason", "detail", "dead_at", "retry", "can_be_sent")
    with _opened(folder) as database:
        rows = [dict(zip(names, row, strict=True)) for row in database.execute("dead-letters")]
    for row in rows:
        row.update(
            dead_at=_time(row["dead_at"]), retry=bool(row["retry"]), can_be_sent=bool(row["can_be_sent"])
        )
    return [row for row in rows if sink in (None, row["sink"])]


def show(folder: StateFolder, which: str) -> dict[str, Any]:
    """Return a stored event, by its CloudEvents id or its seq, as the CloudEvent that is sent."""
    with _opened(folder) as database:
        row = database.execute("event", which, int(which) if which.isdigit() else -1).fetchone()
        if row is None and (letters := [d for d in database.execute("dead-letters") if d[2] == which]):
            row = database.execute("dead-letter", letters[-1][0]).fetchone()
    if row is None or row[-1] is None:
        raise UsageError(f"{which}: no such event is stored; `imds-bridge outbox list` shows which are")
    event: dict[str, Any] = json.loads(row[-1])
    return event


def mark(folder: StateFolder, action: str, numbers: list[int]) -> int:
    """Have dead letters sent again ("mark-retry") or forget them ("drop-dead-letter"); return how many."""
    with _opened(folder) as database, database.transaction():
        return sum(database.execute(action, number).rowcount for number in numbers)


def _time(seconds: float) -> str:
    return iso_utc(datetime.fromtimestamp(seconds, UTC))
