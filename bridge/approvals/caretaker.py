"""Looks after the VM by the document: what is known of events, the programs that it runs, and the POSTs to IMDS.

I/O: IMDS, programs, the outbox, the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from uuid import uuid4

from bridge.approvals.approver import ImdsApprover, Posted, choose
from bridge.approvals.auto import Rules, Seen
from bridge.approvals.policy import unknown_outcome
from bridge.approvals.receipts import Receipts, stored_state
from bridge.approvals.state import UNPREPARED, EventState, Place, State, Stay
from bridge.approvals.step import answer, step
from bridge.config.approvals import ApprovalSettings
from bridge.contract.status import AutoStatus, OutOfWork
from bridge.formats.text import format_relative
from bridge.imds.client import CALL_SECONDS
from bridge.imds.document import Document
from bridge.process.parts import Parts
from bridge.runtime.program import Run
from bridge.runtime.time import iso_utc

log = logging.getLogger(__name__)

# How long `recover` waits for instance data: a clone must not start what its original has stopped.
UNCONFIRMED_SECONDS = 60.0
SHORT_POST_SECONDS = 1.5


@dataclass(eq=False)
class Caretaker:
    """Reads the document, and does what follows from it, for one thread.

    Args:
        parts: of the process.
        settings: the policy and the auto rules.
        receipts: what is published and remembered.
        dry_run: nothing is run and nothing POSTed.
        make_run: makes a run of a program that an auto rule names.

    Attributes:
        approver: IMDS, within its limit.
        state: what is known.
        runs: the programs that run.
    """

    parts: Parts
    settings: ApprovalSettings
    receipts: Receipts
    _: KW_ONLY
    dry_run: bool
    make_run: Callable[..., Run]

    def __post_init__(self) -> None:
        self._clock, self._identity = self.parts.clock, self.parts.identity
        self.approver = ImdsApprover(self.parts.imds, clock=self._clock)
        # where the boot is not known, each start counts as one
        self._boot = self._identity.boot_id or uuid4().hex
        self.state = stored_state(self.parts.outbox, self.settings, dry_run=self.dry_run)
        self.runs: dict[Place, Run] = {}
        self._began_at = self._clock.monotonic()

    @property
    def rules(self) -> Rules:
        """What the rules are, in the name that this VM has now."""
        name = self._identity.vm.name if self._identity.vm else ""
        return Rules(settings=self.settings, vm_name=name, boot=self._boot, is_dry_run=self.dry_run)

    @property
    def last_error(self) -> str:
        """The last error of IMDS that has not been followed by a good answer, "" if there is none."""
        return self.approver.last_error(self.state.events.values())

    def end_programs(self) -> None:
        """Have every program ended: the next process runs it again."""
        for run in self.runs.values():
            run.end()
        self.runs = {}

    # The document

    def look(self) -> Document | None:
        """Read the document if it is time, and do what follows from a new one; return it unless it is too old.

        A name that instance data has not confirmed yet is enough to prepare the VM, and not to approve anything.
        """
        document = self.approver.document()
        if document and self._identity.vm and document is not self.state.document:
            self._follow(document)
        return document

    def _follow(self, document: Document) -> None:
        """Learn from a new document; start and end programs once what they are for is committed."""
        before, at, now = self.state, self.approver.reading.at, self._clock.monotonic()
        seen = Seen(
            rules=self.rules,
            document=document,
            at=at,
            steady=self._clock.steady() - (now - at),
            now=self._clock.now(),
            ended={place: run.result for place, run in self.runs.items() if run.result},
            request=self.receipts.take_request(),
            is_confirmed=self._identity.resolved or now - self._began_at >= UNCONFIRMED_SECONDS,
            is_lost=self.receipts.take_loss(document if before.document is None else None),
        )
        state = step(before, seen, self.receipts)
        self._become(state)
        self.runs = {place: run for place, run in self.runs.items() if place not in seen.ended}
        if new := [place for place in state.programs if place not in self.runs]:
            self.receipts.commit()
        for place in new:
            program = state.programs[place]
            body, data = self.receipts.program_input(program, state, is_over=not isinstance(place, str))
            run = self.make_run(program.argv, body, data, timeout_seconds=program.timeout_seconds)
            self.runs[place] = run
            log.info("%s starts", program.title, extra={"event_id": data.get("EventId")})
            run.start(program.title)
        for place, run in self.runs.items():
            if state.programs[place].must_end:
                run.end()
        for key, one in state.events.items():
            if one.verdict.why and (key not in before.events or _reason(one) != _reason(before.events[key])):
                log.info("auto rules: %s", _reason(one), extra={"event_id": one.event.event_id})

    def _become(self, state: State) -> None:
        """Know something else from now on, and record what differs."""
        self.receipts.keep(self.state, state, self.rules)
        self.state = state

    # POSTs

    def choose(self, by_command: Mapping[str, float]) -> Mapping[str, EventState]:
        """Return the events that are POSTed now, by EventId in lower case; none if they have to wait.

        Args:
            by_command: the EventIds in lower case that commands want, each with when its command arrived, monotonic;
                auto rules want others.
        """
        events = self.state.events
        wanted = {key: one for key, one in events.items() if key in by_command or _by_rule(one)}
        over = [key for key, one in events.items() if one.stay.tries and key not in wanted]
        if over:
            self._become(self.state.with_stays({key: replace(events[key].stay, tries=None) for key in over}))
        chosen = {one.event.key: one for one in choose(wanted.values(), self._clock.monotonic())}
        if chosen and not self.approver.is_just_read(max(by_command.values(), default=-math.inf)):
            self.approver.want_newer(self._clock.monotonic())
            return {}  # what is POSTed is judged once more by what the document has become
        if not chosen or not self.approver.may_call():
            log.debug("%d events wait for their POST: %s", len(wanted), self.last_error or "-")
            return {}  # a later pass does it
        return chosen

    def post(self, chosen: Mapping[str, EventState]) -> Posted:
        """POST events, once their intent is committed; answer for the auto rules, and return what IMDS says."""
        stays: Mapping[str, Stay] = {
            key: replace(one.stay, is_posted=True, is_intended=one.stay.is_intended or _by_rule(one))
            for key, one in chosen.items()
        }
        self._become(self.state.with_stays(stays))
        self.receipts.commit()
        sent = [self.state.events[key] for key in chosen]
        posted = self.approver.post(sent, self._limit_seconds(sent[0]))
        stays = posted.stays
        if not posted.decided:  # a notice may have come meanwhile
            self.approver.want_newer(self._clock.monotonic())
        if posted.is_refused:  # an earlier POST may have been applied all the same
            stays = {
                key: replace(one, is_intended=chosen[key].stay.is_intended) for key, one in stays.items()
            }
        events = {**self.state.with_stays(stays).events}
        for key, decision in posted.decided.items():
            if _by_rule(chosen[key]):
                said = replace(decision, detail=decision.detail or "an auto rule")
                said = unknown_outcome(said) if events[key].stay.is_intended else said
                events[key] = answer(events[key], events[key].run, said, self.receipts)
        self._become(replace(self.state, events=events))
        return posted

    def _limit_seconds(self, first: EventState) -> float:
        """Return how long an answer to a POST is waited for: not long while a program may have to be started."""
        count = first.stay.tries.count if first.stay.tries else 0
        if not any(rule.run for rule in self.settings.auto):
            return min(CALL_SECONDS, 2.0**count) if count else CALL_SECONDS
        if any(one.is_unprepared for one in self.state.events.values()):
            return SHORT_POST_SECONDS
        return min(CALL_SECONDS, SHORT_POST_SECONDS * 2.0**count)

    # The status

    def out_of_work(self) -> list[OutOfWork]:
        """Return why the VM is out of work."""
        return [
            OutOfWork(
                Since=iso_utc(one.since), Why=one.why, IsHeld=bool(one.held_by), NeedsPerson=bool(one.told)
            )
            for one in self.state.owed.values()
        ]

    def auto(self) -> list[AutoStatus]:
        """Return what the auto rules make of each event of this VM, and which have started unprepared."""
        now, events = self._clock.now(), self.state.events.values()
        return [_shown(one, now) for one in events if one.verdict.why or UNPREPARED in one.stay.told]


def _by_rule(one: EventState) -> bool:
    """Return whether an auto rule has an event POSTed."""
    return one.verdict.does == "post" and not one.stay.is_settled


def _reason(one: EventState) -> str:
    """Describe what an event waits for."""
    why, behind = one.verdict.why, one.verdict.behind
    return f"{why} behind {', '.join(behind.resources)}" if behind else why


def _shown(one: EventState, now: datetime) -> AutoStatus:
    """Return what the status file shows of what the auto rules make of an event."""
    why, behind = _reason(one) or UNPREPARED, one.verdict.behind
    if behind:
        starts = behind.not_before
        when = f", {format_relative((starts - now).total_seconds())}" if starts else ""
        why += f" ({behind.raw.get('EventType')}{when})"
    return AutoStatus(
        EventId=one.event.event_id, Why=why, NeedsPerson=one.run in one.failed or why == UNPREPARED
    )
