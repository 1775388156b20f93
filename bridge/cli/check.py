"""The command `check`: try the settings, the state folders, IMDS, the bus and every sink."""

from __future__ import annotations

import argparse
import errno
import os
import platform
import re
import socket
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bridge.arguments import FAILED, OK, add_flag, complete, json_lines, load_config, other_file
from bridge.cli.config import listens, warnings
from bridge.cli.trial import try_to_store
from bridge.cli.units import find_units
from bridge.config.approvals import ApprovalSettings
from bridge.config.models import Config, find_exposed
from bridge.config.values import socket_address
from bridge.contract.status import Status
from bridge.errors import BridgeError, ConfigError, ImdsError
from bridge.events.filters import Filter
from bridge.formats.samples import make_test_event, samples
from bridge.formats.text import table
from bridge.imds.client import ImdsClient, NoAnswerError
from bridge.imds.discovery import search
from bridge.imds.document import parse_document
from bridge.imds.instance import approval_session
from bridge.outbox.inspect import waiting_counts
from bridge.outbox.sqlite import ERRORS, Database, kept_log
from bridge.outbox.state_dir import StateFolder, try_to_write
from bridge.process.parts import build_sinks, filter_of, sinks_of
from bridge.process.status import SILENT_SECONDS, age_of, clock_faults, find_urgent
from bridge.roles import relay_settings
from bridge.runtime.program import find_fault
from bridge.runtime.text import redact, show
from bridge.runtime.time import Clock
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
    complete(command, _run, "--json", epilog=_EPILOG)
    add_flag(command, "--send", "send one message, marked as a test, to each sink")


def _run(arguments: argparse.Namespace) -> int:
    try:
        config = load_config(arguments)
        imds = "IMDS, for at most 15 s, and " * _is_for_a_vm(config)
        show(f"asking {imds}what the configuration names ...", stream=sys.stderr)
        findings = check(config, send=arguments.send)
    except ConfigError as error:
        findings = [Finding("configuration", "FAIL", one, f"correct {error.source}") for one in error.faults]
        if arguments.json:
            show(*json_lines([*map(asdict, findings)]))
        raise
    show(*(json_lines([*map(asdict, findings)]) if arguments.json else _render(findings)))
    return FAILED if any(finding.result == "FAIL" for finding in findings) else OK


