"""Random schedules of a set of VMs: each listener reads the document with a lag of its own.

TEST_SCHEDULES says how many; TEST_SCHEDULES_SEED makes the first one again.
"""

from __future__ import annotations

import json
import os
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.approvals import receipts, turns
from bridge.approvals.policy import TERMINATE
from bridge.approvals.state import EventState, State
from bridge.approvals.step import load_state
from bridge.approvals.turns import Order
from bridge.config.base import Secret
from bridge.errors import ImdsError
from bridge.http.signing import sign
from bridge.runtime.program import Result
from tests.support.imds import WEB_0
from tests.support.listener import ListenerRig, command_body
from tests.support.machine import program

SCHEDULES = int(os.environ.get("TEST_SCHEDULES", "4"))
# A change must not fail because of a schedule that it has nothing to do with: CI makes the same ones each time.
NEW_SEED = 1 if os.environ.get("CI") else random.randrange(10**9)  # noqa: S311 - no secret
SEED = int(os.environ.get("TEST_SCHEDULES_SEED", "0")) or NEW_SEED
pytestmark = pytest.mark.timeout(max(120, 5 * SCHEDULES))
NAMES = ("web-0", "web-1", "web-2")
LAG_SECONDS = 2.0
READ_SECONDS = 1.0
STEP_SECONDS = 0.5
RUN_SECONDS = 15.0
LONG = 150.0

Events = Mapping[str, dict[str, Any]]


@dataclass(kw_only=True)
class Away:
    """A VM whose program has begun, at its deadline or before, or that was approved, for an event."""

    vm: str
    event_id: str
    at: float
    was_late: bool = False


@dataclass(kw_only=True)
class Peer:
    """One VM with its listener, and the document as it reads it."""

    name: str
    rig: ListenerRig
    version: int = 0
    down_until: float = 0.0
    ends_at: dict[int, float] = field(default_factory=dict)


