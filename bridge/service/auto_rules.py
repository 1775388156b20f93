"""What the auto rules say about the events of a document, and the programs that they run first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bridge.approvals.approved import content_hash, is_same
from bridge.approvals.policy import (
    Decision,
    auto_wait_seconds,
    judge_event,
    not_recorded,
    unknown_outcome,
)
from bridge.approvals.programs import Programs
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.formats.cloudevents import structured
from bridge.imds.diff import Change
from bridge.imds.document import SCHEDULED, Document, ScheduledEvent
from bridge.runtime.program import encode_job
from bridge.runtime.time import Clock
from bridge.service.identity import VmIdentity


class AutoRules:
    """Approves events without a command, once this VM is known; for the listener's thread.

    Args:
        settings: the policy and the auto rules.
        identity: who this VM is.
        programs: runs what the rules name.
        clock: for turns and the rules about the notice.
        dry_run: run no program.
    """

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        identity: VmIdentity,
        programs: Programs,
        clock: Clock,
        dry_run: bool,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._programs = programs
        self._clock = clock
        self._dry_run = dry_run
        self._first_seen: dict[str, float] = {}

    def due(
        self, document: Document, approval: Callable[[str], Any]
    ) -> Iterator[tuple[str, AutoSettings, ScheduledEvent]]:
        """Yield the events that a rule approves, once it is this VM's turn, with the rule and a command's key.

        Args:
            document: the current one.
            approval: returns the record of an event's last approval.
        """
        now = self._clock.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in document.events}
        scheduled = [event for event in document.events.values() if event.status == SCHEDULED]
        self._programs.end_others(scheduled)
        for event in scheduled:
            approved = approval(event.key)
            turn = None if is_same(approved, event) else self._turn(event)
            if turn and now - self._first_seen[event.key] >= turn[0]:
                # one command for the event as it is, and another one for each time that it is approved
                number = approved["number"] if approved else 0
                yield f"auto:{event.key}:{content_hash(event)}:{event.not_before}:{number}", turn[1], event

    def judge(
        self, event: ScheduledEvent | None, document: Document, *, is_intended: bool
    ) -> Decision | None:
        """Decide about an event that was due; None if no rule approves it any more.

        Args:
            event: the event as it is now, None if the document does not have it.
            document: the current one.
            is_intended: whether it was POSTed, or was about to be.
        """
        is_scheduled = event is not None and event.status == SCHEDULED
        turn = self._turn(event) if event and is_scheduled else None
        if event and turn and self.refusal(turn[1], event, document) == "":
            return Decision(outcome="accepted", reason="approved", detail="an auto rule", event=event)
        if not is_intended:
            return None
        if not is_scheduled:
            return not_recorded(event)
        denied = Decision(outcome="rejected", reason="denied", detail="no auto rule matches", event=event)
        return unknown_outcome(denied)

    def refusal(self, rule: AutoSettings, event: ScheduledEvent, document: Document) -> str | None:
        """Return "" if the rule needs no program or its program has succeeded, None while it runs, else a reason.

        Args:
            rule: a rule that approves the event.
            event: the event as in the document.
            document: the current one.
        """
        if not rule.run or self._dry_run:
            return ""
        now = self._clock.now()

        def job(timeout_seconds: float) -> bytes:
            notice = self._identity.reporter().scheduled_event(
                Change(kind="scheduled", event=event),
                seen_before=0,
                incarnation=document.incarnation,
                at=now,
            )
            return encode_job(rule.run, structured(notice), notice.data, timeout_seconds=timeout_seconds)

        return self._programs.refusal(event, rule, now=now, job=job)

    def end(self) -> None:
        """End every program."""
        self._programs.end_all()

    def _turn(self, event: ScheduledEvent) -> tuple[float, AutoSettings] | None:
        """Return how long this VM leaves the event to others and by which rule, None if no auto rule approves it."""
        assert self._identity.vm is not None  # noqa: S101 - the listener has checked it
        name, turns = self._identity.vm.name, []
        for rule in self._settings.auto:
            policy = self._settings.policy.model_copy(update={"allow": (rule,)})
            decision = judge_event(event, vm_name=name, policy=policy, now=self._clock.now())
            wait_seconds = auto_wait_seconds(event, vm_name=name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                turns.append((wait_seconds, rule))
        return min(turns, key=lambda turn: turn[0], default=None)
