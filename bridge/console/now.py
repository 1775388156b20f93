"""The page Now: what is open, as a headline, tiles, a timeline and a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt

from bridge.console.rows import DAY, HOUR, MINUTE, UNWATCHED, EventRow, Filter
from bridge.formats.text import format_duration, join_names, sanitize

WINDOWS = {"4h": 4 * HOUR, "24h": DAY, "7d": 7 * DAY}
DEFAULT_WINDOW = "24h"
_TICKS = {
    "4h": (5 * MINUTE, 15 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 4 * HOUR),
    "24h": (15 * MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY),
    "7d": (HOUR, 6 * HOUR, DAY, 2 * DAY, 4 * DAY, 7 * DAY),
}
_NOW_X = 4.0  # percent of the width that is left for what has started
_UNKNOWN_SECONDS = 600.0  # how long a bar is whose duration is unknown
_LEAST_WIDTH = 0.8
MAX_BARS = 40  # more are shown by group
MAX_GROUP_BARS = 10
MAX_GROUPS = 50
MAX_NAMES = 3
_KNOWN_TYPES = {"Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """An event on the timeline; the places are percent of its width."""

    event: EventRow
    label: str
    x: float
    width: float
    is_hatched: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """The bars of a group, or of all events; `text` is "" for those that are shown without a group."""

    text: str
    group: str
    bars: tuple[Bar, ...]
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bars, with a tick (its place and its text) for each line behind them.

    Attributes:
        window: its name.
        now_x: the place of the line at now, in percent.
        ticks: places and texts.
        rows: the events that start within it.
        later: how many start after it.
        hidden: how many groups are left out.
    """

    window: str
    now_x: float
    ticks: tuple[tuple[float, str], ...]
    rows: tuple[Row, ...]
    later: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A figure at the top, and the address of what it counts."""

    number: int
    text: str
    detail: str
    css: str
    address: str


def css_class(event_type: str) -> str:
    """Return the style of a type: what Azure may add gets one of its own."""
    return event_type.lower() if event_type in _KNOWN_TYPES else "other"


def vm_names(event: EventRow, *, max_names: int = MAX_NAMES) -> str:
    """Return the names of the affected VMs, as many as are easy to read."""
    shown = [sanitize(name, 64) for name in event.resources]
    return join_names(shown, max_length=400, max_names=max_names) if shown else "no VM is named"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def headline(dues: Mapping[str, tuple[int, int, int]], *, vms: int, is_filtered: bool) -> str:
    """Return what is most urgent in one line.

    Args:
        dues: for each due the number of events, of those by users, and of VMs.
        vms: how many have reported: of none, nothing is known.
        is_filtered: whether others may be left out.
    """
    if not dues:
        nothing = "No open event matches the filter" if is_filtered else "Nothing is scheduled"
        return nothing if vms or is_filtered else "No VM has reported yet"
    started, soon, overdue, later = (
        dues.get(due, (0, 0, 0)) for due in ("started", "1h", "overdue", "later")
    )
    parts = [f"{started[0]} in progress"] * bool(started[0])
    parts += [f"{soon[0]} within the hour ({plural(soon[2], 'VM')})"] * bool(soon[0])
    parts += [f"{overdue[0]} overdue"] * bool(overdue[0])
    return ", ".join(parts) or f"Nothing within the hour, {later[0]} later"


def tiles(
    dues: Mapping[str, tuple[int, int, int]], vms: Iterable[tuple[str, bool, int]], wanted: Filter
) -> list[Tile]:
    """Return the figures at the top.

    Args:
        dues: as of `headline`.
        vms: how many there are, by who watches them and by whether an event names them.
        wanted: is kept in the addresses.
    """
    found = [
        _due_tile(dues.get(due, (0, 0, 0)), due, text, css, wanted)
        for due, text, css in (
            ("overdue", "overdue", "bad"),
            ("started", "in progress", "bad"),
            ("1h", "due within 1 h", "warn"),
            ("later", "due later", "plain"),
        )
    ]
    counts = list(vms)
    known = sum(count for watch, _, count in counts if watch != "unknown")
    named = sum(count for watch, has_event, count in counts if has_event and watch != "unknown")
    unwatched = [(has_event, count) for watch, has_event, count in counts if watch in UNWATCHED]
    total, with_event = sum(count for _, count in unwatched), sum(count for has, count in unwatched if has)
    address = f"/fleet{wanted.query(due='', type='', source='', status='unwatched')}"
    detail = (
        f"of which {with_event} {'has' if with_event == 1 else 'have'} an event"
        if with_event
        else "may miss events"
    )
    everything = f"/fleet{wanted.query(due='', type='', source='', status='')}"
    return [
        *found,
        Tile(number=total, text="not watched", detail=detail, css="grey", address=address),
        Tile(number=known, text="known VMs", detail=f"{named} with events", css="good", address=everything),
    ]


def _due_tile(counts: tuple[int, int, int], due: str, text: str, css: str, wanted: Filter) -> Tile:
    events, users, vms = counts
    detail = f"on {plural(vms, 'VM')}" + (f", {users} by users" if users else "")
    address = f"/{wanted.query(due=due, status='')}"
    return Tile(number=events, text=text, detail=detail, css=css, address=address)


def timeline(events: Sequence[EventRow], now: float, window: str) -> Timeline:
    """Place events on a line from now to the end of the window, on which near times have more room than far ones.

    Args:
        events: the open ones.
        now: seconds since 1970.
        window: one of WINDOWS.
    """
    length = WINDOWS[window]
    inside = [event for event in events if (event.starts_at or now) < now + length]
    rows = _by_group(inside, now, length) if len(inside) > MAX_BARS else [_row("", inside, now, length)]
    return Timeline(
        window=window,
        now_x=_NOW_X,
        ticks=tuple((place(tick, length), f"+{format_duration(tick)}") for tick in _TICKS[window]),
        rows=tuple(rows[:MAX_GROUPS]),
        later=len(events) - len(inside),
        hidden=len(rows[MAX_GROUPS:]),
    )


def _by_group(events: Sequence[EventRow], now: float, length: float) -> list[Row]:
    """Return a row for each group, in the order of the first event."""

    def name(event: EventRow) -> tuple[str, str]:
        return event.group, event.subscription

    grouped = [list(some) for _, some in groupby(sorted(events, key=name), key=name)]
    grouped.sort(key=lambda some: min(event.starts_at or 0.0 for event in some))
    return [_row(_summary(some, now), some, now, length) for some in grouped]


def _summary(events: Sequence[EventRow], now: float) -> str:
    vms = len({(event.scope, name.casefold()) for event in events for name in event.resources})
    started = sum(event.due == "started" for event in events)
    coming = [event.starts_at for event in events if event.starts_at is not None and event.starts_at > now]
    parts = [plural(len(events), "event"), plural(vms, "VM")]
    parts += [f"{started} in progress"] * bool(started)
    return ", ".join([*parts, *([f"first in {format_duration(min(coming) - now)}"] if coming else [])])


def _row(text: str, events: Sequence[EventRow], now: float, length: float) -> Row:
    limit = MAX_GROUP_BARS if text else MAX_BARS
    bars = tuple(_bar(event, now, length) for event in events[:limit])
    group = events[0].group if text else ""
    return Row(text=text, group=group, bars=bars, hidden=len(events) - len(bars))


def place(seconds: float, length: float) -> float:
    """Return the place of a time from now on a line of a length, in percent: it grows with the square root."""
    if seconds < 0:
        return round(max(0.0, _NOW_X * (1 + seconds / (length / 24))), 2)
    return round(_NOW_X + (100 - _NOW_X) * sqrt(min(1.0, seconds / length)), 2)


def _bar(event: EventRow, now: float, length: float) -> Bar:
    start = event.starts_at or now
    is_known = event.duration_seconds is not None and event.duration_seconds >= 0
    duration = float(event.duration_seconds or 0) if is_known else _UNKNOWN_SECONDS
    end = start + duration
    if event.status == "Started":  # it lasts until the end is reported
        end = max(end, now + (0 if is_known else _UNKNOWN_SECONDS / 2))
    left = min(place(start - now, length), 100 - _LEAST_WIDTH)
    right = max(left + _LEAST_WIDTH, place(end - now, length))
    return Bar(
        event=event,
        label=vm_names(event, max_names=2),
        x=left,
        width=round(right - left, 2),
        is_hatched=not is_known,
    )
