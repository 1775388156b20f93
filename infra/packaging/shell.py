"""Write the man page and the completion scripts from the parsers: `python -m infra.packaging.shell`.

The only module that reads argparse's private lists of actions.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.cli.main import COMMANDS, build_parser

SHARE = Path(__file__).resolve().parents[2] / "bridge/cli/share"
DATE = "2026-11-22"
MAN_WIDTH = 66  # escapes make lines longer, which have at most 80 bytes
_ENVIRONMENT = {
    "IMDS_BRIDGE__SECTION__KEY": "overrides a setting of the configuration; lists and tables are given as JSON",
    "NO_COLOR": "switches the colours of the demo off",
}
_FILES = {
    "/etc/imds-bridge/config.toml": "the configuration, if no other is given",
    "/var/lib/imds-bridge": "the default of state_dir: the outbox and the status of each process",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option; `value` is the name of its value, "" if it has none."""

    name: str
    value: str
    choices: tuple[str, ...]
    help: str
    is_required: bool


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command as it is typed: `words` follow imds-bridge.

    `arguments` are the placeholders after it, `next_words` the known words that may come next, both with their help.
    """

    words: tuple[str, ...]
    parser: argparse.ArgumentParser
    options: tuple[Option, ...]
    arguments: dict[str, str]
    next_words: dict[str, str]

    @property
    def path(self) -> str:
        """The words, each after a space."""
        return "".join(f" {word}" for word in self.words)


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Command]:
    """Return a command and everything below it."""
    options, arguments, next_words = [], {}, {}
    parsers: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers = action.choices
            next_words = {str(one.dest): str(one.help) for one in action._choices_actions}
        elif action.option_strings:
            options.append(_option(parser, action))
        else:
            text = _help(parser, action)
            arguments[_placeholder(action)] = text
            next_words.update(dict.fromkeys(action.choices or (), text))
    yield Command(
        words=words,
        parser=parser,
        options=tuple(options),
        arguments=arguments or dict.fromkeys(["COMMAND ..."] if parsers else [], "one of those below"),
        next_words=next_words,
    )
    for name in next_words:
        if name in parsers:
            yield from commands(parsers[name], (*words, name))


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> Option:
    choices = tuple(map(str, action.choices or ()))
    has_value = action.nargs != 0
    return Option(
        name=action.option_strings[-1],
        value=str(action.metavar or "|".join(choices)) if has_value else "",
        choices=choices,
        help=_help(parser, action),
        is_required=action.required,
    )


def _placeholder(action: argparse.Action) -> str:
    name = str(action.metavar or "|".join(action.choices or ()))
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog}


# Completion


def bash(all_commands: Sequence[Command]) -> str:
    """Return the script for bash."""
    return f"""\
# Completion of imds-bridge for bash
_imds_bridge() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} command="" words="" word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$command $word" in
            {_paths(all_commands)}) command="$command $word" ;;
        esac
    done
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{_indented(f'{keys}) words="{" ".join(choices)}" ;;' for choices, keys in _choices(all_commands))}
        {_free_values(all_commands)}) return ;;
        *) case $command in
{_indented((f'"{one.path}") words="{" ".join(_words(one))}" ;;' for one in all_commands), 12)}
        esac ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _imds_bridge imds-bridge
"""


def zsh(all_commands: Sequence[Command]) -> str:
    """Return the script for zsh, which shows the help of each word."""
    return f"""\
#compdef imds-bridge
# Completion of imds-bridge for zsh
local command="" word
local -a list
for word in ${{words[2,CURRENT-1]}}; do
    case "$command $word" in
        ({_paths(all_commands)}) command="$command $word" ;;
    esac
done
case "$command ${{words[CURRENT-1]}}" in
{_indented((f"({keys}) list=({' '.join(choices)}) ;;" for choices, keys in _choices(all_commands)), 4)}
    ({_free_values(all_commands)}) _files; return ;;
    (*) case $command in
{_indented((f'("{one.path}") list=({" ".join(_described(one))}) ;;' for one in all_commands), 8)}
    esac ;;
