"""The auto rules: which of them decides about an event, and what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal

from bridge.approvals.policy import auto_wait_seconds, denial, has_readable_resources, matches
from bridge.approvals.state import Argv, EventState, Place, Program, place_of_run
from bridge.approvals.turns import Order, deadline, takes_turns, vms_of
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.imds.document import Document, ScheduledEvent, is_among
from bridge.runtime.program import Result

UNKNOWN_TIMEOUT_SECONDS = 600.0  # of a `recover` that no rule names any more


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is the same while a process runs.

    Attributes:
        settings: the policy and the auto rules.
        vm_name: this VM's name.
        boot: differs after each start of the machine; where that is not known, after each start of the process.
        is_dry_run: nothing is run and nothing POSTed.
    """

    settings: ApprovalSettings
    vm_name: str
    boot: str
    is_dry_run: bool = False

    @property
    def recovers(self) -> Mapping[Argv, Argv]:
        """The `recover` of each `run`, () for none."""
        return {rule.run: rule.recover for rule in self.settings.auto if rule.run}

    def timeout_of(self, recover: Argv) -> float:
        """Return how long a `recover` may run."""
        known = (rule.run_timeout_seconds for rule in self.settings.auto if rule.recover == recover)
        return next(known, UNKNOWN_TIMEOUT_SECONDS)

    def names_this_vm(self, event: ScheduledEvent) -> bool:
        """Return whether an event names this VM."""
        return is_among(self.vm_name, event.resources)

    def may_name_this_vm(self, event: ScheduledEvent) -> bool:
        """Return whether an event names this VM, as far as is known."""
        is_known = bool(event.resources) and has_readable_resources(event)
        return not is_known or self.names_this_vm(event)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A new document, and what is known besides.

    Attributes:
        rules: what decides.
        document: as it is.
        read_at: when it was read, monotonic.
        at: this moment, monotonic.
        steady: the same in steady seconds.
        now: the same as a time of day.
        ended: how programs have ended.
        request: what `imds-bridge recover` asks for, "" for nothing.
    """

    rules: Rules
    document: Document
    read_at: float
    at: float
    steady: float
    now: datetime
    ended: Mapping[Place, Result] = field(default_factory=dict)
    request: Literal["", "try", "done"] = ""


def with_rule(one: EventState, seen: Seen) -> EventState:
    """Return an event with the rule that decides about it, and why there is none."""
    rule, why = _first_rule(one.event, seen) if one.is_scheduled else (None, "")
    why = why if seen.rules.settings.auto and seen.rules.names_this_vm(one.event) else ""
    is_same = rule is None is one.rule and why == one.why
    return one if is_same else _with(one, why, rule=rule)


def _first_rule(event: ScheduledEvent, seen: Seen) -> tuple[AutoSettings | None, str]:
    """Return the first rule in the file that matches an event, whatever VMs it names, or why there is none."""
    why, is_of_one, settings = "no auto rule matches", len(vms_of(event)) == 1, seen.rules.settings
    for number, rule in enumerate(settings.auto, 1):
        if not matches(rule, event, seen.now):
            continue
        if detail := denial(event, policy=settings.policy, now=seen.now):
            return None, detail
        first = (*event.resources, "")[0]
        is_for = auto_wait_seconds(event, vm_name=first, group=rule.group) is not None
        if is_of_one or (rule.group and (rule.run or is_for)):
            return rule, ""
        why = f"it names several VMs, and auto rule {number} is not for those"
    return None, why


def _with(one: EventState, why: str, **more: Any) -> EventState:
    """Return an event with what it waits for."""
    new: dict[str, Any] = {"why": why, "behind": None, "is_due": False, "may_post": False}
    return replace(one, **{**new, **more})


def answer_key(one: EventState, run: Argv) -> str:
    """Return what decides about the ids of what is published of an event's stay and a program, () for none."""
    return f"auto:{one.event.key}:{one.stay.id}:{sha256(repr(run).encode()).hexdigest()[:16]}"


def judge(one: EventState, order: Order, programs: Mapping[Place, Program], seen: Seen) -> EventState:
    """Return a Scheduled event of this VM with what its rule makes of it.

    Args:
        one: the event, with its rule.
        order: who goes when.
        programs: those that have not ended.
        seen: this moment.
    """
    program, rule = programs.get(place_of_run(one.event.key)), one.rule
    if program:  # its rule decides until it has ended
        still = "the program of the event as it was is still ending"
        return _with(one, still if program.must_end else f"{program.argv[0]} runs")
    if rule is None:
        return one
    is_prepared = not rule.run or seen.rules.is_dry_run or rule.run in one.prepared
    if one.stay.approved_at and (one.stay.is_settled or not is_prepared):
        return _with(one, "approved")
    if one.stay.is_settled:
        return _with(one, "answered: see its receipt")
    waits = rule.max_unavailable and takes_turns(one.event) and not one.has_turn
    if not is_prepared:
        return _prepare(one, rule, order, seen, waits=bool(waits) and deadline(one.event, rule) > seen.now)
    return _approve(one, rule, order, seen, waits=bool(waits))


def _prepare(one: EventState, rule: AutoSettings, order: Order, seen: Seen, *, waits: bool) -> EventState:
    """Let the rule's program be started once the event has its turn, and its last failure is long enough ago."""
    failed = one.failed.get(rule.run)
    if failed and failed.next_at > seen.at:
        return _with(one, f"{rule.run[0]} has failed, and is tried again: {failed.error}")
    return _behind_others(one, rule, order, "") if waits else _with(one, f"{rule.run[0]} runs", is_due=True)


def _approve(one: EventState, rule: AutoSettings, order: Order, seen: Seen, *, waits: bool) -> EventState:
    """Allow an event that is prepared, or needs no program, or say what its approval waits for."""
    event, done = one.event, "prepared, " if rule.run else ""
    if rule.run and len(vms_of(event)) > 1:
        return _with(one, "prepared; it names several VMs, so no rule approves it")
    if waits:
        return _behind_others(one, rule, order, done)
    wait_seconds = auto_wait_seconds(event, vm_name=seen.rules.vm_name, group=rule.group) or 0.0
    if not rule.run and seen.at - one.stay.since < wait_seconds:
        return _with(one, "the VMs before this one in Resources approve it first")
    takes_turn = rule.max_unavailable and takes_turns(event)
    if takes_turn and (behind := order.first_beside(event, rule)):
        return _with(one, f"{done}approval waits", behind=behind)
    return _with(one, "its approval is POSTed", may_post=True)


def _behind_others(one: EventState, rule: AutoSettings, order: Order, done: str) -> EventState:
    """Say what an event without a turn waits for, after what is done."""
    behind = order.first_ahead(one, rule)
    return _with(one, f"{done}{'waits for its turn' if behind else 'settling'}", behind=behind)
