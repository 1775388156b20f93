"""The composition root: the only place that builds parts; and the life of a process, from its start to its stop."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from bridge import __version__
from bridge.config.base import Secret
from bridge.config.models import Config, find_exposed
from bridge.config.registry import sink_class
from bridge.config.sinks import SinkSettings, StdoutSettings
from bridge.errors import BridgeError, ConfigError, Incomplete, UsageError
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime import log as logs
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.threads import Signals, Stop, stalled_threads, start_thread
from bridge.runtime.time import Clock, iso_utc, read_boot_id
from bridge.service.forwarder import Forwarder
from bridge.service.identity import Role, VmIdentity, approval_session

if TYPE_CHECKING:
    from bridge.azure.receiver import Receiver
    from bridge.config.approvals import ApprovalSettings
    from bridge.config.bus import RelaySettings
    from bridge.service.dispatcher import Dispatcher
    from bridge.service.metrics import Meter, MetricsServer
    from bridge.sinks.base import Sink


log = logging.getLogger(__name__)

TICK_SECONDS = 5.0
PRUNE_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
# How long closing the state may take after stop_seconds.
LAST_SECONDS = 30.0
_JOIN_SECONDS = 0.02


def build_sink(settings: SinkSettings, signing_secrets: Secret | None = None) -> Sink:
    """Build the sink that `settings` describe; one of Service Bus signs with the secrets, if there are any."""
    signs = {"signing_secrets": signing_secrets} if settings.kind == "servicebus" else {}
    sink: Sink = sink_class(settings.kind)(settings, **signs)
    return sink


def build_sinks(
    settings: Mapping[str, SinkSettings], signing_secrets: Secret | None = None
) -> dict[str, Sink]:
    """Build sinks, and try chat formats on a sample of every event type that they take.

    Args:
        settings: by the sinks' names.
        signing_secrets: what Service Bus messages are signed with.

    Raises:
        ConfigError: a template is faulty, or a format cannot render a type.
    """
    sinks, faults = {}, []
    for name, sink_settings in settings.items():
        try:
            sink = sinks[name] = build_sink(sink_settings, signing_secrets)
            if sink_settings.is_chat_format:
                _check_format(sink, filter_of(sink_settings))
        except (OSError, ValueError) as error:
            faults.append(f"sinks.{name}: {error}")
    if faults:
        raise ConfigError("sinks", faults)
    return sinks


def _check_format(sink: Any, wanted: Filter) -> None:
    from bridge.formats.samples import samples  # noqa: PLC0415 - only chat formats need it

    sink.check_format([event for event in samples(Clock().now()) if wanted.matches_type(event.type)])


def filter_of(settings: SinkSettings, role: str = "forward") -> Filter:
    """Return which events a sink takes; a relay's sinks take those of every VM."""
    is_of_this_vm = settings.is_chat_format or settings.kind == "exec"
    scope = settings.scope or ("self" if is_of_this_vm and role != "relay" else "all")
    return Filter(types=settings.types, where=settings.where, scope=scope)


def state_folder(config: Config, role: str) -> StateFolder:
    """Return the state folder of the process that runs `role`."""
    return StateFolder(Path(config.state_dir) / role)


def sinks_of(config: Config) -> dict[str, SinkSettings]:
    """Return the configured sinks; without any, events go to stdout."""
    return dict(config.sinks) or {"stdout": StdoutSettings(kind="stdout")}


def run_forward(config: Config, *, once: bool = False) -> int:
    """Run the forwarder until it is stopped, or for one poll; return the exit code.

    Raises:
        Incomplete: the one poll had no usable answer, or events could not be delivered.
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    return _run(config, "forward", lambda parts: _forward(parts, once=once))


def run_listen(config: Config, *, dry_run: bool) -> int:
    """Run the approval listener until it is stopped; return the exit code.

    Raises:
        UsageError: the configuration has no [approvals].
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    settings = config.approvals
    if settings is None:
        raise UsageError("listen: the configuration has no [approvals]; see docs/configuration.md")
    return _run(config, "listen", lambda parts: _listen(parts, settings, dry_run=dry_run))


