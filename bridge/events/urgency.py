"""Which events come first: how urgent one is, and what keeps its order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from bridge.events.model import StoredEvent, order_key
from bridge.runtime.json import Json
from bridge.runtime.time import parse_iso

NOTICES = tuple(f"io.imdsbridge.scheduledevent.{kind}." for kind in ("scheduled", "started", "updated"))
URGENT_TYPES = ("io.imdsbridge.scheduledevent.", "io.imdsbridge.approval.")
# Young, or overdue, for as long as IMDS's longest usual notice.
YOUNG_SECONDS = 900.0
URGENT_LIMIT_SECONDS = 2.0  # between its tries: a notice may be of 30 s, and an approver waits for a receipt
SOON_SECONDS = 120.0
# What has started, or is late as it comes, is as urgent as a notice of this length.
LATE_SECONDS = 60.0
# Receipts and ends come behind all notices: an instant that no notice has, plus when they were stored.
RECEIPTS = 1e11
RECEIPTS_LANE, REST_LANE = 3, 4


def not_before(event: StoredEvent, otherwise: float) -> float:
    """Return a notice's NotBefore in seconds since 1970; `otherwise` for one without it, as of a started event."""
    at = parse_iso(event.data.get("NotBeforeUtc"))
    return at.timestamp() if at else otherwise


def urgency(event: StoredEvent, wall: float) -> float | None:
    """Return how urgent an event is that is stored at `wall` (seconds since 1970 of the wall clock).

    Returns:
        For a notice the instant of its NotBefore, for another urgent type RECEIPTS and when it was stored (steady
        seconds), None for the rest.
    """
    if event.type.startswith(NOTICES):
        at = not_before(event, wall)
        return at if at > wall else wall + LATE_SECONDS
    return RECEIPTS + event.stored_at if event.type.startswith(URGENT_TYPES) else None


def key_number(envelope: Mapping[str, Json]) -> int:
    """Return a number of 64 bits for an event's order key; two keys that share one merely keep one order."""
    digest = sha256(order_key(envelope).encode("utf-8", "replace")).digest()[:8]
    return int.from_bytes(digest, "big", signed=True)


@dataclass(frozen=True, kw_only=True)
class Now:
    """The time by the wall clock, which notices go by, and in steady seconds, which ages go by."""

    wall: float
    steady: float

    @property
    def lanes(self) -> tuple[tuple[float, float], ...]:
        """The ranges of urgency, the most urgent first: notices that start soon, overdue and later ones; receipts."""
        soon = self.wall + SOON_SECONDS
        (_, overdue), (_, young) = self.aged
        return (self.wall, soon), (overdue, self.wall), (soon, RECEIPTS), (young, math.inf)

    @property
    def aged(self) -> tuple[tuple[float, float], ...]:
        """The ranges of what is urgent no more: notices, receipts."""
        return (-math.inf, self.wall - YOUNG_SECONDS), (RECEIPTS, RECEIPTS + self.steady - YOUNG_SECONDS)
