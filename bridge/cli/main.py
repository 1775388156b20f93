"""The command `imds-bridge`: find the command that is meant, run it, turn errors into exit codes."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path

from bridge import __version__
from bridge.arguments import FAILED, OK, UNEXPECTED, USAGE, Parser, add_command
from bridge.config.values import nearest
from bridge.errors import BridgeError, ConfigError, Incomplete, StateError, UsageError
from bridge.runtime.text import journal_mark, plain, redact, show

DESCRIPTION = """\
Publish every change of this Azure VM's Scheduled Events as CloudEvents, and lose none of them.

exit codes:
  0  success
  1  unexpected error
  2  usage or configuration error
  3  a check failed, the state is locked, or `forward --once` has not done everything
"""
EXAMPLES = """\
examples:
  imds-bridge forward                              print every change on this VM as a line of JSON
  imds-bridge forward --config config.toml         publish to the configured sinks
  imds-bridge check --config config.toml           show what works, what does not, and how to fix it
  imds-bridge render --sink ops                    show what a sink would send
  imds-bridge status                               show the document, countdowns and the state of each sink
  imds-bridge explain                              show why the newest event has or has not arrived
  imds-bridge demo                                 see everything work, on simulators
"""
# Each command's function that completes its parser, and its help: only the command that is called is imported.
COMMANDS = {
    "forward": ("bridge.cli.run:forward", "watch this VM's Scheduled Events and publish every change"),
    "listen": (
        "bridge.cli.run:listen",
        "receive approve commands, approve in IMDS what the policy allows, and publish receipts",
    ),
    "relay": ("bridge.cli.run:relay", "receive a fleet's events and send each once, whichever VM saw it"),
    "console": ("bridge.console.cli:configure", "show a fleet's events on one web page"),
    "approve": ("bridge.cli.approve:configure", "send an approve command to a VM's listener"),
    "recover": ("bridge.cli.recover:configure", "have a VM put back to work, or say that a person did it"),
    "check": ("bridge.cli.check:configure", "try the configuration, IMDS and every sink"),
    "render": ("bridge.cli.render:configure", "show what a sink would send, for a sample of each event type"),
    "status": ("bridge.cli.status:configure", "show the document, countdowns and the state of each sink"),
    "explain": (
        "bridge.cli.explain:configure",
        "show whether an event goes to each sink, and where it is now",
    ),
    "outbox": (
        "bridge.cli.outbox:configure",
        "list stored events and dead letters; retry or drop dead letters",
    ),
    "config": ("bridge.cli.config:configure", "print the configuration's JSON Schema, or check a file"),
    "schema": ("bridge.cli.schema:configure", "print the JSON Schema of every event, or of a type's data"),
    "completion": ("bridge.cli.schema:completion", "print a shell's completion script"),
    "lab": ("bridge.lab.commands:configure", "run or drive the simulators"),
    "demo": ("bridge.lab.demo:configure", "see everything work, on simulators"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    _show_any_text()
    try:
        if not given:
            build_parser().print_help()
            return OK
        arguments = parse(given)
        return int(arguments.run(arguments))
    except BridgeError as error:
        first, *rest = error.lines if isinstance(error, ConfigError) else [str(error)]
        _show_error(f"imds-bridge: {first}", *rest)
        return _exit_code(error)
    except BrokenPipeError:
        # Whoever reads our output has closed it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except KeyboardInterrupt:
        return UNEXPECTED
    except Exception:  # noqa: BLE001 - its text may hold a secret, or text from outside
        _show_error(*redact(traceback.format_exc()).splitlines())
        return UNEXPECTED


def parse(given: Sequence[str]) -> argparse.Namespace:
    """Read the arguments; `run` is the function to call with them."""
    wanted = _command(given)
    parser = build_parser(wanted)
    if wanted and wanted not in COMMANDS:
        parser.error(f"unknown command {wanted!a}{nearest(wanted, COMMANDS)}")
    return parser.parse_args(given)


def _command(given: Sequence[str]) -> str:
    """Return the first word that is no option of imds-bridge itself, "" if there is none."""
    words = iter(given)
    for word in words:
        if word == "--config":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return ""


def _show_error(*lines: str) -> None:
    mark = journal_mark(sys.stderr)
    show(*(mark + plain(line) for line in lines), stream=sys.stderr)


def _exit_code(error: BridgeError) -> int:
    if isinstance(error, ConfigError | UsageError):
        return USAGE
    return FAILED if isinstance(error, StateError | Incomplete) else UNEXPECTED


def _show_any_text() -> None:
    """Write what an encoding lacks as escapes; UTF-8 on Windows, whose code pages lack most characters."""
    encoding = "utf-8" if sys.platform == "win32" else None
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def build_parser(*wanted: str) -> argparse.ArgumentParser:
    """Return the parser of all commands, of which only the wanted ones have their arguments."""
    parser = Parser(prog="imds-bridge", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "--version", action="version", version=f"imds-bridge {__version__}", help="print the version"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the TOML file; also after the command")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (place, text) in COMMANDS.items():
        command = add_command(commands, name, text)
        if name in wanted:
            _complete(command, name, place)
    return parser


def _complete(command: argparse.ArgumentParser, name: str, place: str) -> None:
    try:
        pkgutil.resolve_name(place)(command)
    except ImportError as error:
        extra = {"lab": "lab", "demo": "lab", "console": "console"}.get(name)
        if extra is None:
            raise
        raise UsageError(f"{name}: {error}; pip install 'imds-bridge[{extra}]'") from error
