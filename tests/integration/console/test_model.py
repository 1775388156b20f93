"""Random fleets in three random orders each, against a model of what happened; TEST_FLEETS says how many."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import unescape
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import pytest

from bridge.console.archive import export_own, import_events
from bridge.console.expected import read_expected
from bridge.console.forget import away, dismissed, restored
from bridge.console.rows import UNWATCHED, WATCHES
from tests.support.console import NOW, FleetVm, Shown, event, event_id, shown

FLEETS = int(os.environ.get("TEST_FLEETS", "25"))
LATER = 180.0  # minutes: the moment that is looked at
NEXT_DAY = 28 * 60.0
TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
DELETING = ("Preempt", "Terminate")
Place = tuple[str, str]  # a group and a VM's name


def after(minutes: float) -> datetime:
    return NOW + timedelta(minutes=minutes)


@dataclass(frozen=True, kw_only=True)
class Happened:
    """An event of a group: what was reported at last, and the VMs that it names and that saw it."""

    name: str
    group: str
    kind: str
    minutes: float
    status: str
    names: tuple[str, ...]
    told: frozenset[str]
    last_at: float

    @property
    def is_open(self) -> bool:
        return self.status in ("Scheduled", "Started")

    @property
    def witnesses(self) -> tuple[int, int]:
        """How many of those that it names saw it, and how many others."""
        return len(self.told & {*self.names}), len(self.told - {*self.names})

    def deletes_at(self, now: float) -> float:
        """Return when a VM that it names should be gone, 0 if it should not by now."""
        deletes = self.kind in DELETING and self.status != "Canceled" and self.minutes < now - 5
        return self.minutes if deletes else 0.0


@dataclass
class Truth:
    """What happened in a fleet, and what its VMs published about it.

    Attributes:
        events: by name.
        lives: by VM its sign at the end, of watched, unreachable and stopped.
        heard: by VM the minute of its last report.
        missing: by VM how many of its events never arrive.
        vms: by place, those of which nothing is ever heard, too.
        expected: those on the list of the last moment, and those that were on the list before only.
        dismissed: the names of events.
    """

    random: Random
    bodies: list[bytes] = field(default_factory=list)
    events: dict[str, Happened] = field(default_factory=dict)
    lives: dict[Place, str] = field(default_factory=dict)
    heard: dict[Place, float] = field(default_factory=dict)
    missing: dict[Place, int] = field(default_factory=dict)
    vms: dict[Place, FleetVm] = field(default_factory=dict)
    expected: tuple[set[Place], set[Place]] = field(default_factory=lambda: (set(), set()))
    dismissed: set[str] = field(default_factory=set)

    def add_group(self, number: int) -> None:
        """Let a scale set, or VMs on their own, live for three hours."""
        is_set = self.random.random() < 0.5
        group = f"g{number}"
        vms = [
            FleetVm(f"vm-{place}", group, epoch=f"{group}-{place}", scale_set="workers" if is_set else "")
            for place in range(self.random.randint(1, 5))
        ]
        names = [*vms, FleetVm("never-0", group, scale_set=vms[0].scale_set)]
        self.vms |= {(group, vm.name): vm for vm in names}
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
        never = ["never-0"] if random.random() < 0.6 else []  # it has no forwarder
        names = sorted([vm.name for vm in affected] + never)
        announced = event(name, vms=names, minutes=minutes, type=kind)
        running = event(name, vms=names, minutes=minutes, type=kind, EventStatus="Started", NotBefore="")
        steps: list[tuple[Any, float, Any, Any]] = [("scheduled", 0, announced, None)]
        has_started = minutes <= 170 and random.random() < 0.6
        end = random.choice(["", "completed"] if has_started else ["", "canceled", "ended"])
        if has_started:
            steps.append(("started", minutes, running, announced))
        if end:
            last = running if has_started else announced
            steps.append((end, minutes + 6 if has_started else 20, last, last))
        for vm in told:
            self._hear(vm, steps[-1][1])
            delay = random.random() / 60
            self.bodies += [
                vm.change(change, one, after(at + delay), previous=before)
                for change, at, one, before in steps
            ]
        self.events[name] = Happened(
            name=name,
            group=vms[0].group,
            kind=kind,
            minutes=minutes,
            status=end.capitalize() or ("Started" if has_started else "Scheduled"),
            names=tuple(names),
            told=frozenset(vm.name for vm in told),
            last_at=steps[-1][1],
        )

    def _hear(self, vm: FleetVm, minute: float) -> None:
        self.heard[vm.group, vm.name] = max(self.heard.get((vm.group, vm.name), 0), minute)

    def _end_life(self, vm: FleetVm) -> None:
        """Let a VM be watched at the end, or not; one that is deleted says nothing after its first heartbeats."""
        place, random = (vm.group, vm.name), self.random
        life = random.choice(["watched", "silent", "stopped", "unreachable", "deleted"])
        heartbeats = [vm.heartbeat(after(at)) for at in (0, 20 if life == "deleted" else 60)]
        last = {"silent": 100, "unreachable": 179.5, "watched": 179.5, "stopped": 179.5}.get(life, 20)
        if life == "silent":
            self.bodies += [vm.heartbeat(after(last))]
        if life in ("watched", "stopped"):
            self.bodies += [vm.heartbeat(after(last), reason="Hourly" if life == "watched" else "Stopping")]
        if life == "unreachable":
            self.bodies += [vm.unreachable(after(179), since=after(178)), vm.heartbeat(after(last))]
        lost = life != "deleted" and random.random() < 0.3
        self._hear(vm, last)
        self.missing[place] = 1 if lost else 0
        self.bodies += heartbeats[:1] if lost else heartbeats
        self.lives[place] = life if life in ("stopped", "unreachable") else "watched"

    def choose(self) -> None:
        """List some VMs as expected, some more on the list before, and dismiss some events."""
        places = sorted(self.vms)
        first, last = ({*self.random.sample(places, self.random.randint(0, len(places)))} for _ in range(2))
        self.expected = last, first - last
        self.dismissed = {name for name in self.events if self.random.random() < 0.2}

    def watches(self, now: float) -> dict[Place, str]:
        """Return who watches each VM that is listed."""
        found = {place: self._watch(place, now) for place in self.lives}
        found |= dict.fromkeys(self.expected[0] - self.lives.keys(), "unheard")
        named = [(one.group, name, one) for one in self.events.values() for name in one.names]
        for group, name, one in named:
            if (
                (group, name) not in self.lives
                and found.get((group, name)) != "unheard"
                and self.is_current(one, now)
            ):
                is_gone = self._due(one, now) == "gone" and found.get((group, name)) != "unknown"
                found[group, name] = "gone" if is_gone else "unknown"
        return {place: watch for place, watch in found.items() if watch}

    def _watch(self, place: Place, now: float) -> str:
        """Return who watches a VM that has reported, "" if it has been gone for a day."""
        sign, last = self.lives[place], self.heard[place]
        is_expected = place in self.expected[0]  # by a list of the moment LATER
        is_late = now - last > 65
        if is_late and (sign != "stopped" or (is_expected and last < LATER)):
            sign = "silent"
        if place in self.expected[1] and sign in ("stopped", "silent"):
            return ""
        gone_at = max(
            (
                one.deletes_at(now)
                for one in self.events.values()
                if one.group == place[0]
                and place[1] in one.names
                and not (is_expected and one.minutes < LATER)
            ),
            default=0.0,
        )
        if sign not in ("silent", "stopped") or not gone_at or gone_at < last - 5:
            return sign
        return "gone" if gone_at > now - 1440 else ""

    def is_current(self, one: Happened, now: float) -> bool:
        """Return whether an event is open and names a VM that is not known to be gone before the event."""
        is_late = one.kind in DELETING and max(one.last_at, one.minutes) <= now - 1440
        left = ("",) if one.kind in DELETING else ("", "gone")
        known = [self._watch((one.group, name), now) for name in one.names if (one.group, name) in self.lives]
        remains = len(known) < len(one.names) or any(watch not in left for watch in known)
        is_dismissed = one.name in self.dismissed
        return one.is_open and not is_late and remains and not is_dismissed

    def _due(self, one: Happened, now: float) -> str:
        if not self.is_current(one, now):
            hides = one.is_open and one.name in self.dismissed
            return "away" if hides else "left" if one.is_open else "ended"
        heard = max(self.heard.get((one.group, name), 0) for name in one.names)
        over_at = one.deletes_at(now)
        if over_at and heard <= over_at + 5:
            return "gone"
        if one.status == "Started":
            return "started"
        return "overdue" if one.minutes < now - 5 else "1h" if one.minutes < now + 60 else "later"

    def rows(self, now: float) -> dict[str, tuple[Any, ...]]:
        """Return what is expected of each event: status, due, VMs, and witnesses."""
        return {
            name: (one.status, self._due(one, now), list(one.names), one.witnesses)
            for name, one in self.events.items()
        }

    def statuses(self, now: float) -> dict[Place, tuple[str, str]]:
        """Return who watches each VM, and whether an event names it: "", Scheduled or Started."""
        order = ("overdue", "started", "1h", "later", "gone")
        found = {}
        for (group, name), watch in self.watches(now).items():
            named = [
                one
                for one in self.events.values()
                if one.group == group and name in one.names and self.is_current(one, now)
            ]
            # What is due within the hour comes before what is due later by its start.
            urgent = min(named, key=lambda one: (order.index(self._due(one, now)), one.minutes), default=None)
            found[group, name] = watch, urgent.status if urgent else ""
        return found


def found_in(seen: Shown, truth: Truth) -> tuple[dict[str, Any], dict[Any, str], dict[Any, int]]:
    events = {}
    for name in truth.events:
        row = seen.event(name)
        events[name] = (row.status, row.due, list(row.resources), (row.seen, row.seen_by_others))
    vms = {(vm.group.partition("/")[0], vm.name): vm for vm in seen.vms()}
    watches = {place: vm.watch for place, vm in vms.items()}
    return events, watches, {place: vm.missing for place, vm in vms.items() if vm.alive_at}


def listed(vm: FleetVm) -> dict[str, str]:
    place = f"/subscriptions/{vm.subscription}/resourceGroups/{vm.group}/providers/Microsoft.Compute/virtualMachines"
    return {"Name": vm.name, "ResourceId": f"{place}/{vm.name}", "ScaleSet": vm.scale_set}


def truth_of(seed: int) -> Truth:
    random = Random(seed)  # noqa: S311 - no secret
    truth = Truth(random)
    for number in range(random.randint(1, 4)):
        truth.add_group(number)
    truth.choose()
    return truth


def arrive(seen: Shown, truth: Truth) -> None:
    """Let the events arrive in a random order and grouping, some of them twice."""
    random = truth.random
    arriving = [*truth.bodies, *random.sample(truth.bodies, len(truth.bodies) // 4)]
    random.shuffle(arriving)
    while arriving:
        size = random.randint(1, 9)
        seen.add(*arriving[:size], at=after(LATER))
        del arriving[:size]
    now, (last, before) = seen.clock.wall(), truth.expected
    for places, at in ((before | set(random.sample(sorted(last), len(last) // 2)), now - 1), (last, now)):
        vms = json.dumps([listed(truth.vms[place]) for place in places]).encode()
        seen.store.add([read_expected(vms, now=at)], received_at=at)
    dismissals = [
        dismissed(seen.event(name), by="ana", now=now, why="scaled in", hours=168) for name in truth.dismissed
    ]
    wrong = now + random.choice([-3600, 0, 3600])  # by the clock that people put away
    undone = [one for one in truth.events if one not in truth.dismissed and random.random() < 0.3]
    both = [dismissed(seen.event(one), by="ben", now=now - 1, why="a slip", hours=168) for one in undone]
    seen.store.add([*dismissals, *both], received_at=wrong)
    with seen.store.reading() as store:
        found = [one for one in away(store) if one.by == "ben"]
    seen.store.add([act for one in found for act in restored(one, by="ben", now=now)], received_at=now)


def import_all(seen: Shown, truth: Truth, own: list[bytes]) -> None:
    """Make a store of all that arrived and of another console's export, in any order of files and commands."""
    random, faults = truth.random, list[str]()
    files = [(truth.bodies[at::3], False) for at in range(3)] + [(own, True)]
    random.shuffle(files)
    while files:
        given, files = files[:2], files[2:]  # of one command
        archives, owned = (
            [("", line) for lines, is_own in given if is_own == wanted for line in lines]
            for wanted in (False, True)
        )
        import_events(seen.store, archives, own=owned, now=seen.clock.wall(), tell=faults.append)
    assert not faults


