"""Text for people: tables and durations."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Line up columns; the last one may be as long as it likes."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip()
        for row in (header, *rows)
    )


def duration(seconds: float) -> str:
    """Say how long `seconds` are in the two largest units, for example `2 h 5 min`."""
    left = round(abs(seconds))
    parts: list[str] = []
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def countdown(seconds: float) -> str:
    """Say when something is: `in 14 min 3 s` or `12 s ago`."""
    return f"in {duration(seconds)}" if seconds > 0 else f"{duration(seconds)} ago"
