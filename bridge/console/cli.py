"""The command `console`: run it, fill its store from an archive, and save what no archive has."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

from bridge.arguments import FAILED, OK, add_command, complete, load_config, state_folder
from bridge.console.archive import export_own, import_events
from bridge.console.process import DATABASE, open_store, run_console
from bridge.errors import StateError, UsageError
from bridge.runtime.text import show
from bridge.runtime.time import Clock

_EPILOG = """\
Shows what the forwarders publish: what is scheduled now and in the next days, what every VM saw of an event, which
VMs are silent, and what happened. It asks no VM. Events come from a Service Bus subscription ([console.bus]), from
webhook sinks or Event Grid (POST /ingest), or from both. Without settings it listens on 127.0.0.1:8080. On any
other address it refuses to start unless people sign in and senders authenticate.

examples:
  imds-bridge console
  imds-bridge console --config /etc/imds-bridge/console.toml
  imds-bridge console import archive.jsonl     make a new store of what an archive has
  imds-bridge console export > own.jsonl       what no archive has: see `console export --help`
  IMDS_BRIDGE__SINKS__CONSOLE='{"kind":"webhook","url":"http://127.0.0.1:8080/ingest"}' imds-bridge forward

See docs/console.md.
"""
_IMPORT = """\
Adds what the files have to the console's store, which is made if there is none. Stop the console before. Each line
is a CloudEvent, as `audit.py --consume` and `imds-bridge forward` to stdout write them. What `console export` wrote
is believed only in a file after --own. The order of lines and files does not matter, and what the store has already
is not added again. What is older than retain_days is deleted when the console runs.

examples:
  imds-bridge console import archive.jsonl --own own.jsonl
  zcat 2026-*.jsonl.gz | imds-bridge console import -
"""
_EXPORT = """\
Prints what the console knows and no archive has, a CloudEvent in each line: the list of expected VMs, the VMs that
were forgotten and the events that were dismissed, with who did it and when. `console import` reads it. The console
may run meanwhile.

examples:
  imds-bridge console export > own.jsonl
"""
PROGRESS_LINES = 100_000
KINDS = ("new", "known", "ignored", "unreadable")  # of lines


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `console` with its actions."""
    complete(command, lambda arguments: run_console(load_config(arguments)), epilog=_EPILOG)
    command.set_defaults(role="console")
    actions = command.add_subparsers(metavar="ACTION")
    text = "make a new store of archives, or add them to one; without an action, the console runs"
    added = add_command(actions, "import", text)
    complete(added, _import, epilog=_IMPORT)
    added.add_argument("files", nargs="*", metavar="FILE", help="JSON lines; - for standard input")
    added.add_argument("--own", action="append", default=[], metavar="FILE", help="what console export wrote")
    text = "print what no archive has: expected VMs, and what people have put away"
    complete(add_command(actions, "export", text), _export, epilog=_EXPORT)


def _import(arguments: argparse.Namespace) -> int:
    if not arguments.files and not arguments.own:
        raise UsageError("expected a FILE, or --own FILE")
    folder, clock = state_folder(arguments), Clock()
    with ExitStack() as stack:
        files, own = (
            {name: stack.enter_context(_open(name)) for name in names}
            for names in (arguments.files, arguments.own)
        )
        stack.callback(folder.release)
        store = stack.enter_context(closing(open_store(folder, clock)))
        try:
            counts = import_events(store, _lines(files), own=_lines(own), now=clock.wall(), tell=_tell)
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{error}; what was added before stays, so import the files again") from error
    show(", ".join(f"{counts[kind]:,} {kind}" for kind in KINDS))
    return FAILED if counts["unreadable"] else OK


def _open(name: str) -> BinaryIO:
    try:
        return sys.stdin.buffer if name == "-" else Path(name).open("rb")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error


def _lines(files: Mapping[str, Iterable[bytes]]) -> Iterator[tuple[str, bytes]]:
    for name, file in files.items():
        for number, line in enumerate(file, 1):
            if number % PROGRESS_LINES == 0:
                _tell(f"{name}: {number:,} lines")
            yield f"{name}, line {number}", line


def _tell(text: str) -> None:
    show(text, stream=sys.stderr)


def _export(arguments: argparse.Namespace) -> int:
    for body in export_own(state_folder(arguments).path / DATABASE):
        show(body.decode())
    return OK
