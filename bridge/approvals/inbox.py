"""Commands: read them from messages, judge them by what is known of their events, and answer.

I/O: the queue, the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from bridge.approvals import policy
from bridge.approvals.caretaker import Caretaker
from bridge.approvals.command import Command, find_id, parse_command, unwrap
from bridge.approvals.pending import Pending
from bridge.approvals.policy import Decision
from bridge.approvals.receipts import command_data, dead_letter
from bridge.approvals.state import EventState, State
from bridge.azure.receiver import ReceivedMessage, Receiver, Settlement
from bridge.config.values import check_signing_secrets
from bridge.http.signing import signature_fault, signed_id
from bridge.imds.document import STARTED, Document
from bridge.runtime.text import printable

log = logging.getLogger(__name__)

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

Allowed = Mapping[str, Mapping[str, Decision]]
"""For each command, by its key, the decisions about the EventIds that are to be POSTed, as the command has them."""


@dataclass(eq=False)
class Inbox:
    """The commands in progress, for the listener's thread; it looks up what is known, judges, and answers.

    Args:
        receiver: where commands come from; None without a bus.
        caretaker: knows the events, and POSTs their approvals.

    Attributes:
        pending: the commands that are not decided yet, by their keys.
        rest_from: from when on no command is expected, monotonic.
    """

    receiver: Receiver | None
    caretaker: Caretaker

    def __post_init__(self) -> None:
        self._parts, self._settings = self.caretaker.parts, self.caretaker.settings
        self._receipts, self._is_dry_run = self.caretaker.receipts, self.caretaker.dry_run
        self._clock, self._identity = self._parts.clock, self._parts.identity
        self.pending: dict[str, Pending] = {}
        self._passed_since: dict[str, float] = {}  # commands for other VMs, by key
        self.expect()

    # Messages

    def expect(self) -> None:
        """Have commands received for AWAIT_SECONDS from now on."""
        self.rest_from = self._clock.monotonic() + AWAIT_SECONDS
        self.look_once()

    def look_once(self) -> None:
        """Have the bus looked at once more."""
        if self.receiver:
            self.receiver.receive_until(self.rest_from)

    def _await(self, document: Document | None) -> None:
        """Have commands received while one could be approved or is open, and for a while after that."""
        events = document.events.values() if document else ()
        is_open = not document or self.pending or self._passed_since
        if is_open or any(map(self.caretaker.rules.may_be_commanded, events)):
            self.expect()

    def receive(self, wait_seconds: float) -> None:
        """Wait up to `wait_seconds` for messages, and take those that have arrived."""
        if self.receiver is None:
            self._parts.stop.wait(wait_seconds)
            return
        fault_of = None
        for message in self.receiver.messages(wait_seconds):
            fault_of = fault_of or self._signatures()
            self._accept(message, fault_of)

    def _read(self, message: ReceivedMessage) -> Command | None:
        """Return the command of a message; refuse a message that has none, and return None."""
        body = b""
        try:
            body = unwrap(message.decoded_body())
            command = parse_command(
                body,
                message_id=message.message_id,
                properties=message.properties,
                signed_id="" if self._settings.signing_secrets is None else signed_id(message.properties),
            )
        except ValueError as error:
            known = {"Id": find_id(body, message.properties) or printable(message.message_id)}
            self._receipts.refuse(message, "malformed", str(error), known)
            return None
        return command

    def _accept(self, message: ReceivedMessage, fault_of: Callable[[ReceivedMessage], str]) -> None:
        """Take a message; what is known of its command counts before its signature, which was good then."""
        command = self._read(message)
        if command is None:
            return
        record, known = self._receipts.record(command.key), self.pending.get(command.key)
        if self._receipts.is_done(command.key):
            self._receipts.repeat(record)
            self._receipts.settle([message], Settlement())
            return
        is_known = record or (known and known.has(message))
        if not is_known and (fault := fault_of(message)):
            self._receipts.refuse(message, "bad_signature", fault, command_data(command))
            return
        if known:
            self.pending[command.key] = known.with_message(message)
            return
        now = self._clock.monotonic()
        pending = Pending(
            command=command,
            arrived_at=now,
            grace_from=now - self._age_seconds(message),
            may_have_waited=message.may_have_waited,
            messages=(message,),
        ).continued(record)
        self.pending[command.key] = pending
        if policy.is_expired(command, self._clock.now()) and not pending.intended:
            self._answer(pending, dict.fromkeys(pending.open, policy.expired(command)))

    def _age_seconds(self, message: ReceivedMessage) -> float:
        """Return how long a message has been on the bus; the broker's clock may be ahead of this one."""
        if message.enqueued_at is None:
            return 0.0
        return max(0.0, (self._clock.now() - message.enqueued_at).total_seconds())

    def _signatures(self) -> Callable[[ReceivedMessage], str]:
        """Return what says why a message is not to be trusted, "" if it is, by the secrets as they are now."""
        if self._settings.signing_secrets is None:
            return lambda _: ""
        try:
            secrets = check_signing_secrets(self._settings.signing_secrets.read())
        except (OSError, ValueError) as error:
            # no secret is trusted then: whoever empties the file withdraws the old ones
            log.error("the signing secrets cannot be used; every command is refused: %s", error)  # noqa: TRY400
            return lambda _: "the listener cannot read its signing secrets"
        return lambda message: signature_fault(
            secrets, message.properties, unwrap(message.body), signed_near=message.enqueued_at
        )

    # Decisions

    def decide(self, document: Document | None) -> None:
        """Answer what can be answered by the document, None while there is none; POST what is allowed, and answer."""
        self._await(document)
        allowed = self._allowed(document)
        if document and not self._is_dry_run:
            self._post(allowed)

    def _allowed(self, document: Document | None) -> Allowed:
        """Answer what can be answered; return what is to be POSTed."""
        now, surplus = self._clock.monotonic(), self._surplus()
        self._passed_since = {
            key: at for key, at in self._passed_since.items() if now - at < 2 * PASS_ON_SECONDS
        }
        judged = {
            pending.command.key: self._judge(pending, document, may_wait=number >= surplus)
            for number, pending in enumerate([*self.pending.values()])
        }
        allowed = {key: decisions for key, decisions in judged.items() if decisions}
        fault_of = self._signatures() if allowed else str
        return {key: self._trusted(key, decisions, fault_of) for key, decisions in allowed.items()}

    def _trusted(
        self, key: str, allowed: Mapping[str, Decision], fault_of: Callable[[ReceivedMessage], str]
    ) -> Mapping[str, Decision]:
        """Return what may be POSTed of a command; answer one of which no message is to be trusted any more."""
        pending = self.pending[key]
        faults = [*map(fault_of, pending.messages)]
        if not all(faults):
            return allowed
        refused = policy.rejected("bad_signature", faults[-1])
        lost = policy.unknown_outcome(refused)
        self._answer(pending, {one: lost if one.lower() in pending.intended else refused for one in allowed})
        return {}

    def _surplus(self) -> int:
        """Return how many of the oldest commands may not wait for their events."""
        number, left_bytes = 0, MAX_WAITING_BYTES
        for pending in reversed(self.pending.values()):
            left_bytes -= sum(len(message.body) for message in pending.messages)
            if left_bytes < 0 or number == MAX_WAITING:
                break
            number += 1
        return len(self.pending) - number

    def _vm_name(self) -> str:
        assert self._identity.vm is not None  # noqa: S101 - nothing is judged before it is known
        return self._identity.vm.name

    def _judge(self, pending: Pending, document: Document | None, *, may_wait: bool) -> dict[str, Decision]:
        """Answer what can be answered by the document, None while there is none; return what is to be POSTed.

        Decisions are by EventIds as the command spells them.
        """
        read_at = self.caretaker.approver.reading.at
        if document and may_wait and pending.judged_by == read_at:
            return {}  # the same document would give the same decisions
        final: dict[str, Decision] = {}
        allowed: dict[str, Decision] = {}
        for event_id in pending.open:
            decision = self._decision(
                pending, event_id, self.caretaker.state if document else None, may_wait=may_wait
            )
            if decision and decision.outcome == "allowed" and self._is_dry_run:
                decision = replace(decision, outcome="accepted", detail="dry run: not POSTed")
            if decision:
                (allowed if decision.outcome == "allowed" else final)[event_id] = decision
            else:
                self._note_waiting(pending, event_id, document)
        pending = replace(pending, judged_by=-math.inf if allowed or pending.intended else read_at)
        self.pending[pending.command.key] = pending
        is_elsewhere = all(decision.reason == "other_vm" for decision in final.values())
        if final and not allowed and is_elsewhere and self._pass_on(pending):
            return {}
        self._answer(pending, final)
        return allowed

    def _note_waiting(self, pending: Pending, event_id: str, document: Document | None) -> None:
        """Log why an EventId waits; have the document read again if it is older than the command."""
        why = self.caretaker.last_error or "there is no document"
        if document:
            why = "the document does not have the event yet"
            self.caretaker.approver.want_newer(pending.arrived_at)
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
        error = self.caretaker.last_error if self._identity.resolved else "the VM's identity is not available"
        if has_expired and state:
            return policy.expired(pending.command, error)
        if has_expired or self._clock.monotonic() - pending.arrived_at >= IMDS_WAIT_SECONDS:
            detail = error or "it was not decided in time"
            return Decision(outcome="failed", reason="imds_unavailable", detail=detail)
        if state is None or (one is None and self._has_time(pending, may_wait=may_wait)):
            return None
        event, age_seconds = one.event if one else None, self._clock.monotonic() - pending.grace_from
        grace_until = self._clock.steady() - age_seconds + self._settings.grace_seconds
        if one and pending.may_have_waited and one.absent_at > grace_until:
            # As if it had been received when it was sent: its sender cannot have known this event.
            detail = "it was sent more than `grace_seconds` before this VM's document had the event"
            return policy.rejected("unknown_event", detail, event)
        decision = policy.decide_command(
            event, vm_name=self._vm_name(), policy=self._settings.policy, now=now
        )
        is_allowed = decision.outcome == "allowed"
        if one and (is_allowed or one.event.status == STARTED) and one.is_approved(now):
            return policy.already_approved(one.event)
        return decision

    def _has_time(self, pending: Pending, *, may_wait: bool) -> bool:
        """Return whether an event may still appear: in its grace period, or in a document newer than the command."""
        read_at = self.caretaker.approver.reading.at
        if not may_wait:
            return read_at < pending.grace_from
        is_in_grace = self._clock.monotonic() - pending.grace_from < self._settings.grace_seconds
        return is_in_grace or read_at < pending.arrived_at

    def _pass_on(self, pending: Pending) -> bool:
        """Release a command for another VM, unless no other listener can have the queue or none has taken it.

        What this VM has POSTed or answered, if only a part of it, stays here.
        """
        is_shared = bool(self._settings.queue) and not self._settings.session
        names_this_vm = pending.command.vm and not policy.names_other_vm(pending.command, self._vm_name())
        if not is_shared or names_this_vm or self._receipts.record(pending.command.key):
            return False
        now = self._clock.monotonic()
        # not since the broker accepted it: the VM's clock may be wrong, and no other VM would get it then
        age_seconds = now - self._passed_since.setdefault(pending.command.key, now)
        are_many = len(self._passed_since) > PASSED_ON_LONG
        if age_seconds >= (PASS_ON_MANY_SECONDS if are_many else PASS_ON_SECONDS):
            del self._passed_since[pending.command.key]
            return False
        self._receipts.settle(pending.messages, Settlement(is_released=True))
        del self.pending[pending.command.key]
        return True

    # POSTs

    def _post(self, allowed: Allowed) -> None:
        """Have events POSTed, also those that auto rules want, once it is recorded, and answer by what IMDS says."""
        pending = self.pending
        arrivals = {one.lower(): pending[key].arrived_at for key, ids in allowed.items() for one in ids}
        chosen = self.caretaker.choose(arrivals)
        if not chosen:
            return
        before, at = dict[str, Pending](), self._clock.steady()
        for key, decisions in allowed.items():
            if mine := [event_id for event_id in map(str.lower, decisions) if event_id in chosen]:
                before[key] = pending[key]
                judged = {event_id: (chosen[event_id].stay.id, at) for event_id in mine}
                self._update(replace(pending[key], intended={**judged, **pending[key].intended}))
        posted = self.caretaker.post(chosen)
        for key, one in before.items():
            if posted.is_refused:  # an earlier POST may have been applied all the same
                self._update(one)
            self._answer_posted(pending[key], allowed[key], posted.decided)

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
            self._parts.meter.approved(self._clock.monotonic() - pending.arrived_at)
        self._answer(pending, final)

    def _program_had(self, key: str) -> str:
        """Return what is missing of the program that is to prepare an event, "" if nothing is."""
        one = self.caretaker.state.events.get(key)
        if one is None or not one.is_unprepared or self._is_dry_run:
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
            self._receipts.settle(pending.messages, dead_letter(unanswered) if unanswered else Settlement())
            del self.pending[pending.command.key]

    def _answered(self, pending: Pending, event_id: str, decision: Decision) -> Pending:
        """Answer with a receipt, unless it is a rejection beyond the limit: a flood may cause those."""
        command, receipt, key = pending.command, "", event_id.lower()
        known = self.caretaker.state.events.get(key)
        if known and not decision.event:  # as last seen, so that people read what it is
            decision = replace(decision, event=known.event)
        if decision.outcome == "rejected" and not self._receipts.allows_rejection(decision.reason):
            pending = replace(pending, unanswered=decision)
        else:
            receipt = self._receipts.add(decision, event_id, command_data(command), key=command.key)
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
        self.pending[key] = pending
        if any(record.values()) or self._receipts.record(key):
            self._receipts.put(key, record, is_done=not pending.open)
