"""The rows of the pages as JSON under `/api/v1`, and the OpenAPI document that describes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from pydantic import TypeAdapter

from bridge import __version__
from bridge.console.history import PERIODS, History
from bridge.console.merge import Time
from bridge.console.rows import MAX_CHARACTERS, MAX_VALUES, EventRow, Filter, ReportRow, VmRow
from bridge.runtime.json import Json

BASE = "/api/v1"
_REF = "#/components/schemas/{model}"
Parameters = Mapping[str, dict[str, Json]]
_TEXT: dict[str, Json] = {"type": "string", "maxLength": MAX_CHARACTERS}


def _schema(default: object, example: str) -> dict[str, Json]:
    schema: dict[str, Json] = {**_TEXT, "examples": [example]}
    return (
        {"type": "array", "maxItems": MAX_VALUES, "items": schema} if isinstance(default, tuple) else schema
    )


# The parameters of a query, by name, with their schemas.
FILTERS: Parameters = {one.name: _schema(one.default, one.metadata["example"]) for one in fields(Filter)}
OF_VMS: Parameters = {name: FILTERS[name] for name in ("status", "vm", "subscription", "group", "tag")}
PERIOD: Parameters = {"days": {"type": "integer", "enum": [*PERIODS], "default": PERIODS[0]}, **FILTERS}
NONE: Parameters = {}
_ERRORS = {
    "400": "A parameter is not valid",
    "401": "Not signed in",
    "403": "Not allowed",
    "421": "The Host header names another machine",
    "503": "The store cannot be read, or there are too many requests",
}


@dataclass(frozen=True, kw_only=True)
class EventList:
    """Open events, the most urgent first."""

    events: list[EventRow]


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """When a VM saw a change."""

    vm: str
    at: Time


@dataclass(frozen=True, kw_only=True)
class Report:
    """One CloudEvent about an event, and the VMs that saw it."""

    at: Time
    seen_by: list[Sighting]
    cloudevent: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EventDetails:
    """An event with its story."""

    event: EventRow
    reports: list[Report]


@dataclass(frozen=True, kw_only=True)
class VmList:
    """VMs."""

    vms: list[VmRow]


@dataclass(frozen=True, kw_only=True)
class Error:
    """Why a request has no answer."""

    error: str


_MODELS: dict[type, TypeAdapter[Any]] = {
    model: TypeAdapter(model) for model in (EventList, EventDetails, VmList, History, Error)
}


def write(answer: object) -> str:
    """Write an answer as JSON; an event may hold halves of surrogate pairs, which pydantic does not write."""
    return json.dumps(_MODELS[type(answer)].dump_python(answer, mode="json"))


def details(row: EventRow, reports: Sequence[ReportRow]) -> EventDetails:
    """Return an event and its reports."""
    found = [
        Report(
            at=report.at,
            seen_by=[Sighting(vm=name, at=at) for name, at in report.seen_by],
            cloudevent=report.event,
        )
        for report in reports
    ]
    return EventDetails(event=row, reports=found)


def query_fault(given: Iterable[tuple[str, str]], parameters: Parameters) -> str:
    """Say what is wrong with a query, "" if nothing is."""
    seen: list[str] = []
    for name, value in given:
        if name not in parameters:
            return f"{name[:40]}: unknown; expected {', '.join(parameters) or 'no parameter'}"
        schema = parameters[name]
        seen.append(name)
        if seen.count(name) > (MAX_VALUES if schema["type"] == "array" else 1):
            return f"{name}: given too often"
        if (allowed := schema.get("enum")) and value not in map(str, allowed):
            return f"{name}: expected {' or '.join(map(str, allowed))}"
        if len(value) > MAX_CHARACTERS:
            return f"{name}: expected at most {MAX_CHARACTERS} characters"
    return ""


def openapi() -> dict[str, Json]:
    """Return the OpenAPI document."""
    inputs: Any = [(model, "serialization", adapter) for model, adapter in _MODELS.items()]
    _, generated = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    event = _path("One event and its story", EventDetails, NONE)
    example = "602d9444-d2cd-49c7-8624-8643e7171297"
    event["get"]["parameters"] = [
        {
            "name": "event_id",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "examples": [example]},
        }
    ]
    event["get"]["responses"]["404"] = _response("Not known", Error)
    return {
        "openapi": "3.1.0",
        "info": {"title": "imds-bridge console", "version": __version__},
        "paths": {
            f"{BASE}/events": _path("Open events, filtered", EventList, FILTERS),
            f"{BASE}/events/{{event_id}}": event,
            f"{BASE}/vms": _path("VMs, filtered", VmList, OF_VMS),
            f"{BASE}/history": _path("Figures of the last days, filtered", History, PERIOD),
        },
        "components": {"schemas": generated["$defs"]},
    }


def _path(summary: str, model: type, parameters: Parameters) -> Any:
    in_query = [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in parameters.items()
    ]
    responses = {
        "200": _response(summary, model),
        **{code: _response(text, Error) for code, text in _ERRORS.items()},
    }
    return {"get": {"summary": summary, "parameters": in_query, "responses": responses}}


def _response(description: str, model: type) -> dict[str, Json]:
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
