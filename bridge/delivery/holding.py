"""Decide how long events are held at a sink before they are sent.

I/O: the clock, and chance.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import datetime

from bridge.events.model import StoredEvent, is_alarm
from bridge.events.urgency import NOTICE_SHARE, NOTICES, not_before
from bridge.runtime.time import Clock

HELD_EVENTS = 500  # at most, and in one digest
# How soon a second digest follows the first, and how soon what cannot gather is sent.
FIRST_SECONDS = 30.0
ALARM_SECONDS = 2.0
SHORT_SECONDS = 30.0  # a notice of this length cannot gather
# How long copies are held at most, a sixth of the usual notice: 500 events in a minute fit a namespace (tools/scale).
HOLD_SECONDS = 150.0
STARTED = "io.imdsbridge.scheduledevent.started."


@dataclass(frozen=True)
class Gathering:
    """When the events that wait are sent as one digest.

    The first event after `digest_seconds` without a message is sent at once, what follows after FIRST_SECONDS, and
    then every `digest_seconds`. Bad news waits for ALARM_SECONDS, a notice for a share of what is left of it.
    """

    digest_seconds: float
    clock: Clock
    is_digest = True

    def until(self, event: StoredEvent) -> float:
        """Return until when an event that is stored now is held, in steady seconds, unless a pause is over before."""
        if is_alarm(event.envelope):
            return event.stored_at + ALARM_SECONDS
        if event.data.get("EventStatus") == "Scheduled" and event.type.startswith(NOTICES):
            wall = self.clock.wall()
            left_seconds = not_before(event, wall) - wall
            return event.stored_at + max(ALARM_SECONDS, (left_seconds - SHORT_SECONDS) / NOTICE_SHARE)
        return math.inf

    def pause_seconds(self, stored_at: float, sent_at: float) -> float:
        """Return for how long others are held at most once an event that was stored at `stored_at` was accepted.

        `sent_at` is when something was accepted before. All are steady seconds.
        """
        is_first = stored_at >= sent_at + self.digest_seconds
        return min(self.digest_seconds, FIRST_SECONDS if is_first else math.inf)


@dataclass(frozen=True)
class Copies:
    """Holds copies: events that name only other VMs, of which duplicate detection keeps one. A restart sends all.

    The VMs that an event names send it at once. The others of a group hold their copies for a random time, so that
    hundreds of events within a minute neither throttle a namespace nor take its connections; the first copy arrives
    soon if no named VM has sent the event: in groups of n VMs after HOLD_SECONDS / n on average.
    What comes while copies are held goes with them, and anything else ends the hold: so a VM connects once for
    several, and the order stays.
    """

    clock: Clock
    is_digest = False

    def until(self, event: StoredEvent) -> float | None:
        """Return until when a copy is held."""
        seconds = hold_seconds(event, self.clock.now())
        return event.stored_at + seconds * random.random() if seconds else None  # noqa: S311 - it spreads load

    def pause_seconds(self, stored_at: float, sent_at: float) -> float:  # noqa: ARG002 - it has no pause
        """Return that nothing but its own time ends the hold of a copy."""
        return math.inf


Holding = Gathering | Copies
"""What decides how long events are held; with `is_digest`, those that wait are then one message."""


def hold_seconds(event: StoredEvent, now: datetime) -> float:
    """Return for how long an event may be held at most: 0 if it is not a copy, or came without notice."""
    if event.data.get("AffectsThisVm") is not False:
        return 0.0
    is_unannounced = not (event.type.startswith(STARTED) and event.data.get("PreviousStatus"))
    if event.type.startswith(NOTICES) and is_unannounced:
        left_seconds = not_before(event, now.timestamp()) - now.timestamp()
        return max(0.0, min(HOLD_SECONDS, left_seconds / NOTICE_SHARE))
    return HOLD_SECONDS
