"""One step: from what was known, a document and the programs that have ended to what is known now and its effects.

What a program is started for is in the state that the step returns, which is committed before the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from bridge.approvals.auto import Rules, Seen, answer_key, judge, with_rule
from bridge.approvals.policy import Decision, not_recorded, rejected, unknown_outcome
from bridge.approvals.state import (
    Argv,
    EventState,
    OutOfWorkReason,
    Owed,
    Place,
    Program,
    State,
    Stay,
    Tries,
    load,
    place_of_recover,
    place_of_run,
)
from bridge.approvals.turns import deadline, give_turns
from bridge.config.approvals import AutoSettings
from bridge.imds.diff import GRACE_SECONDS
from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent

AGAIN_SECONDS = 5.0  # before a program that has failed runs again, doubled each time up to the limit
AGAIN_LIMIT_SECONDS = 300.0
OUT_OF_WORK_SECONDS = 7200.0  # after which it is told, although no event is left


class Carrier(Protocol):
    """Carries out what follows from a step."""

    def ran(self, *, fault: str, seconds: float) -> None:
        """Note that a program has ended which prepares the VM; `fault` is "" if it has succeeded."""

    def prepared(self, event: ScheduledEvent, *, key: str, seconds: float) -> None:
        """Publish that the VM is prepared for an event as it is, by a program that took so long."""

    def started_unprepared(self, event: ScheduledEvent) -> None:
        """Note that an event of this VM has started although its program had not succeeded."""

    def answer(self, event: ScheduledEvent, decision: Decision, *, key: str) -> None:
        """Publish what has become of an event by an auto rule."""

    def recovered(self, owed: Owed, *, fault: str, seconds: float | None) -> None:
        """Note that `recover` has ended, or without `seconds` that a person did it; publish it if that succeeded."""

    def out_of_work(self, owed: Owed, reason: OutOfWorkReason, *, detail: str) -> None:
        """Publish that the VM stays out of work."""


Effect = Callable[[Carrier], None]
Result = tuple[State, list[Effect]]


def step(before: State, seen: Seen) -> Result:
    """Return what is known after a document, and what follows from it; programs at new places are to be started."""
    state, effects = _follow(before, seen)
    for part in (_note_ended, _decide, _put_back):
        state, more = part(state, seen)
        effects += more
    return state, [*effects, *_unprepared(before, state, seen)]


def started(before: State, after: State, seen: Seen) -> list[Place]:
    """Return the places of the programs that a step has to start."""
    return [place for place in after.programs if place not in before.programs or place in seen.ended]


# The events


def _follow(before: State, seen: Seen) -> Result:
    """Continue, begin and end what is known of events by the document."""
    document, events = seen.document, dict[str, EventState]()
    for key, event in document.events.items():
        known = before.events.get(key)
        events[key] = _shown(known, event, before, seen) if known else _new(event, before, seen)
    is_reset = _is_reset(before, document)
    for key, known in before.events.items():
        if key not in events and (held := _held(known, seen, is_reset=is_reset)):
            events[key] = held
    effects = [
        effect for key, known in before.events.items() for effect in _of_change(known, events.get(key))
    ]
    incarnation = before.incarnation if document.incarnation is None else document.incarnation
    after = replace(before, document=document, read_at=seen.read_at, incarnation=incarnation)
    return replace(after, events=events), effects


def _is_reset(before: State, document: Document) -> bool:
    if before.incarnation is None or document.incarnation is None:
        return False
    return document.incarnation < before.incarnation


def _new(event: ScheduledEvent, before: State, seen: Seen) -> EventState:
    stay, unreadable = Stay(since=seen.read_at), len(seen.document.invalid_entries)
    new = EventState(event=event, stay=stay, boot=seen.rules.boot, absent_at=before.read_at)
    return replace(new, unreadable=unreadable)


def _shown(known: EventState, event: ScheduledEvent, before: State, seen: Seen) -> EventState:
    """Return what is known of an event that is still there, or is there again."""
    fresh, was_missing = _new(event, before, seen), known.sight == "missing"
    is_seen = known.sight == "shown" and known.boot == fresh.boot and known.unreadable == fresh.unreadable
    if is_seen and known.event.raw == event.raw:
        return known
    stay, goes_on = known.stay, known.event.content == event.content and event.status == SCHEDULED
    is_approved = event.status == STARTED and _released(known.event) == _released(event)
    if was_missing or not (goes_on or is_approved):
        stay = fresh.stay
    is_same_type = _type(known.event) == _type(event)
    return replace(
        fresh,
        stay=stay if goes_on else replace(stay, is_intended=False),
        absent_at=fresh.absent_at if was_missing else known.absent_at,
        has_turn=known.has_turn,
        next_since=known.next_since,
        prepared=known.prepared if is_same_type and seen.rules.may_name_this_vm(event) else {},
        failed=known.failed if is_same_type else {},
        rule=known.rule,
        why=known.why,
    )


def _held(known: EventState, seen: Seen, *, is_reset: bool) -> EventState | None:
    """Return what is kept of an event that is not shown and may come back: it is unreadable, or a reset lost it."""
    until = seen.steady + GRACE_SECONDS if is_reset else known.missing_until
    if len(seen.document.invalid_entries) > known.unreadable:
        return replace(known, sight="unread", missing_until=until)
    if until is None or until <= seen.steady:
        return None
    stay = replace(known.stay, is_intended=False)
    return replace(known, stay=stay, sight="missing", missing_until=until, prepared={}, failed={})


def _type(event: ScheduledEvent) -> Any:
    return event.content.get("EventType")


def _released(event: ScheduledEvent) -> list[Any]:
    """Return what an approval releases."""
    return [_type(event), event.content.get("Resources")]


def _of_change(known: EventState, one: EventState | None) -> Iterator[Effect]:
    """Yield what is told of an event that has changed or gone."""
    if known.stay.is_intended and not (one and one.stay.is_intended):
        changed = unknown_outcome(rejected("denied", "the event has changed or returned since"))
        yield _answer(known, known.run, changed if one and one.is_scheduled else not_recorded(None))
    if one and one.is_scheduled and one.stay is not known.stay:
        yield from (_prepared(one, run, seconds) for run, seconds in one.prepared.items())


def _answer(one: EventState, run: Argv, decision: Decision) -> Effect:
    return lambda to: to.answer(one.event, decision, key=answer_key(one, run))


def _prepared(one: EventState, run: Argv, seconds: float) -> Effect:
    return lambda to: to.prepared(one.event, key=answer_key(one, run), seconds=seconds)


def _unprepared(before: State, state: State, seen: Seen) -> Iterator[Effect]:
    """Yield the events that have started although their program had not succeeded."""
    for key, one in state.events.items():
        was = before.events.get(key)
        is_new = one.event.status == STARTED and was and was.is_scheduled and was.is_unprepared
        if was and is_new and was.run not in one.prepared and not seen.rules.is_dry_run:
            yield lambda to, event=one.event: to.started_unprepared(event)  # type: ignore[misc]


# The programs


def _note_ended(state: State, seen: Seen) -> Result:
    """Note how programs have ended, and have those ended that are not needed any more, which leave nothing."""
    events, owed, effects = dict(state.events), dict(state.owed), list[Effect]()
    for place, result in seen.ended.items():
        program = state.programs[place]
        if result.ended_by == "stop":
            continue
        if place == place_of_recover(program.recover):
            still, more = _recover_ended(owed.pop(program.recover), program, result.fault, seen)
            owed |= {program.recover: still} if still else {}
            effects += more
        elif (one := _needing(program, place, events, seen)) and one.sight != "missing":
            events[place[1]], more = _run_ended(one, program, result.fault, seen)
            effects += more
    left = {place: program for place, program in state.programs.items() if place not in seen.ended}
    for place, program in left.items():
        if program.argv != program.recover and not _needing(program, place, events, seen):
            left[place] = replace(program, must_end=True)
    return replace(state, events=events, programs=left, owed=owed), effects


def _needing(
    program: Program, place: Place, events: Mapping[str, EventState], seen: Seen
) -> EventState | None:
    """Return the event that a program prepares for, None if it has left or become another."""
    one, event = events.get(place[1]), program.event
    is_same = one and event and _type(one.event) == _type(event) and _stands(one, seen)
    return one if is_same and not program.must_end else None


def _stands(one: EventState, seen: Seen) -> bool:
    """Return whether an event is still there for this VM, as far as is known: a reset ends one that has started."""
    is_over = one.sight == "missing" and one.event.status == STARTED
    return seen.rules.may_name_this_vm(one.event) and not is_over


def _run_ended(one: EventState, program: Program, fault: str, seen: Seen) -> tuple[EventState, list[Effect]]:
    """Note how a program has ended that is to prepare this VM; after the event's start it is not told."""
    run, seconds = program.argv, seen.at - program.began_at
    effects: list[Effect] = [lambda to: to.ran(fault=fault, seconds=seconds)]
    if fault:
        one = replace(one, failed={**one.failed, run: _failed(one.failed.get(run), fault, seen)})
        one, more = answer(one, run, rejected("not_prepared", f"{run[0]}: {fault}"))
        return one, [*effects, *(more if one.is_scheduled else ())]
    one = replace(one, prepared={**one.prepared, run: seconds}, failed={})
    return one, [*effects, *([_prepared(one, run, seconds)] if one.is_scheduled or one.rule else [])]


