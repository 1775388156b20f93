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
NOTICE_SHARE = 6  # of what is left of a notice, at most: how long it is held, or waits for a retry
# What has started comes behind all notices, receipts and ends behind that: instants that no notice has, plus when
# they were stored.
HAS_STARTED, RECEIPTS = 1e11, 2e11
RECEIPTS_LANE, REST_LANE = 4, 5


def not_before(event: StoredEvent, otherwise: float) -> float:
    """Return a notice's NotBefore in seconds since 1970; `otherwise` for one without it, as of a started event."""
    at = parse_iso(event.data.get("NotBeforeUtc"))
    return at.timestamp() if at else otherwise


def urgency(event: StoredEvent, wall: float) -> float | None:
    """Return how urgent an event is that is stored at `wall` (seconds since 1970 of the wall clock).

    Returns:
        For a notice the instant of its NotBefore; for what has started, or is long overdue as it comes, HAS_STARTED
        and when it was stored (steady seconds), for another urgent type RECEIPTS and that; None for the rest.
    """
    if event.type.startswith(NOTICES):
        at = not_before(event, -math.inf)
        return HAS_STARTED + event.stored_at if at < wall - YOUNG_SECONDS else at
    return RECEIPTS + event.stored_at if event.type.startswith(URGENT_TYPES) else None


def key_number(envelope: Mapping[str, Json]) -> int:
    """Return a number of 64 bits for an event's order key; two keys that share one merely keep one order."""
    digest = sha256(order_key(envelope).encode("utf-8", "replace")).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


@dataclass(frozen=True, kw_only=True)
class Now:
    """The time by the wall clock, which notices go by, and in steady seconds, which ages go by."""

    wall: float
    steady: float

    @property
    def lanes(self) -> tuple[tuple[float, float], ...]:
        """The ranges of urgency, the most urgent first: notices that start soon, overdue, later; starts; receipts."""
        soon = self.wall + SOON_SECONDS
        (_, overdue), (_, started), (_, young) = self.aged
        return (
            (self.wall, soon),
            (overdue, self.wall),
            (soon, HAS_STARTED),
            (started, RECEIPTS),
            (young, math.inf),
        )

    @property
    def aged(self) -> tuple[tuple[float, float], ...]:
        """The ranges of what is urgent no more: notices, what has started, receipts."""
        young = self.steady - YOUNG_SECONDS
        return (
            (-math.inf, self.wall - YOUNG_SECONDS),
            (HAS_STARTED, HAS_STARTED + young),
            (RECEIPTS, RECEIPTS + young),
        )

    def lane(self, urgent: float | None) -> int:
        """Return the number of the lane of an urgency."""
        lanes = enumerate(self.lanes if urgent is not None else ())
        return next((lane for lane, (low, high) in lanes if low <= (urgent or 0.0) < high), REST_LANE)

    def patience(self, urgent: float | None, stored_at: float) -> float:
        """Return how long an event may wait for a retry, infinite if it is not urgent.

        It is a share of what is left of a notice, and less while an event is young.
        """
        if urgent is None:
            return math.inf
        if urgent >= HAS_STARTED:
            stored_at = urgent % HAS_STARTED
        if stored_at > self.steady - YOUNG_SECONDS:
            return URGENT_LIMIT_SECONDS
        is_left = self.wall <= urgent < HAS_STARTED
        return max(URGENT_LIMIT_SECONDS, (urgent - self.wall) / NOTICE_SHARE) if is_left else math.inf
