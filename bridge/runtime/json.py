"""JSON from outside, read within limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Whatever json.loads gives.
Json = Any

_TOO_DEEP = "JSON nested too deeply"


def object_of(value: Json) -> Mapping[str, Json]:
    """Return an object, or an empty one in the place of any other value."""
    return value if isinstance(value, Mapping) else {}


class BoundedDecoder(json.JSONDecoder):
    """A decoder that refuses JSON whose lists and objects are nested deeper than `max_depth`.

    Args:
        max_depth: how many levels may lie in each other.
        options: those of json.JSONDecoder.
    """

    def __init__(self, *, max_depth: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_depth = max_depth

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Json, int]:
        """Read the JSON that starts at `idx`; return it and where it ends.

        Raises:
            ValueError: it is not JSON, or nested too deeply.
        """
        try:
            value, end = super().raw_decode(s, idx)
        except RecursionError:
            raise ValueError(_TOO_DEEP) from None
        if is_deeper(value, self._max_depth):
            raise ValueError(_TOO_DEEP)
        return value, end


def read_object(
    body: bytes, *, max_bytes: int, decoder: json.JSONDecoder, encoding: str = "utf-8"
) -> dict[str, Json]:
    """Read a body that has to be one JSON object.

    Args:
        body: as received.
        max_bytes: the size of the largest body that is read.
        decoder: what bounds the depth and decides about numbers.
        encoding: `utf-8-sig` to allow a byte order mark.

    Raises:
        ValueError: it is not; the text says what it is instead.
    """
    if len(body) > max_bytes:
        raise ValueError(f"{len(body)} bytes, expected at most {max_bytes}")
    try:
        value = decoder.decode(body.decode(encoding))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def is_deeper(value: Json, limit: int) -> bool:
    """Return whether lists and objects are nested deeper than `limit`."""
    level = [value] if isinstance(value, dict | list) else []
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
