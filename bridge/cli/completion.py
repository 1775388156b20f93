"""The command `completion`: print the script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
from pathlib import Path

from bridge.cli.exit_codes import OK
from bridge.runtime.text import show

_EPILOG = """\
infra/systemd/install.sh installs the scripts of both shells for all users.

examples:
  imds-bridge completion bash > ~/.local/share/bash-completion/completions/imds-bridge
  source <(imds-bridge completion bash)             for this shell
  imds-bridge completion zsh > ~/.zfunc/_imds-bridge    a folder of fpath, before compinit
"""


def configure(command: argparse.ArgumentParser) -> None:
    """Complete the parser of `completion`."""
    command.epilog = _EPILOG
    command.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # infra/packaging/shell.py has written it.
    file = Path(__file__).parent / "share" / f"completion.{arguments.shell}"
    show(*file.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    return OK
