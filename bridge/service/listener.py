"""The approval listener's loop: decide about commands, POST approvals to IMDS, publish receipts, settle messages.

The outbox keeps records that survive a kill: the intent is committed before the POST, and the outcome together
with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from bridge.approvals.approved import content_hash, is_recent, is_same, record_approval
from bridge.approvals.approver import ImdsApprover
from bridge.approvals.command import Command, parse_command, printable, unwrap
from bridge.approvals.pending import REFUSAL_RECEIPTS_PER_MINUTE, Batch, MinuteCounter, Pending
from bridge.approvals.policy import Decision, auto_wait_seconds, expired, is_expired, judge, judge_event
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.validators import check_signing_secrets
from bridge.formats.cloudevents import structured
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent
from bridge.imds.port import Imds
from bridge.outbox.outbox import Outbox
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.threads import Stop, report_progress
from bridge.service.identity import VmIdentity

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25  # how long a pass waits for messages
IMDS_WAIT_SECONDS = 600.0  # how long a command waits for IMDS

# Kinds of records; those of a dry run must not count later.
COMMAND, DRY_COMMAND, APPROVED = "command", "dry-command", "approved"
AUTO_POSTED = "by-rule"  # the key of the record that lists the auto rules' POSTs without an outcome
NOT_RECORDED = "not_recorded"  # a POST without an answer, or the process was killed after it


class Listener:
    """Decides about commands. `run` and `run_once` are for one thread; `status` may be called from any."""

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        imds: Imds,
        receiver: Receiver,
        outbox: Outbox,
        clock: Clock,
        stop: Stop,
        identity: VmIdentity,
        dry_run: bool = False,
    ) -> None:
        """Prepare to listen.

        Args:
            settings: the policy, the auto rules, the grace period and the signing secrets.
            imds: where documents come from and approvals go; used from the thread that calls `run`.
            receiver: where commands come from.
            outbox: where receipts and records are committed.
            clock: for ages, expiry and receipts.
            stop: ends `run`.
            identity: who this VM is; until that is known, nothing is approved.
            dry_run: decide and publish receipts, but POST nothing.
        """
        self._settings = settings
        self._approver = ImdsApprover(imds, clock=clock)
        self._receiver = receiver
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._identity = identity
        self._dry_run = dry_run
        self._kind = DRY_COMMAND if dry_run else COMMAND
        self._pending: dict[str, Pending] = {}
        self._refusals = MinuteCounter()
        self._first_seen: dict[str, float] = {}
        self._started: set[str] = set()  # events whose start is recorded
        self._batch = Batch()

    def run(self) -> None:
        """Decide until the stop; messages that are not decided by then are delivered again."""
        while not self._stop:
            report_progress()
            self.run_once(PASS_SECONDS)
        self._report_surplus(at_once=True)
        self._commit()
        self._identity.emit_stopping()

    def run_once(self, wait_seconds: float) -> None:
        """Make one pass: wait up to `wait_seconds` for messages, decide what can be decided, commit and settle."""
        self._resolve_identity()
        self._identity.notice_clock()
        self._identity.emit_heartbeat()
        self._identity.emit_losses()
        for message in self._receiver.messages(wait_seconds):
            self._accept(message)
        if self._settings.auto:
            self._approve_automatically()
        if self._pending:
            self._decide()
        self._report_surplus()
        self._commit()

    def _resolve_identity(self) -> None:
        """Find out who this VM is, then continue what an earlier process has POSTed for auto rules."""
        if self._identity.resolved:
            return
        if self._identity.resolve():  # the state was another VM's, and so are the pending commands
            self._pending.clear()
        if self._identity.resolved:
            for event_id, key in self._outbox.record(self._kind, AUTO_POSTED) or ():
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

    def _commit(self) -> None:
        """Commit what was decided since the last commit, then settle its messages."""
        batch, self._batch = self._batch, Batch()
        if batch.repeated:
            self._outbox.repeat(batch.repeated)
        if batch.events or batch.records:
            self._outbox.commit(batch.events, meta={}, records=batch.records)
        for message, settlement in batch.settlements:
            self._receiver.settle(message, settlement)

    # Messages

    def _accept(self, message: ReceivedMessage) -> None:
        try:
            body = unwrap(message.decoded_body())
            command = parse_command(
                body,
                message_id=message.message_id,
                properties=message.properties,
                signed_id=self._signed_id(message),
            )
        except ValueError as error:
            self._refuse(message, "malformed", str(error))
            return
        fault = self._signature_fault(message, body)
        if fault:
            self._refuse(message, "bad_signature", fault, command=command)
            return
        if command.key in self._pending:
            self._pending[command.key].add(message)
            return
        record = self._record(command.key)
        if record and record["done"]:
            self._repeat_receipts(message, record["receipts"].values())
            return
        now = self._clock.monotonic()
        pending = Pending(
            command=command,
            arrived_at=now,
            grace_from=now - self._age_seconds(message),
            messages=[message],
            receipts=record["receipts"] if record else {},
            intended=set(record["intended"] if record else ()),
        )
        self._pending[command.key] = pending
        if is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open_ids, expired(command)))

    def _signed_id(self, message: ReceivedMessage) -> str:
        """Return the id that the signature covers, "" where commands are not signed."""
        return "" if self._settings.signing_secrets is None else signed_id(message.properties)

    def _record(self, key: str) -> Any:
        """Return a record, whether it is committed or still in the batch."""
        uncommitted = self._batch.records.get((self._kind, key))
        return self._outbox.record(self._kind, key) if uncommitted is None else uncommitted

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

    def _refuse(
        self, message: ReceivedMessage, reason: str, detail: str, *, command: Command | None = None
    ) -> None:
        """Dead-letter a message; publish a receipt unless there were too many within the minute."""
        earlier_receipt = self._record(key := _refusal_key(message, reason))
        has_receipt = self._refusals.count(self._clock.monotonic()) <= REFUSAL_RECEIPTS_PER_MINUTE
        if earlier_receipt and has_receipt:
            self._batch.repeated.append(earlier_receipt.encode("ascii"))
        elif has_receipt:
            log.warning(
                "command refused: %s",
                detail,
                extra={"reason": reason, "message_id": message.message_id[:128]},
            )
            decision = Decision(outcome="rejected", reason=reason, detail=detail)
            body = self._add_receipt(decision, command, "", key=key, command_id=printable(message.message_id))
            self._batch.records[self._kind, key] = body
        self._batch.settlements.append(
            (message, Settlement(dead_letter_reason=reason, description=detail[:1000]))
        )

    def _report_surplus(self, *, at_once: bool = False) -> None:
        """Publish once a minute how many refusals had no receipt of their own."""
        surplus = self._refusals.surplus(math.inf if at_once else self._clock.monotonic())
        if surplus:
            detail = f"{surplus} more messages were dead-lettered within a minute, malformed or badly signed"
            decision = Decision(outcome="rejected", reason="malformed", detail=detail)
            key = f"malformed:{self._outbox.meta('epoch')}:{self._outbox.meta('reporterseq')}"
            self._add_receipt(decision, None, "", key=key, command_id="", count=surplus)

    def _repeat_receipts(self, message: ReceivedMessage, receipts: Iterable[str]) -> None:
        """Publish the receipts of a command that was decided before again, unchanged."""
        self._batch.repeated += [receipt.encode("ascii") for receipt in receipts]
        self._batch.settlements.append((message, Settlement()))

    # Decisions

    def _decide(self) -> None:
        """Decide what can be decided now: judge all commands by one document, POST the accepted events, answer."""
        if not self._identity.resolved:
            self._fail_overdue("the VM's identity is not available")
            return
        document = self._approver.document()
        if document is None:
            self._fail_overdue(self._approver.last_error)
            return
        self._note_starts(document)
        for pending in list(self._pending.values()):
            self._judge(pending, document)
        self._post_accepted()
        self._fail_overdue(self._approver.last_error)

    def _judge(self, pending: Pending, document: Document) -> None:
        """Decide by the document; an unknown event may still appear, an accepted one is judged in each pass."""
        assert self._identity.vm is not None  # noqa: S101 - _decide has checked it
        if pending.is_auto:
            self._judge_auto(pending, document)
            return
        for event_id in pending.open_ids:
            was_accepted = event_id in pending.decisions
            decision = judge(
                pending.command,
                event_id,
                document,
                vm_name=self._identity.vm.name,
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
            elif decision.reason == "unknown_event" and self._has_time(pending):
                pending.decisions.pop(event_id, None)
                continue
            pending.decisions[event_id] = decision

    def _judge_auto(self, pending: Pending, document: Document) -> None:
        """Continue with an event only while it is Scheduled and an auto rule still approves it."""
        (event_id,) = pending.command.event_ids
        event = document.events.get(event_id.lower())
        if event and event.status == SCHEDULED and self._auto_wait_seconds(event) is not None:
            pending.decisions[event_id] = Decision(
                outcome="accepted", reason="approved", detail="an auto rule", event=event
            )
        elif pending.intended and event and event.status == SCHEDULED:
            rejected = Decision(
                outcome="rejected", reason="denied", detail="no auto rule matches", event=event
            )
            pending.decisions[event_id] = unknown_outcome(rejected)
        elif pending.intended:
            pending.decisions[event_id] = not_recorded(event)
        else:
            del self._pending[pending.command.key]
            self._put_record(pending)

    def _has_time(self, pending: Pending) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
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
        record = self._outbox.record(APPROVED, event.key)
        return is_same(record, event) and is_recent(record, self._clock.now())

    def _note_starts(self, document: Document) -> None:
        """Record which approved events have started: Scheduled again, they are to be approved again."""
        for event in document.events.values():
            if event.status != STARTED or event.key in self._started:
                continue
            self._started.add(event.key)
            if record := self._outbox.record(APPROVED, event.key):
                self._batch.records[APPROVED, event.key] = {**record, "has_started": True}
        self._started &= {event.key for event in document.events.values() if event.status == STARTED}

    def _commit_intents(self, keys: set[str]) -> None:
        """Commit, before the POST, which commands depend on its outcome."""
        for pending in self._pending.values():
            intended = keys & {event_id.lower() for event_id in pending.decisions} - pending.intended
            if intended:
                pending.intended |= intended
                self._put_record(pending)
        self._commit()

    def _post(self, events: list[ScheduledEvent]) -> Mapping[str, Decision]:
        """Commit the intent, then POST; return the decisions that IMDS's answer allows."""
        keys = {event.key for event in events}
        self._commit_intents(keys)
        result = self._approver.post(events)
        if result.not_applied:
            for pending in self._pending.values():
                if pending.intended & keys:
                    pending.intended -= keys
                    self._put_record(pending)
        return result.decisions

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
        command = pending.command
        for event_id, decision in final.items():
            key = event_id.lower()
            pending.receipts[key] = self._add_receipt(
                _public(decision), command, event_id, key=command.key, command_id=command.id
            )
            pending.decisions.pop(event_id, None)
            if decision.reason == "approved" and decision.event and not self._dry_run:
                self._batch.records[APPROVED, key] = record_approval(
                    decision.event, at=self._clock.now(), earlier=self._outbox.record(APPROVED, key)
                )
            log.info(
                "command %s for %s: %s",
                *(decision.outcome, event_id, decision.reason),
                extra={"command": command.id, "detail": decision.detail},
            )
        if not pending.open_ids:
            self._batch.settlements += [(message, Settlement()) for message in pending.messages]
            del self._pending[command.key]
        self._put_record(pending)

    def _put_record(self, pending: Pending) -> None:
        """Add the record of a command's progress to the batch."""
        self._batch.records[self._kind, pending.command.key] = pending.record
        if pending.is_auto:
            self._batch.records[self._kind, AUTO_POSTED] = [
                [event_id, one.command.key]
                for one in self._pending.values()
                if one.is_auto and one.intended
                for event_id in one.command.event_ids
            ]

    # Auto rules

    def _approve_automatically(self) -> None:
        """Make a command for each event that an auto rule approves, once it is this VM's turn."""
        document = self._approver.document() if self._identity.resolved else None
        if document is None:
            return
        self._note_starts(document)
        now = self._clock.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in document.events}
        for event in document.events.values():
            approval = self._outbox.record(APPROVED, event.key)
            if event.status != SCHEDULED or is_same(approval, event):
                continue
            wait_seconds = self._auto_wait_seconds(event)
            if wait_seconds is not None and now - self._first_seen[event.key] >= wait_seconds:
                # one command for the event as it is, and another one for each time that it is approved
                number = approval["number"] if approval else 0
                key = f"auto:{event.key}:{content_hash(event)}:{event.not_before}:{number}"
                self._add_auto(event.event_id, key)

    def _add_auto(self, event_id: str, key: str) -> None:
        record = self._outbox.record(self._kind, key)
        if key in self._pending or (record and record["done"]):
            return
        command = Command(id=key, key=key, event_ids=(event_id,), requested_by="imds-bridge, by an auto rule")
        now = self._clock.monotonic()
        self._pending[key] = Pending(
            command=command,
            arrived_at=now,
            grace_from=now,
            is_auto=True,
            intended=set(record["intended"] if record else ()),
        )

    def _auto_wait_seconds(self, event: ScheduledEvent) -> float | None:
        """Return how long this VM leaves the event to others, None if no auto rule approves it."""
        assert self._identity.vm is not None  # noqa: S101 - _approve_automatically has checked it
        name, waits = self._identity.vm.name, []
        for rule in self._settings.auto:
            policy = self._settings.policy.model_copy(update={"allow": (rule,)})
            decision = judge_event(event, vm_name=name, policy=policy, now=self._clock.now())
            wait_seconds = auto_wait_seconds(event, vm_name=name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                waits.append(wait_seconds)
        return min(waits, default=None)

    # Receipts

    def _add_receipt(
        self,
        decision: Decision,
        command: Command | None,
        event_id: str,
        *,
        key: str,
        command_id: str,
        count: int = 0,
    ) -> str:
        """Add a receipt to the batch; return it as it will be sent."""
        event = decision.event
        data: dict[str, Any] = {
            "Reason": decision.reason,
            "Detail": decision.detail,
            "Command": _command_data(command, command_id),
            "EventType": event.raw.get("EventType") if event else None,
            "NotBeforeUtc": iso_utc(event.not_before) if event and event.not_before else None,
            "DryRun": self._dry_run,
        }
        if count:
            data["Count"] = count
        receipt = self._identity.reporter().receipt(
            outcome=decision.outcome,
            # a real receipt must not be a duplicate of a dry run's
            key=f"dry-run:{key}" if self._dry_run else key,
            command_id=command_id,
            event_id=event.event_id if event else event_id,
            resources=event.resources if event else (),
            sequence=self._identity.next_sequence(),
            at=self._clock.now(),
            data=data,
        )
        body = structured(receipt)
        self._batch.events.append((receipt, body))
        return body.decode("ascii")


def _is_scheduled(document: Document, event_id: str) -> bool:
    event = document.events.get(event_id.lower())
    return event is not None and event.status == SCHEDULED


def _refusal_key(message: ReceivedMessage, reason: str) -> str:
    digest = sha256(message.body).hexdigest()
    return f"{reason}:{message.message_id}:{digest}"


def not_recorded(event: ScheduledEvent | None) -> Decision:
    """Return the decision for an event that has started or gone since a POST whose outcome is unknown."""
    detail = "it was POSTed to IMDS and has started or gone since; the outcome was not recorded"
    return Decision(outcome="accepted", reason=NOT_RECORDED, detail=detail, event=event)


def unknown_outcome(decision: Decision) -> Decision:
    """Return the decision for an event that was POSTed, and that the policy does not allow any more."""
    detail = f"it was POSTed to IMDS and the outcome is not known; it is not POSTed again: {decision.detail}"
    return replace(decision, outcome="failed", reason="imds_unavailable", detail=detail)


def _public(decision: Decision) -> Decision:
    """Replace the internal reason by the one that receipts have."""
    return replace(decision, reason="approved") if decision.reason == NOT_RECORDED else decision


def _command_data(command: Command | None, command_id: str) -> dict[str, Any]:
    if command is None:
        return {"Id": command_id}
    return {
        "Id": command.id,
        "RequestedBy": command.requested_by,
        "Reason": command.reason,
        "Vm": command.vm,
        "ExpiresAt": iso_utc(command.expires_at) if command.expires_at else None,
    }
