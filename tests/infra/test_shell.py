"""The man page and the completion of bash and zsh, which the build makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.cli.main import COMMANDS, build_parser
from tests.support.paths import ROOT
from tests.support.process import completed, run
from tests.support.programs import tool
from tools.packaging import shell

BASH = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_shtab_imds_bridge imds-bridge "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share")
    shell.write(folder, "1.2.3")
    return folder


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", [*COMMANDS]),
        ("forward -", ["-h", "--help", "--config", "--once"]),
        ("outbox re", ["retry"]),
        ("--config x.toml status --role ", ["forward", "listen", "relay", "console"]),
        ("lab schedule --status ", ["Scheduled", "Started", "Advisory"]),
        ("check --config LIC", ["LICENSE"]),
    ],
)
def test_bash_completes_commands_options_choices_and_files(share: Path, line: str, words: list[str]) -> None:
    script = [tool("bash"), "-c", BASH, "bash", str(share / "completion.bash")]
    done = completed(*script, "imds-bridge", *line.split(" "), cwd=ROOT)
    assert (done.stdout.split(), done.stderr) == (words, "")


def test_zsh_can_read_its_script_which_has_every_command(share: Path) -> None:
    assert completed(tool("zsh"), "-n", share / "completion.zsh").returncode == 0
    text = (share / "completion.zsh").read_text()
    assert text.startswith("#compdef imds-bridge\n")
    assert [name for name in COMMANDS if f"\n    {name}:'" not in text] == []


@pytest.mark.parametrize("name", ["bash", "zsh"])
def test_the_command_prints_the_script_of_the_build(name: str) -> None:
    assert run("completion", name).stdout == (ROOT / shell.SHARE / f"completion.{name}").read_text()


def test_the_man_page_describes_every_command_and_is_rendered_without_warnings(share: Path) -> None:
    page = share / "imds-bridge.1"
    done = completed(tool("mandoc"), "-Tlint", "-Wwarning", page)
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []
    text = page.read_text().replace("\\", "")
    lines = {line.strip() for line in text.splitlines()} | {""}
    for one in shell.commands(build_parser(*COMMANDS)):
        assert f"usage: {one.prog} " in text
        assert {line.strip() for line in (one.epilog or "").splitlines()} <= lines
