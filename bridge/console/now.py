"""The page Now: what is open, as a timeline and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

from bridge.console.queries import DAY, EventRow
from bridge.formats.text import format_duration, join_names, sanitize
from bridge.imds.document import fold_name

HOUR = 3600.0
WINDOWS = {"4h": 4 * HOUR, "24h": DAY, "7d": 7 * DAY}
DEFAULT_WINDOW = "24h"
_MINUTE = 60.0
_TICKS = {
    "4h": (5 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE, HOUR, 2 * HOUR, 4 * HOUR),
    "24h": (15 * _MINUTE, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, DAY),
    "7d": (HOUR, 6 * HOUR, DAY, 2 * DAY, 4 * DAY, 7 * DAY),
}
_NOW_X = 4.0  # percent of the width that is left for what has started
_UNKNOWN_SECONDS = 600.0  # how long a bar is whose duration is unknown
_LEAST_WIDTH = 0.8
MAX_BARS = 40
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
class Timeline:
    """Bars, with a tick (its place and its text) for each line behind them.

    Attributes:
        window: its name.
        now_x: the place of the line at now, in percent.
        ticks: places and texts.
        bars: the events that start within it.
        later: how many start after it.
        hidden: how many more there are within it.
    """

    window: str
    now_x: float
    ticks: tuple[tuple[float, str], ...]
    bars: tuple[Bar, ...]
    later: int
    hidden: int


def css_class(event_type: str) -> str:
    """Return the style of a type: what Azure may add gets one of its own."""
    return event_type.lower() if event_type in _KNOWN_TYPES else "other"


def vm_names(event: EventRow, *, max_names: int = MAX_NAMES) -> str:
    """Return the names of the affected VMs, as many as are easy to read."""
    shown = [sanitize(name, 64) for name in event.resources]
    return join_names(shown, max_length=400, max_names=max_names) if shown else "no VM is named"


def headline(events: Sequence[EventRow], now: float, *, vms: int, is_filtered: bool) -> str:
    """Return what is most urgent in one line.

    Args:
        events: those that are shown.
        now: seconds since 1970.
        vms: how many have reported: of none, nothing is known.
        is_filtered: whether others may be left out.
    """
    if not events and is_filtered:
        return "No open event matches the filter"
    if not events:
        return "Nothing is scheduled" if vms else "No VM has reported yet"
    started = sum(event.status == "Started" for event in events)
    waiting = [starts_at(event) for event in events if event.status != "Started"]
    coming = [at for at in waiting if at is not None and at > now]
    total = f"{len(events)} event{'s' * (len(events) != 1)}"
    parts = [f"{started} in progress"] if started else []
    parts += [f"the next in {format_duration(min(coming) - now)}"] if coming else []
    return ", ".join([total, *parts])


def urgency(event: EventRow) -> tuple[bool, float]:
    """Return a key that sorts what has started first, then by the start; an unknown one may be at any time."""
    return event.status != "Started", starts_at(event) or 0.0


def starts_at(event: EventRow) -> float | None:
    """Return when an event starts or has started, None if that is unknown."""
    return event.started_at if event.status == "Started" and event.started_at else event.not_before


def tiles(
    events: Sequence[EventRow], states: Mapping[str, int], now: float
) -> list[tuple[int, str, str, str, str]]:
    """Return the figures at the top: a number, its text, a detail, its style and its address.

    Args:
        events: the open ones.
        states: the number of VMs by state.
        now: seconds since 1970.
    """
    started = [event for event in events if event.status == "Started"]
    waiting = [event for event in events if event.status != "Started"]
    soon = [event for event in waiting if (starts_at(event) or 0.0) < now + HOUR]
    later = [event for event in waiting if (starts_at(event) or 0.0) >= now + HOUR]
    silent = states.get("silent", 0) + states.get("stopped", 0)
    known = sum(states.values()) - states.get("unknown", 0)
    return [
        (len(started), "in progress", _extent(started), "bad", "/?status=Started"),
        (len(soon), "due within 1 h", _extent(soon), "warn", "/?status=Scheduled"),
        (len(later), "due later", _extent(later), "plain", "/?status=Scheduled"),
        (states.get("quiet", 0), "VMs quiet", f"of {known} known", "good", "/fleet?status=quiet"),
        (
            states.get("unreachable", 0),
            "cannot reach IMDS",
            "may miss events",
            "warn",
            "/fleet?status=unreachable",
        ),
        (silent, "silent or stopped", "not watched", "grey", "/fleet?status=silent"),
    ]


def _extent(events: Sequence[EventRow]) -> str:
    """Return on how many VMs events are, and how many of them users caused."""
    vms = len({(event.scope, fold_name(name)) for event in events for name in event.resources})
    users = sum(event.event_source == "User" for event in events)
    return f"on {vms} VM{'s' * (vms != 1)}" + (f", {users} by users" if users else "")


def timeline(events: Sequence[EventRow], now: float, window: str) -> Timeline:
    """Place events on a line from now to the end of the window, on which near times have more room than far ones.

    Args:
        events: the open ones, in the order of their start.
        now: seconds since 1970.
        window: one of WINDOWS.
    """
    length = WINDOWS[window]
    inside = [event for event in events if (starts_at(event) or now) < now + length]
    return Timeline(
        window=window,
        now_x=_NOW_X,
        ticks=tuple((place(tick, length), f"+{format_duration(tick)}") for tick in _TICKS[window]),
        bars=tuple(_bar(event, now, length) for event in inside[:MAX_BARS]),
        later=len(events) - len(inside),
        hidden=max(0, len(inside) - MAX_BARS),
    )


def place(seconds: float, length: float) -> float:
    """Return the place of a time from now on a line of a length, in percent: it grows with the square root."""
    if seconds < 0:
        return round(max(0.0, _NOW_X * (1 + seconds / (length / 24))), 2)
    return round(_NOW_X + (100 - _NOW_X) * sqrt(min(1.0, seconds / length)), 2)


def _bar(event: EventRow, now: float, length: float) -> Bar:
    start = starts_at(event) or now
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
