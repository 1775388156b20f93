"""The composition root: the only place that builds parts, and the life of a process from start to stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

from bridge import __version__, logs
from bridge.config import Config, SinkSettings, StdoutSettings
from bridge.delivery import Filter
from bridge.dispatcher import Dispatcher
from bridge.forwarder import Forwarder
from bridge.imds import ImdsClient
from bridge.model import iso_utc
from bridge.outbox import Outbox
from bridge.runtime import Clock, Signals, Stop, start_thread
from bridge.sinks.base import Sink
from bridge.state import StateFolder

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
STATUS_SECONDS = 2.0
PRUNE_SECONDS = 3600.0

# Where each kind of sink is; imported only when the configuration has one.
_SINKS = {
    "stdout": ("bridge.sinks.stdout", "StdoutSink"),
    "webhook": ("bridge.sinks.webhook", "WebhookSink"),
}


def build_sink(settings: SinkSettings) -> Sink:
    """Make the sink that `settings` describe."""
    module, name = _SINKS[settings.kind]
    sink: Sink = getattr(import_module(module), name)(settings)
    return sink


def state_folder(config: Config, role: str) -> StateFolder:
    """Name the folder of the process that runs `role`."""
    return StateFolder(Path(config.state_dir) / role)


def sinks_of(config: Config) -> dict[str, SinkSettings]:
    """Return the configured sinks; without any, events go to stdout."""
    return dict(config.sinks) or {"stdout": StdoutSettings(kind="stdout")}


def run_forward(config: Config) -> int:
    """Run the forwarder until it is stopped; return the exit code.

    Raises:
        StateError: the state is held or from a newer version.
    """
    os.umask(0o077)
    logs.set_up(level=config.log_level, style=config.log_format)
    with Signals() as signals:
        return _Process(config).run(signals)


class _Process:
    """The forwarder with its dispatchers: started, watched over and stopped in order."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._clock = Clock()
        self._stop = Stop()
        settings = sinks_of(config)
        filters = {name: Filter(types=sink.types, where=sink.where) for name, sink in settings.items()}
        self._folder = state_folder(config, "forward")
        self._outbox = Outbox(
            self._folder,
            clock=self._clock,
            sinks={name: (filters[name], sink.from_start) for name, sink in settings.items()},
            max_bytes=int(config.max_outbox_mb * 1024 * 1024),
            retain_seconds=config.retain_seconds,
        )
        imds = ImdsClient(config.imds, clock=self._clock)
        self._forwarder = Forwarder(
            config, imds=imds, outbox=self._outbox, clock=self._clock, stop=self._stop
        )
        self._dispatchers = [
            Dispatcher(
                name,
                build_sink(sink),
                wanted=filters[name],
                max_age_seconds=sink.max_age_seconds,
                outbox=self._outbox,
                clock=self._clock,
            )
            for name, sink in settings.items()
        ]
        self._started_at = self._clock.now()

    def run(self, signals: Signals) -> int:
        log.info("imds-bridge %s forwards", __version__, extra={"sinks": [d.name for d in self._dispatchers]})
        poll = start_thread("poll", self._forwarder.run)  # first of all: a notice may be there already
        senders = [start_thread(f"sink-{d.name}", d.run) for d in self._dispatchers]
        signal = self._watch_over(signals, [poll, *senders])
        return self._end(signals, poll, senders, failed=signal is None, why=signal or "a thread ended")

    def _watch_over(self, signals: Signals, threads: list[Thread]) -> str | None:
        """Do what is due now and then, until a signal comes (its name) or a thread ends (None)."""
        due = {
            self._outbox.heal: TICK_SECONDS,
            self._write_status: STATUS_SECONDS,
            self._outbox.prune: PRUNE_SECONDS,
        }
        next_at: dict[Callable[[], None], float] = dict.fromkeys(due, 0.0)
        while True:
            if any(not thread.is_alive() and not self._is_gone(thread) for thread in threads):
                log.critical("a thread ended; the process stops so that its supervisor starts it afresh")
                return None
            for task, every_seconds in due.items():
                if self._clock.monotonic() >= next_at[task]:
                    task()
                    next_at[task] = self._clock.monotonic() + every_seconds
            if signal := signals.wait(TICK_SECONDS):
                return signal

    def _is_gone(self, thread: Thread) -> bool:
        """Tell whether the thread ended because its receiver wants no more events."""
        return any(
            thread.name == f"sink-{dispatcher.name}" and dispatcher.status()["state"] == "gone"
            for dispatcher in self._dispatchers
        )

    def _end(self, signals: Signals, poll: Thread, senders: list[Thread], *, failed: bool, why: str) -> int:
        """Poll once more and deliver what waits, within the time to stop; a second signal ends it at once."""
        log.info("stopping: one last poll, then what waits is delivered", extra={"why": why})
        deadline = self._clock.monotonic() + self._config.stop_seconds
        self._stop.set()
        for dispatcher in self._dispatchers:
            dispatcher.hurry()
        self._join([poll], signals, deadline)
        for dispatcher in self._dispatchers:
            dispatcher.finish()
        self._join(senders, signals, deadline)
        left = {d.name: waiting for d in self._dispatchers if (waiting := self._outbox.backlog(d.name)[0])}
        if left:
            log.warning("stopped with events waiting; the next start sends them", extra={"waiting": left})
        self._write_status(running=False)
        self._outbox.close()
        log.info("stopped")
        return 1 if failed else 0

    def _join(self, threads: list[Thread], signals: Signals, deadline: float) -> None:
        while any(thread.is_alive() for thread in threads) and self._clock.monotonic() < deadline:
            if signals.wait(0.02):
                log.warning("a second signal: stopped at once; the next start sends what waits")
                os._exit(1)

    def _write_status(self, *, running: bool = True) -> None:
        try:
            self._folder.write_status(self._status(running=running))
        except OSError as error:
            log.debug("the status cannot be written: %s", error)

    def _status(self, *, running: bool) -> dict[str, Any]:
        dead = self._outbox.dead_letter_counts()
        return {
            "version": __version__,
            "pid": os.getpid(),
            "running": running,
            "started_at": iso_utc(self._started_at),
            "written_at": iso_utc(self._clock.now()),
            "disk_trouble": self._outbox.trouble,
            **self._forwarder.status(),
            "sinks": {d.name: {**d.status(), "dead_letters": dead.get(d.name, 0)} for d in self._dispatchers},
        }
