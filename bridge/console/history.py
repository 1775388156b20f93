"""The page History: what happened in the last days, in figures, and as CSV."""

from __future__ import annotations

import csv
import io
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from bridge.console import rows
from bridge.console.merge import ScheduledEvent, Time
from bridge.console.now import css_class
from bridge.console.rows import DAY, EventRow, Filter, ReportRow
from bridge.console.story import MINIMUM_NOTICE_SECONDS, NOTICE_TOLERANCE_SECONDS
from bridge.formats.text import format_duration
from bridge.runtime.text import sanitize
from bridge.runtime.time import iso_utc

PERIODS = (30, 90)
ENDS = ("Completed", "Ended", "Canceled", "Open", "Put away")
NOTICE_LIMITS = (30.0, 60.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, DAY)
_SHOWN_LOSSES = 50
_CSV_LINES = 500
_TIMES = ("not_before", "first_seen_at", "last_change_at", "started_at", "ended_at")
# A cell may also be split at these by a spreadsheet of another language.
_FORMULA = re.compile(r"(^|[;,\t\r\n])(?=\s*[=+\-@\t\r\uff1d\uff0b\uff0d\uff20])")
_STEPS = " ".join(
    f"WHEN notice_seconds + {NOTICE_TOLERANCE_SECONDS} < {limit} THEN {step}"
    for step, limit in enumerate(NOTICE_LIMITS)
)
_MINIMUM = " ".join(f"WHEN '{name}' THEN {least}" for name, least in MINIMUM_NOTICE_SECONDS.items())
_BY = f"""
SELECT event_type, {rows.OUTCOME}, CAST((moment.at - first_seen_at) / 86400 AS INTEGER), CASE
    WHEN notice_seconds IS NULL THEN NULL
    WHEN notice_seconds + {NOTICE_TOLERANCE_SECONDS} < CASE event_type {_MINIMUM} END AND seen_late THEN NULL
    {_STEPS} ELSE {len(NOTICE_LIMITS)} END, count(*)
FROM event_now, moment WHERE first_seen_at > moment.at - ? AND """  # noqa: S608 - constants


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How the events of one type ended."""

    event_type: str
    counts: dict[str, int]

    @property
    def total(self) -> int:
        """How many there were."""
        return sum(self.counts.values())


@dataclass(frozen=True, kw_only=True)
class Notice:
    """How much notice the events of a type gave that named a NotBefore: how many of them less than each limit.

    An event that a forwarder saw only because it had just started does not count as one with less than the minimum.

    Attributes:
        minimum_seconds: Microsoft's, None for other types.
        counts: by the first of NOTICE_LIMITS that is larger, and by None for more than all.
        short: how many had less than the minimum.
    """

    event_type: str
    minimum_seconds: float | None
    counts: dict[float | None, int]
    short: int

    @property
    def total(self) -> int:
        """How many named a NotBefore."""
        return sum(self.counts.values())

    def lines(self) -> Iterator[tuple[str, int, float, bool]]:
        """Yield text, number, width in percent and whether it is below the minimum, for each limit that occurs."""
        highest = max(self.counts.values())
        for limit, count in self.counts.items():
            text = (
                f"under {format_duration(limit)}"
                if limit
                else f"{format_duration(NOTICE_LIMITS[-1])} or more"
            )
            yield text, count, round(100 * count / highest, 1), _is_short(limit, self.minimum_seconds)


@dataclass(frozen=True, kw_only=True)
class Receipts:
    """How many receipts had an outcome and a reason."""

    outcome: str
    reason: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What was lost, not watched or put away, on which VM and when."""

    at: Time
    vm: str
    text: str


@dataclass(frozen=True, kw_only=True)
class History:
    """The figures of the last days; `per_day` counts by type, the last 24 hours first.

    `losses` has the newest. `prepared` counts the VMs of started events: those prepared before the start, and all;
    both are 0 if no VM was ever prepared.
    """

    days: int
    total: int
    ends: list[Ends]
    per_day: list[dict[str, int]]
    notices: list[Notice]
    receipts: list[Receipts]
    losses: list[Loss]
    more_losses: int
    prepared: tuple[int, int]

    @property
    def highest(self) -> int:
        """How many events the day with most of them had."""
        return max(sum(day.values()) for day in self.per_day)

    def columns(self) -> Iterator[tuple[list[tuple[str, float, float]], str]]:
        """Yield for each day, oldest first: parts of a column as style, place and height in percent, and a text."""
        for day in reversed(range(self.days)):
            parts, top, counts = [], 100.0, sorted(self.per_day[day].items())
            for event_type, count in counts:
                height = 100 * count / self.highest
                top -= height
                parts.append((css_class(event_type), round(top, 2), round(height, 2)))
            texts = [f"{count} {sanitize(event_type, 40) or 'unknown'}" for event_type, count in counts]
            yield parts, f"{f'{day} d ago' if day else 'last 24 h'}: {', '.join(texts) or 'none'}"


