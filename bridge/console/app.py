"""The web application: the pages, their API, and what every answer has."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, quote

from anyio.to_thread import current_default_thread_limiter
from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp

from bridge import __version__
from bridge.config.console import ConsoleSettings
from bridge.console import api, fleet, history, now, rows, story
from bridge.console.access import Guard
from bridge.console.approve import COOKIE, COOKIE_SECONDS, Approvals, NotApproved, new_session
from bridge.console.ingest import BODY_SECONDS, Ingest, read_body
from bridge.console.live import Live
from bridge.console.rows import DAY, EVERY, HOUR, EventRow, Filter, ReportRow, read_filter
from bridge.console.store import Store
from bridge.contract.types import KNOWN_VALUES
from bridge.errors import BridgeError
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration, format_relative, sanitize
from bridge.runtime.text import escape
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import Clock, RepeatLimit, iso_utc
from bridge.service.status import find_unready

log = logging.getLogger(__name__)

PAGE_ROWS = 100
MAX_RAW = 50
SILENT_SECONDS = 3900.0  # a heartbeat comes every hour; five minutes more are for the way
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_THREADS = 8  # more would only compete for the interpreter
_FORM_BYTES = 16 * 1024
_FORM_FIELDS = 10
_COMMAND_ID = re.compile("[0-9a-f-]{36}")
_LABELS = {"vm": "VM or EventId", "due": "Due"}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """How events reach the console, for who connects VMs.

    Attributes:
        url: where they are posted, "" if they cannot be.
        is_local: whether only this machine reaches that.
        secret_key: the key of a webhook sink that proves the sender, "" if none is needed.
        bus: the topic or queue that is received from, "" if none is.
    """

    url: str = ""
    is_local: bool = False
    secret_key: str = ""
    bus: str = ""


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
        input_error: returns why no events are received at the moment, "" if they are.
        version: returns a number that changes with every commit.
        inputs: how VMs are connected.
        approvals: offers them; None if the console approves nothing.
    """

    settings: ConsoleSettings
    store: Store
    clock: Clock
    live: Live
    ingest: Ingest
    registry: CollectorRegistry
    status: Callable[[], dict[str, Any]]
    input_error: Callable[[], str]
    version: Callable[[], int]
    inputs: Inputs = Inputs()
    approvals: Approvals | None = None

    def app(self) -> ASGIApp:
        """Return the application with all its routes."""
        event, base = "/event/{event_id}", api.BASE
        routes = [
            *(
                Route(*one)
                for one in (("/", self._now), ("/fleet", self._fleet), ("/history", self._history))
            ),
            Route("/history.csv", self._csv),
            Route(event, self._event),
            Route(f"{event}/approve", self._approve, methods=["POST"]),
            Route(f"{event}/events.jsonl", self._jsonl),
            Route(f"{base}/events", self._api_events),
            Route(f"{base}/events/{{event_id}}", self._api_event),
            Route(f"{base}/vms", self._api_vms),
            Route(f"{base}/history", self._api_history),
            Route(f"{base}/openapi.json", lambda _: JSONResponse(api.openapi())),
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
        return Guard(application, settings=self.settings, clock=self.clock, refuse=self.error)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        current_default_thread_limiter().total_tokens = _THREADS
        self.live.start()
        yield

    def _now(self, request: Request) -> Response:
        """Show what is open."""
        at, wanted = self.clock.wall(), _filter(request)
        window = request.query_params.get("window", now.DEFAULT_WINDOW)
        window = window if window in now.WINDOWS else now.DEFAULT_WINDOW
        of_place = wanted.only(*rows.OF_PLACE)
        with self.store.reading() as store:
            shown = rows.open_events(store, wanted)
            page = _page_of(request, len(shown))
            dues = rows.count_due(store, wanted)
            counts = rows.count_vms(store)
            known = sum(count for watch, _, count in counts if watch != "unknown")
            context = {
                "headline": now.headline(dues, vms=known, is_filtered=bool(wanted)),
                "is_empty": not (counts or shown),
                "tiles": now.tiles(
                    rows.count_due(store, wanted.only("type", "source", *rows.OF_PLACE)),
                    rows.count_vms(store, of_place),
                    wanted,
                ),
                "timeline": now.timeline(shown, at, window),
                "windows": now.WINDOWS,
                "rows": shown[page.first : page.last],
                "paging": page,
                "ended": rows.ended_events(store, at - HOUR, wanted, limit=50),
                "seen": rows.count_seen(store, shown[page.first : page.last]),
                "vms": known,
                "unwatched": rows.vms(
                    store, of_place.of_vms() & rows.NOT_WATCHED, more="ORDER BY alive_at DESC LIMIT 11"
                ),
                **self._filters(store, wanted, "/", [one.event_type for one in shown], window=window),
                **self._base(store, at),
            }
        return self._page(request, "now.html", context)

    def _fleet(self, request: Request) -> Response:
        """Show every VM."""
        at, wanted = self.clock.wall(), _filter(request)
        is_table = request.query_params.get("view") == "table"
        with self.store.reading() as store:
            shown = rows.vms(store, wanted)
            page = _page_of(request, len(shown))
            counts = rows.count_vms(store)
            whole = rows.vms(store) if wanted else shown
            context = {
                "groups": fleet.groups(shown),
                "known": sum(count for watch, _, count in counts if watch != "unknown"),
                "figures": fleet.count_states(whole),
                "waiting": sum(vm.waiting for vm in whole),
                "missing": sum(vm.missing for vm in whole),
                "states": (*fleet.STATES, "unwatched"),
                "is_table": is_table,
                "table": shown[page.first : page.last],
                "paging": page,
                "silent_minutes": round(SILENT_SECONDS / 60),
                **self._filters(store, wanted, "/fleet", [], view="table" if is_table else ""),
                **self._base(store, at),
            }
        return self._page(request, "fleet.html", context)

    def _event(self, request: Request) -> Response:
        """Show the story of one event."""
        at, person = self.clock.wall(), request.state.person
        session = request.cookies.get(COOKIE, "")
        cookie = new_session() if person.is_approver and not session else ""
        with self.store.reading() as store:
            event = self._find(store, request)
            reports, vms = rows.reports_of(store, event.key), rows.vms_of(store, event)
            base = {**self._base(store, at), **self._filters(store, EVERY, "/", [])}
        seen = story.witnesses(event, reports, vms)
        sent = request.query_params.get("sent", "")
        context = {
            **base,
            "event": event,
            "notice": story.notice_text(event),
            "steps": story.story(event, reports, vms, at),
            "expected": [one for one in seen if one.is_expected],
            "others": [one for one in seen if not one.is_expected],
            "raw": [_raw(report) for report in reports[:MAX_RAW]],
            "total": len(reports),
            "can_approve": self.approvals is not None,
            "form": self.approvals and self.approvals.form(event, vms, person, session or cookie),
            "sent": sent if _COMMAND_ID.fullmatch(sent) else "",
            "receipts": {one.event.get("causationid") for one in reports if one.kind.startswith("approval.")},
        }
        response = self._page(request, "event.html", context)
        if cookie:
            response.set_cookie(
                COOKIE, cookie, max_age=COOKIE_SECONDS, secure=True, httponly=True, samesite="strict"
            )
        return response

    def _history(self, request: Request) -> Response:
        """Show the figures of the last days."""
        at, wanted, days = self.clock.wall(), _filter(request), _days(request)
        with self.store.reading() as store:
            found = history.read_history(store, days, at, wanted)
            page = _page_of(request, found.total)
            missing = wanted.of_vms() & rows.Where("missing > 0", ())
            context = {
                "history": found,
                "ends": history.ENDS,
                "gaps": rows.vms(store, missing, more="ORDER BY missing DESC LIMIT 50"),
                "rows": [
                    *rows.events_since(store, at - days * DAY, wanted, limit=PAGE_ROWS, offset=page.first)
                ],
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
        wanted = _checked(request, api.FILTERS)
        with self.store.reading() as store:
            return _json(api.EventList(events=rows.open_events(store, wanted)))

    def _api_event(self, request: Request) -> Response:
        _checked(request, api.NONE)
        with self.store.reading() as store:
            event = self._find(store, request)
            return _json(api.details(event, rows.reports_of(store, event.key)))

    def _api_vms(self, request: Request) -> Response:
        wanted = _checked(request, api.OF_VMS)
        with self.store.reading() as store:
            return _json(api.VmList(vms=rows.vms(store, wanted)))

    def _api_history(self, request: Request) -> Response:
        wanted = _checked(request, api.PERIOD)
        with self.store.reading() as store:
            return _json(history.read_history(store, _days(request), self.clock.wall(), wanted))

    def _metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), media_type=content_type)

    async def _stream(self, _: Request) -> Response:
        if self.live.is_full:
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages.")
        return StreamingResponse(self.live.stream(), media_type="text/event-stream")

    async def _approve(self, request: Request) -> Response:
        """Send an approval, if the POST comes from the form of a page of this console."""
        if request.headers.get("origin") != self.settings.public_url:
            raise HTTPException(HTTPStatus.FORBIDDEN, "The request does not come from this console.")
        try:
            body = await read_body(request, max_bytes=_FORM_BYTES, limit_seconds=BODY_SECONDS)
            given = dict(parse_qsl((body or b"").decode("utf-8", "replace"), max_num_fields=_FORM_FIELDS))
        except (TimeoutError, ValueError):
            given = {}
        if not given:
            raise HTTPException(HTTPStatus.BAD_REQUEST, "The form did not arrive.")
        try:
            command_id = await run_in_threadpool(self._send_approval, request, given)
        except NotApproved as refused:
            raise HTTPException(HTTPStatus.FORBIDDEN, f"Not approved. {refused}") from None
        except BridgeError as error:
            log.error("an approval cannot be sent: %s", error)  # noqa: TRY400 - the text is enough
            text = f"The command could not be sent: {error}"
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, text) from None
        place = f"/event/{quote(request.path_params['event_id'], safe='')}?sent={command_id}"
        return RedirectResponse(place, HTTPStatus.SEE_OTHER)

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
            raise HTTPException(HTTPStatus.NOT_FOUND, "There is no such event.")
        return event

    def _base(self, store: sqlite3.Connection, at: float) -> dict[str, Any]:
        """Return what every page has: the banners, and the time."""
        first, last = rows.received_from_to(store)
        return {
            "now": at,
            "damaged": rows.damage_note(store),
            # The bus gave earlier ones to a store that is gone.
            "new_since": first if self.inputs.bus and first is not None and at - first < DAY else None,
            "last_received_at": last,
            "is_quiet": last is not None and at - last > SILENT_SECONDS,
            "input_error": sanitize(self.input_error()),
        }

    def _filters(
        self, store: sqlite3.Connection, wanted: Filter, path: str, types: list[str], **kept: str
    ) -> dict[str, Any]:
        """Return what the filters offer, and a chip for each that is set."""
        groups, subscriptions = rows.groups_of(store)
        others = sorted({*types} - {*KNOWN_VALUES["EventType"], ""})
        return {
            "filter": wanted,
            "path": path,
            "kept": {name: value for name, value in kept.items() if value not in ("", now.DEFAULT_WINDOW)},
            "types": [*KNOWN_VALUES["EventType"], *others],
            "sources": KNOWN_VALUES["EventSource"],
            "group_names": groups,
            "subscriptions": subscriptions,
            "tags": rows.tags_of(store),
            "chips": [
                (
                    _LABELS.get(name, name.capitalize()),
                    value,
                    f"{path}{wanted.query(without=(name, value), **kept)}",
                )
                for name, value in wanted.parts()
            ],
        }

    def _page(
        self, request: Request, template: str, context: Mapping[str, Any], status: int = 200
    ) -> Response:
        common = {
            "person": request.state.person,
            "page": template.partition(".")[0],
            "version": self.version(),
            "inputs": self.inputs,
        }
        return _templates().TemplateResponse(request, template, {**common, **context}, status)

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
        base = {
            "damaged": None,
            "new_since": None,
            "is_quiet": False,
            "input_error": "",
            "now": self.clock.wall(),
        }
        context = {**base, "code": int(status), "title": status.phrase, "text": text}
        response = self._page(request, "error.html", context, status)
        response.headers.update(headers or {})
        return response


