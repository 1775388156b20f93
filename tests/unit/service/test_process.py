"""The periodic tasks of a process, its order of stopping, and its exit codes, on doubles and a moved clock."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from bridge.config.models import Config
from bridge.errors import ConfigError, Incomplete, StateError
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.threads import Signals, Stop
from bridge.service.dispatcher import Dispatcher
from bridge.service.metrics_server import MetricsServer
from bridge.service.process import Flow, Process
from tests.support.clock import MovedClock


class CountingOutbox:
    """Counts the calls, and stores nothing."""

    storage_error = None
    damage: StateError | None = None

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def recover(self) -> None:
        self.calls["recover"] += 1
        if self.damage:
            raise self.damage

    def left_sinks(self) -> dict[str, int]:
        return {}

    def prune(self) -> None:
        self.calls["prune"] += 1

    def close(self) -> None:
        self.calls["close"] += 1

    def dead_letter_counts(self) -> dict[str, int]:
        return {}


class MovedSignals:
    """Lets the clock pass instead of waiting, and gives one SIGTERM after `seconds`."""

    def __init__(self, clock: MovedClock, seconds: float) -> None:
        self._clock = clock
        self._end = clock.monotonic() + seconds

    def wait(self, seconds: float) -> str | None:
        self._clock.advance(seconds)
        if self._clock.monotonic() < self._end:
            return None
        self._end = math.inf
        return "SIGTERM"


class Folder(StateFolder):
    """Keeps each status instead of writing it."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.statuses: list[dict[str, Any]] = []

    def write_status(self, status: dict[str, Any]) -> None:
        self.statuses.append(status)


class Metrics:
    """Notes whether the outbox was still open when the port was closed."""

    def __init__(self, outbox: CountingOutbox) -> None:
        self._outbox = outbox
        self.was_open = False

    def start(self, _status: Callable[[], Any]) -> None:
        pass

    def close(self) -> None:
        self.was_open = self._outbox.calls["close"] == 0


class Rig:
    """A process on doubles."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.outbox = CountingOutbox()
        self.folder = Folder()
        self.stop = Stop()
        self.loop_ended = threading.Event()
        self.metrics = Metrics(self.outbox)
        self.process = Process(
            Config(),
            "forward",
            folder=self.folder,
            outbox=cast("Outbox", self.outbox),
            clock=self.clock,
            stop=self.stop,
            metrics=cast("MetricsServer", self.metrics),
        )

    def run(self, *, seconds: float, dispatchers: Any = list, faults: list[str] | None = None) -> int:
        flow = Flow(
            loops={"poll": self._loop},
            status=lambda: {"vm": "web-0", "document": None},
            faults=None if faults is None else lambda: faults,
        )
        signals = cast("Signals", MovedSignals(self.clock, seconds))
        return self.process.run(flow, signals, dispatchers)

    def _loop(self) -> None:
        self.stop.wait(None)
        self.loop_ended.set()


def test_the_outbox_recovers_every_second_and_prunes_every_minute() -> None:
    rig = Rig()
    assert rig.run(seconds=120.5) == 0
    assert rig.outbox.calls["recover"] > 110
    assert rig.outbox.calls["prune"] == 3


@pytest.mark.parametrize("seconds", [7200.0, -7200.0])
def test_a_jump_of_the_wall_clock_is_logged_once(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.clock.jump(seconds)
    rig.run(seconds=10)
    (line,) = [record for record in caplog.records if "wall clock jumped" in record.message]
    assert vars(line)["seconds"] == seconds


def test_damage_that_a_task_finds_ends_the_process_for_its_supervisor() -> None:
    rig = Rig()
    rig.outbox.damage = StateError("the state is damaged")
    assert rig.run(seconds=100) == 1
    assert rig.outbox.calls["close"] == 1


def test_the_status_is_written_at_least_every_ten_seconds_and_at_the_end() -> None:
    rig = Rig()
    rig.run(seconds=100)
    assert len(rig.folder.statuses) > 10
    assert rig.folder.statuses[0]["running"] is True
    assert rig.folder.statuses[-1]["running"] is False


def test_a_signal_ends_the_loops_and_then_closes_the_outbox() -> None:
    rig = Rig()
    assert rig.run(seconds=1) == 0
    assert rig.loop_ended.wait(10)
    assert rig.outbox.calls["close"] == 1


def test_the_metrics_port_is_closed_before_the_outbox() -> None:
    rig = Rig()
    rig.run(seconds=1)
    assert rig.metrics.was_open


def test_a_loop_that_ends_on_its_own_ends_the_process_with_exit_code_1() -> None:
    rig = Rig()
    rig.stop.set()
    assert rig.run(seconds=3600) == 1
    assert rig.outbox.calls["close"] == 1


def test_a_flow_that_ends_on_its_own_without_faults_exits_0() -> None:
    rig = Rig()
    rig.stop.set()
    assert rig.run(seconds=3600, faults=[]) == 0
    assert rig.outbox.calls["close"] == 1


def test_the_faults_of_a_flow_that_ends_on_its_own_are_raised_after_the_outbox_is_closed() -> None:
    rig = Rig()
    rig.stop.set()
    with pytest.raises(Incomplete, match="IMDS gave no usable answer"):
        rig.run(seconds=3600, faults=["IMDS gave no usable answer"])
    assert rig.outbox.calls["close"] == 1


def test_a_sink_that_cannot_be_built_ends_the_process_in_order() -> None:
    rig = Rig()

    def refuse() -> list[Dispatcher]:
        raise ConfigError("sinks", ["sinks.ops: no"])

    with pytest.raises(ConfigError):
        rig.run(seconds=3600, dispatchers=refuse)
    assert rig.loop_ended.wait(10)
    assert rig.outbox.calls["close"] == 1
