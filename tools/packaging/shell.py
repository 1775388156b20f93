"""Write the man page and the completion scripts from the parsers: a hook of every build of the wheel.

They go into a folder that git ignores and the wheel contains.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import shtab
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHARE = "bridge/cli/share"
_MAN = r"""
.TH IMDS\-BRIDGE 1 "" "imds\-bridge {version}" "User Commands"
.SH NAME
imds\-bridge \- publish an Azure VM's Scheduled Events as CloudEvents
.SH DESCRIPTION
{help}
.SH COMMANDS
{commands}
.SH ENVIRONMENT
.TP
.B IMDS_BRIDGE__SECTION__KEY
overrides a setting of the configuration; lists and tables are given as JSON
.TP
.B NO_COLOR
switches the colours of the demo off
.SH FILES
.TP
.B /etc/imds\-bridge/config.toml
the configuration, if no other is given
.TP
.B /var/lib/imds\-bridge
the default of state_dir: the outbox and the status of each process
"""


class ShellFiles(BuildHookInterface[Any]):
    """What hatchling calls."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        """Write the files before the wheel is put together."""
        sys.path.insert(0, self.root)
        write(Path(self.root, SHARE), self.metadata.version)


def write(folder: Path, version: str) -> None:
    """Write the files into a folder."""
    from bridge.cli.main import COMMANDS, build_parser  # noqa: PLC0415 - found once the hook has set the path

    parser = build_parser(*COMMANDS)
    for one in commands(parser):
        for action in one._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined] # as shtab documents it
    texts = {f"completion.{name}": shtab.complete(parser, name) for name in ("bash", "zsh")}
    texts["imds-bridge.1"] = man(parser, version)
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"{text.strip()}\n", encoding="utf-8", newline="\n")


def commands(parser: ArgumentParser) -> Iterator[ArgumentParser]:
    """Give a parser and those of its commands, at any depth."""
    yield parser
    for action in parser._actions:
        if isinstance(action, _SubParsersAction):
            for one in action.choices.values():
                yield from commands(one)


def man(parser: ArgumentParser, version: str) -> str:
    """Return the man page: the help of every command, and no date, so that builds are the same."""
    with patch.dict(os.environ, COLUMNS="75", PYTHON_COLORS="0"):  # with the indentation, 80 columns
        first, *others = ((one.prog, one.format_help()) for one in commands(parser))
    sections = (f".SS {_escape(prog)}\n{_as_it_is(text)}" for prog, text in others)
    return _MAN.format(version=_escape(version), help=_as_it_is(first[1]), commands="\n".join(sections))


def _as_it_is(text: str) -> str:
    return f".EX\n{_escape(text.strip())}\n.EE"


def _escape(text: str) -> str:
    lines = text.replace("\\", r"\e").replace("-", r"\-").splitlines()
    return "\n".join(rf"\&{line}" if line.startswith((".", "'")) else line for line in lines)
