"""Put VMs away that are silent or stopped, and events that nobody ends, until something new is heard of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from bridge.console import rows
from bridge.console.received import DISMISSED, FORGOTTEN, MAX_TEXT, Received, hash_text, own_event
from bridge.console.rows import EventRow, Filter, VmRow, Where


@dataclass(frozen=True, kw_only=True)
class PutAway:
    """What a program puts away: an event, VMs that are silent or stopped, or both."""

    EventId: Annotated[str, Field(max_length=MAX_TEXT)] = ""
    ResourceIds: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    Reason: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]


ORDER = TypeAdapter(PutAway)


def forgettable(store: sqlite3.Connection, wanted: Filter) -> list[VmRow]:
    """Return the VMs of a filter that may be put away: others are watched, or leave the lists on their own."""
    return rows.vms(store, wanted.of_vms() & Where("watch IN ('silent', 'stopped')", ()))


def digest(vms: Sequence[VmRow]) -> str:
    """Return what identifies the VMs of a form, so that no others are put away."""
    return str(hash_text(repr([(vm.scope, vm.folded, vm.alive_at) for vm in vms])))


def forgotten(vms: Iterable[VmRow], *, by: str, now: float, why: str = "") -> list[Received]:
    """Return the events that put VMs away; they are kept in the store, and nobody else may send them.

    Args:
        vms: that have reported.
        by: the person or program.
        now: seconds since 1970.
        why: a comment.
    """
    reason = f"Forgotten by {by}" + (f": {why}" if why else "")
    of_vms = [{"Name": vm.name, "ResourceId": vm.resource_id} for vm in vms]
    return [own_event(FORGOTTEN, {"Vm": vm, "Reason": reason}, now=now) for vm in of_vms]


def dismissed(event: EventRow, *, by: str, now: float, why: str) -> Received:
    """Return the event that puts another away; arguments as of `forgotten`."""
    return own_event(DISMISSED, {"EventId": event.event_id, "By": by, "Reason": why}, now=now)
