"""The command `check`: try the settings, the state folders, IMDS, the bus and every sink."""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import Any, Literal

from bridge.cli.common import FAILED, OK, add_config, add_json, json_lines, load_config
from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config, find_exposed
from bridge.config.sinks import alternatives
from bridge.config.values import socket_address
from bridge.errors import (
    ConfigError,
    DeliveryError,
    ImdsError,
    Misconfigured,
    Rejected,
    StateError,
    Unavailable,
    UsageError,
)
from bridge.formats.samples import check_event
from bridge.formats.text import table
from bridge.imds.client import ImdsClient
from bridge.imds.discovery import search
from bridge.imds.document import parse_document
from bridge.outbox.inspect import waiting_counts
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.program import find_fault
from bridge.runtime.text import redact, show
from bridge.runtime.time import Clock
from bridge.service.composition import build_sinks, relay_settings, sinks_of, state_folder
from bridge.service.health import bus_error
from bridge.service.identity import approval_session
from bridge.service.status import SILENT_SECONDS, age_of
from bridge.sinks.base import Inconclusive, Sink

_EPILOG = """\
Publishes nothing without --send. Exits 3 if something does not work.

examples:
  imds-bridge check --config config.toml
  imds-bridge check --send                 send a test message to each sink
  imds-bridge check --json | jq '.[] | select(.result == "FAIL")'
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `check`."""
    command.epilog = _EPILOG
    add_config(command)
    command.add_argument(
        "--send", action="store_true", help="send one message, marked as a test, to each sink"
    )
    add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments)
        show("asking IMDS (its very first answer may take two minutes) and each sink ...", stream=sys.stderr)
        findings = check(config, send=arguments.send)
    except ConfigError as error:
        if arguments.json:
            findings = [_fail("configuration", fault, f"correct {error.source}") for fault in error.faults]
            show(*json_lines([asdict(finding) for finding in findings]))
        raise
    show(*(json_lines([asdict(finding) for finding in findings]) if arguments.json else _render(findings)))
    return FAILED if any(finding.result == "FAIL" for finding in findings) else OK


def _render(findings: Sequence[Finding]) -> list[str]:
    """Write the table, each remedy below its finding."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.check, finding.result, finding.message))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    return table(("CHECK", "RESULT", "MESSAGE"), rows)


_TRIAL_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table: what was checked, whether it works, what was found, and how to fix it."""

    check: str
    result: Literal["ok", "warn", "FAIL"]
    message: str
    remedy: str = ""


def _ok(name: str, message: str) -> Finding:
    return Finding(check=name, result="ok", message=message)


def _warn(name: str, message: str, remedy: str = "") -> Finding:
    return Finding(check=name, result="warn", message=message, remedy=remedy)


def _fail(name: str, message: object, remedy: str = "") -> Finding:
    return Finding(check=name, result="FAIL", message=str(message), remedy=remedy)


def check(config: Config, *, send: bool = False) -> list[Finding]:
    """Try everything that the configuration names; nothing changes, and only `send` publishes, a test message.

    Raises:
        ConfigError: a sink cannot be built from its settings.
    """
    probes: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("settings", lambda: _settings(config)),
        ("permissions", lambda: _permissions(config)),
        ("state", lambda: (_state(state_folder(config, role)) for role in configured_roles(config))),
        ("outbox", lambda: _left_sinks(config)),
        ("metrics", lambda: _metrics(config.metrics.listen) if config.metrics.listen else ()),
        ("imds", lambda: _imds(config) if _needs_imds(config) else ()),
        ("sinks", lambda: _sinks(config, send=send)),
        ("approvals", lambda: _approvals(config, config.approvals) if config.approvals else ()),
        ("relay", lambda: [_relay(config)] if config.relay else ()),
    ]
    return [finding for name, probe in probes for finding in _guarded(name, probe)]


