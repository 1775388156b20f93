"""What a pass of the listener decides: receipts, records and settlements, committed together and settled after it.

I/O: the outbox and the queue, the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from bridge.approvals.auto import Rules
from bridge.approvals.command import Command
from bridge.approvals.pending import (
    REFUSED_RECEIPTS_PER_MINUTE,
    REJECTED_RECEIPTS_PER_MINUTE,
    REPEATED_RECEIPTS_PER_MINUTE,
    MinuteLimit,
)
from bridge.approvals.policy import Decision, rejected
from bridge.approvals.state import Owed, Program, State
from bridge.approvals.step import load_state
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.approvals import ApprovalSettings
from bridge.contract.types import ReceiptReason
from bridge.events.envelope import read_event
from bridge.events.model import CloudEvent, StoredEvent, structured
from bridge.imds.diff import Change
from bridge.imds.document import ADVISORY, Document, ScheduledEvent
from bridge.outbox.outbox import Outbox
from bridge.outbox.rows import DONE, LOST, OWED, REQUEST, STATE, UNKNOWN_LOSSES
from bridge.process.parts import Parts
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc

log = logging.getLogger(__name__)

# Kinds of records; those of a dry run must not count later.
COMMAND, DRY_COMMAND = "command", "dry-command"
EVENTS, KNOWN = STATE, "events"  # for ever, and kept in place where only memory has it
NOTED_SECONDS = 60.0  # how often it is noted when the document was read, if nothing else is
STAY = "stay"  # of the version before
RECOVERED = "io.imdsbridge.approval.recovered.v1"
BY_RULE = "imds-bridge, by an auto rule"


class Receipts:
    """Collects what is decided until `commit`. For the listener's thread."""

    def __init__(self, parts: Parts, receiver: Receiver | None, *, dry_run: bool) -> None:
        """Start with nothing decided.

        Args:
            parts: of the process: its outbox gets receipts and records, in its identity's name.
            receiver: settles messages; None without a bus, where there are none.
            dry_run: whether receipts and records are of a dry run.
        """
        self._receiver = receiver
        self._outbox = parts.outbox
        self._identity = parts.identity
        self._clock = parts.clock
        self._meter = parts.meter
        self._parts = parts
        self._dry_run = dry_run
        self._kind = DRY_COMMAND if dry_run else COMMAND
        self._refusals = MinuteLimit(REFUSED_RECEIPTS_PER_MINUTE)
        self._rejections = MinuteLimit(REJECTED_RECEIPTS_PER_MINUTE)
        self._repeats = MinuteLimit(REPEATED_RECEIPTS_PER_MINUTE)
        self._start_batch()

    def record(self, key: str) -> Any:
        """Return a command's record, whether it is committed or not yet; None if there is none."""
        uncommitted = self._records.get((self._kind, key))
        return self._outbox.record(self._kind, key) if uncommitted is None else uncommitted

    def is_done(self, key: str) -> bool:
        """Return whether a command is decided, all of it."""
        record = self.record(key)
        return record is not None and bool(record[DONE])

    def put(self, key: str, record: Mapping[str, Json], *, is_done: bool = False) -> None:
        """Record a command's progress; at the outbox's size limit, records of what is done are deleted first."""
        self._records[self._kind, key] = {**record, DONE: is_done}

    def keep(self, before: State, after: State, rules: Rules) -> None:
        """Record what has changed of what is known, unless it is a dry run."""
        if self._dry_run:
            return
        known = after.dump(rules.may_be_commanded)
        # without events a reset has nothing to hide
        has_moved = known["events"] and after.incarnation != before.incarnation
        is_old = rules.settings.has_bus and after.at // NOTED_SECONDS != before.at // NOTED_SECONDS
        if has_moved or is_old or known != before.dump(rules.may_be_commanded):
            self._records[EVENTS, KNOWN] = {**known, "incarnation": after.incarnation, "at": after.at}
        if (owed := after.dump_owed()) != before.dump_owed():
            self._records[STATE, OWED] = owed

    def take_loss(self, first: Document | None) -> bool:
        """Return once whether records were lost, or the version before had others by which the VM was prepared.

        Args:
            first: the first document of this process, None if it is not the first.
        """
        if is_lost := bool(self._outbox.record(STATE, LOST)) and not self._dry_run:
            self._records[STATE, LOST] = False
        if first and self._outbox.record(EVENTS, KNOWN) is None:
            stays = (self._outbox.record(STAY, key) or {} for key in first.events)
            return is_lost or any(stay.get("prepared_by") for stay in stays)
        return is_lost

    def take_request(self) -> str:
        """Return what `imds-bridge recover` has asked for, once."""
        if request := self._outbox.record(STATE, REQUEST):
            self._records[STATE, REQUEST] = ""
            log.info("`imds-bridge recover` asks: %s", request)
        return str(request or "")

    def program_input(self, program: Program, state: State, *, is_over: bool) -> tuple[bytes, dict[str, Any]]:
        """Return what a program gets: the CloudEvent of its event for its standard input, and the event's data."""
        event, document = program.event, state.document
        if event is None or document is None:
            return b"{}", {"EventStatus": "Ended"}
        change = Change(kind="advised" if event.status == ADVISORY else "scheduled", event=event)
        if is_over:
            boot = state.owed[program.recover].boot
            has_booted = boot != state.boot if boot and self._identity.boot_id else None
            change = replace(change, kind="ended", previous=event, vm_rebooted=has_booted)
        reporter = self._identity.reporter()
        notice = reporter.scheduled_event(change, seen_before=0, incarnation=document.incarnation)
        return structured(notice), dict(notice.data)

    # What follows from a step

    def ran(self, *, fault: str, seconds: float) -> None:
        """Count a program that prepares the VM and has ended."""
        self._meter.prepared("failed" if fault else "succeeded", seconds)

    def prepared(self, event: ScheduledEvent, *, key: str, seconds: float) -> None:
        """Publish that the VM is prepared for an event as it is."""
        self._events.append(self._identity.reporter().prepared(event, key=key, seconds=seconds))

    def started_unprepared(self, event: ScheduledEvent) -> None:
        """Count and log an event of this VM that has started although its program had not succeeded."""
        self._meter.unprepared()
        log.error("an event has started unprepared", extra={"event_id": event.event_id})

    def answer(self, event: ScheduledEvent, decision: Decision, *, key: str) -> None:
        """Answer for an auto rule."""
        command = Command(id=key, key=key, event_ids=(event.event_id,), requested_by=BY_RULE)
        self.add(replace(decision, event=event), event.event_id, command_data(command), key=key)
        text, more = "auto rules: %s, %s", {"event_id": event.event_id, "detail": decision.detail}
        log.info(text, decision.outcome, decision.reason, extra=more)

    def recovered(self, owed: Owed, *, fault: str, seconds: float | None, is_last: bool) -> None:
        """Count a program that has put the VM back to work; publish the last one, also where a person did it.

        It is logged once `status` says so, too.
        """
        if seconds is not None:
            self._meter.recovered("failed" if fault else "succeeded")
        if is_last and not fault:
            more = {"DurationSeconds": seconds and round(seconds, 3)}
            self._events.append(self._identity.reporter().of_work("recovered", owed.event, owed.since, more))

    def out_of_work(self, owed: Owed, reason: str, *, detail: str) -> None:
        """Log and publish that the VM stays out of work."""
        log.error("the VM is out of work: %s", detail, extra={"reason": reason})
        more = {"Reason": reason, "Detail": detail}
        self._events.append(self._identity.reporter().of_work("outofwork", owed.event, owed.since, more))

    def settle(self, messages: Sequence[ReceivedMessage], settlement: Settlement) -> None:
        """Settle messages after the commit."""
        self._settlements += [(message, settlement) for message in messages]

    def allows_rejection(self, reason: str) -> bool:
        """Return whether one more rejection may have a receipt of its own within this minute."""
        return self._rejections.allows(reason, self._clock.monotonic())

    def refuse(
        self, message: ReceivedMessage, reason: ReceiptReason, detail: str, command: Mapping[str, Json]
    ) -> None:
        """Dead-letter a message; publish a receipt unless there were too many within the minute.

        Args:
            message: has no command, or one that nobody is to trust.
            reason: `malformed` or `bad_signature`.
            detail: what is wrong.
            command: what the receipt repeats of it, at least its `Id`.
        """
        decision = rejected(reason, detail)
        if self._refusals.allows(reason, self._clock.monotonic()):
            self._answer_refused(message, decision, command)
        self.settle([message], dead_letter(decision))

    def _answer_refused(self, message: ReceivedMessage, decision: Decision, data: Mapping[str, Json]) -> None:
        digest = sha256(message.message_id.encode(errors="surrogatepass") + b"\0" + message.body)
        key = f"{decision.reason}:{digest.hexdigest()}"
        if record := self.record(key):
            self.repeat(record)
            return
        log.warning(
            "command refused: %s",
            decision.detail,
            extra={"reason": decision.reason, "message_id": message.message_id[:128]},
        )
        receipt = self.add(decision, "", data, key=key)
        self.put(key, {"receipts": {"": receipt}}, is_done=True)

    def report_surplus(self, *, at_once: bool = False) -> None:
        """Publish once a minute how many decisions had no receipt of their own, and log how many repeats had none."""
        now = math.inf if at_once else self._clock.monotonic()
        if count := self._repeats.surplus(now).total():
            log.warning(
                "commands that were decided before came again without a receipt", extra={"count": count}
            )
        for limit in (self._refusals, self._rejections):
            for reason, count in limit.surplus(now).items():
                detail = f"{count} more were rejected within a minute; their messages are dead-lettered"
                log.warning(
                    "commands were rejected without a receipt", extra={"reason": reason, "count": count}
                )
                decision = rejected(reason, detail)
                key = f"{reason}:{self._outbox.epoch}:{self._clock.monotonic()}"
                self.add(decision, "", {"Id": ""}, key=key, count=count)

    def repeat(self, record: Mapping[str, Any]) -> None:
        """Publish the receipts of a command that was decided before again, unchanged, unless many came again."""
        if not self._repeats.allows("repeated", self._clock.monotonic()):
            return
        self._events += (read_event(receipt.encode()) for receipt in record["receipts"].values())

    def add(
        self, decision: Decision, event_id: str, command: Mapping[str, Json], *, key: str, count: int = 0
    ) -> str:
        """Add a receipt; return it as it is published, for the command's record.

        Args:
            decision: what was decided.
            event_id: about which event, as the command spells it, "" for none; IMDS's spelling replaces it.
            command: what the receipt repeats of the command.
            key: the command's.
            count: how many messages it answers, if they are several.
        """
        event = decision.event
        data: dict[str, Json] = {
            "Reason": decision.reason,
            "Detail": decision.detail,
            "Command": dict(command),
            "EventType": event.raw.get("EventType") if event else None,
            "NotBeforeUtc": iso_utc(event.not_before) if event and event.not_before else None,
            "DryRun": self._dry_run,
        }
        receipt = self._identity.reporter().receipt(
            outcome=decision.outcome,
            # a real receipt must not be a duplicate of a dry run's
            key=f"dry-run:{key}" if self._dry_run else key,
            command_id=str(command["Id"]),
            event_id=event.event_id if event else event_id,
            resources=event.resources if event else (),
            data={**data, "Count": count} if count else data,
        )
        self._events.append(receipt)
        return structured(receipt).decode()

    def commit(self) -> None:
        """Commit what was decided since the last commit, then settle its messages."""
        events, records, settlements = self._events, self._records, self._settlements
        self._start_batch()
        if events or records:
            self._outbox.commit(events, records=records)
        if any(event.type == RECOVERED for event in events):
            self._parts.show_status()
            log.info("the VM is back at work")
        if self._receiver:
            for message, settlement in settlements:
                self._receiver.settle(message, settlement)

    def _start_batch(self) -> None:
        self._events: list[CloudEvent | StoredEvent] = []
        self._records: dict[tuple[str, str], Any] = {}
        self._settlements: list[tuple[ReceivedMessage, Settlement]] = []


def stored_state(outbox: Outbox, settings: ApprovalSettings, *, dry_run: bool) -> State:
    """Return what is known as far as it is stored; a dry run knows only what is owed."""
    known = None if dry_run else outbox.record(EVENTS, KNOWN)
    are_lost = any(loss.reason in UNKNOWN_LOSSES for loss in outbox.losses())
    is_lost = are_lost or bool(outbox.record(STATE, LOST))
    return load_state(known, outbox.record(STATE, OWED) or (), settings.recovers, is_lost=is_lost)


def dead_letter(decision: Decision) -> Settlement:
    """Return the settlement of a message that no receipt answers."""
    return Settlement(dead_letter_reason=decision.reason, description=decision.detail[:1000])


def command_data(command: Command) -> dict[str, Json]:
    """Return what receipts repeat of their command."""
    return {
        "Id": command.id,
        "RequestedBy": command.requested_by,
        "Reason": command.reason,
        "Vm": command.vm,
        "ExpiresAt": iso_utc(command.expires_at) if command.expires_at else None,
    }
