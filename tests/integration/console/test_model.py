"""Fifty random fleets in three random orders each, against a model of what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bridge.console import rows
from tests.support.console import NOW, FleetVm, Shown, event, shown

LATER = NOW + timedelta(hours=3)
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")


def after(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


@dataclass
class Truth:
    """What happened in a fleet, and what its VMs published about it.

    Attributes:
        events: by name the expected status, due, number of VMs that saw it, and start.
        watches: by VM who watches it at the end.
        missing: by VM how many of its events never arrive.
        heard: by VM the minute of its last report of an event, which is a sign of life, too.
    """

    random: Random
    bodies: list[bytes] = field(default_factory=list)
    events: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    watches: dict[tuple[str, str], str] = field(default_factory=dict)
    missing: dict[tuple[str, str], int] = field(default_factory=dict)
    heard: dict[tuple[str, str], float] = field(default_factory=dict)

    def add_group(self, number: int) -> None:
        """Let a scale set, or VMs on their own, live for three hours."""
        is_set = self.random.random() < 0.5
        group = f"g{number}"
        vms = [
            FleetVm(f"vm-{place}", group, epoch=f"{group}-{place}", scale_set="workers" if is_set else "")
            for place in range(self.random.randint(1, 5))
        ]
        for place in range(self.random.randint(0, 3)):
            self._add_event(f"{group}/{place}", vms, is_set)
        for vm in vms:
            self._end_life(vm)

    def _add_event(self, name: str, vms: list[FleetVm], is_set: bool) -> None:
        """Let an event be announced, and perhaps change, start and end; every VM that Azure tells reports it."""
        random = self.random
        affected = random.sample(vms, random.randint(1, len(vms)))
        told = vms if is_set else affected
        minutes, kind = random.choice([30, 170, 190, 400]), random.choice(TYPES)
        names = [vm.name for vm in affected]
        announced = event(name, vms=names, minutes=minutes, type=kind)
        running = event(name, vms=names, minutes=minutes, type=kind, EventStatus="Started", NotBefore="")
        steps: list[tuple[Any, float, Any, Any]] = [("scheduled", 0, announced, None)]
        has_started = minutes <= 170 and random.random() < 0.6
        end = random.choice(["", "completed"] if has_started else ["", "canceled", "ended"])
        if has_started:
            steps.append(("started", minutes, running, announced))
        if end:
            last = running if has_started else announced
            steps.append((end, minutes + 5 if has_started else 20, last, last))
        for vm in told:
            self.heard[vm.group, vm.name] = max(self.heard.get((vm.group, vm.name), 0), steps[-1][1])
            delay = random.random() / 60
            self.bodies += [
                vm.change(change, one, after(at + delay), previous=before)
                for change, at, one, before in steps
            ]
        status = {"": "Started" if has_started else "Scheduled"}.get(end, end.capitalize())
        due = "started" if has_started else {30: "overdue", 170: "overdue", 190: "1h", 400: "later"}[minutes]
        self.events[name] = (status, "ended" if end else due, sorted(names), (len(told), len(told)))

    def _end_life(self, vm: FleetVm) -> None:
        """Let a VM be watched at the end, or not."""
        place, random = (vm.group, vm.name), self.random
        watch = random.choice(["watched", "silent", "stopped", "unreachable"])
        heartbeats = [vm.heartbeat(after(at)) for at in (0, 60)]
        if watch == "silent":
            self.bodies += [vm.heartbeat(after(100))]
        if watch in ("watched", "stopped"):
            self.bodies += [vm.heartbeat(after(179.5), reason="Hourly" if watch == "watched" else "Stopping")]
        if watch == "unreachable":
            self.bodies += [vm.unreachable(after(179), since=after(178)), vm.heartbeat(after(179.5))]
        lost = random.random() < 0.3
        self.missing[place] = 1 if lost else 0
        self.bodies += heartbeats[:1] if lost else heartbeats
        is_heard = watch == "silent" and self.heard.get(place, 0) > 115
        self.watches[place] = "watched" if is_heard else watch


def found_in(seen: Shown, truth: Truth) -> tuple[dict[str, Any], dict[Any, str], dict[Any, int]]:
    events = {}
    for name in truth.events:
        row = seen.event(name)
        counted = seen.read(rows.count_seen, [row])[row.key]
        events[name] = (row.status, row.due, list(row.resources), counted)
    vms = {(vm.group.partition("/")[0], vm.name): vm for vm in seen.vms()}
    watches = {place: vm.watch for place, vm in vms.items()}
    return events, watches, {place: vm.missing for place, vm in vms.items()}


@pytest.mark.parametrize("seed", range(50))
def test_a_random_fleet_is_shown_as_it_is_in_every_order(tmp_path: Path, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    truth = Truth(random)
    for number in range(random.randint(1, 4)):
        truth.add_group(number)
    for order in range(3):
        folder = tmp_path / str(order)
        folder.mkdir()
        arriving = [*truth.bodies, *random.sample(truth.bodies, len(truth.bodies) // 4)]
        random.shuffle(arriving)
        with shown(folder, LATER) as seen:
            while arriving:
                size = random.randint(1, 9)
                seen.add(*arriving[:size], at=LATER)
                del arriving[:size]
            events, watches, missing = found_in(seen, truth)
        assert events == truth.events
        assert watches == truth.watches
        assert missing == truth.missing
