"""Scenarios are checked when they are read, and played at their time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.scenario import Scenario, load_scenario, play, scenario_names
from tests.support.imds_lab import ImdsLab

if TYPE_CHECKING:
    from tests.integration.lab.conftest import Passing

HEAD = 'title = "A test"\ntime_scale = 100\nvms = ["web-0"]\n'
SCHEDULE = """
[[step]]
at_seconds = 10
do = "schedule"
text = "A reboot comes"
event = "reboot"
event_type = "Reboot"
resources = ["web-0"]
"""


def read(folder: Path, content: str) -> Scenario:
    path = folder / "story.toml"
    path.write_text(content)
    return load_scenario(str(path))


def step(do: str, at_seconds: float = 20, **values: str) -> str:
    lines = [f"{name} = {value}" for name, value in ({"event": '"reboot"'} | values).items()]
    return "\n".join(["[[step]]", f"at_seconds = {at_seconds}", f'do = "{do}"', 'text = "x"', *lines, ""])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (HEAD, "step"),
        (HEAD + "step = []", "at least 1 item"),
        (HEAD + "colour = 1" + SCHEDULE, "colour"),
        (HEAD + "[[", "story.toml"),
        (HEAD + step("dance"), "dance"),
        (HEAD + step("start", at_seconds=-1), "at_seconds"),
        (HEAD + step("start", colour="1"), "given: colour"),
        (HEAD + SCHEDULE + "colour = 1", "colour"),
        ('vms = ["a"]\n' + SCHEDULE, "title"),
        (HEAD.replace("100", "0") + SCHEDULE, "time_scale"),
        (HEAD.replace('["web-0"]', "[]") + SCHEDULE, "vms"),
    ],
)
def test_a_wrong_scenario_is_refused_with_file_and_reason(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(LabError) as caught:
        read(tmp_path, content)
    assert str(caught.value).startswith("story.toml")
    assert words in str(caught.value)


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(LabError, match=r"nowhere.*live-migration.*user-reboot"):
        load_scenario("nowhere")


def test_steps_are_played_at_their_time_and_impossible_ones_are_skipped(
    tmp_path: Path, passing: Passing
) -> None:
    steps = (
        step("start"),
        step("update", at_seconds=15, fields='{ Description = "soon" }'),
        SCHEDULE,
        step("cancel"),
        step("cancel", event='"another"'),
    )
    reports: list[tuple[float, str]] = []
    scenario = read(tmp_path, HEAD + "".join(steps))

    def report(text: str) -> None:
        reports.append((round(passing.now - passing.began, 3), text[:12]))

    with ImdsLab(vms=["web-0"], time_scale=100) as lab:
        assert play(scenario, lab, passing, report)
        shown = [(event["EventStatus"], event["Description"]) for event in lab.events]
    assert reports == [
        (0.1, "A reboot com"),
        (0.15, "x"),
        (0.2, "x"),
        (0.2, "x (skipped: "),
        (0.2, "x (skipped: "),
    ]
    assert shown == [("Started", "soon")]


def test_playing_ends_at_once_when_it_is_stopped(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    with ImdsLab(vms=["web-0"]) as lab:
        assert not play(read(tmp_path, HEAD + step("start", at_seconds=1e9)), lab, stop)


@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_of_the_lab_plays_to_its_end_and_leaves_nothing(passing: Passing, name: str) -> None:
    scenario, reports = load_scenario(name), list[str]()
    with ImdsLab(vms=scenario.vms, scale_set=scenario.scale_set, time_scale=scenario.time_scale) as lab:
        assert play(scenario, lab, passing, reports.append)
        assert not any("skipped" in one for one in reports)
        for _ in range(2):  # events that have not started start, and then complete
            passing.wait(86_400)
            left = lab.events
        assert left == []
