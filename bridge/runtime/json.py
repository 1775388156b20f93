"""JSON from outside: its type and the limit on its depth."""

from __future__ import annotations

from typing import Any

Json = Any  # whatever json.loads gives


def is_deeper(value: Json, limit: int) -> bool:
    """Tell whether lists and objects are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True
