"""The page History: what happened in the last days, in figures."""

from __future__ import annotations

import csv
import io
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from bridge.console import queries
from bridge.console.filters import Filter
from bridge.console.now import css_class
from bridge.console.queries import DAY, EventRow
from bridge.console.story import MINIMUM_NOTICE_SECONDS
from bridge.formats.text import format_duration, sanitize
from bridge.runtime.time import iso_utc

PERIODS = {"30": 30, "90": 90}
ENDS = ("Completed", "Ended", "Canceled", "Open")
NOTICE_LIMITS = (30.0, 60.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, DAY)
_SHOWN_LOSSES = 50
_SHOWN_EVENTS = 50
_CSV_COLUMNS = (
    *("EventId", "EventType", "EventSource", "Status", "Group", "Resources", "FirstSeen", "NotBefore"),
    *("Started", "Ended", "NoticeSeconds", "DurationInSeconds", "Approval"),
)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The notice of one type of event.

    Attributes:
        minimum: Microsoft's, in words.
        counts: text, number, width in percent and whether it is below the minimum, for each of NOTICE_LIMITS.
        short: how many events had less than the minimum.
        total: how many named a NotBefore.
    """

    event_type: str
    minimum: str
    counts: tuple[tuple[str, int, float, bool], ...]
    short: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What was lost or not watched, on which VM and when."""

    at: float
    vm: str
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """The figures of a period.

    Attributes:
        days: its length.
        ends: a line for each type with the count of each of ENDS, and the sum.
        per_day: for each day, oldest first: parts of a column as style, place and height in percent, and a text.
        highest: how many events the day with most of them had.
        notices: of each type.
        receipts: outcome, reason and count.
        losses: the newest ones.
        events: the newest ones.
    """

    days: int
    ends: tuple[tuple[str, tuple[int, ...], int], ...]
    per_day: tuple[tuple[tuple[tuple[str, float, float], ...], str], ...]
    highest: int
    notices: tuple[Notice, ...]
    receipts: tuple[tuple[str, str, int], ...]
    losses: tuple[Loss, ...]
    events: tuple[EventRow, ...]

    @property
    def total(self) -> int:
        """How many events there were."""
        return sum(total for _, _, total in self.ends)


def read_history(connection: sqlite3.Connection, days: int, now: float, wanted: Filter) -> History:
    """Read the figures of the last days, of the events and VMs that a filter chooses."""
    since, where = now - days * DAY, wanted.of_events()
    per_day = _by_day(queries.count_by_day(connection, since, now, where))
    highest = max((sum(day.values()) for day in per_day.values()), default=0)
    losses = queries.losses_since(connection, since, wanted.of_vms(), limit=_SHOWN_LOSSES)
    receipts = queries.count_receipts(connection, since, where)
    return History(
        days=days,
        ends=tuple(_ends(queries.count_by_end(connection, since, where))),
        per_day=tuple(_columns(per_day, days, highest)),
        highest=highest,
        notices=tuple(_notices(queries.count_by_notice(connection, since, NOTICE_LIMITS, where))),
        receipts=tuple(
            (kind.removeprefix("approval."), sanitize(reason, 60), count) for kind, reason, count in receipts
        ),
        losses=tuple(_loss(row) for row in losses),
        events=tuple(queries.events_since(connection, since, where, limit=_SHOWN_EVENTS)),
    )


def _notice_labels() -> list[str]:
    below = [f"under {format_duration(limit)}" for limit in NOTICE_LIMITS]
    return [*below, f"{format_duration(NOTICE_LIMITS[-1])} or more"]


def write_csv(events: Iterable[EventRow]) -> Iterator[str]:
    """Write events as CSV, line by line; no cell is read as a formula by a spreadsheet."""
    yield _csv_line(_CSV_COLUMNS)
    for event in events:
        yield _csv_line(
            (
                *(event.shown_id, event.event_type, event.event_source, event.status, event.group_name),
                ";".join(event.resources),
                *map(_iso, (event.first_seen_at, event.not_before, event.started_at, event.ended_at)),
                "" if event.notice_seconds is None else round(event.notice_seconds),
                "" if event.duration_seconds is None else event.duration_seconds,
                event.approval,
            )
        )


