"""Decide whether this VM may approve an event now: values in, a decision out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Literal

from bridge.approvals.command import Command
from bridge.config.approvals import Criterion, PolicySettings, RuleSettings
from bridge.contract.types import ReceiptReason, is_known_type
from bridge.imds.document import ADVISORY, SCHEDULED, STARTED, ScheduledEvent, fold_name, is_among

Outcome = Literal["allowed", "accepted", "rejected", "failed"]

TERMINATE = "terminate"
AUTO_STEP_SECONDS = 10.0
# How the number that a criterion compares follows from an event and the time of day, by the property of IMDS.
_NUMBERS: Mapping[str, Callable[[ScheduledEvent, datetime], float | None]] = {
    "DurationInSeconds": lambda event, _: event.duration_seconds,
    "NotBefore": lambda event, now: (event.not_before - now).total_seconds() if event.not_before else None,
}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one EventId of a command: POST it (`allowed`), or answer at once.

    `event` is the event as in the document, None if the document does not have it.
    """

    outcome: Outcome
    reason: ReceiptReason
    detail: str = ""
    event: ScheduledEvent | None = None


def rejected(reason: ReceiptReason, detail: str = "", event: ScheduledEvent | None = None) -> Decision:
    """Return the decision that rejects an event, or each EventId of a command."""
    return Decision(outcome="rejected", reason=reason, detail=detail, event=event)


def is_expired(command: Command, now: datetime) -> bool:
    """Return whether the command has expired."""
    return command.expires_at is not None and command.expires_at <= now


def expired(command: Command, imds_error: str = "") -> Decision:
    """Return the decision for each EventId of a command that has expired, perhaps while IMDS failed."""
    detail = f"it was valid until {command.expires_at}" + (f"; {imds_error}" if imds_error else "")
    return rejected("expired", detail)


def not_recorded(event: ScheduledEvent | None) -> Decision:
    """Return the decision for an event that is no longer Scheduled since a POST whose outcome is unknown."""
    detail = "it may have been POSTed to IMDS, and is no longer Scheduled; IMDS's answer is not known"
    return Decision(outcome="accepted", reason="not_recorded", detail=detail, event=event)


def unknown_outcome(decision: Decision) -> Decision:
    """Return the decision about an event that may have been POSTed before; what IMDS has accepted stays so."""
    if decision.outcome in ("allowed", "accepted"):
        return decision
    detail = f"it may have been POSTed to IMDS; the outcome is not known, it is not POSTed again: {decision.detail}"
    return replace(decision, outcome="failed", reason="unknown_outcome", detail=detail)


def already_approved(event: ScheduledEvent) -> Decision:
    """Return the decision for an event that IMDS has just approved."""
    detail = "this VM approved it less than a minute ago"
    return Decision(outcome="accepted", reason="already_approved", detail=detail, event=event)


def names_other_vm(command: Command, vm_name: str) -> bool:
    """Return whether a command is for another VM than this one."""
    return bool(command.vm) and fold_name(command.vm) != fold_name(vm_name)


def decide_command(
    event: ScheduledEvent | None, *, vm_name: str, policy: PolicySettings, now: datetime
) -> Decision:
    """Decide about an event that a command names.

    Args:
        event: the event as in the current document, None if that does not have it.
        vm_name: this VM's name in instance data.
        policy: the configured policy.
        now: the time of day, for rules about the notice.
    """
    if event is None:
        return rejected("unknown_event", "this VM's document does not contain it")
    if event.status == STARTED:
        return rejected("already_started", event=event)
    if event.status == ADVISORY:
        return rejected("advisory", "it is an early warning: approving it has no effect", event)
    if event.status != SCHEDULED:
        return rejected("denied", f"its status is {event.raw.get('EventStatus')!r}", event)
    if (policy.scope == "self" or _may_be_terminate(event)) and not is_among(vm_name, event.resources):
        return rejected("other_vm", f"{vm_name} is not among its Resources", event)
    if detail := denial(event, policy=policy, now=now):
        return rejected("denied", detail, event)
    if not any(matches(rule, event, now) and may_approve(rule, event) for rule in policy.allow):
        return rejected("denied", "no allow rule matches", event)
    return Decision(outcome="allowed", reason="approved", event=event)


def denial(event: ScheduledEvent, *, policy: PolicySettings, now: datetime) -> str:
    """Return why the deny rules forbid an event, "" if none does."""
    for rule in policy.deny:
        matched = matches(rule, event, now, every_resource=False)
        if matched is not False:
            return "a deny rule matches" if matched else "a deny rule may match: the event lacks a value"
    return ""


def matches(
    rule: RuleSettings, event: ScheduledEvent, now: datetime, *, every_resource: bool = True
) -> bool | None:
    """Return whether an event meets every criterion of a rule; None if that depends on an unknown value.

    Args:
        rule: the rule.
        event: the event as in the document.
        now: the time of day, for the notice.
        every_resource: whether all Resources must match a pattern, as for allow rules, because an approval
            releases all of them; for deny rules one is enough.
    """
    results = [
        _meets(criterion, getattr(rule, name), event, now, every=every_resource)
        for name, criterion in rule.criteria().items()
    ]
    if False in results:
        return False
    return None if None in results else True


def may_approve(rule: RuleSettings, event: ScheduledEvent) -> bool:
    """Return whether a rule that matches may approve an event: one whose type is not known only if it names that."""
    return bool(rule.event_type) or is_known_type(event.raw.get("EventType"))


def auto_wait_seconds(event: ScheduledEvent, *, vm_name: str, group: bool) -> float | None:
    """Return how long after first seeing an event this VM approves it without a command; None for never.

    Args:
        event: the event as in the document.
        vm_name: this VM's name in instance data.
        group: whether this VM approves events of several VMs too: ten seconds later for each VM before it in
            Resources, so that another VM approves if the first does not respond.
    """
    this = fold_name(vm_name)
    if this not in event.vms or not event.names_all_vms:
        return None
    if len(event.vms) > 1 and (not group or _may_be_terminate(event)):
        return None
    return event.vms.index(this) * AUTO_STEP_SECONDS


def _may_be_terminate(event: ScheduledEvent) -> bool:
    """Return whether an event is, or as far as is known may be, the deletion of a VM."""
    event_type = event.raw.get("EventType")
    return not isinstance(event_type, str) or event_type.lower() in ("", TERMINATE)


def _meets(
    criterion: Criterion, wanted: Any, event: ScheduledEvent, now: datetime, *, every: bool
) -> bool | None:
    """Return whether an event meets a criterion, None if it does not have the value."""
    if criterion.kind == "names":
        return _names_match(event, wanted, every=every)
    if criterion.kind == "one of":
        given: Any = event.raw.get(criterion.of)
        is_known = isinstance(given, str) and given
        return given.lower() in {one.lower() for one in wanted} if is_known else None
    number = _NUMBERS[criterion.of](event, now)
    if number is None:
        return None
    return bool(number >= wanted if criterion.kind == "least" else number <= wanted)


def _names_match(event: ScheduledEvent, patterns: Sequence[str], *, every: bool) -> bool | None:
    results = [any(fnmatchcase(vm, fold_name(pattern)) for pattern in patterns) for vm in event.vms]
    matched = all(results) if every else any(results)
    # what cannot be read may match or not: it leaves only what one readable name decides for all
    return matched if event.names_all_vms or matched is not every else None
