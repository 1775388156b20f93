"""Lay out tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.runtime.text import escape


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns; the last one can have any width."""
    cells = [[escape(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header) - 1)]
    return [
        "  ".join([cell.ljust(width) for cell, width in zip(row, widths, strict=False)] + [row[-1]]).rstrip()
        for row in cells
    ]
