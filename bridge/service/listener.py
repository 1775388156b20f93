"""The approval listener's loop: decide about commands, POST approvals to IMDS, publish receipts, settle messages.

The outbox keeps records that survive a kill: the intent is committed before the POST, and the outcome together
with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bridge.approvals.approved import is_recent, is_same, record_approval
from bridge.approvals.approver import ImdsApprover
from bridge.approvals.command import Command, parse_command, unwrap
from bridge.approvals.pending import PASSED_ON_PER_MINUTE, MinuteLimit, Pending
from bridge.approvals.policy import (
    Decision,
    expired,
    is_expired,
    judge,
    not_recorded,
    public,
    unknown_outcome,
)
from bridge.approvals.programs import AutoRules
from bridge.approvals.receipts import command_data
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.values import check_signing_secrets
from bridge.formats.cloudevents import structured
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.diff import Change
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, fold_name
from bridge.imds.port import Imds
from bridge.outbox.outbox import Outbox
from bridge.runtime.program import Run
from bridge.runtime.threads import Stop, report_progress
from bridge.runtime.time import Clock, iso_utc
from bridge.service.answers import Answers, dead_letter
from bridge.service.identity import VmIdentity

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25  # how long a pass waits for messages
IMDS_WAIT_SECONDS = 600.0  # how long a command waits for IMDS
# How long a command for another VM goes back to a queue that several listeners may share; the shorter time holds
# while there are many of them.
PASS_ON_SECONDS, PASS_ON_MANY_SECONDS = 600.0, 30.0
# How many commands wait for their events to appear; when there are more, the oldest do not wait any longer.
MAX_WAITING = 500

AUTO_POSTED = "by-rule"  # the key of the record that lists the auto rules' POSTs without an outcome


class Listener:
    """Decides about commands. `run` and `run_once` are for one thread; `status` may be called from any."""

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        imds: Imds,
        receiver: Receiver | None,
        outbox: Outbox,
        clock: Clock,
        stop: Stop,
        identity: VmIdentity,
        dry_run: bool = False,
        approved: Callable[[float], None] = lambda _: None,
        run: Callable[..., Run] = Run,
    ) -> None:
        """Prepare to listen.

        Args:
            settings: the policy, the auto rules, the grace period and the signing secrets.
            imds: where documents come from and approvals go; used from the thread that calls `run`.
            receiver: where commands come from; None without a bus.
            outbox: where receipts and records are committed.
            clock: for ages, expiry and receipts.
            stop: ends `run`.
            identity: who this VM is; until that is known, nothing is approved.
            dry_run: decide and publish receipts, but POST nothing.
            approved: called for each command that IMDS has approved, with the seconds since its arrival.
            run: makes a run of a program that an auto rule names.
        """
        self._approved = approved
        self._settings = settings
        self._approver = ImdsApprover(imds, clock=clock)
        self._receiver = receiver
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._identity = identity
        self._auto = AutoRules(
            settings,
            vm_name=self._vm_name,
            notice=self._notice,
            clock=clock,
            run=None if dry_run else run,
        )
        self._dry_run = dry_run
        self._is_resolved = False
        self._pending: dict[str, Pending] = {}
        self._passed_on = MinuteLimit(PASSED_ON_PER_MINUTE)
        self._passed_since: dict[str, float] = {}  # commands for other VMs, by key
        self._started: set[str] = set()  # events whose start is recorded
        self._answers = Answers(
            receiver=receiver, outbox=outbox, identity=identity, clock=clock, dry_run=dry_run
        )

    def run(self) -> None:
        """Decide until the stop; messages that are not decided by then are delivered again."""
        self._identity.emit_started()
        while not self._stop:
            report_progress()
            self.run_once(PASS_SECONDS)
        self._answers.report_surplus(at_once=True)
        self._auto.end()
        self._answers.commit()
        self._identity.emit_stopping()

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        self._resolve_identity()
        self._identity.emit_heartbeat()
        self._identity.emit_losses()
        self._receive(wait_seconds)
        if self._settings.auto:
            self._approve_automatically()
        if self._pending:
            self._decide()
        self._answers.report_surplus()
        self._forget_passed_on()
        self._answers.commit()

    def _resolve_identity(self) -> None:
        """Find out who this VM is, then continue what an earlier process has POSTed for auto rules."""
        if self._is_resolved:
            return
        self._identity.resolve()
        self._is_resolved = self._identity.resolved
        if self._is_resolved:
            for event_id, key in self._answers.record(AUTO_POSTED) or ():
                self._add_auto(event_id, key)

    def status(self) -> dict[str, Any]:
        """Return what the status file shows of the listener."""
        return {
            "vm": self._identity.vm.name if self._identity.vm else None,
            "imds": self._approver.base,
            "last_error": self._approver.last_error or None,
            "last_good_at": iso_utc(self._approver.good_time) if self._approver.good_time else None,
            "waiting_commands": len(self._pending),
            "dry_run": self._dry_run,
        }

    # Messages

    def _receive(self, wait_seconds: float) -> None:
        if self._receiver is None:
            self._stop.wait(wait_seconds)
            return
        for message in self._receiver.messages(wait_seconds):
            self._accept(message)

    def _read(self, message: ReceivedMessage) -> Command | None:
        """Return the command of a message; refuse a message that has none, or a bad signature, and return None."""
        try:
            body = unwrap(message.decoded_body())
            command = parse_command(
                body,
                message_id=message.message_id,
                properties=message.properties,
                signed_id="" if self._settings.signing_secrets is None else signed_id(message.properties),
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
        if record and record["done"]:
            self._answers.repeat(record)
            self._answers.settle([message], Settlement())
            return
        now = self._clock.monotonic()
        pending = Pending(
            command=command,
            arrived_at=now,
            grace_from=now - self._age_seconds(message),
            messages=[message],
        )
        pending.continue_from(record)
        self._pending[command.key] = pending
        if is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open_ids, expired(command)))

    def _age_seconds(self, message: ReceivedMessage) -> float:
        """Return how long a message has been on the bus; the broker's clock may be ahead of this one."""
        if message.enqueued_at is None:
            return 0.0
        return max(0.0, (self._clock.now() - message.enqueued_at).total_seconds())

    def _signature_fault(self, message: ReceivedMessage, body: bytes) -> str:
        if self._settings.signing_secrets is None:
            return ""
        try:
            secrets = check_signing_secrets(self._settings.signing_secrets.read())
        except (OSError, ValueError) as error:
            # no secret is trusted then: whoever empties the file withdraws the old ones
            log.error("the signing secrets cannot be used; every command is refused: %s", error)  # noqa: TRY400
            return "the listener cannot read its signing secrets"
        return signature_fault(secrets, message.properties, body, signed_near=message.enqueued_at)

    # Decisions

    def _decide(self) -> None:
        """Decide what can be decided now: judge all commands by one document, POST the accepted events, answer."""
        if not self._identity.resolved:
            self._fail_overdue("the VM's identity is not available")
            return
        self._pass_on_by_name()
        document = self._approver.document()
        if document is None:
            self._fail_overdue(self._approver.last_error)
            return
        self._note_starts(document)
        surplus = len(self._pending) - MAX_WAITING
        for number, pending in enumerate(list(self._pending.values())):
            self._judge(pending, document, may_wait=number >= surplus)
        self._post_accepted()
        self._fail_overdue(self._approver.last_error)

    def _vm_name(self) -> str:
        assert self._identity.vm is not None  # noqa: S101 - nothing is judged before it is known
        return self._identity.vm.name

    def _judge(self, pending: Pending, document: Document, *, may_wait: bool) -> None:
        """Decide by the document; an unknown event may still appear, an accepted one is judged in each pass."""
        if may_wait and not pending.decisions and pending.judged_by == self._approver.read_at:
            return  # the same document would give the same decisions
        pending.judged_by = self._approver.read_at
        if pending.is_auto:
            self._judge_auto(pending, document)
            return
        for event_id in pending.open_ids:
            was_accepted = event_id in pending.decisions
            decision = judge(
                pending.command,
                event_id,
                document,
                vm_name=self._vm_name(),
                policy=self._settings.policy,
                now=self._clock.now(),
            )
            is_intended = event_id.lower() in pending.intended
            if is_intended and not _is_scheduled(document, event_id):
                decision = not_recorded(decision.event)
            elif is_intended and decision.outcome == "rejected" and decision.reason != "expired":
                decision = unknown_outcome(decision)
            elif decision.reason == "expired" and (is_intended or was_accepted):
                why = self._approver.last_error or "the listener was stopped"
                detail = f"it expired before IMDS had answered its POST: {why}"
                decision = replace(decision, outcome="failed", reason="imds_unavailable", detail=detail)
            elif decision.reason == "unknown_event" and self._has_time(pending, may_wait=may_wait):
                pending.decisions.pop(event_id, None)
                continue
            pending.decisions[event_id] = decision
        if {decision.reason for decision in pending.decisions.values()} == {"other_vm"}:
            self._pass_on(pending)

    def _pass_on_by_name(self) -> None:
        """Pass on the commands that name another VM, also while IMDS does not answer."""
        name = fold_name(self._vm_name())
        for pending in list(self._pending.values()):
            if pending.command.vm and fold_name(pending.command.vm) != name:
                self._pass_on(pending)

    def _forget_passed_on(self) -> None:
        now = self._clock.monotonic()
        self._passed_on.surplus(now)
        self._passed_since = {
            key: at for key, at in self._passed_since.items() if now - at < 2 * PASS_ON_SECONDS
        }

    def _pass_on(self, pending: Pending) -> None:
        """Release a command for another VM, unless no other listener can have the queue or none has taken it."""
        is_shared = bool(self._settings.queue) and not self._settings.session
        if not is_shared or pending.is_recorded or not pending.messages:
            return
        now = self._clock.monotonic()
        # not since the broker accepted it: the VM's clock may be wrong, and no other VM would get it then
        age_seconds = now - self._passed_since.setdefault(pending.command.key, now)
        if age_seconds < PASS_ON_MANY_SECONDS or (
            age_seconds < PASS_ON_SECONDS and self._passed_on.allows("other_vm", now)
        ):
            released = Settlement(is_released=True)
            self._answers.settle(pending.messages, released)
            del self._pending[pending.command.key]

    def _judge_auto(self, pending: Pending, document: Document) -> None:
        """Continue with an event only while it is Scheduled and an auto rule still approves it."""
        (event_id,) = pending.command.event_ids
        event = document.events.get(event_id.lower())
        decision = self._auto.judge(event, document, is_intended=bool(pending.intended))
        if decision:
            pending.decisions[event_id] = decision
        else:
            del self._pending[pending.command.key]
            self._put_record(pending)

    def _has_time(self, pending: Pending, *, may_wait: bool) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
        if not may_wait:
            return self._approver.read_at < pending.grace_from
        is_in_grace = self._clock.monotonic() - pending.grace_from < self._settings.grace_seconds
        return is_in_grace or self._approver.read_at < pending.arrived_at

    def _post_accepted(self) -> None:
        """POST the accepted events that are not approved yet, together; then answer what is final."""
        wanted = {
            decision.event.key: decision.event
            for pending in self._pending.values()
            for decision in pending.decisions.values()
            if decision.reason == "approved" and decision.event
        }
        known = {key for key, event in wanted.items() if self._is_approved(event)}
        new = self._approver.choose({key: event for key, event in wanted.items() if key not in known})
        results: Mapping[str, Decision] = {}
        # if IMDS may not be called now, a later pass does it
        if new and not self._dry_run and self._approver.may_call():
            results = self._post(new)
        for pending in list(self._pending.values()):
            self._answer(pending, self._final(pending, results, known))

    def _is_approved(self, event: ScheduledEvent | None) -> bool:
        """Return whether IMDS has approved the event as it is within the last minute."""
        if event is None:
            return False
        record = self._answers.approval(event.key)
        return is_same(record, event) and is_recent(record, self._clock.now())

    def _note_starts(self, document: Document) -> None:
        """Record which approved events have started: Scheduled again, they are to be approved again."""
        for event in document.events.values():
            if event.status != STARTED or event.key in self._started:
                continue
            self._started.add(event.key)
            if record := self._answers.approval(event.key):
                self._answers.put_approval(event.key, {**record, "has_started": True})
        self._started &= {event.key for event in document.events.values() if event.status == STARTED}

    def _commit_intents(self, keys: set[str]) -> dict[str, set[str]]:
        """Commit, before the POST, which commands depend on its outcome; return the new intents by command."""
        new: dict[str, set[str]] = {}
        for pending in self._pending.values():
            accepted = {key.lower() for key, one in pending.decisions.items() if one.outcome == "accepted"}
            if intended := keys & accepted - pending.intended:
                new[pending.command.key] = intended
                pending.intended |= intended
                self._put_record(pending)
        self._answers.commit()
        return new

    def _post(self, events: list[ScheduledEvent]) -> Mapping[str, Decision]:
        """Commit the intent, then POST; return the decisions that IMDS's answer allows."""
        keys = {event.key for event in events}
        new = self._commit_intents(keys)
        result = self._approver.post(events)
        if result.not_applied:
            # an earlier POST, whose outcome is not known, may have been applied all the same
            for command_key, intended in new.items():
                self._pending[command_key].intended -= intended
                self._put_record(self._pending[command_key])
        self._measure(result.decisions)
        return result.decisions

    def _measure(self, decisions: Mapping[str, Decision]) -> None:
        accepted = {key for key, decision in decisions.items() if decision.outcome == "accepted"}
        for pending in self._pending.values():
            if not accepted.isdisjoint(map(str.lower, pending.decisions)):
                self._approved(self._clock.monotonic() - pending.arrived_at)

    def _final(
        self, pending: Pending, results: Mapping[str, Decision], known: set[str]
    ) -> dict[str, Decision]:
        """Return the decisions of a command that are final."""
        final: dict[str, Decision] = {}
        for event_id, decision in pending.decisions.items():
            key = event_id.lower()
            is_known = decision.reason == "approved" and key in known
            has_started = decision.reason == "already_started"
            if is_known or (has_started and self._is_approved(decision.event)):
                final[event_id] = replace(
                    decision,
                    outcome="accepted",
                    reason="already_approved",
                    detail="this VM approved it less than a minute ago",
                )
            elif decision.reason != "approved":
                final[event_id] = decision
            elif self._dry_run:
                final[event_id] = replace(decision, detail="dry run: not POSTed")
            elif key in results:
                final[event_id] = replace(results[key], detail=results[key].detail or decision.detail)
        return final

    def _fail_overdue(self, error: str) -> None:
        """Answer commands that have expired, or have waited for IMDS as long as anything may."""
        for pending in list(self._pending.values()):
            is_over = is_expired(pending.command, self._clock.now())
            if is_over or self._clock.monotonic() - pending.arrived_at >= IMDS_WAIT_SECONDS:
                decision = Decision(outcome="failed", reason="imds_unavailable", detail=error)
                self._answer(pending, dict.fromkeys(pending.open_ids, decision))

    def _answer(self, pending: Pending, final: dict[str, Decision]) -> None:
        """Add final decisions to the batch; settle the command's messages once every event has its receipt."""
        if not final:
            return
        for event_id, decision in final.items():
            pending.decisions.pop(event_id, None)
            if self._has_receipt(pending, event_id, decision):
                self._answer_one(pending, event_id, decision)
            else:
                pending.unanswered[event_id.lower()] = decision
        if not pending.open_ids:
            settlement = next(map(dead_letter, pending.unanswered.values()), Settlement())
            self._answers.settle(pending.messages, settlement)
            del self._pending[pending.command.key]
        self._put_record(pending)

    def _has_receipt(self, pending: Pending, event_id: str, decision: Decision) -> bool:
        """Return whether a decision is answered: all but rejections beyond the limit, which a flood may cause."""
        if decision.outcome != "rejected" or pending.is_auto or event_id.lower() in pending.intended:
            return True
        return self._answers.allows_rejection(decision.reason)

    def _answer_one(self, pending: Pending, event_id: str, decision: Decision) -> None:
        command, key = pending.command, event_id.lower()
        pending.receipts[key] = self._answers.add(
            public(decision), event_id, command_data(command), key=command.key
        )
        if decision.reason == "approved" and decision.event and not self._dry_run:
            earlier = self._answers.approval(key)
            approval = record_approval(decision.event, at=self._clock.now(), earlier=earlier)
            self._answers.put_approval(key, approval)
        log.info(
            "command %s for %s: %s",
            *(decision.outcome, event_id, decision.reason),
            extra={"command": command.id, "detail": decision.detail},
        )

    def _put_record(self, pending: Pending) -> None:
        """Add the record of a command's progress to the batch; rejections without a receipt leave none."""
        pending.is_recorded = pending.is_recorded or bool(pending.receipts or pending.intended)
        if pending.is_recorded:
            self._answers.put(pending.command.key, pending.record)
        if pending.is_auto:
            posted = [
                [event_id, one.command.key]
                for one in self._pending.values()
                if one.is_auto and one.intended
                for event_id in one.command.event_ids
            ]
            self._answers.put(AUTO_POSTED, posted)

    # Auto rules

    def _notice(self, event: ScheduledEvent, document: Document) -> tuple[bytes, Mapping[str, Any]]:
        notice = self._identity.reporter().scheduled_event(
            Change(kind="scheduled", event=event),
            seen_before=0,
            incarnation=document.incarnation,
            at=self._clock.now(),
        )
        return structured(notice), notice.data

    def _approve_automatically(self) -> None:
        """Make a command for each event that an auto rule approves, once it is this VM's turn."""
        document = self._approver.document() if self._identity.resolved else None
        if document is None:
            return
        self._note_starts(document)
        for key, rule, event in self._auto.due(document, self._answers.approval):
            record = self._answers.record(key)
            if key in self._pending or (record and record["done"]):
                continue
            refusal = self._auto.refusal(rule, event, document)
            if refusal is None:
                continue
            self._add_auto(event.event_id, key)
            if refusal:
                decision = Decision(outcome="rejected", reason="denied", detail=refusal, event=event)
                self._answer(self._pending[key], {event.event_id: decision})

    def _add_auto(self, event_id: str, key: str) -> None:
        command = Command(id=key, key=key, event_ids=(event_id,), requested_by="imds-bridge, by an auto rule")
        now = self._clock.monotonic()
        pending = self._pending[key] = Pending(command=command, arrived_at=now, grace_from=now, is_auto=True)
        pending.continue_from(self._answers.record(key))


def _is_scheduled(document: Document, event_id: str) -> bool:
    event = document.events.get(event_id.lower())
    return event is not None and event.status == SCHEDULED
