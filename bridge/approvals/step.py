"""One step: from what was known, a document and the programs that have ended to what is known now and its effects.

What a program is started for is in the state that the step returns, which is committed before the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any, Protocol

from bridge.approvals.auto import Seen, judge, with_rule
from bridge.approvals.policy import Decision, not_recorded, rejected, unknown_outcome
from bridge.approvals.state import (
    EVENTS,
    OWED,
    UNPREPARED,
    Argv,
    EventState,
    OutOfWorkReason,
    Owed,
    Place,
    Program,
    State,
    Stay,
    Tries,
    Verdict,
    titled,
)
from bridge.approvals.turns import deadline, give_turns
from bridge.config.approvals import AutoSettings, leaving
from bridge.imds.diff import GRACE_SECONDS, is_reset
from bridge.imds.document import STARTED, ScheduledEvent
from bridge.runtime.time import iso_utc

AGAIN_SECONDS = 5.0  # before a program that has failed runs again, doubled each time up to the limit
AGAIN_LIMIT_SECONDS = 300.0
OUT_OF_WORK_SECONDS = 7200.0  # after which it is told, although no event is left


class Carrier(Protocol):
    """Is told what follows from a step, in its order, before the listener knows the state that the step returns."""

    def ran(self, *, fault: str, seconds: float) -> None:
        """Note that a program has ended which prepares the VM; `fault` is "" if it has succeeded."""

    def prepared(self, event: ScheduledEvent, *, key: str, seconds: float) -> None:
        """Publish that the VM is prepared for an event as it is, by a program that took so long."""

    def started_unprepared(self, event: ScheduledEvent) -> None:
        """Note that an event of this VM has started although its program had not succeeded."""

    def answer(self, event: ScheduledEvent, decision: Decision, *, key: str) -> None:
        """Publish what has become of an event by an auto rule."""

    def recovered(self, owed: Owed, *, fault: str, seconds: float | None, is_last: bool) -> None:
        """Note that `recover` has ended, or without `seconds` that a person did it; publish the last success."""

    def out_of_work(self, owed: Owed, reason: OutOfWorkReason, *, detail: str) -> None:
        """Publish that the VM stays out of work."""


def step(before: State, seen: Seen, to: Carrier) -> State:
    """Return what is known after a document, and tell what follows; programs at new places are to be started."""
    state = before
    for part in (_follow, _note_ended, _decide, _put_back):
        state = part(state, seen, to)
    for key, was in before.events.items():
        one = state.events.get(key)
        was_unprepared = was.is_scheduled and was.is_unprepared and not seen.rules.is_dry_run
        if was_unprepared and one and one.event.status == STARTED and was.run not in one.prepared:
            to.started_unprepared(one.event)
            state = state.with_stays({key: replace(one.stay, told=one.stay.told | {UNPREPARED})})
    return state


# The events


def _follow(before: State, seen: Seen, to: Carrier) -> State:
    """Continue, begin and end what is known of events by the document."""
    document = seen.document
    if before.boot != seen.rules.boot:  # which has put the VM back, and ends what a reset may have hidden
        known = {
            key: replace(one, prepared={}, missing_until=None)
            for key, one in before.events.items()
            if one.sight != "missing"
        }
        before = replace(before, events=known, boot=seen.rules.boot, incarnation=None)
    if seen.is_lost and before.document is None:  # what is stored may be older than the last recovery
        stay = Stay(since=seen.steady)
        old = {
            key: replace(one, prepared={}, is_begun=False, stay=stay) for key, one in before.events.items()
        }
        before = replace(before, events=old)
    has_reset = is_reset(before.incarnation, document.incarnation)
    events = {
        key: _shown(before.events.get(key), event, before, seen) for key, event in document.events.items()
    }
    for key, one in before.events.items():
        if key not in events and (held := _held(one, seen, has_reset=has_reset)):
            events[key] = held
    for key, one in before.events.items():
        _tell_change(one, events.get(key), to)
    return replace(
        before,
        document=document,
        at=seen.steady,
        incarnation=before.incarnation if document.incarnation is None else document.incarnation,
        events=events,
        absent={},
        is_lost=False,
    )


def _shown(known: EventState | None, event: ScheduledEvent, before: State, seen: Seen) -> EventState:
    """Return what is known of an event that is new, still there, or there again."""
    unreadable = len(seen.document.invalid_entries)
    absent_at = before.absent.get(event.key, before.at)
    new = EventState(event=event, stay=Stay(since=seen.steady), unreadable=unreadable, absent_at=absent_at)
    if known is None:
        return new
    was_missing = known.sight == "missing"
    goes_on = known.event.content == event.content
    is_approved = event.status == STARTED and _released(known.event) == _released(event)
    is_same_type, is_of_this_vm = _type(known.event) == _type(event), seen.rules.may_name_this_vm(event)
    return replace(
        known,
        event=event,
        stay=known.stay if (goes_on or is_approved) and not was_missing else new.stay,
        prepared=known.prepared if is_same_type and is_of_this_vm else {},
        is_begun=known.is_begun and is_of_this_vm,
        failed=known.failed if is_same_type else {},
        unreadable=unreadable,
        sight="shown",
        missing_until=None,
        absent_at=new.absent_at if was_missing else known.absent_at,
    )


def _held(one: EventState, seen: Seen, *, has_reset: bool) -> EventState | None:
    """Return what is kept of an event that is not shown: it may be in an unreadable entry, or a reset has lost it."""
    until = seen.steady + GRACE_SECONDS if has_reset else one.missing_until
    if len(seen.document.invalid_entries) > one.unreadable:
        return replace(one, sight="unread", missing_until=until)
    if until is None or until <= seen.steady:
        return None
    return replace(one, sight="missing", missing_until=until, prepared={}, failed={})


def _stands(one: EventState, seen: Seen) -> bool:
    """Return whether an event is still there for this VM, as far as is known: a reset ends one that has started."""
    return seen.rules.may_name_this_vm(one.event) and not one.is_over


def _type(event: ScheduledEvent) -> Any:
    return event.content.get("EventType")


def _released(event: ScheduledEvent) -> list[Any]:
    """Return what an approval releases."""
    return [_type(event), event.content.get("Resources")]


def _tell_change(was: EventState, one: EventState | None, to: Carrier) -> None:
    """Answer for a POST without an outcome whose stay is over; publish for a new stay that the VM is prepared."""
    is_new = one is None or one.stay.id != was.stay.id
    if was.stay.is_intended and was.may_be_scheduled and (one is None or is_new or not one.may_be_scheduled):
        changed = unknown_outcome(rejected("denied", "the event has changed or returned since"))
        decision = changed if one and one.is_scheduled else not_recorded(None)
        to.answer(was.event, decision, key=_key(was, was.run))
    if one and one.is_scheduled and is_new:
        for run, seconds in one.prepared.items():
            to.prepared(one.event, key=_key(one, run), seconds=seconds)


def _key(one: EventState, run: Argv) -> str:
    """Return what decides about the ids of what is published of an event's stay and a program, () for none."""
    return f"auto:{one.event.key}:{one.stay.id}:{sha256(repr(run).encode()).hexdigest()[:16]}"


