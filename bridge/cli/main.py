"""The command `imds-bridge`: thin; each command calls one function and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from bridge import __version__
from bridge.config.loader import DEFAULT_PATH, load, load_state_dir
from bridge.config.models import Config
from bridge.errors import BridgeError, ConfigError, SecretFault, StateError, UsageError
from bridge.outbox.state_dir import StateFolder

OK, UNEXPECTED, USAGE, FAILED = 0, 1, 2, 3

DESCRIPTION = """\
Publish every change of this Azure VM's Scheduled Events as CloudEvents, so that nothing is lost.

exit codes:
  0 fine   1 unexpected   2 usage or configuration   3 a check failed, or the state is held
"""
EXAMPLES = """\
examples:
  imds-bridge forward                              print every change on this VM as a line of JSON
  imds-bridge forward --config config.toml         publish to the sinks of a configuration
  imds-bridge check --config config.toml           what works, what does not, and what to do
  imds-bridge render --sink ops                    what a sink would send
  imds-bridge status                               the document, countdowns, and how each sink does
  imds-bridge demo                                 see it all work, on simulators
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    _write_utf8()
    try:
        arguments = _parser(given[0] if given else "").parse_args(given)
        return int(arguments.run(arguments))
    except (ConfigError, UsageError) as error:
        print(f"imds-bridge: {error}", file=sys.stderr)
        return USAGE
    except StateError as error:
        print(f"imds-bridge: {error}", file=sys.stderr)
        return FAILED
    except BridgeError as error:
        print(f"imds-bridge: {error}", file=sys.stderr)
        return UNEXPECTED
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return UNEXPECTED


def _write_utf8() -> None:
    """Have files and pipes get UTF-8 also on Windows, whose code pages lack most signs."""
    if sys.platform == "win32":
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(encoding="utf-8")


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="imds-bridge",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"imds-bridge {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_forward(commands)
    _add_listen(commands)
    _add_relay(commands)
    _add_approve(commands)
    _add_check(commands)
    _add_render(commands)
    _add_status(commands)
    _add_outbox(commands)
    _add_schema(commands)
    _add_lab(commands, wanted)
    return parser


Commands = argparse._SubParsersAction  # argparse gives its type no other name


def _command(
    commands: Commands[argparse.ArgumentParser], name: str, text: str, epilog: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"the TOML file (default: {DEFAULT_PATH} if it exists); IMDS_BRIDGE__SECTION__KEY overrides it",
    )


def _add_role(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--role",
        choices=("forward", "listen", "relay"),
        default="forward",
        help="whose state: the forwarder's (default), the approval listener's or the relay's",
    )


def _load(arguments: argparse.Namespace) -> Config:
    return load(arguments.config, os.environ)


def _add_forward(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "forward",
        "watch this VM's Scheduled Events and publish every change",
        "Runs until SIGTERM or SIGINT: then it polls once more, delivers what waits within stop_seconds and\n"
        "exits 0. A second signal ends it at once; the next start delivers what is left.\n\n"
        "examples:\n"
        "  imds-bridge forward\n"
        "  imds-bridge forward --config /etc/imds-bridge/config.toml\n"
        '  IMDS_BRIDGE__SINKS__OPS=\'{"kind":"webhook","url":"https://example.org/hook"}\' imds-bridge forward',
    )
    _add_config(command)

    def run(arguments: argparse.Namespace) -> int:
        from bridge.service.process import run_forward

        return run_forward(_load(arguments))

    command.set_defaults(run=run)


def _add_listen(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "listen",
        "take approve commands off the bus, have IMDS start what the policy allows, and answer with receipts",
        "A process of its own, with an identity and a state of its own, beside `forward`.\n\n"
        "examples:\n"
        "  imds-bridge listen --config /etc/imds-bridge/config.toml\n"
        "  imds-bridge listen --dry-run             decide and answer, but never POST to IMDS",
    )
    _add_config(command)
    command.add_argument("--dry-run", action="store_true", help="decide and answer, but never POST to IMDS")

    def run(arguments: argparse.Namespace) -> int:
        from bridge.service.process import run_listen

        return run_listen(_load(arguments), dry_run=arguments.dry_run)

    command.set_defaults(run=run)


