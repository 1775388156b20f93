"""The command `status`."""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime

from bridge.arguments import FAILED, OK, add_flag, complete, json_lines, state_folder
from bridge.cli.units import find_units
from bridge.outbox.state_dir import StateFolder
from bridge.process.status import read_report, render
from bridge.runtime.text import show

WATCH_SECONDS = 2.0
_CLEAR = "\x1b[H\x1b[2J"
_EPILOG = """\
Reads the file that the running process replaces every few seconds; never asks IMDS. Exits 3 if no process
runs or it does not respond, and if anything else needs a person.

examples:
  imds-bridge status
  imds-bridge status --role listen
  imds-bridge status --json | jq .sinks
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `status`."""
    complete(command, _run, "--role", epilog=_EPILOG)
    form = command.add_mutually_exclusive_group()
    add_flag(form, "--json", "print JSON")
    add_flag(form, "--watch", "show it again every two seconds, until Ctrl+C")
    text = "print only what needs a person, for cron and monitoring, with the same exit code"
    add_flag(form, "--check", text)


def _run(arguments: argparse.Namespace) -> int:
    folder = state_folder(arguments)
    if arguments.watch:
        return _watch(folder)
    if not arguments.json and not arguments.check and (lines := _unit(folder)):
        show(*lines)  # also where no process has left a status
    report = read_report(folder, datetime.now(UTC))
    urgent = [*([] if report.running else render(report)[:1]), *report.urgent]
    if arguments.check:
        show(*(urgent or ["nothing needs a person"]), *report.gaps)
    else:
        show(*(json_lines(report) if arguments.json else render(report)))
    return FAILED if urgent else OK


def _unit(folder: StateFolder) -> list[str]:
    units = find_units(folder.path.parent, folder.path.name)
    return [f"{text}: {remedy}" if remedy else text for text, remedy, _ in units]


def _watch(folder: StateFolder) -> int:
    is_terminal = sys.stdout.isatty()
    try:
        while True:
            lines = [*_unit(folder), *render(read_report(folder, datetime.now(UTC)))]
            if is_terminal:
                sys.stdout.write(_CLEAR)
            show(*lines, *([] if is_terminal else [""]))
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return OK