def answer(one: EventState, run: Argv, decision: Decision, to: Carrier) -> EventState:
    """Answer for an auto rule, once for a stay, a program and an outcome."""
    receipt = f"{_key(one, run)}:{decision.outcome}"
    if receipt not in one.stay.told:
        to.answer(one.event, decision, key=_key(one, run))
    return replace(one, stay=replace(one.stay, told=one.stay.told | {receipt}, is_intended=False))


# The programs


def _note_ended(state: State, seen: Seen, to: Carrier) -> State:
    """Note how programs have ended, and have those ended that are not needed any more, which leave nothing."""
    events, owed = dict(state.events), dict(state.owed)
    for place, result in seen.ended.items():
        program = state.programs[place]
        if result.ended_by == "stop":
            continue
        if not isinstance(place, str):
            one = owed.pop(place)
            seconds, is_last = seen.at - program.began_at, not owed
            to.recovered(one, fault=result.fault, seconds=seconds, is_last=is_last)
            if result.fault:
                owed[place] = _recover_failed(one, program, result.fault, seen, to)
        elif _is_needed(program, place, events, seen) and events[place].sight != "missing":
            events[place] = _run_ended(events[place], program, result.fault, seen, to)
    programs = {
        place: program if _is_needed(program, place, events, seen) else replace(program, must_end=True)
        for place, program in state.programs.items()
        if place not in seen.ended
    }
    return replace(state, events=events, programs=programs, owed=owed)


def _is_needed(program: Program, place: Place, events: Mapping[str, EventState], seen: Seen) -> bool:
    """Return whether the event that a program prepares for still is what it was; `recover` needs none."""
    if program.must_end or not isinstance(place, str):
        return not program.must_end
    one = events.get(place)
    if one is None or program.event is None:
        return False
    return _type(one.event) == _type(program.event) and _stands(one, seen)


