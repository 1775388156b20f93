"""What a process that works writes to its status file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from bridge.contract.status import Status, from_json
from bridge.outbox.state_dir import STATUS, StateFolder
from bridge.runtime.time import iso_utc
from tests.support.paths import ROOT

OLDER = ROOT / "tests/data/status/0.1.0.dev896"  # what processes wrote before their status had a schema


def sink_status(**changes: Any) -> dict[str, Any]:
    """Return the status of a sink that works."""
    return {
        "state": "ok",
        "backlog": 0,
        "oldest_waits_seconds": None,
        "is_held": False,
        "notice_until": None,
        "failures": 0,
        "next_retry_at": None,
        "last_success_at": None,
        "last_error": None,
        "last_error_at": None,
        "dead_letters": 0,
        **changes,
    }


def bus_status(**changes: Any) -> dict[str, Any]:
    """Return the status of a bus that is received from."""
    return {
        "from": "sb://bus/q",
        "unsettled": 0,
        "rests": False,
        "looked_at": None,
        "last_error": None,
        **changes,
    }


def raw_status(now: datetime, role: str = "forward", **changes: Any) -> dict[str, Any]:
    """Return what a process that works writes, with one sink called "ops"."""
    on_vm = {
        "vm": "web-0",
        "imds": "http://169.254.169.254",
        "version_error": None,
        "clock_ahead_seconds": 0.4,
        "last_error": None,
        "last_good_at": iso_utc(now),
    }
    roles: dict[str, dict[str, Any]] = {
        "forward": {**on_vm, "failed_share": 0.0, "document": None, "missing": []},
        "listen": {
            **on_vm,
            "commands": bus_status(),
            "waiting_commands": 0,
            "dry_run": False,
            "out_of_work": [],
            "auto": [],
        },
        "console": {
            "url": "",
            "started_at": iso_utc(now),
            "received": 0,
            "repeated": 0,
            "last_event_at": None,
            "bus": None,
        },
        "relay": {"relay": bus_status(relayed=0, repeated=0, malformed=0, uncompleted=0, last_event_at=None)},
    }
    return {
        "version": "1.0.0",
        "role": role,
        "pid": 4711,
        "running": True,
        "written_at": iso_utc(now),
        "storage_error": None,
        "metrics": "",
        "metrics_error": None,
        "kept_log": None,
        "config": "/etc/imds-bridge/config.toml",
        "program_faults": [],
        "identity_error": None,
        "left_sinks": {},
        "sinks": {"ops": sink_status()},
        **roles[role],
        **changes,
    }


def process_status(now: datetime, role: str = "forward", **changes: Any) -> Status:
    """Return the same as it is read."""
    return from_json(raw_status(now, role, **changes), role)


def write_raw(folder: StateFolder, raw: Mapping[str, Any]) -> None:
    """Write a status as another version may."""
    folder.write_status(cast("Status", raw))


def read_raw(folder: StateFolder) -> Any:
    """Return what the file has."""
    return json.loads((folder.path / STATUS).read_bytes())
