"""The command `outbox`: list and show stored events, retry, drop and move them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bridge.arguments import OK, OPTIONS, Run, add_command, complete, json_lines, state_folder
from bridge.errors import UsageError
from bridge.formats.text import format_duration, table
from bridge.outbox import inspect
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.text import show

_EPILOG = """\
examples:
  imds-bridge outbox list                 the newest events
  imds-bridge outbox list --waiting       what waits for a sink, the oldest first
  imds-bridge outbox list --dead          dead letters with the reason
  imds-bridge outbox show 5f0c...         one event as it is sent
  imds-bridge outbox retry 3 4            send dead letters 3 and 4 again
  imds-bridge outbox retry --all --sink ops
  imds-bridge outbox drop 3               delete dead letter 3
  imds-bridge outbox drop --all --yes
  imds-bridge outbox drop --waiting --sink old --yes
  imds-bridge outbox move --from old --to new
"""
_DEAD_LETTER_KEYS = ("number", "sink", "dead_at", "reason", "retry", "id", "detail")
_WAITING_KEYS = ("seq", "sink", "age", "type", "subject", "tries", "next_try_at", "last_error")
_EVENT_KEYS = ("seq", "stored_at", "id", "type")


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `outbox` with its actions."""
    command.epilog = _EPILOG
    command.add_argument("--config", **OPTIONS["--config"])
    actions = command.add_subparsers(metavar="ACTION", required=True)
    text = "list the newest events, what waits, or the dead letters"
    listed = _add_action(actions, "list", _list, text, "--json")
    kind = listed.add_mutually_exclusive_group()
    kind.add_argument("--dead", action="store_true", help="list dead letters")
    kind.add_argument("--waiting", action="store_true", help="list what waits for a sink, the oldest first")
    listed.add_argument("--limit", type=int, default=50, metavar="N", help="how many events (default: 50)")
    listed.add_argument(
        "--sink", metavar="NAME", help="only what is this sink's; without --waiting, its dead letters"
    )
    shown = _add_action(actions, "show", _show, "print one event as the CloudEvent that is sent", "--json")
    shown.add_argument("event", metavar="ID", help="the CloudEvents id, or the number of `outbox list`")
    text = "send dead letters again; a running process does so within seconds"
    _add_numbers(_add_action(actions, "retry", _retry, text))
    drop = _add_action(actions, "drop", _drop, "delete dead letters, or what waits for a sink, for good")
    _add_numbers(drop)
    drop.add_argument("--waiting", action="store_true", help="everything that waits for --sink, instead")
    drop.add_argument("--yes", action="store_true", help="with --all or --waiting: do not ask")
    move = _add_action(actions, "move", _move, "hand what waits for one sink to another one")
    move.add_argument(
        "--from", dest="sink", metavar="NAME", required=True, help="the sink that gets it no more"
    )
    move.add_argument(
        "--to", dest="target", metavar="NAME", required=True, help="the sink that gets it instead"
    )


def _add_action(actions: Any, name: str, run: Run, text: str, *options: str) -> argparse.ArgumentParser:
    examples = "\n".join(line for line in _EPILOG.splitlines() if f"outbox {name}" in line)
    action = add_command(actions, name, text)
    complete(action, run, "--role", *options, epilog=f"examples:\n{examples}")
    return action


def _add_numbers(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "numbers", nargs="*", type=int, metavar="NUMBER", help="as `outbox list --dead` shows"
    )
    action.add_argument("--all", action="store_true", help="all of them, or all of --sink")
    action.add_argument("--sink", metavar="NAME", help="only what is this sink's")


def _folder(arguments: argparse.Namespace) -> StateFolder:
    """Return the state folder, in which `--sink` must be known."""
    folder = state_folder(arguments)
    if arguments.sink is not None:
        inspect.check_sink(folder, arguments.sink)
    return folder


