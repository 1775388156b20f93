"""The command `status`."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from bridge.cli.common import add_config, add_json, add_role, json_lines, state_folder
from bridge.cli.exit_codes import FAILED, OK
from bridge.runtime.terminal import show
from bridge.service.status import bus_error, read_status, render

_EPILOG = """\
Reads the file that the running process replaces every few seconds; never asks IMDS. Exits 3 if no process
runs, or if it cannot receive from the bus.

examples:
  imds-bridge status
  imds-bridge status --role listen
  imds-bridge status --json | jq .sinks
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `status`."""
    command.epilog = _EPILOG
    add_config(command)
    add_role(command)
    add_json(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    status = read_status(state_folder(arguments), datetime.now(UTC))
    show(*(json_lines(status) if arguments.json else render(status)))
    return OK if status["running"] and not bus_error(status) else FAILED