def _failed(before: Tries | None, fault: str, seen: Seen) -> Tries:
    """Return how often a program has failed; it waits longer each time before it runs again."""
    count = before.count + 1 if before else 1
    pause_seconds = min(AGAIN_LIMIT_SECONDS, AGAIN_SECONDS * 2.0 ** min(count - 1, 10))
    return Tries(error=fault, next_at=seen.at + pause_seconds, count=count)


def answer(one: EventState, run: Argv, decision: Decision) -> tuple[EventState, list[Effect]]:
    """Answer for an auto rule, once for a stay, a program and an outcome."""
    receipt = f"{answer_key(one, run)}:{decision.outcome}"
    stay = replace(one.stay, told=one.stay.told | {receipt}, is_intended=False)
    return replace(one, stay=stay), [] if receipt in one.stay.told else [_answer(one, run, decision)]


def _recover_ended(one: Owed, program: Program, fault: str, seen: Seen) -> tuple[Owed | None, list[Effect]]:
    """Note how `recover` has ended: what it has put back is not owed any more."""
    seconds = seen.at - program.began_at
    effects: list[Effect] = [lambda to: to.recovered(one, fault=fault, seconds=seconds)]
    if not fault:
        return None, effects
    failed = replace(one, tries=_failed(one.tries, fault, seen))
    told, more = _told(failed, "RecoverFails", f"{program.argv[0]}: {fault}")
    return told, effects + more


