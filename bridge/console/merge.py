"""Merge what several VMs reported about one event into one view of it, in whatever order the reports arrived."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field, PlainSerializer

from bridge.console.received import clip, natural, read_vm
from bridge.contract.types import KNOWN_VALUES
from bridge.formats.text import instant_of
from bridge.imds.document import names
from bridge.runtime.json import Json

# Of several ends completed is believed before ended, and ended before canceled.
END_RANK = {"completed": 3, "ended": 2, "canceled": 1}
# After an end, a `scheduled` means that the event is there again, and another report if it is so much later.
REOPEN_SECONDS = 60.0
MAX_NAMES = 1000
# What reports of the same time are sorted by.
_ORDER = ("advised", "scheduled", "updated", "started", *reversed(END_RANK))
_STATUSES = {status.lower(): status for status in KNOWN_VALUES["EventStatus"]}
_INTERRUPTED = ("Restart", "Gap")  # reasons of an end that a VM did not watch

# Seconds since 1970; a time in the API.
Time = Annotated[float, PlainSerializer(lambda at: datetime.fromtimestamp(at, UTC), return_type=datetime)]
MaybeTime = Annotated[
    float | None,
    PlainSerializer(
        lambda at: None if at is None else datetime.fromtimestamp(at, UTC), return_type=datetime | None
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One change of an event, or a receipt for it: its kind without `scheduledevent.`, its time and its data."""

    kind: str
    at: float
    data: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """One event as all reports together show it: columns of the store, and properties of the API and the CSV."""

    event_id: Annotated[str, Field(description="As received first; ignore case when comparing.")]
    event_type: Annotated[str, Field(description="Freeze, Reboot, ..., or another; may be blank.")] = ""
    event_source: Annotated[str, Field(description="Platform, User or another; may be blank.")] = ""
    status: Annotated[
        str, Field(description="Scheduled, Started, Advisory, Completed, Ended, Canceled or another.")
    ] = ""
    is_open: Annotated[bool, Field(description="Whether no end is reported.")] = True
    scope: Annotated[
        str, Field(description="Of the VMs that share it; blank if they are not identified.")
    ] = ""
    subscription: str = ""
    group: Annotated[str, Field(description="The resource group, with the scale set.")] = ""
    scale_set: str = ""
    resources: Annotated[tuple[str, ...], Field(description="The affected VMs.")] = ()
    description: Annotated[str, Field(description="Microsoft's.")] = ""
    not_before: Annotated[MaybeTime, Field(description="The earliest start; null if it was never known.")] = (
        None
    )
    duration_seconds: Annotated[int | None, Field(description="-1 for unknown, null if not reported.")] = None
    notice_seconds: Annotated[
        float | None, Field(description="From the first report to the NotBefore that it named.")
    ] = None
    first_seen_at: Time = 0.0
    last_change_at: Time = 0.0
    started_at: Annotated[MaybeTime, Field(description="The first report of the start.")] = None
    ended_at: Annotated[MaybeTime, Field(description="The first report of the end that is believed.")] = None
    approval: Annotated[str, Field(description="The outcome of the last receipt; may be blank.")] = ""


CHANGES = tuple(f"scheduledevent.{kind}" for kind in _ORDER)
REJECTED, PREPARED = "approval.rejected", "approval.prepared"
RECOVERED, OUT_OF_WORK = "approval.recovered", "approval.outofwork"
RECEIPTS = ("approval.accepted", REJECTED, "approval.failed")


def is_by_rule(data: Mapping[str, Json]) -> bool:
    """Return whether a receipt is about a rule with a program, not about a command."""
    command = data.get("Command")
    by_rule = isinstance(command, dict) and str(command.get("Id", "")).startswith("auto:")
    return by_rule or data.get("Reason") == "not_prepared"


def merge(reports: Iterable[Report]) -> ScheduledEvent | None:
    """Merge all reports of one EventId, those of its last story; None if there is no change that is known here."""
    ordered = sorted(reports, key=lambda report: report.at)
    receipts = [report for report in ordered if report.kind in RECEIPTS]
    changes = [report for report in ordered if report.kind in _ORDER]
    changes.sort(key=lambda change: (change.at, _ORDER.index(change.kind)))
    if not changes:
        return None
    ended_at, changes = _last_story(changes)
    receipts = [receipt for receipt in receipts if receipt.at > ended_at]
    end = max((change for change in changes if change.kind in END_RANK), key=_credibility, default=None)
    started = next((change.at for change in changes if change.kind == "started"), None)
    first_notice = next((time for time in map(_not_before, changes) if time is not None), None)
    duration = _last(changes, "DurationInSeconds")
    vms = (read_vm(change.data.get("Vm")) for change in reversed(changes))
    vm = next((vm for vm in vms if vm and vm.scope), None)
    return ScheduledEvent(
        event_id=clip(_last(changes[:1], "EventId")),
        event_type=clip(_last(changes, "EventType")),
        event_source=clip(_last(changes, "EventSource")),
        status=end.kind.capitalize() if end else _status(changes),
        is_open=end is None,
        scope=vm.scope if vm else "",
        subscription=vm.subscription if vm else "",
        group=vm.group if vm else "",
        scale_set=vm.scale_set if vm else "",
        resources=_resources(changes),
        description=clip(_last(changes, "Description")),
        not_before=next((time for time in map(_not_before, reversed(changes)) if time is not None), None),
        duration_seconds=duration if isinstance(duration, int) and abs(duration) < 2**31 else None,
        notice_seconds=None if first_notice is None else first_notice - changes[0].at,
        first_seen_at=changes[0].at,
        last_change_at=max(report.at for report in (*changes, *receipts)),
        started_at=started,
        ended_at=end.at if end else None,
        approval=receipts[-1].kind.removeprefix("approval.") if receipts else "",
    )


def resources_of(data: Mapping[str, Json]) -> tuple[str, ...]:
    """Return the names of the VMs in an event's data, web-9 before web-10, without old api-versions' underscore."""
    found = (clip(name).removeprefix("_") for name in names(data.get("Resources"))[:MAX_NAMES])
    return tuple(sorted(found, key=natural))


def _last_story(changes: list[Report]) -> tuple[float, list[Report]]:
    """Return when the event ended before it came back last, and the changes since; all of them if it did not."""
    before, first, ended_at = -math.inf, 0, math.inf
    for place, change in enumerate(changes):
        if change.kind in END_RANK:
            ended_at = change.at
        elif change.at > ended_at + REOPEN_SECONDS * (change.kind != "scheduled"):
            before, first, ended_at = ended_at, place, math.inf
    return before, changes[first:]


def _credibility(end: Report) -> tuple[bool, int, float]:
    """Return what decides between ends that contradict each other: whoever watched without interruption is right."""
    was_interrupted = end.data.get("EndReason") in _INTERRUPTED or end.data.get("VmRebooted") is True
    return not was_interrupted, END_RANK[end.kind], -end.at


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
