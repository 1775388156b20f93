"""The web application: its routes, its errors, and what is no page."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

from anyio.to_thread import current_default_thread_limiter
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from bridge.console import api, forms, pages
from bridge.console.access import Guard
from bridge.console.base import Web, static_file, static_url, to_page
from bridge.console.live import Live
from bridge.process.status import find_unready
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import RepeatLimit

log = logging.getLogger(__name__)

STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
_THREADS = 8  # more would only compete for the interpreter


def application(web: Web) -> ASGIApp:
    """Return the application with all its routes."""
    event, root = "/event/{event_id}", api.BASE
    shown = {
        "/": pages.show_now,
        "/fleet": pages.show_fleet,
        "/history": pages.show_history,
        "/history.csv": pages.send_csv,
        "/away": pages.show_away,
        event: pages.show_event,
        f"{event}/events.jsonl": pages.send_jsonl,
        f"{root}/events": api.list_events,
        f"{root}/events/{{event_id}}": api.show_event,
        f"{root}/vms": api.list_vms,
        f"{root}/history": api.show_history,
        "/metrics": _metrics,
        "/live": _stream,
    }
    put_away = {
        "/away/undo": forms.back,
        "/away/wave": forms.wave_away,
        "/fleet/forget": forms.vms_away,
        f"{event}/dismiss": forms.event_away,
    }
    orders = (("expected", api.expect, "PUT"), ("forget", api.put_away, "POST"))
    routes = [
        *(Route(path, partial(show, web)) for path, show in shown.items()),
        *(
            Route(path, partial(forms.put_away, web, read), methods=["POST"])
            for path, read in put_away.items()
        ),
        Route(f"{event}/approve", partial(forms.approve, web), methods=["POST"]),
        # After a sign-in, a form that was sent with an expired session comes back as GET.
        *(Route(path, partial(to_page, unsent="1")) for path in (*put_away, f"{event}/approve")),
        *(
            Route(f"{root}/{name}", partial(api.take_order, web, read), methods=[method])
            for name, read, method in orders
        ),
        Route(f"{root}/openapi.json", lambda _: Response(api.DOCUMENT, media_type="application/json")),
        Route("/livez", lambda _: _health(stalled_threads())),
        Route("/readyz", lambda _: _health(find_unready(web.status(), web.clock.now()))),
        Route("/ingest", web.ingest.post, methods=["POST"]),
        Route("/ingest", web.ingest.options, methods=["OPTIONS"]),
        *(Route(static_url(name), partial(_static, name)) for name in STATIC),
    ]
    failed = partial(_failed, web)
    found = Starlette(
        routes=routes,
        lifespan=partial(_lifespan, web),
        exception_handlers={
            HTTPException: failed,
            sqlite3.Error: partial(_unreadable, web, RepeatLimit(web.clock)),
            500: failed,
        },
    )
    found.router.redirect_slashes = False
    refuse = partial(_error, web)
    guard = Guard(
        GZipMiddleware(found), settings=web.settings, clock=web.clock, refuse=refuse, registry=web.registry
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Before the store is read: an open page never fetches a version again that it seems to show.
        scope.setdefault("state", {})["version"] = web.ingest.writer.version
        await guard(scope, receive, send)

    return answer


@asynccontextmanager
async def _lifespan(web: Web, _: Starlette) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = _THREADS
    web.live.start()
    yield


def _metrics(web: Web, request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(web.registry), media_type=content_type)


async def _stream(web: Web, _: Request) -> Response:
    if web.live.is_full:
        raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages.")
    return _LiveResponse(web.live)


async def _failed(web: Web, request: Request, error: Exception) -> Response:
    status, text, headers = HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error; the log says more", None
    if isinstance(error, HTTPException):
        status, text, headers = HTTPStatus(error.status_code), error.detail, error.headers
        if status == HTTPStatus.NOT_FOUND and text == status.phrase:
            text = "There is no such page or event."
    return _error(web, request, status, text, headers)


def _error(
    web: Web, request: Request, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error: JSON for the API, a page for people, else a line of text."""
    if request.url.path.startswith(api.BASE):
        return Response(api.write(api.Error(error=text)), status, headers, "application/json")
    if getattr(request.state, "person", None) is None:
        return PlainTextResponse(f"{text}\n", status, headers)
    context = {"now": web.clock.wall(), "code": int(status), "title": status.phrase, "text": text}
    response = web.page(request, "error.html", context, status)
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


def _health(faults: list[str]) -> Response:
    """Answer everybody: it says whether the console works, and no more."""
    status = HTTPStatus.SERVICE_UNAVAILABLE if faults else HTTPStatus.OK
    return JSONResponse({"ok": not faults, "role": "console"}, status)


def _unreadable(web: Web, limit: RepeatLimit, request: Request, error: Exception) -> Response:
    if limit.is_due():
        log.warning("the store cannot be read: %s", error)
    text = "The store cannot be read at the moment. Events are not lost: their senders retry."
    return _error(web, request, HTTPStatus.SERVICE_UNAVAILABLE, text)


def _static(name: str, _: Request) -> Response:
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(static_file(name), media_type=STATIC[name], headers=headers)