def _told(one: Owed, reason: OutOfWorkReason, detail: str) -> tuple[Owed, list[Effect]]:
    """Tell once why the VM stays out of work."""
    effects: list[Effect] = [lambda to: to.out_of_work(one, reason, detail=detail)]
    return replace(one, told=one.told | {reason}), [] if reason in one.told else effects


def _decide(state: State, seen: Seen) -> Result:
    """Give turns, judge this VM's Scheduled events, and start what is due."""
    ruled = {key: with_rule(one, seen) for key, one in state.events.items()}
    events, order = give_turns(ruled, now=seen.now, at=seen.read_at)
    effects = list[Effect]()
    own = [key for key, one in events.items() if one.is_scheduled and seen.rules.names_this_vm(one.event)]
    for key in own:
        one, more = _answered(judge(events[key], order, state.programs, seen), seen)
        effects += more
        if one.is_due and one.rule:
            one, state = _start(one, one.rule, state, seen)
        events[key] = one
    return replace(state, events=events), effects


def _answered(one: EventState, seen: Seen) -> tuple[EventState, list[Effect]]:
    """Answer where nothing is POSTed: in a dry run, and where no rule allows any more what may have been POSTed."""
    if one.may_post and seen.rules.is_dry_run:
        done = Decision(outcome="accepted", reason="approved", detail="dry run: not POSTed")
        return answer(replace(one, may_post=False), one.run, done)
    if one.rule is None and one.stay.is_intended:
        return answer(one, one.run, unknown_outcome(rejected("denied", one.why)))
    return one, []


def _start(one: EventState, rule: AutoSettings, state: State, seen: Seen) -> tuple[EventState, State]:
    """Start a rule's program, and owe what puts the VM back; wait for `recover` if that runs and there is time."""
    place = place_of_recover(rule.recover)
    if running := state.programs.get(place):
        is_late = running.must_end or deadline(one.event, rule) <= seen.now
        programs = {**state.programs, place: replace(running, must_end=is_late)}
        why = f"{rule.recover[0]} runs; {rule.run[0]} runs after it"
        return replace(one, why=why, is_due=False), replace(state, programs=programs)
    seconds, key = rule.run_timeout_seconds, one.event.key
    program = Program(rule.run, rule.recover, one.event, timeout_seconds=seconds, began_at=seen.at)
    state = replace(state, programs={**state.programs, place_of_run(key): program})
    if not rule.recover:
        return one, state
    known = state.owed.get(rule.recover, Owed(recover=rule.recover, since=seen.now))
    new = Owed(recover=rule.recover, since=known.since, run=rule.run, boot=seen.rules.boot, event=one.event)
    new = replace(new, keys=known.keys | {key}, is_lost=known.is_lost)
    return one, replace(state, owed={**state.owed, rule.recover: new})


# What is owed


