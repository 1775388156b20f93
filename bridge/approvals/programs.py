"""The auto rules: which events this VM approves without a command, and the programs that they run first.

An approval, or a drain before it, counts for one content and one stay of an event in the document.

I/O: processes and the log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

from bridge.approvals.policy import Decision, auto_wait_seconds, judge_event
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent
from bridge.runtime.program import Run
from bridge.runtime.time import Clock, iso_utc, parse_instant

log = logging.getLogger(__name__)

GAP_SECONDS = 5.0  # in a longer gap between two documents an event may have left and returned
RECENT_SECONDS = 60.0
END_BEFORE_SECONDS = 10.0  # how long before NotBefore a program gets SIGTERM; SIGKILL follows 5 s later

# What a program gets of an event: the CloudEvent for its standard input, and the event's data.
Notice = Callable[[ScheduledEvent, Document], tuple[bytes, Mapping[str, Any]]]


@dataclass(kw_only=True)
class Stay:
    """An event that was Scheduled with the same content in each document since it was first seen.

    Attributes:
        id: differs for each stay, also for one of the same content.
        event: as it is.
        since: when it was first seen, monotonic.
        approved_at: when IMDS approved it, None if this VM has not asked for that.
    """

    id: str
    event: ScheduledEvent
    since: float
    approved_at: datetime | None = None


class Stays:
    """Knows the stay of each Scheduled event of the last document; for the listener's thread.

    Args:
        stored: returns the committed record of an EventId in lower case, None if there is none.
    """

    def __init__(self, stored: Callable[[str], Any]) -> None:
        self._stored = stored
        self._document: Document | None = None
        self._read_at = 0.0
        self._stays: dict[str, Stay] = {}

    def update(self, document: Document, *, read_at: float) -> list[str]:
        """Forget the stay of each event that has left, changed or started; begin one for each that is new.

        Args:
            document: the last one, perhaps once more.
            read_at: when it was read, monotonic.

        Returns:
            The EventIds whose approval counts no more.
        """
        if document is self._document:
            return []
        before = self._stays
        known = before if self._follows(document, read_at) else {}
        self._stays = {
            key: self._continued(known.get(key), event) or self._begun(event, document, read_at)
            for key, event in document.events.items()
            if event.status == SCHEDULED
        }
        self._document, self._read_at = document, read_at
        return [
            stay.event.event_id
            for key, stay in before.items()
            if stay.approved_at and self._stays.get(key) is not stay
        ]

    def _follows(self, document: Document, read_at: float) -> bool:
        """Return whether no event can have left and returned between the last document and this one."""
        before = self._document.incarnation if self._document else None
        return read_at - self._read_at <= GAP_SECONDS or (
            before is not None and before == document.incarnation
        )

    def _continued(self, stay: Stay | None, event: ScheduledEvent) -> Stay | None:
        if stay is None or (stay.event.raw != event.raw and stay.event.content != event.content):
            return None
        return stay

    def _begun(self, event: ScheduledEvent, document: Document, read_at: float) -> Stay:
        stay = Stay(id=uuid4().hex, event=event, since=read_at)
        stored = self._stored(event.key) if self._document is None else None
        if stored and document.incarnation is not None and stored["place"] == _place(document, event):
            stay.id, stay.approved_at = stored["stay"], parse_instant(stored["at"])
        return stay

    def get(self, key: str) -> Stay | None:
        """Return the stay of an EventId in lower case, None if the document does not show it Scheduled."""
        return self._stays.get(key)

    def approve(self, key: str, *, at: datetime) -> None:
        """Note that IMDS has approved an event that is Scheduled."""
        self._stays[key].approved_at = at

    def record(self, key: str) -> dict[str, Any]:
        """Return what is stored of the stay of an EventId that is Scheduled."""
        stay = self._stays[key]
        assert self._document is not None  # noqa: S101 - there is a stay
        return {
            "stay": stay.id,
            "place": _place(self._document, stay.event),
            "at": iso_utc(stay.approved_at) if stay.approved_at else None,
        }

    def is_approved(self, event: ScheduledEvent, *, now: datetime) -> bool:
        """Return whether IMDS approved an event of the document within the last minute, and for this stay."""
        stay = self._stays.get(event.key)
        at = stay.approved_at if stay else None
        if event.status == STARTED and (stored := self._stored(event.key)):
            at = parse_instant(stored["at"])
        return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


def _place(document: Document, event: ScheduledEvent) -> list[Any]:
    """Return what is the same while a process restarts, unless the document has changed meanwhile."""
    content = sha256(json.dumps(event.content, sort_keys=True).encode()).hexdigest()
    return [document.incarnation, content]


def run_seconds(event: ScheduledEvent, *, timeout_seconds: float, now: datetime) -> float:
    """Return how long a program that is started now may run, 0 or less if there is no time for it.

    Args:
        event: what the program is for; it has to end before NotBefore.
        timeout_seconds: the rule's limit.
        now: the time of day.
    """
    if event.not_before is None:
        return timeout_seconds
    return min(timeout_seconds, (event.not_before - now).total_seconds() - END_BEFORE_SECONDS)


def command_key(stay: Stay) -> str:
    """Return the key of the command that an auto rule makes for a stay."""
    return f"auto:{stay.event.key}:{stay.id}"


@dataclass(eq=False, kw_only=True)
class AutoRules:
    """Approves events without a command, once this VM is known; for the listener's thread.

    Args:
        settings: the policy and the auto rules.
        stays: of the events in the document.
        vm_name: returns this VM's name.
        notice: makes what a program gets.
        clock: for turns and the rules about the notice.
        run: makes the run of a program; None for a dry run, which runs none.
    """

    settings: ApprovalSettings
    stays: Stays
    vm_name: Callable[[], str]
    notice: Notice
    clock: Clock
    run: Callable[..., Run] | None
    _runs: dict[tuple[str, str], Run] = field(default_factory=dict)  # by EventId in lower case and stay

    def due(self, document: Document) -> Iterator[tuple[str, ScheduledEvent]]:
        """Yield the events that a rule matches, once it is this VM's turn, with the key of a command for the stay."""
        stays = [stay for key in document.events if (stay := self.stays.get(key))]
        self._end_others({(stay.event.key, stay.id) for stay in stays})
        for stay in stays:
            event = document.events[stay.event.key]
            turn = None if stay.approved_at else self._turn(event)
            if turn and self.clock.monotonic() - stay.since >= turn[0]:
                yield command_key(stay), event

    def judge(self, event: ScheduledEvent, document: Document) -> Decision | None:
        """Decide about a Scheduled event that was due; None while its program runs, which this starts."""
        turn = self._turn(event)
        refusal = self._refusal(turn[1], event, document) if turn else "no auto rule matches"
        if refusal is None:
            return None
        if refusal:
            return Decision(outcome="rejected", reason="denied", detail=refusal, event=event)
        return Decision(outcome="accepted", reason="approved", detail="an auto rule", event=event)

    def _refusal(self, rule: AutoSettings, event: ScheduledEvent, document: Document) -> str | None:
        """Return "" if the rule needs no program or its program has succeeded, None while it runs, else a reason."""
        if not rule.run or not self.run:
            return ""
        now = self.clock.now()
        left_seconds = run_seconds(event, timeout_seconds=rule.run_timeout_seconds, now=now)
        stay = self.stays.get(event.key)
        assert stay is not None  # noqa: S101 - the event is Scheduled
        place = (event.key, stay.id)
        run = self._runs.get(place)
        if run is None or (run.result and run.result.ended_by == "stop"):
            if left_seconds <= 0:
                return f"{rule.run[0]}: there was not enough time before NotBefore"
            if any(key == event.key for key, _ in self._runs.keys() - {place}):
                return None  # the program of an earlier stay is still ending
            body, data = self.notice(event, document)
            run = self._runs[place] = self.run(rule.run, body, data, timeout_seconds=left_seconds)
            log.info("running %s", rule.run[0], extra={"event_id": event.event_id})
            run.start()
        if run.result is None:
            return None
        return f"{rule.run[0]}: {run.result.fault}" if run.result.fault else ""

    def end(self) -> None:
        """End every program soon; a later process runs them again if there is still time."""
        self._end_others(set())

    def _end_others(self, stays: set[tuple[str, str]]) -> None:
        """End the programs of all stays but these, and forget those that have ended."""
        for one in self._runs.keys() - stays:
            self._runs[one].end()
            if self._runs[one].result:
                del self._runs[one]

    def _turn(self, event: ScheduledEvent) -> tuple[float, AutoSettings] | None:
        """Return how long this VM leaves the event to others and by which rule, None if no auto rule approves it."""
        name, turns = self.vm_name(), []
        for rule in self.settings.auto:
            policy = self.settings.policy.model_copy(update={"allow": (rule,)})
            decision = judge_event(event, vm_name=name, policy=policy, now=self.clock.now())
            wait_seconds = auto_wait_seconds(event, vm_name=name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                turns.append((wait_seconds, rule))
        return min(turns, key=lambda turn: turn[0], default=None)
