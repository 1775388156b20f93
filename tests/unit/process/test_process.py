"""The periodic tasks of a process, its order of stopping, and its exit codes, on doubles and a moved clock."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from bridge.contract.status import Status
from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import ConfigError, Incomplete, StateError
from bridge.outbox.state_dir import StateFolder
from bridge.process.process import Flow, Process
from bridge.runtime.threads import Signals, Stop
from tests.support.clock import MovedClock
from tests.support.forward import parts_of
from tests.support.only import only
from tests.support.process import LIMIT_SECONDS
from tests.support.status import process_status


def make_outbox() -> Mock:
    """Return an outbox that stores nothing."""
    answers = {"left_sinks": {}, "dead_letter_counts": {}, "backlogs": {}, "close": True}
    return Mock(storage_error=None, **{f"{name}.return_value": answer for name, answer in answers.items()})


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
        self.statuses: list[Status] = []
        self.error: OSError | None = None

    def read_status(self) -> Status | None:
        return self.statuses[-1] if self.statuses else None

    def write_status(self, status: Status) -> None:
        if self.error:
            raise self.error
        self.statuses.append(status)


def make_sender() -> Any:
    """Return a dispatcher that ends once it is drained."""
    stop = Stop()
    return SimpleNamespace(
        name="ops",
        sink=SimpleNamespace(is_at_work=False),
        dead_lettered=0,
        begin_drain=lambda: None,
        status=lambda dead: (dead, "retrying"),
        run=lambda: stop.wait(None),
        stop_when_drained=stop.set,
    )


class Doubles:
    """A process on doubles."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.outbox = make_outbox()
        self.folder = Folder()
        self.stop = Stop()
        self.loop_ended = threading.Event()
        self.metrics = Mock(**{"close.side_effect": self._note_closed})
        self.sinks: list[Any] = []
        self.jumps = 0
        self.follows: list[bool] = []
        self.was_open_to_metrics = False

    def process(
        self,
        *,
        seconds: float,
        dispatchers: Any = None,
        faults: list[str] | None = None,
        busy_seconds: float = 0.0,
        **flow_has: Any,
    ) -> Process:
        parts = parts_of(
            role="forward",
            sinks=[],
            folder=self.folder,
            identity=SimpleNamespace(last_error=""),
            outbox=self.outbox,
            clock=self.clock,
            stop=self.stop,
            metrics=self.metrics,
            meter=SimpleNamespace(jumped=self._note_jump, follow=self.follows.append),
            dispatchers=dispatchers or (lambda: self.sinks),
        )
        busy_until = self.clock.monotonic() + busy_seconds
        flow = Flow(
            **flow_has,
            loops={"poll": self._loop},
            status=lambda: process_status(self.clock.now()).flow,
            faults=None if faults is None else lambda: faults,
            is_busy=lambda: self.clock.monotonic() < busy_until,
        )
        signals = cast("Signals", MovedSignals(self.clock, seconds))
        return Process(parts, flow, signals, stop_seconds=5.0)

    def run(self, **how: Any) -> int:
        return self.process(**how).run()

    def _note_jump(self) -> None:
        self.jumps += 1

    def _note_closed(self) -> None:
        self.was_open_to_metrics = not self.outbox.close.called

    def _loop(self) -> None:
        self.stop.wait(None)
        self.loop_ended.set()


def test_the_outbox_recovers_every_five_seconds_and_prunes_every_minute() -> None:
    rig = Doubles()
    assert rig.run(seconds=120.5) == 0
    assert rig.outbox.recover.call_count == 25
    assert rig.outbox.prune.call_count == 3


@pytest.mark.parametrize("seconds", [7200.0, -7200.0])
def test_a_jump_of_the_wall_clock_is_logged_once(seconds: float, caplog: pytest.LogCaptureFixture) -> None:
    rig = Doubles()
    rig.clock.jump(seconds)
    rig.run(seconds=10)
    jumps = [vars(record) for record in caplog.records if "wall clock jumped" in record.message]
    assert only(jumps)["seconds"] == seconds
    assert rig.jumps == 1


def test_damage_that_a_task_finds_ends_the_process_for_its_supervisor() -> None:
    rig = Doubles()
    rig.outbox.recover.side_effect = StateError("the state is damaged")
    assert rig.run(seconds=100) == 1
    assert rig.outbox.close.call_count == 1


def test_the_status_is_written_at_once_after_a_second_every_five_seconds_and_at_the_end() -> None:
    rig = Doubles()
    rig.outbox.dead_letter_counts.return_value = {"ops": 3}
    process = rig.process(seconds=99, dispatchers=lambda: [make_sender()])
    process.run()
    assert [status.running for status in rig.folder.statuses] == [True] * 21 + [False]
    assert vars(rig.folder.statuses[0])["sinks"] == {"ops": (3, "retrying")}


