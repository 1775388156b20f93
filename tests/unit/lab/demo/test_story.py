"""What the demo says: its chapters, its events, the words of its left column, and how long it takes to read."""

from __future__ import annotations

from collections import Counter

import pytest

from bridge.cli.main import parse
from bridge.lab.demo.narrator import COLOURS, READ_LETTERS_PER_SECOND, WORD_WIDTH
from bridge.lab.demo.stage import find_faults
from bridge.lab.demo.story import INTRODUCTION, NEXT, chapters, expected_events, legend

WITH_BUS = [
    "An announcement reaches everyone",
    "A receiver dies, the process is killed, nothing is lost",
    "An approval over the bus; a forged one is refused",
    "How the event ended",
]


def test_the_chapters_have_their_order_and_the_one_of_the_bus_can_be_left_out() -> None:
    assert [chapter.title for chapter in chapters(with_bus=True)] == WITH_BUS
    assert [chapter.title for chapter in chapters(with_bus=False)] == [*WITH_BUS[:2], WITH_BUS[3]]


def test_the_story_causes_the_same_events_in_every_run() -> None:
    common = {
        "document.changed": 6,
        "imds.unreachable": 1,
        "imds.recovered": 1,
        "scheduledevent.scheduled": 2,
        "scheduledevent.started": 1,
        "scheduledevent.completed": 1,
        "scheduledevent.ended": 1,
    }
    bus = {"approval.accepted": 1, "approval.rejected": 1}
    assert expected_events(with_bus=True) == Counter(common | bus | {"bridge.heartbeat": 5})
    assert expected_events(with_bus=False) == Counter(common | {"bridge.heartbeat": 3})


def test_every_word_of_the_legend_has_a_colour_and_fits_the_column() -> None:
    assert list(legend(with_bus=True)) == list(COLOURS)
    assert max(map(len, COLOURS)) == WORD_WIDTH
    assert set(legend(with_bus=False)) == set(COLOURS) - {"COMMAND"}


def test_the_text_can_be_read_within_a_minute() -> None:
    steps = [step for chapter in chapters(with_bus=True) for step in chapter.steps]
    letters = len(INTRODUCTION) + sum(len(step.text) for step in steps)
    assert 30 < letters / READ_LETTERS_PER_SECOND < 60


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
