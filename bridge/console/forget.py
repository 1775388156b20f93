"""Put VMs away that are silent or stopped, until they publish again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from bridge.console import rows
from bridge.console.received import FORGOTTEN, Received, hash_text, own_event
from bridge.console.rows import Filter, VmRow, Where


def forgettable(store: sqlite3.Connection, wanted: Filter) -> list[VmRow]:
    """Return the VMs of a filter that may be put away: others are watched, or leave the lists on their own."""
    return rows.vms(store, wanted.of_vms() & Where("watch IN ('silent', 'stopped')", ()))


def digest(vms: Sequence[VmRow]) -> str:
    """Return what identifies the VMs of a form, so that no others are put away."""
    return str(hash_text(repr([(vm.scope, vm.folded, vm.alive_at) for vm in vms])))


def forgotten(vms: Iterable[VmRow], *, by: str, now: float) -> list[Received]:
    """Return the events that put VMs away; they are kept in the store, and nobody else may send them.

    Args:
        vms: that have reported.
        by: the person.
        now: seconds since 1970.
    """
    of_vms = [{"Name": vm.name, "ResourceId": vm.resource_id} for vm in vms]
    return [own_event(FORGOTTEN, {"Vm": vm, "Reason": f"Forgotten by {by}"}, now=now) for vm in of_vms]
