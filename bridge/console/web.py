"""The web application: what each address answers, and what every answer has."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from bridge.config.console import ConsoleSettings
from bridge.console import pages
from bridge.console.access import Person, host_fault, sender_fault, sign_in
from bridge.console.api import BASE, FILTERS, NONE, PERIOD, Parameters, openapi, query_fault, write
from bridge.console.approve import NotApproved, new_session, read_session
from bridge.console.ingest import BODY_SECONDS, Ingest, read_body
from bridge.console.live import Live
from bridge.console.pages import Pages, Request, static_file, static_url
from bridge.errors import BridgeError
from bridge.runtime.threads import stalled_threads

log = logging.getLogger(__name__)

_FORM_BYTES = 16 * 1024
_FORM_FIELDS = 10
Handler = Callable[[HttpRequest], Awaitable[Response]]
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Web:
    """The handlers of the pages."""

    def __init__(
        self,
        settings: ConsoleSettings,
        *,
        pages: Pages,
        live: Live,
        ingest: Ingest,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        """Prepare the application.

        Args:
            settings: who may look.
            pages: renders.
            live: notifies open pages.
            ingest: takes events.
            status: returns what the status file shows.
        """
        self._settings = settings
        self._pages = pages
        self._live = live
        self._ingest = ingest
        self._status = status

    def app(self, lifespan: Lifespan[Starlette]) -> ASGIApp:
        """Return the application with all its routes."""
        page, get = self._page, ["GET"]
        routes = [
            Route("/", page(lambda request, _: self._pages.now(request)), methods=get),
            Route("/fleet", page(lambda request, _: self._pages.fleet(request)), methods=get),
            Route("/history", page(lambda request, _: self._pages.history(request)), methods=get),
            Route("/history.csv", self._viewers_only(self._csv), methods=get),
            Route("/event/{event_id}", page(self._event), methods=get),
            Route("/event/{event_id}/approve", self._viewers_only(self._approve), methods=["POST"]),
            Route("/event/{event_id}/events.jsonl", self._viewers_only(self._jsonl), methods=get),
            Route(f"{BASE}/events", self._api(self._pages.api_events, FILTERS), methods=get),
            Route(f"{BASE}/events/{{event_id}}", self._api(self._pages.api_event, NONE), methods=get),
            Route(f"{BASE}/vms", self._api(self._pages.api_vms, FILTERS), methods=get),
            Route(f"{BASE}/history", self._api(self._pages.api_history, PERIOD), methods=get),
            Route(f"{BASE}/openapi.json", self._viewers_only(_openapi), methods=get),
            Route("/metrics", self._metrics, methods=get),
            Route("/livez", self._health(stalled_threads), methods=get),
            Route("/readyz", self._health(self._find_unready), methods=get),
            Route("/live", self._viewers_only(self._stream), methods=get),
            Route("/ingest", self._ingest.post, methods=["POST"]),
            Route("/ingest", self._ingest.options, methods=["OPTIONS"]),
            *(Route(static_url(name), _static(name), methods=get) for name in pages.STATIC),
        ]
        application = Starlette(
            routes=routes,
            lifespan=lifespan,
            exception_handlers={404: self._not_found, 405: _not_allowed, 500: _failed},
        )
        return _with_headers(application, self._settings)

    def _page(self, render: Callable[[Request, HttpRequest], str | None]) -> Handler:
        """Return a handler that renders a page for everybody who may look."""

        async def handle(http: HttpRequest) -> Response:
            session, cookie = read_session(http.headers.get("cookie", "")), ""
            if not session and http.state.person.is_approver:
                session, cookie = new_session()
            request = Request(query=http.query_params, person=http.state.person, session=session)
            html = await run_in_threadpool(render, request, http)
            if html is None:
                return await self._not_found(http, None)
            return Response(html, media_type="text/html", headers={"set-cookie": cookie} if cookie else None)

        return self._viewers_only(handle)

    def _api(self, find: Callable[..., BaseModel | None], parameters: Parameters) -> Handler:
        """Return a handler that answers with JSON."""

        async def handle(http: HttpRequest) -> Response:
            if fault := query_fault(http.query_params.multi_items(), parameters):
                return self._error(http, None, HTTPStatus.BAD_REQUEST, fault)
            request = Request(query=http.query_params, person=http.state.person)
            found = await run_in_threadpool(find, request, *http.path_params.values())
            if found is None:
                return self._error(http, None, HTTPStatus.NOT_FOUND, "There is no such event.")
            return Response(write(found), media_type="application/json")

        return self._viewers_only(handle)

    async def _metrics(self, http: HttpRequest) -> Response:
        """Answer a viewer, or whoever shows the token of the senders: a scraper cannot sign in."""

        async def answer(_: HttpRequest) -> Response:
            accept = http.headers.get("accept", "")
            content_type, text = await run_in_threadpool(self._pages.metrics, accept, self._status())
            return Response(text, media_type=content_type)

        token = self._settings.ingest.bearer_token
        if token and "authorization" in http.headers:
            fault = sender_fault(self._settings.ingest, http.headers, b"", datetime.now(UTC))
            return PlainTextResponse(f"{fault}\n", HTTPStatus.UNAUTHORIZED) if fault else await answer(http)
        return await self._viewers_only(answer)(http)

    def _health(self, find_faults: Callable[[], list[str]]) -> Handler:
        """Return a handler for everybody: it says whether the console works, and no more."""

        async def handle(_: HttpRequest) -> Response:
            is_fine = not find_faults()
            status = HTTPStatus.OK if is_fine else HTTPStatus.SERVICE_UNAVAILABLE
            return JSONResponse({"ok": is_fine, "role": "console"}, status)

        return handle

    def _find_unready(self) -> list[str]:
        status = self._status()
        return [
            error for error in (status["storage_error"], (status["bus"] or {}).get("last_error")) if error
        ]

    def _viewers_only(self, handle: Handler) -> Handler:
        async def guarded(http: HttpRequest) -> Response:
            person = sign_in(self._settings, _headers(http))
            if person is None:
                return self._error(
                    http, None, HTTPStatus.UNAUTHORIZED, "You are not signed in; reload the page."
                )
            if not person.is_viewer:
                text = "You are signed in, but in none of the groups that may look."
                return self._error(http, person, HTTPStatus.FORBIDDEN, text)
            http.state.person = person
            try:
                return await handle(http)
            except sqlite3.Error as error:
                log.warning("the store cannot be read: %s", error)
                text = "The store cannot be read at the moment. Events are not lost: their senders retry."
                return self._error(http, person, HTTPStatus.SERVICE_UNAVAILABLE, text)

        return guarded

    def _event(self, request: Request, http: HttpRequest) -> str | None:
        return self._pages.event(request, http.path_params["event_id"])

    async def _approve(self, http: HttpRequest) -> Response:
        """Send an approval, if the POST comes from the form of a page of this console."""
        person, event_id = http.state.person, http.path_params["event_id"]
        if http.headers.get("origin") != self._settings.public_url:
            return self._error(
                http, person, HTTPStatus.FORBIDDEN, "The request does not come from this console."
            )
        try:
            body = await read_body(http, max_bytes=_FORM_BYTES, limit_seconds=BODY_SECONDS)
        except TimeoutError:
            body = None
        if body is None:
            return self._error(http, person, HTTPStatus.BAD_REQUEST, "The form did not arrive.")
        given = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=_FORM_FIELDS))
        session = read_session(http.headers.get("cookie", ""))
        request = Request(query={}, person=person, session=session)
        try:
            command_id = await run_in_threadpool(self._pages.approve, request, event_id, given)
        except NotApproved as refused:
            return self._error(http, person, HTTPStatus.FORBIDDEN, f"Not approved. {refused}")
        except BridgeError as error:
            log.error("an approval cannot be sent: %s", error)  # noqa: TRY400 - the text is enough
            text = f"The command could not be sent: {error}"
            return self._error(http, person, HTTPStatus.SERVICE_UNAVAILABLE, text)
        if command_id is None:
            return await self._not_found(http, None)
        location = f"/event/{quote(event_id, safe='')}?sent={command_id}"
        return Response(status_code=HTTPStatus.SEE_OTHER, headers={"location": location})

    async def _jsonl(self, http: HttpRequest) -> Response:
        body = await run_in_threadpool(self._pages.jsonl, http.path_params["event_id"])
        if not body:
            return await self._not_found(http, None)
        headers = {"content-disposition": 'attachment; filename="events.jsonl"'}
        return Response(body, media_type="application/jsonl", headers=headers)

    async def _csv(self, http: HttpRequest) -> Response:
        request = Request(query=http.query_params, person=http.state.person)
        name, text = await run_in_threadpool(self._pages.csv, request)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type="text/csv", headers=headers)

    async def _stream(self, http: HttpRequest) -> Response:
        if self._live.is_full:
            return self._error(
                http, http.state.person, HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages."
            )
        return StreamingResponse(self._live.stream(), media_type="text/event-stream")

    async def _not_found(self, http: HttpRequest, _: Any) -> Response:
        person = sign_in(self._settings, _headers(http))
        return self._error(http, person, HTTPStatus.NOT_FOUND, "There is no such page or event.")

    def _error(self, http: HttpRequest, person: Person | None, status: HTTPStatus, text: str) -> Response:
        if http.url.path.startswith(BASE):
            return _plain_error(http, status, text)
        nobody = Person(name="", is_viewer=False, is_approver=False)
        request = Request(query=http.query_params, person=person or nobody)
        html = self._pages.error(request, status, status.phrase, text)
        return Response(html, status_code=status, media_type="text/html")


async def _openapi(_: HttpRequest) -> Response:
    return JSONResponse(openapi())


def _headers(http: HttpRequest) -> list[tuple[str, str]]:
    return [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in http.headers.raw]


def _static(name: str) -> Handler:
    async def handle(_: HttpRequest) -> Response:
        headers = {"cache-control": "public, max-age=31536000, immutable"}
        return Response(static_file(name), media_type=pages.STATIC[name], headers=headers)

    return handle


async def _failed(http: HttpRequest, _: Exception) -> Response:
    return _plain_error(http, HTTPStatus.INTERNAL_SERVER_ERROR, "unexpected error; the log says more")


async def _not_allowed(http: HttpRequest, error: Any) -> Response:
    return _plain_error(http, HTTPStatus.METHOD_NOT_ALLOWED, "another method is expected", error.headers)


def _plain_error(
    http: HttpRequest, status: HTTPStatus, text: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error without a page: JSON for the API, else a line of text."""
    if http.url.path.startswith(BASE):
        return JSONResponse({"error": text}, status, headers)
    return PlainTextResponse(f"{text}\n", status, headers)


def _with_headers(application: ASGIApp, settings: ConsoleSettings) -> ASGIApp:
    """Add the headers that protect every answer, and refuse names of other machines."""

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(one for one in more if one[0] not in given)]
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if fault := host_fault(settings, host):
            refused = _plain_error(HttpRequest(scope), HTTPStatus.MISDIRECTED_REQUEST, fault)
            await refused(scope, receive, send_with_headers)
        else:
            await application(scope, receive, send_with_headers)

    return wrapped
