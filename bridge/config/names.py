"""Compare names that somebody wrote with those that exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

_SLIP_LETTERS = 2


def nearest(name: object, known: Iterable[str]) -> str:
    """Return "; did you mean X?" with the known name that is nearest, "" if none is near."""
    meant = closest(name, known)
    return f"; did you mean {meant}?" if meant else ""


def closest(name: object, known: Iterable[str], *, similarity: float = 0.5) -> str | None:
    """Return the known name that is nearest in any letter case, None if none is as similar (0 to 1)."""
    by_lower = {one.lower(): one for one in known}
    close = get_close_matches(str(name).lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[close[0]] if close else None


def likely_meant(value: str, known: Collection[str]) -> str | None:
    """Return the known value that is within two letters of an unknown one, in any letter case; None if none is."""
    if value in known:
        return None
    return next((one for one in known if _distance(value.lower(), one.lower()) <= _SLIP_LETTERS), None)


def _distance(one: str, other: str) -> int:
    """Count the letters to insert, delete or replace."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, opposite in enumerate(other, 1):
            replaced = diagonal + (letter != opposite)
            diagonal, row[column] = row[column], min(replaced, row[column] + 1, row[column - 1] + 1)
    return row[-1]
