"""Pauses of the process, as waits of the main thread show them."""

from __future__ import annotations

import time

import pytest

from bridge.runtime import threads
from bridge.runtime.threads import Pauses


def test_a_wait_that_ends_two_seconds_late_is_one_pause_for_every_thread_also_before_the_main_thread_notes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(threads, "PAUSE_SECONDS", 2.0)
    pauses = Pauses()
    assert pauses.begin_wait(5) == 5, "nobody has asked yet"
    pauses.end_wait()
    assert pauses() == 0
    assert pauses.begin_wait(5) == 1
    now += 1.9
    assert pauses() == 0
    now += 0.2
    assert pauses() == 1
    pauses.end_wait()
    now += 60  # its tasks may take as long as the disk does
    assert pauses() == 1
    assert pauses.begin_wait(0.5) == 0.5
    pauses.end_wait()
    assert pauses() == 1
