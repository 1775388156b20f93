"""The page Fleet: one cell for each VM, by group and zone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from urllib.parse import quote

from markupsafe import Markup

from bridge.console.now import css_class
from bridge.console.rows import VmRow
from bridge.formats.text import format_duration, sanitize

STATES = ("Started", "Scheduled", "unreachable", "silent", "stopped", "unknown", "quiet")
_KEPT_CELLS = 20_000


@dataclass(frozen=True, kw_only=True)
class Group:
    """The VMs of one group and zone, with the states that are not quiet and the versions of imds-bridge."""

    name: str
    subscription: str
    zone: str
    location: str
    vms: tuple[VmRow, ...]
    states: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, int], ...]


def groups(vms: Iterable[VmRow]) -> list[Group]:
    """Arrange VMs that are in the order of their groups."""
    found = groupby(vms, key=lambda vm: (vm.group, vm.scope, vm.zone, vm.location))
    return [_group([*some]) for _, some in found]


def count_states(vms: Iterable[VmRow]) -> Counter[str]:
    """Count VMs by their state."""
    return Counter(vm.state for vm in vms)


def _group(vms: list[VmRow]) -> Group:
    counts = count_states(vms)
    versions = Counter(vm.version for vm in vms if vm.version)
    return Group(
        name=sanitize(vms[0].group, 90) or "no group",
        subscription=vms[0].subscription,
        zone=sanitize(vms[0].zone, 20),
        location=sanitize(vms[0].location, 40),
        vms=tuple(vms),
        states=tuple((state, counts[state]) for state in STATES[:-1] if counts[state]),
        versions=tuple((sanitize(version, 40), count) for version, count in versions.most_common(3)),
    )


def describe(vm: VmRow, now: float) -> str:
    """Return the state of a VM in words: its event, and since when nobody watches it."""
    watch = vm.describe_watch(now)
    has_event = vm.event_id is not None and vm.watch != "unknown"
    parts = [_describe_event(vm, now), watch] if has_event else [watch or "quiet"]
    parts += [f"{vm.waiting} waiting"] * bool(vm.waiting) + [f"{vm.missing} missing"] * bool(vm.missing)
    return ", ".join(filter(None, parts))


def _describe_event(vm: VmRow, now: float) -> str:
    kind = sanitize(vm.event_type, 40) or "event"
    if vm.due == "started":
        return f"{kind} now"
    if vm.due == "overdue":
        return f"{kind} overdue"
    if vm.starts_at is None:
        return kind
    return f"{kind} in {format_duration(vm.starts_at - now)}" if vm.starts_at > now else f"{kind} due"


def cell(vm: VmRow, now: float) -> Markup:
    """Return a cell's HTML."""
    css = vm.watch if vm.watch != "watched" else "quiet"
    if vm.event_id is not None and vm.watch != "unknown":
        css = f"{css_class(vm.event_type)} {css}{' Started' * (vm.event_status == 'Started')}"
    return _cell_html(vm.name, css, describe(vm, now), vm.event_id or "")


@lru_cache(maxsize=_KEPT_CELLS)
def _cell_html(name: str, css: str, note: str, event_id: str) -> Markup:
    """Most cells of a large fleet stay as they are."""
    text = Markup("{}<small>{}</small>").format(sanitize(name, 64), note)
    if not event_id:
        return Markup('<li class="cell {}">{}</li>').format(css, text)
    address = f"/event/{quote(event_id.lower(), safe='')}"
    return Markup('<li><a class="cell {}" href="{}">{}</a></li>').format(css, address, text)
