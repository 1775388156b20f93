"""The command `imds-bridge`: thin; each command calls one function and turns errors into exit codes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bridge import __version__
from bridge.config import DEFAULT_PATH, Config, load
from bridge.errors import BridgeError, ConfigError, StateError, UsageError
from bridge.state import StateFolder

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
  imds-bridge status                               the document, countdowns, and how each sink does
  imds-bridge demo                                 see it all work, on simulators
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="imds-bridge",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"imds-bridge {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_forward(commands)
    _add_check(commands)
    _add_status(commands)
    _add_outbox(commands)
    _add_lab(commands)
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
        from bridge.app import run_forward

        return run_forward(_load(arguments))

    command.set_defaults(run=run)


def _add_check(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "check",
        "try the configuration, IMDS and every sink, and say what works",
        "Sends no event. Exits 3 if something does not work.\n\n"
        "examples:\n"
        "  imds-bridge check --config config.toml\n"
        "  imds-bridge check --json | jq '.[] | select(.result == \"FAIL\")'",
    )
    _add_config(command)
    command.add_argument("--json", action="store_true", help="print JSON")

    def run(arguments: argparse.Namespace) -> int:
        from bridge import check

        print("asking IMDS (its very first answer may take two minutes) and each sink ...", file=sys.stderr)
        findings = check.check(_load(arguments))
        print(json.dumps(check.as_json(findings), indent=2) if arguments.json else check.render(findings))
        return FAILED if any(finding.result == "FAIL" for finding in findings) else OK

    command.set_defaults(run=run)


def _add_status(commands: Commands[argparse.ArgumentParser]) -> None:
    command = _command(
        commands,
        "status",
        "show the document, each event's countdown and how each sink does",
        "Reads what the running process wrote a moment ago; never asks IMDS. Exits 3 if no process runs.\n\n"
        "examples:\n"
        "  imds-bridge status\n"
        "  imds-bridge status --json | jq .sinks",
    )
    _add_config(command)
    command.add_argument("--json", action="store_true", help="print JSON")

    def run(arguments: argparse.Namespace) -> int:
        from bridge import status
        from bridge.state import StateFolder

        config = _load(arguments)
        told = status.read_status(StateFolder(config.state_dir / "forward"), datetime.now(UTC))
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
    listing.add_argument("--sink", metavar="NAME", help="only this sink's dead letters")
    for action in (listing, showing):
        _add_config(action)
        action.add_argument("--json", action="store_true", help="print JSON")


def _folder(arguments: argparse.Namespace) -> StateFolder:
    return StateFolder(_load(arguments).state_dir / "forward")


def _outbox_list(arguments: argparse.Namespace) -> int:
    from bridge import ledger
    from bridge.text import table

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
    from bridge import ledger

    print(json.dumps(ledger.show(_folder(arguments), arguments.event), indent=None if arguments.json else 2))
    return OK


def _outbox_mark(arguments: argparse.Namespace) -> int:
    from bridge import ledger

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


def _add_lab(commands: Commands[argparse.ArgumentParser]) -> None:
    from bridge.lab import commands as lab
    from bridge.lab import demo

    lab.add_parser(commands)
    demo.add_parser(commands)