class World:
    """IMDS and the VMs of a set; `faults` has what must not happen."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.limit = self.random.choice([1, 1, 2])
        self.now = 0.0
        self.versions: list[tuple[float, Events]] = [(-100.0, {})]
        self.goes_at: dict[str, float] = {}  # when approved events start, and started ones end
        self.away: list[Away] = []
        self.faults: list[str] = []
        self.peers = [self._peer(folder, name) for name in NAMES]

    def _peer(self, folder: Path, name: str) -> Peer:
        rule = {
            "run": [program()],
            "group": True,
            "run_timeout_seconds": RUN_SECONDS,
            "max_unavailable": self.limit,
        }
        rig = ListenerRig(folder / name, policy={}, auto=[rule])
        rig.restart(vm=replace(WEB_0, name=name, vm_id=f"id-of-{name}"))
        peer = Peer(name=name, rig=rig)
        rig.imds.on_post = lambda event_ids: self._posted(peer, event_ids)
        return peer

    @property
    def events(self) -> dict[str, dict[str, Any]]:
        """The events as they are."""
        return {key: dict(one) for key, one in self.versions[-1][1].items()}

    def show(self, events: Events) -> None:
        """Change the document."""
        self.versions.append((self.now, events))

    def in_seconds(self, seconds: float) -> str:
        return format_datetime(self.peers[0].rig.clock.now() + timedelta(seconds=seconds), usegmt=True)

    def step(self) -> None:
        """Let half a second pass."""
        self.now += STEP_SECONDS
        for peer in self.peers:
            peer.rig.clock.advance(STEP_SECONDS)
        self._go()
        if self.random.random() < 0.04:
            self._change()
        for peer in self.peers:
            self._pass(peer)

    def _go(self) -> None:
        """Start what is approved or due; end what has started."""
        events = self.events
        for key, event in list(events.items()):
            if event["EventStatus"] == "Scheduled" and self.goes_at.get(key, event["at"]) <= self.now:
                event.update(EventStatus="Started", NotBefore="")
                self.goes_at[key] = self.now + self.random.choice([3.0, 10.0, 30.0, 999.0])
            elif event["EventStatus"] == "Started" and self.goes_at[key] <= self.now:
                del events[key]
        if events != self.versions[-1][1]:
            self.show(events)

    def _change(self) -> None:
        events, kind = self.events, self.random.random()
        scheduled = [key for key, event in events.items() if event["EventStatus"] == "Scheduled"]
        if kind < 0.5 or not scheduled:
            key, seconds = f"E-{len(self.versions)}", self.random.choice([30.0, 60.0, 90.0])
            events[key] = {
                "EventId": key,
                "EventType": self.random.choice(["Reboot", "Redeploy", "Freeze", "Terminate"]),
                "EventStatus": "Scheduled",
                "EventSource": "Platform",
                "ResourceType": "VirtualMachine",
                "Resources": self.random.sample(NAMES, self.random.choice([1, 1, 1, 2, 3])),
                "NotBefore": self.in_seconds(seconds),
                "at": self.now + seconds,
            }
            return self.show(events)
        key = self.random.choice(scheduled)
        if kind < 0.65:
            seconds = self.random.choice([25.0, 45.0, 120.0])
            events[key].update(NotBefore=self.in_seconds(seconds), at=self.now + seconds)
        elif kind < 0.9:
            events[key]["Resources"] = self.random.sample(NAMES, self.random.choice([1, 2]))
        else:
            del events[key]
        self.goes_at.pop(key, None)
        return self.show(events)

    def _pass(self, peer: Peer) -> None:
        """Let a VM read the document, which it does up to two seconds late, and decide."""
        if self.now < peer.down_until:
            return
        known = [number for number, (at, _) in enumerate(self.versions) if at <= self.now - LAG_SECONDS]
        peer.version = self.random.randint(max(peer.version, known[-1]), len(self.versions) - 1)
        served = self.versions[peer.version][1].values()
        shown = [{name: value for name, value in one.items() if name != "at"} for one in served]
        peer.rig.imds.incarnation, peer.rig.imds.events = peer.version, shown
        peer.rig.imds.serve({"DocumentIncarnation": peer.version, "Events": shown})
        if self.random.random() < 0.01:
            peer.down_until = self.now + self.random.choice([0.0, 1.0])
            peer.rig.restart()
            peer.rig.machine.runs.clear()
            peer.ends_at.clear()
        for run in peer.rig.machine.running:
            ends_at = peer.ends_at.setdefault(id(run), self.now + self.random.uniform(1, RUN_SECONDS))
            if ends_at <= self.now:
                run.result = Result(code=self.random.random() < 0.1)
        before = len(peer.rig.machine.runs)
        peer.rig.listener.run_once(0.0)
        for run in peer.rig.machine.runs[before:]:
            self._began(peer, str(run.data["EventId"]), shown)

    def _began(self, peer: Peer, event_id: str, shown: list[dict[str, Any]]) -> None:
        event = next(one for one in shown if one["EventId"] == event_id)
        is_late = self._is_late(event_id)
        has_turn = any(one.event_id == event_id for one in self.away)  # which is kept, whatever changes
        if not is_late and not has_turn:
            self._check(peer, event, "began")
        # a program that begins again takes no other turn than it did at first
        turns_at = (
            one.at
            for one in self.away
            if (one.vm, one.event_id) == (peer.name, event_id) and not one.was_late
        )
        at = self.now if is_late else next(turns_at, self.now)
        self.away.append(Away(vm=peer.name, event_id=event_id, at=at, was_late=is_late))

    def _is_late(self, event_id: str) -> bool:
        """Return whether an event is past its deadline."""
        at = next(one["at"] for _, events in reversed(self.versions) if (one := events.get(event_id)))
        return bool(at - self.now <= RUN_SECONDS + 10 + READ_SECONDS)

    def _posted(self, peer: Peer, event_ids: list[str]) -> None:
        for event_id in event_ids:
            shown = [one for one in peer.rig.imds.events if one["EventId"] == event_id]
            if not shown or set(shown[0]["Resources"]) != {peer.name}:
                self.faults.append(f"{self.now}: {peer.name} POSTs {event_id}, which it reads as {shown}")
                return
            self._check(peer, shown[0], "POSTs")
        if self.random.random() < 0.3:
            raise ImdsError("no answer")
        for event_id in event_ids:
            self.away.append(Away(vm=peer.name, event_id=event_id, at=self.now))
            self.goes_at[event_id] = self.now + self.random.choice([0.0, 2.0, 8.0])

    def _check(self, peer: Peer, event: dict[str, Any], does: str) -> None:
        """Note if others are away beside whom the VM should not go."""
        if event["EventType"].lower() == TERMINATE:
            return
        own, events = set(event["Resources"]), self.events
        beside = {
            name
            for key, one in events.items()
            if one["EventStatus"] == "Started" and one["EventType"].lower() != TERMINATE
            if not self._is_fresh(key)
            for name in one["Resources"]
        }
        beside |= {
            one.vm
            for one in self.away
            if one.event_id in events and events[one.event_id]["EventType"].lower() != TERMINATE
            if one.event_id != event["EventId"] and one.vm in events[one.event_id]["Resources"]
            if not one.was_late or self._is_late(one.event_id)  # one that is moved then holds no turn
            if does == "POSTs" or not own <= set(events[one.event_id]["Resources"])  # one event's own VMs
            if not self._is_disturbed(one.at) and not self._is_fresh(one.event_id)
        }
        others = beside - own
        if others and len(others | own) > self.limit and not self._is_fresh(event["EventId"]):
            self.faults.append(
                f"{self.now}: {peer.name} {does} {event['EventId']} of {sorted(own)} beside {sorted(others)}, "
                f"limit {self.limit}"
            )

    def _is_fresh(self, key: str) -> bool:
        """Return whether an event has changed so recently that a VM may not have read it."""
        since = self.now - LAG_SECONDS - READ_SECONDS - STEP_SECONDS
        now = self.versions[-1][1].get(key)
        return any(at > since for at, events in self._around(since) if events.get(key) != now) or any(
            at > since and events.get(key) == now and before.get(key) != now
            for (_, before), (at, events) in zip(self.versions, self.versions[1:], strict=False)
        )

    def _around(self, since: float) -> Iterator[tuple[float, Events]]:
        return ((at, events) for at, events in self.versions if at > since)

    def _is_disturbed(self, at: float) -> bool:
        """Return whether the document changed around an instant, so that VMs may differ about who was next then."""
        lag = LAG_SECONDS + READ_SECONDS + STEP_SECONDS
        return any(abs(changed - at) <= lag for changed, _ in self.versions)

    def close(self) -> None:
        for peer in self.peers:
            peer.rig.close()


def play(folder: Path, seed: int) -> tuple[list[str], int, int]:
    """Play one schedule; return what went wrong, and how many programs began and POSTs were sent."""
    world = World(folder / str(seed), seed)
    while world.now < LONG:
        world.step()
    world.close()
    return world.faults, len(world.away), sum(len(peer.rig.imds.posts) for peer in world.peers)


def test_no_vm_is_approved_for_others_and_never_too_many_leave_at_once(tmp_path: Path) -> None:
    found, began, posts = [], 0, 0
    for seed in range(SEED, SEED + SCHEDULES):
        faults, more_began, more_posts = play(tmp_path, seed)
        began, posts = began + more_began, posts + more_posts
        found += [f"seed {seed}: {fault}" for fault in faults]
    print(json.dumps({"seed": SEED, "schedules": SCHEDULES, "began": began, "posts": posts}))
    assert found == []
    assert began > 3 * SCHEDULES
    if SCHEDULES >= 10:  # of a few, none may come so far
        assert posts > 0.5 * SCHEDULES


def forget_turns(*stored: Any, **more: Any) -> State:
    state = load_state(*stored, **more)
    return replace(state, events={key: replace(one, has_turn=False) for key, one in state.events.items()})


def overtake(events: Iterator[EventState]) -> list[Any]:
    return [one.event for one in events if one.event.status == "started"]


@pytest.mark.parametrize(
    ("place", "value", "seed"),
    [
        ((receipts, "load_state"), forget_turns, 129),
        ((turns, "_taken"), overtake, 1),
        ((Order, "first_beside"), lambda *_: None, 0),
    ],
    ids=[
        "turns forgotten at a restart",
        "newcomers overtake",
        "no second look at the others before a POST",
    ],
)
def test_the_schedules_show_what_sabotage_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, value: Any, seed: int
) -> None:
    owner, name = place
    monkeypatch.setattr(owner, name, value)
    assert any(play(tmp_path, seed + more)[0] for more in range(300)), "no schedule shows it"


class Killed(BaseException):
    """The listener's process ends at this point."""