def run_relay(config: Config) -> int:
    """Run the relay until it is stopped; return the exit code.

    Raises:
        UsageError: the configuration has no [relay], or a sink cannot be used with a relay.
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    settings = relay_settings(config)
    return _run(config, "relay", lambda parts: _relay(parts, settings))


def relay_settings(config: Config) -> RelaySettings:
    """Return the settings of what the relay receives from.

    Raises:
        UsageError: the configuration has no [relay], or a sink filters by the VM.
    """
    if config.relay is None:
        raise UsageError("relay: the configuration has no [relay]; see docs/configuration.md")
    faults = [fault for name, sink in sinks_of(config).items() for fault in _faults_of_relayed(name, sink)]
    if faults:
        raise UsageError(
            "relay: any VM's copy of an event may arrive, so no sink can filter by the VM: "
            + "; ".join(faults)
        )
    return config.relay


def _faults_of_relayed(name: str, sink: SinkSettings) -> Iterator[str]:
    if sink.scope not in (None, "all"):
        yield f'sinks.{name}.scope: given {sink.scope}, expected none or "all"'
    for wanted in sink.where:
        if wanted.partition(".")[0] in ("AffectsThisVm", "Vm"):
            yield f"sinks.{name}.where.{wanted}: expected another, such as Resources"


class NoMeter:
    """Counts nothing, in a process without metrics."""

    def polling(self) -> AbstractContextManager[None]:
        """Count no poll."""
        return nullcontext()

    def committed(self, *_: object) -> None:
        """Count nothing."""

    sent = approved = jumped = committed


class MeasuredImds(ImdsClient):
    """IMDS; its requests for the document are counted."""

    meter: Meter | NoMeter = NoMeter()

    def document(self, **limits: Any) -> bytes:
        """Return the document, and count the request."""
        with self.meter.polling():
            return super().document(**limits)


class MeasuredOutbox(Outbox):
    """The outbox; its new events are counted."""

    meter: Meter | NoMeter = NoMeter()

    def commit(self, events: Any, **more: Any) -> bool:
        """Store events, and count them."""
        stored = super().commit(events, **more)
        self.meter.committed([event for event, _ in events])
        return stored


class Parts:
    """What every process has; the flow and the dispatchers are built on it."""

    def __init__(self, config: Config, role: Role) -> None:
        self.config = config
        self.role = role
        self.clock = Clock()
        self.stop = Stop()
        self.settings = sinks_of(config)
        self.filters = {name: filter_of(sink, role) for name, sink in self.settings.items()}
        # A faulty template must end the process before it publishes; other sinks are built after the first poll.
        self._checked = build_sinks({name: one for name, one in self.settings.items() if one.is_chat_format})
        self.folder = state_folder(config, role)
        self.meter, self.metrics = self._metrics()
        self.outbox = MeasuredOutbox(
            self.folder,
            clock=self.clock,
            sinks={name: (self.filters[name], sink.from_start) for name, sink in self.settings.items()},
            max_bytes=int(config.max_outbox_mb * 1024 * 1024),
            retain_seconds=config.retain_seconds,
        )
        self.outbox.meter = self.meter
        self.imds = MeasuredImds(config.imds, clock=self.clock)
        self.imds.meter = self.meter
        self.boot_id = read_boot_id()
        asked = None if role == "relay" else self.imds
        self.identity = VmIdentity(
            config, role, imds=asked, outbox=self.outbox, clock=self.clock, boot_id=self.boot_id
        )

    def _metrics(self) -> tuple[Meter | NoMeter, MetricsServer | None]:
        listen = self.config.metrics.listen
        if not listen:
            return NoMeter(), None
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - few processes need it

        from bridge.service.metrics import Meter, MetricsServer  # noqa: PLC0415

        registry = CollectorRegistry()
        meter = Meter(registry, self.settings)
        return meter, MetricsServer(listen, role=self.role, registry=registry, clock=self.clock)

    def dispatchers(self) -> list[Dispatcher]:
        """Build one dispatcher for each sink.

        Raises:
            ConfigError: a sink cannot be built.
        """
        from bridge.service.dispatcher import Dispatcher  # noqa: PLC0415 - the first poll need not wait for it

        rest = {name: sink for name, sink in self.settings.items() if name not in self._checked}
        # Whoever waits for a receipt has the secrets, and believes only what is signed with them.
        secrets = self.config.approvals.signing_secrets if self.config.approvals else None
        sinks = {**self._checked, **build_sinks(rest, secrets if self.role == "listen" else None)}
        return [
            Dispatcher(
                name,
                sinks[name],
                max_age_seconds=sink.max_age_seconds,
                outbox=self.outbox,
                clock=self.clock,
                max_per_second=sink.max_per_second,
                count=partial(self.meter.sent, name),
            )
            for name, sink in self.settings.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What makes a process a forwarder, a listener or a relay: its loops, by thread name, and its status.

    `faults` is for a flow that ends on its own: it returns what the loops could not do.
    """

    loops: Mapping[str, Callable[[], None]]
    status: Callable[[], dict[str, Any]]
    faults: Callable[[], list[str]] | None = None


