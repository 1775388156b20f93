"""The forms of the pages: what people approve, put away and bring back."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TypeVar
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from bridge.console import forget, rows, waves
from bridge.console.approve import COOKIE, NotApproved, digest
from bridge.console.base import Web, filter_of, to_page
from bridge.console.received import Received
from bridge.console.rows import EventRow
from bridge.errors import BridgeError
from bridge.runtime.text import sanitize

log = logging.getLogger(__name__)

_FORM_BYTES = 16 * 1024
_FORM_FIELDS = 10
Fields = Mapping[str, str]
Read = Callable[[Web, sqlite3.Connection, Request, Fields], list[Received]]
"""Returns what a form brings about, by what is stored; raises NotApproved."""
Result = TypeVar("Result")


async def approve(web: Web, request: Request) -> Response:
    """Send an approval, if the POST comes from the form of a page of this console."""

    def send(given: Fields) -> str:
        with web.store.reading() as store:
            event = web.find(store, request)
            vms = rows.vms_of(store, event)
        if web.approvals is None:
            raise NotApproved("There is no [approvals] in the console's configuration.")
        session = request.cookies.get(COOKIE, "")
        return web.approvals.approve(event, vms, request.state.person, session, given)

    try:
        command_id = await _from_form(web, request, "Not approved.", send)
    except BridgeError as error:
        log.error("an approval cannot be sent: %s", error)  # noqa: TRY400 - the text is enough
        text = f"The command could not be sent: {error}"
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text) from None
    return await to_page(request, sent=command_id)


async def put_away(web: Web, read: Read, request: Request) -> Response:
    """Commit what the form of a page of this console puts away, or brings back."""

    def commit(given: Fields) -> list[Received]:
        web.sessions.check(request.state.person, request.cookies.get(COOKIE, ""), given)
        with web.store.reading() as store:
            return read(web, store, request, given)

    await web.ingest.commit(await _from_form(web, request, "Nothing was put away.", commit))
    return await to_page(request)


def event_away(web: Web, store: sqlite3.Connection, request: Request, given: Fields) -> list[Received]:
    """Put an event away."""
    event = web.find(store, request)
    if not event.state.is_followed or not _comment(given):
        raise NotApproved("It needs a comment, and the event has to be open.")
    if given.get("shown") != digest(event):
        raise NotApproved("The event has changed since the page was shown: read it again.")
    return _events_away(web, [event], request, given)


def wave_away(web: Web, store: sqlite3.Connection, request: Request, given: Fields) -> list[Received]:
    """Put the events of a wave away: those that are overdue, or all."""
    found = waves.wave_of(waves.waves(rows.every_open(store, filter_of(request))), given.get("wave", ""))
    if not found or given.get("shown") != found.digest:
        raise NotApproved("The wave has changed since the page was shown: read it again.")
    keys = [one.key for one in found.events if one.state.is_overdue or given.get("which") == "all"]
    if not _comment(given) or not keys or given.get("confirm", "").strip() != str(len(keys)):
        raise NotApproved("It needs a comment, and the number of the events.")
    return _events_away(web, rows.events_of(store, keys), request, given)


def _events_away(web: Web, events: list[EventRow], request: Request, given: Fields) -> list[Received]:
    by, at, why, asked = request.state.person.name, web.clock.wall(), _comment(given), given.get("hours", "")
    hours = float(asked) if asked in map(str, forget.HOURS) else None
    try:
        found = [forget.dismissed(one, by=by, now=at, why=why, hours=hours) for one in events]
    except ValueError as error:
        raise NotApproved(str(error)) from None
    ids = [event.event_id for event in events]
    log.warning("events dismissed", extra={"by": by, "event_ids": ids, "reason": why})
    return found


def vms_away(web: Web, store: sqlite3.Connection, request: Request, given: Fields) -> list[Received]:
    """Put the VMs of a filter away that are silent or stopped."""
    by, vms = request.state.person.name, forget.forgettable(store, filter_of(request))
    if given.get("shown") != forget.digest(vms) or given.get("confirm", "").strip() != str(len(vms)):
        raise NotApproved("The VMs have changed, or this is not their number: read the page again.")
    log.warning("VMs forgotten", extra={"by": by, "vms": [vm.name for vm in vms]})
    return forget.forgotten(vms, by=by, now=web.clock.wall(), why=_comment(given))


def back(web: Web, store: sqlite3.Connection, request: Request, given: Fields) -> list[Received]:
    """Bring back what was put away."""
    by, found = request.state.person.name, [one for one in forget.away(store) if one.key == given.get("away")]
    if not found:
        raise NotApproved("It is back already: read the page again.")
    ids = [event.event_id for event in found[0].events]
    log.warning("brought back", extra={"by": by, "event_ids": ids})
    return forget.restored(found[0], by=by, now=web.clock.wall())


def _comment(given: Fields) -> str:
    return sanitize(given.get("reason", ""))


async def _from_form(web: Web, request: Request, refusal: str, work: Callable[[Fields], Result]) -> Result:
    """Return what work makes of the fields of a form of this console."""
    if request.headers.getlist("origin") != [web.settings.public_url]:
        raise HTTPException(HTTPStatus.FORBIDDEN, "The request does not come from this console.")
    body = await web.ingest.read(request, _FORM_BYTES)
    try:
        given = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=_FORM_FIELDS))
    except ValueError:
        given = {}
    if not given:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "The form did not arrive.")
    try:
        return await run_in_threadpool(work, given)
    except NotApproved as refused:
        raise HTTPException(HTTPStatus.FORBIDDEN, f"{refusal} {refused}") from None