class Commands:
    """One VM that gets a signed command for each event, while IMDS fails and hangs, events change, secrets rotate.

    It is killed before and after commits, and every command comes again.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - no secret
        self.secrets, self.number, self.kill_in = folder / f"secrets-{seed}", 0, 0
        folder.mkdir(exist_ok=True)
        self._rotate()
        self.rig = ListenerRig(folder / f"commands-{seed}", signing_secrets=Secret(file=self.secrets))
        self.rig.imds.on_post = self._posted
        self.rig.on_commit = self._point
        self.stays: dict[str, int] = {}  # which stay of each event the document shows
        self.served: dict[int, dict[str, int]] = {}  # the same by incarnation
        self.unknown: dict[str, int] = {}  # the stay of each POST whose outcome was lost
        self.sent: dict[str, tuple[str, dict[str, str], bytes]] = {}  # the secret, the signature, the command
        self.count = 0
        self.faults: list[str] = []

    @property
    def secret(self) -> str:
        return f"whsec_{'QUJD' * 8}{self.number:04}"

    def _rotate(self) -> None:
        self.number += 1
        self.secrets.write_text(self.secret)

    def _point(self) -> None:
        """Pass a point at which the process may be killed."""
        self.kill_in -= 1
        if self.kill_in == 0:
            raise Killed

    def _send(self, event_id: str) -> None:
        if event_id not in self.sent:
            body = command_body(event_id, id=event_id)
            signature = sign([self.secret], event_id, self.rig.clock.now(), body)
            self.sent[event_id] = self.secret, signature, body
        _, signature, body = self.sent[event_id]
        self.rig.queue.send(body, message_id=event_id, properties=signature)

    def _posted(self, event_ids: list[str]) -> None:
        stays = self.served[self.rig.listener._caretaker.state.incarnation or 0]
        for event_id in event_ids:
            known = self.unknown.get(event_id)
            if known not in (None, stays[event_id]):
                self.faults.append(f"{event_id}: POSTed in stay {known} and in {stays[event_id]}")
            if self.sent[event_id][0] != self.secret:
                self.faults.append(f"{event_id}: POSTed after its secret was withdrawn")
        kind, hangs_for = self.random.random(), self.random.choice([0.0, 0.0, 1.0, 5.0, 10.0])
        self.rig.clock.advance(min(hangs_for, self.rig.imds.limit_seconds))
        if kind < 0.3 or hangs_for >= self.rig.imds.limit_seconds:
            self.unknown |= {event_id: stays[event_id] for event_id in event_ids}
            raise ImdsError("no answer", status=self.random.choice([None, 500, 503]))
        if kind < 0.5:
            raise ImdsError("refused", status=self.random.choice([404, 409, 429]))
        for event_id in event_ids:
            self.unknown.pop(event_id, None)

    @property
    def known(self) -> Collection[str]:
        """The events of the last document that the listener has read, or before the first one remembers."""
        state = self.rig.listener._caretaker.state
        return state.document.events if state.document else state.events

    def _run(self, seconds: float) -> None:
        try:
            self.rig.run(seconds)
        except Killed:
            self.rig.restart()

    def _disturb(self, kind: float) -> None:
        """Kill the process now or at a commit, rotate the secret, send a command again, or let instance data fail."""
        if 0.25 <= kind < 0.3:
            self.kill_in = 0
            self.rig.restart()
        elif 0.3 <= kind < 0.4:
            self.kill_in = self.random.randrange(1, 12)
        elif 0.4 <= kind < 0.43:
            self._rotate()
        elif 0.43 <= kind < 0.5 and self.sent:
            self._send(self.random.choice([*self.sent]))
        elif 0.5 <= kind < 0.53:
            self.rig.imds.fail(503, methods=["instance"], count=self.random.randrange(5))

    def play(self) -> list[str]:
        """Let a minute and a half pass; return what went wrong."""
        for _ in range(180):
            kind, shown = self.random.random(), list(self.rig.imds.events)
            self.served[self.rig.imds.incarnation] = dict(self.stays)
            if kind < 0.1:
                self.count += 1
                event_id = self.rig.imds.schedule(event_id=f"E-{self.count}")
                self.stays[event_id] = 0
                self._send(event_id)
            elif kind < 0.25 and shown:
                event = self.random.choice(shown)
                if kind < 0.18:
                    self.stays[event["EventId"]] += 1
                    seconds = self.random.randrange(60, 900)
                    self.rig.imds.change(event["EventId"], NotBefore=self.rig.in_seconds(seconds))
                else:  # it leaves and returns: between two documents, or in two of them
                    self.rig.imds.remove(event["EventId"])
                    self.served[self.rig.imds.incarnation] = dict(self.stays)
                    self._run(self.random.choice([0.0, 2.0]))
                    # what nobody saw leave is in the same stay
                    self.stays[event["EventId"]] += event["EventId"].lower() not in self.known
                    self.rig.imds.show(*shown)
            self._disturb(kind)
            self.served[self.rig.imds.incarnation] = dict(self.stays)
            self._run(STEP_SECONDS)
        given: dict[str, set[str]] = defaultdict(set)
        for receipt in self.rig.receipts():
            given[str(receipt["causationid"])].add(receipt["data"]["Reason"])
        several = {key: reasons for key, reasons in given.items() if len(reasons) > 1}
        self.faults += [f"{key}: answered {reasons}" for key, reasons in several.items()]
        self.rig.close()
        return self.faults


def test_no_command_is_posted_again_for_another_content_or_stay(tmp_path: Path) -> None:
    found = {
        seed: faults for seed in range(SEED, SEED + SCHEDULES) if (faults := Commands(tmp_path, seed).play())
    }
    assert found == {}


def test_the_commands_show_what_sabotage_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.approvals.state.uuid4", lambda: SimpleNamespace(hex="any"))
    assert any(Commands(tmp_path, seed).play() for seed in range(50)), "no run shows it"
