"""The man page and the completion of bash and zsh."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bridge.cli.main import COMMANDS, build_parser
from infra.packaging import shell
from tests.support.process import run
from tests.support.programs import tool

BASH = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_imds_bridge
printf '%s\\n' "${COMPREPLY[@]}"
"""
ZSH = """
_describe() { print -l -- "${(@)${(P)2}%%:*}" }
_files() { print FILES }
words=("${@:2}") CURRENT=$(($# - 1))
source "$1"
"""
CASES = [
    ("", [*COMMANDS, "--help", "--version", "--config"]),
    ("forward ", ["--help", "--config", "--once"]),
    ("outbox drop --all ", ["--help", "--config", "--role", "--all", "--sink", "--waiting", "--yes"]),
    ("status --role ", ["forward", "listen", "relay", "console"]),
    ("lab schedule --status ", ["Scheduled", "Started"]),
    ("completion ", ["bash", "zsh", "--help"]),
]


def completed(program: str, script: str, file: str, line: str) -> list[str]:
    """Return what the shell offers for a line with the cursor at its end."""
    words = ["imds-bridge", *line.split(" ")]
    command: list[str | Path] = [tool(program), "-c", script, program, shell.SHARE / file, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("name", shell.files())
def test_the_files_are_as_the_parsers_are(name: str) -> None:
    expected = shell.files()[name]
    assert (shell.SHARE / name).read_text() == expected, "run: python -m infra.packaging.shell"


@pytest.mark.parametrize(("line", "words"), CASES)
def test_bash_completes_commands_options_and_choices(line: str, words: list[str]) -> None:
    assert completed("bash", BASH, "completion.bash", line) == words


@pytest.mark.parametrize(("line", "words"), CASES)
def test_zsh_completes_commands_options_and_choices(line: str, words: list[str]) -> None:
    assert completed("zsh", ZSH, "completion.zsh", line) == words


def test_what_begins_a_word_limits_what_bash_offers_and_files_are_left_to_the_shell() -> None:
    file = "completion.bash"
    assert completed("bash", BASH, file, "outbox re") == ["retry"]
    assert completed("bash", BASH, file, "check --config ") == []
    assert completed("zsh", ZSH, "completion.zsh", "check --config ") == ["FILES"]


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_the_command_prints_the_script(name: str) -> None:
    assert run("completion", name).stdout == (shell.SHARE / f"completion.{name}").read_text()


@pytest.mark.parametrize(
    "command", [["mandoc", "-Tlint"], ["groff", "-man", "-ww", "-Tutf8", "-z"]], ids=["mandoc", "groff"]
)
def test_the_man_page_is_rendered_without_warnings(command: list[str]) -> None:
    done = subprocess.run(
        [tool(command[0]), *command[1:], shell.SHARE / "imds-bridge.1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout + done.stderr == ""


def test_the_man_page_describes_every_command() -> None:
    page = shell.files()["imds-bridge.1"].replace("\\", "")
    for command in shell.commands(build_parser(*COMMANDS)):
        assert not command.words or f".SS {command.path.strip()}\n" in page
