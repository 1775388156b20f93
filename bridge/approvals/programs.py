"""The auto rules: which events this VM approves without a command, and the programs that they run first.

I/O: processes and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from bridge.approvals.approver import content_hash, is_same
from bridge.approvals.policy import (
    Decision,
    auto_wait_seconds,
    judge_event,
)
from bridge.config.approvals import ApprovalSettings, AutoSettings
from bridge.imds.document import SCHEDULED, Document, ScheduledEvent
from bridge.runtime.program import Run
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

END_BEFORE_SECONDS = 10.0  # how long before NotBefore a program gets SIGTERM; SIGKILL follows 5 s later

# What a program gets of an event: the CloudEvent for its standard input, and the event's data.
Notice = Callable[[ScheduledEvent, Document], tuple[bytes, Mapping[str, Any]]]


def run_seconds(event: ScheduledEvent, *, timeout_seconds: float, now: datetime) -> float:
    """Return how long a program that is started now may run, 0 or less if there is no time for it.

    Args:
        event: what the program is for; it has to end before NotBefore.
        timeout_seconds: the rule's limit.
        now: the time of day.
    """
    if event.not_before is None:
        return timeout_seconds
    return min(timeout_seconds, (event.not_before - now).total_seconds() - END_BEFORE_SECONDS)


class AutoRules:
    """Approves events without a command, once this VM is known; for the listener's thread.

    Args:
        settings: the policy and the auto rules.
        vm_name: returns this VM's name.
        notice: makes what a program gets.
        clock: for turns and the rules about the notice.
        run: makes the run of a program; None for a dry run, which runs none.
    """

    def __init__(
        self,
        settings: ApprovalSettings,
        *,
        vm_name: Callable[[], str],
        notice: Notice,
        clock: Clock,
        run: Callable[..., Run] | None,
    ) -> None:
        self._settings = settings
        self._vm_name = vm_name
        self._notice = notice
        self._clock = clock
        self._run = run
        self._runs: dict[str, Run] = {}
        self._first_seen: dict[str, float] = {}

    def due(self, document: Document, approval: Callable[[str], Any]) -> Iterator[tuple[str, ScheduledEvent]]:
        """Yield the events that a rule matches, once it is this VM's turn, with the key of a command.

        Args:
            document: the current one.
            approval: returns the record of an event's last approval.
        """
        now = self._clock.monotonic()
        self._first_seen = {key: self._first_seen.get(key, now) for key in document.events}
        scheduled = [event for event in document.events.values() if event.status == SCHEDULED]
        self._end_others(scheduled)
        for event in scheduled:
            approved = approval(event.key)
            turn = None if is_same(approved, event) else self._turn(event)
            if turn and now - self._first_seen[event.key] >= turn[0]:
                # one command for the event as it is, and another one for each time that it is approved
                number = approved["number"] if approved else 0
                yield f"auto:{event.key}:{content_hash(event)}:{event.not_before}:{number}", event

    def judge(self, event: ScheduledEvent, document: Document) -> Decision | None:
        """Decide about a Scheduled event that was due; None while its program runs, which this starts."""
        turn = self._turn(event)
        refusal = self._refusal(turn[1], event, document) if turn else "no auto rule matches"
        if refusal is None:
            return None
        if refusal:
            return Decision(outcome="rejected", reason="denied", detail=refusal, event=event)
        return Decision(outcome="accepted", reason="approved", detail="an auto rule", event=event)

    def _refusal(self, rule: AutoSettings, event: ScheduledEvent, document: Document) -> str | None:
        """Return "" if the rule needs no program or its program has succeeded, None while it runs, else a reason."""
        if not rule.run or not self._run:
            return ""
        now = self._clock.now()
        left_seconds = run_seconds(event, timeout_seconds=rule.run_timeout_seconds, now=now)
        run = self._runs.get(event.key)
        if run is None or (run.result and run.result.ended_by == "stop"):
            if left_seconds <= 0:
                return f"{rule.run[0]}: there was not enough time before NotBefore"
            body, data = self._notice(event, document)
            run = self._runs[event.key] = self._run(rule.run, body, data, timeout_seconds=left_seconds)
            log.info("running %s", rule.run[0], extra={"event_id": event.event_id})
            run.start()
        if run.result is None:
            if left_seconds <= 0:
                run.end()
            return None
        return f"{rule.run[0]}: {run.result.fault}" if run.result.fault else ""

    def end(self) -> None:
        """End every program soon; a later process runs them again if there is still time."""
        self._end_others(())

    def _end_others(self, events: Iterable[ScheduledEvent]) -> None:
        """End the programs of all events but these, and forget those that have ended."""
        keys = {event.key for event in events}
        for key in self._runs.keys() - keys:
            self._runs[key].end()
            if self._runs[key].result:
                del self._runs[key]

    def _turn(self, event: ScheduledEvent) -> tuple[float, AutoSettings] | None:
        """Return how long this VM leaves the event to others and by which rule, None if no auto rule approves it."""
        name, turns = self._vm_name(), []
        for rule in self._settings.auto:
            policy = self._settings.policy.model_copy(update={"allow": (rule,)})
            decision = judge_event(event, vm_name=name, policy=policy, now=self._clock.now())
            wait_seconds = auto_wait_seconds(event, vm_name=name, group=rule.group)
            if decision.outcome == "accepted" and wait_seconds is not None:
                turns.append((wait_seconds, rule))
        return min(turns, key=lambda turn: turn[0], default=None)
