"""Text for people: durations, lists of names and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from bridge.runtime.json import Json
from bridge.runtime.text import escape, length, truncate
from bridge.runtime.time import parse_instant

DAY_SECONDS = 86_400

_UNITS = (("d", DAY_SECONDS), ("h", 3600), ("min", 60), ("s", 1))
_EXACT_SECONDS = 120
_INSTANT_LENGTH = 64
_YEARS = range(1971, 9998)  # whose instants exist in any time zone


def format_duration(seconds: float, *, exact: bool = False) -> str:
    """Write a duration in its two largest units, for example `45 s`, `15 min` or `6 d 4 h`.

    Args:
        seconds: of any sign, which is not shown.
        exact: whether to show seconds beside minutes.
    """
    show_seconds = exact or abs(seconds) < _EXACT_SECONDS
    left = round(abs(seconds)) if show_seconds else 60 * round(abs(seconds) / 60)
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def format_relative(seconds: float, *, exact: bool = False) -> str:
    """Write when something is, `seconds` from now: `in 15 min` or `3 min ago`; see format_duration."""
    text = format_duration(seconds, exact=exact)
    return f"in {text}" if seconds > 0 else f"{text} ago"


def plural(number: int, noun: str) -> str:
    """Write a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def describe_wave(
    count: int,
    noun: str,
    when: str,
    *,
    group: str = "",
    vms: int = 0,
    states: Mapping[str, int] | None = None,
) -> tuple[str, str]:
    """Write many events of one type as `24 Reboots of shop-web, 120 VMs, until`, and `; 96 prepared; 3 overdue`.

    Args:
        count: how many events there are.
        noun: their type.
        when: what comes before a time that the caller writes in between, or all that is said of them.
        group: that all of them are of, "" for several or none.
        vms: how many they name, 0 to leave it out.
        states: how many there are in each, in words.
    """
    place = f" of {group}" * bool(group) + f", {plural(vms, 'VM')}," * bool(vms)
    more = "".join(f"; {number} {state}" for state, number in (states or {}).items())
    return f"{plural(count, noun)}{place} {when}", more


def join_names(
    names: Sequence[str], *, max_length: int, max_names: int | None = None, total: int | None = None
) -> str:
    """Write as many names as fit, and how many more there are.

    Args:
        names: sanitized.
        max_length: of the result in UTF-16 units, at least about 20.
        max_names: how many names to write at most.
        total: how many names there are, if `names` are only the first of them.
    """
    count = len(names) if total is None else total
    shown: list[str] = []
    left = max_length - len(f" and {count} more")
    for name in names[:max_names]:
        left -= length(name) + 2
        if left < 0 and shown:
            break
        shown.append(name)
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return truncate(", ".join(shown), max_length - len(more), mark="…") + more


def instant_of(value: Json) -> datetime | None:
    """Read an instant that can be shown in any time zone; None if it is none."""
    if not isinstance(value, str) or len(value) > _INSTANT_LENGTH:
        return None
    instant = parse_instant(value)
    return instant if instant and instant.year in _YEARS else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns; the last one can have any width."""
    cells = [[escape(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip()
        for row in cells
    ]
