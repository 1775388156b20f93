"""What `imds-bridge check` tries: the settings, the state folders, IMDS, the bus and every sink."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from tempfile import TemporaryFile
from typing import Literal

from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config, find_exposed
from bridge.config.sinks import alternatives
from bridge.config.values import socket_address
from bridge.errors import (
    BridgeError,
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
from bridge.http.client import HttpClient
from bridge.imds.client import ImdsClient
from bridge.imds.discovery import search
from bridge.imds.document import parse_document
from bridge.outbox.inspect import waiting_counts
from bridge.outbox.sqlite import Database
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.program import find_fault
from bridge.runtime.text import redact
from bridge.runtime.time import Clock
from bridge.service.composition import build_sinks, relay_settings, sinks_of, state_folder
from bridge.service.identity import approval_session
from bridge.service.status import SILENT_SECONDS, age_of, bus_error
from bridge.sinks.base import Inconclusive, Sink

_TRIAL_BYTES = 1024 * 1024
_LIVEZ_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table: what was checked, whether it works, what was found, and how to fix it."""

    check: str
    result: Literal["ok", "warn", "FAIL"]
    message: str
    remedy: str = ""


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
        ("metrics", lambda: _metrics(config)),
        ("imds", lambda: _imds(config) if _needs_imds(config) else ()),
        ("sinks", lambda: _sinks(config, send=send)),
        ("approvals", lambda: _approvals(config, config.approvals) if config.approvals else ()),
        ("relay", lambda: [_relay(config)] if config.relay else ()),
    ]
    return [finding for name, probe in probes for finding in _guarded(name, probe)]


def config_findings(error: ConfigError) -> list[Finding]:
    """Describe each error of a configuration that cannot be loaded."""
    remedy = f"correct {error.source}"
    return [
        Finding(check="configuration", result="FAIL", message=fault, remedy=remedy) for fault in error.faults
    ]


