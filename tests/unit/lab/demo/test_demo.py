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
from bridge.lab.demo.console import DAY, HISTORY_SECONDS, HOUR, OPENING, SILENT, SimulatedFleet, show_console
from bridge.lab.demo.narrator import READ_LETTERS_PER_SECOND, Narrator
from bridge.lab.demo.stage import Stage, find_faults
from bridge.lab.demo.story import INTRODUCTION, NEXT, play
from tests.support.diff import envelope_of, faults_of


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
    held_up = {"1": "imds.unreachable", "2": "imds.recovered"}
    assert find_faults(Counter(), held_up, {"the audit log": ["2", "1"]}) == []
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


# The simulated fleet of `imds-bridge demo --console`: what its forwarders publish

START = 1_800_000_000.0


def test_sixty_vms_publish_valid_events_of_every_kind_and_one_is_silent() -> None:
    fleet = SimulatedFleet(START)
    past = [envelope_of(body) for body in fleet.advance(START)]
    play = [envelope_of(body) for body in fleet.advance(START + 4 * HOUR)]
    assert len({event["data"]["Vm"]["VmId"] for event in past}) == 60
    assert len({event["source"] for event in past if "EventId" in event["data"]}) >= 3
    assert [fault for event in (past + play)[::50] for fault in faults_of(event)] == []
    kinds = Counter(event["type"].split(".", 2)[2] for event in past + play)
    assert {"scheduledevent.canceled.v1", "approval.accepted.v1", "approval.rejected.v1"} <= set(kinds)
    assert kinds["scheduledevent.completed.v1"] > kinds["imds.unreachable.v1"] == 1
    announced = [event["data"]["Resources"] for event in past if event["type"].endswith("scheduled.v1")]
    assert [names for _, names, _, _ in OPENING if [*names] not in announced] == []
    beats = Counter(event["subject"] for event in play if event["type"].endswith("heartbeat.v1"))
    assert SILENT[0] not in beats
    assert beats["web-0"] == 4


def test_the_same_seed_gives_the_same_play() -> None:
    until = START - HISTORY_SECONDS + 2 * DAY
    plays = [SimulatedFleet(START, seed=seed).advance(until) for seed in (7, 7, 8)]
    assert plays[0] == plays[1] != plays[2]


@pytest.mark.parametrize("listen", ["0.0.0.0:8080", "nonsense", "127.0.0.1"])
def test_the_console_of_the_demo_listens_on_loopback_addresses_only(listen: str) -> None:
    with pytest.raises(UsageError, match="expected a loopback address"):
        show_console(listen=listen, minutes=1)
