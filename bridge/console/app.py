"""The web application: the pages, their API, and what every answer has."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from itertools import accumulate, islice
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from anyio.to_thread import current_default_thread_limiter
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge import __version__
from bridge.config.console import ConsoleSettings
from bridge.console import api, expected, fleet, forget, history, now, rows, story, waves
from bridge.console.access import Guard, Person
from bridge.console.approve import (
    COOKIE,
    COOKIE_SECONDS,
    Approvals,
    NotApproved,
    Sessions,
    digest,
    new_session,
)
from bridge.console.ingest import Ingest
from bridge.console.live import Live, changed_parts
from bridge.console.received import Received
from bridge.console.rows import DAY, EVERY, HOUR, EventRow, Filter, ReportRow, VmRow, Where, read_filter
from bridge.console.store import Store
from bridge.contract.status import Status
from bridge.contract.types import KNOWN_VALUES
from bridge.errors import BridgeError
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration, format_relative
from bridge.process.status import find_unready
from bridge.runtime.text import escape, sanitize
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import Clock, RepeatLimit, iso_utc

log = logging.getLogger(__name__)

PAGE_ROWS = 100
PAGE_CELLS = 1000  # of Fleet; also the rows of an answer of the API
MAX_RAW = 50
_RAW_BYTES = 70_000  # of the bodies together
MAX_ENDED = 50
MAX_TAGS = 200  # to choose from
SILENT_SECONDS = 3900.0  # a heartbeat comes every hour; five minutes more are for the way
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_THREADS = 8  # more would only compete for the interpreter
_FORM_BYTES = 16 * 1024
_FORM_FIELDS = 10
Row = TypeVar("Row", EventRow, ReportRow, VmRow)
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Web:
    """The endpoints, and what they need.

    Attributes:
        settings: who may look.
        store: is read.
        clock: what the pages call now.
        live: notifies open pages.
        ingest: takes events.
        registry: has the metrics.
        status: returns what the status file shows.
        address: where this machine reaches the pages.
        approvals: offers them; None if the console approves nothing.
        sessions: of the forms; `approvals` if there are.
    """

    settings: ConsoleSettings
    store: Store
    clock: Clock
    live: Live
    ingest: Ingest
    registry: CollectorRegistry
    status: Callable[[], Status]
    address: str = ""
    approvals: Approvals | None = None
    sessions: Sessions = field(default_factory=Sessions)

    def app(self) -> ASGIApp:
        """Return the application with all its routes."""
        event, base = "/event/{event_id}", api.BASE
        routes = [
            Route("/", self._now),
            Route("/fleet", self._fleet),
            Route("/history", self._history),
            Route("/history.csv", self._csv),
            Route("/away", self._away),
            Route("/away/undo", partial(self._put_away, self._restored), methods=["POST"]),
            Route("/away/wave", partial(self._put_away, self._dismissed_wave), methods=["POST"]),
            *(Route(f"/away/{form}", _to_page) for form in ("undo", "wave")),
            Route("/fleet/forget", partial(self._put_away, self._forgotten), methods=["POST"]),
            Route(event, self._event),
            Route(f"{event}/approve", self._approve, methods=["POST"]),
            Route(f"{event}/dismiss", partial(self._put_away, self._dismissed), methods=["POST"]),
            # After a sign-in, a form that was sent with an expired session comes back as GET.
            *(Route(f"{event}/{form}", _to_page) for form in ("approve", "dismiss")),
            Route("/fleet/forget", _to_page),
            Route(f"{event}/events.jsonl", self._jsonl),
            Route(f"{base}/events", self._api_events),
            Route(f"{base}/events/{{event_id}}", self._api_event),
            Route(f"{base}/vms", self._api_vms),
            Route(f"{base}/history", self._api_history),
            Route(f"{base}/expected", partial(self._order, self._listed), methods=["PUT"]),
            Route(f"{base}/forget", partial(self._order, self._ordered), methods=["POST"]),
            Route(f"{base}/openapi.json", lambda _: Response(api.DOCUMENT, media_type="application/json")),
            Route("/metrics", self._metrics),
            Route("/livez", lambda _: _health(stalled_threads())),
            Route("/readyz", lambda _: _health(find_unready(self.status(), self.clock.now()))),
            Route("/live", self._stream),
            Route("/ingest", self.ingest.post, methods=["POST"]),
            Route("/ingest", self.ingest.options, methods=["OPTIONS"]),
            *(Route(static_url(name), partial(_static, name)) for name in STATIC),
        ]
        application = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={
                HTTPException: self._failed,
                sqlite3.Error: partial(_unreadable, self, RepeatLimit(self.clock)),
                500: self._failed,
            },
        )
        application.router.redirect_slashes = False
        guard = Guard(
            GZipMiddleware(application), settings=self.settings, clock=self.clock, refuse=self.error
        )

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            # Before the store is read: an open page never fetches a version again that it seems to show.
            scope.setdefault("state", {})["version"] = self.ingest.writer.version
            await guard(scope, receive, send)

        return answer

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = _THREADS
        self.live.start()
        yield

    def _now(self, request: Request) -> Response:
        """Show what is open."""
        at, wanted, person = self.clock.wall(), _filter(request), request.state.person
        window = request.query_params.get("window", now.DEFAULT_WINDOW)
        window = window if window in now.WINDOWS else now.DEFAULT_WINDOW
        of_place = wanted.only(*rows.OF_PLACE)
        silent = replace(of_place, status="unwatched")
        with self.store.reading() as store:
            dues, types = rows.count_due(store, wanted), rows.count_types(store)
            every, away = rows.every_open(store, wanted), forget.away(store)
            found, asked = waves.waves(every), request.query_params.get("wave", "")
            opened = waves.wave_of(found, asked) or waves.wave_after(found, rows.find_event(store, asked))
            lines = [waves.Wave((event,)) for event in opened.events] if opened else found
            page = _page_of(request, len(lines))
            shown = waves.with_rows(store, lines[page.first : page.last], wanted)
            counts = rows.count_vms(store, of_place)
            everything = rows.count_vms(store) if of_place else counts
            known = everything[""] - everything["unknown"] - everything["unheard"]
            kept = {"window": window, "wave": opened.key if opened else ""}
            filters = self._filters(store, wanted, "/", [one for one, _, _ in types], **kept)
            unmatched = "VM" if not counts[""] else "event" * bool(filters["unmatched"])
            headline = now.headline(dues, vms=known, is_filtered=bool(wanted), unmatched=unmatched)
            context = {
                "headline": headline
                + now.unwatched(counts)
                + now.put_away(rows.count(store, "event_now", forget.coming(away, at) & of_place.of_events()))
                + now.clock_fault(rows.notes(store)["ahead"]),
                "turns": now.turns(rows.every_open(store, EVERY) if wanted else every),
                "away": sum(len(one.events) + len(one.vms) for one in away),
                "minimum": story.MINIMUM_NOTICE_SECONDS,
                "may_approve": self.approvals is not None and person.is_approver,
                "token": self.sessions.token(_session(request), person) if person.is_approver else "",
                "is_empty": not (everything or shown),
                "tiles": now.tiles(
                    rows.count_due(store, wanted.only("type", "source", *rows.OF_PLACE)), counts, wanted
                ),
                "timeline": now.timeline(shown, at - at % now.STEP_SECONDS, window),
                "windows": now.WINDOWS,
                "rows": shown,
                "opened": opened,
                "is_over": asked and not opened,
                "paging": page,
                "ended": rows.mine_first(
                    store, rows.ended_events(store, at - HOUR, wanted, limit=MAX_ENDED), wanted
                ),
                "all_ended": rows.count(
                    store, "event_now", Where("ended_at > ?", (at - HOUR,)) & wanted.of_events()
                ),
                "vms": known,
                "counts": counts,
                "unwatched": counts["unwatched"]
                and rows.vms(store, silent, order="ORDER BY event = '', alive_at DESC", limit=11),
                **filters,
                **self._base(store, at),
            }
        return self._page(request, "now.html", context)

    def _fleet(self, request: Request) -> Response:
        """Show every VM."""
        at, wanted = self.clock.wall(), _filter(request)
        is_table = request.query_params.get("view") == "table"
        with self.store.reading() as store:
            figures = rows.count_vms(store, wanted.only(*rows.OF_PLACE))
            counts = rows.count_vms(store, wanted) if wanted.status else figures
            page = _page_of(request, counts[""], PAGE_ROWS if is_table else PAGE_CELLS)
            shown = rows.vms(store, wanted, limit=page.size, offset=page.first)
            silent = forget.forgettable(store, wanted) if request.state.person.is_approver else []
            context = {
                "groups": fleet.groups(shown),
                "unwatched": now.unwatched(figures) + now.clock_fault(rows.notes(store)["ahead"]),
                "forgettable": len(silent),
                "shown": forget.digest(silent),
                "token": self.sessions.token(_session(request), request.state.person),
                "figures": figures,
                "counts": counts,
                "states": (*fleet.STATES, "unwatched", "outofwork"),
                "axes": fleet.AXES,
                "hidden": forget.hidden(store, at),
                "is_table": is_table,
                "rows": shown,
                "paging": page,
                "silent_minutes": round(SILENT_SECONDS / 60),
                **self._filters(store, wanted, "/fleet", [], view="table" if is_table else ""),
                **self._base(store, at),
            }
        return self._page(request, "fleet.html", context)

    def _event(self, request: Request) -> Response:
        """Show the story of one event."""
        at, person, wanted = self.clock.wall(), request.state.person, _filter(request).only(*rows.OF_PLACE)
        with self.store.reading() as store:
            event = self._find(store, request)
            (shown,) = rows.mine_first(store, [event], wanted)
            reports, vms = rows.reports_of(store, event.key, order=rows.DECIDING), rows.vms_of(store, event)
            base = {**self._base(store, at), **self._filters(store, EVERY, "/", [])}
            total = rows.count(store, "event", Where("event_id = ? AND event_id <> ''", (event.key,)))
            prepared, ahead = rows.preparations_of(store, event.key), rows.ahead_of(store, event)
            away = [one for one in forget.away(store) if any(other.key == event.key for other in one.events)]
        seen = story.witnesses(shown, reports, vms, prepared)
        sent = request.query_params.get("sent", "")
        context = {
            **base,
            "event": shown,
            "notice": story.notice_text(event),
            "steps": story.story(event, reports, vms, at),
            "affected": [one for one in seen if one.is_affected],
            "others": [one for one in seen if not one.is_affected],
            "ahead": ahead if story.has_turn(event) else None,
            "left_out": total - len(reports),
            "away": away[0] if away else None,
            "raw": _newest(reports),
            "total": total,
            "token": self.sessions.token(_session(request), person),
            "can_dismiss": person.is_approver and event.due in rows.DUES,
            "shown": digest(event),
            "is_coming": forget.is_coming(event, at),
            "can_approve": self.approvals is not None,
            "form": self.approvals and self.approvals.form(event, vms, person),
            "sent": sent if self.approvals and self.approvals.has_sent(event, sent) else "",
            "receipts": {one.event.get("causationid") for one in reports if one.kind.startswith("approval.")},
        }
        return self._page(request, "event.html", context)

    def _away(self, request: Request) -> Response:
        """Show what was put away."""
        with self.store.reading() as store:
            context = {
                "away": forget.away(store),
                "token": self.sessions.token(_session(request), request.state.person),
                **self._filters(store, EVERY, "/away", []),
                **self._base(store, self.clock.wall()),
            }
        return self._page(request, "away.html", context)

    def _history(self, request: Request) -> Response:
        """Show the figures of the last days."""
        at, wanted, days = self.clock.wall(), _filter(request), _days(request)
        with self.store.reading() as store:
            found = history.read_history(store, days, at, wanted)
            page = _page_of(request, found.total)
            missing = wanted.of_vms() & Where("missing > 0", ())
            context = {
                "history": found,
                "ends": history.ENDS,
                "gaps": rows.vms(store, missing, order="ORDER BY missing DESC"),
                "rows": rows.mine_first(
                    store,
                    rows.events_since(store, at - days * DAY, wanted, limit=page.size, offset=page.first),
                    wanted,
                ),
                "paging": page,
                **self._filters(
                    store, wanted, "/history", [one.event_type for one in found.ends], days=str(days)
                ),
                **self._base(store, at),
            }
        return self._page(request, "history.html", context)

    def _csv(self, request: Request) -> Response:
        """Send the events of the last days as CSV, as they are read."""
        days, wanted = _days(request), _filter(request)

        def lines() -> Iterator[str]:
            with self.store.reading() as store:
                yield from history.write_csv(rows.events_since(store, self.clock.wall() - days * DAY, wanted))

        headers = {"content-disposition": f'attachment; filename="scheduled-events-{days}-days.csv"'}
        return StreamingResponse(lines(), media_type="text/csv", headers=headers)

    def _jsonl(self, request: Request) -> Response:
        """Send every CloudEvent about an event, one a line."""
        with self.store.reading() as store:
            bodies = rows.bodies_of_event(store, self._find(store, request).key)
        text = b"".join(json.dumps(decode_event(body)).encode() + b"\n" for body in bodies)
        headers = {"content-disposition": 'attachment; filename="events.jsonl"'}
        return Response(text, media_type="application/jsonl", headers=headers)

    def _api_events(self, request: Request) -> Response:
        wanted = _checked(request, "/events")

        def after(last: str, **part: int) -> list[EventRow]:
            where = wanted.of_events() & Where("key > ?", (last,))
            return rows.open_events(store, where, order="ORDER BY key", **part)

        with self.store.reading() as store:
            found, more = _answer(request, partial(rows.open_events, store, wanted), after)
            away = rows.count(store, "event_now", Where("is_open AND due = 'away'", ()) & wanted.of_events())
        return _json(api.EventList(events=found, put_away=away, next=more))

    def _api_event(self, request: Request) -> Response:
        _checked(request, "/events/{event_id}")

        def after(last: str, **part: int) -> list[ReportRow]:
            return rows.reports_of(store, event.key, order="n", after=int(last or 0), **part)

        with self.store.reading() as store:
            event = self._find(store, request)
            found, more = _answer(request, partial(rows.reports_of, store, event.key), after)
        return _json(api.details(event, found, more))

    def _api_vms(self, request: Request) -> Response:
        wanted = _checked(request, "/vms")

        def after(last: str, **part: int) -> list[VmRow]:
            where = wanted.of_vms() & Where("key > ?", (last,))
            return rows.vms(store, where, order="ORDER BY key", **part)

        with self.store.reading() as store:
            found, more = _answer(request, partial(rows.vms, store, wanted), after)
        return _json(api.VmList(vms=found, next=more))

    def _api_history(self, request: Request) -> Response:
        wanted = _checked(request, "/history")
        with self.store.reading() as store:
            return _json(history.read_history(store, _days(request), self.clock.wall(), wanted))

    async def _order(self, read: Callable[[bytes, str], list[Received]], request: Request) -> Response:
        """Commit what a program with the token of senders, or an approver's sign-in, orders."""
        person, ingest = getattr(request.state, "person", None), self.settings.ingest
        is_open = self.settings.auth == "none" and not ingest.has_secret
        if "origin" in request.headers or not (person is None or person.is_approver or is_open):
            text = "Only programs may send this: with bearer_token, or signed in and in a group of approver_groups."
            raise HTTPException(HTTPStatus.FORBIDDEN, text)
        by = (person.name or "a program") if person else "a program with the token"
        body = await self.ingest.read(request, expected.MAX_BYTES)
        try:
            events = await run_in_threadpool(read, body, by)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        await self.ingest.commit(events)
        log.info("committed: %s", ", ".join({event.kind for event in events}), extra={"by": by})
        return Response(status_code=HTTPStatus.NO_CONTENT)

    def _listed(self, body: bytes, _: str) -> list[Received]:
        """Replace the list of expected VMs."""
        return [expected.read_expected(body, now=self.clock.wall())]

    def _ordered(self, body: bytes, by: str) -> list[Received]:
        """Put VMs or an event away."""
        given, at = forget.ORDER.validate_json(body), self.clock.wall()
        why, ids = sanitize(given.Reason), {one.lower(): one for one in given.ResourceIds}
        if not why:
            raise ValueError("expected a Reason that is not blank")
        with self.store.reading() as store:
            vms = {vm.resource_id.lower(): vm for vm in forget.forgettable(store, EVERY)}
            event = rows.find_event(store, given.EventId) if given.EventId else None
            done = {vm.resource_id.lower() for one in forget.away(store) for vm in one.vms}
        faults = [one for key, one in ids.items() if key not in vms.keys() | done]
        if given.EventId and not (event and event.due in (*rows.DUES, "away")):
            faults.append(given.EventId)
        if faults or not (ids or given.EventId):
            named = ", ".join(faults) or "none was named"
            text = f"Nothing was put away. No open event, or no VM that is silent or stopped: {named}"
            raise HTTPException(HTTPStatus.NOT_FOUND, sanitize(text, 2000))
        notes = (
            [forget.dismissed(event, by=by, now=at, why=why, hours=given.Hours)]
            if event and event.due != "away"
            else []
        )
        return notes + forget.forgotten([vms[one] for one in ids if one in vms], by=by, now=at, why=why)

    def _metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), media_type=content_type)

    async def _stream(self, _: Request) -> Response:
        if self.live.is_full:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages.")
        return _LiveResponse(self.live)

    async def _approve(self, request: Request) -> Response:
        """Send an approval, if the POST comes from the form of a page of this console."""
        try:
            command_id = await self._from_form(request, "Not approved.", self._send_approval)
        except BridgeError as error:
            log.error("an approval cannot be sent: %s", error)  # noqa: TRY400 - the text is enough
            text = f"The command could not be sent: {error}"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text) from None
        return await _to_page(request, sent=command_id)

    async def _put_away(
        self, read: Callable[[Request, Mapping[str, str]], list[Received]], request: Request
    ) -> Response:
        """Commit what the form of a page of this console puts away."""
        await self.ingest.commit(await self._from_form(request, "Nothing was put away.", read))
        return await _to_page(request)

    def _dismissed(self, request: Request, given: Mapping[str, str]) -> list[Received]:
        person, why = request.state.person, sanitize(given.get("reason", ""))
        with self.store.reading() as store:
            event = self._find(store, request)
        self.sessions.check(person, request.cookies.get(COOKIE, ""), given)
        if event.due not in rows.DUES or not why:
            raise NotApproved("It needs a comment, and the event has to be open.")
        if given.get("shown") != digest(event):
            raise NotApproved("The event has changed since the page was shown: read it again.")
        return self._away_events([event], person, why, given)

    def _away_events(
        self, events: list[EventRow], person: Person, why: str, given: Mapping[str, str]
    ) -> list[Received]:
        asked, at = given.get("hours", ""), self.clock.wall()
        hours = float(asked) if asked in map(str, forget.HOURS) else None
        try:
            found = [forget.dismissed(one, by=person.name, now=at, why=why, hours=hours) for one in events]
        except ValueError as error:
            raise NotApproved(str(error)) from None
        ids = [event.event_id for event in events]
        log.warning("events dismissed", extra={"by": person.name, "event_ids": ids, "reason": why})
        return found

    def _dismissed_wave(self, request: Request, given: Mapping[str, str]) -> list[Received]:
        """Put the events of a wave away: those that are overdue, or all."""
        person, why = request.state.person, sanitize(given.get("reason", ""))
        with self.store.reading() as store:
            found = waves.wave_of(
                waves.waves(rows.every_open(store, _filter(request))), given.get("wave", "")
            )
            some = found.events if found else ()
            keys = [one.key for one in some if one.due == "overdue" or given.get("which") == "all"]
            events = rows.events_of(store, keys)
        self.sessions.check(person, request.cookies.get(COOKIE, ""), given)
        if not found or given.get("shown") != found.digest:
            raise NotApproved("The wave has changed since the page was shown: read it again.")
        if not why or not events or given.get("confirm", "").strip() != str(len(events)):
            raise NotApproved("It needs a comment, and the number of the events.")
        return self._away_events(events, person, why, given)

    def _restored(self, request: Request, given: Mapping[str, str]) -> list[Received]:
        """Bring back what was put away."""
        person = request.state.person
        with self.store.reading() as store:
            found = [one for one in forget.away(store) if one.key == given.get("away")]
        self.sessions.check(person, request.cookies.get(COOKIE, ""), given)
        if not found:
            raise NotApproved("It is back already: read the page again.")
        ids = [event.event_id for event in found[0].events]
        log.warning("brought back", extra={"by": person.name, "event_ids": ids})
        return forget.restored(found[0], by=person.name, now=self.clock.wall())

    def _forgotten(self, request: Request, given: Mapping[str, str]) -> list[Received]:
        person = request.state.person
        with self.store.reading() as store:
            vms = forget.forgettable(store, _filter(request))
        self.sessions.check(person, request.cookies.get(COOKIE, ""), given)
        if given.get("shown") != forget.digest(vms) or given.get("confirm", "").strip() != str(len(vms)):
            raise NotApproved("The VMs have changed, or this is not their number: read the page again.")
        log.warning("VMs forgotten", extra={"by": person.name, "vms": [vm.name for vm in vms]})
        why = sanitize(given.get("reason", ""))
        return forget.forgotten(vms, by=person.name, now=self.clock.wall(), why=why)

    async def _from_form(
        self, request: Request, refusal: str, work: Callable[[Request, Mapping[str, str]], Result]
    ) -> Result:
        """Return what work makes of the fields of a form of this console."""
        given = await self._form(request)
        try:
            return await run_in_threadpool(work, request, given)
        except NotApproved as refused:
            raise HTTPException(HTTPStatus.FORBIDDEN, f"{refusal} {refused}") from None

    async def _form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form of this console."""
        if request.headers.getlist("origin") != [self.settings.public_url]:
            raise HTTPException(HTTPStatus.FORBIDDEN, "The request does not come from this console.")
        body = await self.ingest.read(request, _FORM_BYTES)
        try:
            given = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=_FORM_FIELDS))
        except ValueError:
            given = {}
        if not given:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "The form did not arrive.")
        return given

    def _send_approval(self, request: Request, given: Mapping[str, str]) -> str:
        with self.store.reading() as store:
            event = self._find(store, request)
            vms = rows.vms_of(store, event)
        if self.approvals is None:
            raise NotApproved("There is no [approvals] in the console's configuration.")
        session = request.cookies.get(COOKIE, "")
        return self.approvals.approve(event, vms, request.state.person, session, given)

    def _find(self, store: sqlite3.Connection, request: Request) -> EventRow:
        event = rows.find_event(store, request.path_params["event_id"])
        if event is None:
            text = "There is no such event here yet. If it is new, this page shows it as soon as it arrives."
            raise HTTPException(HTTPStatus.NOT_FOUND, text)
        return event

    def _base(self, store: sqlite3.Connection, at: float) -> dict[str, Any]:
        """Return what every page has: the banners, and the time."""
        noted = rows.notes(store)
        first, last = noted.get("first_at"), noted.get("last_at")
        return {
            "now": at,
            "damaged": noted.get("damaged"),
            "noted": noted,
            "new_since": first if first is not None and at - first < DAY else None,
            "last_received_at": last,
            "is_quiet": last is not None and at - last > SILENT_SECONDS,
            "input_error": sanitize(self._input_error()),
        }

    def _input_error(self) -> str:
        """Say why no events are received at the moment, "" if they are."""
        status = self.status()
        if status.storage_error:
            return f"The store cannot be written: {status.storage_error}"
        error = status.receiver and status.receiver.last_error
        return f"Nothing is received from Service Bus: {error}" if error else ""

    def _filters(
        self, store: sqlite3.Connection, wanted: Filter, path: str, types: list[str], **kept: str
    ) -> dict[str, Any]:
        """Return what the filters offer, and a chip for each that is set."""
        groups, subscriptions = rows.groups_of(store)
        types = [*dict.fromkeys((*KNOWN_VALUES["EventType"], *sorted({*types} - {""})))]
        names = rows.names_unlike(store, wanted.only("vm")) if wanted.vm else []
        known = {"type": types, "vm": names, "group": groups, "subscription": subscriptions}
        tags = rows.tags_of(store)
        return {
            "filter": wanted,
            "path": path,
            "kept": {name: value for name, value in kept.items() if value},
            "types": types,
            "sources": KNOWN_VALUES["EventSource"],
            "group_names": groups,
            "subscriptions": subscriptions,
            "tags": tags[:MAX_TAGS],
            "more_tags": len(tags) - MAX_TAGS,
            "unmatched": rows.unknown_values(wanted, {**known, "tag": tags, "due": (*rows.DUES, "ended")}),
        }

    def _page(
        self, request: Request, template: str, context: Mapping[str, Any], status: int = 200
    ) -> Response:
        common = {
            "person": request.state.person,
            "page": template.partition(".")[0],
            "version": request.state.version,
            "mine": _filter(request).only(*rows.OF_PLACE).query(),
            "settings": self.settings,
            "ingest_url": f"{self.settings.public_url or self.address}/ingest",
        }
        text = _templates().get_template(template).render(common, **context)
        response = HTMLResponse(changed_parts(text, request.headers.get("x-shown")), status)
        if cookie := getattr(request.state, "session", ""):
            response.set_cookie(
                COOKIE, cookie, max_age=COOKIE_SECONDS, secure=True, httponly=True, samesite="strict"
            )
        return response

    async def _failed(self, request: Request, error: Exception) -> Response:
        status, text, headers = HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error; the log says more", None
        if isinstance(error, HTTPException):
            status, text, headers = HTTPStatus(error.status_code), error.detail, error.headers
            if status == HTTPStatus.NOT_FOUND and text == status.phrase:
                text = "There is no such page or event."
        return self.error(request, status, text, headers)

    def error(
        self, request: Request, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return an error: JSON for the API, a page for people, else a line of text."""
        if request.url.path.startswith(api.BASE):
            return Response(api.write(api.Error(error=text)), status, headers, "application/json")
        if getattr(request.state, "person", None) is None:
            return PlainTextResponse(f"{text}\n", status, headers)
        context = {"now": self.clock.wall(), "code": int(status), "title": status.phrase, "text": text}
        response = self._page(request, "error.html", context, status)
        response.headers.update(headers or {})
        return response


