"""The page Now: what is open, as a headline, tiles, a timeline and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from bridge.console.rows import DAY, HOUR, MINUTE, OF_PLACE, EventRow, Filter
from bridge.console.story import MINIMUM_NOTICE_SECONDS
from bridge.formats.text import format_duration, join_names
from bridge.runtime.text import sanitize

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
MAX_BARS = 40
FIRST_BARS = 6  # of more than MAX_BARS: the others are opened
MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Bar:
    """An event on the timeline; the places are percent of its width."""

    event: EventRow
    label: str
    x: float
    width: float
    is_hatched: bool


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bars, with a tick (its place and its text) for each line behind them.

    Attributes:
        window: its name.
        now_x: the place of the line at now, in percent.
        ticks: places and texts.
        bars: the events that start within it: what is always shown, and more.
        later: how many start after it.
    """

    window: str
    now_x: float
    ticks: tuple[tuple[float, str], ...]
    bars: tuple[tuple[Bar, ...], tuple[Bar, ...]]
    later: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A figure at the top, and the address of what it counts."""

    number: int
    text: str
    detail: str
    css: str
    address: str


def css_class(event_type: str) -> str:
    """Return the style of a type: what has no minimum notice, or Azure may add, gets one of its own."""
    return event_type.lower() if event_type in MINIMUM_NOTICE_SECONDS else "other"


def vm_names(event: EventRow, *, max_names: int = MAX_NAMES) -> str:
    """Return the names of the affected VMs, as many as are easy to read."""
    shown = [sanitize(name, 64) for name in event.resources]
    return join_names(shown, max_length=400, max_names=max_names) if shown else "no VM is named"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def headline(
    dues: Mapping[str, tuple[int, int, int]], *, vms: int, is_filtered: bool, unmatched: str = ""
) -> str:
    """Return what is most urgent in one line.

    Args:
        dues: for each due the number of events, of those by users, and of VMs.
        vms: how many have reported: of none, nothing is known.
        is_filtered: whether others may be left out.
        unmatched: VM or event if the filter asks for one that does not exist.
    """
    if not dues and is_filtered and unmatched:
        return f"No {unmatched} matches the filter"
    if not dues.keys() - {"gone"}:
        nothing = "No open event matches the filter" if is_filtered else "Nothing is scheduled"
        return nothing if vms or is_filtered else "No VM has reported yet"
    started, soon, overdue, later = (
        dues.get(due, (0, 0, 0)) for due in ("started", "1h", "overdue", "later")
    )
    parts = [f"{started[0]} in progress"] * bool(started[0])
    parts += [f"{soon[0]} within the hour ({plural(soon[2], 'VM')})"] * bool(soon[0])
    parts += [f"{overdue[0]} overdue"] * bool(overdue[0])
    return ", ".join(parts) or f"Nothing within the hour, {later[0]} later"


def unwatched(vms: Mapping[str, int]) -> str:
    """Return the end of the headline: how many VMs nobody watches, "" if somebody watches all of them."""
    number = vms["unwatched"]
    verb = "is" if number == 1 else "are"
    return f"; {number} of {plural(vms[''], 'VM')} {verb} not watched" if number else ""


def clock_fault(ahead: float | None) -> str:
    """Return the end of the headline if the VMs' clocks are ahead of the console's by some seconds, or behind."""
    if ahead is None:
        return ""
    where = "behind" if ahead > 0 else "ahead of"
    return f"; this console's clock is {format_duration(abs(ahead))} {where} its senders'"


def tiles(dues: Mapping[str, tuple[int, int, int]], vms: Mapping[str, int], wanted: Filter) -> list[Tile]:
    """Return the figures at the top.

    Args:
        dues: as of `headline`.
        vms: how many there are, as of `count_vms`.
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
    named, with_event, of_fleet = (
        vms["Scheduled"] + vms["Started"],
        vms["unwatched with event"],
        wanted.only(*OF_PLACE),
    )
    verb = "has" if with_event == 1 else "have"
    detail = f"of which {with_event} {verb} an event" if with_event else "may miss events"
    of_vms = (
        (vms["unprepared"], "unprepared", "less than 15 min, or started", "bad", "unprepared"),
        (vms["outofwork"], "out of work", "not put back", "bad", "outofwork"),
        (vms["unwatched"], "not watched", detail, "grey", "unwatched"),
        (vms[""], "known VMs", f"{named} with events", "good", ""),
    )
    return found + [
        Tile(
            number=number, text=text, detail=detail, css=css, address=f"/fleet{of_fleet.query(status=status)}"
        )
        for number, text, detail, css, status in of_vms
        if number or status in ("", "unwatched")
    ]


def _due_tile(counts: tuple[int, int, int], due: str, text: str, css: str, wanted: Filter) -> Tile:
    events, users, vms = counts
    detail = f"on {plural(vms, 'VM')}" + (f", {users} by users" if users else "")
    address = f"/{wanted.query(due=due, status='')}"
    return Tile(number=events, text=text, detail=detail, css=css, address=address)


def timeline(events: Sequence[EventRow], now: float, window: str) -> Timeline:
    """Place events on a line from now to the end of the window, on which near times have more room than far ones.

    Args:
        events: those of the page's table.
        now: seconds since 1970.
        window: one of WINDOWS.
    """
    length = WINDOWS[window]
    events = [event for event in events if event.due != "gone"]
    inside = [event for event in events if (event.starts_at or now) < now + length]
    bars = tuple(_bar(event, now, length) for event in inside)
    first = FIRST_BARS if len(bars) > MAX_BARS else MAX_BARS
    return Timeline(
        window=window,
        now_x=_NOW_X,
        ticks=tuple((place(tick, length), f"+{format_duration(tick)}") for tick in _TICKS[window]),
        bars=(bars[:first], bars[first:]),
        later=len(events) - len(inside),
    )


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
