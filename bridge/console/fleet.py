"""The page Fleet: one cell for each VM, by group and zone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from bridge.console.now import css_class, starts_at, urgency
from bridge.console.queries import EventRow, VmRow
from bridge.formats.text import format_duration, sanitize
from bridge.imds.document import fold_name

SILENT_SECONDS = 3900.0  # a heartbeat comes every hour; five minutes more are for the way
STATES = ("Started", "Scheduled", "unreachable", "silent", "stopped", "unknown", "quiet")
_NAME_LENGTH = 64
_KEPT_NAMES = 20_000
_Section = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One VM.

    Attributes:
        vm: what it reported; None for one that others name and that has never reported.
        name: of the VM.
        state: one of STATES.
        css: its style.
        note: the state in words.
        event: the most urgent event of the VM.
    """

    vm: VmRow | None
    name: str
    state: str
    css: str
    note: str
    event: EventRow | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The VMs of one group and zone.

    Attributes:
        name: of the group.
        subscription: its first characters, as groups of several subscriptions can share a name.
        zone: "" if there is none.
        location: the region.
        cells: its VMs.
        states: the states that are not quiet, with the number of VMs in each.
        versions: of imds-bridge, with the number of VMs that have each.
        backlog: events that wait for delivery on these VMs.
        gaps: events of these VMs that were published and have not arrived.
    """

    name: str
    subscription: str
    zone: str
    location: str
    cells: tuple[Cell, ...]
    states: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, int], ...]
    backlog: int
    gaps: int


def fleet(vms: Sequence[VmRow], events: Sequence[EventRow], now: float) -> list[Group]:
    """Arrange every VM by group and zone.

    Args:
        vms: that have reported.
        events: the open ones.
        now: seconds since 1970.
    """
    by_vm = _events_by_vm(events)
    placed: list[tuple[_Section, Cell]] = []
    sections: dict[str, _Section] = {}
    for vm in vms:
        section = (vm.group_name, vm.scope, vm.zone, vm.location)
        sections.setdefault(vm.scope, section)
        placed.append((section, _cell(vm, by_vm.pop(_place(vm), None), now)))
    for (scope, name), event in by_vm.items():
        section = sections.get(scope, (event.group_name, scope, "", ""))
        placed.append((section, _unknown_cell(name, event)))
    placed.sort(key=lambda one: (one[0], _natural(one[1].name)))
    return [
        _group(key, [cell for _, cell in found]) for key, found in groupby(placed, key=lambda one: one[0])
    ]


def count_states(vms: Iterable[VmRow], events: Iterable[EventRow], now: float) -> Counter[str]:
    """Return how many VMs are in each state that the cells show, without making the cells."""
    by_vm = _events_by_vm(events)
    counts: Counter[str] = Counter()
    for vm in vms:
        event = by_vm.pop(_place(vm), None)
        counts[_event_state(event) if event else state_of(vm, now)[0]] += 1
    return counts + Counter(unknown=len(by_vm))


def only_state(groups: Iterable[Group], state: str) -> list[Group]:
    """Leave out the VMs that are in another state; `silent` includes `stopped`."""
    wanted = {state, "stopped"} if state == "silent" else {state}
    kept = (
        _group(
            (group.name, "", group.zone, group.location),
            [cell for cell in group.cells if cell.state in wanted],
        )
        for group in groups
    )
    return [group for group in kept if group.cells]


def state_of(vm: VmRow, now: float) -> tuple[str, str]:
    """Return the state of a VM without events, and since when in words."""
    age = now - vm.alive_at
    if vm.is_stopped and vm.alive_at <= vm.heartbeat_at:
        return "stopped", f"stopped {format_duration(age)}"
    if age > SILENT_SECONDS:
        return "silent", f"silent {format_duration(age)}"
    if vm.unreachable_since is not None:
        return "unreachable", f"no IMDS {format_duration(now - vm.unreachable_since)}"
    return "quiet", "quiet"


def unwatched(vms: Iterable[VmRow], now: float) -> list[tuple[VmRow, str, str]]:
    """Return the VMs on which events may be missed, with the state and its words, the last heard of first."""
    found = [
        (vm, *state_of(vm, now))
        for vm in vms
        if now - vm.alive_at > SILENT_SECONDS or vm.is_stopped or vm.unreachable_since is not None
    ]
    return sorted((one for one in found if one[1] != "quiet"), key=lambda one: -one[0].alive_at)


def _events_by_vm(events: Iterable[EventRow]) -> dict[tuple[str, str], EventRow]:
    """Return the most urgent event of each VM that an event names."""
    found: dict[tuple[str, str], EventRow] = {}
    for event in events:
        for name in event.resources:
            place = (event.scope, fold_name(name))
            if place not in found or urgency(event) < urgency(found[place]):
                found[place] = event
    return found


def _place(vm: VmRow) -> tuple[str, str]:
    return vm.scope, fold_name(vm.name)


def _cell(vm: VmRow, event: EventRow | None, now: float) -> Cell:
    state, note = state_of(vm, now)
    css = state
    if event:
        # A VM that is silent stays so in words, whatever happens to it.
        note = _event_note(event, now) + (f", {note}" if state != "quiet" else "")
        css = f"{css_class(event.event_type)} {state}"
        state = _event_state(event)
        css += " Started" if state == "Started" else ""
    if vm.backlog:
        note += f", {vm.backlog} waiting"
    if vm.gaps:
        note += f", {vm.gaps} missing"
    return Cell(vm=vm, name=_shown(vm.name), state=state, css=css, note=note, event=event)


def _unknown_cell(name: str, event: EventRow) -> Cell:
    return Cell(
        vm=None,
        name=sanitize(name, _NAME_LENGTH),
        state="unknown",
        css="unknown",
        note="never reported",
        event=event,
    )


def _event_state(event: EventRow) -> str:
    return "Started" if event.status == "Started" else "Scheduled"


def _event_note(event: EventRow, now: float) -> str:
    kind = sanitize(event.event_type, 40) or "event"
    if event.status == "Started":
        return f"{kind} now"
    start = starts_at(event)
    if start is None:
        return kind
    return f"{kind} in {format_duration(start - now)}" if start > now else f"{kind} due"


def _group(key: tuple[str, str, str, str], cells: list[Cell]) -> Group:
    name, scope, zone, location = key
    known = [cell.vm for cell in cells if cell.vm]
    versions = Counter(vm.version for vm in known if vm.version)
    counts = Counter(cell.state for cell in cells)
    return Group(
        name=sanitize(name, 90) or "no group",
        subscription=scope.removeprefix("/subscriptions/").partition("/")[0][:8],
        zone=sanitize(zone, 20),
        location=sanitize(location, 40),
        cells=tuple(cells),
        states=tuple((state, counts[state]) for state in STATES[:-1] if counts[state]),
        versions=tuple((sanitize(version, 40), count) for version, count in versions.most_common(3)),
        backlog=sum(vm.backlog for vm in known),
        gaps=sum(vm.gaps for vm in known),
    )


@lru_cache(maxsize=_KEPT_NAMES)
def _shown(name: str) -> str:
    return sanitize(name, _NAME_LENGTH)


@lru_cache(maxsize=_KEPT_NAMES)
def _natural(name: str) -> tuple[str, int, str]:
    """Return a key that sorts web-9 before web-10."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :]
    return stem, int(digits[:18] or 0), name


def summary(groups: Sequence[Group]) -> Mapping[str, int]:
    """Return the figures of the whole fleet."""
    return {
        "vms": sum(cell.vm is not None for group in groups for cell in group.cells),
        "backlog": sum(group.backlog for group in groups),
        "gaps": sum(group.gaps for group in groups),
        **Counter(cell.state for group in groups for cell in group.cells),
    }


def rows(groups: Iterable[Group]) -> Iterator[tuple[Group, Cell]]:
    """Yield every VM with its group, for a table."""
    for group in groups:
        for cell in group.cells:
            yield group, cell
