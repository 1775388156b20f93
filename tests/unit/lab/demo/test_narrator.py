"""The narrator prints readable lines on any output."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from bridge.lab.demo import narrator
from bridge.lab.demo.narrator import Narrator

LONG = "a live migration of web-0 and web-1 is announced, and both VMs are affected by it for a few seconds"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_text_is_wrapped_to_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    narrate = Narrator(fast=True)
    narrate.line("CONSUMER", LONG)
    narrate.paragraphs(LONG)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    first, second, empty, *paragraph = lines
    assert f"{first[19:]} {second.strip()}" == LONG
    assert [empty, " ".join(paragraph)] == ["", LONG]


def test_a_file_gets_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    Narrator(fast=True).line("IMDS", "text")
    assert re.fullmatch(r" +0\.\d s  IMDS      text\n", capsys.readouterr().out)


def test_a_terminal_gets_colours_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    Narrator(fast=True).line("IMDS", "text")
    assert "\033[33mIMDS    \033[0m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    Narrator(fast=True).line("IMDS", "plain")
    assert "\033" not in terminal.getvalue().splitlines()[-1]


def test_text_from_outside_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Narrator(fast=True).line("CHAT", "a\033[2Jb")
    assert "a\\u001b[2Jb" in capsys.readouterr().out


def test_a_pause_lasts_until_what_was_printed_can_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", advance)
    narrate = Narrator(fast=False)
    narrate.paragraphs("x" * int(10 * narrator.READ_LETTERS_PER_SECOND))
    narrate.pause(lambda: None)
    assert now == pytest.approx(110, abs=0.1)
    narrate.pause(lambda: None)
    assert now == pytest.approx(110, abs=0.1)
    fast = Narrator(fast=True)
    fast.paragraphs(LONG)
    fast.pause(lambda: None)
    assert now == pytest.approx(110, abs=0.1)
