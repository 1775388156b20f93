"""The web application: what each address answers, and what every answer has."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
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
from bridge.console.api import (
    BASE,
    FILTERS,
    NONE,
    PERIOD,
    RETRY_AFTER,
    Parameters,
    openapi,
    query_fault,
    write,
)
from bridge.console.approve import NotApproved, new_session, read_session
from bridge.console.ingest import BODY_SECONDS, Ingest, read_body
from bridge.console.limits import Limits, TooManyRequests
from bridge.console.live import Live
from bridge.console.pages import Pages, Request, static_file, static_url
from bridge.errors import BridgeError
from bridge.runtime.threads import stalled_threads
from bridge.runtime.time import Clock, RepeatLimit
from bridge.service.status import find_unready

log = logging.getLogger(__name__)

_FORM_BYTES = 16 * 1024
_FORM_FIELDS = 10
_BUFFER_BYTES = 64 * 1024  # what a connection takes without waiting for the client
Handler = Callable[[HttpRequest], Awaitable[ASGIApp]]
T = TypeVar("T")
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
        registry: CollectorRegistry,
        status: Callable[[], dict[str, Any]],
        clock: Clock,
    ) -> None:
        """Prepare the application.

        Args:
            settings: who may look.
            pages: renders.
            live: notifies open pages.
            ingest: takes events.
            registry: has the metrics.
            status: returns what the status file shows.
            clock: for limits.
        """
        self._settings = settings
        self._pages = pages
        self._live = live
        self._ingest = ingest
        self._registry = registry
        self._status = status
        self._clock = clock
        self._limits = Limits(clock)
        self._log_limit = RepeatLimit(clock)

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
            Route("/livez", _health(stalled_threads), methods=get),
            Route("/readyz", _health(lambda: find_unready(self._status(), self._clock.now())), methods=get),
            Route("/live", self._viewers_only(self._stream, kind="stream"), methods=get),
            Route("/ingest", self._ingest.post, methods=["POST"]),
            Route("/ingest", self._ingest.options, methods=["OPTIONS"]),
            *(Route(static_url(name), _static(name), methods=get) for name in pages.STATIC),
        ]
        errors: dict[Any, Any] = {404: self._unknown, 405: _not_allowed, 500: _failed}
        application = Starlette(routes=routes, lifespan=lifespan, exception_handlers=errors)
        return _with_headers(application, self._settings)

    def _page(self, render: Callable[[Request, HttpRequest], str | None]) -> Handler:
        """Return a handler that renders a page for everybody who may look."""

        async def handle(http: HttpRequest) -> Response:
            session, cookie = read_session(http.headers.get("cookie", "")), ""
            if not session and http.state.person.is_approver:
                session, cookie = new_session()
            request = Request(query=http.query_params, person=http.state.person, session=session)
            html = await self._run(http, lambda: render(request, http))
            self._live.page_seconds = http.state.client.last_seconds
            if html is None:
                return self._not_found(http)
            return Response(html, media_type="text/html", headers={"set-cookie": cookie} if cookie else None)

        return self._viewers_only(handle)

    def _api(self, find: Callable[..., BaseModel | None], parameters: Parameters) -> Handler:
        """Return a handler that answers with JSON."""

        async def handle(http: HttpRequest) -> Response:
            if fault := query_fault(http.query_params.multi_items(), parameters):
                return self._error(http, HTTPStatus.BAD_REQUEST, fault)
            request = Request(query=http.query_params, person=http.state.person)

            def find_and_write() -> str | None:
                found = find(request, *http.path_params.values())
                return write(found) if found else None

            body = await self._run(http, find_and_write)
            if body is None:
                return self._error(http, HTTPStatus.NOT_FOUND, "There is no such event.")
            return Response(body, media_type="application/json")

        return self._viewers_only(handle)

    async def _metrics(self, http: HttpRequest) -> ASGIApp:
        """Answer a viewer, or whoever shows the token of the senders: a scraper cannot sign in."""

        async def answer(_: HttpRequest) -> Response:
            encode, content_type = choose_encoder(http.headers.get("accept", ""))
            return Response(await self._run(http, lambda: encode(self._registry)), media_type=content_type)

        if not (self._settings.ingest.bearer_token and "authorization" in http.headers):
            return await self._viewers_only(answer)(http)
        if fault := sender_fault(self._settings.ingest, http.headers, b"", self._clock.now()):
            return PlainTextResponse(f"{fault}\n", HTTPStatus.UNAUTHORIZED)
        http.state.person = None
        return await self._limited(http, "sender", answer)

    def _viewers_only(self, handle: Handler, *, kind: str = "page") -> Handler:
        """Return a handler that answers those who may look; each kind of request has limits of its own."""

        async def guarded(http: HttpRequest) -> ASGIApp:
            person = http.state.person = sign_in(self._settings, _headers(http))
            peer = http.client.host if http.client else ""
            name = person.name if person and person.name else f"at {peer}"
            return await self._limited(http, f"{kind} {name}", handle if _may_look(person) else self._refuse)

        return guarded

    async def _limited(self, http: HttpRequest, client: str, handle: Handler) -> ASGIApp:
        """Answer if the client has not used more than it may; the request counts until the answer is sent."""
        with ExitStack() as stack:
            try:
                http.state.client = stack.enter_context(self._limits.admit(client))
                answer = await handle(http)
            except TooManyRequests as error:
                headers = {RETRY_AFTER: str(error.retry_after_seconds)}
                return _plain_error(http, HTTPStatus.TOO_MANY_REQUESTS, str(error), headers)
            except sqlite3.Error as error:
                if self._log_limit.is_due():
                    log.warning("the store cannot be read: %s", error)
                text = "The store cannot be read at the moment. Events are not lost: their senders retry."
                return self._error(http, HTTPStatus.SERVICE_UNAVAILABLE, text)
            return _then(answer, stack.pop_all())

    async def _run(self, http: HttpRequest, work: Callable[[], T]) -> T:
        """Do what takes time when it is the client's turn."""
        return await self._limits.run(http.state.client, work)

    async def _refuse(self, http: HttpRequest) -> Response:
        if http.state.person is None:
            text = "You are not signed in; reload the page."
            return self._error(http, HTTPStatus.UNAUTHORIZED, text)
        text = "You are signed in, but in none of the groups that may look."
        return self._error(http, HTTPStatus.FORBIDDEN, text)

    async def _unknown(self, http: HttpRequest, _: Exception) -> ASGIApp:
        async def answer(_: HttpRequest) -> Response:
            return self._not_found(http)

        return await self._viewers_only(answer)(http)

    def _event(self, request: Request, http: HttpRequest) -> str | None:
        return self._pages.event(request, http.path_params["event_id"])

    async def _approve(self, http: HttpRequest) -> Response:
        """Send an approval, if the POST comes from the form of a page of this console."""
        person, event_id = http.state.person, http.path_params["event_id"]
        if http.headers.get("origin") != self._settings.public_url:
            return self._error(http, HTTPStatus.FORBIDDEN, "The request does not come from this console.")
        try:
            body = await read_body(http, max_bytes=_FORM_BYTES, limit_seconds=BODY_SECONDS)
        except TimeoutError:
            body = None
        if body is None:
            return self._error(http, HTTPStatus.BAD_REQUEST, "The form did not arrive.")
        given = dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=_FORM_FIELDS))
        session = read_session(http.headers.get("cookie", ""))
        request = Request(query={}, person=person, session=session)
        try:
            command_id = await run_in_threadpool(self._pages.approve, request, event_id, given)
        except NotApproved as refused:
            return self._error(http, HTTPStatus.FORBIDDEN, f"Not approved. {refused}")
        except BridgeError as error:
            log.error("an approval cannot be sent: %s", error)  # noqa: TRY400 - the text is enough
            text = f"The command could not be sent: {error}"
            return self._error(http, HTTPStatus.SERVICE_UNAVAILABLE, text)
        if command_id is None:
            return self._not_found(http)
        location = f"/event/{quote(event_id, safe='')}?sent={command_id}"
        return Response(status_code=HTTPStatus.SEE_OTHER, headers={"location": location})

    async def _jsonl(self, http: HttpRequest) -> Response:
        body = await self._run(http, lambda: self._pages.jsonl(http.path_params["event_id"]))
        if not body:
            return self._not_found(http)
        headers = {"content-disposition": 'attachment; filename="events.jsonl"'}
        return Response(body, media_type="application/jsonl", headers=headers)

    async def _csv(self, http: HttpRequest) -> Response:
        request = Request(query=http.query_params, person=http.state.person)
        name, text = await self._run(http, lambda: self._pages.csv(request))
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(text, media_type="text/csv", headers=headers)

    async def _stream(self, http: HttpRequest) -> Response:
        if self._live.is_full:
            return self._error(http, HTTPStatus.SERVICE_UNAVAILABLE, "Too many open pages.")
        return StreamingResponse(self._live.stream(), media_type="text/event-stream")

    def _not_found(self, http: HttpRequest) -> Response:
        return self._error(http, HTTPStatus.NOT_FOUND, "There is no such page or event.")

    def _error(self, http: HttpRequest, status: HTTPStatus, text: str) -> Response:
        if http.url.path.startswith(BASE):
            return _plain_error(http, status, text)
        nobody = Person(name="", is_viewer=False, is_approver=False)
        request = Request(query=http.query_params, person=http.state.person or nobody)
        html = self._pages.error(request, status, status.phrase, text)
        return Response(html, status_code=status, media_type="text/html")