def _add_relay(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "relay",
        "take a fleet's events off the bus and send them to the sinks, one voice for all its VMs",
        "Needs no IMDS and runs anywhere, with an identity and a state of its own. A message is completed only\n"
        "once its event is committed; what is no CloudEvent goes to the bus's dead-letter queue.\n\n"
        "examples:\n"
        "  imds-bridge relay --config /etc/imds-bridge/relay.toml\n"
        "  imds-bridge status --role relay          how far it has come, and how each sink does",
    )
    _add_config(command)

    def run(arguments: argparse.Namespace) -> int:
        from bridge.service.process import run_relay

        return run_relay(_load(arguments))

    command.set_defaults(run=run)


def _add_approve(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "approve",
        "put an approve command on the bus, for the listener of the VM",
        "Without EVENT_ID, on a VM: lists what is Scheduled, names every VM that an approval releases, and asks.\n\n"
        "examples:\n"
        "  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --wait\n"
        "  imds-bridge approve 4CAEA225-A741-474D-A72E-428C86FCD853 --vm web-0 --resource-group shop --expires 10m\n"
        "  imds-bridge approve",
    )
    _add_config(command)
    command.add_argument("events", nargs="*", metavar="EVENT_ID", help="the EventId, in any letter case")
    command.add_argument(
        "--vm", default="", metavar="NAME", help="whose listener is meant (default: this VM)"
    )
    command.add_argument("--resource-group", default="", metavar="NAME", help="of the VM, for the session id")
    command.add_argument("--reason", default="", metavar="TEXT", help="told on in the receipt")
    command.add_argument("--expires", default="10m", metavar="TIME", help="10m, 90s, 1h (default: 10m)")
    command.add_argument("--wait", action="store_true", help="wait for the receipt")
    command.set_defaults(run=_approve)


def _approve(arguments: argparse.Namespace) -> int:
    from bridge.cli import approve

    config = _load(arguments)
    approve.settings_of(config)
    try:
        expires_seconds = approve.parse_duration(arguments.expires)
    except ValueError as error:
        raise UsageError(f"approve: --expires: {error}") from None
    event_ids = arguments.events or _choose_events(config)
    if not event_ids:
        print("nothing approved")
        return OK
    request = approve.Request(
        event_ids=event_ids,
        vm=arguments.vm,
        resource_group=arguments.resource_group,
        reason=arguments.reason,
        expires_seconds=expires_seconds,
    )
    command_id = approve.send(config, request)
    print(f"sent: command {command_id} for {', '.join(event_ids)}")
    if not arguments.wait:
        return OK
    receipts = approve.wait_for_receipts(
        config, command_id, len(event_ids), limit_seconds=expires_seconds, tell=_tell_receipt
    )
    if len(receipts) < len(event_ids):
        print(
            f"no receipt within {arguments.expires}: does `imds-bridge listen` run on that VM?",
            file=sys.stderr,
        )
        return FAILED
    accepted = all(receipt["data"]["Outcome"] == "Accepted" for receipt in receipts)
    if accepted:
        print("IMDS has it; the start may still wait for other VMs on the host, or for NotBefore")
    return OK if accepted else FAILED


def _tell_receipt(receipt: dict[str, Any]) -> None:
    data = receipt["data"]
    is_released = data["Outcome"] == "Accepted" and data["Resources"]
    releases = f"; releases {', '.join(data['Resources'])}" if is_released else ""
    detail = f" ({data['Detail']})" if data["Detail"] else ""
    print(f"{data['Outcome'].lower()}: {data['EventId']}: {data['Reason']}{detail}{releases}")


def _choose_events(config: Config) -> list[str]:
    """Show what is Scheduled here, and ask which of it to approve."""
    from bridge.cli import approve

    events = approve.scheduled_here(config)
    if not events:
        print("nothing is Scheduled for this VM or its group")
        return []
    for number, event in enumerate(events, 1):
        print(f"  {number}  {approve.describe(event, datetime.now(UTC))}")
    if not sys.stdin.isatty():
        raise UsageError("approve: give the EventIds; nobody can be asked here")
    answer = input("Approve which? Numbers, `all`, or nothing: ").split()
    if answer in (["n"], ["no"], ["none"]):
        return []
    if answer == ["all"]:
        return [event.event_id for event in events]
    known = {str(number): event.event_id for number, event in enumerate(events, 1)}
    if wrong := [one for one in answer if one not in known]:
        raise UsageError(f"approve: given {' '.join(wrong)}, expected numbers from 1 to {len(events)}")
    return [known[one] for one in answer]


