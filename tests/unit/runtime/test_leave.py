"""The program of a rule with `leave_seconds`."""

from __future__ import annotations

import runpy

import pytest


@pytest.mark.parametrize(("leave", "left", "slept"), [("20", "50", 20), ("60", "28", 26), ("0.5", "1", 0)])
def test_a_vm_is_prepared_before_an_event_of_short_notice_starts(
    leave: str, left: str, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["leave", leave])
    monkeypatch.setenv("IMDS_BRIDGE_SECONDS_LEFT", left)
    sleeps = list[float]()
    monkeypatch.setattr("time.sleep", sleeps.append)
    runpy.run_module("bridge.runtime.leave")
    assert sleeps == [slept]
