"""The pages: what each shows of the store."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from bridge.console import base, fleet, forget, history, now, rows, story, waves
from bridge.console.approve import digest
from bridge.console.base import Web, days_of, filter_of, page_of, session_of
from bridge.console.rows import DAY, EVERY, HOUR, ReportRow, Where
from bridge.events.envelope import decode_event
from bridge.runtime.text import escape

MAX_RAW = 50
_RAW_BYTES = 70_000  # of the bodies together
MAX_ENDED = 50


def show_now(web: Web, request: Request) -> Response:
    """Show what is open."""
    at, wanted, person = web.clock.wall(), filter_of(request), request.state.person
    window = request.query_params.get("window", now.DEFAULT_WINDOW)
    window = window if window in now.WINDOWS else now.DEFAULT_WINDOW
    of_place = wanted.only(*rows.OF_PLACE)
    silent = replace(of_place, status="unwatched")
    with web.store.reading() as store:
        shared = web.base(store, at)
        of_tiles, types = wanted.only("type", "source", *rows.OF_PLACE), rows.count_types(store)
        tiles = rows.count_due(store, of_tiles)
        dues = tiles if of_tiles == wanted else rows.count_due(store, wanted)
        every, away = rows.every_open(store, wanted), forget.away(store)
        found, asked = waves.waves(every), request.query_params.get("wave", "")
        opened = waves.wave_of(found, asked) or waves.wave_after(found, rows.find_event(store, asked))
        lines = [waves.Wave((event,)) for event in opened.events] if opened else found
        page = page_of(request, len(lines))
        shown = waves.with_rows(store, lines[page.first : page.last], wanted)
        counts = rows.count_vms(store, of_place)
        everything = rows.count_vms(store) if of_place else counts
        known = everything[""] - everything["unknown"] - everything["unheard"]
        kept = {"window": window, "wave": opened.key if opened else ""}
        filters = web.filters(store, wanted, "/", [one for one, _, _ in types], **kept)
        unmatched = "VM" if not counts[""] else "event" * bool(filters["unmatched"])
        headline = now.headline(dues, vms=known, is_filtered=bool(wanted), unmatched=unmatched)
        context = {
            "headline": headline
            + now.unwatched(counts)
            + now.put_away(rows.count(store, "event_now", forget.coming(away, at) & of_place.of_events()))
            + now.clock_fault(shared["noted"]["ahead"]),
            "turns": now.turns(rows.every_open(store, EVERY) if wanted else every),
            "away": sum(len(one.events) + len(one.vms) for one in away),
            "minimum": story.MINIMUM_NOTICE_SECONDS,
            "may_approve": web.approvals is not None and person.is_approver,
            "token": web.sessions.token(session_of(request), person) if person.is_approver else "",
            "is_empty": not (everything or shown),
            "tiles": now.tiles(tiles, counts, wanted),
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
            **shared,
        }
    return web.page(request, "now.html", context)


def show_fleet(web: Web, request: Request) -> Response:
    """Show every VM."""
    at, wanted = web.clock.wall(), filter_of(request)
    is_table = request.query_params.get("view") == "table"
    with web.store.reading() as store:
        shared = web.base(store, at)
        figures = rows.count_vms(store, wanted.only(*rows.OF_PLACE))
        counts = rows.count_vms(store, wanted) if wanted.status else figures
        page = page_of(request, counts[""], base.PAGE_ROWS if is_table else base.PAGE_CELLS)
        shown = rows.vms(store, wanted, limit=page.size, offset=page.first)
        silent = forget.forgettable(store, wanted) if request.state.person.is_approver else []
        context = {
            "groups": fleet.groups(shown),
            "unwatched": now.unwatched(figures) + now.clock_fault(shared["noted"]["ahead"]),
            "forgettable": len(silent),
            "shown": forget.digest(silent),
            "token": web.sessions.token(session_of(request), request.state.person),
            "figures": figures,
            "counts": counts,
            "states": (*fleet.STATES, "unwatched", "outofwork"),
            "axes": fleet.AXES,
            "hidden": forget.hidden(store, at),
            "is_table": is_table,
            "rows": shown,
            "paging": page,
            "silent_minutes": round(base.SILENT_SECONDS / 60),
            **web.filters(store, wanted, "/fleet", [], view="table" if is_table else ""),
            **shared,
        }
    return web.page(request, "fleet.html", context)


def show_event(web: Web, request: Request) -> Response:
    """Show the story of one event."""
    at, person, wanted = web.clock.wall(), request.state.person, filter_of(request).only(*rows.OF_PLACE)
    with web.store.reading() as store:
        event = web.find(store, request)
        (shown,) = rows.mine_first(store, [event], wanted)
        reports, vms = rows.reports_of(store, event.key, order=rows.DECIDING), rows.vms_of(store, event)
        shared = {**web.base(store, at), **web.filters(store, EVERY, "/", [])}
        total = rows.count(store, "event", Where("event_id = ? AND event_id <> ''", (event.key,)))
        prepared, ahead = rows.preparations_of(store, event.key), rows.ahead_of(store, event)
        away = [one for one in forget.away(store) if any(other.key == event.key for other in one.events)]
    seen = story.witnesses(shown, reports, vms, prepared)
    sent = request.query_params.get("sent", "")
    context = {
        **shared,
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
        "token": web.sessions.token(session_of(request), person),
        "can_dismiss": person.is_approver and event.state.is_followed,
        "shown": digest(event),
        "is_coming": event.state.is_coming(at),
        "can_approve": web.approvals is not None,
        "receiver": web.approvals and web.approvals.receiver(event, vms, person),
        "sent": sent if web.approvals and web.approvals.has_sent(event, sent) else "",
        "receipts": {one.event.get("causationid") for one in reports if one.kind.startswith("approval.")},
    }
    return web.page(request, "event.html", context)


def show_away(web: Web, request: Request) -> Response:
    """Show what was put away."""
    with web.store.reading() as store:
        context = {
            "away": forget.away(store),
            "token": web.sessions.token(session_of(request), request.state.person),
            **web.filters(store, EVERY, "/away", []),
            **web.base(store, web.clock.wall()),
        }
    return web.page(request, "away.html", context)


def show_history(web: Web, request: Request) -> Response:
    """Show the figures of the last days."""
    at, wanted, days = web.clock.wall(), filter_of(request), days_of(request)
    with web.store.reading() as store:
        found = history.read_history(store, days, at, wanted)
        page = page_of(request, found.total)
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
            **web.filters(store, wanted, "/history", [one.event_type for one in found.ends], days=str(days)),
            **web.base(store, at),
        }
    return web.page(request, "history.html", context)


def send_csv(web: Web, request: Request) -> Response:
    """Send the events of the last days as CSV, as they are read."""
    days, wanted = days_of(request), filter_of(request)

    def lines() -> Iterator[str]:
        with web.store.reading() as store:
            yield from history.write_csv(rows.events_since(store, web.clock.wall() - days * DAY, wanted))

    headers = {"content-disposition": f'attachment; filename="scheduled-events-{days}-days.csv"'}
    return StreamingResponse(lines(), media_type="text/csv", headers=headers)


def send_jsonl(web: Web, request: Request) -> Response:
    """Send every CloudEvent about an event, one a line."""
    with web.store.reading() as store:
        bodies = rows.bodies_of_event(store, web.find(store, request).key)
    text = b"".join(json.dumps(decode_event(body)).encode() + b"\n" for body in bodies)
    headers = {"content-disposition": 'attachment; filename="events.jsonl"'}
    return Response(text, media_type="application/jsonl", headers=headers)


def _newest(reports: Sequence[ReportRow]) -> list[tuple[str, float, str]]:
    """Return the newest CloudEvents, as many as a page holds, and at least one."""
    sizes = accumulate(len(report.body) for report in reversed(reports))
    shown = max(1, sum(size <= _RAW_BYTES for size in islice(sizes, MAX_RAW)))
    return [_raw(report) for report in reports[-shown:]]


def _raw(report: ReportRow) -> tuple[str, float, str]:
    """Return a CloudEvent's kind, time and indented text, in which nothing from outside reorders or hides text."""
    text = json.dumps(report.event, indent=2, ensure_ascii=False)
    return report.kind, report.at, "\n".join(map(escape, text.split("\n")))
