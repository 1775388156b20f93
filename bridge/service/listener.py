"""The approval listener's loop: decide about commands, POST approvals to IMDS, publish receipts, settle messages.

The outbox keeps records that survive a kill: the intent is committed before the POST, and the outcome together
with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import datetime
from typing import Any
from uuid import uuid4

from bridge.approvals import policy
from bridge.approvals.approver import READ_EVERY_SECONDS, ImdsApprover, choose
from bridge.approvals.auto import Rules, Seen
from bridge.approvals.command import Command, find_id, parse_command, unwrap
from bridge.approvals.pending import Pending
from bridge.approvals.policy import Decision
from bridge.approvals.state import EventState, Place, State
from bridge.approvals.step import answer, step
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.values import check_signing_secrets
from bridge.contract.status import AutoStatus, ListenStatus, OutOfWork
from bridge.formats.text import format_relative
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, is_among
from bridge.runtime.program import Run
from bridge.runtime.text import printable
from bridge.runtime.threads import report_progress
from bridge.runtime.time import iso_utc
from bridge.service.answers import AnswerBatch, command_data, dead_letter
from bridge.service.bridge_events import BridgeEvents
from bridge.service.parts import Parts

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25  # how long a pass waits for messages, while one could matter
IMDS_WAIT_SECONDS = 600.0  # how long a command waits for IMDS
# How long commands are received after the start, and after there was last something that one could approve.
AWAIT_SECONDS = 600.0
# How long a command for another VM goes back to a queue that several listeners may share; the shorter time holds
# while there are many of them.
PASS_ON_SECONDS, PASS_ON_MANY_SECONDS = 600.0, 30.0
PASSED_ON_LONG = 100
# How many commands, of how many bytes, wait for their events to appear; the oldest give way to more. It is less than
# the receiver holds at a time.
MAX_WAITING, MAX_WAITING_BYTES = 500, 4 * 1024 * 1024


@dataclass(eq=False)
class Listener:
    """Decides about commands. `run` and `run_once` are for one thread; `status` may be called from any.

    Args:
        parts: of the process; IMDS is used from the thread that calls `run`, which the stop ends.
        settings: the policy, the auto rules, the grace period and the signing secrets.
        receiver: where commands come from; None without a bus.
        dry_run: decide and publish receipts, but POST nothing.
        make_run: makes a run of a program that an auto rule names.
    """

    parts: Parts
    settings: ApprovalSettings
    receiver: Receiver | None
    _: KW_ONLY
    dry_run: bool = False
    make_run: Callable[..., Run] = Run

    def __post_init__(self) -> None:
        self._clock = self.parts.clock
        self._identity = self.parts.identity
        self._approver = ImdsApprover(self.parts.imds, clock=self._clock)
        self._bridge_events = BridgeEvents(self._identity)
        self._answers = AnswerBatch(self.parts, self.receiver, dry_run=self.dry_run)
        # where the boot is not known, each start counts as one
        self._boot = self._identity.boot_id or uuid4().hex
        self._state = self._answers.load(self._rules)
        self._runs: dict[Place, Run] = {}
        self._pending: dict[str, Pending] = {}
        self._passed_since: dict[str, float] = {}  # commands for other VMs, by key
        self._expect_commands()

    def run(self) -> None:
        """Decide until the stop; messages that are not decided by then are delivered again."""
        self._bridge_events.emit_started()
        try:
            while not self.parts.stop:
                report_progress()
                self.run_once(self.wait_seconds)
        finally:
            for run in self._runs.values():
                run.end()  # the next process runs it again
            self._runs = {}
        self._answers.report_surplus(at_once=True)
        self._answers.commit()
        self._bridge_events.emit_stopping()

    def is_busy(self) -> bool:
        """Return whether a program runs; no more once `run` has ended. Any thread may call it."""
        return bool(self._runs)

    @property
    def wait_seconds(self) -> float:
        """How long the next pass may wait for messages."""
        may_rest = self._clock.monotonic() >= self._rest_from
        pass_seconds = READ_EVERY_SECONDS if may_rest else PASS_SECONDS
        return min(pass_seconds, self._approver.newer_in_seconds, self._approver.call_in_seconds)

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        self._identify()
        if self._bridge_events.emit_heartbeat(self._look) and self.receiver:
            self.receiver.receive_until(self._rest_from)
        self._bridge_events.emit_losses()
        self._receive(wait_seconds)
        self._decide()
        if self._approver.newer_in_seconds == 0:
            self._decide()
        self._answers.report_surplus()
        self._answers.commit()

    def _identify(self) -> None:
        """Learn who the VM is; another name counts once no command and no program of the one before is left."""
        identity = self._identity
        document = None if identity.resolved else self._approver.document()
        identity.resolve(at_once=bool(document and document.events))
        is_free = not (identity.resolved and (self._pending or self._runs))
        if is_free and self._bridge_events.follow_name() and self.receiver:
            self._expect_commands()

    @property
    def _rules(self) -> Rules:
        name = self._identity.vm.name if self._identity.vm else ""
        return Rules(settings=self.settings, vm_name=name, boot=self._boot, is_dry_run=self.dry_run)

    def status(self) -> ListenStatus:
        """Return what the status file shows of the listener."""
        reading, state, now = self._approver.reading, self._state, self._clock.now()
        return ListenStatus(
            vm=self._identity.vm.name if self._identity.vm else None,
            imds=self.parts.imds.base,
            version_error=self.parts.imds.version_error,
            clock_ahead_seconds=self.parts.imds.clock_ahead_seconds,
            last_error=self._last_error or None,
            last_good_at=iso_utc(reading.good_time) if reading.good_time else None,
            waiting_commands=len(self._pending),
            dry_run=self.dry_run,
            out_of_work=[
                OutOfWork(
                    Since=iso_utc(one.since),
                    Why=one.why,
                    IsHeld=bool(one.held_by),
                    NeedsPerson=bool(one.told),
                )
                for one in state.owed.values()
            ],
            auto=[_shown(one, now) for one in state.events.values() if one.verdict.why],
            commands=self.receiver.status() if self.receiver else None,
        )

    @property
    def _last_error(self) -> str:
        return self._approver.last_error(self._state.events.values())

    # Messages

    def _look(self) -> dict[str, Any]:
        """Return what a heartbeat says of the last look at the bus."""
        if self.receiver is None:
            return {}
        status = self.receiver.status()
        return {"LookedAt": status.looked_at, "LookError": status.last_error}

    def _await_commands(self, document: Document | None) -> None:
        """Have commands received while one could be approved or is open, and for a while after that."""
        events = document.events.values() if document else ()
        is_open = not document or self._pending or self._passed_since
        if is_open or any(map(self._may_be_approved, events)):
            self._expect_commands()

    def _expect_commands(self) -> None:
        """Have commands received for AWAIT_SECONDS from now on."""
        self._rest_from = self._clock.monotonic() + AWAIT_SECONDS
        if self.receiver:
            self.receiver.receive_until(self._rest_from)

    def _may_be_approved(self, event: ScheduledEvent) -> bool:
        is_in_scope = self.settings.policy.scope == "group" or is_among(self._vm_name(), event.resources)
        return event.status == SCHEDULED and is_in_scope

    def _receive(self, wait_seconds: float) -> None:
        if self.receiver is None:
            self.parts.stop.wait(wait_seconds)
            return
        for message in self.receiver.messages(wait_seconds):
            self._accept(message)

    def _read(self, message: ReceivedMessage) -> Command | None:
        """Return the command of a message; refuse a message that has none, or a bad signature, and return None."""
        body = b""
        try:
            body = unwrap(message.decoded_body())
            command = parse_command(
                body,
                message_id=message.message_id,
                properties=message.properties,
                signed_id="" if self.settings.signing_secrets is None else signed_id(message.properties),
            )
        except ValueError as error:
            known = {"Id": find_id(body, message.properties) or printable(message.message_id)}
            self._answers.refuse(message, "malformed", str(error), known)
            return None
        if fault := self._signature_fault(message, body):
            self._answers.refuse(message, "bad_signature", fault, command_data(command))
            return None
        return command

    def _accept(self, message: ReceivedMessage) -> None:
        command = self._read(message)
        if command is None:
            return
        if known := self._pending.get(command.key):
            self._pending[command.key] = known.with_message(message)
            return
        record = self._answers.record(command.key)
        if self._answers.is_done(command.key):
            self._answers.repeat(record)
            self._answers.settle([message], Settlement())
            return
        now = self._clock.monotonic()
        pending = Pending(
            command=command,
            arrived_at=now,
            grace_from=now - self._age_seconds(message),
            may_have_waited=message.may_have_waited,
            messages=(message,),
        ).continued(record)
        self._pending[command.key] = pending
        if policy.is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open, policy.expired(command)))

    def _age_seconds(self, message: ReceivedMessage) -> float:
        """Return how long a message has been on the bus; the broker's clock may be ahead of this one."""
        if message.enqueued_at is None:
            return 0.0
        return max(0.0, (self._clock.now() - message.enqueued_at).total_seconds())

    def _signature_fault(self, message: ReceivedMessage, body: bytes) -> str:
        if self.settings.signing_secrets is None:
            return ""
        try:
            secrets = check_signing_secrets(self.settings.signing_secrets.read())
        except (OSError, ValueError) as error:
            # no secret is trusted then: whoever empties the file withdraws the old ones
            log.error("the signing secrets cannot be used; every command is refused: %s", error)  # noqa: TRY400
            return "the listener cannot read its signing secrets"
        return signature_fault(secrets, message.properties, body, signed_near=message.enqueued_at)

    # Decisions

    def _decide(self) -> None:
        """Decide what can be decided now: all commands by one document; POST the allowed events, and answer."""
        document = self._approver.document() if self._identity.resolved else None
        if document and document is not self._state.document:
            self._follow(document)
        self._await_commands(document)
        now, surplus = self._clock.monotonic(), self._surplus()
        self._passed_since = {
            key: at for key, at in self._passed_since.items() if now - at < 2 * PASS_ON_SECONDS
        }
        allowed = {
            pending.command.key: self._judge(pending, document, may_wait=number >= surplus)
            for number, pending in enumerate([*self._pending.values()])
        }
        if document and not self.dry_run:
            self._post(allowed)

    def _follow(self, document: Document) -> None:
        """Learn from a new document; start and end programs once what they are for is committed."""
        before = self._state
        seen = Seen(
            rules=self._rules,
            document=document,
            at=self._approver.reading.at,
            steady=self._clock.steady(),
            now=self._clock.now(),
            ended={place: run.result for place, run in self._runs.items() if run.result},
            request=self._answers.take_request(),
            is_lost=self._answers.take_loss(document if before.document is None else None),
        )
        state = step(before, seen, self._answers)
        self._become(state)
        self._runs = {place: run for place, run in self._runs.items() if place not in seen.ended}
        if new := [place for place in state.programs if place not in self._runs]:
            self._answers.commit()
        for place in new:
            program = state.programs[place]
            body, data = self._answers.notice(program, state, is_over=not isinstance(place, str))
            run = self.make_run(program.argv, body, data, timeout_seconds=program.timeout_seconds)
            self._runs[place] = run
            log.info("running %s", program.argv[0], extra={"event_id": data.get("EventId")})
            run.start()
        for place, run in self._runs.items():
            if state.programs[place].must_end:
                run.end()
        for key, one in state.events.items():
            if one.verdict.why and (key not in before.events or _reason(one) != _reason(before.events[key])):
                log.info("auto rules: %s", _reason(one), extra={"event_id": one.event.event_id})

    def _become(self, state: State) -> None:
        """Know something else from now on, and record what differs."""
        self._answers.keep(self._state, state)
        self._state = state

    def _surplus(self) -> int:
        """Return how many of the oldest commands may not wait for their events."""
        number, left_bytes = 0, MAX_WAITING_BYTES
        for pending in reversed(self._pending.values()):
            left_bytes -= sum(len(message.body) for message in pending.messages)
            if left_bytes < 0 or number == MAX_WAITING:
                break
            number += 1
        return len(self._pending) - number

    def _vm_name(self) -> str:
        assert self._identity.vm is not None  # noqa: S101 - nothing is judged before it is known
        return self._identity.vm.name

    def _judge(self, pending: Pending, document: Document | None, *, may_wait: bool) -> dict[str, Decision]:
        """Answer what can be answered by the document, None while there is none; return what is to be POSTed.

        Decisions are by EventIds as the command spells them.
        """
        read_at = self._approver.reading.at
        if document and may_wait and pending.judged_by == read_at:
            return {}  # the same document would give the same decisions
        final: dict[str, Decision] = {}
        allowed: dict[str, Decision] = {}
        for event_id in pending.open:
            decision = self._decision(pending, event_id, self._state if document else None, may_wait=may_wait)
            if decision and decision.outcome == "allowed" and self.dry_run:
                decision = replace(decision, outcome="accepted", detail="dry run: not POSTed")
            if decision:
                (allowed if decision.outcome == "allowed" else final)[event_id] = decision
            else:
                self._note_waiting(pending, event_id, document)
        pending = replace(pending, judged_by=-math.inf if allowed or pending.intended else read_at)
        self._pending[pending.command.key] = pending
        is_elsewhere = all(decision.reason == "other_vm" for decision in final.values())
        if final and not allowed and is_elsewhere and self._pass_on(pending):
            return {}
        self._answer(pending, final)
        return allowed

    def _note_waiting(self, pending: Pending, event_id: str, document: Document | None) -> None:
        """Log why an EventId waits; have the document read again if it is older than the command."""
        why = self._last_error or "there is no document"
        if document:
            why = "the document does not have the event yet"
            self._approver.want_newer(pending.arrived_at)
        log.debug("command %s for %s waits: %s", pending.command.id, event_id, why)

    def _decision(
        self, pending: Pending, event_id: str, state: State | None, *, may_wait: bool
    ) -> Decision | None:
        """Decide about an open EventId; None while it waits for its event or for a document."""
        known = state.events.get(event_id.lower()) if state else None
        one = known if known and known.sight == "shown" else None
        intent = pending.intended.get(event_id.lower())
        if intent is None:
            return self._decision_before_post(pending, one, state, may_wait=may_wait)
        if state and not (known and known.may_be_scheduled):
            return policy.not_recorded(one.event if one else None)
        stay_id, since = intent
        if one and one.stay.id != stay_id:
            return policy.unknown_outcome(
                policy.rejected("denied", "the event has changed or returned since", one.event)
            )
        if one and self._clock.steady() - since >= IMDS_WAIT_SECONDS:
            detail = f"the first try was {IMDS_WAIT_SECONDS:.0f} s ago"
            return policy.unknown_outcome(policy.rejected("denied", detail, one.event))
        decision = self._decision_before_post(pending, one, state, may_wait=may_wait)
        return policy.unknown_outcome(decision) if decision else None

    def _decision_before_post(
        self, pending: Pending, one: EventState | None, state: State | None, *, may_wait: bool
    ) -> Decision | None:
        """Decide as if nothing had been POSTed; None while the event or a document is awaited."""
        if self._identity.resolved and policy.names_other_vm(pending.command, self._vm_name()):
            return policy.rejected("other_vm", f"it is meant for {pending.command.vm}")
        now, has_expired = self._clock.now(), policy.is_expired(pending.command, self._clock.now())
        error = self._last_error if self._identity.resolved else "the VM's identity is not available"
        if has_expired and state:
            return policy.expired(pending.command, error)
        if has_expired or self._clock.monotonic() - pending.arrived_at >= IMDS_WAIT_SECONDS:
            detail = error or "it was not decided in time"
            return Decision(outcome="failed", reason="imds_unavailable", detail=detail)
        if state is None or (one is None and self._has_time(pending, may_wait=may_wait)):
            return None
        event, grace_until = one.event if one else None, pending.grace_from + self.settings.grace_seconds
        if one and pending.may_have_waited and one.absent_at > grace_until:
            # As if it had been received when it was sent: its sender cannot have known this event.
            detail = "it was sent more than `grace_seconds` before this VM's document had the event"
            return policy.rejected("unknown_event", detail, event)
        decision = policy.decide_command(event, vm_name=self._vm_name(), policy=self.settings.policy, now=now)
        is_allowed = decision.outcome == "allowed"
        if one and (is_allowed or one.event.status == STARTED) and one.is_approved(now):
            return policy.already_approved(one.event)
        return decision

    def _has_time(self, pending: Pending, *, may_wait: bool) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
        read_at = self._approver.reading.at
        if not may_wait:
            return read_at < pending.grace_from
        is_in_grace = self._clock.monotonic() - pending.grace_from < self.settings.grace_seconds
        return is_in_grace or read_at < pending.arrived_at

    def _pass_on(self, pending: Pending) -> bool:
        """Release a command for another VM, unless no other listener can have the queue or none has taken it.

        What this VM has POSTed or answered, if only a part of it, stays here.
        """
        is_shared = bool(self.settings.queue) and not self.settings.session
        names_this_vm = pending.command.vm and not policy.names_other_vm(pending.command, self._vm_name())
        if not is_shared or names_this_vm or self._answers.record(pending.command.key):
            return False
        now = self._clock.monotonic()
        # not since the broker accepted it: the VM's clock may be wrong, and no other VM would get it then
        age_seconds = now - self._passed_since.setdefault(pending.command.key, now)
        are_many = len(self._passed_since) > PASSED_ON_LONG
        if age_seconds >= (PASS_ON_MANY_SECONDS if are_many else PASS_ON_SECONDS):
            del self._passed_since[pending.command.key]
            return False
        self._answers.settle(pending.messages, Settlement(is_released=True))
        del self._pending[pending.command.key]
        return True

    # POSTs

    def _post(self, allowed: Mapping[str, Mapping[str, Decision]]) -> None:
        """POST events together, once their intent is committed, and answer by what IMDS says.

        Args:
            allowed: for each command, by its key, the decisions by its EventIds; auto rules allow other events.
        """
        events = self._state.events
        by_command = [event_id.lower() for decisions in allowed.values() for event_id in decisions]
        by_rule = [
            key for key, one in events.items() if one.verdict.does == "post" and not one.stay.is_settled
        ]
        wanted = {key: events[key] for key in (*by_command, *by_rule)}
        over = [key for key, one in events.items() if one.stay.tries and key not in wanted]
        if over:
            self._become(self._state.with_stays({key: replace(events[key].stay, tries=None) for key in over}))
        chosen = {one.event.key: one for one in choose(wanted.values(), self._clock.monotonic())}
        since = max((self._pending[key].arrived_at for key, ids in allowed.items() if ids), default=-math.inf)
        if chosen and not self._approver.is_just_read(since):
            self._approver.want_newer(self._clock.monotonic())
            return  # what is POSTed is judged once more by what the document has become
        if not chosen or not self._approver.may_call():
            log.debug("%d events wait for their POST: %s", len(wanted), self._last_error or "-")
            return  # a later pass does it
        of_each = {
            key: {event_id: one for event_id, one in decisions.items() if event_id.lower() in chosen}
            for key, decisions in allowed.items()
        }
        posting = {key: decisions for key, decisions in of_each.items() if decisions}
        before, at = {key: self._pending[key] for key in posting}, self._clock.steady()
        for key, decisions in posting.items():
            judged = {event: (chosen[event].stay.id, at) for event in map(str.lower, decisions)}
            self._update(replace(before[key], intended={**judged, **before[key].intended}))
        stays = {
            key: replace(one.stay, is_posted=True, is_intended=one.stay.is_intended or key in by_rule)
            for key, one in chosen.items()
        }
        self._become(self._state.with_stays(stays))
        self._answers.commit()
        posted = self._approver.post([self._state.events[key] for key in chosen])
        stays = {**posted.stays}
        # an earlier POST, whose outcome is not known, may have been applied all the same
        if posted.is_refused:
            for pending in before.values():
                self._update(pending)
            stays = {
                key: replace(one, is_intended=chosen[key].stay.is_intended) for key, one in stays.items()
            }
        self._become(self._state.with_stays(stays))
        self._answer_for_rules({key: one for key, one in posted.decided.items() if key in by_rule})
        for key, decisions in posting.items():
            self._answer_posted(self._pending[key], decisions, posted.decided)

    def _answer_for_rules(self, decided: Mapping[str, Decision]) -> None:
        """Answer for the auto rules what IMDS has decided, by EventId in lower case."""
        events = dict(self._state.events)
        for key, decision in decided.items():
            said = replace(decision, detail=decision.detail or "an auto rule")
            said = policy.unknown_outcome(said) if events[key].stay.is_intended else said
            events[key] = answer(events[key], events[key].run, said, self._answers)
        self._become(replace(self._state, events=events))

    def _answer_posted(
        self, pending: Pending, allowed: Mapping[str, Decision], by_imds: Mapping[str, Decision]
    ) -> None:
        """Answer the EventIds of a command that IMDS has decided, which are in lower case in `by_imds`."""
        final = {}
        for event_id, decision in allowed.items():
            if made := by_imds.get(event_id.lower()):
                made = policy.unknown_outcome(made) if event_id.lower() in pending.intended else made
                detail = made.detail or decision.detail or self._program_had(event_id.lower())
                final[event_id] = replace(made, detail=detail)
        if any(one.outcome == "accepted" for one in final.values()):
            self.parts.meter.approved(self._clock.monotonic() - pending.arrived_at)
        self._answer(pending, final)

    def _program_had(self, key: str) -> str:
        """Return what is missing of the program that is to prepare an event, "" if nothing is."""
        one = self._state.events.get(key)
        if one is None or not one.is_unprepared or self.dry_run:
            return ""
        return "its program had failed" if one.run in one.failed else "its program had not ended"

    # Answers

    def _answer(self, pending: Pending, final: Mapping[str, Decision]) -> None:
        """Add final decisions to the batch; settle the command's messages once every EventId is answered."""
        for event_id, decision in final.items():
            pending = self._answered(pending, event_id, decision)
        if not final:
            return
        self._update(pending)
        if not pending.open:
            unanswered = pending.unanswered
            self._answers.settle(pending.messages, dead_letter(unanswered) if unanswered else Settlement())
            del self._pending[pending.command.key]

    def _answered(self, pending: Pending, event_id: str, decision: Decision) -> Pending:
        """Answer with a receipt, unless it is a rejection beyond the limit: a flood may cause those."""
        command, receipt, key = pending.command, "", event_id.lower()
        known = self._state.events.get(key)
        if known and not decision.event:  # as last seen, so that people read what it is
            decision = replace(decision, event=known.event)
        if decision.outcome == "rejected" and not self._answers.allows_rejection(decision.reason):
            pending = replace(pending, unanswered=decision)
        else:
            receipt = self._answers.add(decision, event_id, command_data(command), key=command.key)
            log.info(
                "command %s for %s: %s",
                *(decision.outcome, event_id, decision.reason),
                extra={"command": command.id, "detail": decision.detail},
            )
        intended = {other: intent for other, intent in pending.intended.items() if other != key}
        return replace(pending, receipts={**pending.receipts, key: receipt}, intended=intended)

    def _update(self, pending: Pending) -> None:
        """Remember and record a command's progress; rejections without a receipt leave no record."""
        key, record = pending.command.key, pending.record
        self._pending[key] = pending
        if any(record.values()) or self._answers.record(key):
            self._answers.put(key, record, is_done=not pending.open)


def _reason(one: EventState) -> str:
    """Describe what an event waits for."""
    why, behind = one.verdict.why, one.verdict.behind
    return f"{why} behind {', '.join(behind.resources)}" if behind else why


def _shown(one: EventState, now: datetime) -> AutoStatus:
    """Return what the status file shows of what the auto rules make of an event."""
    why, behind = _reason(one), one.verdict.behind
    if behind:
        starts = behind.not_before
        when = f", {format_relative((starts - now).total_seconds())}" if starts else ""
        why += f" ({behind.raw.get('EventType')}{when})"
    return AutoStatus(EventId=one.event.event_id, Why=why, NeedsPerson=one.run in one.failed)
