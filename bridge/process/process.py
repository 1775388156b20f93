"""The life of a process: its loops and dispatchers from the start to the stop, and its status."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock, Thread
from typing import TYPE_CHECKING

from bridge import __version__
from bridge.contract.status import FlowStatus, Status
from bridge.errors import BridgeError, Incomplete
from bridge.outbox.sqlite import kept_log
from bridge.process.parts import Parts
from bridge.process.trial import Trial
from bridge.runtime import log as logs
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import Signals, stalled_threads, start_thread
from bridge.runtime.time import iso_utc

if TYPE_CHECKING:
    from bridge.delivery.dispatcher import Dispatcher

log = logging.getLogger(__name__)

TICK_SECONDS = 5.0
FIRST_SECONDS = 1.0
PRUNE_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
# How long a process that ends by itself still delivers.
HANDOVER_SECONDS = 1.0
# How long closing the state may take after stop_seconds.
LAST_SECONDS = 30.0
_JOIN_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What makes a process a forwarder, a listener or a relay: its loops, by thread name, and its status.

    `config` is the file of the settings, and `find_program_faults` returns why programs that it will need cannot be
    started.
    `faults` is for a flow that ends on its own: it returns what the loops could not do. While `is_busy`, a program
    runs, and a thread that ends does not end the process with it.
    """

    loops: Mapping[str, Callable[[], None]]
    status: Callable[[], FlowStatus]
    faults: Callable[[], list[str]] | None = None
    is_busy: Callable[[], bool] = lambda: False
    config: str = ""
    find_program_faults: Callable[[], Sequence[str]] = tuple


