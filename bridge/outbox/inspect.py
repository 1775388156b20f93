"""What `imds-bridge outbox` does: look at stored events and dead letters, beside a running process."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any

from bridge.errors import StateError, UsageError
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.instants import iso_utc

_SEQ = re.compile(r"[0-9]{1,18}")


@contextmanager
def _opened(folder: StateFolder, *, read_only: bool = True) -> Iterator[Database]:
    try:
        if not folder.database.exists():
            raise UsageError(
                f"there is no outbox in {folder.path}: has `imds-bridge forward` run with this state_dir?"
            )
        with closing(Database(folder.database, read_only=read_only, migrate=False)) as database:
            yield database
    except PermissionError:
        raise StateError(f"{folder.database}: you may not read it; try as root or as its owner") from None
    except (OSError, sqlite3.Error) as error:
        raise StateError(f"{folder.database}: {error}") from error


def newest(folder: StateFolder, limit: int) -> list[dict[str, Any]]:
    """Return the newest events, oldest of them first, without their bodies."""
    with _opened(folder) as database:
        rows = database.execute("newest-events", limit).fetchall()
    return [
        {"seq": seq, "id": event_id, "type": event_type, "stored_at": _time(stored_at), "bytes": size}
        for seq, event_id, event_type, stored_at, size in reversed(rows)
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
    seq = int(which) if _SEQ.fullmatch(which) else -1
    with _opened(folder) as database:
        row = (
            database.execute("event-body", which, seq).fetchone()
            or database.execute("dead-letter-body", which).fetchone()
        )
    if row is None:
        raise UsageError(f"{which}: no such event is stored; `imds-bridge outbox list` shows which are")
    try:
        event: dict[str, Any] = json.loads(row[0])
    except ValueError as error:
        raise StateError(f"{folder.database}: the event is damaged: {error}") from error
    return event


def mark(folder: StateFolder, action: str, numbers: list[int]) -> int:
    """Have dead letters sent again ("mark-retry") or forget them ("drop-dead-letter"); return how many."""
    with _opened(folder, read_only=False) as database, database.transaction():
        return sum(database.execute(action, number).rowcount for number in numbers)


def _time(seconds: float) -> str:
    return iso_utc(datetime.fromtimestamp(seconds, UTC))