def _guarded(name: str, probe: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what a probe finds; whatever else it raises is a finding, and the other probes follow."""
    try:
        yield from probe()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - as the docstring says
        yield _fail(name, redact(f"{type(error).__name__}: {error}"), _remedy(error, name))


def _needs_imds(config: Config) -> bool:
    # With [relay] alone it is a relay's configuration, and its machine need not be an Azure VM.
    return config.approvals is not None or config.relay is None


def configured_roles(config: Config) -> Iterator[str]:
    """Yield the role of each process that the configuration describes."""
    if _needs_imds(config) or state_folder(config, "forward").path.exists():
        yield "forward"
    if config.approvals:
        yield "listen"
    if config.relay:
        yield "relay"


def _settings(config: Config) -> Iterator[Finding]:
    for name, sink in sinks_of(config).items():
        for warning in sink.warnings():
            remedy = "correct it, unless it is a value that Azure has added"
            yield _warn(f"settings {name}", f"sinks.{name}.{warning}", remedy)
    for warning in config.approvals.warnings() if config.approvals else ():
        remedy = "change it, unless this is what you want"
        yield _warn("settings approvals", f"approvals.{warning}", remedy)
    for key, event_type in _event_types(config):
        if lack := config.imds.lack(event_type.capitalize()):
            remedy = "set a newer api_version in [imds], or leave the value out"
            yield _warn(f"settings {key.split('.')[0]}", f"{key}: {lack}", remedy)


def _event_types(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each event type that a filter or a rule names, with its key."""
    for name, sink in sinks_of(config).items():
        for value in alternatives(sink.where.get("EventType", ())):
            yield f"sinks.{name}.where.EventType", str(value)
    for key, rule in config.approvals.rules() if config.approvals else ():
        for value in rule.event_type:
            yield f"approvals.{key}.event_type", value


def _permissions(config: Config) -> Iterator[Finding]:
    exposed = [path for role in configured_roles(config) for path in find_exposed(config, role)]
    for path in dict.fromkeys(exposed):
        message = f"everybody may write {path}, and so change what the process does"
        yield _fail("permissions", message, f"chmod o-w {path}")


def _state(folder: StateFolder) -> Finding:
    """Try to write where the state is, look for damage, and report what the process there says of itself."""
    name = f"state {folder.path.name}"
    try:
        _try_to_write(folder)
        damage = _find_damage(folder)
    except StateError as error:
        return _fail(name, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is wrong with the folder
        return _fail(name, f"{folder.path}: {error}", _remedy(error, "state_dir"))
    if damage:
        remedy = "restart the process: it takes over every row that can be read"
        return _fail(name, f"{folder.database}: {damage}", remedy)
    holder = folder.holder()
    if holder is None:
        return _ok(name, str(folder.path))
    fault, remedy = _fault_of_process(folder.read_status() or {})
    if fault:
        return _fail(name, f"{folder.path}: {holder} {fault}", remedy)
    return _ok(name, f"{folder.path}, locked by {holder}")


def _fault_of_process(status: dict[str, Any]) -> tuple[str, str]:
    """Return what is wrong with a process, and how to fix it; two empty texts if nothing is."""
    if status.get("storage_error"):
        return f"cannot write: {status['storage_error']}", _REMEDIES["storage"]
    if reason := bus_error(status):
        remedy = "it tries again on its own; if the bus can be reached from here, restart it"
        return f"cannot receive from the bus: {reason}", remedy
    if (age_seconds := age_of(status.get("written_at"), datetime.now(UTC)) or 0) > SILENT_SECONDS:
        return f"has not written its status for {age_seconds:.0f} s", "look into its log, and restart it"
    return "", ""


def _try_to_write(folder: StateFolder) -> None:
    """Write a file where the state is, or will be: it shows more than permissions do, and leaves nothing."""
    nearest = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    with TemporaryFile(dir=nearest) as file:
        file.write(bytes(_TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _find_damage(folder: StateFolder) -> str | None:
    if not folder.database.exists():
        return None
    with closing(Database(folder.database, mode="read")) as database:
        return database.find_damage()


def _left_sinks(config: Config) -> Iterator[Finding]:
    """Name the sinks that events wait for although they are not configured."""
    for role in configured_roles(config):
        folder = state_folder(config, role)
        waiting = waiting_counts(folder) if folder.database.exists() else {}
        for name in sorted(waiting.keys() - sinks_of(config).keys()):
            remedy = f"imds-bridge outbox move --role {role} --from {name} --to ..., or outbox drop --waiting"
            message = f"{role}: {waiting[name]} event(s) wait for sink {name}, which is not configured"
            yield _warn(f"outbox {role}", message, remedy)


def _metrics(listen: str) -> Iterator[Finding]:
    family, address = socket_address(listen)
    try:
        with socket.socket(family) as trial:
            if sys.platform != "win32":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = "nothing, if imds-bridge runs; else end the other program, or set another `listen` in [metrics]"
            yield _warn("metrics", f"{listen} is in use", remedy)
        else:
            remedy = "set another `listen` in [metrics]; until then there are no metrics"
            yield _fail("metrics", f"{listen} cannot be listened on: {error.strerror}", remedy)
    else:
        yield _ok("metrics", f"{listen} is free")


def _imds(config: Config) -> Iterator[Finding]:
    if config.imds.endpoint == "discover":
        yield _discovery()
    with closing(ImdsClient(config.imds, clock=Clock())) as client:
        yield _document(client)
        yield _instance(client)


def _document(client: ImdsClient) -> Finding:
    try:
        document = parse_document(client.document())
    except (ImdsError, ValueError) as error:
        remedy = "on an Azure VM, look for a firewall or proxy before 169.254.169.254; elsewhere use imds-bridge lab"
        return _fail("imds", error, remedy)
    return _ok(
        "imds", f"document {document.incarnation} with {len(document.events)} event(s) from {client.base}"
    )


def _instance(client: ImdsClient) -> Finding:
    try:
        vm = client.instance()
    except ImdsError as error:
        remedy = (
            "events are published without AffectsThisVm, and with the host's name in source, and nothing is "
            "approved; where there is no instance data, set vm_name in [imds]"
        )
        return _warn("instance", str(error), remedy)
    return _ok("instance", f"this VM is {vm.name}{'' if vm.vm_id else ', named by [imds] vm_name'}")


def _discovery() -> Finding:
    result = search(environ=os.environ)
    if result.found:
        return _ok("discovery", f"{result.found.address} from {result.found.found_in}")
    remedy = "inside a virtual network, leave out `endpoint`; otherwise set SCHEDULEDEVENTSIP"
    return _fail("discovery", "; ".join(result.notes) or "no DHCP lease was found", remedy)


def _sinks(config: Config, *, send: bool) -> Iterator[Finding]:
    for name, sink in build_sinks(sinks_of(config)).items():
        with closing(sink):
            yield _sink(name, sink, send=send)


def _sink(name: str, sink: Sink, *, send: bool) -> Finding:
    section, row = f"sinks.{name}", f"sink {name}"
    try:
        if send:
            sink.send([check_event(Clock().now(), vm=socket.gethostname())])
        message = "accepted a test message" if send else sink.check()
    except DeliveryError as error:
        return _fail(row, error, _remedy(error, section))
    if isinstance(message, Inconclusive):
        advice = f"{_remedy(message, section)}; " if message.status else ""
        return _warn(row, message, f"{advice}run check --send to be sure")
    return _ok(row, message)


_CLASSES: dict[object, str] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "space"),
    **dict.fromkeys(
        (401, 403, "ServiceBusAuthenticationError", "ServiceBusAuthorizationError"), "credentials"
    ),
    "ClientAuthenticationError": "credentials",
    **dict.fromkeys((301, 302, 303, 307, 308, 404, 410, "MessagingEntityNotFoundError"), "address"),
    405: "method",
    Rejected: "rejected",
    Misconfigured: "settings",
    Unavailable: "connection",
}
"""The class of an error by its number of the system, its HTTP status, its cause's name or its type."""

_REMEDIES = {
    "space": "free space on that disk, or raise the quota; until then events are kept in memory only",
    "storage": "make the folder writable for this user, or set state_dir; until then events are kept in memory only",
    "credentials": "check the credentials in [{section}] and what they permit",
    "address": "check the address in [{section}]",
    "method": "it may accept only POST",
    "rejected": "events that get this answer are dead-lettered; `imds-bridge render` shows what is sent",
    "settings": "check the settings of [{section}] and its secrets",
    "connection": "check host, port, DNS and firewall; until then events wait in the outbox",
    "receiver": "look for the fault at the receiver; until then events wait in the outbox",
}


def _remedy(error: object, section: str) -> str:
    """Return how to fix an error; `section` is where its settings are."""
    cause = getattr(error, "__cause__", None)
    signs = (getattr(error, "errno", None), getattr(error, "status", None), type(cause).__name__)
    found = next((_CLASSES[sign] for sign in signs if sign in _CLASSES), "")
    if not found and isinstance(error, OSError):
        found = "storage"
    if not found and getattr(error, "status", None):
        found = "rejected" if isinstance(error, Rejected) else "receiver"
    return _REMEDIES[found or _CLASSES.get(type(error), "settings")].format(section=section)


def _approvals(config: Config, settings: ApprovalSettings) -> Iterator[Finding]:
    for fault in filter(None, {find_fault(rule.run[0]) for rule in settings.auto if rule.run}):
        remedy = "correct it, or `run` of the auto rule: its events would not be approved"
        yield _fail("approvals.auto", fault, remedy)
    if not settings.has_bus:
        yield _ok("approvals", "only auto rules approve: there is no bus")
        return
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    with closing(ImdsClient(config.imds, clock=Clock())) as client:
        try:
            vm = client.instance()
        except ImdsError:
            vm = None
    session = approval_session(settings.session, vm)
    if session is None:
        yield _warn("approvals", "the session id needs instance data of IMDS, which is not available")
        return
    yield _receive("approvals", lambda: try_to_receive(settings, what="commands", session=session))


def _relay(config: Config) -> Finding:
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    try:
        settings = relay_settings(config)
    except UsageError as error:
        return _fail("relay", error, "correct the sinks that it names")
    return _receive("relay", lambda: try_to_receive(settings, what="events"))


def _receive(section: str, attempt: Callable[[], str]) -> Finding:
    try:
        return _ok(section, attempt())
    except DeliveryError as error:
        return _fail(section, error, _remedy(error, section))
