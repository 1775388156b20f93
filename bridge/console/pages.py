"""Render the pages: read the store, build what a page shows, fill its template."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel

from bridge import __version__
from bridge.console import api, fleet, history, now, queries, story
from bridge.console.access import Person
from bridge.console.approve import Approvals, NotApproved
from bridge.console.filters import Filter, choices, read_filter
from bridge.console.queries import DAY, Readers
from bridge.contract.types import KNOWN_VALUES
from bridge.events.envelope import decode_event
from bridge.formats.text import format_duration, format_relative, sanitize
from bridge.runtime.text import escape
from bridge.runtime.time import Clock, iso_utc

MAX_ROWS = 100
MAX_TABLE_VMS = 1000
MAX_RAW = 50
_KEPT_CELLS = 20_000
_COMMAND_ID = re.compile("[0-9a-f-]{36}")
ENDED_SECONDS = 3600.0  # how long Now shows an event after its end
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}


@lru_cache
def static_file(name: str) -> bytes:
    """Return a file that the pages load."""
    return files("bridge.console").joinpath("static", name).read_bytes()


@lru_cache
def static_url(name: str) -> str:
    """Return the address of a file, which changes with its content."""
    return f"/static/{sha256(static_file(name)).hexdigest()[:12]}/{name}"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a page depends on: its query, who looks, and the session that a form belongs to."""

    query: Mapping[str, str]
    person: Person
    session: str = ""


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