def read_history(store: sqlite3.Connection, days: int, now: float, wanted: Filter) -> History:
    """Read the figures of the last days, of the events and VMs that a filter chooses, in one pass over the events."""
    ends: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    per_day: list[dict[str, int]] = [defaultdict(int) for _ in range(days)]
    notices: dict[str, dict[float | None, int]] = defaultdict(lambda: defaultdict(int))
    where = wanted.of_events()
    query = f"{_BY} {where.condition} GROUP BY 1, 2, 3, 4"
    for event_type, end, day, step, count in store.execute(query, (days * DAY, *where.values)):
        ends[event_type][end] += count
        per_day[min(max(day, 0), days - 1)][event_type] += count
        if step is not None:
            notices[event_type][(*NOTICE_LIMITS, None)[step]] += count
    losses, lost = rows.losses_since(store, now - days * DAY, wanted, limit=_SHOWN_LOSSES)
    return History(
        days=days,
        total=sum(sum(counts.values()) for counts in ends.values()),
        ends=[Ends(event_type=name, counts=dict(counts)) for name, counts in sorted(ends.items())],
        per_day=[dict(day) for day in per_day],
        notices=[_notice(name, counts) for name, counts in sorted(notices.items())],
        receipts=[
            Receipts(outcome=kind.removeprefix("approval."), reason=sanitize(reason, 60), count=count)
            for kind, reason, count in rows.count_receipts(store, now - days * DAY, wanted)
        ],
        prepared=rows.count_prepared(store, now - days * DAY, wanted),
        losses=[_loss(row) for row in losses],
        more_losses=lost - len(losses),
    )


def _is_short(limit: float | None, minimum: float | None) -> bool:
    return limit is not None and minimum is not None and limit <= minimum


def _notice(event_type: str, counts: dict[float | None, int]) -> Notice:
    minimum = MINIMUM_NOTICE_SECONDS.get(event_type)
    return Notice(
        event_type=event_type,
        minimum_seconds=minimum,
        counts={limit: counts[limit] for limit in (*NOTICE_LIMITS, None) if limit in counts},
        short=sum(count for limit, count in counts.items() if _is_short(limit, minimum)),
    )


def _loss(row: ReportRow) -> Loss:
    data = row.data
    if row.kind == "bridge.loss":
        count = data.get("Count") if isinstance(data.get("Count"), int) else "an unknown number of"
        text = f"{count} event(s) lost: {sanitize(data.get('Reason'), 60)}"
    elif row.kind == "console.forgotten":
        text = sanitize(data.get("Reason"))
    else:
        seconds = data.get("BlindSeconds")
        length = format_duration(min(seconds, 1e9)) if isinstance(seconds, int | float) else "a while"
        text = f"IMDS was not watched for {length}: {sanitize(data.get('Cause'), 60) or 'no answer'}"
    return Loss(at=row.at, vm=sanitize(row.vm), text=text)


def write_csv(events: Iterator[EventRow]) -> Iterator[str]:
    """Write events as CSV, some lines at a time; no cell, nor a part of one, is a formula for a spreadsheet."""
    columns = [field.name for field in fields(ScheduledEvent)]
    found: list[list[object]] = [[*columns]]
    while found:
        text = io.StringIO()
        csv.writer(text).writerows(found)
        yield text.getvalue()
        found = [
            [_cell(name, getattr(event, name)) for name in columns] for event in islice(events, _CSV_LINES)
        ]


def _cell(name: str, value: Any) -> object:
    if isinstance(value, tuple):
        value = ";".join(value)
    if isinstance(value, str):
        return _FORMULA.sub(r"\1'", value)
    return iso_utc(datetime.fromtimestamp(value, UTC)) if value is not None and name in _TIMES else value
