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
from bridge.console.rows import DAY, PREPARATIONS, WATCHES, VmRow
from bridge.console.state import State
from bridge.formats.text import format_duration, plural
from bridge.runtime.text import sanitize

# The three states of a VM; each has a sign of its own: the colour, a mark, and the border.
AXES = (
    ("Event", ("Started", "Scheduled")),
    ("Prepared", (*PREPARATIONS, "outofwork")),
    ("Watched", WATCHES),
)
STATES = ("Started", "Scheduled", *PREPARATIONS, *WATCHES)
_KEPT_CELLS = 20_000
_IN_WORDS = {"waiting": "to be prepared", "failed": "failed to prepare"}


@dataclass(frozen=True, kw_only=True)
class Group:
    """The VMs of one group and zone, with the states that are not `watched` and the versions of imds-bridge."""

    vms: tuple[VmRow, ...]
    states: tuple[tuple[str, int], ...]
    versions: tuple[tuple[str, int], ...]


def groups(vms: Iterable[VmRow]) -> list[Group]:
    """Arrange VMs that are in the order of their groups."""
    found = groupby(vms, key=lambda vm: (vm.group, vm.scope, vm.zone, vm.location))
    return [_group([*some]) for _, some in found]


def _group(vms: list[VmRow]) -> Group:
    counts = Counter(state for vm in vms for state in (vm.event, vm.watch, vm.preparation))
    versions = Counter(vm.version for vm in vms if vm.version)
    return Group(
        vms=tuple(vms),
        states=tuple((state, counts[state]) for state in STATES if counts[state] and state != "watched"),
        versions=tuple((sanitize(version, 40), count) for version, count in versions.most_common()),
    )


def describe(vm: VmRow, now: float, *, is_away: bool = False) -> str:
    """Return the state of a VM in words: its event, and since when nobody watches it.

    `is_away`: an event that was put away names it and is still to come.
    """
    watch = vm.describe_watch(now)
    named = [_describe_event(vm, now), _IN_WORDS.get(vm.preparation, vm.preparation)]
    parts = [*(named if vm.event else ["no event" * (not (watch or is_away))]), watch]
    parts += [f"{plural(vm.waiting, 'event')} waiting"] * bool(vm.waiting)
    parts += [f"{vm.missing} missing"] * bool(vm.missing)
    parts += ["event put away"] * is_away
    parts += ["two forwarders at once"] * (now - (vm.doubled_at or 0.0) < DAY)
    return ", ".join(filter(None, parts))


def _describe_event(vm: VmRow, now: float) -> str:
    kind, state = sanitize(vm.event_type, 40) or "event", State(vm.due, vm.event_status, vm.starts_at)
    if state.is_running:
        return f"{kind} now"
    if state.is_overdue or state.is_over:
        return f"{kind} {'overdue' if state.is_overdue else 'is over'}"
    if vm.starts_at is None:
        return kind
    return f"{kind} in {format_duration(vm.starts_at - now)}" if vm.starts_at > now else f"{kind} due"


def cell(vm: VmRow, now: float, query: str = "", *, is_away: bool = False) -> Markup:
    """Return a cell's HTML; `query` is the end of its link, `is_away` as of `describe`."""
    css = f"{css_class(vm.event_type)} {vm.watch} {vm.event} {vm.preparation}" if vm.event else vm.watch
    address = f"/event/{quote(vm.event_id.lower(), safe='')}{query}" if vm.event_id else ""
    return _cell_html(vm.name, css, describe(vm, now, is_away=is_away), address)


@lru_cache(maxsize=_KEPT_CELLS)
def _cell_html(name: str, css: str, note: str, address: str) -> Markup:
    """Most cells of a large fleet stay as they are."""
    text = Markup("{}<small>{}</small>").format(sanitize(name, 64), note)
    if not address:
        return Markup('<li class="cell {}">{}</li>').format(css, text)
    return Markup('<li><a class="cell {}" href="{}">{}</a></li>').format(css, address, text)
