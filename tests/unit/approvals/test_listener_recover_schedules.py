"""Random schedules of one VM that is prepared for its events and put back to work, judged by what must hold.

The judge knows the programs, the documents that were read and the POSTs, and nothing of the listener's own state.
TEST_SCHEDULES says how many schedules; TEST_SCHEDULES_SEED makes the first one again.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bridge.approvals import caretaker, step
from bridge.approvals.auto import Rules
from bridge.approvals.state import Owed, State, Tries
from bridge.config.approvals import AutoSettings
from bridge.errors import ImdsError
from bridge.imds.instance import Vm
from bridge.process.identity import VmIdentity
from bridge.runtime.program import KILL_AFTER_SECONDS, Result
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig
from tests.support.machine import MachineRun, program
from tests.unit.approvals.test_listener_schedules import SCHEDULES, SEED

pytestmark = pytest.mark.timeout(max(120, 5 * SCHEDULES))

RUN, SHORT, RECOVER, NEW = program("run"), program("short"), program("recover"), program("new")
TIMEOUT_SECONDS = {RUN: 60.0, SHORT: 20.0}
STEP_SECONDS = 0.5
LONG_SECONDS, LAST_SECONDS = 240.0, 700.0
GRACE_SECONDS = 300.0
TYPES = ("Reboot", "Redeploy", "Freeze", "Preempt", "Terminate")


def rule(run: str, recover: str = RECOVER, **more: Any) -> dict[str, Any]:
    given = {"run": [run], "recover": [recover], "group": True, **more}
    return {**given, "run_timeout_seconds": TIMEOUT_SECONDS[run]}


# What an operator may change between two starts: every run has its `recover` in each of them, or in the record.
RULES: tuple[list[dict[str, Any]], ...] = (
    [rule(RUN)],
    [rule(SHORT, event_type=["Preempt"]), rule(RUN)],
    [rule(RUN, max_duration_seconds=60)],
    [rule(RUN, NEW)],
    [rule(RUN, event_type=["Terminate"])],
    [],
)


class Killed(BaseException):
    """The listener's process ends at this point."""


@dataclass(kw_only=True)
class Plan:
    """How a program that was started behaves."""

    ends_at: float
    code: int
    ignores: bool
    limit_at: float = 0.0
    event_type: str = ""
    asked_at: float | None = None