def _guarded(name: str, probe: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield what a probe finds; whatever else it raises is a finding, and the other probes follow."""
    try:
        yield from probe()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - as the docstring says
        message = redact(f"{type(error).__name__}: {error}")
        yield Finding(check=name, result="FAIL", message=message, remedy=_remedy(error, name))


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
            yield Finding(
                check=f"settings {name}",
                result="warn",
                message=f"sinks.{name}.{warning}",
                remedy="correct it, unless it is a value that Azure has added",
            )
    for warning in config.approvals.warnings() if config.approvals else ():
        yield Finding(
            check="settings approvals",
            result="warn",
            message=f"approvals.{warning}",
            remedy="change it, unless this is what you want",
        )

    for key, event_type in _event_types(config):
        if lack := config.imds.lack(event_type.capitalize()):
            yield Finding(
                check=f"settings {key.split('.')[0]}",
                result="warn",
                message=f"{key}: {lack}",
                remedy="set a newer api_version in [imds], or leave the value out",
            )


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
        yield Finding(
            check="permissions",
            result="FAIL",
            message=f"everybody may write {path}, and so change what the process does",
            remedy=f"chmod o-w {path}",
        )


def _state(folder: StateFolder) -> Finding:
    name = f"state {folder.path.name}"
    try:
        _try_to_write(folder)
        other_owner = _find_other_owner(folder)
        damage = _find_damage(folder)
    except StateError as error:
        return Finding(check=name, result="FAIL", message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is wrong with the folder
        return Finding(
            check=name, result="FAIL", message=f"{folder.path}: {error}", remedy=_remedy(error, "state_dir")
        )
    if other_owner:
        remedy = f"chown -R the process' user {folder.path}, after a look at who has started it as another"
        return Finding(check=name, result="FAIL", message=other_owner, remedy=remedy)
    if damage:
        remedy = "restart the process: it takes over every row that can be read"
        return Finding(check=name, result="FAIL", message=f"{folder.database}: {damage}", remedy=remedy)
    return _process(name, folder)


def _left_sinks(config: Config) -> Iterator[Finding]:
    """Name the sinks that events wait for although they are not configured."""
    for role in configured_roles(config):
        folder = state_folder(config, role)
        waiting = waiting_counts(folder) if folder.database.exists() else {}
        for name in sorted(waiting.keys() - sinks_of(config).keys()):
            remedy = f"imds-bridge outbox move --role {role} --from {name} --to ..., or outbox drop --waiting"
            message = f"{role}: {waiting[name]} event(s) wait for sink {name}, which is not configured"
            yield Finding(check=f"outbox {role}", result="warn", message=message, remedy=remedy)


def _process(name: str, folder: StateFolder) -> Finding:
    """Report what the process that holds a folder says of itself."""
    holder = folder.holder()
    if holder is None:
        return Finding(check=name, result="ok", message=str(folder.path))
    status = folder.read_status() or {}
    if status.get("storage_error"):
        message = f"{folder.path}: {holder} cannot write: {status['storage_error']}"
        return Finding(check=name, result="FAIL", message=message, remedy=_REMEDIES["storage"])
    if reason := bus_error(status):
        message = f"{folder.path}: {holder} cannot receive from the bus: {reason}"
        remedy = "it tries again on its own; if the bus can be reached from here, restart it"
        return Finding(check=name, result="FAIL", message=message, remedy=remedy)
    if (age_seconds := age_of(status.get("written_at"), datetime.now(UTC)) or 0) > SILENT_SECONDS:
        message = f"{folder.path}: {holder} has not written its status for {age_seconds:.0f} s"
        return Finding(check=name, result="FAIL", message=message, remedy="look into its log, and restart it")
    return Finding(check=name, result="ok", message=f"{folder.path}, locked by {holder}")


def _try_to_write(folder: StateFolder) -> None:
    """Write a file where the state is, or will be: it shows more than permissions do, and leaves nothing."""
    nearest = next(path for path in (folder.path, *folder.path.parents) if path.exists())
    with TemporaryFile(dir=nearest) as file:
        file.write(bytes(_TRIAL_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _find_other_owner(folder: StateFolder) -> str:
    """Return what belongs to another user than the folder should, "" if nothing does; root may look at any."""
    if sys.platform != "win32" and folder.path.exists():
        expected = os.geteuid() or folder.path.stat().st_uid
        for path in (folder.path, *sorted(folder.path.iterdir())):
            if (uid := path.lstat().st_uid) != expected:
                return f"{path} belongs to user {uid}, and the process is expected to run as user {expected}"
    return ""


def _metrics(config: Config) -> Iterator[Finding]:
    listen = config.metrics.listen
    if not listen:
        return
    family, address = socket_address(listen)
    try:
        with socket.socket(family) as trial:
            if sys.platform != "win32":
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _is_ours(listen):
            yield Finding(
                check="metrics", result="ok", message=f"{listen}: a process of imds-bridge serves it"
            )
            return
        remedy = (
            "end the other program, or set another `listen` in [metrics]; until then there are no metrics"
        )
        message = f"{listen} cannot be listened on: {error.strerror}"
        yield Finding(check="metrics", result="FAIL", message=message, remedy=remedy)
    else:
        yield Finding(check="metrics", result="ok", message=f"{listen} is free")


def _is_ours(listen: str) -> bool:
    """Return whether imds-bridge serves an address: its answer to /livez says."""
    try:
        with closing(HttpClient()) as client:
            answer = client.exchange(
                "GET", f"http://{listen}/livez", headers={}, body=None, timeout_seconds=_LIVEZ_SECONDS
            )
        return "reasons" in json.loads(answer.body)
    except (BridgeError, ValueError, TypeError):
        return False


def _find_damage(folder: StateFolder) -> str | None:
    if not folder.database.exists():
        return None
    with closing(Database(folder.database, mode="read")) as database:
        return database.find_damage()


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
        return Finding(check="imds", result="FAIL", message=str(error), remedy=remedy)
    message = f"document {document.incarnation} with {len(document.events)} event(s) from {client.base}"
    return Finding(check="imds", result="ok", message=message)


def _instance(client: ImdsClient) -> Finding:
    try:
        vm = client.instance()
        named = "" if vm.vm_id else ", named by [imds] vm_name"
        return Finding(check="instance", result="ok", message=f"this VM is {vm.name}{named}")
    except ImdsError as error:
        remedy = (
            "events are published without AffectsThisVm, and with the host's name in source, and nothing is "
            "approved; where there is no instance data, set vm_name in [imds]"
        )
        return Finding(check="instance", result="warn", message=str(error), remedy=remedy)


def _discovery() -> Finding:
    result = search(environ=os.environ)
    if result.found:
        message = f"{result.found.address} from {result.found.found_in}"
        return Finding(check="discovery", result="ok", message=message)
    notes = "; ".join(result.notes) or "no DHCP lease was found"
    remedy = "inside a virtual network, leave out `endpoint`; otherwise set SCHEDULEDEVENTSIP"
    return Finding(check="discovery", result="FAIL", message=notes, remedy=remedy)


def _sinks(config: Config, *, send: bool) -> Iterator[Finding]:
    for name, sink in build_sinks(sinks_of(config)).items():
        with closing(sink):
            yield _sink(name, sink, send=send)


def _sink(name: str, sink: Sink, *, send: bool) -> Finding:
    section = f"sinks.{name}"
    try:
        if send:
            sink.send([check_event(Clock().now(), vm=socket.gethostname())])
        message = "accepted a test message" if send else sink.check()
    except DeliveryError as error:
        return Finding(
            check=f"sink {name}", result="FAIL", message=str(error), remedy=_remedy(error, section)
        )
    if isinstance(message, Inconclusive):
        advice = f"{_remedy(message, section)}; " if message.status else ""
        remedy = f"{advice}run check --send to be sure"
        return Finding(check=f"sink {name}", result="warn", message=message, remedy=remedy)
    return Finding(check=f"sink {name}", result="ok", message=message)


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
        yield Finding(check="approvals.auto", result="FAIL", message=fault, remedy=remedy)
    if not settings.has_bus:
        yield Finding(check="approvals", result="ok", message="only auto rules approve: there is no bus")
        return
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    with closing(ImdsClient(config.imds, clock=Clock())) as client:
        try:
            vm = client.instance()
        except ImdsError:
            vm = None
    session = approval_session(settings.session, vm)
    if session is None:
        message = "the session id needs instance data of IMDS, which is not available"
        yield Finding(check="approvals", result="warn", message=message)
        return
    yield _receive(
        "approvals",
        lambda: try_to_receive(settings, what="commands", session=session),
    )


def _relay(config: Config) -> Finding:
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    try:
        settings = relay_settings(config)
    except UsageError as error:
        remedy = "correct the sinks that it names"
        return Finding(check="relay", result="FAIL", message=str(error), remedy=remedy)
    return _receive("relay", lambda: try_to_receive(settings, what="events"))


def _receive(section: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(check=section, result="ok", message=attempt())
    except DeliveryError as error:
        return Finding(check=section, result="FAIL", message=str(error), remedy=_remedy(error, section))
