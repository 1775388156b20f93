"""The one value that there must be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def only(values: Iterable[T]) -> T:
    """Return the one value.

    Raises:
        AssertionError: there is none, or there are more, which it lists.
    """
    found = list(values)
    assert len(found) == 1, f"expected one, found {len(found)}: {found}"
    return found[0]
