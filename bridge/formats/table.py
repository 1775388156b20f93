"""Print tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align columns; the last one can have any width."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header) - 1)]
    return "\n".join(
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip()
        for row in (header, *rows)
    )