@pytest.mark.parametrize("seed", range(FLEETS))
def test_a_random_fleet_is_shown_as_it_is_in_every_order_and_from_an_archive(
    tmp_path: Path, seed: int
) -> None:
    truth = truth_of(seed)
    own: list[bytes] = []
    for order in range(4):
        folder = tmp_path / str(order)
        folder.mkdir()
        with shown(folder, after(LATER)) as seen:
            if order < 3:
                arrive(seen, truth)
                own = [*export_own(folder / "console.db")]
            else:
                import_all(seen, truth, own)
            for now in (LATER, NEXT_DAY):
                seen.clock.advance(after(now).timestamp() - seen.clock.wall())
                events, watches, missing = found_in(seen, truth)
                assert events == truth.rows(now)
                assert watches == truth.watches(now)
                assert missing == {place: truth.missing[place] for place in watches if place in truth.lives}
            assert seen.sql("SELECT count(*) FROM vm JOIN leaving USING (id) WHERE left_at <> at") == 0


def numbers(pattern: str, page: str) -> Iterator[tuple[str, int]]:
    """Yield the address and the number of each link that a pattern finds."""
    for address, number in re.findall(pattern, page):
        yield address.replace("&amp;", "&"), int(number)


def rows_of(seen: Shown, address: str, *, ended: bool = True) -> list[str]:
    """Return the rows of the events in the tables of a page; those of a wave are on the wave's page."""
    tables = seen.page(address).partition('aria-labelledby="open"')[2]
    found = (tables if ended else tables.partition('<h2 id="ended">')[0]).split("<tr")[1:]
    rows = [row.partition("</tr>")[0] for row in found if '<td class="what">' in row]
    waves = [unescape(one) for row in rows for one in re.findall(r'<a href="(/\?[^"]*wave=[^"]+)"', row)]
    alone = [row for row in rows if "wave=" not in row]
    return alone + [row for wave in waves for row in rows_of(seen, wave, ended=ended)]


