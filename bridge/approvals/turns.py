"""Turns: which events may take their VMs away at once, by the document alone.

Every VM of a group reads the same document, and so comes to the same order without a lock or a message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import chain, takewhile

from bridge.approvals.policy import TERMINATE
from bridge.approvals.state import EventState
from bridge.config.approvals import AutoSettings
from bridge.imds.document import ADVISORY, STARTED, ScheduledEvent

# How long an event has to be next: other VMs read the same document up to 2 s earlier or later.
SETTLE_SECONDS = 5.0
SPARE_SECONDS = 10.0  # what a program that starts at its deadline has to spare
_ALWAYS, _NEVER = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def vms_of(event: ScheduledEvent) -> set[str]:
    """Return the VMs of an event for counting; `Resources` that cannot be read count as one VM more."""
    return {*event.vms} if event.names_all_vms else {*event.vms, f"?{event.key}"}


def takes_turns(event: ScheduledEvent) -> bool:
    """Return whether an event waits for its turn and counts; a Terminate does neither."""
    return str(event.raw.get("EventType")).lower() != TERMINATE


def deadline(event: ScheduledEvent, rule: AutoSettings) -> datetime:
    """Return when the rule's program starts without a turn: the event comes in any case."""
    if not rule.run or event.status == ADVISORY:
        return _NEVER
    if event.not_before is None:
        return _ALWAYS
    needed = timedelta(seconds=rule.run_timeout_seconds + SPARE_SECONDS)
    return max(event.not_before, _ALWAYS + needed) - needed


@dataclass(frozen=True, kw_only=True)
class Order:
    """Who goes when, by one document.

    Attributes:
        taken: events that have started or hold a turn.
        waiting: for each rule the events that wait for their turn, the next one first.
        beside: for each rule those that may leave soon without one: they are next, or past their deadline.
    """

    taken: Sequence[ScheduledEvent]
    waiting: Mapping[AutoSettings, Sequence[EventState]]
    beside: Mapping[AutoSettings, Sequence[ScheduledEvent]]

    def first_ahead(self, one: EventState, rule: AutoSettings) -> ScheduledEvent | None:
        """Return an event that a waiting one waits for; None if it only has to settle."""
        if one.next_since is not None:
            return None
        ahead = takewhile(lambda other: other.event.key != one.event.key, self.waiting.get(rule, ()))
        return _first_other(one.event, chain(self.taken, (other.event for other in ahead)))

    def first_beside(self, event: ScheduledEvent, rule: AutoSettings) -> ScheduledEvent | None:
        """Return an event beside which an approval would be one too many; None if it may be approved."""
        beside = [*self.taken, *self.beside.get(rule, ())]
        if _have_room(vms_of(event), set().union(*map(vms_of, beside)), rule):
            return None
        return _first_other(event, beside)


def give_turns(
    events: Mapping[str, EventState], *, now: datetime, at: float
) -> tuple[dict[str, EventState], Order]:
    """Give turns by a new document; a turn is kept while its EventId is in the document, or may come back.

    Args:
        events: by EventId in lower case, each with the rule that matches it, whatever VMs it names.
        now: the time of day, for deadlines.
        at: when the document was read, monotonic.

    Returns:
        The events, some of which have a turn now, and the order that follows from that.
    """
    lines: dict[AutoSettings, list[EventState]] = defaultdict(list)
    for one in sorted(events.values(), key=lambda one: (one.event.not_before or _ALWAYS, one.event.key)):
        if one.rule and one.rule.max_unavailable and takes_turns(one.event) and not one.has_turn:
            lines[one.rule].append(one)
    next_ones = set(_next(_taken(events.values()), lines))
    given = {key: _with_turn(one, at, is_next=key in next_ones) for key, one in events.items()}
    waiting = {
        rule: [one for known in line if not (one := given[known.event.key]).has_turn]
        for rule, line in lines.items()
    }
    beside = {  # another VM may have given the turn a second or two before
        rule: [one.event for one in line if one.next_since is not None or deadline(one.event, rule) <= now]
        for rule, line in waiting.items()
    }
    return given, Order(taken=_taken(given.values()), waiting=waiting, beside=beside)


def _taken(events: Iterable[EventState]) -> list[ScheduledEvent]:
    return [
        one.event
        for one in events
        if takes_turns(one.event) and (one.event.status == STARTED or one.has_turn)
    ]


def _with_turn(one: EventState, at: float, *, is_next: bool) -> EventState:
    """Return an event that is next or not; it gets its turn once it has been next for long enough."""
    if not is_next:
        return replace(one, next_since=None)
    next_since = at if one.next_since is None else one.next_since
    return replace(one, next_since=next_since, has_turn=at - next_since >= SETTLE_SECONDS)


def _next(
    taken: Iterable[ScheduledEvent], waiting: Mapping[AutoSettings, Sequence[EventState]]
) -> Iterator[str]:
    """Yield the waiting events that may go, as far as this document shows."""
    gone = set().union(*map(vms_of, taken))
    for rule, line in waiting.items():
        ahead = set(gone)
        for one in line:
            own = vms_of(one.event)
            if _have_room(own, ahead, rule):
                yield one.event.key
            ahead |= own


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
