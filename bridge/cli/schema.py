"""The commands `schema` and `completion`: print files that are shipped."""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.arguments import OK
from bridge.contract.schemas import NAMES, file_name, schema
from bridge.errors import UsageError
from bridge.runtime.text import show

_EPILOG = """\
Without NAME, lists the names. schemas/ holds the same files, with examples and instructions for consumers.

examples:
  imds-bridge schema
  imds-bridge schema scheduledevent.scheduled
  imds-bridge schema --write schemas
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `schema`."""
    command.epilog = _EPILOG
    command.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="cloudevent (every event), status (of status --json) or a type",
    )
    command.add_argument("--write", type=Path, metavar="DIR", help="write all of them to DIR, one file each")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.name and arguments.write:
        raise UsageError("schema: give NAME or --write, not both")
    if arguments.write:
        show(f"{_write(arguments.write)} schemas written to {arguments.write}")
    elif arguments.name:
        show(*schema(arguments.name).decode().rstrip("\n").split("\n"))
    else:
        show(*NAMES)
    return OK


def _write(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            (folder / file_name(name)).write_bytes(schema(name))
    except OSError as error:
        raise UsageError(f"schema: cannot write to {folder}: {error.strerror}") from error
    return len(NAMES)


_COMPLETION = """\
infra/systemd/install.sh installs the scripts of both shells for all users.

examples:
  imds-bridge completion bash > ~/.local/share/bash-completion/completions/imds-bridge
  source <(imds-bridge completion bash)             for this shell
  imds-bridge completion zsh > ~/.zfunc/_imds-bridge    a folder of fpath, before compinit
"""


def completion(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `completion`."""
    command.epilog = _COMPLETION
    command.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    command.set_defaults(run=_print_completion)


def _print_completion(arguments: argparse.Namespace) -> int:
    # The build has written it: tools/packaging/shell.py.
    file = Path(__file__).parent / "share" / f"completion.{arguments.shell}"
    show(*file.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    return OK
