"""The command `outbox`: list and show stored events, retry and drop dead letters."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from bridge.cli.common import add_config, add_json, add_role, json_lines, state_folder
from bridge.cli.exit_codes import FAILED, OK
from bridge.errors import UsageError
from bridge.formats.table import table
from bridge.outbox import inspect
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.terminal import show

_EPILOG = """\
examples:
  imds-bridge outbox list                 the newest events
  imds-bridge outbox list --dead          dead letters with the reason
  imds-bridge outbox show 5f0c...         one event as it is sent
  imds-bridge outbox retry 3 4            send dead letters 3 and 4 again
  imds-bridge outbox retry --all --sink ops
  imds-bridge outbox drop 3               delete dead letter 3
  imds-bridge outbox drop --all --yes
"""
_DEAD_LETTER_KEYS = ("number", "sink", "dead_at", "reason", "retry", "id", "detail")
_EVENT_KEYS = ("seq", "stored_at", "id", "type")

# Argparse's own type for what add_subparsers returns is private.
Actions = Any


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `outbox` with its actions."""
    command.epilog = _EPILOG
    add_config(command)
    actions = command.add_subparsers(metavar="ACTION", required=True)
    _add_list(actions)
    _add_show(actions)
    _add_change(
        actions, "retry", "send dead letters again; a running process does so within seconds", "mark-retry"
    )
    drop = _add_change(actions, "drop", "delete dead letters for good", "drop-dead-letter")
    drop.add_argument("--yes", action="store_true", help="with --all: do not ask")


def _add_action(actions: Actions, name: str, text: str) -> argparse.ArgumentParser:
    examples = "\n".join(line for line in _EPILOG.splitlines() if f"outbox {name}" in line)
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=f"examples:\n{examples}"
    )
    add_config(action)
    add_role(action)
    return action


def _add_sink(action: argparse.ArgumentParser) -> None:
    action.add_argument("--sink", metavar="NAME", help="only this sink's dead letters")


def _add_list(actions: Actions) -> None:
    action = _add_action(actions, "list", "list the newest events, or the dead letters")
    action.add_argument("--dead", action="store_true", help="list dead letters")
    action.add_argument("--limit", type=int, default=50, metavar="N", help="how many events (default: 50)")
    _add_sink(action)
    add_json(action)
    action.set_defaults(run=_list)


def _add_show(actions: Actions) -> None:
    action = _add_action(actions, "show", "print one event as the CloudEvent that is sent")
    action.add_argument("event", metavar="ID", help="the CloudEvents id, or the number of `outbox list`")
    add_json(action)
    action.set_defaults(run=_show)


def _add_change(actions: Actions, name: str, text: str, statement: str) -> argparse.ArgumentParser:
    action = _add_action(actions, name, text)
    action.add_argument(
        "numbers", nargs="*", type=int, metavar="NUMBER", help="as `outbox list --dead` shows"
    )
    action.add_argument("--all", action="store_true", help="all of them, or all of --sink")
    _add_sink(action)
    action.set_defaults(run=_change, statement=statement, verb=name, yes=name == "retry")
    return action


def _folder(arguments: argparse.Namespace) -> StateFolder:
    """Return the state folder, in which `--sink` must be known."""
    folder = state_folder(arguments)
    if arguments.sink is not None:
        inspect.check_sink(folder, arguments.sink)
    return folder


def _list(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if arguments.dead or arguments.sink:
        _print(
            inspect.dead_letters(folder, arguments.sink),
            _DEAD_LETTER_KEYS,
            "no dead letters",
            as_json=arguments.json,
        )
    else:
        _print(
            inspect.newest(folder, max(1, arguments.limit)), _EVENT_KEYS, "no events", as_json=arguments.json
        )
    return OK


def _print(rows: Sequence[dict[str, Any]], keys: Sequence[str], nothing: str, *, as_json: bool) -> None:
    if as_json:
        show(*json_lines(rows))
    elif rows:
        show(*table([key.upper() for key in keys], [[str(row[key]) for key in keys] for row in rows]))
    else:
        show(nothing)


def _show(arguments: argparse.Namespace) -> int:
    event = inspect.show(state_folder(arguments), arguments.event)
    show(*([json.dumps(event)] if arguments.json else json_lines(event)))
    return OK


def _change(arguments: argparse.Namespace) -> int:
    if bool(arguments.numbers) == arguments.all:
        raise UsageError(f"outbox {arguments.verb}: give the numbers of dead letters, or --all")
    folder = _folder(arguments)
    known = [row["number"] for row in inspect.dead_letters(folder, arguments.sink)]
    if missing := [number for number in arguments.numbers if number not in known]:
        raise UsageError(
            f"unknown dead letter: {', '.join(map(str, missing))}; see `imds-bridge outbox list --dead`"
        )
    chosen = known if arguments.all else arguments.numbers
    if chosen and arguments.all and not arguments.yes and not _confirm(len(chosen)):
        show("nothing dropped")
        return OK
    changed = inspect.mark(folder, arguments.statement, chosen)
    done = "will be sent again" if arguments.verb == "retry" else "dropped"
    show(f"{changed} dead letter(s) {done}{_impossible(len(chosen) - changed)}")
    return OK if changed == len(chosen) else FAILED


def _confirm(count: int) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("outbox drop: without a terminal it cannot ask; give --yes to drop all")
    return input(f"Delete {count} dead letter(s) for good? [y/N] ").strip().lower() in ("y", "yes")


def _impossible(count: int) -> str:
    return f"; {count} cannot be sent: the size limit left no space for the body" if count else ""