class Process:
    """A flow's loops and the dispatchers behind them, from start to stop. It is used from the main thread.

    Args:
        parts: what the flow is built on; its stop is set when the loops are to end, and its outbox closed after them.
        flow: what the process does.
        signals: what asks for the stop.
        stop_seconds: how long waiting events are still delivered after that.
    """

    def __init__(self, parts: Parts, flow: Flow, signals: Signals, *, stop_seconds: float) -> None:
        self._parts = parts
        self._flow = flow
        self._signals = signals
        self._stop_seconds = stop_seconds
        self._outbox = parts.outbox
        self._clock = parts.clock
        self._supervisor = Supervisor()
        self._trial = Trial(parts, flow.find_program_faults)
        self._stalled: list[str] = []
        self._dispatchers: list[Dispatcher] = []
        self._showing = Lock()
        parts.show_status = self._show_status

    def run(self) -> int:
        """Run until a signal comes or a thread ends; return the exit code.

        Raises:
            ConfigError: a sink cannot be built.
            Incomplete: a flow that ends on its own has faults, or left events undelivered.
        """
        log.info(
            "imds-bridge %s: %s started",
            __version__,
            self._parts.role,
            extra={"sinks": [*self._parts.sinks]},
        )
        self._supervisor.ready()
        # The loops are started first: a notice may be there already.
        loops = [start_thread(name, loop) for name, loop in self._flow.loops.items()]
        try:
            self._dispatchers = self._parts.dispatchers()
        except BridgeError:
            self._end(loops, [], why="a sink cannot be built")
            raise
        senders = [start_thread(f"sink-{one.name}", one.run) for one in self._dispatchers]
        if self._parts.metrics:
            last = self._parts.folder.read_status()
            self._parts.meter.follow(last is not None and last.running is False)
            self._parts.metrics.start(self._status, self._outbox, (last and last.metrics) or "")
        signal = self._watch_over([*loops, *senders])
        undelivered = self._end(loops, senders, why=signal)
        if self._flow.faults and (faults := [*self._flow.faults(), *undelivered]):
            raise Incomplete("; ".join(faults))
        return 0 if signal else 1

    def _watch_over(self, threads: list[Thread]) -> str | None:
        """Run the periodic tasks until a signal comes or the flow is done (why), or a thread ends (None)."""
        every_seconds: dict[Callable[[], None], float] = {
            self._trial.look: TICK_SECONDS,
            self._look_after_state: TICK_SECONDS,
            self._outbox.prune: PRUNE_SECONDS,
            self._check_progress: min(PROGRESS_SECONDS, (self._supervisor.watchdog_seconds or math.inf) / 4),
        }
        due_at = dict.fromkeys(every_seconds, -math.inf)
        while all(thread.is_alive() for thread in threads) or self._flow.is_busy():
            try:
                began_at = self._clock.monotonic()
                due = [task for task, at in due_at.items() if at <= began_at]
                for task in due:
                    task()
                now = self._clock.monotonic()  # for all, which are due together again
                for task in due:
                    is_first, pause_seconds = due_at[task] == -math.inf, every_seconds[task]
                    # The first status is that of a process that has read nothing yet.
                    due_at[task] = now + (min(FIRST_SECONDS, pause_seconds) if is_first else pause_seconds)
            except BridgeError as error:  # the state is damaged, which a thread may have found as well
                log.critical("the process stops: %s", error)
                return None
            wait_seconds = min(due_at.values()) - self._clock.monotonic()
            if signal := self._signals.wait(_JOIN_SECONDS if self._flow.faults else wait_seconds):
                return signal
        if self._flow.faults:
            return "done"
        log.critical("a thread ended; the process stops so that its supervisor restarts it")
        return None

    def _end(self, loops: list[Thread], senders: list[Thread], *, why: str | None) -> list[str]:
        """Let the loops end and deliver waiting events within `stop_seconds`; return what is not delivered.

        A second signal ends it at once. What is stored, a process that ends by itself leaves to its next start,
        unless a sink's program may run.
        """
        log.info("stopping: waiting events are delivered first", extra={"why": why})
        self._supervisor.stopping(self._stop_seconds + LAST_SECONDS)
        is_at_work = any(one.sink.is_at_work for one in self._dispatchers)
        can_wait = why is None and self._outbox.storage_error is None and not is_at_work
        deadline = self._clock.monotonic() + (HANDOVER_SECONDS if can_wait else self._stop_seconds)
        self._parts.stop.set()
        for dispatcher in self._dispatchers:
            dispatcher.begin_drain()
        self._join(loops, deadline)
        for dispatcher in self._dispatchers:
            dispatcher.stop_when_drained()
        self._join(senders, deadline)
        left = {name: count for name, count in self._outbox.backlogs().items() if count}
        # A supervisor also stops what hangs: that is no stop by a person.
        self._show_status(running=not why or bool(self._stalled))
        if self._parts.metrics:
            self._parts.metrics.close()
        is_stored = self._outbox.close()
        log.info("stopped")
        undelivered = self._undelivered(left, is_stored=is_stored)
        logs.flush()  # whoever prints an error now does not break a line of the log
        return undelivered

    def _join(self, threads: list[Thread], deadline: float) -> None:
        while any(thread.is_alive() for thread in threads) and self._clock.monotonic() < deadline:
            if self._signals.wait(_JOIN_SECONDS):
                log.warning("second signal: stopped at once; the next start delivers waiting events")
                logs.flush()
                os._exit(1)

    def _undelivered(self, left: Mapping[str, int], *, is_stored: bool) -> list[str]:
        fate = "wait for the next start" if is_stored else "are lost: the state could not be written"
        if left and is_stored:  # else the outbox has logged it
            log.warning("stopped with events waiting; the next start delivers them", extra={"waiting": left})
        dead = {one.name: one.dead_lettered for one in self._dispatchers if one.dead_lettered}
        return [
            *(f"sinks.{name}: {count} event(s) {fate}" for name, count in left.items()),
            *(f"sinks.{name}: {count} event(s) dead-lettered" for name, count in dead.items()),
        ]

    def _look_after_state(self) -> None:
        """Use a state that works again, notice the wall clock's jumps, and show how things are."""
        self._outbox.recover(may_end=not self._flow.is_busy())  # its programs would end with it
        if jump := self._clock.jump_seconds():
            seconds = round(jump, 1)
            log.warning("the wall clock jumped; the ages of events do not change", extra={"seconds": seconds})
            self._parts.meter.jumped()
        self._show_status()

    def _check_progress(self) -> None:
        """Report to the supervisor that the process works, but only while every loop makes progress."""
        stalled = stalled_threads()
        if not stalled:
            self._supervisor.alive()
        if stalled and stalled != self._stalled:
            log.critical("threads are stalled: %s; a supervisor will restart the process", ", ".join(stalled))
        elif self._stalled and not stalled:
            log.warning("all threads are responding again")
        self._stalled = stalled

    # The status

    def _status(self, *, running: bool = True) -> Status:
        dead = self._outbox.dead_letter_counts()
        return Status(
            version=__version__,
            role=self._parts.role,
            pid=os.getpid(),
            running=running,
            written_at=iso_utc(self._clock.now()),
            storage_error=self._outbox.storage_error or self._trial.error,
            metrics=getattr(self._parts.metrics, "address", ""),
            metrics_error=getattr(self._parts.metrics, "error", None),
            kept_log=kept_log(self._parts.folder.database),
            config=self._flow.config,
            program_faults=self._trial.program_faults,
            identity_error=self._parts.identity.last_error or None,
            left_sinks=self._outbox.left_sinks(),
            sinks={one.name: one.status(dead.get(one.name, 0)) for one in self._dispatchers},
            flow=self._flow.status(),
        )

    def _show_status(self, *, running: bool = True) -> None:
        """Replace the status file and the supervisor's line. Any thread may call it."""
        with self._showing:
            self._write_status(self._status(running=running))

    def _write_status(self, status: Status) -> None:
        if self._supervisor.is_there:
            from bridge.process.status import headline  # noqa: PLC0415 - only a supervisor needs it

            self._supervisor.report_status(headline(status))
        try:
            self._parts.folder.write_status(status)
        except OSError as error:
            log.debug("the status file cannot be written: %s", error)
