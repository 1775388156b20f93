"""The life of a process: start its threads, watch over them, stop them in order."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.config.models import Config
from bridge.errors import BridgeError, Incomplete
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime import log as logs
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import Signals, Stop, stalled_threads, start_thread
from bridge.runtime.time import Clock, iso_utc
from bridge.service.identity import Role
from bridge.service.status_file import StatusFile, with_dead_letters

if TYPE_CHECKING:
    from bridge.service.dispatcher import Dispatcher
    from bridge.service.metrics_server import MetricsServer

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
STATUS_SECONDS = 2.0
PRUNE_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
# How long closing the state may take after stop_seconds.
LAST_SECONDS = 30.0
_JOIN_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What makes a process a forwarder, a listener or a relay: its loops, by thread name, and its status.

    `faults` is for a flow that ends on its own: it returns what the loops could not do.
    """

    loops: Mapping[str, Callable[[], None]]
    status: Callable[[], dict[str, Any]]
    faults: Callable[[], list[str]] | None = None


class Process:
    """A flow's loops and the dispatchers behind them, from start to stop. It is used from the main thread."""

    def __init__(
        self,
        config: Config,
        role: Role,
        *,
        folder: StateFolder,
        outbox: Outbox,
        clock: Clock,
        stop: Stop,
        metrics: MetricsServer | None = None,
    ) -> None:
        """Set up a process.

        Args:
            config: `stop_seconds` is read from it.
            role: which process it is, for the log and the status.
            folder: where the status is written.
            outbox: closed at the end of `run`.
            clock: times all tasks.
            stop: set when the loops are to end.
            metrics: serves the status as metrics; None if they are off.
        """
        self._metrics = metrics
        self._config = config
        self._role = role
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._supervisor = Supervisor()
        self._status_file = StatusFile(folder, supervisor=self._supervisor, clock=clock)
        self._stalled: list[str] = []
        self._dispatchers: list[Dispatcher] = []
        self._undelivered: list[str] = []
        self._started_at = clock.now()

    def run(self, flow: Flow, signals: Signals, build_dispatchers: Callable[[], list[Dispatcher]]) -> int:
        """Run until a signal comes or a thread ends; return the exit code.

        Args:
            flow: its loops are started first: a notice may be there already.
            signals: what asks for the stop.
            build_dispatchers: called once the loops run.

        Raises:
            ConfigError: a sink cannot be built.
            Incomplete: a flow that ends on its own has faults, or left events undelivered.
        """
        log.info(
            "imds-bridge %s: %s started",
            __version__,
            self._role,
            extra={"sinks": [*self._config.sinks] or ["stdout"]},
        )
        self._supervisor.ready()
        loops = [start_thread(name, loop) for name, loop in flow.loops.items()]
        try:
            self._dispatchers = build_dispatchers()
        except BridgeError:
            self._end(flow, signals, loops, [], why="a sink cannot be built")
            raise
        senders = [start_thread(f"sink-{one.name}", one.run) for one in self._dispatchers]
        if self._metrics:
            self._metrics.start(lambda: self._full_status(flow))
        signal = self._watch_over(flow, signals, [*loops, *senders])
        self._end(flow, signals, loops, senders, why=signal)
        if flow.faults and (faults := [*flow.faults(), *self._undelivered]):
            raise Incomplete("; ".join(faults))
        return 0 if signal else 1

    def _watch_over(self, flow: Flow, signals: Signals, threads: list[Thread]) -> str | None:
        """Run the periodic tasks until a signal comes or the flow is done (why), or a thread ends (None)."""
        tasks: dict[Callable[[], None], float] = {
            self._outbox.recover: TICK_SECONDS,
            lambda: self._write_status(flow): STATUS_SECONDS,
            self._outbox.prune: PRUNE_SECONDS,
            self._notice_clock: TICK_SECONDS,
            self._check_progress: min(PROGRESS_SECONDS, (self._supervisor.watchdog_seconds or math.inf) / 4),
        }
        due_at = dict.fromkeys(tasks, 0.0)
        while all(thread.is_alive() for thread in threads):
            for task, every_seconds in tasks.items():
                if self._clock.monotonic() >= due_at[task]:
                    try:
                        task()
                    except (
                        BridgeError
                    ) as error:  # the state is damaged, which a thread may have found as well
                        log.critical("the process stops: %s", error)
                        return None
                    due_at[task] = self._clock.monotonic() + every_seconds
            if signal := signals.wait(_JOIN_SECONDS if flow.faults else TICK_SECONDS):
                return signal
        if flow.faults:
            return "done"
        log.critical("a thread ended; the process stops so that its supervisor restarts it")
        return None

    def _end(
        self, flow: Flow, signals: Signals, loops: list[Thread], senders: list[Thread], *, why: str | None
    ) -> None:
        """Let the loops end and deliver waiting events within `stop_seconds`; a second signal ends it at once."""
        log.info("stopping: waiting events are delivered first", extra={"why": why})
        self._supervisor.stopping(self._config.stop_seconds + LAST_SECONDS)
        deadline = self._clock.monotonic() + self._config.stop_seconds
        self._stop.set()
        for dispatcher in self._dispatchers:
            dispatcher.begin_drain()
        self._join(loops, signals, deadline)
        for dispatcher in self._dispatchers:
            dispatcher.stop_when_drained()
        self._join(senders, signals, deadline)
        self._note_undelivered()
        self._write_status(flow, running=False)
        if self._metrics:
            self._metrics.close()
        self._outbox.close()
        log.info("stopped")
        logs.flush()  # whoever prints an error now does not break a line of the log

    def _join(self, threads: list[Thread], signals: Signals, deadline: float) -> None:
        while any(thread.is_alive() for thread in threads) and self._clock.monotonic() < deadline:
            if signals.wait(_JOIN_SECONDS):
                log.warning("second signal: stopped at once; the next start delivers waiting events")
                logs.flush()
                os._exit(1)

    def _note_undelivered(self) -> None:
        left = {one.name: count for one in self._dispatchers if (count := self._outbox.backlog(one.name)[0])}
        if left:
            log.warning("stopped with events waiting; the next start delivers them", extra={"waiting": left})
        dead = {one.name: one.dead_lettered for one in self._dispatchers if one.dead_lettered}
        self._undelivered = [
            *(f"sinks.{name}: {count} event(s) wait for the next start" for name, count in left.items()),
            *(f"sinks.{name}: {count} event(s) dead-lettered" for name, count in dead.items()),
        ]

    def _notice_clock(self) -> None:
        if jump := self._clock.jump_seconds():
            seconds = round(jump, 1)
            log.warning("the wall clock jumped; the ages of events do not change", extra={"seconds": seconds})

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

    def _write_status(self, flow: Flow, *, running: bool = True) -> None:
        self._status_file.write(self._status(flow, running=running), self._outbox.dead_letter_counts)

    def _full_status(self, flow: Flow) -> dict[str, Any]:
        """Return what the status file would show now."""
        status = with_dead_letters(self._status(flow), self._outbox.dead_letter_counts())
        sizes = {"outbox_bytes": self._outbox.size_bytes(), "storage_errors": self._outbox.storage_errors}
        return {**status, **sizes}

    def _status(self, flow: Flow, *, running: bool = True) -> dict[str, Any]:
        return {
            "version": __version__,
            "role": self._role,
            "pid": os.getpid(),
            "running": running,
            "started_at": iso_utc(self._started_at),
            "written_at": iso_utc(self._clock.now()),
            "storage_error": self._outbox.storage_error,
            "left_sinks": self._outbox.left_sinks(),
            **flow.status(),
            "sinks": {one.name: one.status() for one in self._dispatchers},
        }