@dataclass(frozen=True)
class Paging:
    """A page of a table: its rows are from `first` to before `last` of `total`."""

    number: int
    total: int

    @property
    def first(self) -> int:
        """The place of its first row."""
        return (self.number - 1) * PAGE_ROWS

    @property
    def last(self) -> int:
        """The place after its last row."""
        return min(self.total, self.number * PAGE_ROWS)


def _page_of(request: Request, total: int) -> Paging:
    given = request.query_params.get("page", "")
    wanted = int(given) if given.isdecimal() and len(given) < 7 else 1  # noqa: PLR2004 - a million pages
    return Paging(max(1, min(wanted, -(-total // PAGE_ROWS))), total)


def _filter(request: Request) -> Filter:
    return read_filter(request.query_params.multi_items())


def _checked(request: Request, parameters: api.Parameters) -> Filter:
    if fault := api.query_fault(request.query_params.multi_items(), parameters):
        raise HTTPException(HTTPStatus.BAD_REQUEST, fault)
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
def _templates() -> Jinja2Templates:
    environment = Environment(
        loader=PackageLoader("bridge.console"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "text": sanitize,
        "iso": lambda at: iso_utc(datetime.fromtimestamp(at, UTC)),
        "clock": lambda at: f"{datetime.fromtimestamp(at, UTC):%d %b %H:%M:%S} UTC",
        "duration": format_duration,
        "relative": lambda at, at_now: format_relative(at - at_now, exact=at > at_now),
        "css": now.css_class,
        "cell": fleet.cell,
        "describe": fleet.describe,
        "names": now.vm_names,
        "impact": story.impact_text,
        "segment": lambda value: quote(value, safe=""),
    }
    environment.globals |= {"static_url": static_url, "app_version": __version__}
    return Jinja2Templates(env=environment)


def _raw(report: ReportRow) -> tuple[str, float, str]:
    """Return a CloudEvent's kind, time and indented text, in which nothing from outside reorders or hides text."""
    text = json.dumps(report.event, indent=2, ensure_ascii=False)
    return report.kind, report.at, "\n".join(map(escape, text.split("\n")))
