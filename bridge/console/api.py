"""What the pages show, as JSON under `/api/v1`, with its OpenAPI document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from bridge import __version__
from bridge.console import fleet
from bridge.console.filters import MAX_CHARACTERS, Filter
from bridge.console.history import ENDS, PERIODS, History
from bridge.console.queries import EventRow, ReportRow, VmRow
from bridge.runtime.json import Json

BASE = "/api/v1"
RETRY_AFTER = "Retry-After"
_REF = "#/components/schemas/{model}"
_EXAMPLES = {"type": "Reboot", "status": "Scheduled", "source": "Platform", "group": "shop", "vm": "web-0"}
Parameters = Mapping[str, dict[str, Json]]
# The parameters of a query, by name, with their schemas.
FILTERS: Parameters = {
    field.name: {"type": "string", "maxLength": MAX_CHARACTERS, "examples": [_EXAMPLES[field.name]]}
    for field in fields(Filter)
}
PERIOD: Parameters = {"days": {"type": "integer", "enum": [*PERIODS.values()], "default": 30}, **FILTERS}
NONE: Parameters = {}
_ERRORS = {
    "400": "A parameter is not valid",
    "401": "Not signed in",
    "403": "Not allowed",
    "421": "The Host header names another machine",
    "429": "Too many requests of this client",
    "503": "The store cannot be read, or there are too many requests",
}


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


def write(answer: BaseModel) -> str:
    """Write an answer as JSON; an event may hold halves of surrogate pairs, which pydantic does not write."""
    return json.dumps(answer.model_dump(mode="json"))


def event_list(events: Iterable[EventRow]) -> EventList:
    """Write open events."""
    return EventList(events=[_event(row) for row in events])


def event_details(row: EventRow, reports: Sequence[ReportRow]) -> EventDetails:
    """Write an event and its reports."""
    found = [
        Report(
            at=_time(report.at),
            seen_by=[Sighting(vm=name, at=_time(at)) for name, at in report.seen_by],
            cloudevent=report.event,
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


def query_fault(given: Sequence[tuple[str, str]], parameters: Parameters) -> str:
    """Say what is wrong with a query, "" if it is as described: a mistyped filter must not return everything.

    Args:
        given: the names and values of the query.
        parameters: the known ones.
    """
    counts = Counter(name for name, _ in given)
    if unknown := counts.keys() - parameters.keys():
        return f"{min(unknown)}: unknown parameter; expected {', '.join(parameters) or 'none'}"
    for name, value in given:
        allowed = [str(one) for one in parameters[name].get("enum", ())]
        if counts[name] > 1:
            return f"{name}: given more than once"
        if allowed and value not in allowed:
            return f"{name}: expected {' or '.join(allowed)}"
        if len(value) > MAX_CHARACTERS:
            return f"{name}: expected at most {MAX_CHARACTERS} characters"
    return ""


def openapi() -> dict[str, Json]:
    """Return the OpenAPI document."""
    models: list[type[BaseModel]] = [EventList, EventDetails, VmList, Figures, Error]
    _, generated = models_json_schema([(model, "serialization") for model in models], ref_template=_REF)
    event_id = {"type": "string", "examples": ["602d9444-d2cd-49c7-8624-8643e7171297"]}
    event = _path("One event and its story", EventDetails, NONE)
    event["get"]["parameters"] = [{"name": "event_id", "in": "path", "required": True, "schema": event_id}]
    event["get"]["responses"]["404"] = _response("Not known", Error)
    return {
        "openapi": "3.1.0",
        "info": {"title": "imds-bridge console", "version": __version__},
        "paths": {
            f"{BASE}/events": _path("Open events, filtered", EventList, FILTERS),
            f"{BASE}/events/{{event_id}}": event,
            f"{BASE}/vms": _path("VMs, filtered", VmList, FILTERS),
            f"{BASE}/history": _path("Figures of the last days, filtered", Figures, PERIOD),
        },
        "components": {"schemas": generated["$defs"]},
    }


def _path(summary: str, model: type[BaseModel], parameters: Parameters) -> Any:
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in parameters.items()
    ]
    responses = {
        "200": _response(summary, model),
        **{code: _response(text, Error) for code, text in _ERRORS.items()},
    }
    responses["429"]["headers"] = {
        RETRY_AFTER: {"description": "In seconds", "required": True, "schema": {"type": "integer"}}
    }
    return {"get": {"summary": summary, "parameters": in_query, "responses": responses}}


def _response(description: str, model: type[BaseModel]) -> dict[str, Json]:
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
