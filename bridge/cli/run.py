"""The commands that run until they are stopped: `forward`, `listen` and `relay`."""

from __future__ import annotations

import argparse

from bridge.arguments import add_flag, complete, load_config
from bridge.roles import run_forward, run_listen, run_relay

_FORWARD = """\
Runs until SIGTERM or SIGINT: it then polls once more, delivers waiting events for up to stop_seconds and exits 0.
A second signal ends it at once; the next start delivers what is left.

With --once it polls once, delivers for up to stop_seconds and exits: 0, or 3 if IMDS gave no usable answer or an
event was not delivered; the next start delivers it. Between two such runs nothing watches: what comes and goes
meanwhile is not seen, and an event that disappears is published as `ended`.

examples:
  imds-bridge forward
  imds-bridge forward --once               publish what has changed since the run before
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
    complete(
        command, lambda arguments: run_forward(load_config(arguments), once=arguments.once), epilog=_FORWARD
    )
    add_flag(command, "--once", "poll once, deliver, and exit")


def listen(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `listen`."""
    complete(
        command,
        lambda arguments: run_listen(load_config(arguments), dry_run=arguments.dry_run),
        epilog=_LISTEN,
    )
    add_flag(command, "--dry-run", "decide and publish receipts, but never POST to IMDS")


def relay(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `relay`."""
    complete(command, lambda arguments: run_relay(load_config(arguments)), epilog=_RELAY)