def _render(findings: Sequence[Finding]) -> list[str]:
    """Write the table, each remedy below its finding."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.check, finding.result, finding.message))
        if finding.remedy:
            rows.append(("", "", f"-> {finding.remedy}"))
    return table(("CHECK", "RESULT", "MESSAGE"), rows)


IMDS_SECONDS = 13.0  # and 2 s for instance data


@dataclass(frozen=True)
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
    probes: dict[str, Iterable[Finding]] = {
        "settings": (Finding(f"settings {name}", "warn", *texts) for name, *texts in warnings(config)),
        "permissions": _permissions(config),
        "units": _units(config),
        "state": _states(config),
        "outbox": _left_sinks(config),
        "metrics": _metrics(config) if config.metrics.listen else (),
        "imds": _imds(config) if _is_for_a_vm(config) else (),
        "sinks": _sinks(config, send=send) if config.relay or _is_for_a_vm(config) else (),
        "approvals": _approvals(config, config.approvals) if config.approvals and listens(config) else (),
        "relay": _relay(config) if config.relay else (),
        "console": _console(config) if config.console else (),
    }
    return [finding for name, probe in probes.items() for finding in _guarded(name, name, probe)]


def _guarded(name: str, section: str, probe: Iterable[Finding]) -> Iterator[Finding]:
    """Yield what a probe finds; whatever else it raises is a finding, and the other probes follow."""
    try:
        yield from probe
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - as the docstring says
        kind = "" if isinstance(error, BridgeError) else f"{type(error).__name__}: "
        yield Finding(name, "FAIL", redact(f"{kind}{error}"), _remedy(error, section))


def _is_for_a_vm(config: Config) -> bool:
    # With [relay] or [console] alone it is theirs, and its machine need not be an Azure VM; a console has no sinks.
    return listens(config) or not (config.relay or (config.console and not config.sinks))


def configured_roles(config: Config) -> Iterator[str]:
    """Yield the role of each process that the configuration describes, in a container of one process its own."""
    roles = [*_described_roles(config)]
    yield from [role for role in roles if os.path.ismount(config.state_dir / role)] or roles


def _described_roles(config: Config) -> Iterator[str]:
    if _is_for_a_vm(config) or StateFolder(config.state_dir / "forward").path.exists():
        yield "forward"
    others = {"listen": listens(config), "relay": config.relay, "console": config.console}
    yield from [role for role, is_described in others.items() if is_described]


def _permissions(config: Config) -> Iterator[Finding]:
    exposed = [path for role in configured_roles(config) for path in find_exposed(config, role)]
    for path in dict.fromkeys(exposed):
        message = f"everybody may write {path}, and so change what the process does"
        yield Finding("permissions", "FAIL", message, f"chmod o-w {path}")


def _units(config: Config) -> Iterator[Finding]:
    for text, remedy, is_failure in find_units(config.state_dir, *configured_roles(config)):
        yield Finding("unit", "FAIL" if is_failure else "warn" if remedy else "ok", text, remedy)


def _states(config: Config) -> Iterator[Finding]:
    for role in configured_roles(config):
        folder = StateFolder(config.state_dir / role)
        judged = (_state(one, config.path) for one in [folder])
        found = [*_guarded(f"state {role}", "state_dir", judged)]
        yield from found
        if role != "console" and all(one.result != "FAIL" for one in found):
            yield from _trial(folder)


def _trial(folder: StateFolder) -> Iterator[Finding]:
    """Store events beside the state, of which nothing stays and nothing is sent."""
    try:
        try_to_store(_existing(folder.path))
    except Exception as error:  # noqa: BLE001 - whatever it is, a process would end by it
        runs_on = f"Python {platform.python_version()} and SQLite {sqlite3.sqlite_version}"
        message = f"events cannot be stored and delivered with {runs_on}: {type(error).__name__}: {error}"
        remedy = "look for what it names; if it is a version, install another one"
        yield Finding(f"outbox {folder.path.name}", "FAIL", redact(message), remedy)


def _existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(one for one in (path, *path.parents) if one.exists())


def _state(folder: StateFolder, path: Path | None = None) -> Finding:
    """Try to write where the state is, look for damage, and report what the process there says of itself."""
    name = f"state {folder.path.name}"
    try:
        try_to_write(_existing(folder.path))
        damage = _find_damage(folder)
    except (OSError, *ERRORS) as error:
        return Finding(name, "FAIL", f"{folder.path}: {error}", _remedy(error, "state_dir"))
    if damage:
        remedy = "restart the process: it takes over every row that can be read"
        return Finding(name, "FAIL", f"{folder.database}: {damage}", remedy)
    if log := kept_log(folder.database):
        return Finding(name, "warn", log)
    holder = folder.owner()
    if holder is None:
        if any(text.endswith(" and runs") for text, *_ in find_units(folder.path.parent, folder.path.name)):
            remedy = "let the unit's user write there, and see `state_dir` in the file that it names"
            message = f"{folder.path}: the unit runs, and does not hold this state"
            return Finding(name, "FAIL", message, remedy)
        return Finding(name, "ok", str(folder.path))
    if faults := list(_faults_of_process(folder.read_status())):
        remedy = f"see its log, and `imds-bridge status --role {folder.path.name}`"
        return Finding(name, "FAIL", f"{folder.path}: {holder}: {'; '.join(faults)}", remedy)
    if other := other_file(folder, path):
        return Finding(name, "warn", *other)
    return Finding(name, "ok", f"{folder.path}, locked by {holder}")


def _faults_of_process(status: Status | None) -> Iterator[str]:
    """Yield what a process that runs says is wrong with it; nothing is known before its first status."""
    if status is None:
        return
    now = datetime.now(UTC)
    if (age_seconds := age_of(status.written_at, now) or 0) > SILENT_SECONDS:
        yield f"has not written its status for {age_seconds:.0f} s"
    yield from find_urgent(status, now)


def _find_damage(folder: StateFolder) -> str | None:
    if not folder.database.exists():
        return None
    with closing(Database(folder.database, mode="read")) as database:
        return database.find_damage()


def _left_sinks(config: Config) -> Iterator[Finding]:
    """Name the sinks that events wait for although they are not configured."""
    for role in configured_roles(config):
        folder = StateFolder(config.state_dir / role)
        waiting = waiting_counts(folder) if folder.database.exists() else {}
        for name in sorted(waiting.keys() - sinks_of(config).keys()):
            remedy = f"imds-bridge outbox move --role {role} --from {name} --to ..., or outbox drop --waiting"
            message = f"{role}: {waiting[name]} event(s) wait for sink {name}, which is not configured"
            yield Finding(f"outbox {role}", "warn", message, remedy)


def _metrics(config: Config) -> Iterator[Finding]:
    """Name where each process that runs serves its metrics, or else whether one could."""
    listen = config.metrics.listen
    remedy = (
        "end the other program, set another `listen` in [metrics], or let the unit open it: SocketBindAllow="
    )
    roles = [*configured_roles(config)]
    folders = [StateFolder(config.state_dir / role) for role in roles]
    running = {one.path.name: one.read_status() for one in folders if one.owner()}
    for role, status in running.items():
        if status and status.metrics_error:
            yield Finding(f"metrics {role}", "FAIL", status.metrics_error, remedy)
        elif status and status.metrics:
            yield Finding(f"metrics {role}", "ok", f"served on {status.metrics}")
    if running:
        return
    family, address = socket_address(listen)
    try:
        socket.create_server(address, family=family).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        yield Finding("metrics", "FAIL", f"{listen} cannot be listened on: {reason}", remedy)
    else:
        shared = f"; of {' and '.join(roles)}, the second takes the next port" if len(roles) > 1 else ""
        yield Finding("metrics", "ok", f"{listen} is free{shared}")


_NO_IMDS = "on an Azure VM, look for a firewall before 169.254.169.254; elsewhere use imds-bridge lab"
_BUSY = "check again in a minute; else find what asks too often (as root: ss -tnp dst 169.254.169.254)"


def _imds(config: Config) -> Iterator[Finding]:
    if config.imds.endpoint == "discover":
        yield _discovery()
    with closing(ImdsClient(config.imds, clock=Clock())) as client:
        yield _document(client)
        if client.version_error:
            remedy = (
                "leave api_version out, or enable the version in Azure: 2024-07-09 needs the subscription's feature "
                "Microsoft.Compute/SpotPlus"
            )
            yield Finding("imds", "warn", client.version_error, remedy)
        yield from _instance(client, config.vm_source)
        yield from _clock(client)


def _document(client: ImdsClient) -> Finding:
    asked_at = [time.monotonic()]  # once more for each repetition
    try:
        answer = client.document(
            timeout_seconds=IMDS_SECONDS, waiting=lambda: asked_at.append(time.monotonic())
        )
        took_seconds = time.monotonic() - asked_at[-1]
        document = parse_document(answer)
    except NoAnswerError:
        remedy = (
            "a VM's first question turns Scheduled Events on, which may take two minutes: check again then; "
            f"if still nothing answers, {_NO_IMDS}"
        )
        return Finding("imds", "FAIL", f"IMDS at {client.base}: no answer within {IMDS_SECONDS:g} s", remedy)
    except ImdsError as error:
        is_absent = error.status in (None, 400, 404, 410)
        return Finding("imds", "FAIL", str(error), _NO_IMDS if is_absent else _BUSY)
    except ValueError as error:
        return Finding("imds", "FAIL", f"IMDS at {client.base} sent no valid document: {error}", _NO_IMDS)
    found = f"document {document.incarnation} with {len(document.events)} event(s) from {client.base}"
    return Finding("imds", "ok", f"{found} in {took_seconds:.2f} s")


def _instance(client: ImdsClient, source: str) -> Iterator[Finding]:
    """Report who the VM is, and warn about a source of its own events that it may share."""
    try:
        vm = client.instance()
    except ImdsError as error:
        remedy = (
            "events are published without AffectsThisVm, and with the host's name in source, and nothing is "
            "approved; where there is no instance data, set vm_name in [imds]"
        )
        yield Finding("instance", "warn", str(error), remedy)
        return
    if client.settings.vm_name:
        yield Finding("instance", "ok", f"this VM is {vm.name}, named by [imds] vm_name")
    elif vm.missing:
        remedy = "it is asked again every minute; until then no session that needs it is received"
        yield Finding("instance", "warn", f"this VM is {vm.name}; IMDS lacks {', '.join(vm.missing)}", remedy)
    else:
        yield Finding("instance", "ok", f"this VM is {vm.name}")
    if source and not any(known and known.lower() in source.lower() for known in (vm.name, vm.vm_id)):
        remedy = (
            "put the VM's name or id into it: VMs of one source and name hide each other's end in the audit"
        )
        yield Finding("instance", "warn", f"vm_source names no VM: {source}", remedy)


def _clock(client: ImdsClient) -> Iterator[Finding]:
    """Warn about a wrong clock."""
    for message in clock_faults(client.clock_ahead_seconds or 0):
        remedy = "set it, and see to its synchronisation with the host (chrony, w32time)"
        yield Finding("clock", "warn", message, remedy)


def _discovery() -> Finding:
    if found := search(environ=os.environ):
        return Finding("discovery", "ok", " from ".join(found))
    remedy = "inside a virtual network, leave out `endpoint`; otherwise set SCHEDULEDEVENTSIP"
    message = "no SCHEDULEDEVENTSIP and no lease with DHCP option 245 that can be read"
    return Finding("discovery", "FAIL", message, remedy)


def _sinks(config: Config, *, send: bool) -> Iterator[Finding]:
    settings = sinks_of(config)
    for name, sink in build_sinks(settings).items():
        with closing(sink):
            tried = _sink(name, sink, filter_of(settings[name]), send=send)
            yield from _guarded(f"sink {name}", f"sinks.{name}", tried)


def _sink(name: str, sink: Sink, wanted: Filter, *, send: bool) -> Iterator[Finding]:
    """Let a sink write an event of every type that it takes, and try it."""
    now = Clock().now()
    for event in samples(now):
        if wanted.matches_type(event.type):
            sink.preview(event)
    if send:
        sink.send([make_test_event(now, vm=socket.gethostname())])
    try:
        yield Finding(f"sink {name}", "ok", "accepted a test message" if send else sink.check())
    except Inconclusive as error:
        advice = f"{_remedy(error, f'sinks.{name}')}; " if error.status else ""
        yield Finding(f"sink {name}", "warn", str(error), f"{advice}run check --send to be sure")


_BY_TEXT = {
    "requires sessions": "set `session` in [{section}], or name one without sessions, as a relay needs",
    "has no sessions": "leave `session` out of [{section}], or let the queue or subscription require sessions",
    "cannot be resolved": "check the host in [{section}], the proxy and DNS",
    "firewall refuses": "allow this machine's address, or its subnet, in the networking of the namespace",
    "certificate (has expired|is not valid for)": "correct the host in [{section}], or renew the certificate",
    "wrong.version.number": (
        "this port speaks plain HTTP, not TLS: correct the port, or write http:// with allow_http = true"
    ),
    "invalid frame": "this port does not speak AMQP: correct the host in [{section}]",
}
"""How to fix an error, by what its text contains."""
_REMEDIES: dict[tuple[int | str, ...], str] = {
    (errno.ENOSPC, errno.EDQUOT): (
        "free space on that disk, or raise the quota; until then events are kept in memory only"
    ),
    (
        401,
        403,
        "ServiceBusAuthenticationError",
        "ServiceBusAuthorizationError",
        "ClientAuthenticationError",
    ): ("check the credentials in [{section}] and what they permit"),
    (301, 302, 303, 307, 308, 404, 410, "MessagingEntityNotFoundError"): "check the address in [{section}]",
    (405,): "it may accept only POST",
    ("Rejected",): "events that get this answer are dead-lettered; `imds-bridge render` shows what is sent",
    ("answer",): "look for the fault at the receiver; until then events wait in the outbox",
    ("Unavailable",): "check host, port, DNS, firewall or program; until then events wait in the outbox",
    ("OSError",): (
        "make the folder writable for this user, or set state_dir; until then events are kept in memory only"
    ),
    ("StateError",): "",
    ("UsageError",): "correct what it names",
}
"""How to fix an error, by its number of the system, its HTTP status, or the name of its cause or its class."""


def _remedy(error: object, section: str) -> str:
    """Return how to fix an error; `section` is where its settings are."""
    status = getattr(error, "status", None)
    signs = {getattr(error, "errno", None), status, type(getattr(error, "__cause__", None)).__name__}
    signs |= {"answer" if status else "", *(kind.__name__ for kind in type(error).__mro__)}
    by_text = (text for said, text in _BY_TEXT.items() if re.search(f"(?i){said}", str(error)))
    by_kind = (text for known, text in _REMEDIES.items() if signs.intersection(known))
    found = (*by_text, *by_kind, "check the settings of [{section}] and what they name")
    return found[0].format(section=section)


def _approvals(config: Config, settings: ApprovalSettings) -> Iterator[Finding]:
    for fault in filter(None, map(find_fault, settings.programs)):
        remedy = "correct it, or the auto rule: its events would not be approved, or the VM stay out of work"
        yield Finding("approvals.auto", "FAIL", fault, remedy)
    if not settings.has_bus:
        yield Finding("approvals", "ok", "only auto rules approve: there is no bus")
        return
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    vm = None
    with closing(ImdsClient(config.imds, clock=Clock())) as client, suppress(ImdsError):
        vm = client.instance()
    session = approval_session(settings.session, vm)
    if session is None:
        yield Finding(
            "approvals", "warn", "the session id needs instance data of IMDS, which is not available"
        )
    else:
        yield Finding("approvals", "ok", try_to_receive(settings, what="commands", session=session))


def _relay(config: Config) -> Iterator[Finding]:
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    yield Finding("relay", "ok", try_to_receive(relay_settings(config), what="events"))


def _console(config: Config) -> Iterator[Finding]:
    from bridge.console.trial import trials  # noqa: PLC0415 - only a console has its packages

    for name, trial in trials(config, _existing(config.state_dir / "console")):
        yield from _guarded(name, name, (Finding(name, "ok", one()) for one in (trial,)))
