"""The narrator prints readable lines on any output."""

from __future__ import annotations

import io
import re
import sys

import pytest

from bridge.lab.narrator import Narrator

LONG = "a live migration of web-0 and web-1 is announced, and both VMs are affected by it for a few seconds"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_text_is_wrapped_to_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    Narrator()("STORY", LONG)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 80
    assert " ".join(line[20:] for line in lines) == LONG


def test_a_file_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    Narrator()("STORY", "text")
    assert re.fullmatch(r" +0\.\d s  STORY      text\n", capsys.readouterr().out)


def test_a_terminal_gets_colours_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    Narrator()("STORY", "text")
    assert "\033[1mSTORY     \033[0m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    Narrator()("STORY", "plain")
    assert "\033" not in terminal.getvalue().splitlines()[-1]
