"""The rows of the pages as JSON under `/api/v1`, what programs put there, and the OpenAPI document of both."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from http import HTTPStatus
from importlib.resources import files
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bridge.console import base, expected, forget, history, rows
from bridge.console.base import Web, days_of, filter_of
from bridge.console.history import History
from bridge.console.merge import Time
from bridge.console.received import Received
from bridge.console.rows import EVERY, MAX_CHARACTERS, EventRow, Filter, ReportRow, VmRow, Where
from bridge.runtime.text import sanitize

log = logging.getLogger(__name__)

BASE = "/api/v1"
MAX_PAGE = 999_999
# Written by `python -m tools.contract.console_api`.
DOCUMENT = files("bridge.console").joinpath("openapi.json").read_bytes()
Row = TypeVar("Row", EventRow, ReportRow, VmRow)
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


def list_events(web: Web, request: Request) -> Response:
    """List the open events."""
    wanted = _checked(request, "/events")
    with web.store.reading() as store:
        found, more = _list(request, partial(rows.open_events, store), wanted.of_events())
        away = rows.count(store, "event_now", Where("is_open AND due = 'away'", ()) & wanted.of_events())
    return _json(EventList(events=found, put_away=away, next=more))


def show_event(web: Web, request: Request) -> Response:
    """Show an event, with what was published about it."""
    _checked(request, "/events/{event_id}")

    def after(last: str, **part: int) -> list[ReportRow]:
        return rows.reports_of(store, event.key, order="n", after=int(last or 0), **part)

    with web.store.reading() as store:
        event = web.find(store, request)
        found, more = _answer(request, partial(rows.reports_of, store, event.key), after)
    return _json(details(event, found, more))


def list_vms(web: Web, request: Request) -> Response:
    """List the VMs."""
    wanted = _checked(request, "/vms")
    with web.store.reading() as store:
        found, more = _list(request, partial(rows.vms, store), wanted.of_vms())
    return _json(VmList(vms=found, next=more))


def show_history(web: Web, request: Request) -> Response:
    """Show the figures of the last days."""
    wanted = _checked(request, "/history")
    with web.store.reading() as store:
        return _json(history.read_history(store, days_of(request), web.clock.wall(), wanted))


async def take_order(
    web: Web, read: Callable[[Web, bytes, str], list[Received]], request: Request
) -> Response:
    """Commit what a program with the token of senders, or an approver's sign-in, orders."""
    person, ingest = getattr(request.state, "person", None), web.settings.ingest
    is_open = web.settings.auth == "none" and not ingest.has_secret
    if "origin" in request.headers or not (person is None or person.is_approver or is_open):
        text = (
            "Only programs may send this: with bearer_token, or signed in and in a group of approver_groups."
        )
        raise HTTPException(HTTPStatus.FORBIDDEN, text)
    by = (person.name or "a program") if person else "a program with the token"
    try:  # no name has the body: it is freed before the commit
        events = await run_in_threadpool(read, web, await web.ingest.read(request, expected.MAX_BYTES), by)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    await web.ingest.commit(events)
    log.info("committed: %s", ", ".join({event.kind for event in events}), extra={"by": by})
    return Response(status_code=HTTPStatus.NO_CONTENT)


def expect(web: Web, body: bytes, _: str) -> list[Received]:
    """Replace the list of expected VMs."""
    return [expected.read_expected(body, now=web.clock.wall())]


def put_away(web: Web, body: bytes, by: str) -> list[Received]:
    """Put VMs or an event away."""
    given, at = forget.ORDER.validate_json(body), web.clock.wall()
    why, ids = sanitize(given.Reason), {one.lower(): one for one in given.ResourceIds}
    if not why:
        raise ValueError("expected a Reason that is not blank")
    with web.store.reading() as store:
        vms = {vm.resource_id.lower(): vm for vm in forget.forgettable(store, EVERY)}
        event = rows.find_event(store, given.EventId) if given.EventId else None
        done = {vm.resource_id.lower() for one in forget.away(store) for vm in one.vms}
    faults = [one for key, one in ids.items() if key not in vms.keys() | done]
    if given.EventId and not (event and (event.state.is_followed or event.state.is_away)):
        faults.append(given.EventId)
    if faults or not (ids or given.EventId):
        named = ", ".join(faults) or "none was named"
        text = f"Nothing was put away. No open event, or no VM that is silent or stopped: {named}"
        raise HTTPException(HTTPStatus.NOT_FOUND, sanitize(text, 2000))
    notes = forget.forgotten([vms[one] for one in ids if one in vms], by=by, now=at, why=why)
    if event and not event.state.is_away:
        notes.append(forget.dismissed(event, by=by, now=at, why=why, hours=given.Hours))
    return notes


def _list(request: Request, read: Callable[..., list[Row]], where: Where) -> tuple[list[Row], str | None]:
    """Return a page of rows with a key, and the next one's address."""

    def after(last: str, **part: int) -> list[Row]:
        return read(where & Where("key > ?", (last,)), order="ORDER BY key", **part)

    return _answer(request, partial(read, where), after)


def _answer(
    request: Request, read: Callable[..., list[Row]], after: Callable[..., list[Row]]
) -> tuple[list[Row], str | None]:
    """Return a page of the API, by its number or after the last row of another, and the next one's address."""
    last, number = request.query_params.get("after"), int(request.query_params.get("page", 1))
    if last is None:
        found, given = (
            read(limit=base.PAGE_CELLS + 1, offset=(number - 1) * base.PAGE_CELLS),
            {"page": str(number + 1)},
        )
    else:
        found = after(last, limit=base.PAGE_CELLS + 1)
        given = {"after": found[: base.PAGE_CELLS][-1].key} if found else {}
    address = f"{request.url.path}{filter_of(request).query(without=None, **given)}"
    return found[: base.PAGE_CELLS], address if found[base.PAGE_CELLS :] else None


def _checked(request: Request, path: str) -> Filter:
    if fault := query_fault(request.query_params.multi_items(), path):
        raise HTTPException(*fault)
    return filter_of(request)


def _json(answer: object) -> Response:
    return Response(write(answer), media_type="application/json")