esac
_describe imds-bridge list || _files
"""


def _words(command: Command) -> dict[str, str]:
    """Return the words that may follow a command, with their help."""
    return {**command.next_words, **{one.name: one.help for one in command.options}}


def _described(command: Command) -> Iterator[str]:
    for word, text in _words(command).items():
        escaped = text.replace("'", "'\\''")
        yield f"'{word}:{escaped}'"


def _paths(all_commands: Sequence[Command]) -> str:
    return "|".join(f'"{one.path}"' for one in all_commands if one.words)


def _choices(all_commands: Sequence[Command]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Return each list of choices, and the options that take it."""
    every = [
        (option.choices, f'"{one.path} {option.name}"') for one in all_commands for option in one.options
    ]
    for choices in dict.fromkeys(choices for choices, _ in every if choices):
        yield choices, "|".join(key for other, key in every if other == choices)


def _free_values(all_commands: Sequence[Command]) -> str:
    """Return the options whose value may be a file."""
    return "|".join(
        f'"{one.path} {option.name}"'
        for one in all_commands
        for option in one.options
        if option.value and not option.choices
    )


def _indented(lines: Iterator[str], columns: int = 8) -> str:
    return "\n".join(" " * columns + line for line in lines)


# The man page


def man(all_commands: Sequence[Command]) -> str:
    """Return the man page."""
    top, *others = all_commands
    description, _, exit_status = str(top.parser.description).partition("exit codes:\n")
    lines = [
        f'.TH IMDS\\-BRIDGE 1 "{DATE}" "imds\\-bridge" "User Commands"',
        ".SH NAME",
        r"imds\-bridge \- publish an Azure VM's Scheduled Events as CloudEvents",
        ".SH SYNOPSIS",
        *_usage(top),
        ".SH DESCRIPTION",
        *_text(description),
        *_list(top),
        ".SH COMMANDS",
    ]
    for one in others:
        lines += [
            f".SS {_escape(one.path.strip())}",
            *_usage(one),
            ".PP",
            *_text(str(one.parser.description)),
        ]
        lines += [*_list(one), *_text(str(one.parser.epilog or ""), ".PP")]
    lines += [".SH EXIT STATUS"]
    lines += _items(dict(re.findall(r"(\d) +(.*)", exit_status)))
    lines += [".SH ENVIRONMENT", *_items(_ENVIRONMENT), ".SH FILES", *_items(_FILES)]
    lines += [".SH EXAMPLES", *_text(str(top.parser.epilog))]
    return "\n".join(lines) + "\n"


def _usage(command: Command) -> Iterator[str]:
    options = [one for one in command.options if one.name != "--help"]
    words = [f"{one.name} {one.value}".strip() for one in options if one.is_required]
    words += [f"[{f'{one.name} {one.value}'.strip()}]" for one in options if not one.is_required]
    words += command.arguments
    yield f".B imds\\-bridge{_escape(command.path)}"
    yield from map(_escape, textwrap.wrap(" ".join(words), MAN_WIDTH, break_on_hyphens=False))


def _list(command: Command) -> Iterator[str]:
    options = {f"{one.name} {one.value}".strip(): one.help for one in command.options if one.name != "--help"}
    return _items({**command.arguments, **options})


def _items(items: dict[str, str]) -> Iterator[str]:
    for term, text in items.items():
        yield from (".TP", f".B {_escape(term)}", *_text(text))


def _text(text: str, before: str = "") -> Iterator[str]:
    """Write paragraphs; of those that a colon introduces, lines stay as they are."""
    for number, paragraph in enumerate(filter(None, text.strip().split("\n\n"))):
        if number or before:
            yield ".PP"
        first, *rest = paragraph.split("\n")
        if first.endswith(":") and rest:
            yield from (_escape(first), ".PP", ".EX", *map(_escape, rest), ".EE")
        else:
            yield from map(_escape, textwrap.wrap(paragraph, MAN_WIDTH, break_on_hyphens=False))


def _escape(text: str) -> str:
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def files() -> dict[str, str]:
    """Return the files, by name."""
    all_commands = list(commands(build_parser(*COMMANDS)))
    return {
        "completion.bash": bash(all_commands),
        "imds-bridge.1": man(all_commands),
        "completion.zsh": zsh(all_commands),
    }


if __name__ == "__main__":
    for name, content in files().items():
        (SHARE / name).write_text(content, encoding="utf-8", newline="\n")
