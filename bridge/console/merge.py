"""Merge what several VMs reported about one event into one view of it, in whatever order the reports arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.console.received import clip, read_vm
from bridge.contract.types import KNOWN_VALUES
from bridge.formats.text import instant_of
from bridge.imds.document import names
from bridge.runtime.json import Json

# Of several ends completed is believed before ended, and ended before canceled.
END_RANK = {"completed": 3, "ended": 2, "canceled": 1}
REOPEN_SECONDS = 60.0  # a later report than this after an end means that the event is there again
MAX_NAMES = 1000
# What reports of the same time are sorted by.
_ORDER = ("scheduled", "updated", "started", *reversed(END_RANK))
_STATUSES = {status.lower(): status for status in KNOWN_VALUES["EventStatus"]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One change of an event, or a receipt for it: its kind without `scheduledevent.`, its time and its data."""

    kind: str
    at: float
    data: Mapping[str, Json]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledEvent:
    """One event as all reports together show it; times are seconds since 1970.

    Attributes:
        scope: of the VMs that reported it, "" if they are not identified.
        group_name: what people call it.
        shown_id: the EventId as received first.
        event_type: Freeze, Reboot, ..., "" if unknown.
        event_source: Platform or User, "" if unknown.
        status: Scheduled, Started, Completed, Ended, Canceled, or another of Azure's.
        is_open: whether it has not ended.
        not_before: the earliest start, None if it was never known.
        duration_seconds: of the impact; -1 for unknown, None if not reported.
        description: Microsoft's.
        resources: the names of the affected VMs.
        first_seen_at: the first report of any VM.
        last_change_at: the last report of any VM.
        started_at: the first report of the start.
        ended_at: the first report of the end that is believed.
        notice_seconds: from the first report to the NotBefore that it named.
        approval: the outcome of the last receipt, "" without one.
    """

    shown_id: str
    scope: str = ""
    group_name: str = ""
    event_type: str = ""
    event_source: str = ""
    status: str = ""
    is_open: bool = True
    not_before: float | None = None
    duration_seconds: int | None = None
    description: str = ""
    resources: tuple[str, ...] = ()
    first_seen_at: float = 0.0
    last_change_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    notice_seconds: float | None = None
    approval: str = ""


def merge(reports: Iterable[Report]) -> ScheduledEvent | None:
    """Merge all reports of one EventId; None if there is no change that is known here."""
    ordered = sorted(reports, key=lambda report: report.at)
    receipts = [report for report in ordered if report.kind.startswith("approval.")]
    changes = [report for report in ordered if report.kind in _ORDER]
    changes.sort(key=lambda change: (change.at, _ORDER.index(change.kind)))
    if not changes:
        return None
    end = _end(changes)
    started = next((change.at for change in changes if change.kind == "started"), None)
    first_notice = next((time for time in map(_not_before, changes) if time is not None), None)
    duration = _last(changes, "DurationInSeconds")
    vms = (read_vm(change.data.get("Vm")) for change in reversed(changes))
    vm = next((vm for vm in vms if vm and vm.scope), None)
    return ScheduledEvent(
        scope=vm.scope if vm else "",
        group_name=vm.group if vm else "",
        shown_id=clip(_last(changes[:1], "EventId")),
        event_type=clip(_last(changes, "EventType")),
        event_source=clip(_last(changes, "EventSource")),
        status=end.kind.capitalize() if end else _status(changes),
        is_open=end is None,
        not_before=next((time for time in map(_not_before, reversed(changes)) if time is not None), None),
        duration_seconds=duration if isinstance(duration, int) and abs(duration) < 2**31 else None,
        description=clip(_last(changes, "Description")),
        resources=_resources(changes),
        first_seen_at=changes[0].at,
        last_change_at=max(report.at for report in (*changes, *receipts)),
        started_at=started,
        ended_at=end.at if end else None,
        notice_seconds=None if first_notice is None else first_notice - changes[0].at,
        approval=receipts[-1].kind.removeprefix("approval.") if receipts else "",
    )


def resources_of(data: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the names of the VMs in an event's data, without the underscore of old api-versions."""
    return tuple(clip(name[:64]).removeprefix("_") for name in names(data.get("Resources"))[:MAX_NAMES])


def _end(changes: Sequence[Report]) -> Report | None:
    """Return the end that is believed; None while the event is there, or once it is there again."""
    ends = [change for change in changes if change.kind in END_RANK]
    others = [change.at for change in changes if change.kind not in END_RANK]
    if not ends or (others and others[-1] > ends[-1].at + REOPEN_SECONDS):
        return None
    reopened = [at for at in others if any(end.at + REOPEN_SECONDS < at for end in ends)]
    current = [end for end in ends if not reopened or end.at > reopened[-1]]
    return max(current or ends[-1:], key=lambda end: (END_RANK[end.kind], -end.at))


def _status(changes: Sequence[Report]) -> str:
    """Return Started once any VM has seen it, unless a later report takes the start back."""
    status = ""
    for change in changes:
        reported = _status_of(change, "EventStatus")
        is_taken_back = _status_of(change, "PreviousStatus") == "Started"
        if reported and (status != "Started" or is_taken_back):
            status = reported
    return status


def _status_of(change: Report, name: str) -> str:
    given = clip(change.data.get(name))
    return _STATUSES.get(given.lower(), given)


def _last(changes: Sequence[Report], name: str) -> Any:
    """Return the newest value of a property that is not blank."""
    values = (change.data.get(name) for change in reversed(changes))
    return next((value for value in values if value not in (None, "")), None)


def _not_before(change: Report) -> float | None:
    instant = instant_of(change.data.get("NotBeforeUtc"))
    return instant.timestamp() if instant else None


def _resources(changes: Sequence[Report]) -> tuple[str, ...]:
    return next((found for change in reversed(changes) if (found := resources_of(change.data))), ())