class Pages:
    """Renders pages, for any thread; every method may raise sqlite3.Error."""

    def __init__(
        self,
        readers: Readers,
        *,
        clock: Clock,
        approvals: Approvals | None = None,
        input_error: Callable[[], str],
        version: Callable[[], int],
        inputs: Inputs = Inputs(),
    ) -> None:
        """Prepare the templates.

        Args:
            readers: read the store.
            clock: what the pages call now.
            approvals: offers them; None if the console approves nothing.
            input_error: returns why no events are received at the moment, "" if they are.
            version: returns a number that changes with every commit.
            inputs: how VMs are connected.
        """
        self._readers = readers
        self._clock = clock
        self._approvals = approvals
        self._input_error = input_error
        self._version = version
        self._inputs = inputs
        self._templates = Environment(
            loader=PackageLoader("bridge.console"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
        )
        self._templates.filters |= {
            "text": sanitize,
            "iso": _iso,
            "clock": _clock,
            "duration": format_duration,
            "relative": lambda at, at_now: format_relative(at - at_now, exact=at > at_now),
            "css": now.css_class,
            "cell": _cell,
            "names": now.vm_names,
            "impact": story.impact_text,
            "segment": lambda value: quote(value, safe=""),
        }
        self._templates.globals |= {
            "static_url": static_url,
            "app_version": __version__,
            "starts_at": now.starts_at,
            "inputs": inputs,
        }

    def now(self, request: Request) -> str:
        """Render what is open."""
        at, wanted = self._clock.wall(), read_filter(request.query)
        window = request.query.get("window", now.DEFAULT_WINDOW)
        window = window if window in now.WINDOWS else now.DEFAULT_WINDOW
        with self._readers.reading() as store:
            every, vms = queries.open_events(store, at), queries.vms(store)
            ended = [
                one
                for one in queries.ended_events(store, at - ENDED_SECONDS, limit=50)
                if wanted.matches(one)
            ]
            shown = sorted((event for event in every if wanted.matches(event)), key=now.urgency)
            seen = {one.event_id: queries.count_seen_by(store, one.event_id) for one in shown[:MAX_ROWS]}
            base = self._base(store, at)
        states = fleet.count_states(vms, every, at)
        return self._render(
            "now.html",
            request,
            {
                **base,
                "headline": now.headline(shown, at, vms=len(vms), is_filtered=wanted.is_set),
                "is_empty": not (vms or every),
                "tiles": now.tiles(every, states, at),
                "timeline": now.timeline(shown, at, window),
                "windows": now.WINDOWS,
                "rows": shown[:MAX_ROWS],
                "total": len(shown),
                "ended": ended,
                "seen": seen,
                "sizes": Counter(vm.scope for vm in vms),
                "vms": len(vms),
                "unwatched": [one for one in fleet.unwatched(vms, at) if wanted.matches_vm(one[0])],
                **_filter_context(wanted, every, vms),
            },
        )

    def fleet(self, request: Request) -> str:
        """Render every VM."""
        at, wanted = self._clock.wall(), read_filter(request.query)
        with self._readers.reading() as store:
            every, vms = queries.open_events(store, at), queries.vms(store)
            base = self._base(store, at)
        whole = fleet.fleet(vms, every, at)
        groups = _chosen(whole, wanted, vms, every, at)
        is_table = request.query.get("view") == "table"
        return self._render(
            "fleet.html",
            request,
            {
                **base,
                "groups": groups,
                "figures": fleet.summary(whole),
                "states": fleet.STATES,
                "is_table": is_table,
                "table": list(islice(fleet.rows(groups), MAX_TABLE_VMS)) if is_table else [],
                "total": sum(len(group.cells) for group in groups),
                "silent_minutes": round(fleet.SILENT_SECONDS / 60),
                **_filter_context(wanted, every, vms),
            },
        )

    def event(self, request: Request, event_id: str) -> str | None:
        """Render the story of one event; None if it is not known."""
        at = self._clock.wall()
        with self._readers.reading() as store:
            event = queries.find_event(store, event_id)
            if event is None:
                return None
            reports, vms = queries.reports_of(store, event_id), queries.vms(store)
            base = self._base(store, at)
        seen = story.witnesses(event, reports, vms)
        return self._render(
            "event.html",
            request,
            {
                **base,
                "event": event,
                "notice": story.notice_text(event),
                "steps": story.story(event, reports),
                "affected": [one for one in seen if one.is_affected],
                "others": [one for one in seen if not one.is_affected],
                "raw": [_raw(report) for report in reports[:MAX_RAW]],
                "total": len(reports),
                "can_approve": self._approvals is not None,
                "form": self._approvals and self._approvals.form(event, vms, request.person, request.session),
                "sent": sent if _COMMAND_ID.fullmatch(sent := request.query.get("sent", "")) else "",
                "receipts": {
                    one.event.get("causationid") for one in reports if one.kind.startswith("approval.")
                },
            },
        )

    def history(self, request: Request) -> str:
        """Render the figures of the last days."""
        at, wanted = self._clock.wall(), read_filter(request.query)
        with self._readers.reading() as store:
            found = history.read_history(store, _days(request), at, wanted)
            vms, base = queries.vms(store), self._base(store, at)
        gaps = sorted(filter(lambda vm: vm.gaps and wanted.matches_vm(vm), vms), key=lambda vm: -vm.gaps)
        context = {**base, "history": found, "ends": history.ENDS, "gaps": gaps[:MAX_RAW]}
        return self._render(
            "history.html", request, {**context, **_filter_context(wanted, found.events, vms)}
        )

    def error(self, request: Request, status: int, title: str, text: str) -> str:
        """Render an error."""
        context = {"code": int(status), "title": title, "text": text}
        base = {"rebuilt": None, "new_since": None, "is_quiet": False, "input_error": ""}
        return self._render("error.html", request, {"now": self._clock.wall(), **base, **context})

    def approve(self, request: Request, event_id: str, given: Mapping[str, str]) -> str | None:
        """Send an approval; return the command's id, None if the event is not known.

        Raises:
            NotApproved: something is not right.
            BridgeError: it could not be sent.
        """
        with self._readers.reading() as store:
            event, vms = queries.find_event(store, event_id), queries.vms(store)
        if event is None:
            return None
        if self._approvals is None:
            raise NotApproved("There is no [approvals] in the console's configuration.")
        return self._approvals.approve(event, vms, request.person, request.session, given)

    def api_events(self, request: Request) -> BaseModel:
        """Return the open events that a filter chooses."""
        at, wanted = self._clock.wall(), read_filter(request.query)
        with self._readers.reading() as store:
            return api.event_list(one for one in queries.open_events(store, at) if wanted.matches(one))

    def api_event(self, _: Request, event_id: str) -> BaseModel | None:
        """Return one event with its story; None if it is not known."""
        with self._readers.reading() as store:
            event = queries.find_event(store, event_id)
            return api.event_details(event, queries.reports_of(store, event_id)) if event else None

    def api_vms(self, request: Request) -> BaseModel:
        """Return the VMs that a filter chooses."""
        at = self._clock.wall()
        with self._readers.reading() as store:
            every, vms = queries.open_events(store, at), queries.vms(store)
        whole = fleet.fleet(vms, every, at)
        return api.vm_list(_chosen(whole, read_filter(request.query), vms, every, at))

    def api_history(self, request: Request) -> BaseModel:
        """Return the figures of the last days."""
        with self._readers.reading() as store:
            wanted = read_filter(request.query)
            return api.figures(history.read_history(store, _days(request), self._clock.wall(), wanted))

    def csv(self, request: Request) -> tuple[str, str]:
        """Return a file's name, and the events of the last days as CSV."""
        days, where = _days(request), read_filter(request.query).of_events()
        with self._readers.reading() as store:
            events = queries.events_since(store, self._clock.wall() - days * DAY, where)
            return f"scheduled-events-{days}-days.csv", "".join(history.write_csv(events))

    def jsonl(self, event_id: str) -> bytes:
        """Return every CloudEvent about an event, one a line; nothing for an unknown one."""
        with self._readers.reading() as store:
            bodies = queries.bodies_of_event(store, event_id)
        return b"".join(json.dumps(decode_event(body)).encode() + b"\n" for body in bodies)

    def _base(self, store: Any, at: float) -> dict[str, Any]:
        last_received_at = queries.last_received_at(store)
        return {
            "now": at,
            "rebuilt": queries.rebuilt_note(store),
            "new_since": self._new_since(store, at),
            "last_received_at": last_received_at,
            "is_quiet": last_received_at is not None and at - last_received_at > fleet.SILENT_SECONDS,
            "input_error": sanitize(self._input_error()),
        }

    def _new_since(self, store: Any, at: float) -> float | None:
        """Return since when a new store has events, if the bus gave earlier ones to a store that is gone."""
        first = queries.first_received_at(store) if self._inputs.bus else None
        return first if first is not None and at - first < DAY else None

    def _render(self, template: str, request: Request, context: Mapping[str, Any]) -> str:
        common = {"person": request.person, "page": template.partition(".")[0], "version": self._version()}
        return self._templates.get_template(template).render({**common, **context})


def _chosen(
    whole: list[fleet.Group],
    wanted: Filter,
    vms: list[queries.VmRow],
    events: list[queries.EventRow],
    at: float,
) -> list[fleet.Group]:
    """Return the groups of the fleet with the VMs that a filter chooses; its status is a VM's state."""
    if not wanted.is_set:
        return whole
    of_any_status = replace(wanted, status="")
    shown = [vm for vm in vms if wanted.matches_vm(vm)]
    groups = fleet.fleet(shown, [event for event in events if of_any_status.matches(event)], at)
    return fleet.only_state(groups, wanted.status) if wanted.status else groups


def _days(request: Request) -> int:
    return history.PERIODS.get(request.query.get("days", ""), 30)


def _cell(cell: fleet.Cell) -> Markup:
    return _cell_html(cell.name, cell.css, cell.note, cell.event.event_id if cell.event else "")


@lru_cache(maxsize=_KEPT_CELLS)
def _cell_html(name: str, css: str, note: str, event_id: str) -> Markup:
    """Return a cell's HTML; most cells of a large fleet stay as they are."""
    text = Markup("{}<small>{}</small>").format(name, note)
    if not event_id:
        return Markup('<li class="cell {}">{}</li>').format(css, text)
    address = f"/event/{quote(event_id, safe='')}"
    return Markup('<li><a class="cell {}" href="{}">{}</a></li>').format(css, address, text)


def _filter_context(wanted: Filter, events: Any, vms: Any) -> dict[str, Any]:
    known = {name: KNOWN_VALUES[name] for name in ("EventType", "EventSource")}
    return {
        "filter": wanted,
        "types": choices([event.event_type for event in events], *known["EventType"]),
        "statuses": choices([event.status for event in events], "Scheduled", "Started"),
        "sources": choices([event.event_source for event in events], *known["EventSource"]),
        "group_names": choices([vm.group_name for vm in vms]),
    }


def _raw(report: queries.ReportRow) -> tuple[str, float, str]:
    """Return a CloudEvent's kind, time and indented text, in which nothing from outside reorders or hides text."""
    text = json.dumps(report.event, indent=2, ensure_ascii=False)
    return report.kind, report.at, "\n".join(map(escape, text.split("\n")))


def _iso(at: float) -> str:
    return iso_utc(datetime.fromtimestamp(at, UTC))


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%d %b %H:%M:%S} UTC"
