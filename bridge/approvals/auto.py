"""The auto rules: which of them decides about an event, and what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from bridge.approvals.policy import auto_wait_seconds, denial, matches, may_approve
from bridge.approvals.state import Argv, EventState, Place, Program, Verdict, titled
from bridge.approvals.turns import Order, deadline, takes_turns, vms_of
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.imds.document import ADVISORY, SCHEDULED, Document, ScheduledEvent, fold_name
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

    def may_be_commanded(self, event: ScheduledEvent) -> bool:
        """Return whether a command could approve an event now."""
        is_in_scope = self.settings.policy.scope == "group" or self.names_this_vm(event)
        return self.settings.has_bus and event.status == SCHEDULED and is_in_scope

    def timeout_of(self, recover: Argv) -> float:
        """Return how long a `recover` may run."""
        known = (rule.run_timeout_seconds for rule in self.settings.auto if rule.recover == recover)
        return max(known, default=UNKNOWN_TIMEOUT_SECONDS)

    def names_this_vm(self, event: ScheduledEvent) -> bool:
        """Return whether an event names this VM."""
        return fold_name(self.vm_name) in event.vms

    def may_name_this_vm(self, event: ScheduledEvent) -> bool:
        """Return whether an event names this VM, as far as is known."""
        return not event.names_all_vms or self.names_this_vm(event)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A new document, and what is known besides.

    Attributes:
        rules: what decides.
        document: as it is.
        at: when it was read, monotonic.
        steady: the same in steady seconds.
        now: the same as a time of day.
        ended: how programs have ended.
        request: of `imds-bridge recover`: "" for none, "try", or "done" and since when the VM was out of work then.
        is_confirmed: this VM's name is proven, or instance data has failed for so long that `recover` may run.
        is_lost: it is not known which programs were started, as records were lost.
    """

    rules: Rules
    document: Document
    at: float
    steady: float
    now: datetime
    ended: Mapping[Place, Result] = field(default_factory=dict)
    request: str = ""
    is_confirmed: bool = True
    is_lost: bool = False


def with_rule(one: EventState, seen: Seen) -> EventState:
    """Return an event with the rule that decides about it, or why there is none."""
    found = _first_rule(one.event, seen) if one.may_be_prepared else ""
    rule, why = (None, found) if isinstance(found, str) else (_begun(one, found, seen), "")
    is_told = seen.rules.settings.auto and seen.rules.names_this_vm(one.event)
    return replace(one, rule=rule, verdict=Verdict(why=why if is_told else ""))


def _begun(one: EventState, rule: AutoSettings, seen: Seen) -> AutoSettings:
    """Return the rule that has prepared the VM for an event, if the one that matches now would do it once more."""
    others = (other for other in seen.rules.settings.auto if other.run in one.prepared)
    return next((other for other in others if rule.recover and other.recover == rule.recover), rule)


def _first_rule(event: ScheduledEvent, seen: Seen) -> AutoSettings | str:
    """Return the first rule in the file that matches an event, whatever VMs it names, or why there is none."""
    why, is_of_one, settings = "no auto rule matches", len(vms_of(event)) == 1, seen.rules.settings
    for number, rule in enumerate(settings.auto, 1):
        is_advisory = event.status == ADVISORY
        if not matches(rule, event, seen.now) or (is_advisory and not (rule.run and rule.event_type)):
            continue
        if detail := denial(event, policy=settings.policy, now=seen.now):
            return detail
        first = (*event.resources, "")[0]
        is_for = auto_wait_seconds(event, vm_name=first, group=rule.group) is not None
        if is_of_one or (rule.group and (rule.run or is_for)):
            return rule
        why = f"it names several VMs, and auto rule {number} is not for those"
    return why


def judge(one: EventState, order: Order, program: Program | None, seen: Seen) -> Verdict:
    """Return what its rule makes of a Scheduled event of this VM.

    Args:
        one: the event, with its rule.
        order: who goes when.
        program: the one that prepares for it and has not ended: its rule decides until then.
        seen: this moment.
    """
    rule = one.rule
    if program:
        still = "the program of the event as it was is still ending"
        return Verdict(why=still if program.must_end else _run(one, program.argv))
    if rule is None:
        return one.verdict
    is_prepared = not rule.run or seen.rules.is_dry_run or rule.run in one.prepared
    if not is_prepared:
        return _prepare(one, rule, order, seen)
    if one.stay.is_settled:
        return Verdict(why="approved" if one.stay.approved_at else "answered: see its receipt")
    return _approve(one, rule, order, seen)


def _prepare(one: EventState, rule: AutoSettings, order: Order, seen: Seen) -> Verdict:
    """Let the rule's program be started once the event has its turn, and its last failure is long enough ago."""
    failed = one.failed.get(rule.run)
    if failed and failed.next_at > seen.at:
        return Verdict(why=_run(one, rule.run))
    if _waits_for_turn(one, rule) and deadline(one.event, rule) > seen.now:
        return _behind_others(one, rule, order, "")
    return Verdict(why=_run(one, rule.run), does="run")


def _run(one: EventState, run: Argv) -> str:
    """Say that a program runs, or why it has to again: it may not even have been started."""
    failed = one.failed.get(run)
    title = titled("run", run)
    return f"{title} has failed, and is tried again: {failed.error}" if failed else f"{title} runs"


def _approve(one: EventState, rule: AutoSettings, order: Order, seen: Seen) -> Verdict:
    """Allow an event that is prepared, or needs no program, or say what its approval waits for."""
    event, done = one.event, "prepared, " if rule.run else ""
    if event.status == ADVISORY:
        return Verdict(why="prepared; nobody approves an early warning")
    if not may_approve(rule, event):
        return Verdict(why=f"{done}no rule names its type, so none approves it")
    if rule.run and len(vms_of(event)) > 1:
        return Verdict(why="prepared; it names several VMs, so no rule approves it")
    if _waits_for_turn(one, rule):
        return _behind_others(one, rule, order, done)
    wait_seconds = auto_wait_seconds(event, vm_name=seen.rules.vm_name, group=rule.group)
    if not rule.run and (wait_seconds is None or seen.steady - one.stay.since < wait_seconds):
        return Verdict(why="the VMs before this one in Resources approve it first")
    if rule.max_unavailable and takes_turns(event) and (behind := order.first_beside(event, rule)):
        return Verdict(why=f"{done}approval waits", behind=behind)
    return Verdict(why="its approval is POSTed", does="post")


def _waits_for_turn(one: EventState, rule: AutoSettings) -> bool:
    return bool(rule.max_unavailable) and takes_turns(one.event) and not one.has_turn


def _behind_others(one: EventState, rule: AutoSettings, order: Order, done: str) -> Verdict:
    """Say what an event without a turn waits for, after what is done."""
    behind = order.first_ahead(one, rule)
    return Verdict(why=f"{done}{'waits for its turn' if behind else 'settling'}", behind=behind)