class World:
    """Azure, a VM and its listener; `faults` has what must not happen, and `story` what has."""

    def __init__(self, folder: Path, seed: int, *, others_every: float = 0.0, kills: bool = True) -> None:
        names = ("azure", "others", "programs", "faults", "imds")
        self.of = {name: random.Random(f"{seed} {name}") for name in names}  # noqa: S311 - no secret
        self.kills = kills
        self.others_every = others_every
        self.now = 0.0
        self.faults: list[str] = []
        self.story: list[tuple[float, str]] = []
        rules = self.of["faults"].choice(RULES[:4])
        self.rig = ListenerRig(folder / str(seed), policy={}, auto=rules)
        self.machine = self.rig.machine
        self.machine.on_start, self.machine.on_end = self._began, self._is_ended
        self.machine.is_slow_to_end = True
        self.rig.imds.on_read, self.rig.imds.on_post = self._read, self._post
        self.rig.on_commit = self._point
        self.kill_in = 0
        self.is_stopping = False
        self.fixed: Plan | None = None  # how every program behaves; None: at random
        # Azure
        self.is_quiet = False
        self.events: dict[str, dict[str, Any]] = {}
        self.goes_at: dict[str, float] = {}
        self.others, self.other_at = dict[str, float](), 0.0
        self.incarnation, self.hidden_until, self.garbled = 100, 0.0, ""
        self.fails_until = 0.0
        self.nameless_until, self.is_slow = 0.0, False
        self.confirmed, self.started_at = "", 0.0  # the boot in which instance data has named the VM
        self.rig.imds.instance = self._name  # type: ignore[method-assign]
        self.confirmed = self.rig.boot_id
        # The VM, as it is
        self.is_out = False
        self.run_ended_at = self.recover_began_at = -1.0
        self.plans: dict[MachineRun, Plan] = {}  # of the programs that run
        # What the listener has read, and what follows from that
        self.shown: dict[str, dict[str, Any]] = {}
        self.unreadable = 0
        self.read_incarnation = 100
        self.missing: dict[str, float] = {}  # until when what was missed may come back
        self.unreadable_at: dict[
            str, int
        ] = {}  # how many entries could not be read when an event was shown last
        self.gone: set[str] = set()
        self.recorded: dict[
            str, str
        ] = {}  # events that a program was started for, with `recover`, since that began
        self.last_run: dict[str, str] = {}  # by `recover`
        self.prepared: dict[str, tuple[str, str]] = {}  # the same with EventType and `run`

    # Azure

    def schedule(self, event_type: str, *, notice: float, seconds: float = 9, event_id: str = "") -> str:
        event_id = event_id or f"E-{len(self.goes_at)}"
        self.events[event_id] = {
            "EventId": event_id,
            "EventType": event_type,
            "EventStatus": "Scheduled",
            "EventSource": "Platform",
            "ResourceType": "VirtualMachine",
            "Resources": ["web-0"],
            "NotBefore": self.rig.in_seconds(notice),
            "DurationInSeconds": seconds,
            "Description": "",
        }
        self.goes_at[event_id] = self.now + max(notice, 2.0)
        self.incarnation += 1
        return event_id

    def _azure(self) -> None:
        for key, event in list(self.events.items()):
            if self.goes_at[key] > self.now:
                continue
            self.incarnation += 1
            if event["EventStatus"] == "Scheduled":
                event.update(EventStatus="Started", NotBefore="")
                self.goes_at[key] = self.now + self.of["azure"].choice([1.0, 4.0, 15.0, 60.0])
            else:
                del self.events[key]
        if not self.is_quiet and self.of["azure"].random() < 0.03:
            self._change(self.of["azure"])
        while self.others_every and self.other_at < self.now:
            self.other_at += self.of["others"].expovariate(1 / self.others_every)
            self.others[f"O-{self.incarnation}"] = self.now + self.of["others"].choice([1.0, 5.0, 20.0])
            self.incarnation += 1
        self.others = {key: until for key, until in self.others.items() if until > self.now}

    def _change(self, of: random.Random) -> None:
        kind, keys = (
            of.random(),
            [key for key, one in self.events.items() if one["EventStatus"] == "Scheduled"],
        )
        self.incarnation += 1
        if kind < 0.4 or not keys:
            notice = of.choice([-3.0, 9.0, 30.0, 60.0, 90.0])
            self.schedule(of.choice(TYPES), notice=notice, seconds=of.choice([-1, 9, 90]))
            return
        key = of.choice(keys)
        event = self.events[key]
        if kind < 0.5:
            del self.events[key]
        elif kind < 0.6:
            event["NotBefore"] = self.rig.in_seconds(self.goes_at[key] - self.now + 1.0)
            self.goes_at[key] += 1.0
        elif kind < 0.7:
            event["Description"] = f"changed at {self.now}"
        elif kind < 0.75:
            event["DurationInSeconds"] = of.choice([9, 90])
        elif kind < 0.9:
            event["Resources"] = of.choice([["web-0"], ["web-0", "web-1"], ["web-1"], ["web-0", None], []])
        else:
            event["EventType"] = of.choice(TYPES)

    def _serve(self) -> None:
        """Serve the document: after a reset it lacks what IMDS has not found again, and an entry may be garbled."""
        entries: list[Any] = []
        if self.now >= self.hidden_until:
            entries = [
                {"EventId": 7} if key == self.garbled else {**event} for key, event in self.events.items()
            ]
            entries += [
                {"EventId": key, "EventType": "Freeze", "EventStatus": "Scheduled", "Resources": ["web-9"]}
                for key in self.others
            ]
        self.served = entries
        self.rig.imds.serve({"DocumentIncarnation": self.incarnation, "Events": entries})

    # What goes wrong

    def _name(self, limit_seconds: float = 2.0) -> Vm:
        """Answer with instance data, unless that fails now, at once or slowly."""
        if self.now < self.nameless_until:
            self._wait(limit_seconds if self.is_slow else 0.0)
            raise ImdsError("no instance data", status=None if self.is_slow else 503)
        self.confirmed = self.rig.boot_id
        return WEB_0

    def _wait(self, seconds: float) -> None:
        """Let time pass while the listener waits for IMDS."""
        if seconds:
            self.now += seconds
            self.rig.clock.advance(seconds)
            self._azure()
            self._serve()

    def _go_wrong(self) -> None:
        of = self.of["faults"]
        if self.kills and self.of["imds"].random() < 0.01:  # events of others have it asked for sooner
            self.nameless_until = self.now + self.of["imds"].choice([1.0, 20.0, 90.0])
            self.is_slow = self.of["imds"].random() < 0.5
        if of.random() < 0.01 and self.now > self.fails_until:
            self.fails_until = self.now + of.choice([2.0, 8.0, 40.0])
            self.rig.imds.fail(500, methods=["document"])
        elif self.fails_until and self.now >= self.fails_until:
            self.rig.imds.restore()
            self.fails_until = 0.0
        if of.random() < 0.01:
            self.garbled = "" if self.garbled else of.choice([*self.events, ""])
            self.incarnation += 1
        if of.random() < 0.003 and not self.hidden_until:
            self.incarnation, self.hidden_until = 1, self.now + of.choice([0.5, 5.0, 40.0])
        kind = of.random()
        if kind < 0.01 and self.kills:
            self.kill_in = of.randrange(1, 12)
        elif kind < 0.013:
            self._restart(boots=True)
        elif kind < 0.017:
            self.kill_in, self.is_stopping = 0, True
            self.rig.finish()
            self.is_stopping = False
            self._restart()
        elif kind < 0.022:
            self._restart(rules=of.choice(RULES))

    def _point(self) -> None:
        """Pass a point at which the process may be killed."""
        self.kill_in -= 1
        if self.kill_in == 0:
            raise Killed

    def _restart(self, *, boots: bool = False, rules: Any = None) -> None:
        """End the listener with its programs, as systemd does, and start it again."""
        if any(run.command[0] in TIMEOUT_SECONDS for run in self.plans):
            self.run_ended_at = self.now
        for run in self.machine.running:
            run.result = Result(code=-9, ended_by="stop")
        self.plans.clear()
        self.kill_in = 0
        if boots:
            self.rig.boot_id += "+"
            self.rig.clock.reboot()
            self.prepared.clear()
            self.gone |= self.missing.keys()  # which a boot ends
            self.missing.clear()
            self.shown.clear()
        auto: dict[str, Any] = {}
        if rules is not None:
            auto = {"auto": tuple(AutoSettings(**one) for one in rules)}
        self.story.append((self.now, f"starts {boots=} {rules=}"))
        self.started_at = self.now
        self.rig.restart(**auto)
        now = {recover: self._recover_of(run, recover) for recover, run in self.last_run.items()}
        self.recorded = {key: now[recover] for key, recover in self.recorded.items()}
        self.last_run = {now[recover]: run for recover, run in self.last_run.items()}

    # The programs

    def _began(self, run: MachineRun) -> None:
        self._point()
        name, event_id, of = run.command[0], str(run.data.get("EventId")), self.of["programs"]
        self.story.append((self.now, f"{name} begins for {event_id}"))
        is_run = name in TIMEOUT_SECONDS
        recover = self._recover_of(name) if is_run else name
        others = (one.command[0] for one in self.plans if (one.command[0] in TIMEOUT_SECONDS) is not is_run)
        if beside := [other for other in others if self._recover_of(other) == recover]:
            self._fault(f"{name} begins beside {beside}")
        if is_run:
            self.is_out = True
            self.recorded[event_id], self.last_run[recover] = recover, name
            if run.timeout_seconds != TIMEOUT_SECONDS[name]:
                self._fault(f"{name} has {run.timeout_seconds} s")
            if self.shown.get(event_id, {}).get("EventStatus") != "Scheduled":
                self._fault(f"{name} begins for {event_id}, which is not Scheduled")
            seconds, code = of.choice([1.0, 5.0, 20.0, 50.0, 999.0]), of.choice([0, 0, 0, 0, 1])
        else:
            self.recover_began_at = self.now
            own = [key for key, recover in self.recorded.items() if recover == name]
            if self.confirmed != self.rig.boot_id and self.now - self.started_at < 60.0:
                self._fault(f"{name} begins for a VM whose name is not confirmed")
            if standing := [key for key in own if self._stands(key)]:
                self._fault(f"{name} begins while {standing} stand")
            self.recorded = {key: one for key, one in self.recorded.items() if key not in own}
            self.prepared = {
                key: one for key, one in self.prepared.items() if self._recover_of(one[1], name) != name
            }
            seconds, code = of.choice([0.5, 3.0, 20.0, 999.0]), of.choice([0, 0, 1])
        plan = self.fixed or Plan(ends_at=seconds, code=code, ignores=of.random() < 0.2)
        self.plans[run] = replace(
            plan,
            ends_at=self.now + plan.ends_at,
            limit_at=self.now + run.timeout_seconds,
            event_type=str(run.data.get("EventType")),
        )
        self._point()

    def _recover_of(self, name: str, recorded: str = RECOVER) -> str:
        """Return the `recover` of a program by the rules of today, else the one that was recorded."""
        return {rule.run[0]: rule.recover[0] for rule in self.rig.settings.auto}.get(name, recorded)

    def _is_ended(self, run: MachineRun) -> None:
        event_id, name = str(run.data.get("EventId")), run.command[0]
        self.story.append((self.now, f"{name} for {event_id} is ended"))
        if self.is_stopping or name not in TIMEOUT_SECONDS:
            return
        event_type = self.plans[run].event_type
        if self._stands(event_id) and self.shown.get(event_id, {}).get("EventType", event_type) == event_type:
            self._fault(f"{name} is ended although {event_id} stands")

    def _let_programs_end(self) -> None:
        for run, plan in list(self.plans.items()):
            if why := "stop" if run.is_asked_to_end else "timeout" if self.now >= plan.limit_at else "":
                plan.asked_at = self.now if plan.asked_at is None else plan.asked_at
                if not plan.ignores or self.now >= plan.asked_at + KILL_AFTER_SECONDS:
                    run.result = Result(code=-9 if plan.ignores else -15, ended_by=why)
            elif self.now >= plan.ends_at:
                run.result = Result(code=plan.code)
            if run.result:
                del self.plans[run]
                self._has_ended(run, run.result, plan)

    def _has_ended(self, run: MachineRun, result: Result, plan: Plan) -> None:
        name, event_id = run.command[0], str(run.data.get("EventId"))
        self.story.append((self.now, f"{name} for {event_id} ends: {result.fault or 0}"))
        if name in TIMEOUT_SECONDS:
            self.run_ended_at = self.now
            if not result.fault and self._stands(event_id):
                self.prepared[event_id] = plan.event_type, name
        elif not result.fault and not any(one.command[0] in TIMEOUT_SECONDS for one in self.plans):
            self.is_out = False

    # What the listener reads and sends

    def _read(self) -> None:
        """Note what the listener knows from now on."""
        before = self.shown
        entries = [
            one for one in self.served if isinstance(one["EventId"], str) and one["EventId"][:2] == "E-"
        ]
        self.shown = {one["EventId"]: one for one in entries}
        self.unreadable = (
            len(self.served) - len(self.shown) - len(self.others) * (self.now >= self.hidden_until)
        )
        is_reset, self.read_incarnation = self.incarnation < self.read_incarnation, self.incarnation
        for key, event in before.items():
            is_own = "web-0" in event["Resources"] or None in event["Resources"] or not event["Resources"]
            if is_reset and is_own and key not in self.shown and event["EventStatus"] == "Scheduled":
                self.missing[key] = self.now + GRACE_SECONDS
        self.missing = {key: until for key, until in self.missing.items() if key not in self.shown}
        self.unreadable_at |= dict.fromkeys(self.shown, self.unreadable)
        left = {key for key in self.shown if not self._is_shown(key)}
        self.gone = left | {
            key for key in self.unreadable_at if key not in self.shown and not self._stands(key)
        }
        for key, (event_type, _) in list(self.prepared.items()):
            is_left = not self._is_unread(key) and (key in self.missing or not self._stands(key))
            if is_left or self.shown.get(key, {}).get("EventType", event_type) != event_type:
                del self.prepared[key]

    def _is_shown(self, key: str) -> bool:
        """Return whether the document has an event that names this VM, or may do so."""
        resources = self.shown[key]["Resources"] if key in self.shown else ["-"]
        return "web-0" in resources or None in resources or not resources

    def _is_unread(self, key: str) -> bool:
        """Return whether an event may be in an entry that cannot be read."""
        return key not in {*self.shown, *self.gone} and self.unreadable > self.unreadable_at.get(key, 0)

    def _stands(self, key: str) -> bool:
        return self._is_shown(key) or self._is_unread(key) or self.missing.get(key, 0.0) > self.now

    def _post(self, event_ids: list[str]) -> None:
        self._point()
        for event_id in event_ids:
            event = self.shown.get(event_id, {})
            self.story.append((self.now, f"POST {event_id}"))
            if self.prepared.get(event_id, ("",))[0] != event.get("EventType"):
                self._fault(f"{event_id} is POSTed unprepared")
            if event.get("Resources") != ["web-0"] or event["EventStatus"] != "Scheduled":
                self._fault(f"{event_id} is POSTed as {event}")
        kind = self.of["faults"].random()
        if self.confirmed != self.rig.boot_id:
            self._fault(f"{event_ids} are POSTed for a VM whose name is not confirmed")
        if kind < 0.1:
            raise ImdsError("refused", status=429)
        for event_id in event_ids:
            if event_id in self.events:
                self.goes_at[event_id] = min(self.goes_at[event_id], self.now + kind * 8)
        self._point()
        hangs_for = self.of["imds"].choice([0.0, 0.0, 0.0, 1.0, 2.0, 5.0, 10.0])
        self._wait(min(hangs_for, self.rig.imds.limit_seconds))
        if kind < 0.25 or hangs_for > self.rig.imds.limit_seconds:
            raise ImdsError("no answer")

    def _fault(self, text: str) -> None:
        self.faults.append(f"{self.now}: {text}")

    # Time

    def step(self, seconds: float = STEP_SECONDS) -> None:
        """Let time pass, and make a pass."""
        self.now += seconds
        self.rig.clock.advance(seconds)
        self._azure()
        self._serve()
        self._let_programs_end()
        prepared = dict(self.prepared)
        try:
            self.rig.listener.run_once(0.0)
        except Killed:
            self.prepared = {**prepared, **self.prepared}  # what was read may not have been remembered
            self._restart()

    def play(self) -> list[str]:
        """Play the schedule, let all events end and every program work; return what went wrong."""
        while self.now < LONG_SECONDS:
            self._go_wrong()
            self.step()
        self.fixed = Plan(ends_at=1.0, code=0, ignores=False)
        self.is_quiet, self.garbled, self.others_every, self.nameless_until = True, "", 0.0, 0.0
        self.rig.imds.restore()
        self.events.clear()
        self.others.clear()
        self.incarnation += 1
        while (left := self._left()) and self.now < LONG_SECONDS + LAST_SECONDS:
            self.step(2.0)
        self.faults += [f"in the end {one}" for one in left]
        self.rig.close()
        return self.faults

    def _left(self) -> list[str]:
        """Return what still keeps the VM from its work."""
        owed = self.rig.listener.status().out_of_work
        left = {
            "the VM is out of work": self.is_out or self.recover_began_at < self.run_ended_at,
            f"this is owed: {owed}": owed,
            "a program runs": self.plans,
        }
        return [what for what, is_so in left.items() if is_so]

    def prepare(self, event_type: str, *, notice: float, takes: float) -> tuple[float, bool]:
        """Announce an event; return when its program began, and whether it had succeeded before the event started."""
        self.is_quiet, self.fixed = True, Plan(ends_at=takes, code=0, ignores=False)
        for _ in range(10):
            self.step()
        began, event_id = self.now, self.schedule(event_type, notice=notice)
        while self.events.get(event_id, {}).get("EventStatus") == "Scheduled":
            self.step()
        self.rig.close()
        begins = [at - began for at, line in self.story if line == f"{RUN} begins for {event_id}"]
        ended = [line for at, line in self.story if line == f"{RUN} for {event_id} ends: 0"]
        return begins[0], len(begins) == 1 and bool(ended)


