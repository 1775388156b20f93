"""Decide about deliveries: which events a sink takes, and what an HTTP status means for one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bridge.errors import DeliveryError, Gone, Misconfigured, Rejected, Unavailable
from bridge.model import Json, StoredEvent

RETRY_BASE_SECONDS = 0.5
RETRY_LIMIT_SECONDS = 60.0
# Whoever asks for more is asked again after this: a receiver's slip must not silence a sink for days.
RETRY_AFTER_LIMIT_SECONDS = 3600.0

_LATER = frozenset({408, 425, 429})
_NEVER = frozenset({400, 413, 415, 422})
_GONE = 410


class Filter:
    """Which events a sink takes: `types` with `*`, and `where`, equality with attributes or data.

    A name in `where` is looked for among the attributes first, then in `data`; dots lead into objects. Where
    the event holds a list, one equal element is enough.
    """

    def __init__(self, *, types: Sequence[str] = ("*",), where: Mapping[str, Json] | None = None) -> None:
        patterns = (".*".join(map(re.escape, pattern.split("*"))) for pattern in types)
        self._types = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        self._where = {
            name: tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
            for name, wanted in (where or {}).items()
        }

    def takes(self, event: StoredEvent) -> bool:
        """Tell whether the sink wants an event."""
        return self.takes_type(event.type) and (not self._where or self._matches(event.envelope))

    def takes_type(self, event_type: str) -> bool:
        """Tell whether the sink wants events of this type at all."""
        return self._types.fullmatch(event_type) is not None

    def _matches(self, envelope: Mapping[str, Json]) -> bool:
        return all(_equals_one(_look_up(envelope, name), wanted) for name, wanted in self._where.items())


def _look_up(envelope: Mapping[str, Json], name: str) -> Json:
    if name != "data" and name in envelope:
        return envelope[name]
    value: Json = envelope.get("data")
    for step in name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _equals_one(found: Json, wanted: Sequence[Json]) -> bool:
    candidates = found if isinstance(found, list) else [found]
    # A bool equals 0 or 1 in Python, but not in JSON.
    return any(
        candidate == value and isinstance(candidate, bool) == isinstance(value, bool)
        for candidate in candidates
        for value in wanted
    )


def webhook_error(status: int) -> type[DeliveryError] | None:
    """Say what a webhook's status means; None is success.

    A redirect or an unexpected 4xx means a wrong address or credentials: an expired token must not cost events.
    """
    if 200 <= status < 300:  # noqa: PLR2004 - the 2xx
        return None
    if status in _LATER or status >= 500:  # noqa: PLR2004 - the 5xx
        return Unavailable
    if status in _NEVER:
        return Rejected
    return Gone if status == _GONE else Misconfigured
