"""The commands that run until they are stopped: `forward`, `listen` and `relay`."""

from __future__ import annotations

import argparse

from bridge.cli.common import add_config, load_config
from bridge.service.composition import run_forward, run_listen, run_relay

_FORWARD = """\
Runs until SIGTERM or SIGINT: it then polls once more, delivers waiting events for up to stop_seconds and exits 0.
A second signal ends it at once; the next start delivers what is left.

examples:
  imds-bridge forward
  imds-bridge forward --config /etc/imds-bridge/config.toml
  IMDS_BRIDGE__SINKS__OPS='{"kind":"webhook","url":"https://example.org/hook"}' imds-bridge forward
"""
_LISTEN = """\
A separate process beside `forward`, with its own identity and its own state.

examples:
  imds-bridge listen --config /etc/imds-bridge/config.toml
  imds-bridge listen --dry-run             decide and publish receipts, but never POST to IMDS
"""
_RELAY = """\
Needs no IMDS and runs anywhere, with its own identity and its own state. A message is completed only after its
event is committed; a message that is not a CloudEvent goes to the bus's dead-letter queue.

examples:
  imds-bridge relay --config /etc/imds-bridge/relay.toml
  imds-bridge status --role relay          how many events were relayed, and the state of each sink
"""


def forward(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `forward`."""
    command.epilog = _FORWARD
    add_config(command)
    command.set_defaults(run=lambda arguments: run_forward(load_config(arguments)))


def listen(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `listen`."""
    command.epilog = _LISTEN
    add_config(command)
    command.add_argument(
        "--dry-run", action="store_true", help="decide and publish receipts, but never POST to IMDS"
    )
    command.set_defaults(run=lambda arguments: run_listen(load_config(arguments), dry_run=arguments.dry_run))


def relay(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `relay`."""
    command.epilog = _RELAY
    add_config(command)
    command.set_defaults(run=lambda arguments: run_relay(load_config(arguments)))