def _run_ended(one: EventState, program: Program, fault: str, seen: Seen, to: Carrier) -> EventState:
    """Note how a program has ended that is to prepare this VM; after the event's start it is not told."""
    run, seconds = program.argv, seen.at - program.began_at
    to.ran(fault=fault, seconds=seconds)
    if not fault:
        one = replace(one, prepared={**one.prepared, run: seconds}, failed={})
        if one.is_scheduled or one.rule:  # it has only just started then
            to.prepared(one.event, key=_key(one, run), seconds=seconds)
        return one
    one = replace(one, failed={**one.failed, run: _failed(one.failed.get(run), fault, seen)})
    if not one.is_scheduled:
        return one
    return answer(one, run, rejected("not_prepared", f"run {run[0]}: {fault}"), to)


def _failed(before: Tries | None, fault: str, seen: Seen) -> Tries:
    """Return how often a program has failed; it waits longer each time before it runs again."""
    count = before.count + 1 if before else 1
    pause_seconds = min(AGAIN_LIMIT_SECONDS, AGAIN_SECONDS * 2.0 ** min(count - 1, 10))
    return Tries(error=fault, next_at=seen.at + pause_seconds, count=count)


def _recover_failed(one: Owed, program: Program, fault: str, seen: Seen, to: Carrier) -> Owed:
    """Note that `recover` has failed: what it was to put back is still owed."""
    failed = replace(one, tries=_failed(one.tries, fault, seen))
    return _told(failed, "RecoverFails", f"recover {program.argv[0]}: {fault}", to)


def _told(one: Owed, reason: OutOfWorkReason, detail: str, to: Carrier) -> Owed:
    """Tell once why the VM stays out of work."""
    if reason not in one.told:
        to.out_of_work(one, reason, detail=detail)
    return replace(one, told=one.told | {reason})


def _decide(state: State, seen: Seen, to: Carrier) -> State:
    """Give turns, judge this VM's Scheduled events, and start what is due."""
    ruled = {key: with_rule(one, seen) for key, one in state.events.items()}
    events, order = give_turns(ruled, now=seen.now, at=seen.at)
    for key, one in events.items():
        if one.may_be_prepared and seen.rules.names_this_vm(one.event):
            judged = replace(one, verdict=judge(one, order, state.programs.get(key), seen))
            events[key] = _answered(judged, seen, to)
            if judged.rule and judged.verdict.does == "run":
                events[key], state = _start(judged, judged.rule, state, seen)
    return replace(state, events=events)


def _answered(one: EventState, seen: Seen, to: Carrier) -> EventState:
    """Answer where nothing is POSTed: in a dry run, and where no rule allows any more what may have been POSTed."""
    if one.verdict.does == "post" and seen.rules.is_dry_run:
        done = Decision(outcome="accepted", reason="approved", detail="dry run: not POSTed")
        return answer(replace(one, verdict=Verdict(why=one.verdict.why)), one.run, done, to)
    if one.rule is None and one.stay.is_intended:
        return answer(one, one.run, unknown_outcome(rejected("denied", one.verdict.why)), to)
    return one


def _start(one: EventState, rule: AutoSettings, state: State, seen: Seen) -> tuple[EventState, State]:
    """Start a rule's program, and owe what puts the VM back; wait for `recover` if that runs and there is time."""
    # a rule that has lost its `recover` still changes what the recorded one puts back
    recorded = next((owed.recover for owed in state.owed.values() if owed.run == rule.run), ())
    recover = rule.recover or recorded
    if running := state.programs.get(recover):
        is_late = running.must_end or deadline(one.event, rule) <= seen.now
        programs = {**state.programs, recover: replace(running, must_end=is_late)}
        waits = Verdict(why=f"{running.title} runs; {titled('run', rule.run)} runs after it")
        return replace(one, verdict=waits), replace(state, programs=programs)
    program = Program(
        argv=rule.run,
        recover=recover,
        event=one.event,
        timeout_seconds=rule.run_timeout_seconds,
        began_at=seen.at,
    )
    state = replace(state, programs={**state.programs, one.event.key: program})
    if not recover:
        return replace(one, is_begun=True), state
    out_since = min((owed.since for owed in state.owed.values()), default=seen.now)
    known = state.owed.get(recover, Owed(recover=recover, since=out_since))
    keys = known.keys | {one.event.key}
    new = Owed(
        recover=recover,
        since=known.since,
        run=rule.run,
        boot=seen.rules.boot,
        event=one.event,
        keys=keys,
    )
    return one, replace(state, owed={**state.owed, recover: new})


