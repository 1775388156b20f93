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

from bridge.approvals.approver import READ_EVERY_SECONDS, ImdsApprover
from bridge.approvals.auto import AutoRules, Stays, View
from bridge.approvals.command import Command, parse_command, unwrap
from bridge.approvals.pending import Pending
from bridge.approvals.policy import (
    Decision,
    already_approved,
    decide_command,
    expired,
    is_expired,
    names_other_vm,
    not_recorded,
    rejected,
    unknown_outcome,
)
from bridge.approvals.turns import Turns
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.values import check_signing_secrets
from bridge.formats.text import format_relative
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, is_among
from bridge.runtime.program import Run
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

AUTO_POSTED = "by-rule"  # the key of the record that lists the auto rules' POSTs without an outcome


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
        self._stays = Stays(self._answers.stay)
        self._auto = AutoRules(
            settings=self.settings,
            stays=self._stays,
            vm_name=self._vm_name,
            is_done=self._answers.is_done,
            effects=self._answers,
            clock=self._clock,
            run=None if self.dry_run else self.make_run,
        )
        self._document: Document | None = None
        self._views: Mapping[str, View] = {}  # by EventIds in lower case
        self._is_resolved = False
        self._pending: dict[str, Pending] = {}
        self._passed_since: dict[str, float] = {}  # commands for other VMs, by key
        self._rest_from = self._clock.monotonic() + AWAIT_SECONDS
        if self.receiver:
            self.receiver.receive_until(self._rest_from)

    def run(self) -> None:
        """Decide until the stop; messages that are not decided by then are delivered again."""
        self._bridge_events.emit_started()
        while not self.parts.stop:
            report_progress()
            self.run_once(self.wait_seconds)
        self._answers.report_surplus(at_once=True)
        self._auto.end()
        self._answers.commit()
        self._bridge_events.emit_stopping()

    @property
    def wait_seconds(self) -> float:
        """How long the next pass may wait for messages."""
        may_rest = self._clock.monotonic() >= self._rest_from
        return min(READ_EVERY_SECONDS if may_rest else PASS_SECONDS, self._approver.newer_in_seconds)

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        self._resolve_identity()
        if self._bridge_events.emit_heartbeat(self._look) and self.receiver:
            self.receiver.receive_until(self._rest_from)
        self._bridge_events.emit_losses()
        self._receive(wait_seconds)
        self._decide()
        if self._approver.newer_in_seconds == 0:
            self._decide()
        self._answers.report_surplus()
        self._answers.commit()

    def _resolve_identity(self) -> None:
        """Find out who this VM is, then continue what an earlier process has POSTed for auto rules."""
        if self._is_resolved:
            return
        self._identity.resolve()
        self._is_resolved = self._identity.resolved
        if self._is_resolved:
            self._auto.turns = Turns(self._answers.turns())
            for event_id, key in (self._answers.record(AUTO_POSTED) or {"posted": ()})["posted"]:
                self._add_auto(event_id, key)

    def status(self) -> dict[str, Any]:
        """Return what the status file shows of the listener."""
        return {
            "vm": self._identity.vm.name if self._identity.vm else None,
            "imds": self.parts.imds.base,
            "last_error": self._approver.last_error or None,
            "last_good_at": iso_utc(self._approver.good_time) if self._approver.good_time else None,
            "waiting_commands": len(self._pending),
            "dry_run": self.dry_run,
            "auto": [_shown(view, self._clock.now()) for view in self._views.values()],
        }

    # Messages

    def _look(self) -> dict[str, Any]:
        """Return what a heartbeat says of the last look at the bus."""
        if self.receiver is None:
            return {}
        status = self.receiver.status()
        return {"LookedAt": status["looked_at"], "LookError": status["last_error"]}

    def _await_commands(self, document: Document | None) -> None:
        """Have commands received while one could be approved or is open, and for a while after that."""
        events = document.events.values() if document else ()
        is_open = not document or self._pending or self._passed_since
        if is_open or any(map(self._may_be_approved, events)):
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
        try:
            body = unwrap(message.decoded_body())
            command = parse_command(
                body,
                message_id=message.message_id,
                properties=message.properties,
                signed_id="" if self.settings.signing_secrets is None else signed_id(message.properties),
            )
        except ValueError as error:
            self._answers.refuse(message, "malformed", str(error))
            return None
        if fault := self._signature_fault(message, body):
            self._answers.refuse(message, "bad_signature", fault, command=command)
            return None
        return command

    def _accept(self, message: ReceivedMessage) -> None:
        command = self._read(message)
        if command is None:
            return
        if command.key in self._pending:
            self._pending[command.key].add(message)
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
            messages=[message],
        )
        pending.continue_from(record)
        self._pending[command.key] = pending
        if is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open, expired(command)))

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
        document = self._approver.document() if self._is_resolved else None
        if document and document is not self._document:
            self._document = document
            self._update(document)
        self._await_commands(document)
        now, surplus = self._clock.monotonic(), self._surplus()
        self._passed_since = {
            key: at for key, at in self._passed_since.items() if now - at < 2 * PASS_ON_SECONDS
        }
        allowed = {
            pending: self._judge(pending, document, may_wait=number >= surplus)
            for number, pending in enumerate(list(self._pending.values()))
        }
        if document and not self.dry_run:
            self._post(allowed)

    def _update(self, document: Document) -> None:
        """Note what has changed with a new document, and decide by the auto rules."""
        for event_id in self._stays.update(document, read_at=self._approver.read_at):
            log.info(
                "an approval counts no more: the event has started, changed or left",
                extra={"event_id": event_id},
            )
        self._update_auto(document)

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
        if document and may_wait and pending.judged_by == self._approver.read_at:
            return {}  # the same document would give the same decisions
        final: dict[str, Decision] = {}
        allowed: dict[str, Decision] = {}
        for event_id in pending.open:
            decision = self._decision(pending, event_id, document, may_wait=may_wait)
            if decision and decision.outcome == "allowed" and self.dry_run:
                decision = replace(decision, outcome="accepted", detail="dry run: not POSTed")
            if decision:
                (allowed if decision.outcome == "allowed" else final)[event_id] = decision
            else:
                self._note_waiting(pending, event_id, document)
        pending.judged_by = -math.inf if allowed or pending.intended else self._approver.read_at
        is_elsewhere = all(decision.reason == "other_vm" for decision in final.values())
        if final and not allowed and is_elsewhere and self._pass_on(pending):
            return {}
        self._answer(pending, final)
        return allowed

    def _note_waiting(self, pending: Pending, event_id: str, document: Document | None) -> None:
        """Log why an EventId waits; have the document read again if it is older than the command."""
        why = self._approver.last_error or "there is no document"
        if document:
            why = "the document does not have the event yet"
            self._approver.want_newer(pending.arrived_at)
        log.debug("command %s for %s waits: %s", pending.command.id, event_id, why)

    def _decision(
        self, pending: Pending, event_id: str, document: Document | None, *, may_wait: bool
    ) -> Decision | None:
        """Decide about an open EventId; None while it waits for its event or for a document."""
        event = document.events.get(event_id.lower()) if document else None
        stay_id = pending.intended.get(event_id.lower())
        if stay_id is None:
            return self._decision_before_post(pending, event, document, may_wait=may_wait)
        if document and not (event and event.status == SCHEDULED):
            return not_recorded(event)
        if event and self._stays.id(event.key) != stay_id:
            return unknown_outcome(rejected("denied", "the event has changed or returned since", event))
        decision = self._decision_before_post(pending, event, document, may_wait=may_wait)
        return unknown_outcome(decision) if decision and decision.outcome == "rejected" else decision

    def _decision_before_post(
        self, pending: Pending, event: ScheduledEvent | None, document: Document | None, *, may_wait: bool
    ) -> Decision | None:
        """Decide as if nothing had been POSTed; None while the event or a document is awaited."""
        if pending.is_auto:
            return self._decision_of_rule(pending, event) if document else None
        if self._is_resolved and names_other_vm(pending.command, self._vm_name()):
            return rejected("other_vm", f"it is meant for {pending.command.vm}")
        now, has_expired = self._clock.now(), is_expired(pending.command, self._clock.now())
        error = self._approver.last_error if self._is_resolved else "the VM's identity is not available"
        if has_expired and document:
            return expired(pending.command, error)
        if has_expired or self._clock.monotonic() - pending.arrived_at >= IMDS_WAIT_SECONDS:
            detail = error or "it was not decided in time"
            return Decision(outcome="failed", reason="imds_unavailable", detail=detail)
        if document is None or (event is None and self._has_time(pending, may_wait=may_wait)):
            return None
        grace_until = pending.grace_from + self.settings.grace_seconds
        if event and pending.may_have_waited and self._stays.absent_at(event.key) > grace_until:
            # As if it had been received when it was sent: its sender cannot have known this event.
            detail = "it was sent more than `grace_seconds` before this VM's document had the event"
            return rejected("unknown_event", detail, event)
        decision = decide_command(event, vm_name=self._vm_name(), policy=self.settings.policy, now=now)
        is_allowed = decision.outcome == "allowed"
        if event and (is_allowed or event.status == STARTED) and self._stays.is_approved(event, now=now):
            return already_approved(event)
        return decision

    def _decision_of_rule(self, pending: Pending, event: ScheduledEvent | None) -> Decision | None:
        """Return what the auto rules have decided, None while a program runs; or that a command has approved it."""
        if event and self._stays.is_approved(event, now=self._clock.now()):
            return already_approved(event)
        view = self._views.get(pending.command.event_ids[0].lower())
        if view and view.key == pending.command.key:
            return view.decision
        return rejected("denied", "the auto rule matches no more", event)

    def _has_time(self, pending: Pending, *, may_wait: bool) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
        if not may_wait:
            return self._approver.read_at < pending.grace_from
        is_in_grace = self._clock.monotonic() - pending.grace_from < self.settings.grace_seconds
        return is_in_grace or self._approver.read_at < pending.arrived_at

    def _pass_on(self, pending: Pending) -> bool:
        """Release a command for another VM, unless no other listener can have the queue or none has taken it.

        What this VM has POSTed or answered, if only a part of it, stays here.
        """
        is_shared = bool(self.settings.queue) and not self.settings.session
        names_this_vm = pending.command.vm and not names_other_vm(pending.command, self._vm_name())
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

    def _post(self, allowed: Mapping[Pending, Mapping[str, Decision]]) -> None:
        """POST events together, once their intent is committed, and answer by what IMDS says.

        Args:
            allowed: for each command the decisions by its EventIds.
        """
        events = {one.event.key: one.event for all_ in allowed.values() for one in all_.values() if one.event}
        chosen = {event.key: event for event in self._approver.choose(events)}
        since = max(
            (one.arrived_at for one, ids in allowed.items() if ids and not one.is_auto), default=-math.inf
        )
        if chosen and not self._approver.is_just_read(since):
            self._approver.want_newer(self._clock.monotonic())
            return  # what is POSTed is judged once more by what the document has become
        if not chosen or not self._approver.may_call():
            log.debug("%d events wait for their POST: %s", len(events), self._approver.last_error or "-")
            return  # a later pass does it
        posting = {
            pending: {event_id: one for event_id, one in decisions.items() if event_id.lower() in chosen}
            for pending, decisions in allowed.items()
        }
        before = {pending: pending.intended for pending in posting}
        for pending, decisions in posting.items():
            judged = {key: self._stays.id(key) for key in map(str.lower, decisions)}
            pending.intended = {**judged, **pending.intended}
            self._put_record(pending)
        self._answers.commit()
        by_imds, is_refused = self._approver.post([*chosen.values()])
        # An earlier POST, whose outcome is not known, may have been applied all the same.
        for pending, intended in before.items() if is_refused else ():
            pending.intended = intended
            self._put_record(pending)
        for key, decision in by_imds.items():
            if decision.outcome == "accepted":
                self._stays.approve(key, at=self._clock.now())
                self._answers.put_stay(key, self._stays.record(key))
        for pending, decisions in posting.items():
            self._answer_posted(pending, decisions, by_imds)

    def _answer_posted(
        self, pending: Pending, allowed: Mapping[str, Decision], by_imds: Mapping[str, Decision]
    ) -> None:
        """Answer the EventIds of a command that IMDS has decided, which are in lower case in `by_imds`."""
        final = {}
        for event_id, decision in allowed.items():
            if answer := by_imds.get(event_id.lower()):
                had = "" if pending.is_auto else self._auto.program_had(event_id.lower())
                final[event_id] = replace(answer, detail=answer.detail or decision.detail or had)
        if not pending.is_auto and any(one.outcome == "accepted" for one in final.values()):
            self.parts.meter.approved(self._clock.monotonic() - pending.arrived_at)
        self._answer(pending, final)

    # Answers

    def _answer(self, pending: Pending, final: Mapping[str, Decision]) -> None:
        """Add final decisions to the batch; settle the command's messages once every EventId is answered."""
        if not final:
            return
        for event_id, decision in final.items():
            self._answer_one(pending, event_id, decision)
        if not pending.open:
            unanswered = pending.unanswered
            self._answers.settle(pending.messages, dead_letter(unanswered) if unanswered else Settlement())
            del self._pending[pending.command.key]
        self._put_record(pending)

    def _answer_one(self, pending: Pending, event_id: str, decision: Decision) -> None:
        """Answer with a receipt, unless it is a rejection beyond the limit: a flood may cause those."""
        command, receipt = pending.command, ""
        is_limited = decision.outcome == "rejected" and not pending.is_auto
        if is_limited and not self._answers.allows_rejection(decision.reason):
            pending.unanswered = decision
        else:
            receipt = self._answers.add(decision, event_id, command_data(command), key=command.key)
            log.info(
                "command %s for %s: %s",
                *(decision.outcome, event_id, decision.reason),
                extra={"command": command.id, "detail": decision.detail},
            )
        pending.receipts[event_id.lower()] = receipt
        pending.intended.pop(event_id.lower(), None)

    def _put_record(self, pending: Pending) -> None:
        """Add the record of a command's progress to the batch; rejections without a receipt leave none."""
        key, record = pending.command.key, pending.record
        if any(record.values()) or self._answers.record(key):
            self._answers.put(key, record, is_done=not pending.open)
        own = map(str.lower, pending.command.event_ids) if pending.is_auto else pending.intended
        for event_key in own:
            if self._stays.id(event_key):
                self._answers.put_stay(event_key, self._stays.record(event_key))
        if pending.is_auto:
            posted = [
                [one.command.event_ids[0], one.command.key]
                for one in self._pending.values()
                if one.is_auto and one.intended
            ]
            self._answers.put(AUTO_POSTED, {"posted": posted})

    # Auto rules

    def _update_auto(self, document: Document) -> None:
        """Make a command for each event that an auto rule decides about; drop those that none decides about now."""
        before, views = self._views, self._auto.decide(document) if self.settings.auto else []
        self._views = {view.event.key: view for view in views}
        for key, view in self._views.items():
            if key not in before or _reason(view) != _reason(before[key]):
                log.info("auto rules: %s", _reason(view), extra={"event_id": view.event.event_id})
        decided = {view.key: view for view in views if view.decision}
        for key, pending in list(self._pending.items()):
            if pending.is_auto and key not in decided and not pending.intended:
                del self._pending[key]
        for key in decided.keys() - self._pending.keys():
            self._add_auto(decided[key].event.event_id, key)

    def _add_auto(self, event_id: str, key: str) -> None:
        command = Command(id=key, key=key, event_ids=(event_id,), requested_by="imds-bridge, by an auto rule")
        now = self._clock.monotonic()
        pending = self._pending[key] = Pending(command=command, arrived_at=now, grace_from=now, is_auto=True)
        pending.continue_from(self._answers.record(key))


def _reason(view: View) -> str:
    """Describe what an event waits for."""
    return f"{view.why} behind {', '.join(view.behind.resources)}" if view.behind else view.why


def _shown(view: View, now: datetime) -> dict[str, Any]:
    """Return what the status file shows of what the auto rules make of an event."""
    why = _reason(view)
    if view.behind:
        starts = view.behind.not_before
        when = f", {format_relative((starts - now).total_seconds())}" if starts else ""
        why += f" ({view.behind.raw.get('EventType')}{when})"
    return {"EventId": view.event.event_id, "Why": why, "NeedsPerson": view.has_failed}
