"""The plan of faults follows from the seed alone."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.soak.plan import WARM_UP_SECONDS, Fault, Lane, plan

LANES = {
    "imds": Lane(kinds=("500", "drop", "slow")),
    "bus": Lane(kinds=("outage", "stall"), fail_seconds=(2, 3), rest_seconds=(1, 2)),
}
SECONDS = 600.0


def of(target: str, seed: int = 1) -> list[Fault]:
    return [fault for fault in plan(seed, SECONDS, LANES) if fault.target == target]


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert plan(1, SECONDS, LANES) == plan(1, SECONDS, LANES) != plan(2, SECONDS, LANES)


def test_a_further_target_changes_nothing_for_the_others() -> None:
    assert [one for one in plan(1, SECONDS, {**LANES, "disk": LANES["bus"]}) if one.target == "imds"] == of(
        "imds"
    )


@pytest.mark.parametrize("target", LANES)
def test_a_target_has_one_fault_at_a_time_and_rests_between_two(target: str) -> None:
    lane = LANES[target]
    assert all(then.start - last.end >= lane.rest_seconds[0] for last, then in pairwise(of(target)))


@pytest.mark.parametrize("target", LANES)
def test_faults_last_as_long_as_they_may_and_end_in_time(target: str) -> None:
    shortest, longest = LANES[target].fail_seconds
    for fault in of(target):
        assert shortest <= round(fault.end - fault.start, 6) <= longest
        assert WARM_UP_SECONDS <= fault.start < fault.end <= SECONDS
        assert 0 <= fault.size < 1


@pytest.mark.parametrize("target", LANES)
def test_every_kind_comes_before_one_comes_again(target: str) -> None:
    kinds = LANES[target].kinds
    assert {fault.kind for fault in of(target)[: len(kinds)]} == {*kinds}


def test_a_time_that_is_too_short_for_a_fault_has_none() -> None:
    assert plan(1, WARM_UP_SECONDS, LANES) == []
