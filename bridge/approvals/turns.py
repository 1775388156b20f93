"""Turns: which events may take their VMs away at once, by the document alone.

Every VM of a group reads the same document, and so comes to the same order without a lock or a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile

from bridge.approvals.policy import TERMINATE, has_readable_resources
from bridge.config.approvals import AutoSettings
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, fold_name

# How long an event has to be next: other VMs read the same document up to 2 s earlier or later.
SETTLE_SECONDS = 5.0
END_BEFORE_SECONDS = 10.0  # how long before NotBefore a program gets SIGTERM; SIGKILL follows 5 s later
_ALWAYS, _NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def vms_of(event: ScheduledEvent) -> set[str]:
    """Return the VMs of an event for counting; `Resources` that cannot be read count as one VM more."""
    names = {fold_name(name) for name in event.resources}
    return names if names and has_readable_resources(event) else names | {f"?{event.key}"}


def takes_turns(event: ScheduledEvent) -> bool:
    """Return whether an event waits for its turn and counts; a Terminate does neither."""
    return str(event.raw.get("EventType")).lower() != TERMINATE


def deadline(event: ScheduledEvent, rule: AutoSettings) -> datetime:
    """Return when the rule's program starts without a turn: the event comes in any case."""
    if not rule.run:
        return _NEVER
    if event.not_before is None:
        return _ALWAYS
    return event.not_before - timedelta(seconds=rule.run_timeout_seconds + END_BEFORE_SECONDS)


class Turns:
    """Which events hold a turn; for one thread.

    Args:
        held: the EventIds in lower case that held one when the process stopped.
    """

    def __init__(self, held: Iterable[str] = ()) -> None:
        self.held = set(held)
        self._next_since: dict[str, float] = {}
        self._waiting: dict[AutoSettings, list[ScheduledEvent]] = {}
        self._taken: list[ScheduledEvent] = []
        self._late: dict[AutoSettings, list[ScheduledEvent]] = {}

    def update(
        self, document: Document, rules: Mapping[str, AutoSettings | None], *, now: datetime, at: float
    ) -> bool:
        """Give turns by a new document; a turn is kept while its EventId is in the document.

        Args:
            document: the new one.
            rules: which rule matches each Scheduled event, by EventId in lower case, whatever VMs it names.
            now: the time of day, for deadlines.
            at: when the document was read, monotonic.

        Returns:
            Whether `held` has changed.
        """
        before, events = self.held, [event for event in document.events.values() if takes_turns(event)]
        self.held = {key for key in before if key in document.events}
        waiting: dict[AutoSettings, list[ScheduledEvent]] = defaultdict(list)
        for event in sorted(events, key=lambda event: (event.not_before or _ALWAYS, event.key)):
            rule = rules.get(event.key)
            if rule and rule.max_unavailable and event.status == SCHEDULED and event.key not in self.held:
                waiting[rule].append(event)
        next_ones = self._next(events, waiting)
        self._next_since = {key: self._next_since.get(key, at) for key in next_ones}
        self.held |= {key for key, since in self._next_since.items() if at - since >= SETTLE_SECONDS}
        self._taken = self._take(events)
        self._waiting = {
            rule: [event for event in line if event.key not in self.held] for rule, line in waiting.items()
        }
        self._late = {  # or next: another VM may have given the turn a second or two before
            rule: [event for event in line if event.key in self._next_since or deadline(event, rule) <= now]
            for rule, line in self._waiting.items()
        }
        return self.held != before

    def _take(self, events: Iterable[ScheduledEvent]) -> list[ScheduledEvent]:
        return [event for event in events if event.status == STARTED or event.key in self.held]

    def _next(
        self, events: Iterable[ScheduledEvent], waiting: Mapping[AutoSettings, list[ScheduledEvent]]
    ) -> list[str]:
        """Return the waiting events that may go, as far as this document shows."""
        found = []
        for rule, line in waiting.items():
            ahead = set().union(*map(vms_of, self._take(events)))
            for event in line:
                own = vms_of(event)
                if _have_room(own, ahead, rule):
                    found.append(event.key)
                ahead |= own
        return found

    def first_ahead(self, event: ScheduledEvent, rule: AutoSettings) -> ScheduledEvent | None:
        """Return an event that a waiting one waits for; None if it only has to settle."""
        if event.key in self._next_since:
            return None
        ahead = takewhile(lambda one: one.key != event.key, self._waiting.get(rule, ()))
        return _first_other(event, chain(self._taken, ahead))

    def first_beside(self, event: ScheduledEvent, rule: AutoSettings) -> ScheduledEvent | None:
        """Return an event beside which an approval would be one too many; None if it may be approved."""
        beside = [*self._taken, *self._late.get(rule, ())]
        if _have_room(vms_of(event), set().union(*map(vms_of, beside)), rule):
            return None
        return _first_other(event, beside)


def _have_room(own: set[str], others: set[str], rule: AutoSettings) -> bool:
    """Return whether an event's VMs may go beside others; one that is alone always may."""
    limit = rule.max_unavailable or 0
    if len(others) > limit + len(own):
        return False
    others = others - own
    return not others or len(others) + len(own) <= limit


def _first_other(event: ScheduledEvent, events: Iterable[ScheduledEvent]) -> ScheduledEvent | None:
    own = vms_of(event)
    return next((one for one in events if vms_of(one) - own), None)
