"""The second flow's loop: judge commands, have IMDS start what may start, answer with receipts, and settle.

What must survive a kill stands in the ledger, in the listener's own outbox: the intent before the POST, and the
outcome together with its receipt before the message is settled.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from queue import Empty
from typing import Any, Protocol

from bridge.command import Command, parse_command, printable
from bridge.commands import Delivery, Settlement
from bridge.config import ApprovalSettings
from bridge.errors import ImdsError
from bridge.formats.cloudevents import structured
from bridge.imds import ImdsClient
from bridge.model import STARTED, CloudEvent, Document, ScheduledEvent, iso_utc, parse_document
from bridge.outbox import Outbox
from bridge.policy import Decision, auto_wait_seconds, is_expired, judge, judge_event
from bridge.runtime import Clock, Stop
from bridge.signing import signature_fault
from bridge.voice import Voice

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.25  # how often what waits is looked at again
READ_EVERY_SECONDS = 1.0  # how often the document is read, for all commands together
HOLD_SECONDS = 600.0  # how long a command waits for IMDS
CALLS_PER_SECOND = 3  # of the five that IMDS allows this VM; `forward` needs one or two
MALFORMED_RECEIPTS_PER_MINUTE = 10
MINUTE_SECONDS = 60.0

# Kinds of records in the ledger; what a dry run has answered must not count later.
COMMAND, DRY_COMMAND, APPROVED = "command", "dry-command", "approved"
NOT_RECORDED = "not_recorded"  # approved perhaps, by a process that was killed


class Inlet(Protocol):
    """Where commands come from; `settle` may be called from any thread."""

    arrived: Any

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """Have the message completed or dead-lettered."""


@dataclass(kw_only=True)
class _Pending:
    """A command that is not decided yet, and every message that carried it.

    `decisions` may still change, `receipts` are given, by EventId in lower case. `recovered`: an intent was
    found without its outcome, so an earlier process may have POSTed it. `by_rule`: nobody sent it.
    """

    command: Command
    arrived_at: float
    deliveries: list[Delivery] = field(default_factory=list)
    recovered: bool = False
    by_rule: bool = False
    decisions: dict[str, Decision] = field(default_factory=dict)
    receipts: dict[str, str] = field(default_factory=dict)

    @property
    def open_ids(self) -> list[str]:
        """The EventIds that have no receipt yet."""
        return [event_id for event_id in self.command.event_ids if event_id.lower() not in self.receipts]


class Listener:
    """Decides about commands. `run` is for one thread; `status` may be called from any."""

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        imds: ImdsClient,
        inlet: Inlet,
        outbox: Outbox,
        clock: Clock,
        stop: Stop,
        voice: Voice,
        dry_run: bool = False,
    ) -> None:
        self._settings = settings
        self._imds = imds
        self._inlet = inlet
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._voice = voice
        self._dry_run = dry_run
        self._kind = DRY_COMMAND if dry_run else COMMAND
        self._pending: dict[str, _Pending] = {}
        self._document: Document | None = None
        self._read_at = -math.inf
        self._good_at = -math.inf
        self._trouble = ""
        self._calls: deque[float] = deque(maxlen=CALLS_PER_SECOND)
        self._malformed = _Window()
        self._first_seen: dict[str, float] = {}

    def run(self) -> None:
        """Decide until the stop; what is not decided then goes back to the bus."""
        while not self._stop:
            self._voice.learn()
            self._voice.beat()
            for delivery in self._arrived():
                self._take(delivery)
            if self._settings.auto:
                self._approve_by_rule()
            if self._pending:
                self._decide()
            self._sum_up_malformed()
        self._voice.farewell()

    def status(self) -> dict[str, Any]:
        """Tell what waits, for the status file."""
        return {
            "waiting_commands": len(self._pending),
            "imds": self._imds.base,
            "imds_trouble": self._trouble or None,
            "dry_run": self._dry_run,
        }

    # What arrives

    def _arrived(self) -> Iterable[Delivery]:
        """Wait for a command, not longer than what waits already allows; then take all that are there."""
        try:
            yield self._inlet.arrived.get(timeout=LOOK_SECONDS)
            while True:
                yield self._inlet.arrived.get_nowait()
        except Empty:
            return

    def _take(self, delivery: Delivery) -> None:
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
            self._pending[command.key].deliveries.append(delivery)
            return
        record = self._outbox.record(self._kind, command.key)
        if record and record["done"]:
            self._answer_again(delivery, record["receipts"].values())
            return
        self._pending[command.key] = _Pending(
            command=command,
            arrived_at=self._clock.monotonic(),
            deliveries=[delivery],
            recovered=record is not None,
            receipts=record["receipts"] if record else {},
        )

    def _signature_fault(self, delivery: Delivery) -> str:
        if self._settings.signing_secrets is None:
            return ""
        try:
            secrets = self._settings.signing_secrets.read()
        except (OSError, ValueError) as error:
            log.error("the signing secret cannot be read: %s", error)  # noqa: TRY400 - the text says it all
            return "the listener cannot read its signing secret"
        return signature_fault(
            secrets.split(), delivery.properties, delivery.body, signed_near=delivery.enqueued_at
        )

    def _refuse(
        self, delivery: Delivery, reason: str, detail: str, *, command: Command | None = None
    ) -> None:
        """Dead-letter a message that is no command, with a receipt as long as there are few of them."""
        log.warning(
            "a command is refused: %s", detail, extra={"reason": reason, "message": delivery.message_id[:128]}
        )
        if self._malformed.count(self._clock.monotonic()) <= MALFORMED_RECEIPTS_PER_MINUTE:
            key = f"{reason}:{delivery.message_id}"
            decision = Decision(outcome="rejected", reason=reason, detail=detail)
            told = self._receipt(decision, command, "", key=key, command_id=printable(delivery.message_id))
            self._outbox.commit([(told, structured(told))], meta={})
        self._inlet.settle(delivery, Settlement(dead_letter_reason=reason, description=detail[:1000]))

    def _sum_up_malformed(self) -> None:
        """Say once a minute how many refusals had no receipt of their own."""
        left_out = self._malformed.left_out(self._clock.monotonic())
        if left_out:
            detail = f"{left_out} more messages were dead-lettered within a minute, malformed or badly signed"
            decision = Decision(outcome="rejected", reason="malformed", detail=detail)
            key = f"malformed:{self._outbox.meta('epoch')}:{self._outbox.meta('reporterseq')}"
            told = self._receipt(decision, None, "", key=key, command_id="", count=left_out)
            self._outbox.commit([(told, structured(told))], meta={})

    def _answer_again(self, delivery: Delivery, receipts: Iterable[str]) -> None:
        """Give a command that was decided before its old receipts, unchanged."""
        self._outbox.repeat([receipt.encode("ascii") for receipt in receipts])
        self._inlet.settle(delivery, Settlement())

    # What waits

    def _decide(self) -> None:
        """Decide what can be decided now: judge all by one document, POST what is accepted, answer."""
        if self._voice.vm is None:
            self._give_up_late("who this VM is cannot be learned")
            return
        document = self._read_document()
        if document is None:
            self._give_up_late(self._trouble)
            return
        for pending in list(self._pending.values()):
            self._judge(pending, document)
        self._start()
        self._give_up_late(self._trouble)

    def _read_document(self) -> Document | None:
        """Return a document not older than a second, None while IMDS gives none."""
        now = self._clock.monotonic()
        if now - self._read_at >= READ_EVERY_SECONDS and self._may_call(now):
            self._read_at = now
            try:
                self._document = parse_document(self._imds.document())
            except (ImdsError, ValueError) as error:
                self._note_trouble(str(error))
            else:
                self._note_trouble("")
                self._good_at = self._clock.monotonic()
        is_fresh = self._good_at >= self._read_at
        return self._document if is_fresh else None

    def _may_call(self, now: float) -> bool:
        """Keep to the share of IMDS's limit; notes the call."""
        if len(self._calls) == CALLS_PER_SECOND and now - self._calls[0] < 1.0:
            return False
        self._calls.append(now)
        return True

    def _note_trouble(self, trouble: str) -> None:
        if trouble and not self._trouble:
            log.warning("commands wait for IMDS: %s", trouble)
        elif self._trouble and not trouble:
            log.info("IMDS answers again; waiting commands go on")
        self._trouble = trouble

    def _judge(self, pending: _Pending, document: Document) -> None:
        """Decide by the document; an unknown event has a while to appear, an accepted one is judged each time."""
        now = self._clock.now()
        assert self._voice.vm is not None  # noqa: S101 - _decide has looked
        for event_id in pending.open_ids:
            before = pending.decisions.get(event_id)
            if before and (pending.by_rule or before.outcome != "accepted"):
                continue
            decision = judge(
                pending.command,
                event_id,
                document,
                vm_name=self._voice.vm.name,
                policy=self._settings.policy,
                now=now,
            )
            if pending.recovered and decision.reason in ("unknown_event", "already_started"):
                detail = "an earlier process may have approved it; its outcome was not recorded"
                decision = Decision(
                    outcome="accepted", reason=NOT_RECORDED, detail=detail, event=decision.event
                )
            elif decision.reason == "unknown_event" and self._has_time(pending):
                pending.decisions.pop(event_id, None)
                continue
            pending.decisions[event_id] = decision

    def _has_time(self, pending: _Pending) -> bool:
        return self._clock.monotonic() - pending.arrived_at < self._settings.grace_seconds

    def _start(self) -> None:
        """POST what is accepted and was not before, all in one; then answer what is known by now."""
        wanted = {
            decision.event.key: decision.event
            for pending in self._pending.values()
            for decision in pending.decisions.values()
            if decision.reason == "approved" and decision.event
        }
        new = [event for key, event in wanted.items() if not self._was_approved(key)]
        results: dict[str, Decision] = {}
        # Where IMDS may not be called now, the next look will, a moment later.
        if new and not self._dry_run and self._may_call(self._clock.monotonic()):
            self._commit([], [one for one in self._pending.values() if _wants(one, new)])
            results = self._post(new)
        for pending in list(self._pending.values()):
            self._answer(pending, self._final(pending, results))

    def _was_approved(self, key: str) -> bool:
        return self._outbox.record(APPROVED, key) is not None

    def _post(self, events: list[ScheduledEvent]) -> dict[str, Decision]:
        """Have IMDS start the events; return what it said of each, nothing for those it gave no answer to."""
        try:
            self._approve(events)
        except ImdsError as error:
            if error.status != 400:  # noqa: PLR2004 - Bad Request: what was asked for is wrong
                self._note_trouble(str(error))
                return {}
            if len(events) == 1:
                refused = Decision(
                    outcome="failed", reason="imds_refused", detail=str(error), event=events[0]
                )
                return {events[0].key: refused}
        else:
            return {
                event.key: Decision(outcome="accepted", reason="approved", event=event) for event in events
            }
        alone: dict[str, Decision] = {}
        for event in events:
            while not self._may_call(self._clock.monotonic()):
                if self._stop.wait(LOOK_SECONDS):
                    return alone
            alone.update(self._post([event]))
        return alone

    def _approve(self, events: list[ScheduledEvent]) -> None:
        incarnation = self._document.raw.get("DocumentIncarnation") if self._document else None
        for event in events:
            names = ", ".join(event.resources)
            log.info(
                "approving %s of %s", event.raw.get("EventType"), names, extra={"event_id": event.event_id}
            )
        self._imds.approve([event.event_id for event in events], incarnation=incarnation)

    def _final(self, pending: _Pending, results: dict[str, Decision]) -> dict[str, Decision]:
        """Return the decisions of a command that cannot change any more."""
        final: dict[str, Decision] = {}
        for event_id, decision in pending.decisions.items():
            key = event_id.lower()
            if decision.reason in ("approved", "already_started") and self._was_approved(key):
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
            expired = is_expired(pending.command, self._clock.now())
            if not expired and self._clock.monotonic() - pending.arrived_at < HOLD_SECONDS:
                continue
            decision = Decision(outcome="failed", reason="imds_unavailable", detail=trouble)
            if expired and not trouble:
                decision = Decision(
                    outcome="rejected", reason="expired", detail="it could not be decided in time"
                )
            self._answer(pending, dict.fromkeys(pending.open_ids, decision))

    def _answer(self, pending: _Pending, final: dict[str, Decision]) -> None:
        """Commit outcomes with their receipts; settle the command's messages once every event has its receipt."""
        if not final:
            return
        command = pending.command
        encoded: list[tuple[CloudEvent, bytes]] = []
        approved: list[str] = []
        for event_id, decision in final.items():
            told = self._receipt(_public(decision), command, event_id, key=command.key, command_id=command.id)
            body = structured(told)
            encoded.append((told, body))
            pending.receipts[event_id.lower()] = body.decode("ascii")
            pending.decisions.pop(event_id, None)
            if decision.outcome == "accepted" and not self._dry_run:
                approved.append(event_id.lower())
            log.info(
                "command %s for %s: %s",
                *(decision.outcome, event_id, decision.reason),
                extra={"command": command.id, "detail": decision.detail},
            )
        self._commit(encoded, [pending], approved=approved)
        if not pending.open_ids:
            for delivery in pending.deliveries:
                self._inlet.settle(delivery, Settlement())
            self._pending.pop(command.key, None)

    def _commit(
        self,
        told: list[tuple[CloudEvent, bytes]],
        commands: Iterable[_Pending],
        *,
        approved: Iterable[str] = (),
    ) -> None:
        """Write receipts, how far commands have come, and which events this VM approved, or nothing of it."""
        records: dict[tuple[str, str], Any] = {
            (self._kind, one.command.key): {"receipts": one.receipts, "done": not one.open_ids}
            for one in commands
        }
        records |= {(APPROVED, key): iso_utc(self._clock.now()) for key in approved}
        self._outbox.commit(told, meta={}, records=records)

    # Without a command

    def _approve_by_rule(self) -> None:
        """Make a command of each event that a rule approves, once its turn has come."""
        document = self._read_document() if self._voice.vm else None
        if document is None:
            return
        now = self._clock.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in document.events}
        for event in document.events.values():
            key = f"auto:{event.key}"
            record = self._outbox.record(self._kind, key)
            if key in self._pending or (record and record["done"]) or self._was_approved(event.key):
                continue
            wait_seconds = self._auto_wait(event)
            if wait_seconds is not None and now - self._first_seen[event.key] >= wait_seconds:
                command = Command(
                    id=key, key=key, event_ids=(event.event_id,), requested_by="imds-bridge, by an auto rule"
                )
                self._pending[key] = _Pending(command=command, arrived_at=now, by_rule=True)
                self._pending[key].decisions[event.event_id] = Decision(
                    outcome="accepted", reason="approved", detail="an auto rule", event=event
                )

    def _auto_wait(self, event: ScheduledEvent) -> float | None:
        """Return how long this VM leaves the event to others, None if no rule approves it."""
        if event.status == STARTED or self._voice.vm is None:
            return None
        waits = []
        for rule in self._settings.auto:
            policy = self._settings.policy.model_copy(update={"allow": (rule,)})
            now = self._clock.now()
            decision = judge_event(event, vm_name=self._voice.vm.name, policy=policy, now=now)
            wait_seconds = auto_wait_seconds(event, vm_name=self._voice.vm.name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                waits.append(wait_seconds)
        return min(waits, default=None)

    # Receipts

    def _receipt(
        self,
        decision: Decision,
        command: Command | None,
        event_id: str,
        *,
        key: str,
        command_id: str,
        count: int = 0,
    ) -> CloudEvent:
        at = self._clock.now()
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
        return self._voice.reporter().receipt(
            outcome=decision.outcome,
            key=key,
            command_id=command_id,
            event_id=event.event_id if event else event_id,
            resources=event.resources if event else (),
            sequence=self._voice.next_sequence(),
            at=at,
            data=data,
        )


def _wants(pending: _Pending, events: Iterable[ScheduledEvent]) -> bool:
    """Tell whether the command is why one of the events is POSTed."""
    keys = {event_id.lower() for event_id in pending.command.event_ids}
    return any(event.key in keys for event in events)


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


class _Window:
    """Counts within a minute, and tells afterwards how many were too many."""

    def __init__(self) -> None:
        self._began_at = -math.inf
        self._count = 0

    def count(self, now: float) -> int:
        """Count one; return how many there were within this minute."""
        if self._count == 0:
            self._began_at = now
        self._count += 1
        return self._count

    def left_out(self, now: float) -> int:
        """Return how many had no receipt once the minute is over, else 0; and begin anew."""
        if self._count == 0 or now - self._began_at < MINUTE_SECONDS:
            return 0
        count, self._count = self._count, 0
        return max(0, count - MALFORMED_RECEIPTS_PER_MINUTE)