class _LiveResponse(Response):
    """Streams versions, and counts before the first await: many requests come at once."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"x-accel-buffering": "no"}  # else nginx holds them back
        with self._live.place() as changed:
            stream = StreamingResponse(self._live.stream(changed), 200, headers, "text/event-stream")
            await stream(scope, receive, send)


@dataclass(frozen=True)
class Paging:
    """A page of a table: its rows are from `first` to before `last` of `total`."""

    number: int
    total: int
    size: int

    @property
    def first(self) -> int:
        """The place of its first row."""
        return (self.number - 1) * self.size

    @property
    def last(self) -> int:
        """The place after its last row."""
        return min(self.total, self.number * self.size)


async def _to_page(request: Request, **more: str) -> Response:
    """Lead from the address of a form's action to its page."""
    address = f"{quote(request.url.path.rpartition('/')[0])}{_filter(request).query(without=None, **more)}"
    return RedirectResponse(address, HTTPStatus.SEE_OTHER)


def _session(request: Request) -> str:
    """Return an approver's session, a new one if there is none."""
    session: str = request.cookies.get(COOKIE, "") or getattr(request.state, "session", "")
    if request.state.person.is_approver and not session:
        session = request.state.session = new_session()
    return session


def _page_of(request: Request, total: int, size: int = PAGE_ROWS) -> Paging:
    given = request.query_params.get("page", "")
    wanted = int(given) if given.isdecimal() and len(given) < 7 else 1  # noqa: PLR2004 - a million pages
    return Paging(max(1, min(wanted, -(-total // size))), total, size)


def _answer(
    request: Request, read: Callable[..., list[Row]], after: Callable[..., list[Row]]
) -> tuple[list[Row], str | None]:
    """Return a page of the API, by its number or after the last row of another, and the next one's address."""
    last, number = request.query_params.get("after"), int(request.query_params.get("page", 1))
    if last is None:
        found, given = read(limit=PAGE_CELLS + 1, offset=(number - 1) * PAGE_CELLS), {"page": str(number + 1)}
    else:
        found = after(last, limit=PAGE_CELLS + 1)
        given = {"after": found[:PAGE_CELLS][-1].key} if found else {}
    address = f"{request.url.path}{_filter(request).query(without=None, **given)}"
    return found[:PAGE_CELLS], address if found[PAGE_CELLS:] else None


def _filter(request: Request) -> Filter:
    return read_filter(request.query_params.multi_items())


def _checked(request: Request, path: str) -> Filter:
    if fault := api.query_fault(request.query_params.multi_items(), path):
        raise HTTPException(*fault)
    return _filter(request)


def _days(request: Request) -> int:
    given = request.query_params.get("days", "")
    return int(given) if given in map(str, history.PERIODS) else history.PERIODS[0]


def _json(answer: object) -> Response:
    return Response(api.write(answer), media_type="application/json")


def _health(faults: list[str]) -> Response:
    """Answer everybody: it says whether the console works, and no more."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK
    return JSONResponse({"ok": not faults, "role": "console"}, status)


def _unreadable(web: Web, limit: RepeatLimit, request: Request, error: Exception) -> Response:
    if limit.is_due():
        log.warning("the store cannot be read: %s", error)
    text = "The store cannot be read at the moment. Events are not lost: their senders retry."
    return web.error(request, HTTPStatus.SERVICE_UNAVAILABLE, text)


def _static(name: str, _: Request) -> Response:
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(static_file(name), media_type=STATIC[name], headers=headers)


@lru_cache
def static_file(name: str) -> bytes:
    """Return a file that the pages load."""
    return files("bridge.console").joinpath("static", name).read_bytes()


@lru_cache
def static_url(name: str) -> str:
    """Return the address of a file, which changes with its content."""
    return f"/static/{sha256(static_file(name)).hexdigest()[:12]}/{name}"


@lru_cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("bridge.console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "text": sanitize,
        "iso": lambda at: iso_utc(datetime.fromtimestamp(at, UTC)),
        "clock": _clock,
        "duration": format_duration,
        "relative": lambda at, at_now: format_relative(at - at_now, exact=at > at_now),
        "css": now.css_class,
        "cell": fleet.cell,
        "describe": fleet.describe,
        "names": now.vm_names,
        "short_names": now.short_names,
        "pick": lambda counts, name: counts.get(name, 0),
        "joined": story.write_names,
        "impact": story.impact_text,
        "segment": lambda value, safe="": quote(value, safe=safe),
    }
    environment.globals |= {"static_url": static_url, "app_version": __version__, "away_hours": forget.HOURS}
    return environment


def _clock(at: float, now_at: float | None = None) -> str:
    """Write a time; beside the present one, without seconds, and of today without the date."""
    given = datetime.fromtimestamp(at, UTC)
    if now_at is None:
        return f"{given:%d %b %H:%M:%S} UTC"
    is_today = given.date() == datetime.fromtimestamp(now_at, UTC).date()
    return f"{given:%H:%M} UTC" if is_today else f"{given:%d %b %H:%M} UTC"


def _newest(reports: Sequence[ReportRow]) -> list[tuple[str, float, str]]:
    """Return the newest CloudEvents, as many as a page holds, and at least one."""
    sizes = accumulate(len(report.body) for report in reversed(reports))
    shown = max(1, sum(size <= _RAW_BYTES for size in islice(sizes, MAX_RAW)))
    return [_raw(report) for report in reports[-shown:]]


def _raw(report: ReportRow) -> tuple[str, float, str]:
    """Return a CloudEvent's kind, time and indented text, in which nothing from outside reorders or hides text."""
    text = json.dumps(report.event, indent=2, ensure_ascii=False)
    return report.kind, report.at, "\n".join(map(escape, text.split("\n")))