def _may_look(person: Person | None) -> bool:
    return person is not None and person.is_viewer


def _health(find_faults: Callable[[], list[str]]) -> Handler:
    """Return a handler for everybody: it says whether the console works, and no more."""

    async def handle(_: HttpRequest) -> Response:
        is_fine = not find_faults()
        status = HTTPStatus.OK if is_fine else HTTPStatus.SERVICE_UNAVAILABLE
        return JSONResponse({"ok": is_fine, "role": "console"}, status)

    return handle


def _then(answer: ASGIApp, stack: ExitStack) -> ASGIApp:
    """Return an answer that closes a stack once it is sent, or cannot be sent."""

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        with stack:
            await answer(scope, receive, send)

    return send_all


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

        async def send_whole(message: Message) -> None:
            if len(message.get("body", b"")) > _BUFFER_BYTES:
                # A large answer is complete once the client has read it, not before.
                await send({**message, "more_body": True})
                message = {**message, "body": b""}
            await send(message)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *(one for one in more if one[0] not in given)]
            await send_whole(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        answer = application
        if fault := host_fault(settings, headers.get(b"host", "")):
            answer = _plain_error(HttpRequest(scope), HTTPStatus.MISDIRECTED_REQUEST, fault)
        elif b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy may see another end of this request, and so take a part of it for the next one (RFC 9112, 6.1).
            text = "expected one of Content-Length and Transfer-Encoding"
            answer = _plain_error(HttpRequest(scope), HTTPStatus.BAD_REQUEST, text, {"connection": "close"})
        await answer(scope, receive, send_with_headers)

    return wrapped
