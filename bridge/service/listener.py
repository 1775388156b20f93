"""The approval listener's loop: decide about commands, POST approvals to IMDS, publish receipts, settle messages.

The outbox keeps records that survive a kill: the intent is committed before the POST, and the outcome together
with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.approvals.approver import ImdsApprover
from bridge.approvals.command import Command, parse_command, unwrap
from bridge.approvals.pending import Pending, Request, Stage
from bridge.approvals.policy import (
    Decision,
    already_approved,
    changed,
    expired,
    is_expired,
    judge,
    names_other_vm,
    not_recorded,
    other_vm,
    unknown_outcome,
)
from bridge.approvals.programs import AutoRules, Stays, command_key
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.values import check_signing_secrets
from bridge.formats.cloudevents import structured
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.diff import Change
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent
from bridge.runtime.program import Run
from bridge.runtime.threads import report_progress
from bridge.runtime.time import iso_utc
from bridge.service.answers import Answers, command_data, dead_letter

if TYPE_CHECKING:
    from bridge.service.composition import Parts

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25  # how long a pass waits for messages
IMDS_WAIT_SECONDS = 600.0  # how long a command waits for IMDS
# How long a command for another VM goes back to a queue that several listeners may share; the shorter time holds
# while there are many of them.
PASS_ON_SECONDS, PASS_ON_MANY_SECONDS = 600.0, 30.0
PASSED_ON_LONG = 100
# How many commands wait for their events to appear; when there are more, the oldest do not wait any longer.
MAX_WAITING = 500

AUTO_POSTED = "by-rule"  # the key of the record that lists the auto rules' POSTs without an outcome


class Listener:
    """Decides about commands. `run` and `run_once` are for one thread; `status` may be called from any."""

    def __init__(
        self,
        parts: Parts,
        settings: ApprovalSettings,
        receiver: Receiver | None,
        *,
        dry_run: bool = False,
        run: Callable[..., Run] = Run,
    ) -> None:
        """Prepare to listen.

        Args:
            parts: of the process; IMDS is used from the thread that calls `run`, which the stop ends.
            settings: the policy, the auto rules, the grace period and the signing secrets.
            receiver: where commands come from; None without a bus.
            dry_run: decide and publish receipts, but POST nothing.
            run: makes a run of a program that an auto rule names.
        """
        self._meter = parts.meter
        self._settings = settings
        self._approver = ImdsApprover(parts.imds, clock=parts.clock)
        self._receiver = receiver
        self._clock = parts.clock
        self._stop = parts.stop
        self._identity = parts.identity
        self._answers = Answers(parts, receiver, dry_run=dry_run)
        self._stays = Stays(self._answers.stay)
        self._auto = AutoRules(
            settings=settings,
            stays=self._stays,
            vm_name=self._vm_name,
            notice=self._notice,
            clock=parts.clock,
            run=None if dry_run else run,
        )
        self._dry_run = dry_run
        self._is_resolved = False
        self._pending: dict[str, Pending] = {}
        self._passed_since: dict[str, float] = {}  # commands for other VMs, by key

    def run(self) -> None:
        """Decide until the stop; messages that are not decided by then are delivered again."""
        self._identity.emit_started()
        while not self._stop:
            report_progress()
            self.run_once(self.wait_seconds)
        self._answers.report_surplus(at_once=True)
        self._auto.end()
        self._answers.commit()
        self._identity.emit_stopping()

    @property
    def wait_seconds(self) -> float:
        """How long the next pass may wait for messages."""
        return min(PASS_SECONDS, self._approver.newer_in_seconds)

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        self._resolve_identity()
        self._identity.emit_heartbeat()
        self._identity.emit_losses()
        self._receive(wait_seconds)
        if self._settings.auto or self._pending:
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
        if is_expired(command, self._clock.now()) and not pending.at(Stage.POSTED):
            self._answer(pending, [(request, expired(command)) for request in pending.open])

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
        """Decide what can be decided now: judge all commands by one document, POST the allowed events, answer."""
        document = self._approver.document() if self._is_resolved else None
        if document:
            for event_id in self._stays.update(document, read_at=self._approver.read_at):
                log.info(
                    "an approval counts no more: the event has started, changed or left",
                    extra={"event_id": event_id},
                )
            self._add_due(document)
        now, surplus = self._clock.monotonic(), len(self._pending) - MAX_WAITING
        self._passed_since = {
            key: at for key, at in self._passed_since.items() if now - at < 2 * PASS_ON_SECONDS
        }
        for number, pending in enumerate(list(self._pending.values())):
            self._judge(pending, document, may_wait=number >= surplus)
        if document and not self._dry_run:
            self._post_allowed()

    def _vm_name(self) -> str:
        assert self._identity.vm is not None  # noqa: S101 - nothing is judged before it is known
        return self._identity.vm.name

    def _judge(self, pending: Pending, document: Document | None, *, may_wait: bool) -> None:
        """Answer what can be answered by the document, None while there is none; note what is to be POSTed."""
        is_known = document and may_wait and pending.judged_by == self._approver.read_at
        if is_known and not pending.at(Stage.ALLOWED, Stage.POSTED):
            return  # the same document would give the same decisions
        pending.judged_by = self._approver.read_at
        judged = [
            (request, self._judge_one(pending, request, document, may_wait)) for request in pending.open
        ]
        final = [(request, decision) for request, decision in judged if decision]
        is_elsewhere = all(decision.reason == "other_vm" for _, decision in final)
        if final and is_elsewhere and not pending.at(Stage.ALLOWED) and self._pass_on(pending):
            return
        self._answer(pending, final)

    def _judge_one(
        self, pending: Pending, request: Request, document: Document | None, may_wait: bool
    ) -> Decision | None:
        """Return the final decision about an EventId; None if it waits for its event, for its POST or for IMDS."""
        if request.stage is not Stage.POSTED:
            return self._judge_open(pending, request, document, may_wait=may_wait)
        event = document.events.get(request.key) if document else None
        if document and not (event and event.status == SCHEDULED):
            return not_recorded(event)
        if event and pending.is_auto and not self._is_for_stay(pending, event):
            return unknown_outcome(changed(event))
        decision = self._judge_open(pending, request, document, may_wait=may_wait)
        return unknown_outcome(decision) if decision and decision.outcome == "rejected" else decision

    def _is_for_stay(self, pending: Pending, event: ScheduledEvent) -> bool:
        stay = self._stays.get(event.key)
        return stay is not None and pending.command.key == command_key(stay)

    def _judge_open(
        self, pending: Pending, request: Request, document: Document | None, *, may_wait: bool
    ) -> Decision | None:
        if self._is_resolved and names_other_vm(pending.command, self._vm_name()):
            return other_vm(pending.command)
        if over := self._judge_overdue(pending, request, is_readable=document is not None):
            return over
        if document is None:
            return None
        if request.key not in document.events and self._has_time(pending, may_wait=may_wait):
            self._approver.want_newer(pending.arrived_at)
            request.wait()
            return None
        return self._judge_event(pending, request, document)

    def _judge_event(self, pending: Pending, request: Request, document: Document) -> Decision | None:
        """Decide by the policy or an auto rule; None if the event is to be POSTed, or its program runs."""
        event = document.events.get(request.key)
        if pending.is_auto and event:
            decision = self._auto.judge(event, document)
        else:
            now, policy = self._clock.now(), self._settings.policy
            decision = judge(event, vm_name=self._vm_name(), policy=policy, now=now)
        if decision is None:
            pending.arrived_at = self._clock.monotonic()
            request.wait()
            return None
        is_accepted = decision.outcome == "accepted"
        if (
            event
            and (is_accepted or event.status == STARTED)
            and self._stays.is_approved(event, now=self._clock.now())
        ):
            return already_approved(event)
        if not is_accepted:
            return decision
        if self._dry_run:
            return replace(decision, detail="dry run: not POSTed")
        request.allow(decision)
        return None

    def _judge_overdue(self, pending: Pending, request: Request, *, is_readable: bool) -> Decision | None:
        """Decide about a command that has expired, or has waited for IMDS as long as anything may."""
        if pending.is_auto and request.stage is Stage.WAITING:
            return None  # for its program
        has_expired = is_expired(pending.command, self._clock.now())
        if has_expired and is_readable and request.stage is Stage.WAITING:
            return expired(pending.command)
        if not has_expired and self._clock.monotonic() - pending.arrived_at < IMDS_WAIT_SECONDS:
            return None
        error = self._approver.last_error if self._is_resolved else "the VM's identity is not available"
        detail = error or "it was not decided in time"
        return Decision(outcome="failed", reason="imds_unavailable", detail=detail)

    def _has_time(self, pending: Pending, *, may_wait: bool) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
        if pending.is_auto:
            return False
        if not may_wait:
            return self._approver.read_at < pending.grace_from
        is_in_grace = self._clock.monotonic() - pending.grace_from < self._settings.grace_seconds
        return is_in_grace or self._approver.read_at < pending.arrived_at

    def _pass_on(self, pending: Pending) -> bool:
        """Release a command for another VM, unless no other listener can have the queue or none has taken it."""
        is_shared = bool(self._settings.queue) and not self._settings.session
        if not is_shared or pending.is_recorded or not pending.messages:
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

    def _post_allowed(self) -> None:
        """POST the allowed events together, once their intent is committed, and answer by what IMDS says."""
        requests = [
            (pending, request, request.wanted)
            for pending in self._pending.values()
            for request in pending.requests
            if request.wanted
        ]
        chosen = self._approver.choose({event.key: event for _, _, event in requests if event})
        if not chosen or not self._approver.may_call():
            return  # a later pass does it
        keys = {event.key for event in chosen}
        new = [
            (one, request)
            for one, request, _ in requests
            if request.key in keys and request.stage is Stage.ALLOWED
        ]
        self._set_stage(new, Stage.POSTED)
        self._answers.commit()
        result = self._approver.post(chosen)
        # An earlier POST, whose outcome is not known, may have been applied all the same.
        if result.not_applied:
            self._set_stage(new, Stage.ALLOWED)
        self._answer_posted(result.decisions)

    def _set_stage(self, requests: list[tuple[Pending, Request]], stage: Stage) -> None:
        for _, request in requests:
            request.stage = stage
        for pending in {id(pending): pending for pending, _ in requests}.values():
            self._put_record(pending)

    def _answer_posted(self, decisions: Mapping[str, Decision]) -> None:
        """Answer what a POST has decided, by EventIds in lower case."""
        for key, decision in decisions.items():
            if decision.outcome == "accepted" and decision.event:
                self._stays.approve(key, at=self._clock.now())
                self._answers.put_stay(key, self._stays.record(key))
        for pending in list(self._pending.values()):
            final = [
                (request, replace(decisions[request.key], detail=_detail(decisions[request.key], request)))
                for request in pending.requests
                if request.wanted and request.key in decisions
            ]
            if any(decision.outcome == "accepted" for _, decision in final):
                self._meter.approved(self._clock.monotonic() - pending.arrived_at)
            self._answer(pending, final)

    # Answers

    def _answer(self, pending: Pending, final: Sequence[tuple[Request, Decision]]) -> None:
        """Add final decisions to the batch; settle the command's messages once every event has its receipt."""
        if not final:
            return
        for request, decision in final:
            self._answer_one(pending, request, decision)
        if not pending.open:
            without = (one.decision for one in pending.requests if one.decision and not one.receipt)
            self._answers.settle(pending.messages, next(map(dead_letter, without), Settlement()))
            del self._pending[pending.command.key]
        self._put_record(pending)

    def _answer_one(self, pending: Pending, request: Request, decision: Decision) -> None:
        """Answer with a receipt, unless it is a rejection beyond the limit: a flood may cause those."""
        request.stage, request.decision = Stage.ANSWERED, decision
        is_limited = decision.outcome == "rejected" and not pending.is_auto
        if is_limited and not self._answers.allows_rejection(decision.reason):
            return
        command = pending.command
        request.receipt = self._answers.add(
            decision, request.event_id, command_data(command), key=command.key
        )
        log.info(
            "command %s for %s: %s",
            *(decision.outcome, request.event_id, decision.reason),
            extra={"command": command.id, "detail": decision.detail},
        )

    def _put_record(self, pending: Pending) -> None:
        """Add the record of a command's progress to the batch; rejections without a receipt leave none."""
        record = pending.record
        pending.is_recorded = bool(pending.is_recorded or record["receipts"] or record["intended"])
        if pending.is_recorded:
            self._answers.put(pending.command.key, record)
        if pending.is_auto:
            for request in pending.requests:
                if self._stays.get(request.key):
                    self._answers.put_stay(request.key, self._stays.record(request.key))
            posted = [
                [request.event_id, one.command.key]
                for one in self._pending.values()
                if one.is_auto
                for request in one.at(Stage.POSTED)
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

    def _add_due(self, document: Document) -> None:
        """Make a command for each event that an auto rule approves; drop those that none approves any more."""
        due = dict(self._auto.due(document))
        for key, pending in list(self._pending.items()):
            if pending.is_auto and key not in due and not pending.at(Stage.POSTED):
                del self._pending[key]
        for key, event in due.items():
            record = self._answers.record(key)
            if key not in self._pending and not (record and record["done"]):
                self._add_auto(event.event_id, key)

    def _add_auto(self, event_id: str, key: str) -> None:
        command = Command(id=key, key=key, event_ids=(event_id,), requested_by="imds-bridge, by an auto rule")
        now = self._clock.monotonic()
        pending = self._pending[key] = Pending(command=command, arrived_at=now, grace_from=now, is_auto=True)
        pending.continue_from(self._answers.record(key))


def _detail(decision: Decision, request: Request) -> str:
    return decision.detail or (request.decision.detail if request.decision else "")
