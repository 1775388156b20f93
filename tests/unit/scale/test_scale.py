"""The page's calculation of 10,000 VMs: its tables, its formulas, and the simulation behind them."""

from __future__ import annotations

from bridge.service.holding import HOLD_SECONDS
from tests.support.paths import ROOT
from tools.scale.simulation import Fleet, simulate
from tools.scale.tables import FLEETS, Month, standard_price, tables


def test_the_tables_of_the_page_are_those_that_the_script_makes() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert [table for table in tables() if f"\n\n{table}\n\n" not in page] == []


def test_the_formulas_of_the_page_are_those_of_the_tables() -> None:
    n, p, e, c, g, s = 10_000, 2, 15_000, 3, 100, 2
    for month, d, senders in zip(FLEETS.values(), (g, 1, 1), (g, g, 1), strict=True):
        assert month.sent == n * p * 730 + e * c * (d + senders)
        assert month.kept == n * p * 730 + e * c * (d + 1)
        assert month.operations == month.sent + 2 * s * month.kept
        assert month.credits == (1 + d) * (1 + 2 * s) + senders - 1
    assert standard_price(13_000_000) == 9.81
    assert round(standard_price(150_000_000), 2) == round(9.81 + 87 * 0.80 + 50 * 0.50, 2)
    assert Month().credits == 109


def test_a_fleet_whose_vms_do_not_send_copies_stays_within_the_reserve_and_nothing_is_refused() -> None:
    alone = simulate(Fleet(scope="self"))
    assert (alone.is_within_reserve, alone.throttled, alone.refused) == (True, 0, 0)
    assert len(alone.notice_seconds) == 500
    assert alone.notice[2] < 5


def test_a_simulated_namespace_never_exceeds_its_limits_and_gets_everything_in_the_end() -> None:
    seen = simulate(Fleet(), spread_seconds=1.0)
    assert (seen.peak_credits, seen.connections) == (1_000, 5_000)
    assert min(seen.throttled, seen.refused) > 0
    assert len(seen.notice_seconds) == 500


def test_a_fleet_that_holds_copies_stays_within_the_reserve_and_delays_no_named_vm() -> None:
    held = simulate(Fleet(hold_seconds=HOLD_SECONDS))
    assert (held.is_within_reserve, held.throttled, held.refused) == (True, 0, 0)
    assert held.notice[2] < 5


def test_neither_no_hold_nor_one_of_a_minute_would_be_enough() -> None:
    assert not simulate(Fleet()).is_within_reserve
    assert not simulate(Fleet(hold_seconds=60.0)).is_within_reserve
