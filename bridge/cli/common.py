"""Arguments that several commands have, and what they name."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from bridge.config.loader import DEFAULT_PATH, load, load_state_dir
from bridge.config.models import Config
from bridge.errors import ConfigError, SecretFault
from bridge.outbox.state_dir import StateFolder


def add_config(command: argparse.ArgumentParser) -> None:
    """Add `--config`."""
    command.add_argument(
        "--config",
        type=Path,
        default=argparse.SUPPRESS,  # it may stand before the command, too
        metavar="FILE",
        help=f"the TOML file (default: {DEFAULT_PATH} if it exists); IMDS_BRIDGE__SECTION__KEY overrides it",
    )


def add_role(command: argparse.ArgumentParser) -> None:
    """Add `--role`."""
    command.add_argument(
        "--role",
        choices=("forward", "listen", "relay", "console"),
        default="forward",
        help="whose state (default: %(default)s)",
    )


def add_json(command: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    command.add_argument("--json", action="store_true", help="print JSON")


def json_lines(value: Any) -> list[str]:
    """Write a value as indented JSON, in lines."""
    return json.dumps(value, indent=2).split("\n")


def load_config(arguments: argparse.Namespace) -> Config:
    """Load the configuration that `--config` names."""
    return load(arguments.config, os.environ)


def state_folder(arguments: argparse.Namespace) -> StateFolder:
    """Return the state folder of `--role`; reading the state does not need the secrets to be readable."""
    try:
        state_dir = load_config(arguments).state_dir
    except ConfigError as error:
        if not all(isinstance(fault, SecretFault) for fault in error.faults):
            raise
        state_dir = load_state_dir(arguments.config, os.environ)
    return StateFolder(state_dir / arguments.role)
