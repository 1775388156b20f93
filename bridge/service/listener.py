"""The second flow's loop: judge commands, have IMDS start what may start, answer with receipts, and settle.

What must survive a kill stands in the ledger, in the listener's own outbox: the intent before the POST, and the
outcome together with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from bridge.approvals.approver import ImdsApprover
from bridge.approvals.command import Command, parse_command, printable
from bridge.approvals.pending import MALFORMED_RECEIPTS_PER_MINUTE, Outgoing, Pending, Window
from bridge.approvals.policy import Decision, auto_wait_seconds, expired, is_expired, judge, judge_event
from bridge.azure.receiver import BusReceiver, ReceivedMessage, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.config.validators import check_signing_secrets
from bridge.formats.cloudevents import structured
from bridge.http.signing import signature_fault
from bridge.imds.document import SCHEDULED, Document, ScheduledEvent
from bridge.imds.port import Imds
from bridge.outbox.outbox import Outbox
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.threads import Stop, report_progress
from bridge.service.identity import VmIdentity

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # how often what waits is looked at again
HOLD_SECONDS = 600.0  # how long a command waits for IMDS

# Kinds of records in the ledger; what a dry run has answered must not count later.
COMMAND, DRY_COMMAND, APPROVED = "command", "dry-command", "approved"
BY_RULE = "by-rule"  # the key of the record of what was POSTed without a command and has no outcome yet
NOT_RECORDED = "not_recorded"  # approved perhaps: no answer came, or the process was killed


class Listener:
    """Decides about commands. `run` is for one thread; `status` may be called from any."""

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        imds: Imds,
        receiver: BusReceiver,
        outbox: Outbox,
        clock: Clock,
        stop: Stop,
        identity: VmIdentity,
        dry_run: bool = False,
    ) -> None:
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
        self._malformed = Window()
        self._first_seen: dict[str, float] = {}
        self._outgoing = Outgoing()
        self._secrets = settings.signing_secrets.read().split() if settings.signing_secrets else []

    def run(self) -> None:
        """Decide until the stop; what is not decided then goes back to the bus."""
        while not self._stop:
            report_progress()
            self._resolve_identity()
            self._identity.notice_clock()
            self._identity.emit_heartbeat()
            for delivery in self._receiver.deliveries(LOOK_SECONDS):
                self._take(delivery)
            if self._settings.auto:
                self._approve_by_rule()
            if self._pending:
                self._decide()
            self._sum_up_malformed()
            self._flush()
        self._sum_up_malformed(at_once=True)
        self._flush()
        self._identity.emit_stopping()

    def _resolve_identity(self) -> None:
        """Learn who this VM is, then go on with what an earlier process began in its name."""
        if self._identity.resolved:
            return
        if self._identity.resolve():  # nothing of the state was this VM's
            self._pending.clear()
            self._outgoing = Outgoing()
        if self._identity.resolved:
            for event_id in self._outbox.record(self._kind, BY_RULE) or ():
                self._add_by_rule(event_id)

    def status(self) -> dict[str, Any]:
        """Tell what waits, for the status file."""
        return {
            "vm": self._identity.vm.name if self._identity.vm else None,
            "imds": self._approver.base,
            "trouble": self._approver.trouble or None,
            "last_good_at": iso_utc(self._approver.good_time) if self._approver.good_time else None,
            "waiting_commands": len(self._pending),
            "dry_run": self._dry_run,
        }

    def _flush(self) -> None:
        """Commit what was decided since the last time, then have it settled."""
        outgoing, self._outgoing = self._outgoing, Outgoing()
        if outgoing.repeated:
            self._outbox.repeat(outgoing.repeated)
        if outgoing.told or outgoing.records:
            self._outbox.commit(outgoing.told, meta={}, records=outgoing.records)
        for delivery, settlement in outgoing.settled:
            self._receiver.settle(delivery, settlement)

    # What arrives

    def _take(self, delivery: ReceivedMessage) -> None:
        try:
            command = parse_command(delivery.body, message_id=delivery.message_id)
        except ValueError as error:
            self._refuse(delivery, "malformed", str(error))
            return
        fault = self._signature_fault(delivery)
        if fault:
            self._refuse(delivery, "bad_signature", fault, command=command)
            return
        if command.key in self._pending:
            self._pending[command.key].add(delivery)
            return
        record = self._record(command.key)
        if record and record["done"]:
            self._answer_again(delivery, record["receipts"].values())
            return
        now = self._clock.monotonic()
        pending = Pending(
            command=command,
            arrived_at=now,
            grace_from=now - self._age_seconds(delivery),
            deliveries=[delivery],
            receipts=record["receipts"] if record else {},
            intended=set(record["intended"] if record else ()),
        )
        self._pending[command.key] = pending
        if is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open_ids, expired(command)))

    def _record(self, key: str) -> Any:
        """Return what is known of a command, committed or about to be."""
        about_to_be = self._outgoing.records.get((self._kind, key))
        return self._outbox.record(self._kind, key) if about_to_be is None else about_to_be

    def _age_seconds(self, delivery: ReceivedMessage) -> float:
        """Tell how long the command has waited on the bus, by clocks that may differ."""
        if delivery.enqueued_at is None:
            return 0.0
        return max(0.0, (self._clock.now() - delivery.enqueued_at).total_seconds())

    def _signature_fault(self, delivery: ReceivedMessage) -> str:
        if self._settings.signing_secrets is None:
            return ""
        try:
            self._secrets = check_signing_secrets(self._settings.signing_secrets.read())
        except (OSError, ValueError) as error:
            log.error("the signing secrets cannot be read, the last ones stay: %s", error)  # noqa: TRY400
        return signature_fault(
            self._secrets, delivery.properties, delivery.body, signed_near=delivery.enqueued_at
        )

    def _refuse(
        self, delivery: ReceivedMessage, reason: str, detail: str, *, command: Command | None = None
    ) -> None:
        """Dead-letter a message that is no command, with a receipt as long as there are few of them."""
        told_before = self._record(key := _refusal_key(delivery, reason))
        is_told = self._malformed.count(self._clock.monotonic()) <= MALFORMED_RECEIPTS_PER_MINUTE
        if told_before and is_told:
            self._outgoing.repeated.append(told_before.encode("ascii"))
        elif is_told:
            log.warning(
                "a command is refused: %s",
                detail,
                extra={"reason": reason, "message_id": delivery.message_id[:128]},
            )
            decision = Decision(outcome="rejected", reason=reason, detail=detail)
            body = self._tell(decision, command, "", key=key, command_id=printable(delivery.message_id))
            self._outgoing.records[self._kind, key] = body
        self._outgoing.settled.append(
            (delivery, Settlement(dead_letter_reason=reason, description=detail[:1000]))
        )

    def _sum_up_malformed(self, *, at_once: bool = False) -> None:
        """Say once a minute how many refusals had no receipt of their own."""
        left_out = self._malformed.left_out(math.inf if at_once else self._clock.monotonic())
        if left_out:
            detail = f"{left_out} more messages were dead-lettered within a minute, malformed or badly signed"
            decision = Decision(outcome="rejected", reason="malformed", detail=detail)
            key = f"malformed:{self._outbox.meta('epoch')}:{self._outbox.meta('reporterseq')}"
            self._tell(decision, None, "", key=key, command_id="", count=left_out)

    def _answer_again(self, delivery: ReceivedMessage, receipts: Iterable[str]) -> None:
        """Give a command that was decided before its old receipts, unchanged."""
        self._outgoing.repeated += [receipt.encode("ascii") for receipt in receipts]
        self._outgoing.settled.append((delivery, Settlement()))

    # What waits

    def _decide(self) -> None:
        """Decide what can be decided now: judge all by one document, POST what is accepted, answer."""
        if not self._identity.resolved:
            self._give_up_late("who this VM is cannot be learned")
            return
        document = self._approver.document()
        if document is None:
            self._give_up_late(self._approver.trouble)
            return
        for pending in list(self._pending.values()):
            self._judge(pending, document)
        self._start()
        self._give_up_late(self._approver.trouble)

    def _judge(self, pending: Pending, document: Document) -> None:
        """Decide by the document; an unknown event has a while to appear, an accepted one is judged each time."""
        assert self._identity.vm is not None  # noqa: S101 - _decide has looked
        if pending.by_rule:
            self._judge_by_rule(pending, document)
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
            if is_intended and (decision.reason == "unknown_event" or not _is_scheduled(document, event_id)):
                decision = not_recorded(decision.event)
            elif decision.reason == "expired" and (is_intended or was_accepted):
                why = self._approver.trouble or "stopped meanwhile"
                detail = f"it expired before IMDS had answered its POST: {why}"
                decision = replace(decision, outcome="failed", reason="imds_unavailable", detail=detail)
            elif decision.reason == "unknown_event" and self._has_time(pending):
                pending.decisions.pop(event_id, None)
                continue
            pending.decisions[event_id] = decision

    def _judge_by_rule(self, pending: Pending, document: Document) -> None:
        """Go on with an event only while it is Scheduled and a rule still approves it."""
        (event_id,) = pending.command.event_ids
        event = document.events.get(event_id.lower())
        if event and event.status == SCHEDULED and self._auto_wait_seconds(event) is not None:
            pending.decisions[event_id] = Decision(
                outcome="accepted", reason="approved", detail="an auto rule", event=event
            )
        elif pending.intended:
            pending.decisions[event_id] = not_recorded(event)
        else:
            del self._pending[pending.command.key]
            self._put_record(pending)

    def _has_time(self, pending: Pending) -> bool:
        """Tell whether an event may still appear: for a while, and by a document read after the command came."""
        is_in_grace = self._clock.monotonic() - pending.grace_from < self._settings.grace_seconds
        return is_in_grace or self._approver.read_at < pending.arrived_at

    def _start(self) -> None:
        """POST what is accepted and was not before, all in one; then answer what is known by now."""
        wanted = {
            decision.event.key: decision.event
            for pending in self._pending.values()
            for decision in pending.decisions.values()
            if decision.reason == "approved" and decision.event
        }
        known = {key for key in wanted if self._was_approved(key)}
        new = self._approver.choose({key: event for key, event in wanted.items() if key not in known})
        results: Mapping[str, Decision] = {}
        # Where IMDS may not be called now, the next look will, a moment later.
        if new and not self._dry_run and self._approver.may_call():
            results = self._post(new)
        for pending in list(self._pending.values()):
            self._answer(pending, self._final(pending, results, known))

    def _was_approved(self, key: str) -> bool:
        return self._outbox.record(APPROVED, key) is not None

    def _commit_intents(self, keys: set[str]) -> None:
        """Note on every command concerned, before the POST, that its outcome may come to be unknown."""
        for pending in self._pending.values():
            intended = keys & {event_id.lower() for event_id in pending.decisions} - pending.intended
            if intended:
                pending.intended |= intended
                self._put_record(pending)
        self._flush()

    def _post(self, events: list[ScheduledEvent]) -> Mapping[str, Decision]:
        """Have IMDS start the events, with the intent on the disk before; return what became of them."""
        keys = {event.key for event in events}
        self._commit_intents(keys)
        started = self._approver.post(events)
        if started.untouched:
            for pending in self._pending.values():
                if pending.intended & keys:
                    pending.intended -= keys
                    self._put_record(pending)
        return started.decisions

    def _final(
        self, pending: Pending, results: Mapping[str, Decision], known: set[str]
    ) -> dict[str, Decision]:
        """Return the decisions of a command that cannot change any more."""
        final: dict[str, Decision] = {}
        for event_id, decision in pending.decisions.items():
            key = event_id.lower()
            is_known = decision.reason == "approved" and key in known
            if is_known or (decision.reason == "already_started" and self._was_approved(key)):
                final[event_id] = replace(
                    decision,
                    outcome="accepted",
                    reason="already_approved",
                    detail="this VM approved it before",
                )
            elif decision.reason != "approved":
                final[event_id] = decision
            elif self._dry_run:
                final[event_id] = replace(decision, detail="dry run: not POSTed")
            elif key in results:
                final[event_id] = replace(results[key], detail=results[key].detail or decision.detail)
        return final

    def _give_up_late(self, trouble: str) -> None:
        """Answer commands that have expired, or have waited for IMDS as long as anything may."""
        for pending in list(self._pending.values()):
            is_over = is_expired(pending.command, self._clock.now())
            if is_over or self._clock.monotonic() - pending.arrived_at >= HOLD_SECONDS:
                decision = Decision(outcome="failed", reason="imds_unavailable", detail=trouble)
                self._answer(pending, dict.fromkeys(pending.open_ids, decision))

    def _answer(self, pending: Pending, final: dict[str, Decision]) -> None:
        """Note outcomes with their receipts; settle the command's messages once every event has its receipt."""
        if not final:
            return
        command = pending.command
        for event_id, decision in final.items():
            key = event_id.lower()
            pending.receipts[key] = self._tell(
                _public(decision), command, event_id, key=command.key, command_id=command.id
            )
            pending.decisions.pop(event_id, None)
            if decision.outcome == "accepted" and not self._dry_run:
                self._outgoing.records[APPROVED, key] = iso_utc(self._clock.now())
            log.info(
                "command %s for %s: %s",
                *(decision.outcome, event_id, decision.reason),
                extra={"command": command.id, "detail": decision.detail},
            )
        if not pending.open_ids:
            self._outgoing.settled += [(delivery, Settlement()) for delivery in pending.deliveries]
            del self._pending[command.key]
        self._put_record(pending)

    def _put_record(self, pending: Pending) -> None:
        """Have the next commit write how far a command has come."""
        self._outgoing.records[self._kind, pending.command.key] = pending.record
        if pending.by_rule:
            self._outgoing.records[self._kind, BY_RULE] = [
                event_id
                for one in self._pending.values()
                if one.by_rule and one.intended
                for event_id in one.command.event_ids
            ]

    # Without a command

    def _approve_by_rule(self) -> None:
        """Make a command of each event that a rule approves, once its turn has come."""
        document = self._approver.document() if self._identity.resolved else None
        if document is None:
            return
        now = self._clock.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in document.events}
        for event in document.events.values():
            if event.status != SCHEDULED or self._was_approved(event.key):
                continue
            wait_seconds = self._auto_wait_seconds(event)
            if wait_seconds is not None and now - self._first_seen[event.key] >= wait_seconds:
                self._add_by_rule(event.event_id)

    def _add_by_rule(self, event_id: str) -> None:
        key = f"auto:{event_id.lower()}"
        record = self._outbox.record(self._kind, key)
        if key in self._pending or (record and record["done"]):
            return
        command = Command(id=key, key=key, event_ids=(event_id,), requested_by="imds-bridge, by an auto rule")
        now = self._clock.monotonic()
        self._pending[key] = Pending(
            command=command,
            arrived_at=now,
            grace_from=now,
            by_rule=True,
            intended=set(record["intended"] if record else ()),
        )

    def _auto_wait_seconds(self, event: ScheduledEvent) -> float | None:
        """Return how long this VM leaves the event to others, None if no rule approves it."""
        assert self._identity.vm is not None  # noqa: S101 - _approve_by_rule has looked
        name, waits = self._identity.vm.name, []
        for rule in self._settings.auto:
            policy = self._settings.policy.model_copy(update={"allow": (rule,)})
            decision = judge_event(event, vm_name=name, policy=policy, now=self._clock.now())
            wait_seconds = auto_wait_seconds(event, vm_name=name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                waits.append(wait_seconds)
        return min(waits, default=None)

    # Receipts

    def _tell(
        self,
        decision: Decision,
        command: Command | None,
        event_id: str,
        *,
        key: str,
        command_id: str,
        count: int = 0,
    ) -> str:
        """Have the next commit publish a receipt; return it as it will be sent."""
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
        told = self._identity.reporter().receipt(
            outcome=decision.outcome,
            # a real receipt must not look like a duplicate of a dry run's
            key=f"dry-run:{key}" if self._dry_run else key,
            command_id=command_id,
            event_id=event.event_id if event else event_id,
            resources=event.resources if event else (),
            sequence=self._identity.next_sequence(),
            at=self._clock.now(),
            data=data,
        )
        body = structured(told)
        self._outgoing.told.append((told, body))
        return body.decode("ascii")


def _is_scheduled(document: Document, event_id: str) -> bool:
    event = document.events.get(event_id.lower())
    return event is not None and event.status == SCHEDULED


def _refusal_key(delivery: ReceivedMessage, reason: str) -> str:
    digest = sha256(delivery.body).hexdigest()
    return f"{reason}:{delivery.message_id}:{digest}"


def not_recorded(event: ScheduledEvent | None) -> Decision:
    """Decide about an event that has started or gone after a POST whose outcome is unknown."""
    detail = "it was POSTed to IMDS and has started or gone since; the outcome was not recorded"
    return Decision(outcome="accepted", reason=NOT_RECORDED, detail=detail, event=event)


def _public(decision: Decision) -> Decision:
    """Give a decision the reason that receipts know."""
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
