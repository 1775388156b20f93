"""The page Now: what is open, as a headline, tiles, a timeline and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from bridge.console.rows import DAY, HOUR, OF_PLACE, EventRow, Filter, OpenRow
from bridge.console.state import State
from bridge.console.story import MINIMUM_NOTICE_SECONDS
from bridge.console.waves import Wave
from bridge.formats.text import format_duration, join_names, plural
from bridge.runtime.text import sanitize

WINDOWS = {"": 0.0, "1h": HOUR, "4h": 4 * HOUR, "24h": DAY, "7d": 7 * DAY}  # "" fits what is shown
DEFAULT_WINDOW = ""
_LENGTHS = (900.0, 1800.0, *(hours * HOUR for hours in (1, 2, 4, 8, 12, 24, 48, 96, 168)))
_TICKS = (60.0, 120.0, 300.0, 600.0, *_LENGTHS)
_TICK_APART = 17.0  # percent of the width
_NOW_X = 4.0  # percent of the width that is left for what has started
_UNKNOWN_SECONDS = 600.0  # how long a bar is whose duration is unknown
_LEAST_WIDTH = 0.8
STEP_SECONDS = 15.0  # the bars move in steps, so that they are seldom sent again
COLUMN_WIDTH = 0.4
BAR_HEIGHT = 18
MAX_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A wave or its only event on the timeline; the places are percent of its width.

    `columns` are the density of a wave, how many start when: place, width, and height in pixels.
    """

    x: float
    width: float
    is_hatched: bool
    is_after: bool
    columns: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bars, with a tick (its place and its text) for each line behind them.

    Attributes:
        window: its name.
        now_x: the place of the line at now, in percent.
        ticks: places and texts.
        bars: by the key of a line; what starts after the window is a mark at its end.
    """

    window: str
    now_x: float
    ticks: tuple[tuple[float, str], ...]
    bars: Mapping[str, Bar]


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


def vm_names(event: EventRow | Wave, *, max_names: int = MAX_NAMES) -> str:
    """Return the names of the affected VMs, as many as are easy to read."""
    shown = [sanitize(name, 64) for name in event.resources]
    return join_names(shown, max_length=400, max_names=max_names) if shown else "no VM is named"


def short_names(event: EventRow) -> str:
    """Return the first affected VM, and how many more there are: `web-0 +4`."""
    names = event.resources
    return sanitize(names[0], 64) + f" +{len(names) - 1}" * (len(names) > 1) if names else "no VM is named"


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
    parts = [f"{overdue[0]} overdue"] * bool(overdue[0])
    parts += [f"{started[0]} in progress"] * bool(started[0])
    parts += [f"{soon[0]} within the hour"] * bool(soon[0])
    return ", ".join(parts) or f"Nothing within the hour, {later[0]} later"


def unwatched(vms: Mapping[str, int]) -> str:
    """Return the end of the headline: how many VMs nobody watches, "" if somebody watches all of them."""
    number = vms["unwatched"]
    return f"; {plural(number, 'VM')} not watched" if number else ""


def put_away(number: int) -> str:
    """Return the end of the headline: how many events that were put away are still to come."""
    return f"; {number} put away, still to come" if number else ""


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
            ("started", "in progress", "plain"),
            ("1h", "within 1 h", "warn"),
            ("later", "later", "plain"),
        )
    ]
    named, with_event, of_fleet = (
        vms["Scheduled"] + vms["Started"],
        vms["unwatched with event"],
        wanted.only(*OF_PLACE),
    )
    detail = f"{with_event} with an event" if with_event else "may miss events"
    of_vms = (
        (vms["unprepared"], "unprepared", "15 min left, or less", "bad", "unprepared"),
        (vms["outofwork"], "out of work", "not put back", "bad", "outofwork"),
        (vms["unwatched"], "not watched", detail, "warn", "unwatched"),
        (vms[""], "VMs", f"{named} with events", "plain", ""),
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
    detail = plural(vms, "VM") + (f", {users} by users" if users else "")
    address = f"/{wanted.query(due=due, status='')}"
    return Tile(number=events, text=text, detail=detail, css=css, address=address)


def timeline(waves: Sequence[Wave], now: float, window: str) -> Timeline:
    """Place waves on a line from now to the end of the window, on which near times have more room than far ones.

    Args:
        waves: those of the page's table.
        now: seconds since 1970.
        window: one of WINDOWS; the one that fits is the shortest that has nearly all lines.
    """
    waves = [wave for wave in waves if any(not event.state.is_over for event in wave.events)]
    length = WINDOWS[window] or _fitting([_last_start(wave, now) for wave in waves])
    ticks = [length]
    for tick in reversed(_TICKS):
        if (
            place(ticks[-1], length) - place(tick, length) >= _TICK_APART
            and place(tick, length) > _NOW_X + 10
        ):
            ticks.append(tick)
    return Timeline(
        window=window,
        now_x=_NOW_X,
        ticks=tuple((place(tick, length), f"+{format_duration(tick)}") for tick in reversed(ticks)),
        bars={wave.key: _bar(wave, now, length) for wave in waves},
    )


def _last_start(wave: Wave, now: float) -> float:
    return max((event.starts_at or now) for event in wave.events) - now


def _fitting(starts: Sequence[float]) -> float:
    """Return the length of the shortest window that has all starts but a tenth, or all of up to three."""
    outside = max(1, len(starts) // 10) if len(starts) > 3 else 0  # noqa: PLR2004
    latest = sorted(starts)[-1 - outside] if starts else 0.0
    return next((one for one in _LENGTHS if latest <= one), _LENGTHS[-1])


def turns(events: Iterable[OpenRow]) -> dict[str, float]:
    """Return when about each event that takes turns has its own: once those before it in its scope are over.

    It is an estimate: an event before it may be approved earlier, or last longer than its known impact.
    """
    found: dict[str, float] = {}
    over: dict[str, float] = {}
    asked = (one for one in events if one.prepared is not None and one.event_type != "Terminate")
    some = [(one, state) for one in asked if not (state := one.state).is_over]
    some.sort(key=lambda each: (not each[1].is_running, each[1].starts_at or 0.0, each[0].key))
    for event, state in some:
        if state.may_be_approved and event.scope in over:
            found[event.key] = over[event.scope]
        end = (state.starts_at or 0.0) + (state.impact_seconds or 0)
        over[event.scope] = max(over.get(event.scope, 0.0), end)
    return found


def place(seconds: float, length: float) -> float:
    """Return the place of a time from now on a line of a length, in percent: it grows with the square root."""
    if seconds < 0:
        return round(max(0.0, _NOW_X * (1 + seconds / (length / 24))), 2)
    return round(_NOW_X + (100 - _NOW_X) * sqrt(min(1.0, seconds / length)), 2)


def _bar(wave: Wave, now: float, length: float) -> Bar:
    states = [event.state for event in wave.events]
    spans = [_span(state, now, length) for state in states]
    left, right = min(x for x, _ in spans), max(end for _, end in spans)
    counts = Counter(int((x - left) / COLUMN_WIDTH) for x, _ in spans)
    highest = max(counts.values())
    return Bar(
        is_after=(wave.first.starts_at or now) - now > length,
        x=left,
        width=round(right - left, 2),
        is_hatched=any(state.impact_seconds is None for state in states),
        columns=tuple(
            (round(left + number * COLUMN_WIDTH, 2), COLUMN_WIDTH, max(3, BAR_HEIGHT * count // highest))
            for number, count in sorted(counts.items())
        ),
    )


def _span(state: State, now: float, length: float) -> tuple[float, float]:
    """Return where an event begins and ends on the timeline."""
    start, impact = state.starts_at or now, state.impact_seconds
    end = start + (_UNKNOWN_SECONDS if impact is None else impact)
    if state.is_running:  # it lasts until the end is reported
        end = max(end, now + (_UNKNOWN_SECONDS / 2 if impact is None else 0))
    left = min(place(start - now, length), 100 - _LEAST_WIDTH)
    return left, max(left + _LEAST_WIDTH, place(end - now, length))
