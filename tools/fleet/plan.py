"""What happens in the storm: which VM gets which event when, and which VMs are killed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

GROUPS = ("web", "db", "batch", "spot")
STORM_SECONDS = 10.0
# The types with the shortest notice that Azure gives, in seconds.
NOTICE_SECONDS = {"Freeze": 900, "Reboot": 900, "Redeploy": 600, "Terminate": 300, "Preempt": 30}
APPROVED_TYPE = "Reboot"
SHARED_VMS = 10  # that one event of a whole group names


@dataclass(frozen=True, kw_only=True)
class FleetVm:
    """A VM of the fleet; `listens` if it runs a listener beside its forwarder."""

    name: str
    group: str
    listens: bool

    @property
    def session(self) -> str:
        """Return the session of its commands."""
        return f"{self.group}.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event that appears `at` seconds after the storm begins.

    Attributes:
        vms: whose documents show it.
        resources: whom it names.
    """

    at: float
    event_id: str
    event_type: str
    vms: tuple[FleetVm, ...]
    resources: tuple[str, ...]
    is_approved: bool

    @property
    def notice_seconds(self) -> int:
        """Return the time until NotBefore."""
        return NOTICE_SECONDS[self.event_type]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The storm: one event for each VM, one for each group, and the kills, all in seconds after it begins."""

    vms: tuple[FleetVm, ...]
    notices: tuple[Notice, ...]
    kills: tuple[tuple[float, FleetVm], ...]


def plan(vm_count: int, listener_count: int, seed: int) -> Plan:
    """Plan a storm, the same for the same arguments; VMs and listeners are spread evenly over the groups."""
    rng = random.Random(seed)  # noqa: S311 - it shall be repeatable
    vms = tuple(
        FleetVm(
            name=f"{GROUPS[number % len(GROUPS)]}-{number // len(GROUPS):03}",
            group=GROUPS[number % len(GROUPS)],
            listens=number < listener_count,
        )
        for number in range(vm_count)
    )
    own = [_own_notice(rng, vm) for vm in vms]
    groups = [tuple(vm for vm in vms if vm.group == group) for group in GROUPS]
    shared = [_shared_notice(rng, group) for group in groups if group]
    killed = rng.sample(vms, len(vms) // 3)
    return Plan(
        vms=vms,
        notices=tuple(sorted([*own, *shared], key=lambda one: one.at)),
        kills=tuple(sorted(((_instant(rng), vm) for vm in killed), key=lambda kill: kill[0])),
    )


def _own_notice(rng: random.Random, vm: FleetVm) -> Notice:
    event_type = APPROVED_TYPE if vm.listens else rng.choice([*NOTICE_SECONDS])
    return Notice(
        at=_instant(rng),
        event_id=_event_id(rng),
        event_type=event_type,
        vms=(vm,),
        resources=(vm.name,),
        is_approved=vm.listens,
    )


def _shared_notice(rng: random.Random, group: Sequence[FleetVm]) -> Notice:
    return Notice(
        at=_instant(rng),
        event_id=_event_id(rng),
        event_type="Freeze",
        vms=tuple(group),
        resources=tuple(vm.name for vm in group[:SHARED_VMS]),
        is_approved=False,
    )


def _instant(rng: random.Random) -> float:
    return rng.uniform(0, STORM_SECONDS)


def _event_id(rng: random.Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4)).upper()
