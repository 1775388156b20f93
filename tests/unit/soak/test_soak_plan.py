"""The plan of faults follows from the seed alone, and has every fault."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tools.soak.plan import WARM_UP_SECONDS, Lane, plan

LANES = {
    "imds": Lane(kinds=("500", "drop", "slow")),
    "bus": Lane(kinds=("outage", "stall"), fail_seconds=(2, 3), rest_seconds=(1, 2)),
}
SECONDS = 600.0


def test_a_seed_gives_the_same_faults_again_and_another_seed_others() -> None:
    assert plan(1, SECONDS, LANES) == plan(1, SECONDS, LANES) != plan(2, SECONDS, LANES)


@pytest.mark.parametrize("target", LANES)
def test_every_kind_comes_one_at_a_time_and_ends_before_the_checks(target: str) -> None:
    lane, faults = LANES[target], [one for one in plan(1, SECONDS, LANES) if one.target == target]
    assert {fault.kind for fault in faults[: len(lane.kinds)]} == {*lane.kinds}
    assert all(then.start - last.end >= lane.rest_seconds[0] for last, then in pairwise(faults))
    assert all(WARM_UP_SECONDS <= fault.start < fault.end <= SECONDS for fault in faults)
