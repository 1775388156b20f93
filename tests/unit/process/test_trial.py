"""What a process tries while nothing else shows it: programs, and the state, on a moved clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bridge.process.trial import HUNG_SECONDS, Trial
from bridge.runtime.program import find_fault
from tests.support.clock import MovedClock
from tests.support.forward import parts_of
from tests.support.process import LIMIT_SECONDS

TICK_SECONDS = 5


class Rig:
    """A trial of which each look waits for the try that it begins, unless that hangs."""

    def __init__(self, find_program_faults: Callable[[], Sequence[str]] = tuple) -> None:
        self.clock, self.outbox = MovedClock(), SimpleNamespace(changes=7)
        folder: Any = SimpleNamespace(path=Path("state"))
        parts = parts_of(clock=self.clock, outbox=self.outbox, folder=folder)
        self.trial = Trial(parts, find_program_faults)

    def look(self) -> None:
        self.trial.look()
        if self.trial._thread.ident:
            self.trial._thread.join(LIMIT_SECONDS)
        self.clock.advance(TICK_SECONDS)


@pytest.fixture
def try_to_write(monkeypatch: pytest.MonkeyPatch) -> Mock:
    trial = Mock()
    monkeypatch.setattr("bridge.process.trial.try_to_write", trial)
    return trial


def test_the_state_is_tried_in_a_quiet_minute_and_shows_until_a_try_succeeds(
    try_to_write: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig()
    full = OSError(28, "only 12 KiB are free")
    try_to_write.side_effect = [None, full, full, None, FileNotFoundError()]
    shown: dict[int, tuple[int, bool]] = {}
    for tick in range(12 * 4 + 1):
        rig.outbox.changes = 7 if tick < 6 else 8  # something is stored in tick 6
        rig.look()
        shown.setdefault(try_to_write.call_count, (tick, rig.trial.error is None))
    # Once a try has failed, there is one in each tick.
    assert shown == {
        0: (0, True),
        1: (18, True),
        2: (30, False),
        3: (31, False),
        4: (32, True),
        5: (44, True),
    }
    lines = [line.message for line in caplog.records if "take a notice" in line.message]
    assert lines == ["the state store cannot take a notice now", "the state store can take a notice now"]


@pytest.mark.usefixtures("try_to_write")
@pytest.mark.posix("programs have no such permissions")
@pytest.mark.parametrize("is_quiet", [True, False])
def test_what_the_process_itself_cannot_execute_is_told_at_the_start_and_within_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_quiet: bool
) -> None:
    program = tmp_path / "drain"
    program.write_text("#!/bin/sh\n")
    rig = Rig(lambda: [*filter(None, [find_fault([str(program)])])])
    shown: list[int] = []
    for tick in range(24):
        program.chmod(0o755 if 5 < tick < 10 else 0o644)
        rig.outbox.changes += not is_quiet
        rig.look()
        shown.append(len(rig.trial.program_faults))
    assert shown[:8] == [1] * 6 + [0] * 2
    assert 1 in shown[10:22]
    assert [line.message for line in caplog.records if "cannot be started" in line.message] == [
        f"a program cannot be started: {program}: this user may not execute it"
    ] * 2


def test_a_disk_that_hangs_holds_up_nothing_and_shows_after_half_a_minute_until_it_answers(
    try_to_write: Mock,
) -> None:
    rig, hangs, end = Rig(), threading.Event(), threading.Event()

    def hang(_: Path) -> None:
        hangs.set()
        end.wait(LIMIT_SECONDS)

    try_to_write.side_effect = hang
    rig.clock.advance(60)
    rig.trial.look()
    assert hangs.wait(LIMIT_SECONDS)
    rig.clock.advance(HUNG_SECONDS - 1)
    rig.trial.look()
    assert rig.trial.error is None
    rig.clock.advance(1)
    rig.trial.look()
    assert rig.trial.error == "state: the disk does not answer within 30 s"
    end.set()
    rig.trial._thread.join(LIMIT_SECONDS)
    assert rig.trial.error is None
    assert try_to_write.call_count == 1


def test_a_thread_that_cannot_be_started_is_started_by_a_later_look(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(lambda: ["/opt/drain: no"])
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    rig.look()
    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(12):
        rig.look()
    assert rig.trial.program_faults == ["/opt/drain: no"]
