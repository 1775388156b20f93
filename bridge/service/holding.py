"""Decide how long events are held at a sink before they are sent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase

from bridge.events.model import StoredEvent, is_alarm
from bridge.runtime.time import Clock
from bridge.service.schedule import NOTICES, Holding, not_before

# How soon a second digest follows the first, and how soon what cannot gather is sent.
FIRST_SECONDS = 30.0
ALARM_SECONDS = 2.0
# How long copies are held at most, a sixth of the usual notice: 500 events in a minute fit a namespace (tests/scale).
HOLD_SECONDS = 150.0
STARTED = "io.imdsbridge.scheduledevent.started."
NOTICE_SHARE = 6  # of the notice that is left, at most


@dataclass
class Gathering(Holding):
    """When the events that wait are sent as one digest; times are in steady seconds.

    The first event after `digest_seconds` without a message is sent at once, what follows after FIRST_SECONDS, and
    then every `digest_seconds`. What cannot wait so long shortens that to ALARM_SECONDS.
    """

    is_digest = True
    digest_seconds: float
    clock: Clock
    sent_at: float = -math.inf
    pause_seconds: float = 0.0

    def due_at(self, events: Sequence[StoredEvent]) -> float:
        """Return when to send events that wait."""
        due_at = self.sent_at + self.pause_seconds
        until = due_at - self.clock.steady() + self.clock.wall()
        alarms = (event.stored_at + ALARM_SECONDS for event in events if cannot_wait(event, until))
        return min([due_at, *alarms])

    def note_sent(self, events: Sequence[StoredEvent]) -> None:
        """Note that the receiver has accepted events."""
        is_first = events[0].stored_at >= self.sent_at + self.digest_seconds
        self.sent_at = self.clock.steady()
        self.pause_seconds = min(self.digest_seconds, FIRST_SECONDS if is_first else math.inf)


def cannot_wait(event: StoredEvent, until: float) -> bool:
    """Return whether an event is bad news, or a notice that starts before `until` (of the wall clock)."""
    is_notice = event.data.get("EventStatus") == "Scheduled" and fnmatchcase(event.type, NOTICES)
    return is_alarm(event.envelope) or (is_notice and not_before(event).timestamp() < until)


@dataclass
class Copies(Holding):
    """Holds copies: events that name only other VMs, of which duplicate detection keeps one. A restart sends all.

    The VMs that an event names send it at once. The others of a group hold their copies for a random time, so that
    hundreds of events within a minute neither throttle a namespace nor take its connections; the first copy arrives
    soon if no named VM has sent the event: in groups of n VMs after HOLD_SECONDS / n on average.
    What comes while copies are held goes with them, and anything else ends the hold: so a VM connects once for
    several, and the order stays.
    """

    is_digest = False
    clock: Clock
    until: float = -math.inf
    judged_to: int = 0

    def due_at(self, events: Sequence[StoredEvent]) -> float:
        """Return when to send events that wait: at once unless all of them are copies."""
        now = self.clock.steady()
        if not events:
            self.until = math.inf
        for event in events:
            limit = hold_seconds(event, self.clock.now()) if event.seq > self.judged_to else math.inf
            if now + limit < self.until:
                self.until = now + limit * random.random()  # noqa: S311 - it spreads load
        self.judged_to = max([self.judged_to, *(event.seq for event in events)])
        return self.until

    def note_sent(self, events: Sequence[StoredEvent]) -> None:
        """Nothing changes: what else waits is due, too."""


def hold_seconds(event: StoredEvent, now: datetime) -> float:
    """Return for how long an event may be held at most: 0 if it is not a copy, or came without notice."""
    if event.data.get("AffectsThisVm") is not False:
        return 0.0
    is_unannounced = not (event.type.startswith(STARTED) and event.data.get("PreviousStatus"))
    if fnmatchcase(event.type, NOTICES) and is_unannounced:
        left_seconds = (not_before(event) - now).total_seconds()
        return max(0.0, min(HOLD_SECONDS, left_seconds / NOTICE_SHARE))
    return HOLD_SECONDS