class Process:
    """A flow's loops and the dispatchers behind them, from start to stop. It is used from the main thread.

    Args:
        parts: what the flow is built on; its stop is set when the loops are to end, and its outbox closed after them.
        flow: what the process does.
        signals: what asks for the stop.
    """

    def __init__(self, parts: Parts, flow: Flow, signals: Signals) -> None:
        self._parts = parts
        self._flow = flow
        self._signals = signals
        self._outbox = parts.outbox
        self._clock = parts.clock
        self._supervisor = Supervisor()
        self._stalled: list[str] = []
        self._dispatchers: list[Dispatcher] = []

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
            extra={"sinks": [*self._parts.settings]},
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
            self._parts.metrics.start(self._full_status)
        signal = self._watch_over([*loops, *senders])
        undelivered = self._end(loops, senders, why=signal)
        if self._flow.faults and (faults := [*self._flow.faults(), *undelivered]):
            raise Incomplete("; ".join(faults))
        return 0 if signal else 1

    def _watch_over(self, threads: list[Thread]) -> str | None:
        """Run the periodic tasks until a signal comes or the flow is done (why), or a thread ends (None)."""
        every_seconds: dict[Callable[[], None], float] = {
            self._look_after_state: TICK_SECONDS,
            self._outbox.prune: PRUNE_SECONDS,
            self._check_progress: min(PROGRESS_SECONDS, (self._supervisor.watchdog_seconds or math.inf) / 4),
        }
        due_at = dict.fromkeys(every_seconds, -math.inf)
        while all(thread.is_alive() for thread in threads):
            try:
                for task in [task for task, at in due_at.items() if at <= self._clock.monotonic()]:
                    task()
                    due_at[task] = self._clock.monotonic() + every_seconds[task]
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

        A second signal ends it at once.
        """
        log.info("stopping: waiting events are delivered first", extra={"why": why})
        stop_seconds = self._parts.config.stop_seconds
        self._supervisor.stopping(stop_seconds + LAST_SECONDS)
        deadline = self._clock.monotonic() + stop_seconds
        self._parts.stop.set()
        for dispatcher in self._dispatchers:
            dispatcher.begin_drain()
        self._join(loops, deadline)
        for dispatcher in self._dispatchers:
            dispatcher.stop_when_drained()
        self._join(senders, deadline)
        undelivered = self._undelivered()
        self._write_status(self._status(running=False))
        if self._parts.metrics:
            self._parts.metrics.close()
        self._outbox.close()
        log.info("stopped")
        logs.flush()  # whoever prints an error now does not break a line of the log
        return undelivered

    def _join(self, threads: list[Thread], deadline: float) -> None:
        while any(thread.is_alive() for thread in threads) and self._clock.monotonic() < deadline:
            if self._signals.wait(_JOIN_SECONDS):
                log.warning("second signal: stopped at once; the next start delivers waiting events")
                logs.flush()
                os._exit(1)

    def _undelivered(self) -> list[str]:
        left = {one.name: count for one in self._dispatchers if (count := self._outbox.backlog(one.name)[0])}
        if left:
            log.warning("stopped with events waiting; the next start delivers them", extra={"waiting": left})
        dead = {one.name: one.dead_lettered for one in self._dispatchers if one.dead_lettered}
        return [
            *(f"sinks.{name}: {count} event(s) wait for the next start" for name, count in left.items()),
            *(f"sinks.{name}: {count} event(s) dead-lettered" for name, count in dead.items()),
        ]

    def _look_after_state(self) -> None:
        """Use a state that works again, notice the wall clock's jumps, and show how things are."""
        self._outbox.recover()
        if jump := self._clock.jump_seconds():
            seconds = round(jump, 1)
            log.warning("the wall clock jumped; the ages of events do not change", extra={"seconds": seconds})
            self._parts.meter.jumped()
        self._write_status(self._status())

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

    def _status(self, *, running: bool = True) -> dict[str, Any]:
        dead = self._outbox.dead_letter_counts()
        return {
            "version": __version__,
            "role": self._parts.role,
            "pid": os.getpid(),
            "running": running,
            "written_at": iso_utc(self._clock.now()),
            "storage_error": self._outbox.storage_error,
            "left_sinks": self._outbox.left_sinks(),
            **self._flow.status(),
            "sinks": {
                one.name: {**one.status(), "dead_letters": dead.get(one.name, 0)} for one in self._dispatchers
            },
        }

    def _full_status(self) -> dict[str, Any]:
        """Return what the status file would show now, and what only metrics show."""
        sizes = {"outbox_bytes": self._outbox.size_bytes(), "storage_errors": self._outbox.storage_errors}
        return {**self._status(), **sizes}

    def _write_status(self, status: dict[str, Any]) -> None:
        """Replace the status file and the supervisor's line."""
        if self._supervisor.is_there:
            from bridge.service.status import headline  # noqa: PLC0415 - only a supervisor needs it

            self._supervisor.report_status(headline(status))
        try:
            self._parts.folder.write_status(status)
        except OSError as error:
            log.debug("the status file cannot be written: %s", error)


