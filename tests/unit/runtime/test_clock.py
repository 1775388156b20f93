"""The clock: what counts as a jump of the wall clock, and what does not."""

from __future__ import annotations

import time

import pytest

from bridge.runtime import clock as clock_module
from bridge.runtime.clock import Clock, full_jitter
from tests.support.clock import MovedClock


@pytest.mark.parametrize("seconds", [60.0, 61.0, 300.0, 600.0, 86_400.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_jump_of_a_minute_or_more_is_noticed_once_and_ages_never_follow_it(
    seconds: float, sign: int
) -> None:
    clock = MovedClock()
    before = clock.steady()
    for _ in range(3):
        clock.jump(sign * seconds)
        assert clock.jump_seconds() == pytest.approx(sign * seconds)
        assert clock.jump_seconds() == pytest.approx(0)
        assert clock.steady() == pytest.approx(before)


def test_a_drift_is_followed_after_a_jump_as_well() -> None:
    clock = MovedClock()
    clock.jump(3600)
    clock.jump_seconds()
    clock.jump(30)
    assert clock.jump_seconds() == 0
    assert clock.wall() - clock.steady() == pytest.approx(3600)


@pytest.mark.parametrize("seconds", [0.0, 1.0, 59.0, -59.0])
def test_a_change_of_less_than_a_minute_is_followed_silently(seconds: float) -> None:
    clock = MovedClock()
    clock.jump(seconds)
    assert clock.jump_seconds() == 0
    assert clock.steady() == pytest.approx(clock.wall())


def test_a_clock_that_drifts_slowly_never_jumps() -> None:
    clock = MovedClock()
    for _ in range(60):
        clock.advance(3600)
        clock.jump(30)
        assert clock.jump_seconds() == 0
    assert clock.steady() == pytest.approx(clock.wall())


def test_a_wait_with_full_jitter_is_anywhere_below_its_limit() -> None:
    for attempt, limit in ((0, 0.5), (3, 4.0), (9, 60.0), (10_000, 60.0)):
        drawn = [full_jitter(attempt, base_seconds=0.5, limit_seconds=60) for _ in range(500)]
        assert min(drawn) < limit / 10
        assert limit * 0.9 < max(drawn) <= limit


@pytest.mark.skipif(
    not hasattr(time, "CLOCK_BOOTTIME"), reason="only Linux counts the time of a suspended machine"
)
def test_the_time_of_a_suspended_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    before = clock.monotonic()
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600
    monkeypatch.setattr(clock_module, "_clock_gettime", {time.CLOCK_BOOTTIME: slept}.__getitem__)
    assert clock.monotonic() - before >= 3600
