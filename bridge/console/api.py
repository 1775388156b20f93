"""The rows of the pages as JSON under `/api/v1`, and the OpenAPI document that describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from bridge.console.history import History
from bridge.console.merge import Time
from bridge.console.rows import MAX_CHARACTERS, EventRow, ReportRow, VmRow

BASE = "/api/v1"
MAX_PAGE = 999_999
# Written by `python -m tools.contract.console_api`.
DOCUMENT = files("bridge.console").joinpath("openapi.json").read_bytes()
Next = Annotated[str | None, Field(description="The address of the next page; null on the last one.")]


@dataclass(frozen=True, kw_only=True)
class EventList:
    """Open events, the most urgent first."""

    events: list[EventRow]
    put_away: Annotated[
        int, Field(description="How many open events people have put away: they are not here.")
    ]
    next: Next


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
    next: Next


@dataclass(frozen=True, kw_only=True)
class VmList:
    """VMs, by group and zone."""

    vms: list[VmRow]
    next: Next


@dataclass(frozen=True, kw_only=True)
class Error:
    """Why a request has no answer."""

    error: str


MODELS: dict[type, TypeAdapter[Any]] = {
    model: TypeAdapter(model) for model in (EventList, EventDetails, VmList, History, Error)
}


def write(answer: object) -> str:
    """Write an answer as JSON; an event may hold halves of surrogate pairs, which pydantic does not write."""
    return json.dumps(MODELS[type(answer)].dump_python(answer, mode="json"))


def details(row: EventRow, reports: Sequence[ReportRow], more: str | None) -> EventDetails:
    """Return an event, a page of its reports, and the address of the next one."""
    found = [
        Report(
            at=report.at,
            seen_by=[Sighting(vm=name, at=at) for name, at in report.seen_by],
            cloudevent=report.event,
        )
        for report in reports
    ]
    return EventDetails(event=row, reports=found, next=more)


def query_fault(given: Iterable[tuple[str, str]], path: str) -> tuple[HTTPStatus, str] | None:
    """Say what is wrong with the query of a path, and with which status; None if nothing is."""
    seen: list[str] = []
    parameters = _parameters(path)
    for name, value in given:
        seen.append(name)
        schema = parameters.get(name, {})
        if name not in parameters:
            fault = f"{name[:40]}: unknown; expected {', '.join(parameters) or 'no parameter'}"
        elif seen.count(name) > schema.get("maxItems", 1):
            fault = f"{name}: given too often"
        elif len(value) > MAX_CHARACTERS:
            fault = f"{name}: expected at most {MAX_CHARACTERS} characters"
        elif (allowed := [*map(str, schema.get("enum", ()))]) and value.lower() not in allowed:
            return HTTPStatus.UNPROCESSABLE_ENTITY, f"{name}: expected {' or '.join(allowed)}"
        elif name == "page" and not re.fullmatch("[1-9][0-9]{0,5}", value):
            fault = f"page: expected a number from 1 to {MAX_PAGE}"
        elif not re.fullmatch(schema.get("pattern", ".*"), value, re.DOTALL):
            fault = f"{name}: expected the address that the page before names"
        else:
            continue
        return HTTPStatus.BAD_REQUEST, fault
    return None


@lru_cache
def _parameters(path: str) -> dict[str, Any]:
    described = json.loads(DOCUMENT)["paths"][f"{BASE}{path}"]["get"]["parameters"]
    return {one["name"]: one["schema"] for one in described if one["in"] == "query"}
