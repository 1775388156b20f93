"""The composition root: the only place that builds parts, and the life of a process from start to stop."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from bridge import __version__
from bridge.config.approvals import ApprovalSettings
from bridge.config.bus import RelaySettings
from bridge.config.models import Config
from bridge.config.registry import sink_class
from bridge.config.sinks import SinkSettings, StdoutSettings
from bridge.errors import ConfigError, UsageError
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime import logging as logs
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.signals import Signals
from bridge.runtime.threads import Stop, stalled_threads, start_thread
from bridge.service.dispatcher import Dispatcher
from bridge.service.forwarder import Forwarder
from bridge.service.identity import Role, VmIdentity, approval_session
from bridge.service.status import headline
from bridge.sinks.base import Sink

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
STATUS_SECONDS = 2.0
PRUNE_SECONDS = 3600.0
ALIVE_SECONDS = 10.0  # how often it is seen whether every loop lives; four times within a watchdog's time
LAST_SECONDS = 30.0  # what closing the state may take after stop_seconds

_ROLES = {"forward": "forwards", "listen": "listens for commands", "relay": "relays"}


def build_sink(settings: SinkSettings) -> Sink:
    """Make the sink that `settings` describe."""
    sink: Sink = sink_class(settings.kind)(settings)
    return sink


def build_sinks(settings: Mapping[str, SinkSettings]) -> dict[str, Sink]:
    """Make all sinks, and try the formats of those for people on every type of event that they take.

    Raises:
        ConfigError: a template is faulty, or a format cannot show a type.
    """
    sinks, faults = {}, []
    for name, sink_settings in settings.items():
        try:
            sink = sinks[name] = build_sink(sink_settings)
            if sink_settings.is_chat_format:
                _check_format(sink, filter_of(sink_settings))
        except (OSError, ValueError) as error:
            faults.append(f"sinks.{name}: {error}")
    if faults:
        raise ConfigError("sinks", faults)
    return sinks


def _check_format(sink: Any, wanted: Filter) -> None:
    from bridge.formats.samples import samples  # noqa: PLC0415 - most have no format for people

    sink.check_format([event for event in samples(Clock().now()) if wanted.matches_type(event.type)])


def filter_of(settings: SinkSettings, role: str = "forward") -> Filter:
    """Return which events a sink takes; a relay is no VM, so that its sinks take what names any."""
    scope = settings.scope or ("self" if settings.is_chat_format and role != "relay" else "all")
    return Filter(types=settings.types, where=settings.where, scope=scope)


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
    return _run(config, "forward", _forward)


def run_listen(config: Config, *, dry_run: bool) -> int:
    """Run the approval listener until it is stopped; return the exit code.

    Raises:
        UsageError: there are no approvals in the configuration.
        StateError: the state is held or from a newer version.
    """
    settings = config.approvals
    if settings is None:
        raise UsageError("listen: there is no [approvals] in the configuration; see README.md")
    return _run(config, "listen", lambda process: _listen(process, settings, dry_run=dry_run))


def run_relay(config: Config) -> int:
    """Run the relay until it is stopped; return the exit code.

    Raises:
        UsageError: there is no relay in the configuration, or a sink of it cannot be relayed to.
        StateError: the state is held or from a newer version.
    """
    settings = relay_settings(config)
    return _run(config, "relay", lambda process: _relay(process, settings))


def relay_settings(config: Config) -> RelaySettings:
    """Return where the relay reads.

    Raises:
        UsageError: there is no relay in the configuration, or a sink asks for what only one VM can tell.
    """
    if config.relay is None:
        raise UsageError("relay: there is no [relay] in the configuration; see README.md")
    faults = [fault for name, sink in sinks_of(config).items() for fault in _faults_of_relayed(name, sink)]
    if faults:
        raise UsageError(
            "relay: which VM's copy of an event comes is chance, so no sink can choose by it\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    return config.relay


def _faults_of_relayed(name: str, sink: SinkSettings) -> Iterator[str]:
    if sink.scope not in (None, "all"):
        yield f'sinks.{name}.scope: given {sink.scope}, expected none or "all"'
    for wanted in sink.where:
        if wanted.partition(".")[0] in ("AffectsThisVm", "Vm"):
            yield f"sinks.{name}.where.{wanted}: expected another, such as Resources"


@dataclass(frozen=True, kw_only=True)
class _Flow:
    """What makes a process a forwarder, a listener or a relay: loops that end at the stop, and what they tell."""

    loops: dict[str, Callable[[], None]]
    status: Callable[[], dict[str, Any]]


def _forward(process: _Process) -> _Flow:
    imds = ImdsClient(process.config.imds, clock=process.clock)
    forwarder = Forwarder(
        process.config, imds=imds, outbox=process.outbox, clock=process.clock, stop=process.stop
    )
    return _Flow(loops={"poll": forwarder.run}, status=forwarder.status)


def _listen(process: _Process, settings: ApprovalSettings, *, dry_run: bool) -> _Flow:
    from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages
    from bridge.service.listener import Listener  # noqa: PLC0415

    config, clock = process.config, process.clock
    imds = ImdsClient(config.imds, clock=clock)
    identity = VmIdentity(config, "listen", imds=imds, outbox=process.outbox, clock=clock)

    def session() -> str | None:
        return approval_session(settings.session, identity.vm if identity.resolved else None)

    received = BusReceiver(settings, what="commands", session=session, clock=clock, stop=process.stop)
    listener = Listener(
        settings,
        imds=imds,
        receiver=received,
        outbox=process.outbox,
        clock=clock,
        stop=process.stop,
        identity=identity,
        dry_run=dry_run,
    )
    return _Flow(
        loops={"decide": listener.run, "commands": received.run},
        status=lambda: {**listener.status(), "commands": received.status()},
    )


def _relay(process: _Process, settings: RelaySettings) -> _Flow:
    from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages
    from bridge.service.relay import Relay  # noqa: PLC0415

    settled = Stop()
    receiver = BusReceiver(settings, what="events", clock=process.clock, stop=settled)
    relay = Relay(
        receiver=receiver, outbox=process.outbox, clock=process.clock, stop=process.stop, settled=settled
    )
    return _Flow(loops={"relay": relay.run, "events": receiver.run}, status=lambda: {"relay": relay.status()})


def _run(config: Config, role: Role, build: Callable[[_Process], _Flow]) -> int:
    os.umask(0o077)
    logs.set_up(level=config.log_level, style=config.log_format)
    with Signals() as signals:
        process = _Process(config, role)
        return process.run(build(process), signals)


class _Process:
    """A flow's loops with the dispatchers behind them: started, watched over and stopped in order."""

    def __init__(self, config: Config, role: Role) -> None:
        self.config = config
        self.clock = Clock()
        self.stop = Stop()
        self._supervisor = Supervisor()
        self._stalled: list[str] = []
        self._role = role
        settings = sinks_of(config)
        sinks = build_sinks(settings)
        filters = {name: filter_of(sink, role) for name, sink in settings.items()}
        self._folder = state_folder(config, role)
        self.outbox = Outbox(
            self._folder,
            clock=self.clock,
            sinks={name: (filters[name], sink.from_start) for name, sink in settings.items()},
            max_bytes=int(config.max_outbox_mb * 1024 * 1024),
            retain_seconds=config.retain_seconds,
        )
        self._dispatchers = [
            Dispatcher(
                name,
                sinks[name],
                wanted=filters[name],
                max_age_seconds=sink.max_age_seconds,
                outbox=self.outbox,
                clock=self.clock,
                max_per_second=sink.max_per_second,
            )
            for name, sink in settings.items()
        ]
        self._started_at = self.clock.now()

    def run(self, flow: _Flow, signals: Signals) -> int:
        log.info(
            "imds-bridge %s %s",
            __version__,
            _ROLES[self._role],
            extra={"sinks": [d.name for d in self._dispatchers]},
        )
        self._supervisor.ready()
        # First of all: a notice may be there already.
        loops = [start_thread(name, loop) for name, loop in flow.loops.items()]
        senders = [start_thread(f"sink-{d.name}", d.run) for d in self._dispatchers]
        signal = self._watch_over(signals, [*loops, *senders], flow)
        return self._end(signals, loops, senders, flow, why=signal)

    def _watch_over(self, signals: Signals, threads: list[Thread], flow: _Flow) -> str | None:
        """Do what is due now and then, until a signal comes (its name) or a thread ends (None)."""
        due: dict[Callable[[], None], float] = {
            self.outbox.recover: TICK_SECONDS,
            lambda: self._write_status(flow): STATUS_SECONDS,
            self.outbox.prune: PRUNE_SECONDS,
            self._check_progress: min(ALIVE_SECONDS, (self._supervisor.watchdog_seconds or math.inf) / 4),
        }
        next_at = dict.fromkeys(due, 0.0)
        while all(thread.is_alive() for thread in threads):
            for task, every_seconds in due.items():
                if self.clock.monotonic() >= next_at[task]:
                    task()
                    next_at[task] = self.clock.monotonic() + every_seconds
            if signal := signals.wait(TICK_SECONDS):
                return signal
        log.critical("a thread ended; the process stops so that its supervisor starts it afresh")
        return None

    def _end(
        self, signals: Signals, loops: list[Thread], senders: list[Thread], flow: _Flow, *, why: str | None
    ) -> int:
        """Let the loops end and deliver what waits, within the time to stop; a second signal ends it at once."""
        log.info("stopping: what waits is delivered first", extra={"why": why})
        self._supervisor.stopping(self.config.stop_seconds + LAST_SECONDS)
        deadline = self.clock.monotonic() + self.config.stop_seconds
        self.stop.set()
        for dispatcher in self._dispatchers:
            dispatcher.begin_drain()
        self._join(loops, signals, deadline)
        for dispatcher in self._dispatchers:
            dispatcher.stop_when_drained()
        self._join(senders, signals, deadline)
        left = {d.name: waiting for d in self._dispatchers if (waiting := self.outbox.backlog(d.name)[0])}
        if left:
            log.warning("stopped with events waiting; the next start sends them", extra={"waiting": left})
        self._write_status(flow, running=False)
        self.outbox.close()
        log.info("stopped")
        return 0 if why else 1

    def _join(self, threads: list[Thread], signals: Signals, deadline: float) -> None:
        while any(thread.is_alive() for thread in threads) and self.clock.monotonic() < deadline:
            if signals.wait(0.02):
                log.warning("a second signal: stopped at once; the next start sends what waits")
                os._exit(1)

    def _check_progress(self) -> None:
        """Tell the supervisor that the process lives, but only while every loop does."""
        stalled = stalled_threads()
        if not stalled:
            self._supervisor.alive()
        if stalled and stalled != self._stalled:
            log.critical("no sign of life from %s; a supervisor will start us afresh", ", ".join(stalled))
        elif self._stalled and not stalled:
            log.warning("every thread lives again")
        self._stalled = stalled

    def _write_status(self, flow: _Flow, *, running: bool = True) -> None:
        dead = self.outbox.dead_letter_counts()
        status = {
            "version": __version__,
            "role": self._role,
            "pid": os.getpid(),
            "running": running,
            "started_at": iso_utc(self._started_at),
            "written_at": iso_utc(self.clock.now()),
            "storage_error": self.outbox.storage_error,
            **flow.status(),
            "sinks": {d.name: {**d.status(), "dead_letters": dead.get(d.name, 0)} for d in self._dispatchers},
        }
        if self._supervisor.is_there:
            self._supervisor.at(headline(status))
        try:
            self._folder.write_status(status)
        except OSError as error:
            log.debug("the status cannot be written: %s", error)
