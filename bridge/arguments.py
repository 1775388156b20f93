"""What several commands share: exit codes, the parser, arguments and what they name."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bridge.config.loader import DEFAULT_PATH, load
from bridge.config.models import Config
from bridge.config.values import nearest
from bridge.contract.status import to_json
from bridge.outbox.state_dir import StateFolder

OK = 0
UNEXPECTED = 1
USAGE = 2
FAILED = 3
DRY_RUN = 4  # accepted, but nothing was POSTed

Run = Callable[[argparse.Namespace], int]
"""Runs a command; returns its exit code."""


class Parser(argparse.ArgumentParser):
    """Keeps the lines of descriptions and examples, and names the option that a mistyped one may mean."""

    def __init__(self, **settings: Any) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
        super().__init__(formatter_class=formatter, **settings)

    # The overloads of argparse differ only in the type of the namespace.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse the arguments; an unknown option is an error of the command that it was given to."""
        result, unknown = super().parse_known_args(args, namespace)
        if options := [one for one in unknown if one.startswith("-")]:
            known = re.findall(r"--[a-z-]+", self.format_usage())
            self.error(f"unknown option {options[0]!a}{nearest(options[0].partition('=')[0], known)}")
        return result, unknown


OPTIONS: dict[str, dict[str, Any]] = {
    "--config": {
        "type": Path,
        "default": argparse.SUPPRESS,  # it may stand before the command, too
        "metavar": "FILE",
        "help": f"the TOML file (default: {DEFAULT_PATH} if it exists); IMDS_BRIDGE__SECTION__KEY overrides it",
    },
    "--role": {
        "choices": ("forward", "listen", "relay", "console"),
        "help": "whose state (default: the only one that is there, otherwise that of forward)",
    },
    "--json": {"action": "store_true", "help": "print JSON"},
}
"""What several commands take."""


def complete(command: argparse.ArgumentParser, run: Run, *options: str, epilog: str) -> None:
    """Give a command its examples, the function that runs it, `--config` and others of OPTIONS."""
    command.epilog = epilog
    command.set_defaults(run=run)
    for option in ("--config", *options):
        command.add_argument(option, **OPTIONS[option])


def add_command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    """Add a command, or an action of one, whose help is `text`, without a capital letter and a full stop."""
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    return command


def add_flag(command: Any, name: str, text: str) -> None:
    """Add an option that is given or not, to a command or a group of options."""
    command.add_argument(name, action="store_true", help=text)


def add_text(command: Any, name: str, metavar: str, text: str, default: str | None = "") -> None:
    """Add an option whose value is a text."""
    command.add_argument(name, default=default, metavar=metavar, help=text)


def json_lines(value: Any) -> list[str]:
    """Write a value, which may have parts of a status, as indented JSON, in lines."""
    return json.dumps(value, indent=2, default=to_json).split("\n")


def load_config(arguments: argparse.Namespace) -> Config:
    """Load the configuration that `--config` names."""
    return load(arguments.config, os.environ)


def state_folder(arguments: argparse.Namespace) -> StateFolder:
    """Return the state folder of `--role`, which can be read whatever is wrong with sinks and secrets."""
    config = load(arguments.config, os.environ, with_tables=False)
    found = {path.name for path in config.state_dir.glob("*")}.intersection(OPTIONS["--role"]["choices"])
    role = arguments.role or (found.pop() if len(found) == 1 else "forward")
    return StateFolder(config.state_dir / role)


def other_file(folder: StateFolder, path: Path | None) -> tuple[str, str] | None:
    """Say that the process there has loaded another file than `path`, and what to do; units load a copy of theirs."""
    status, holder = folder.read_status(), folder.owner()
    if not (path and holder and status and status.config):
        return None
    loaded = Path(str(status.config))
    with suppress(OSError):  # else it cannot be told
        if not loaded.samefile(path) and loaded.read_bytes() != path.read_bytes():
            text = f"{holder} has loaded {loaded}, which differs from {path}"
            return text, f"restart it, or use --config {loaded}"
    return None