def _add_check(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "check",
        "try the configuration, IMDS and every sink, and say what works",
        "Sends no event but for --send. Exits 3 if something does not work.\n\n"
        "examples:\n"
        "  imds-bridge check --config config.toml\n"
        "  imds-bridge check --send                 a test message to each sink\n"
        "  imds-bridge check --json | jq '.[] | select(.result == \"FAIL\")'",
    )
    _add_config(command)
    command.add_argument(
        "--send", action="store_true", help="send one message, marked as a test, to each sink"
    )
    command.add_argument("--json", action="store_true", help="print JSON")

    def run(arguments: argparse.Namespace) -> int:
        from bridge.cli import check

        config = _load(arguments)
        print("asking IMDS (its very first answer may take two minutes) and each sink ...", file=sys.stderr)
        findings = check.check(config, send=arguments.send)
        print(json.dumps(check.as_json(findings), indent=2) if arguments.json else check.render(findings))
        return FAILED if any(finding.result == "FAIL" for finding in findings) else OK

    command.set_defaults(run=run)


def _add_render(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "render",
        "show exactly what a sink would send, for a sample of every event type",
        "Sends nothing. Secrets are shown as ***.\n\n"
        "examples:\n"
        "  imds-bridge render --sink ops\n"
        "  imds-bridge render --sink ops --type scheduledevent.scheduled --indent\n"
        "  imds-bridge render --sink ops --type 'approval.*'",
    )
    _add_config(command)
    command.add_argument(
        "--sink", default="", metavar="NAME", help="which sink (needless where there is one)"
    )
    command.add_argument("--type", default="", metavar="TYPE", help="only these types; * for anything")
    command.add_argument("--indent", action="store_true", help="lay JSON out for reading")

    def run(arguments: argparse.Namespace) -> int:
        from bridge.cli.render import render

        shown = render(
            _load(arguments),
            sink=arguments.sink,
            pattern=arguments.type,
            indent=arguments.indent,
            at=datetime.now(UTC),
        )
        for text in shown:
            print(text)
        return OK

    command.set_defaults(run=run)


def _add_status(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "status",
        "show the document, each event's countdown and how each sink does",
        "Reads what the running process wrote a moment ago; never asks IMDS. Exits 3 if no process runs.\n\n"
        "examples:\n"
        "  imds-bridge status\n"
        "  imds-bridge status --role listen\n"
        "  imds-bridge status --json | jq .sinks",
    )
    _add_config(command)
    _add_role(command)
    command.add_argument("--json", action="store_true", help="print JSON")

    def run(arguments: argparse.Namespace) -> int:
        from bridge.service import status

        told = status.read_status(_folder(arguments), datetime.now(UTC))
        print(json.dumps(told, indent=2) if arguments.json else status.render(told))
        return OK if told["running"] else FAILED

    command.set_defaults(run=run)


def _add_outbox(commands: Commands[argparse.ArgumentParser]) -> None:
    outbox = _command(
        commands,
        "outbox",
        "look at stored events and dead letters; send dead letters again",
        "examples:\n"
        "  imds-bridge outbox list                 the newest events\n"
        "  imds-bridge outbox list --dead          dead letters with the reason\n"
        "  imds-bridge outbox show 5f0c...         one event as it is sent\n"
        "  imds-bridge outbox retry 3 4            send dead letters 3 and 4 again\n"
        "  imds-bridge outbox retry --all --sink ops\n"
        "  imds-bridge outbox drop 3               forget dead letter 3",
    )
    actions = outbox.add_subparsers(metavar="ACTION", required=True)
    listing = _command(actions, "list", "list the newest events, or the dead letters", "")
    listing.add_argument("--dead", action="store_true", help="list dead letters")
    listing.add_argument("--limit", type=int, default=50, metavar="N", help="how many events (default: 50)")
    listing.set_defaults(run=_outbox_list)
    showing = _command(actions, "show", "print one event as the CloudEvent that is sent", "")
    showing.add_argument("event", metavar="ID", help="the CloudEvents id, or the number of `outbox list`")
    showing.set_defaults(run=_outbox_show)
    for name, text, statement in (
        ("retry", "send dead letters again; a running process takes them within seconds", "mark-retry"),
        ("drop", "forget dead letters for good", "drop-dead-letter"),
    ):
        action = _command(actions, name, text, "")
        action.add_argument(
            "numbers", nargs="*", type=int, metavar="NUMBER", help="as `outbox list --dead` shows"
        )
        action.add_argument("--all", action="store_true", help="all of them, or all of --sink")
        action.set_defaults(run=_outbox_mark, statement=statement, verb=name)
        action.add_argument("--sink", metavar="NAME", help="only this sink's dead letters")
        _add_config(action)
        _add_role(action)
    listing.add_argument("--sink", metavar="NAME", help="only this sink's dead letters")
    for action in (listing, showing):
        _add_config(action)
        _add_role(action)
        action.add_argument("--json", action="store_true", help="print JSON")