@pytest.mark.parametrize("seed", range(FLEETS))
def test_now_event_fleet_legend_api_and_metric_agree_under_every_filter(tmp_path: Path, seed: int) -> None:
    truth = truth_of(seed)
    wanted = truth.random.choice(["", "vm=vm-1", "vm=never", "group=g0&group=g0/workers", "group=none"])
    now = truth.random.choice([LATER, NEXT_DAY])
    with shown(tmp_path, after(LATER)) as seen:
        arrive(seen, truth)
        seen.clock.advance(after(now).timestamp() - seen.clock.wall())
        every = truth.statuses(now)
        part = re.search("(?:vm|group)=([^&]*)", wanted)
        chosen = {
            place: status
            for place, status in every.items()
            if not part or (part[1] in place[1] if "vm=" in wanted else part[1] == place[0])
        }
        counted = Counter(state for status in chosen.values() for state in status if state)
        unwatched = sum(counted[state] for state in UNWATCHED)
        front, grid, vms, metrics, events = seen.ask(
            f"/?{wanted}", f"/fleet?{wanted}", f"/api/v1/vms?{wanted}", "/metrics", "/api/v1/events"
        )
        listed = {(vm["group"].partition("/")[0], vm["name"]): vm["watch"] for vm in vms.json()["vms"]}
        assert listed == {place: watch for place, (watch, _) in chosen.items()}
        # The metric is that of the whole fleet.
        watches = Counter(watch for watch, _ in every.values())
        for state in WATCHES:
            assert f'console_vms{{state="{state}"}} {float(watches[state])}\n' in metrics.text
        # Each number of the legend is the expected one, and as many VMs as its link shows.
        legend = {
            address.rpartition("status=")[2]: (address, number)
            for address, number in numbers(
                r'<li><a href="(/fleet[^"]+)"><span class="swatch[^>]+></span>(\d+)', grid.text
            )
        }
        assert {state: number for state, (_, number) in legend.items()} == counted
        for address, number in legend.values():
            assert seen.page(address).count('class="cell ') == number
        headline = f"; {unwatched} VM{'s' * (unwatched != 1)} not watched"
        for page in (front, grid):
            assert (headline in page.text.partition("</h1>")[0]) == bool(unwatched)
        tiles = (
            dict(numbers(r'<li><a class="[a-z]*" href="([^"]+)"><strong>(\d+)', front.text)) if every else {}
        )
        for address, number in tiles.items():
            cells = seen.page(address).count('class="cell ')
            lines = rows_of(seen, address, ended=False)
            assert (cells if "/fleet" in address else len(lines)) == number, address
        # Who has seen an event.
        by_id = {one["event_id"].lower(): one for one in events.json()["events"]}
        current = {name: one for name, one in truth.events.items() if truth.is_current(one, now)}
        assert by_id.keys() == {event_id(name).lower() for name in current}
        rows = rows_of(seen, "/")
        for name, one in current.items():
            key = event_id(name).lower()
            seen_by, others = one.witnesses
            assert (by_id[key]["seen"], by_id[key]["seen_by_others"]) == (seen_by, others)
            story = seen.page(f"/event/{quote(key)}")
            assert f"Seen by {seen_by} of {len(one.names)} VM" in story
            assert (f"Also seen by {others} of" in story) == bool(others) == ("up to an hour later" in story)
            part_seen = story.partition('id="part-seen"')[2].partition("</section>")[0]
            assert part_seen.count('<b class="warntext">not seen') >= len(one.names) - seen_by
            row = next(row for row in rows if f'/event/{key}"' in row)
            exception = f"seen by {seen_by} of {len(one.names)}</span>"
            assert (exception in row) == (seen_by < len(one.names))
