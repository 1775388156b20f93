"""The auto rules: which events this VM approves without a command, and the programs that they run first.

An approval, or a drain before it, counts for one content and one stay of an event in the document.

I/O: processes and the log.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from hashlib import sha256
from typing import Any, Protocol
from uuid import uuid4

from bridge.approvals.policy import Decision, auto_wait_seconds, denial, matches, rejected
from bridge.approvals.turns import END_BEFORE_SECONDS, Turns, deadline, takes_turns, vms_of
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.imds.diff import CONTINUOUS_SECONDS
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, is_among
from bridge.runtime.program import Run
from bridge.runtime.time import Clock, iso_utc, parse_instant

log = logging.getLogger(__name__)

RECENT_SECONDS = 60.0


@dataclass(kw_only=True)
class Stay:
    """An event that was Scheduled with the same content in each document since it was first seen.

    Attributes:
        id: differs for each stay, also for one of the same content.
        event: as it is.
        since: when it was first seen, monotonic.
        approved_at: when IMDS approved it, None if this VM has not asked for that.
        prepared_by: the id of the rule whose program has succeeded for it, "" if none has.
    """

    id: str
    event: ScheduledEvent
    since: float
    approved_at: datetime | None = None
    prepared_by: str = ""


class Stays:
    """Knows the stay of each Scheduled event of the last document; for the listener's thread.

    Args:
        stored: returns the committed record of an EventId in lower case, None if there is none.
    """

    def __init__(self, stored: Callable[[str], Any]) -> None:
        self._stored = stored
        self._document: Document | None = None
        self._read_at = -math.inf
        self._absent_at: dict[str, float] = {}
        self._stays: dict[str, Stay] = {}
        self._started: dict[str, Stay] = {}  # the last stay of events that have started

    def update(self, document: Document, *, read_at: float) -> list[str]:
        """Forget the stay of each event that has left, changed or started; begin one for each that is new.

        Args:
            document: a new one.
            read_at: when it was read, monotonic.

        Returns:
            The EventIds whose approval counts no more.
        """
        before = self._stays
        self._absent_at = {key: self._absent_at.get(key, self._read_at) for key in document.events}
        known, started = (before, self._started) if self._follows(document, read_at) else ({}, {})
        self._started = {
            key: stay
            for key, event in document.events.items()
            if event.status == STARTED and (stay := known.get(key) or started.get(key))
        }
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
        before, now = self._document.incarnation if self._document else None, document.incarnation
        if before is None or now is None:
            return read_at - self._read_at <= CONTINUOUS_SECONDS
        return now == before or (now == before + 1 and read_at - self._read_at <= CONTINUOUS_SECONDS)

    def _continued(self, stay: Stay | None, event: ScheduledEvent) -> Stay | None:
        if stay is None or (stay.event.raw != event.raw and stay.event.content != event.content):
            return None
        return stay

    def _begun(self, event: ScheduledEvent, document: Document, read_at: float) -> Stay:
        stay = Stay(id=uuid4().hex, event=event, since=read_at)
        stored = self._stored(event.key) if self._document is None else None
        if stored and document.incarnation is not None and stored["place"] == _place(document, event):
            stay.id, stay.approved_at = stored["stay"], parse_instant(stored["at"])
            stay.prepared_by = stored.get("prepared_by", "")
        return stay

    def absent_at(self, key: str) -> float:
        """Return when the last document without an event of the last document was read, monotonic; -inf for none."""
        return self._absent_at.get(key, -math.inf)

    def get(self, key: str) -> Stay | None:
        """Return the stay of an EventId in lower case, None if the document does not show it Scheduled."""
        return self._stays.get(key)

    def id(self, key: str) -> str:
        """Return the id of the stay of an EventId in lower case, "" if the document does not show it Scheduled."""
        return self._stays[key].id if key in self._stays else ""

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
            "prepared_by": stay.prepared_by,
        }

    def is_approved(self, event: ScheduledEvent, *, now: datetime) -> bool:
        """Return whether IMDS approved an event of the document within the last minute, and for this stay."""
        stay = self._stays.get(event.key) or self._started.get(event.key)
        at = stay.approved_at if stay and _released(stay.event) == _released(event) else None
        return at is not None and 0 <= (now - at).total_seconds() <= RECENT_SECONDS


def _released(event: ScheduledEvent) -> list[Any]:
    """Return what an approval releases."""
    return [event.content.get("EventType"), event.content.get("Resources")]


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


@cache
def rule_id(rule: AutoSettings) -> str:
    """Return what stands for a rule in stored records: a rule that was changed is another one."""
    return sha256(rule.model_dump_json().encode()).hexdigest()[:16]


def command_key(stay: Stay, rule: AutoSettings) -> str:
    """Return the key of the command that an auto rule makes for a stay."""
    return f"auto:{stay.event.key}:{stay.id}:{rule_id(rule)}"


@dataclass(frozen=True, kw_only=True)
class View:
    """What the auto rules make of an event of this VM.

    Attributes:
        event: as it is.
        why: what it waits for, or why no rule approves it.
        key: of the command that the rule that decides makes, "" if there is none.
        behind: the event that is first, where it waits for its turn.
        decision: None while it waits.
        has_failed: whether its program has failed, or had no time.
    """

    event: ScheduledEvent
    why: str
    key: str = ""
    behind: ScheduledEvent | None = None
    decision: Decision | None = None
    has_failed: bool = False


@dataclass(kw_only=True)
class _Program:
    """The program of a rule for a stay."""

    stay: Stay
    rule: AutoSettings
    run: Run
    began_at: float
    is_noted: bool = False


class Effects(Protocol):
    """What the auto rules have done besides deciding."""

    def notice(self, event: ScheduledEvent, document: Document) -> tuple[bytes, Mapping[str, Any]]:
        """Return what a program gets of an event: the CloudEvent for its standard input, and the event's data."""

    def keep_turns(self, held: set[str]) -> None:
        """Store which events hold a turn, before a program starts."""

    def prepared(
        self, event: ScheduledEvent, *, key: str, seconds: float, fault: str, record: dict[str, Any] | None
    ) -> None:
        """Note how a program has ended; publish it, and store the stay's record, if it has no fault."""

    def started_unprepared(self, event: ScheduledEvent) -> None:
        """Note that an event of this VM has started although its program has not succeeded."""