def _run(config: Config, role: Role, build: Callable[[Parts], Flow]) -> int:
    os.umask(0o077)
    logs.set_up(level=config.log_level, style=config.log_format)
    for path in find_exposed(config, role):
        log.error(
            "everybody may write %s, and so change what this process does; remove that permission", path
        )
    with Signals() as signals:
        parts = Parts(config, role)
        parts.identity.settle(lambda seconds: signals.wait(seconds, keep=True))
        return Process(parts, build(parts), signals).run()


def _forward(parts: Parts, *, once: bool) -> Flow:
    forwarder = Forwarder(parts)
    if once:
        return Flow(loops={"poll": forwarder.run_once}, status=forwarder.status, faults=forwarder.faults)
    return Flow(loops={"poll": forwarder.run}, status=forwarder.status)


def _listen(parts: Parts, settings: ApprovalSettings, *, dry_run: bool) -> Flow:
    from bridge.service.listener import Listener  # noqa: PLC0415 - only `listen` needs it

    identity = parts.identity
    for variable in parts.config.policy_variables:
        log.warning("the environment variable %s sets what may be approved", variable)

    def session() -> str | None:
        return approval_session(settings.session, identity.vm if identity.resolved else None)

    bus: Receiver | None = None
    if settings.has_bus:
        from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages

        bus = BusReceiver(settings, what="commands", session=session, clock=parts.clock, stop=parts.stop)
    listener = Listener(parts, settings, bus, dry_run=dry_run)
    return Flow(
        loops={"decide": listener.run, **({"commands": bus.run} if bus else {})},
        status=lambda: {**listener.status(), "commands": bus.status() if bus else None},
    )


def _relay(parts: Parts, settings: RelaySettings) -> Flow:
    from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages
    from bridge.service.relay import Relay  # noqa: PLC0415

    settled = Stop()
    receiver = BusReceiver(settings, what="events", clock=parts.clock, stop=settled)
    relay = Relay(parts, receiver, settled)
    return Flow(loops={"relay": relay.run, "events": receiver.run}, status=lambda: {"relay": relay.status()})
