"""What tests know of the order that delivery promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from bridge.events.model import order_key


def by_order_key(envelopes: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the ids of events in their order, apart for each EventId and reporter; a repeated one counts once."""
    ids: dict[str, dict[str, None]] = defaultdict(dict)
    for envelope in envelopes:
        ids[order_key(envelope)][envelope["id"]] = None
    return {key: list(found) for key, found in ids.items()}