@dataclass(eq=False, kw_only=True)
class AutoRules:
    """Prepares this VM for events and approves them without a command; for the listener's thread.

    Args:
        settings: the policy and the auto rules.
        stays: of the events in the document.
        vm_name: returns this VM's name.
        is_done: returns whether the command with a key is decided.
        effects: gets what has to be published and stored.
        clock: for turns and the rules about the notice.
        run: makes the run of a program; None for a dry run, which runs none.
    """

    settings: ApprovalSettings
    stays: Stays
    vm_name: Callable[[], str]
    is_done: Callable[[str], bool]
    effects: Effects
    clock: Clock
    run: Callable[..., Run] | None
    turns: Turns = field(default_factory=Turns)
    _programs: dict[tuple[str, str], _Program] = field(default_factory=dict)  # by EventId and stay
    _rules: dict[str, tuple[AutoSettings | None, str]] = field(default_factory=dict)
    _unprepared: dict[str, Stay] = field(default_factory=dict)  # stays that a program is to prepare

    def decide(self, document: Document) -> list[View]:
        """Decide about this VM's Scheduled events by a new document; start and end programs."""
        now, at = self.clock.now(), self.clock.monotonic()
        scheduled = [event for event in document.events.values() if event.status == SCHEDULED]
        self._rules = {event.key: self._first_rule(event, now) for event in scheduled}
        rules = {key: rule for key, (rule, _) in self._rules.items()}
        if self.turns.update(document, rules, now=now, at=at):
            self.effects.keep_turns(self.turns.held)
        own = [event for event in scheduled if is_among(self.vm_name(), event.resources)]
        stays = {event.key: stay for event in own if (stay := self.stays.get(event.key))}
        self._note_ends(document)
        self._end_others({(key, stay.id) for key, stay in stays.items()})
        for key, stay in self._unprepared.items():
            if (event := document.events.get(key)) and event.status == STARTED and not stay.prepared_by:
                self.effects.started_unprepared(event)
        views = [self._view(stays[event.key], event, document) for event in own]
        self._unprepared = {
            key: stay
            for key, stay in stays.items()
            if (rule := self._rules[key][0]) and rule.run and self.run
        }
        return views

    def program_had(self, key: str) -> str:
        """Return what is missing of the program that is to prepare an event, "" if nothing is."""
        stay = self._unprepared.get(key)
        if stay is None or stay.prepared_by:
            return ""
        program = self._programs.get((key, stay.id))
        return "its program had failed" if program and program.is_noted else "its program had not ended"

    def _first_rule(self, event: ScheduledEvent, now: datetime) -> tuple[AutoSettings | None, str]:
        """Return the first rule in the file that matches an event, whatever VMs it names, or why there is none."""
        why, is_of_one = "no auto rule matches", len(vms_of(event)) == 1
        for number, rule in enumerate(self.settings.auto, 1):
            if not matches(rule, event, now):
                continue
            if detail := denial(event, policy=self.settings.policy, now=now):
                return None, detail
            first = (*event.resources, "")[0]
            is_for = auto_wait_seconds(event, vm_name=first, group=rule.group) is not None
            if is_of_one or (rule.group and (rule.run or is_for)):
                return rule, ""
            why = f"it names several VMs, and auto rule {number} is not for those"
        return None, why

    def _view(self, stay: Stay, event: ScheduledEvent, document: Document) -> View:
        program = self._programs.get((event.key, stay.id))
        if program and program.run.result is None:
            running = program.rule  # it decides until its program has ended
            return View(event=event, key=command_key(stay, running), why=f"{running.run[0]} runs")
        rule, why = self._rules[event.key]
        if rule is None or stay.approved_at:
            return View(event=event, why=why or "approved")
        view = View(event=event, key=command_key(stay, rule), why="")
        if rule.run and self.run and stay.prepared_by != rule_id(rule):
            return self._prepare(view, stay, rule, document)
        if self.is_done(view.key):
            return replace(view, why="answered: see its receipt")
        return self._approve(view, stay, rule)

    def _prepare(self, view: View, stay: Stay, rule: AutoSettings, document: Document) -> View:
        """Start the rule's program once the event has its turn, unless it has failed; say how far it is."""
        event, now = view.event, self.clock.now()
        place = (event.key, stay.id)
        left_seconds = run_seconds(event, timeout_seconds=rule.run_timeout_seconds, now=now)
        program = self._programs.get(place)
        result = program.run.result if program and program.rule == rule else None
        fault = result.fault if result and result.ended_by != "stop" else ""
        if not fault and left_seconds <= 0:
            fault = "there was not enough time before NotBefore"
        if self.is_done(view.key):
            return replace(
                view, why=f"{rule.run[0]} has failed: {fault or 'see its receipt'}", has_failed=True
            )
        if fault:
            detail = f"{rule.run[0]}: {fault}"
            return replace(view, why=detail, decision=rejected("denied", detail, event), has_failed=True)
        if self._waits_for_turn(event, rule) and deadline(event, rule) > now:
            return self._behind_others(view, rule, "")
        if any(key == event.key for key, _ in self._programs.keys() - {place}):
            return replace(view, why="the program of the event as it was is still ending")
        body, data = self.effects.notice(event, document)
        assert self.run  # noqa: S101 - nothing is prepared in a dry run
        run = self.run(rule.run, body, data, timeout_seconds=left_seconds)
        self._programs[place] = _Program(stay=stay, rule=rule, run=run, began_at=self.clock.monotonic())
        log.info("running %s", rule.run[0], extra={"event_id": event.event_id})
        run.start()
        return replace(view, why=f"{rule.run[0]} runs")

    def _waits_for_turn(self, event: ScheduledEvent, rule: AutoSettings) -> bool:
        return bool(rule.max_unavailable) and takes_turns(event) and event.key not in self.turns.held

    def _behind_others(self, view: View, rule: AutoSettings, done: str) -> View:
        """Say what an event without a turn waits for, after what is done."""
        behind = self.turns.first_ahead(view.event, rule)
        return replace(view, why=f"{done}{'waits for its turn' if behind else 'settling'}", behind=behind)

    def _approve(self, view: View, stay: Stay, rule: AutoSettings) -> View:
        """Allow an event that is prepared, or needs no program, or say what its approval waits for."""
        event, done = view.event, "prepared, " if rule.run else ""
        if rule.run and len(vms_of(event)) > 1:
            return replace(view, why="prepared; it names several VMs, so no rule approves it")
        if self._waits_for_turn(event, rule):
            return self._behind_others(view, rule, done)
        wait_seconds = auto_wait_seconds(event, vm_name=self.vm_name(), group=rule.group) or 0.0
        if not rule.run and self.clock.monotonic() - stay.since < wait_seconds:
            return replace(view, why="the VMs before this one in Resources approve it first")
        takes_turn = rule.max_unavailable and takes_turns(event)
        if takes_turn and (behind := self.turns.first_beside(event, rule)):
            return replace(view, why=f"{done}approval waits", behind=behind)
        allowed = Decision(outcome="allowed", reason="approved", detail="an auto rule", event=event)
        return replace(view, why="its approval is POSTed", decision=allowed)

    def _note_ends(self, document: Document) -> None:
        """Note once how each program has ended whose event is as it was, or has just started."""
        for program in self._programs.values():
            stay, result = program.stay, program.run.result
            event = document.events.get(stay.event.key)
            is_same = self.stays.get(stay.event.key) is stay
            is_over = result and result.ended_by != "stop" and not program.is_noted
            if not event or not is_over or not (is_same or event.status == STARTED):
                continue
            program.is_noted, fault = True, result.fault if result else ""
            stay.prepared_by = stay.prepared_by if fault else rule_id(program.rule)
            self.effects.prepared(
                stay.event,
                key=command_key(stay, program.rule),
                seconds=self.clock.monotonic() - program.began_at,
                fault=fault,
                record=self.stays.record(event.key) if is_same else None,
            )

    def end(self) -> None:
        """End every program soon; a later process runs them again if there is still time."""
        self._end_others(set())

    def _end_others(self, stays: set[tuple[str, str]]) -> None:
        """End the programs of all stays but these, and forget those that have ended."""
        for one in self._programs.keys() - stays:
            self._programs[one].run.end()
            if self._programs[one].run.result:
                del self._programs[one]