def owe_all(owed: Mapping[Argv, Owed], now: datetime, rules: Rules) -> dict[Argv, Owed]:
    """Return what is owed where records were lost: each `recover`, after all events that this VM has then."""
    new = {recover: Owed(recover=recover, since=now) for recover in rules.recovers.values() if recover}
    return {recover: replace(one, is_lost=True) for recover, one in {**new, **owed}.items()}


def _put_back(state: State, seen: Seen) -> Result:
    """Start each `recover` once no event needs the VM out of work, or do what `imds-bridge recover` asks for."""
    effects = list[Effect]()
    for recover, known in state.owed.items():
        own = {key for key, one in state.events.items() if known.is_lost and _stands(one, seen)}
        one = replace(known, keys=known.keys | own, is_lost=False) if known.is_lost else known
        held_by, is_needed = _held_by(one, state, seen)
        idle_since = seen.at if one.idle_since is None else one.idle_since
        one = replace(one, idle_since=None if is_needed else idle_since, is_held=bool(held_by))
        if seen.request == "done" and not held_by:
            owed = {key: left for key, left in state.owed.items() if key != recover}
            state = replace(state, owed=owed)
            effects.append(lambda to, one=one: to.recovered(one, fault="", seconds=None))  # type: ignore[misc]
            continue
        if seen.request == "try" and not held_by:
            one = replace(one, tries=None, is_other_vms=False)
        state, more = _recover(one, state, seen, why=held_by)
        effects += more
    return state, effects


def _recover(one: Owed, state: State, seen: Seen, *, why: str) -> Result:
    """Start a `recover` unless it has to wait; say why it does."""
    effects, recover = list[Effect](), one.recover
    if not why and one.is_other_vms:
        why = "another VM owed it, whose disk this one has: see `imds-bridge recover --help`"
        one, effects = _told(one, "OtherVm", "this disk comes from a VM that was out of work")
    elif not why and one.tries and one.tries.next_at > seen.at:
        why = f"{recover[0]} has failed {one.tries.count} time(s): {one.tries.error}"
    elif not why:
        # what is prepared is recorded, and nothing of that is left
        one, why = replace(one, keys=frozenset()), f"{recover[0]} runs"
        seconds = seen.rules.timeout_of(recover)
        program = Program(recover, recover, one.event, timeout_seconds=seconds, began_at=seen.at)
        state = replace(state, programs={**state.programs, place_of_recover(recover): program})
    if one.idle_since is not None and seen.at - one.idle_since >= OUT_OF_WORK_SECONDS:
        one, more = _told(one, "TwoHours", why)
        effects += more
    return replace(state, owed={**state.owed, recover: replace(one, why=why)}), effects


def _held_by(one: Owed, state: State, seen: Seen) -> tuple[str, bool]:
    """Return what keeps `recover` from being started, "" for nothing, and whether that is an event."""
    for key in sorted(one.keys & state.events.keys()):
        known = state.events[key]
        if _stands(known, seen) and (known.sight != "missing" or known.boot == seen.rules.boot):
            what = f"{known.event.raw.get('EventType')} {known.event.event_id} is over"
            return f"until {what if known.sight == 'shown' else f'it is certain that {what}'}", True
    for program in state.programs.values():
        if program.recover == one.recover:
            name = program.argv[0]
            return f"{name} runs" if program.argv == one.recover else f"until {name} has ended", False
    return "dry run: nothing is run" if seen.rules.is_dry_run else "", False


def load_state(
    events: Mapping[str, Any] | None,
    stored: Iterable[Mapping[str, Any]],
    rules: Rules,
    *,
    at: float,
    now: datetime,
) -> State:
    """Read what is stored of events, None for nothing, and of what is owed, at an instant by both clocks.

    A preparation ends with a boot; what is owed is put back by the `recover` that the rule with its `run` names now.
    """
    known = dict[Argv, Owed]()
    for one in (load(Owed, each) for each in stored):
        recover = rules.recovers.get(one.run) or one.recover
        other = known.get(recover, one)
        keys, since = one.keys | other.keys, min(one.since, other.since)
        known[recover] = replace(one, recover=recover, keys=keys, since=since)
    found = dict[str, EventState]()
    for each, stay in events["events"] if events else ():
        state = load(EventState, each, stay=load(Stay, stay, since=at), absent_at=-math.inf)
        prepared = state.prepared if state.boot == rules.boot else {}
        found[state.event.key] = replace(state, prepared=prepared)
        # also that of a rule which did not have one then
        for recover in filter(None, map(rules.recovers.get, prepared)):
            owed = known.get(recover, Owed(recover=recover, since=now, event=state.event))
            known[recover] = replace(owed, keys=owed.keys | {state.event.key})
    return State(incarnation=events["incarnation"] if events else None, events=found, owed=known)