def _csv_line(values: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(map(_harmless, values))
    return line.getvalue()


def _harmless(value: object) -> object:
    """Put a quote before a text that a spreadsheet would run as a formula."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r")
    return f"'{value}" if is_formula else value


def _iso(at: float | None) -> str:
    return "" if at is None else iso_utc(datetime.fromtimestamp(at, UTC))


def _ends(counts: Iterable[tuple[str, str, int]]) -> Iterator[tuple[str, tuple[int, ...], int]]:
    by_type: dict[str, dict[str, int]] = defaultdict(dict)
    for event_type, end, count in counts:
        by_type[event_type][end] = count
    for event_type, ends in sorted(by_type.items()):
        found = tuple(ends.get(end, 0) for end in ENDS)
        yield sanitize(event_type, 40) or "unknown", found, sum(ends.values())


def _by_day(counts: Iterable[tuple[int, str, int]]) -> dict[int, dict[str, int]]:
    by_day: dict[int, dict[str, int]] = defaultdict(dict)
    for day, event_type, count in counts:
        by_day[day][event_type] = count
    return by_day


def _columns(
    by_day: Mapping[int, Mapping[str, int]], days: int, highest: int
) -> Iterator[tuple[tuple[tuple[str, float, float], ...], str]]:
    for day in range(days - 1, -1, -1):
        parts, top = [], 100.0
        counts = sorted(by_day.get(day, {}).items())
        for event_type, count in counts:
            height = 100 * count / highest
            top -= height
            parts.append((css_class(event_type), round(top, 2), round(height, 2)))
        counted = [f"{count} {sanitize(event_type, 40) or 'unknown'}" for event_type, count in counts]
        when = f"{day} d ago" if day else "last 24 h"
        yield tuple(parts), f"{when}: {', '.join(counted) or 'none'}"


def _notices(counts: Iterable[tuple[str, int, int]]) -> Iterator[Notice]:
    by_type: dict[str, dict[int, int]] = defaultdict(dict)
    for event_type, step, count in counts:
        by_type[event_type][step] = count
    for event_type, steps in sorted(by_type.items()):
        minimum = MINIMUM_NOTICE_SECONDS.get(event_type)
        yield _notice(sanitize(event_type, 40) or "unknown", steps, minimum)


def _notice(event_type: str, steps: Mapping[int, int], minimum: float | None) -> Notice:
    highest = max(steps.values())
    limits = (*NOTICE_LIMITS, float("inf"))
    is_short = [minimum is not None and limit <= minimum for limit in limits]
    return Notice(
        event_type=event_type,
        minimum=format_duration(minimum) if minimum is not None else "",
        counts=tuple(
            (text, steps.get(step, 0), round(100 * steps.get(step, 0) / highest, 1), is_short[step])
            for step, text in enumerate(_notice_labels())
        ),
        short=sum(count for step, count in steps.items() if is_short[step]),
        total=sum(steps.values()),
    )


def _loss(row: queries.ReportRow) -> Loss:
    data = row.data
    if row.kind == "bridge.loss":
        count = data.get("Count") if isinstance(data.get("Count"), int) else "an unknown number of"
        text = f"{count} event(s) lost: {sanitize(data.get('Reason'), 60)}"
    else:
        seconds = data.get("BlindSeconds")
        length = format_duration(min(seconds, 1e9)) if isinstance(seconds, int | float) else "a while"
        text = f"IMDS was not watched for {length}: {sanitize(data.get('Cause'), 60) or 'no answer'}"
    return Loss(at=row.at, vm=sanitize(row.vm, 64), text=text)