def test_the_vm_is_put_back_to_work_once_its_events_are_over_whatever_happens(tmp_path: Path) -> None:
    found, story = {}, Counter[str]()
    for seed in range(SEED, SEED + SCHEDULES):
        world = World(tmp_path, seed, others_every=(0.0, 0.5, 2.0)[seed % 3])
        if faults := world.play():
            found[seed] = faults
        story.update(line.split()[0] for _, line in world.story)
    print(json.dumps({"seed": SEED, "schedules": SCHEDULES, **story}))
    assert found == {}
    if SCHEDULES >= 10:  # of a few, none may come so far
        assert min(story[RUN], story[RECOVER], 2 * story["POST"]) > SCHEDULES


def beside(*given: Any) -> Owed:
    one = held_back(*given)
    return replace(one, held_by="" if one.held_by.endswith("has ended") else one.held_by)


def never_again(_: object, fault: str, __: object) -> Tries:
    return Tries(error=fault, next_at=math.inf)


held_back = step._held_back


@pytest.mark.parametrize(
    ("place", "value", "seed"),
    [
        ((step, "_stands"), lambda one, _: one.is_scheduled, 0),
        ((step, "_held"), lambda *_, **__: None, 0),
        ((step, "_held_back"), beside, 3),
        ((step, "_type"), lambda _: "", 12),
        ((step, "_failed"), never_again, 1),
        ((State, "dump_owed"), lambda _: [], 0),
        ((Rules, "may_name_this_vm"), Rules.names_this_vm, 6),
        ((caretaker, "UNCONFIRMED_SECONDS"), 0.0, 0),
        ((VmIdentity, "resolved"), property(lambda _: True, lambda *_: None), 0),
    ],
    ids=[
        "an event that has started needs the VM out of work no more",
        "what is not shown is absent",
        "recover does not wait for the program",
        "a preparation counts for an event of another type",
        "what has failed is not repeated",
        "what is owed is not stored",
        "Resources that cannot be read name other VMs",
        "recover does not wait for instance data",
        "a name that is not confirmed approves",
    ],
)
def test_the_judge_sees_what_sabotage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, value: Any, seed: int
) -> None:
    owner, name = place
    monkeypatch.setattr(owner, name, value)
    assert any(World(tmp_path, seed + more, others_every=2.0).play() for more in range(40)), "nothing is seen"


def test_events_of_other_vms_change_nothing(tmp_path: Path) -> None:
    for seed in range(SEED, SEED + max(1, SCHEDULES // 4)):
        alone, among = (
            World(tmp_path / name, seed, others_every=every, kills=False)
            for name, every in (("alone", 0.0), ("among", 0.5))
        )
        assert alone.play() == among.play() == []
        assert alone.story == among.story, f"TEST_SCHEDULES_SEED={seed}"


@pytest.mark.parametrize(
    ("event_type", "notice", "others_every"),
    [
        *(("Preempt", 30.0, others_every) for others_every in (0.0, 10.0, 2.0, 0.5)),
        *((event_type, 75.0, 0.5) for event_type in TYPES if event_type != "Preempt"),
    ],
)
def test_a_vm_is_prepared_before_its_event_starts_wherever_the_program_has_time(
    tmp_path: Path, event_type: str, notice: float, others_every: float
) -> None:
    for takes in (5.0, 28.0, 58.0):
        world = World(tmp_path, int(takes), others_every=others_every, kills=False)
        begins, in_time = world.prepare(event_type, notice=notice, takes=takes)
        assert (begins <= 1.5, in_time) == (True, takes < notice), (takes, begins)
