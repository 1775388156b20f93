"""The command `status`."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from typing import Any

from bridge.cli.common import FAILED, OK, complete, json_lines, state_folder
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.text import show
from bridge.service.status import BACKLOG_SECONDS, bus_error, find_urgent, read_status, render

WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
_EPILOG = """\
Reads the file that the running process replaces every few seconds; never asks IMDS. Exits 3 if no process
runs or it does not respond, if it cannot receive from the bus, and with --check if anything needs a person.

examples:
  imds-bridge status
  imds-bridge status --role listen
  imds-bridge status --watch               show it again every two seconds, until Ctrl+C
  imds-bridge status --check               print only what needs a person, for cron and monitoring
  imds-bridge status --json | jq .sinks
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `status`."""
    complete(command, _run, "--role", epilog=_EPILOG)
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="show it again every two seconds, until Ctrl+C")
    form.add_argument(
        "--check", action="store_true", help="print only what needs a person; exit 3 if anything does"
    )
    command.add_argument(
        "--backlog-seconds",
        type=float,
        default=BACKLOG_SECONDS,
        metavar="N",
        help="how long an event may wait for a sink before --check reports it (default: %(default)g)",
    )


def _run(arguments: argparse.Namespace) -> int:
    folder = state_folder(arguments)
    if arguments.watch:
        return _watch(folder)
    now = datetime.now(UTC)
    status = read_status(folder, now)
    if arguments.check:
        return _check(status, now, arguments.backlog_seconds)
    show(*(json_lines(status) if arguments.json else render(status)))
    return OK if status["running"] and not bus_error(status) else FAILED


def _check(status: dict[str, Any], now: datetime, backlog_seconds: float) -> int:
    urgent = [] if status["running"] else render(status)[:1]
    urgent += find_urgent(status, now, backlog_seconds=backlog_seconds)
    show(*(urgent or ["nothing needs a person"]))
    return FAILED if urgent else OK


def _watch(folder: StateFolder) -> int:
    is_terminal = sys.stdout.isatty()
    try:
        while True:
            lines = render(read_status(folder, datetime.now(UTC)))
            if is_terminal:
                sys.stdout.write(_CLEAR)
            show(*lines, *([] if is_terminal else [""]))
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return OK
