"""Which faults come when: a pure function of the seed and the duration."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

IMDS_KINDS = (
    "500",
    "429",
    "404",
    "410",
    "drop",
    "timeout",
    "slow",
    "garbage",
    "empty",
    "huge",
    "lost_answer",
)
HTTP_KINDS = ("503", "429", "500", "drop", "timeout", "slow", "lost_answer")
BUS_KINDS = (
    *("outage", "stall", "drop", "detach", "busy", "silent", "refuse_cbs", "unauthorized", "disabled"),
    *("no_credit", "drop_before_store", "drop_after_store", "drop_before_settle", "drop_after_settle"),
)
WARM_UP_SECONDS = 12.0


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What may fail in `kinds` of ways: for how long, and how long it then works; one fault at a time."""

    kinds: tuple[str, ...]
    fail_seconds: tuple[float, float] = (1.0, 15.0)
    rest_seconds: tuple[float, float] = (4.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of `target`, from `start` to `end` in seconds; `size`, from 0 to 1, chooses its details."""

    target: str
    kind: str
    start: float
    end: float
    size: float


def plan(seed: int, seconds: float, lanes: Mapping[str, Lane]) -> list[Fault]:
    """Return the faults of all lanes in the order of their start.

    Args:
        seed: chooses everything; each lane draws on its own, so that one more changes no other.
        seconds: how long there are changes; every fault ends before.
        lanes: what may fail, by target.
    """
    faults = [fault for target, lane in lanes.items() for fault in _lane(seed, seconds, target, lane)]
    return sorted(faults, key=lambda fault: (fault.start, fault.target))


def _lane(seed: int, seconds: float, target: str, lane: Lane) -> list[Fault]:
    rng = random.Random(f"{seed} {target}")  # noqa: S311 - it shall be repeatable
    faults: list[Fault] = []
    waiting: list[str] = []
    start = WARM_UP_SECONDS + rng.uniform(0.0, lane.rest_seconds[1])
    while (end := start + rng.uniform(*lane.fail_seconds)) <= seconds:
        # Every kind comes once before one comes again.
        waiting = waiting or rng.sample(lane.kinds, len(lane.kinds))
        fault = Fault(target=target, kind=waiting.pop(), start=start, end=end, size=rng.random())
        faults.append(fault)
        start = end + rng.uniform(*lane.rest_seconds)
    return faults
