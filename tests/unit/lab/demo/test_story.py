"""What the demo says: its chapters, its events, the words of its left column, and how long it takes to read."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from bridge.cli.main import parse
from bridge.lab.demo.narrator import COLOURS, READ_LETTERS_PER_SECOND, WORD_WIDTH
from bridge.lab.demo.stage import Stage, find_faults
from bridge.lab.demo.story import INTRODUCTION, LEGEND, LEGEND_WITHOUT_BUS, NEXT, play


class Script:
    """A stage that only notes what is said."""

    def __init__(self) -> None:
        self.said = INTRODUCTION

    def say(self, text: str) -> None:
        self.said += text

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def test_every_word_of_the_legend_has_a_colour_and_fits_the_column() -> None:
    assert list(LEGEND) == list(COLOURS)
    assert max(map(len, COLOURS)) == WORD_WIDTH
    assert set(LEGEND_WITHOUT_BUS) == set(COLOURS) - {"COMMAND"}


def test_the_text_can_be_read_within_a_minute() -> None:
    script = Script()
    play(cast(Stage, script), with_bus=True)
    assert 30 < len(script.said) / READ_LETTERS_PER_SECOND < 60


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in NEXT])
def test_the_commands_to_type_next_exist(arguments: str) -> None:
    assert callable(parse(arguments.split()).run)


def test_nothing_is_wrong_if_every_listener_has_every_event_that_the_story_causes() -> None:
    published = {"1": "imds.recovered", "2": "imds.unreachable"}
    arrived = {"the audit log": ["1", "2"], "Event Grid": ["2", "1"]}
    assert find_faults(Counter(published.values()), published, arrived) == []


def test_what_is_missing_too_much_or_lost_is_named() -> None:
    published = {"1": "imds.recovered", "2": "imds.recovered"}
    expected = Counter({"imds.recovered": 1, "imds.unreachable": 1})
    assert find_faults(expected, published, {"the audit log": ["1"]}) == [
        "imds.unreachable: 1 missing",
        "imds.recovered: 1 too many",
        "1 of 2 events lost on the way to the audit log",
    ]
