"""What the pages show, as JSON under `/api/v1`, with its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from bridge import __version__
from bridge.console import fleet
from bridge.console.filters import Filter
from bridge.console.history import ENDS, History
from bridge.console.queries import EventRow, ReportRow, VmRow
from bridge.events.envelope import decode_event
from bridge.runtime.json import Json

BASE = "/api/v1"
_REF = "#/components/schemas/{model}"


class Event(BaseModel):
    """One event, as all reports together show it."""

    event_id: Annotated[str, Field(description="As received first; ignore case when comparing.")]
    event_type: Annotated[str, Field(description="Freeze, Reboot, ..., or another; may be blank.")]
    event_source: Annotated[str, Field(description="Platform, User or another; may be blank.")]
    status: Annotated[str, Field(description="Scheduled, Started, Completed, Ended, Canceled or another.")]
    is_open: bool
    group: str
    resources: Annotated[list[str], Field(description="The affected VMs.")]
    description: str
    not_before: datetime | None
    duration_seconds: Annotated[int | None, Field(description="-1 for unknown, null if not reported.")]
    notice_seconds: float | None
    first_seen_at: datetime
    last_change_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    approval: Annotated[str, Field(description="The outcome of the last receipt; may be blank.")]


class EventList(BaseModel):
    """Open events."""

    events: list[Event]


class Sighting(BaseModel):
    """When a VM saw a change."""

    vm: str
    at: datetime


class Report(BaseModel):
    """One CloudEvent about an event, and the VMs that saw it."""

    at: datetime
    seen_by: list[Sighting]
    cloudevent: dict[str, Any]


class EventDetails(BaseModel):
    """An event with its story."""

    event: Event
    reports: list[Report]


class Vm(BaseModel):
    """A VM, or one that an event names and that has never reported."""

    name: str
    group: str
    zone: str
    location: str
    state: Annotated[str, Field(description=f"One of {', '.join(fleet.STATES)}.")]
    note: Annotated[str, Field(description="The state in words.")]
    event_id: str | None
    version: str
    last_report_at: datetime | None
    waiting_events: int
    missing_events: int


class VmList(BaseModel):
    """VMs."""

    vms: list[Vm]


class Ends(BaseModel):
    """How the events of one type ended."""

    event_type: str
    counts: Annotated[dict[str, int], Field(description=f"By {', '.join(ENDS)}.")]


class Receipts(BaseModel):
    """How many receipts had an outcome and a reason."""

    outcome: str
    reason: str
    count: int


class Figures(BaseModel):
    """The figures of a period."""

    days: int
    ends: list[Ends]
    receipts: list[Receipts]


class Error(BaseModel):
    """Why a request has no answer."""

    error: str


def event_list(events: Iterable[EventRow]) -> EventList:
    """Write open events."""
    return EventList(events=[_event(row) for row in events])


def event_details(row: EventRow, reports: Sequence[ReportRow]) -> EventDetails:
    """Write an event and its reports."""
    found = [
        Report(
            at=_time(report.at),
            seen_by=[Sighting(vm=name, at=_time(at)) for name, at in report.seen_by],
            cloudevent=decode_event(report.body),
        )
        for report in reports
    ]
    return EventDetails(event=_event(row), reports=found)


def vm_list(groups: Iterable[fleet.Group]) -> VmList:
    """Write the fleet."""
    return VmList(vms=[_vm(group, cell) for group, cell in fleet.rows(groups)])


def figures(history: History) -> Figures:
    """Write the history."""
    return Figures(
        days=history.days,
        ends=[
            Ends(event_type=kind, counts=dict(zip(ENDS, counts, strict=True)))
            for kind, counts, _ in history.ends
        ],
        receipts=[
            Receipts(outcome=one, reason=reason, count=count) for one, reason, count in history.receipts
        ],
    )


def openapi() -> dict[str, Json]:
    """Return the OpenAPI document."""
    models: list[type[BaseModel]] = [EventList, EventDetails, VmList, Figures, Error]
    _, generated = models_json_schema([(model, "serialization") for model in models], ref_template=_REF)
    filters = [_parameter(name) for name in Filter.__dataclass_fields__]
    days = {**_parameter("days"), "schema": {"type": "integer", "enum": [30, 90], "default": 30}}
    event_id = {"name": "event_id", "in": "path", "required": True, "schema": {"type": "string"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "imds-bridge console", "version": __version__},
        "paths": {
            f"{BASE}/events": _path("Open events, filtered", EventList, filters),
            f"{BASE}/events/{{event_id}}": _path(
                "One event and its story", EventDetails, [event_id], missing=True
            ),
            f"{BASE}/vms": _path("VMs, filtered", VmList, filters),
            f"{BASE}/history": _path("Figures of the last days", Figures, [days]),
        },
        "components": {"schemas": generated["$defs"]},
    }


def _parameter(name: str) -> dict[str, Json]:
    return {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


def _path(summary: str, model: type[BaseModel], parameters: list[Json], *, missing: bool = False) -> Json:
    errors = {"401": "Not signed in", "403": "Not allowed", "503": "The store cannot be read"}
    errors |= {"404": "Not known"} if missing else {}
    responses = {
        "200": _response(summary, model),
        **{code: _response(text, Error) for code, text in errors.items()},
    }
    return {"get": {"summary": summary, "parameters": parameters, "responses": responses}}


def _response(description: str, model: type[BaseModel]) -> Json:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _event(row: EventRow) -> Event:
    return Event(
        event_id=row.shown_id,
        event_type=row.event_type,
        event_source=row.event_source,
        status=row.status,
        is_open=row.is_open,
        group=row.group_name,
        resources=list(row.resources),
        description=row.description,
        not_before=_maybe_time(row.not_before),
        duration_seconds=row.duration_seconds,
        notice_seconds=row.notice_seconds,
        first_seen_at=_time(row.first_seen_at),
        last_change_at=_time(row.last_change_at),
        started_at=_maybe_time(row.started_at),
        ended_at=_maybe_time(row.ended_at),
        approval=row.approval,
    )


def _vm(group: fleet.Group, cell: fleet.Cell) -> Vm:
    vm: VmRow | None = cell.vm
    return Vm(
        name=cell.name,
        group=group.name,
        zone=group.zone,
        location=group.location,
        state=cell.state,
        note=cell.note,
        event_id=cell.event.shown_id if cell.event else None,
        version=vm.version if vm else "",
        last_report_at=_time(vm.alive_at) if vm else None,
        waiting_events=vm.backlog if vm else 0,
        missing_events=vm.gaps if vm else 0,
    )


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


def _maybe_time(at: float | None) -> datetime | None:
    return None if at is None else _time(at)
