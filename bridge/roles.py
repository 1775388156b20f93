"""The composition root: it builds what each role consists of, and runs it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.config.models import Config, find_exposed
from bridge.config.sinks import SinkSettings
from bridge.contract.status import RelayStatus
from bridge.errors import UsageError
from bridge.forward.forwarder import Forwarder
from bridge.imds.instance import approval_session
from bridge.process.identity import Role
from bridge.process.parts import Parts, sinks_of
from bridge.process.process import Flow, Process
from bridge.runtime import log as logs
from bridge.runtime.threads import Signals, Stop

if TYPE_CHECKING:
    from bridge.approvals.in_service import InService
    from bridge.azure.receiver import Receiver
    from bridge.config.approvals import ApprovalSettings
    from bridge.config.bus import RelaySettings

log = logging.getLogger(__name__)


def run_forward(config: Config, *, once: bool = False) -> int:
    """Run the forwarder until it is stopped, or for one poll; return the exit code.

    Raises:
        Incomplete: the one poll had no usable answer, or events could not be delivered.
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    return _run(config, "forward", lambda parts: _forward(parts, config, once=once))


def run_listen(config: Config, *, dry_run: bool) -> int:
    """Run the approval listener until it is stopped; return the exit code.

    Raises:
        UsageError: the configuration has no [approvals].
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    settings = approval_settings(config)
    variables = config.policy_variables
    in_service: InService | None = None
    if config.in_service:
        from bridge.approvals.in_service import InService  # noqa: PLC0415 - few processes have it

        in_service = InService(config.in_service, settings, dry_run=dry_run)

    def build(parts: Parts) -> Flow:
        return _listen(parts, settings, variables, in_service, dry_run=dry_run)

    return _run(config, "listen", build, in_service)


def run_relay(config: Config) -> int:
    """Run the relay until it is stopped; return the exit code.

    Raises:
        UsageError: the configuration has no [relay], or a sink cannot be used with a relay.
        StateError: the state is locked by another process, or a newer version wrote it.
    """
    settings = relay_settings(config)
    return _run(config, "relay", lambda parts: _relay(parts, settings))


def approval_settings(config: Config) -> ApprovalSettings:
    """Return the settings of what the listener approves.

    Raises:
        UsageError: the configuration has no [approvals].
    """
    if config.approvals is None:
        raise UsageError("listen: the configuration has no [approvals]; see docs/configuration.md")
    return config.approvals


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


def _run(
    config: Config, role: Role, build: Callable[[Parts], Flow], in_service: InService | None = None
) -> int:
    os.umask(0o077)
    logs.set_up(level=config.log_level, style=config.log_format)
    for path in find_exposed(config, role):
        log.error(
            "everybody may write %s, and so change what this process does; remove that permission", path
        )
    with Signals() as signals:
        parts = Parts(config, role)
        if programs_of(config, role):
            os.environ.update(folders_of_programs(config.path, parts.folder.path))
        if in_service:  # a load balancer asks before it is known which VM this is
            in_service.start(parts.outbox)
        parts.identity.settle(lambda seconds: signals.wait(seconds, keep=True))
        file = str(config.path.absolute()) if config.path else ""
        flow = replace(build(parts), config=file, find_program_faults=_tests_of_programs(config, role))
        return Process(parts, flow, signals, stop_seconds=config.stop_seconds).run()


def programs_of(config: Config, role: str) -> dict[tuple[str, ...], str]:
    """Return the programs that a process will need, of sinks and, for a listener, of auto rules, with their keys."""
    of_rules = config.approvals.programs if config.approvals and role == "listen" else ()
    of_sinks = {getattr(sink, "run", ()): f"sinks.{name}" for name, sink in config.sinks.items()}
    return {run: key for run, key in {**dict.fromkeys(of_rules, "approvals.auto"), **of_sinks}.items() if run}


def folders_of_programs(config: Path | None, state: Path) -> dict[str, str]:
    """Make the folder in which programs keep their own files, and return the variables that name it and the secrets'.

    Args:
        config: the file of the settings, beside which the secrets are if systemd has loaded none.
        state: the folder of the process.
    """
    own = state.absolute() / "programs"
    with suppress(OSError):  # a full disk: a program that needs it says so
        own.mkdir(parents=True, exist_ok=True)
    found = {"STATE_DIRECTORY": str(own)}
    if config and not os.environ.get("CREDENTIALS_DIRECTORY"):
        beside = config.absolute().parent  # where a unit before systemd 250 has copies of them
        found["CREDENTIALS_DIRECTORY"] = str(beside / "secrets" if (beside / "secrets").is_dir() else beside)
    return found


def _tests_of_programs(config: Config, role: Role) -> Callable[[], Sequence[str]]:
    if not (programs := programs_of(config, role)):
        return tuple
    from bridge.runtime.program import find_fault  # noqa: PLC0415 - who runs none need not load it

    return lambda: [*filter(None, map(find_fault, programs))]


def _forward(parts: Parts, config: Config, *, once: bool) -> Flow:
    forwarder = Forwarder(parts, config.imds, is_fleet=config.documents == "named")
    if once:
        return Flow(loops={"poll": forwarder.run_once}, status=forwarder.status, faults=forwarder.faults)
    return Flow(loops={"poll": forwarder.run}, status=forwarder.status)


def _listen(
    parts: Parts,
    settings: ApprovalSettings,
    variables: Iterable[str],
    in_service: InService | None,
    *,
    dry_run: bool,
) -> Flow:
    from bridge.approvals.listener import Listener  # noqa: PLC0415 - only `listen` needs it

    identity = parts.identity
    for variable in variables:
        log.warning("the environment variable %s sets what may be approved", variable)

    def session() -> str | None:
        return approval_session(settings.session, identity.vm if identity.resolved else None)

    bus: Receiver | None = None
    if settings.has_bus:
        from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages

        bus = BusReceiver(settings, what="commands", session=session, clock=parts.clock, stop=parts.stop)
    listener = Listener(parts, settings, bus, dry_run=dry_run)
    if in_service:
        in_service.is_in_work = listener.is_in_work
    return Flow(
        loops={"decide": listener.run, **({"commands": bus.run} if bus else {})},
        status=listener.status,
        is_busy=listener.is_busy,
    )


def _relay(parts: Parts, settings: RelaySettings) -> Flow:
    from bridge.azure.bus_receiver import BusReceiver  # noqa: PLC0415 - it loads the Azure packages
    from bridge.forward.relay import Relay  # noqa: PLC0415

    settled = Stop()
    receiver = BusReceiver(settings, what="events", clock=parts.clock, stop=settled)
    relay = Relay(parts, receiver, settled)
    return Flow(
        loops={"relay": relay.run, "events": receiver.run}, status=lambda: RelayStatus(relay=relay.status())
    )
