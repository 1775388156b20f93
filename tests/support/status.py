"""What a process that works writes to its status file, with what only metrics show."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from bridge.runtime.time import iso_utc


def sink_status(**changes: Any) -> dict[str, Any]:
    """Return the status of a sink that works."""
    return {
        "state": "ok",
        "backlog": 0,
        "oldest_waits_seconds": None,
        "notice_until": None,
        "next_retry_at": None,
        "dead_letters": 0,
        "last_error": None,
        **changes,
    }


def process_status(now: datetime, role: str = "forward", **changes: Any) -> dict[str, Any]:
    """Return the status of a process that works, with one sink called "ops"."""
    roles: dict[str, dict[str, Any]] = {
        "forward": {"vm": "web-0", "last_good_at": iso_utc(now), "last_error": None, "document": None},
        "listen": {
            "commands": {"from": "sb://bus/commands", "last_error": None},
            "last_good_at": None,
            "waiting_commands": 0,
            "out_of_work": [],
        },
        "relay": {"relay": {"from": "sb://bus/events", "last_error": None}},
    }
    return {
        "role": role,
        "storage_error": None,
        "storage_errors": 0,
        "identity_error": None,
        "outbox_bytes": 4096,
        "left_sinks": {},
        "sinks": {"ops": sink_status()},
        **roles[role],
        **changes,
    }
