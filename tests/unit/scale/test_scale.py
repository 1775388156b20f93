"""That the simulation behind the page's tables of 10,000 VMs runs; `python -m tools.scale` writes the tables."""

from __future__ import annotations

from tools.scale.simulation import Fleet, simulate


def test_a_small_fleet_that_holds_copies_announces_every_event_within_the_reserve() -> None:
    held = simulate(Fleet(vms=200, events=10, hold_seconds=150.0))
    assert (held.is_within_reserve, held.throttled, held.refused) == (True, 0, 0)
    assert len(held.notice_seconds) == 10