# What is owed


def _put_back(state: State, seen: Seen, to: Carrier) -> State:
    """Start each `recover` once no event needs the VM out of work, or do what `imds-bridge recover` asks for."""
    owed, programs = _owed(state, seen), dict(state.programs)
    done = f"done {min((iso_utc(one.since) for one in owed.values()), default='')}"  # since then, not once before
    for recover, known in [*owed.items()]:
        one = _held_back(known, state, seen)
        if seen.request in ("try", done) and not one.held_by:
            one = replace(one, tries=None, is_other_vms=False)
            if seen.request == done:
                del owed[recover]
                to.recovered(one, fault="", seconds=None, is_last=not owed)
                continue
        if one.is_other_vms and not one.held_by:
            one = _told(one, "OtherVm", "this disk comes from a VM that was out of work", to)
        elif not one.held_by and not (one.tries and one.tries.next_at > seen.at):
            programs[recover] = Program(
                argv=recover,
                recover=recover,
                event=one.event,
                timeout_seconds=seen.rules.timeout_of(recover),
                began_at=seen.at,
            )
        if one.idle_since is not None and seen.at - one.idle_since >= OUT_OF_WORK_SECONDS:
            one = _told(one, "TwoHours", one.published_why, to)
        owed[recover] = one
    return replace(state, owed=owed, programs=programs)


def _owed(state: State, seen: Seen) -> dict[Argv, Owed]:
    """Return what is owed, also for what was prepared when its rule had no `recover`, or where records were lost."""
    owed, recovers = dict(state.owed), seen.rules.settings.recovers
    for recover in dict.fromkeys((*recovers.values(), *owed)):
        begun, found = set[Argv](), []
        for one in state.events.values():
            runs = {run for run in one.prepared if recovers.get(run) == recover}
            if runs or (seen.is_lost and _stands(one, seen)):
                begun |= runs
                found.append(one.event)
        if found or seen.is_lost:
            known = owed.get(recover, Owed(recover=recover, since=seen.now, event=(*found, None)[0]))
            run = known.run or min(begun, default=())
            owed[recover] = replace(known, run=run, keys=known.keys | {event.key for event in found})
    return owed


def _held_back(one: Owed, state: State, seen: Seen) -> Owed:
    """Return what is owed with what keeps `recover` from being started."""
    events = (state.events[key] for key in sorted(one.keys & state.events.keys()))
    event = next((known for known in events if _stands(known, seen)), None)
    program = next((known for known in state.programs.values() if known.recover == one.recover), None)
    held_by = "dry run: nothing is run" if seen.rules.is_dry_run else ""
    if event:
        what = f"{event.event.raw.get('EventType')} {event.event.event_id} is over"
        held_by = f"until {what if event.sight == 'shown' else f'it is certain that {what}'}"
    elif program:
        is_it = program.argv == one.recover
        held_by = f"{program.title} runs" if is_it else f"until {program.title} has ended"
    elif not seen.is_confirmed:
        held_by = "until instance data says which VM this is, or fails for a minute"
    idle_since = seen.at if one.idle_since is None else one.idle_since
    return replace(one, held_by=held_by, idle_since=None if event else idle_since)


def load_state(
    known: Mapping[str, Any] | None, owed: Iterable[Any], recovers: Mapping[Argv, Argv], *, is_lost: bool
) -> State:
    """Return what is stored: it is put back by the `recover` that its `run` has now.

    Args:
        known: what is known of events, None for nothing.
        owed: what each `recover` has to put back.
        recovers: the `recover` of each `run`.
        is_lost: records were lost.
    """
    found, nothing = dict[Argv, Owed](), leaving(0)["recover"]
    for one in OWED.validate_python(owed):
        is_nothing = one.recover[1:] == nothing[1:]  # whose Python may be another one by now
        recover = nothing if is_nothing else recovers.get(one.run, one.recover)
        other = found.get(recover, one)
        keys, since = one.keys | other.keys, min(one.since, other.since)
        found[recover] = replace(one, recover=recover, keys=keys, since=since)
    if known is None:
        return State(owed=found, is_lost=is_lost)
    events = EVENTS.validate_python(known["events"])
    return State(**{**known, "events": events}, owed=found, is_lost=is_lost)
