"""Whether a process is alive, ready and needs a person: decided by its status, with the reasons in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from bridge.runtime.time import parse_iso

# How old IMDS's last good answer may be: one request that hangs, and then a good one, still fits.
IMDS_SECONDS = 30.0
BACKLOG_SECONDS = 300.0
_BROKEN_SINKS = {"misconfigured", "gone", "rejecting"}


def find_stalled(stalled: list[str]) -> list[str]:
    """Return why a process is not alive: a loop of it makes no progress.

    Args:
        stalled: the names of the threads that are overdue.
    """
    return [f"the loop {name} makes no progress" for name in stalled]


def find_unready(status: Mapping[str, Any], now: datetime) -> list[str]:
    """Return why a process cannot do its work now; an empty list if it can.

    Args:
        status: what the process writes to its status file.
        now: the wall clock.
    """
    return [*_imds_faults(status, now), *_bus_faults(status), *_storage_faults(status)]


def find_urgent(status: Mapping[str, Any], now: datetime, *, backlog_seconds: float) -> list[str]:
    """Return everything that needs a person.

    Args:
        status: what the process wrote to its status file.
        now: the wall clock.
        backlog_seconds: how long an event may wait for a sink.
    """
    left = [
        f"{count} event(s) wait for sink {name}, which is not configured; see `imds-bridge outbox move --help`"
        for name, count in status.get("left_sinks", {}).items()
    ]
    return [*find_unready(status, now), *_sink_faults(status, backlog_seconds), *left]


def bus_error(status: Mapping[str, Any]) -> str:
    """Return why the process receives nothing from the bus, "" if it receives or has no bus."""
    return (status.get("commands") or status.get("relay") or status.get("bus") or {}).get("last_error") or ""


def _imds_faults(status: Mapping[str, Any], now: datetime) -> Iterator[str]:
    if status["role"] != "forward":
        return
    last_good = parse_iso(status.get("last_good_at"))
    why = f": {status['last_error']}" if status.get("last_error") else ""
    if last_good is None:
        yield f"IMDS has given no valid answer yet{why}"
    elif (age_seconds := (now - last_good).total_seconds()) > IMDS_SECONDS:
        yield f"the last valid answer of IMDS is {age_seconds:.0f} s old{why}"


def _bus_faults(status: Mapping[str, Any]) -> Iterator[str]:
    if reason := bus_error(status):
        receiver = status.get("commands") or status.get("relay") or status["bus"]
        yield f"nothing is received from {receiver['from']}: {reason}"


def _storage_faults(status: Mapping[str, Any]) -> Iterator[str]:
    if status.get("storage_error"):
        yield f"the state cannot be written: {status['storage_error']}"


def _sink_faults(status: Mapping[str, Any], backlog_seconds: float) -> Iterator[str]:
    for name, sink in status["sinks"].items():
        if sink["state"] in _BROKEN_SINKS:
            yield f"sink {name} is {sink['state']}: {sink['last_error']}"
        if (sink["oldest_waits_seconds"] or 0) > backlog_seconds:
            waits = f"the oldest for {sink['oldest_waits_seconds']:.0f} s"
            yield f"sink {name} has {sink['backlog']} event(s) waiting, {waits}: {sink['last_error'] or 'no error'}"
        if sink.get("dead_letters"):
            yield (
                f"sink {name} has {sink['dead_letters']} dead letter(s); see "
                f"`imds-bridge outbox list --sink {name} --dead`"
            )
