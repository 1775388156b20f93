"""The composition root: the only place that builds parts."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.config.base import Secret
from bridge.config.models import Config, find_exposed
from bridge.config.registry import sink_class
from bridge.config.sinks import SinkSettings, StdoutSettings
from bridge.errors import ConfigError, ImdsError, UsageError
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime import log as logs
from bridge.runtime.threads import Signals, Stop
from bridge.runtime.time import Clock, read_boot_id
from bridge.service.forwarder import Forwarder
from bridge.service.identity import Role, VmIdentity, approval_session
from bridge.service.process import Flow, Process

if TYPE_CHECKING:
    from bridge.azure.receiver import Receiver
    from bridge.config.approvals import ApprovalSettings
    from bridge.config.bus import RelaySettings
    from bridge.service.dispatcher import Dispatcher
    from bridge.service.metrics import Meter
    from bridge.service.metrics_server import MetricsServer
    from bridge.sinks.base import Sink


log = logging.getLogger(__name__)


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


class MeasuredImds(ImdsClient):
    """IMDS; its requests for the document are counted, if there are metrics."""

    meter: Meter | None = None

    def document(self, **limits: Any) -> bytes:
        """Return the document, and count the request."""
        began_at, failure = self._clock.monotonic(), None
        try:
            return super().document(**limits)
        except ImdsError as error:
            failure = error
            raise
        finally:
            if self.meter:
                self.meter.polled(failure, self._clock.monotonic() - began_at)


class MeasuredOutbox(Outbox):
    """The outbox; its new events are counted, if there are metrics."""

    meter: Meter | None = None

    def commit(self, events: Any, **more: Any) -> bool:
        """Store events, and count them."""
        stored = super().commit(events, **more)
        if self.meter:
            self.meter.committed([event for event, _ in events])
        return stored


def _count_nothing(*_: object) -> None:
    """Stand in for a meter of a process without metrics."""


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
        self.identity = VmIdentity(
            config,
            role,
            imds=None if role == "relay" else self.imds,
            outbox=self.outbox,
            clock=self.clock,
            boot_id=self.boot_id,
        )

    def _metrics(self) -> tuple[Meter | None, MetricsServer | None]:
        listen = self.config.metrics.listen
        if not listen:
            return None, None
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - few processes need it

        from bridge.service.metrics import Meter  # noqa: PLC0415
        from bridge.service.metrics_server import MetricsServer  # noqa: PLC0415

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
                count=partial(self.meter.sent, name) if self.meter else _count_nothing,
            )
            for name, sink in self.settings.items()
        ]


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

    clock, identity = parts.clock, parts.identity
    for variable in parts.config.policy_variables:
        log.warning("the environment variable %s sets what may be approved", variable)

    def session() -> str | None:
        return approval_session(settings.session, identity.vm if identity.resolved else None)

    bus: Receiver | None = None
    if settings.has_bus:
        from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages

        bus = BusReceiver(settings, what="commands", session=session, clock=clock, stop=parts.stop)
    listener = Listener(
        settings,
        imds=parts.imds,
        receiver=bus,
        outbox=parts.outbox,
        clock=clock,
        stop=parts.stop,
        identity=identity,
        dry_run=dry_run,
        approved=parts.meter.approved if parts.meter else _count_nothing,
    )
    return Flow(
        loops={"decide": listener.run, **({"commands": bus.run} if bus else {})},
        status=lambda: {**listener.status(), "commands": bus.status() if bus else None},
    )


def _relay(parts: Parts, settings: RelaySettings) -> Flow:
    from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages
    from bridge.service.relay import Relay  # noqa: PLC0415

    settled = Stop()
    receiver = BusReceiver(settings, what="events", clock=parts.clock, stop=settled, is_ordered=True)
    relay = Relay(
        receiver=receiver,
        outbox=parts.outbox,
        clock=parts.clock,
        stop=parts.stop,
        settled=settled,
        identity=parts.identity,
    )
    return Flow(loops={"relay": relay.run, "events": receiver.run}, status=lambda: {"relay": relay.status()})
