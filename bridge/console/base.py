"""What the endpoints of the web application need, what they read of a request, and what every page has."""

from __future__ import annotations

import html
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from bridge import __version__
from bridge.config.console import ConsoleSettings
from bridge.console import fleet, forget, history, now, rows, story
from bridge.console.approve import COOKIE, COOKIE_SECONDS, Approvals, Sessions, new_session
from bridge.console.ingest import Ingest
from bridge.console.live import Live, changed_parts
from bridge.console.rows import DAY, EventRow, Filter, read_filter
from bridge.console.state import DUES
from bridge.console.store import Store
from bridge.contract.status import Status
from bridge.contract.types import KNOWN_VALUES
from bridge.formats.text import format_duration, format_relative
from bridge.runtime.text import sanitize
from bridge.runtime.time import Clock, iso_utc

PAGE_ROWS = 100
PAGE_CELLS = 1000  # of Fleet; also the rows of an answer of the API
MAX_TAGS = 200  # to choose from
SILENT_SECONDS = 3900.0  # a heartbeat comes every hour; five minutes more are for the way


@dataclass(frozen=True, kw_only=True)
class Web:
    """What the endpoints need, and what every page has.

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

    def find(self, store: sqlite3.Connection, request: Request) -> EventRow:
        """Return the event that a path names.

        Raises:
            HTTPException: there is none.
        """
        event = rows.find_event(store, request.path_params["event_id"])
        if event is None:
            text = "There is no such event here yet. If it is new, this page shows it as soon as it arrives."
            raise HTTPException(HTTPStatus.NOT_FOUND, text)
        return event

    def page(
        self, request: Request, template: str, context: Mapping[str, Any], status: int = 200
    ) -> Response:
        """Return a page, or the parts of it that an open one does not show."""
        common = {
            "person": request.state.person,
            "page": template.partition(".")[0],
            "version": request.state.version,
            "mine": filter_of(request).only(*rows.OF_PLACE).query(),
            "settings": self.settings,
            "is_unsent": "unsent" in request.query_params,
            "ingest_url": f"{self.settings.public_url or self.address}/ingest",
        }
        text = _templates().get_template(template).render(common, **context)
        response = HTMLResponse(changed_parts(text, request.headers.get("x-shown")), status)
        if cookie := getattr(request.state, "session", ""):
            response.set_cookie(
                COOKIE, cookie, max_age=COOKIE_SECONDS, secure=True, httponly=True, samesite="strict"
            )
        return response

    def base(self, store: sqlite3.Connection, at: float) -> dict[str, Any]:
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

    def filters(
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
            "unmatched": rows.unknown_values(wanted, {**known, "tag": tags, "due": (*DUES, "ended")}),
        }


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


async def to_page(request: Request, **more: str) -> Response:
    """Lead from the address of a form's action to its page."""
    address = f"{quote(request.url.path.rpartition('/')[0])}{filter_of(request).query(without=None, **more)}"
    return RedirectResponse(address, HTTPStatus.SEE_OTHER)


def session_of(request: Request) -> str:
    """Return an approver's session, a new one if there is none."""
    session: str = request.cookies.get(COOKIE, "") or getattr(request.state, "session", "")
    if request.state.person.is_approver and not session:
        session = request.state.session = new_session()
    return session


def page_of(request: Request, total: int, size: int = PAGE_ROWS) -> Paging:
    """Return the page of a table that is asked for."""
    given = request.query_params.get("page", "")
    wanted = int(given) if given.isdecimal() and len(given) < 7 else 1  # noqa: PLR2004 - a million pages
    return Paging(max(1, min(wanted, -(-total // size))), total, size)


def filter_of(request: Request) -> Filter:
    """Return the filter of a request."""
    return read_filter(request.query_params.multi_items())


def days_of(request: Request) -> int:
    """Return of how many days the history is asked for."""
    given = request.query_params.get("days", "")
    return int(given) if given in map(str, history.PERIODS) else history.PERIODS[0]


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
        "code": lambda text: Markup(html.escape(text, quote=False)),  # noqa: S704 - outside of an attribute
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