def _folder(arguments: argparse.Namespace) -> StateFolder:
    """Name the state folder; whoever only looks at it need not be able to read the secrets."""
    try:
        state_dir = _load(arguments).state_dir
    except ConfigError as error:
        if not all(isinstance(fault, SecretFault) for fault in error.faults):
            raise
        state_dir = load_state_dir(arguments.config, os.environ)
    return StateFolder(state_dir / arguments.role)


def _outbox_list(arguments: argparse.Namespace) -> int:
    from bridge.formats.table import table
    from bridge.outbox import inspect as ledger

    dead = arguments.dead or arguments.sink
    rows = (
        ledger.dead_letters(_folder(arguments), arguments.sink)
        if dead
        else ledger.newest(_folder(arguments), max(1, arguments.limit))
    )
    shown = (
        ("number", "sink", "dead_at", "reason", "retry", "id", "detail")
        if dead
        else ("seq", "stored_at", "id", "type")
    )
    if arguments.json:
        print(json.dumps(rows, indent=2))
    elif rows:
        print(table([name.upper() for name in shown], [[str(row[name]) for name in shown] for row in rows]))
    else:
        print("no dead letters" if dead else "no events")
    return OK


def _outbox_show(arguments: argparse.Namespace) -> int:
    from bridge.outbox import inspect as ledger

    print(json.dumps(ledger.show(_folder(arguments), arguments.event), indent=None if arguments.json else 2))
    return OK


def _outbox_mark(arguments: argparse.Namespace) -> int:
    from bridge.outbox import inspect as ledger

    if bool(arguments.numbers) == arguments.all:
        raise UsageError(f"outbox {arguments.verb}: give the numbers of dead letters, or --all")
    folder = _folder(arguments)
    known = {row["number"]: row for row in ledger.dead_letters(folder, arguments.sink)}
    if missing := [number for number in arguments.numbers if number not in known]:
        raise UsageError(
            f"no such dead letter: {', '.join(map(str, missing))}; see `imds-bridge outbox list --dead`"
        )
    chosen = list(known) if arguments.all else arguments.numbers
    changed = ledger.mark(folder, arguments.statement, chosen)
    lost = len(chosen) - changed
    done = "will be sent again" if arguments.verb == "retry" else "dropped"
    print(
        f"{changed} dead letter(s) {done}"
        + (f"; {lost} cannot: no body was kept for want of room" if lost else "")
    )
    return OK if not lost else FAILED


def _add_schema(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "schema",
        "print the JSON Schema of a type's data, for whoever reads our events",
        "Without NAME, lists the names. The same files stand in schemas/, with examples and how to read them.\n\n"
        "examples:\n"
        "  imds-bridge schema\n"
        "  imds-bridge schema scheduledevent.scheduled\n"
        "  imds-bridge schema --write schemas",
    )
    command.add_argument("name", nargs="?", metavar="NAME", help="a type, such as approval.accepted")
    command.add_argument("--write", type=Path, metavar="DIR", help="write all of them there, a file each")
    command.set_defaults(run=_schema)


def _schema(arguments: argparse.Namespace) -> int:
    from bridge.contract import schema

    if arguments.name and arguments.write:
        raise UsageError("schema: give NAME or --write, not both")
    if arguments.write:
        files = schema.schema_files()
        try:
            arguments.write.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (arguments.write / name).write_text(text, encoding="utf-8", newline="\n")
        except OSError as error:
            raise UsageError(f"schema: cannot write to {arguments.write}: {error.strerror}") from error
        print(f"{len(files)} schemas written to {arguments.write}")
    elif arguments.name:
        print(schema.schema_text(arguments.name), end="")
    else:
        print("\n".join(schema.schemas()))
    return OK


def _add_lab(commands: Commands[argparse.ArgumentParser], wanted: str) -> None:
    """Load the simulators only for their own commands: they would cost every other start 33 ms."""
    if wanted == "lab":
        from bridge.lab import commands as lab

        lab.add_parser(commands)
    elif wanted == "demo":
        try:
            from bridge.lab import demo
        except ImportError as error:
            raise UsageError(f"demo: {error}; pip install 'imds-bridge[lab]'") from error
        demo.add_parser(commands)
    else:
        commands.add_parser("lab", help="run or drive the simulators")
        commands.add_parser("demo", help="see it all work, on simulators")
