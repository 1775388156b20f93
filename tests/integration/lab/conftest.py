"""The lab's time in the hands of a test."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest


class Passing(threading.Event):
    """A stop that is never set: waiting for it moves the lab's clock instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = self.began = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=self.time)
        for module in ("imds", "scenario", "timetable"):
            monkeypatch.setattr(f"bridge.lab.{module}.time", clock)

    def time(self) -> float:
        """Return the lab's time in seconds since 1970."""
        return 1_800_000_000.0 + self.now

    def wait(self, timeout: float | None = None) -> bool:
        """Move the clock."""
        self.now += timeout or 0.0
        return False


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    return Passing(monkeypatch)
