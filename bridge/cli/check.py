"""What `imds-bridge check` tries: the state folder, IMDS and every sink, each with its reason and its mend."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

from bridge.cli.common import add_config, add_json, load_config
from bridge.cli.exit_codes import FAILED, OK
from bridge.config.models import Config
from bridge.errors import DeliveryError, Gone, ImdsError, Misconfigured, Rejected, StateError, UsageError
from bridge.formats.samples import check_event
from bridge.formats.table import table
from bridge.imds.client import ImdsClient
from bridge.imds.discovery import search
from bridge.imds.document import parse_document
from bridge.outbox.sqlite import Database
from bridge.runtime.clock import Clock
from bridge.service.composition import build_sinks, relay_settings, sinks_of, state_folder
from bridge.service.identity import approval_session

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
    config = load_config(arguments)
    print("asking IMDS (its very first answer may take two minutes) and each sink ...", file=sys.stderr)
    findings = check(config, send=arguments.send)
    print(json.dumps(as_json(findings), indent=2) if arguments.json else render(findings))
    return FAILED if any(finding.result == "FAIL" for finding in findings) else OK


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table: what was tried, whether it works, what was seen, and what to do if it does not."""

    part: str
    result: Literal["ok", "warn", "FAIL"]
    found: str
    mend: str = ""


def check(config: Config, *, send: bool = False) -> list[Finding]:
    """Try everything that the configuration names; nothing is changed, and nothing sent but a test for `send`."""
    of_vm = [] if config.relay and not config.approvals else _imds(config)  # a relay needs no IMDS
    return [_state(config), *of_vm, *_sinks(config, send=send), *_approvals(config), *_relay(config)]


def render(findings: list[Finding]) -> str:
    """Write the table, the mend below what needs one."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        rows.append((finding.part, finding.result, finding.found))
        if finding.mend:
            rows.append(("", "", f"-> {finding.mend}"))
    return table(("PART", "RESULT", "FOUND"), rows)


def as_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """Give the findings as JSON takes them."""
    return [asdict(finding) for finding in findings]


def _state(config: Config) -> Finding:
    folder = state_folder(config, "relay" if config.relay else "forward")
    mend = (
        "without it changes go out from memory only: make the folder writable for this user, or set state_dir"
    )
    try:
        nearest = next(path for path in (folder.path, *folder.path.parents) if path.exists())
        with TemporaryDirectory(dir=nearest):  # it says more than permissions do, and leaves nothing behind
            pass
        if folder.database.exists():
            Database(folder.database, read_only=True).close()
    except StateError as error:
        return Finding(part="state", result="FAIL", found=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is wrong with the folder
        return Finding(part="state", result="FAIL", found=f"{folder.path}: {error}", mend=mend)
    holder = folder.holder()
    return Finding(
        part="state", result="ok", found=f"{folder.path}" + (f", held by {holder}" if holder else "")
    )


def _imds(config: Config) -> Iterator[Finding]:
    if config.imds.endpoint == "discover":
        yield _discovery()
    client = ImdsClient(config.imds, clock=Clock())
    try:
        document = parse_document(client.document())
        found = f"document {document.incarnation} with {len(document.events)} event(s) from {client.base}"
        yield Finding(part="imds", result="ok", found=found)
    except (ImdsError, ValueError) as error:
        mend = (
            "on an Azure VM, look for a firewall or proxy before 169.254.169.254; elsewhere: imds-bridge lab"
        )
        yield Finding(part="imds", result="FAIL", found=str(error), mend=mend)
    try:
        yield Finding(part="instance", result="ok", found=f"this VM is {client.instance().name}")
    except ImdsError as error:
        mend = "events go out all the same, without AffectsThisVm and with a source made of the host's name"
        yield Finding(part="instance", result="warn", found=str(error), mend=mend)
    finally:
        client.close()


def _discovery() -> Finding:
    result = search(environ=os.environ)
    looked = "; ".join(result.notes) or "no lease was found"
    if result.found:
        return Finding(
            part="discovery", result="ok", found=f"{result.found.address} from {result.found.found_in}"
        )
    mend = "inside a virtual network, leave `endpoint` out; else set SCHEDULEDEVENTSIP"
    return Finding(part="discovery", result="FAIL", found=looked, mend=mend)


def _sinks(config: Config, *, send: bool) -> Iterator[Finding]:
    for name, sink in build_sinks(sinks_of(config)).items():
        part = f"sink {name}"
        try:
            if send:  # what becomes of it says more than any other try
                sink.send([check_event(Clock().now(), vm=socket.gethostname())])
            found = "it took a test message" if send else sink.check()
            yield Finding(part=part, result="ok", found=found)
        except DeliveryError as error:
            mend = next(text for kind, text in _MENDS if isinstance(error, kind)).format(name=name)
            yield Finding(part=part, result="FAIL", found=str(error), mend=mend)
        finally:
            sink.close()


_MENDS: tuple[tuple[type[DeliveryError], str], ...] = (
    (Misconfigured, "look at the settings of [sinks.{name}] and its secrets"),
    (
        Rejected,
        "each event that is answered so is dead-lettered; `imds-bridge render --sink {name}` shows them",
    ),
    (Gone, "the receiver wants no more events; this sink would stop until a restart"),
    (DeliveryError, "events wait in the outbox until it is reached"),
)


def _approvals(config: Config) -> Iterator[Finding]:
    if config.approvals is None:
        return
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    client = ImdsClient(config.imds, clock=Clock())
    try:
        vm = client.instance()
    except ImdsError:
        vm = None
    finally:
        client.close()
    session = approval_session(config.approvals.session, vm)
    if session is None:
        found = "the session cannot be named while it is unknown who this VM is"
        yield Finding(part="approvals", result="warn", found=found)
        return
    try:
        found = try_to_receive(config.approvals, what="commands", session=session)
        yield Finding(part="approvals", result="ok", found=found)
    except DeliveryError as error:
        mend = "look at [approvals], and whether the identity may receive from it"
        yield Finding(part="approvals", result="FAIL", found=str(error), mend=mend)


def _relay(config: Config) -> Iterator[Finding]:
    if config.relay is None:
        return
    from bridge.azure.bus_receiver import try_to_receive  # noqa: PLC0415 - it loads the Azure packages

    try:
        found = try_to_receive(relay_settings(config), what="events")
        yield Finding(part="relay", result="ok", found=found)
    except UsageError as error:
        yield Finding(part="relay", result="FAIL", found=str(error), mend="mend the sinks that it names")
    except DeliveryError as error:
        mend = "look at [relay], and whether the identity may receive from it"
        yield Finding(part="relay", result="FAIL", found=str(error), mend=mend)
