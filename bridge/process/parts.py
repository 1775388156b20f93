"""What every process is built on: its sinks, outbox, IMDS, identity and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from bridge.config.models import Config, MetricsSettings
from bridge.config.registry import sink_class
from bridge.config.sinks import SinkSettings
from bridge.delivery.holding import Copies, Gathering, Holding
from bridge.errors import ConfigError
from bridge.events.builder import Reporter
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.process.identity import Role, VmIdentity
from bridge.runtime.threads import Stop
from bridge.runtime.time import Clock, read_boot_id
from bridge.sinks.stdout import StdoutSettings

if TYPE_CHECKING:
    from bridge.delivery.dispatcher import Dispatcher
    from bridge.process.metrics import Meter, MetricsServer
    from bridge.sinks.base import Sink

log = logging.getLogger(__name__)


def build_sinks(settings: Mapping[str, SinkSettings]) -> dict[str, Sink]:
    """Build sinks; a template is tried on a sample of every event type that it takes.

    Args:
        settings: by the sinks' names.

    Raises:
        ConfigError: a template is faulty, or a secret cannot be used.
    """
    sinks, faults = {}, []
    for name, sink_settings in settings.items():
        try:
            sinks[name] = sink_class(sink_settings.kind)(sink_settings)
        except (OSError, ValueError) as error:
            faults.append(f"sinks.{name}: {error}")
    if faults:
        raise ConfigError("sinks", faults)
    return sinks


def filter_of(settings: SinkSettings, role: str = "forward") -> Filter:
    """Return which events a sink takes; a relay's sinks take those of every VM."""
    is_of_this_vm = settings.is_chat_format or settings.acts_on_this_vm
    scope = settings.scope or ("self" if is_of_this_vm and role != "relay" else "all")
    return Filter(types=settings.types, where=settings.where, scope=scope)


def sinks_of(config: Config, role: str = "forward") -> dict[str, SinkSettings]:
    """Return the configured sinks, with what they need of the rest; without any, events go to stdout."""
    # Whoever waits for a receipt has the secrets, and believes only what is signed with them.
    secrets = config.approvals.signing_secrets if config.approvals and role == "listen" else None
    linked = {name: sink.linked(config.console_url, secrets) for name, sink in config.sinks.items()}
    return linked or {"stdout": StdoutSettings(kind="stdout")}


class NoMeter:
    """Counts nothing, in a process without metrics."""

    polling = nullcontext

    def committed(self, *_: object) -> None:
        """Count nothing."""

    sent = approved = prepared = recovered = unprepared = jumped = follow = committed


class Parts:
    """What every process has; the flow and the dispatchers are built on it."""

    def __init__(self, config: Config, role: Role) -> None:
        self.role = role
        self.clock = Clock()
        self.stop = Stop()
        self.show_status: Callable[[], object] = lambda: None  # once there is a process
        self.sinks = sinks_of(config, role)
        # A faulty template must end the process before it publishes; other sinks are built after the first poll.
        self._checked = build_sinks({name: one for name, one in self.sinks.items() if one.is_chat_format})
        is_fleet = role == "forward" and config.documents == "named"
        held = {name: self._holding(sink, is_fleet=is_fleet) for name, sink in self.sinks.items()}
        self._holdings = {name: one for name, one in held.items() if one}
        self.folder = StateFolder(config.state_dir / role)
        self.meter, self.metrics = self._metrics(config.metrics)
        self.outbox = KeptOutbox(
            self.folder,
            clock=self.clock,
            sinks={name: (filter_of(sink, role), sink.from_start) for name, sink in self.sinks.items()},
            max_bytes=int(config.max_outbox_mb * 1024 * 1024),
            retain_seconds=config.retain_seconds,
            count=self.meter.committed,
            held={name: one.until for name, one in self._holdings.items()},
        )
        self.imds = ImdsClient(config.imds, clock=self.clock, measured=self.meter.polling)
        self.boot_id = read_boot_id()
        self.identity = VmIdentity(
            role,
            imds=None if role == "relay" else self.imds,
            outbox=self.outbox,
            clock=self.clock,
            boot_id=self.boot_id,
            make_reporter=partial(
                Reporter,
                group_source=config.source,
                vm_source=config.vm_source,
                session=config.approvals.session if config.approvals else "",
            ),
            has_instance_data=not config.imds.vm_name,
        )

    def _metrics(self, settings: MetricsSettings) -> tuple[Meter | NoMeter, MetricsServer | None]:
        if not settings.listen:
            return NoMeter(), None
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - few processes need it

        from bridge.process.metrics import Meter, MetricsServer  # noqa: PLC0415

        registry = CollectorRegistry()
        meter = Meter(registry, self.sinks)
        return meter, MetricsServer(
            settings.listen,
            role=self.role,
            next_port=settings.next_port,
            registry=registry,
            clock=self.clock,
        )

    def _holding(self, sink: SinkSettings, *, is_fleet: bool) -> Holding | None:
        """Return how long a sink's events are held, None for not at all."""
        if self.role == "relay" and sink.gather_seconds:  # a VM's own chat has nothing to gather
            return Gathering(sink.gather_seconds, self.clock)
        # With documents = "all", each copy comes with a document, which is not held.
        return Copies(self.clock) if is_fleet and sink.drops_copies else None

    def dispatchers(self) -> list[Dispatcher]:
        """Build one dispatcher for each sink.

        Raises:
            ConfigError: a sink cannot be built.
        """
        from bridge.delivery.dispatcher import Dispatcher  # noqa: PLC0415 - the first poll need not wait for it

        rest = {name: sink for name, sink in self.sinks.items() if name not in self._checked}
        sinks = {**self._checked, **build_sinks(rest)}
        for name, one in sinks.items():
            if one.outdated:
                log.warning("sinks.%s: %s", name, one.outdated)
        return [
            Dispatcher(
                name,
                sinks[name],
                max_age_seconds=sink.max_age_seconds,
                outbox=self.outbox,
                clock=self.clock,
                max_per_second=sink.max_per_second,
                holding=self._holdings.get(name),
                count=partial(self.meter.sent, name),
            )
            for name, sink in self.sinks.items()
        ]