def test_a_status_file_that_cannot_be_written_is_tried_again_and_ends_nothing() -> None:
    rig = Doubles()
    rig.folder.error = OSError(28, "No space left on device")
    process = rig.process(seconds=1)
    process._look_after_state()
    rig.folder.error = None
    process._look_after_state()
    assert len(rig.folder.statuses) == 1


def test_a_signal_ends_the_loops_and_closes_the_metrics_port_and_then_the_outbox() -> None:
    rig = Doubles()
    assert rig.run(seconds=1) == 0
    assert rig.loop_ended.wait(LIMIT_SECONDS)
    assert rig.outbox.close.call_count == 1
    assert rig.was_open_to_metrics


@pytest.mark.parametrize(("faults", "code"), [(None, 1), ([], 0)])
def test_a_loop_that_ends_on_its_own_is_an_error_unless_the_flow_does(
    faults: list[str] | None, code: int
) -> None:
    rig = Doubles()
    rig.stop.set()
    assert rig.run(seconds=3600, faults=faults) == code
    assert rig.outbox.close.call_count == 1


@pytest.mark.parametrize(
    "why", ["it is stopped", "a loop ends", "it is killed", "its supervisor stops what hangs"]
)
def test_a_start_knows_whether_the_run_before_it_was_stopped(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Doubles()
    if why == "its supervisor stops what hangs":
        monkeypatch.setattr("bridge.process.process.stalled_threads", lambda: ["poll"])
    if why == "a loop ends":
        rig.stop.set()
    rig.run(seconds=20)
    if why == "it is killed":
        rig.folder.statuses.pop()
    rig.run(seconds=20)
    assert rig.follows == [False, why == "it is stopped"]


@pytest.mark.parametrize(
    ("error", "is_at_work", "seconds"), [(None, False, 1), ("the disk is full", False, 5), (None, True, 5)]
)
def test_a_process_that_ends_by_itself_leaves_to_the_next_start_what_is_stored_and_no_program_of_a_sink(
    error: str | None, is_at_work: bool, seconds: float
) -> None:
    rig, is_over = Doubles(), Stop()
    rig.outbox.storage_error = error
    rig.stop.set()  # a loop ends
    sender = make_sender()
    sender.sink, sender.stop_when_drained = SimpleNamespace(is_at_work=is_at_work), lambda: None
    sender.run = lambda: is_over.wait(None)
    began_at = rig.clock.monotonic()
    assert rig.run(seconds=1e6, dispatchers=lambda: [sender]) == 1
    assert seconds <= rig.clock.monotonic() - began_at < seconds + 1
    is_over.set()


@pytest.mark.parametrize(("seconds", "code", "at_least"), [(1e6, 1, 90.0), (30.0, 0, 30.0)])
def test_a_thread_that_ends_takes_no_program_with_it_unless_the_process_is_stopped(
    seconds: float, code: int, at_least: float
) -> None:
    rig = Doubles()
    rig.stop.set()
    began = rig.clock.monotonic()
    assert rig.run(seconds=seconds, busy_seconds=90.0) == code
    assert at_least <= rig.clock.monotonic() - began < 1e6


def test_the_faults_of_a_flow_that_ends_on_its_own_are_raised_after_the_outbox_is_closed() -> None:
    rig = Doubles()
    rig.stop.set()
    with pytest.raises(Incomplete, match="IMDS gave no usable answer"):
        rig.run(seconds=3600, faults=["IMDS gave no usable answer"])
    assert rig.outbox.close.call_count == 1


@pytest.mark.parametrize(
    ("is_stored", "fate"),
    [(True, "wait for the next start"), (False, "are lost: the state could not be written")],
)
def test_what_is_not_delivered_waits_or_is_lost(is_stored: bool, fate: str) -> None:
    doubles = Doubles()
    doubles.outbox.backlogs.return_value = {"ops": 3, "audit": 0}
    doubles.outbox.close.return_value = is_stored
    with pytest.raises(Incomplete, match=rf"^sinks\.ops: 3 event\(s\) {fate}$"):
        doubles.run(seconds=1, faults=[])


def test_a_sink_that_cannot_be_built_ends_the_process_in_order() -> None:
    rig = Doubles()

    def refuse() -> list[Dispatcher]:
        raise ConfigError("sinks", ["sinks.ops: no"])

    with pytest.raises(ConfigError):
        rig.run(seconds=3600, dispatchers=refuse)
    assert rig.loop_ended.wait(LIMIT_SECONDS)
    assert rig.outbox.close.call_count == 1