def _list(arguments: argparse.Namespace) -> int:
    folder, limit = _folder(arguments), max(1, arguments.limit)
    if arguments.waiting:
        rows = inspect.waiting(folder, arguments.sink, limit, datetime.now(UTC))
        shown = [{**row, "age": format_duration(row["age_seconds"], exact=True)} for row in rows]
        _print(rows if arguments.json else shown, _WAITING_KEYS, "nothing waits", as_json=arguments.json)
    elif arguments.dead or arguments.sink:
        rows = inspect.dead_letters(folder, arguments.sink)
        _print(rows, _DEAD_LETTER_KEYS, "no dead letters", as_json=arguments.json)
    else:
        _print(inspect.newest(folder, limit), _EVENT_KEYS, "no events", as_json=arguments.json)
    return OK


def _print(rows: Sequence[dict[str, Any]], keys: Sequence[str], nothing: str, *, as_json: bool) -> None:
    if as_json:
        show(*json_lines(rows))
    elif rows:
        shown = [["-" if row[key] in (None, "") else str(row[key]) for key in keys] for row in rows]
        show(*table([key.upper().replace("_", " ") for key in keys], shown))
    else:
        show(nothing)


def _show(arguments: argparse.Namespace) -> int:
    event = inspect.show(state_folder(arguments), arguments.event)
    show(*([json.dumps(event)] if arguments.json else json_lines(event)))
    return OK


def _retry(arguments: argparse.Namespace) -> int:
    folder, numbers = _chosen(arguments, "retry")
    show(f"{inspect.retry(folder, numbers)} dead letter(s) will be sent again")
    return OK


def _drop(arguments: argparse.Namespace) -> int:
    if arguments.waiting:
        return _drop_waiting(arguments)
    folder, numbers = _chosen(arguments, "drop")
    if arguments.all and numbers and not _is_confirmed(arguments, f"{len(numbers)} dead letter(s)"):
        return OK
    show(f"{inspect.drop(folder, numbers)} dead letter(s) dropped")
    return OK


def _drop_waiting(arguments: argparse.Namespace) -> int:
    if arguments.numbers or arguments.all or not arguments.sink:
        raise UsageError(
            "outbox drop --waiting: give --sink and no numbers, for example --waiting --sink ops"
        )
    folder = _folder(arguments)
    count = inspect.waiting_counts(folder).get(arguments.sink, 0)
    if count and not _is_confirmed(arguments, f"{count} event(s) that wait for {arguments.sink}"):
        return OK
    show(f"{inspect.drop_waiting(folder, arguments.sink)} event(s) dropped that waited for {arguments.sink}")
    return OK


def _move(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if arguments.target == arguments.sink:
        raise UsageError(f"outbox move: given --from and --to {arguments.sink}, expected two different sinks")
    moved = inspect.move(folder, arguments.sink, arguments.target)
    note = "; no running process has this sink: restart it with the new configuration"
    note = "" if arguments.target in inspect.last_errors(folder) else note
    show(f"{moved} event(s) wait for {arguments.target} now{note}")
    return OK


def _chosen(arguments: argparse.Namespace, verb: str) -> tuple[StateFolder, list[int]]:
    """Return the folder and the numbers of the dead letters that are meant.

    Raises:
        UsageError: none are given, or one that is not there.
    """
    if bool(arguments.numbers) == arguments.all:
        raise UsageError(f"outbox {verb}: give the numbers of dead letters, or --all")
    folder = _folder(arguments)
    known = [row["number"] for row in inspect.dead_letters(folder, arguments.sink)]
    if missing := [number for number in arguments.numbers if number not in known]:
        raise UsageError(
            f"unknown dead letter: {', '.join(map(str, missing))}; see `imds-bridge outbox list --dead`"
        )
    return folder, known if arguments.all else arguments.numbers


def _is_confirmed(arguments: argparse.Namespace, what: str) -> bool:
    """Ask before much is deleted for good; without an answer, say that nothing is.

    Raises:
        UsageError: there is nobody to ask.
    """
    if arguments.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("outbox drop: without a terminal it cannot ask; give --yes to drop all")
    if input(f"Delete {what} for good? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    show("nothing dropped")
    return False
