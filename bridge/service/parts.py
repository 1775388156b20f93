"""What every process is built on: its sinks, outbox, IMDS, identity and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.config.base import Secret
from bridge.config.models import Config
from bridge.config.registry import sink_class
from bridge.config.sinks import SinkSettings, StdoutSettings
from bridge.errors import ConfigError
from bridge.events.filters import Filter
from bridge.imds.client import ImdsClient
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.threads import Stop
from bridge.runtime.time import Clock, read_boot_id
from bridge.service.holding import Copies, Gathering, Holding
from bridge.service.identity import Role, VmIdentity

if TYPE_CHECKING:
    from bridge.service.dispatcher import Dispatcher
    from bridge.service.metrics import Meter, MetricsServer
    from bridge.sinks.base import Sink


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
        signs = {"signing_secrets": signing_secrets} if sink_settings.kind == "servicebus" else {}
        try:
            sink = sinks[name] = sink_class(sink_settings.kind)(sink_settings, **signs)
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


def sinks_of(config: Config) -> dict[str, SinkSettings]:
    """Return the configured sinks, with links to the console; without any, events go to stdout."""
    linked = {name: sink.linked(config.console_url) for name, sink in config.sinks.items()}
    return linked or {"stdout": StdoutSettings(kind="stdout")}


class NoMeter:
    """Counts nothing, in a process without metrics."""

    polling = nullcontext

    def committed(self, *_: object) -> None:
        """Count nothing."""

    sent = approved = prepared = recovered = unprepared = jumped = committed


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
        held = {name: self._holding(sink) for name, sink in self.settings.items()}
        self._holdings = {name: one for name, one in held.items() if one}
        self.folder = StateFolder(config.state_dir / role)
        self.meter, self.metrics = self._metrics()
        self.outbox = Outbox(
            self.folder,
            clock=self.clock,
            sinks={name: (self.filters[name], sink.from_start) for name, sink in self.settings.items()},
            max_bytes=int(config.max_outbox_mb * 1024 * 1024),
            retain_seconds=config.retain_seconds,
            count=self.meter.committed,
            held={name: one.until for name, one in self._holdings.items()},
        )
        self.imds = ImdsClient(config.imds, clock=self.clock, measured=self.meter.polling)
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

    def _holding(self, sink: SinkSettings) -> Holding | None:
        """Return how long a sink's events are held, None for not at all."""
        digest_seconds = getattr(sink, "digest_seconds", 0.0)
        if self.role == "relay" and digest_seconds:  # a VM's own chat has nothing to gather
            return Gathering(min(digest_seconds, sink.max_age_seconds / 2), self.clock)
        # Service Bus drops copies; with "all", each comes with a document, which is not held.
        is_fleet = self.role == "forward" and self.config.documents == "named"
        return Copies(self.clock) if is_fleet and sink.kind == "servicebus" else None

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
                holding=self._holdings.get(name),
                count=partial(self.meter.sent, name),
            )
            for name, sink in self.settings.items()
        ]
