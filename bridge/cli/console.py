"""The command `console`."""

from __future__ import annotations

import argparse

from bridge.cli.common import complete, load_config
from bridge.console.process import run_console

_EPILOG = """\
Shows what the forwarders publish: what is scheduled now and in the next days, what every VM saw of an event, which
VMs are silent, and what happened. It asks no VM. Events come from a Service Bus subscription ([console.bus]), from
webhook sinks or Event Grid (POST /ingest), or from both. Without settings it listens on 127.0.0.1:8080. On any
other address it refuses to start unless people sign in and senders authenticate.

examples:
  imds-bridge console
  imds-bridge console --config /etc/imds-bridge/console.toml
  IMDS_BRIDGE__SINKS__CONSOLE='{"kind":"webhook","url":"http://127.0.0.1:8080/ingest"}' imds-bridge forward

See docs/console.md.
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `console`."""
    complete(command, lambda arguments: run_console(load_config(arguments)), epilog=_EPILOG)
