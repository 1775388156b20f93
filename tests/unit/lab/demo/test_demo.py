"""What the demo says, how it prints it, and what it needs; tests/process/test_demo.py plays it."""

from __future__ import annotations

import io
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from bridge.cli.main import parse
from bridge.errors import UsageError
from bridge.lab import demo, prerequisites
from bridge.lab.demo.narrator import READ_LETTERS_PER_SECOND, Narrator
from bridge.lab.demo.stage import Stage, find_faults
from bridge.lab.demo.story import INTRODUCTION, NEXT, play


class Script:
    """A stage that only notes what is said."""

    def __init__(self) -> None:
        self.said = INTRODUCTION

    def say(self, text: str) -> None:
        self.said += text

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def test_the_text_can_be_read_within_a_minute() -> None:
    script = Script()
    play(cast(Stage, script), with_bus=True)
    assert 30 < len(script.said) / READ_LETTERS_PER_SECOND < 60


def test_the_commands_to_type_next_exist() -> None:
    assert all(callable(parse(arguments.split()).run) for arguments, _ in NEXT)


def test_what_is_missing_too_much_or_lost_is_named() -> None:
    published = {"1": "imds.recovered", "2": "imds.recovered"}
    assert find_faults(Counter(published.values()), published, {"the audit log": ["2", "1"]}) == []
    expected = Counter({"imds.recovered": 1, "imds.unreachable": 1})
    assert find_faults(expected, published, {"the audit log": ["1"]}) == [
        "imds.unreachable: 1 missing",
        "imds.recovered: 1 too many",
        "1 of 2 events lost on the way to the audit log",
    ]


# --- printing ---


def test_a_terminal_gets_bold_words_unless_they_are_switched_off_and_nothing_from_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for shown in ("\033[1mIMDS    \033[0m", "IMDS    "):
        Narrator(fast=True).line("IMDS", "a\033[2Jb")
        assert terminal.getvalue().splitlines()[-1].endswith(f" s  {shown}  a\\u001b[2Jb")
        monkeypatch.setenv("NO_COLOR", "1")


def test_a_pause_lasts_until_what_was_printed_can_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", advance)
    narrate, fast = Narrator(fast=False), Narrator(fast=True)
    narrate.paragraphs("x" * int(10 * READ_LETTERS_PER_SECOND))
    fast.paragraphs(INTRODUCTION)
    for one in (fast, narrate, narrate):
        one.pause(lambda: None)
    assert now == pytest.approx(110, abs=0.1)


# --- what has to be installed ---


def test_what_is_missing_to_build_the_bus_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "proton", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert prerequisites.missing() == ["gcc", "python3-dev"]
    assert "apt-get install gcc python3-dev" in prerequisites.explain(prerequisites.missing())
    with pytest.raises(UsageError, match=r"needs: gcc .*pip install 'imds-bridge\[lab\]'; .*demo --no-bus"):
        demo.run(parse(["demo"]))
