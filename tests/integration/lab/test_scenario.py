"""Scenarios are checked when they are read, and played at their time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.scenario import Scenario, load_scenario, play, scenario_names
from tests.support.imds_lab import ImdsLab

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


@pytest.fixture
def lab() -> Iterator[ImdsLab]:
    with ImdsLab(vms=["web-0"], time_scale=100) as started:
        yield started


def read(folder: Path, steps: str, head: str = HEAD) -> Scenario:
    path = folder / "story.toml"
    path.write_text(head + steps)
    return load_scenario(str(path))


def step(do: str, at_seconds: float = 20, **values: str) -> str:
    lines = [f"{name} = {value}" for name, value in values.items()]
    return "\n".join(["[[step]]", f"at_seconds = {at_seconds}", f'do = "{do}"', 'text = "x"', *lines, ""])


class Passing(threading.Event):
    """A stop that is never set: waiting for it moves the lab's clock instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = self.began = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1_800_000_000.0 + self.now)
        for module in ("imds", "scenario", "timetable"):
            monkeypatch.setattr(f"bridge.lab.{module}.time", clock)

    def wait(self, timeout: float | None = None) -> bool:
        """Move the clock."""
        self.now += timeout or 0.0
        return False


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Passing:
    return Passing(monkeypatch)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("", "step"),
        ("step = []", "at least 1 item"),
        ("colour = 1" + SCHEDULE, "colour"),
        ("[[", "story.toml"),
        (step("dance", event='"reboot"'), "dance"),
        (SCHEDULE + step("start", at_seconds=-1, event='"reboot"'), "at_seconds"),
        (SCHEDULE + step("start", event='"reboot"', colour="1"), "given: colour"),
        (SCHEDULE + "colour = 1", "colour"),
        (step("cancel"), "event"),
        (step("cancel", event='"reboot"'), "step 1: event given: 'reboot'"),
        (SCHEDULE + step("start", at_seconds=5, event='"reboot"'), "at_seconds given: 5; expected: 10"),
        (SCHEDULE + SCHEDULE, "step 2: event given: 'reboot'"),
        (SCHEDULE.replace("web-0", "web-9"), "resources among"),
    ],
)
def test_a_wrong_scenario_is_refused_with_file_and_reason(tmp_path: Path, steps: str, words: str) -> None:
    with pytest.raises(LabError) as caught:
        read(tmp_path, steps)
    assert str(caught.value).startswith("story.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        ('vms = ["a"]\n', "title"),
        ('title = "x"\ntime_scale = 0\nvms = ["a"]\n', "time_scale"),
        ('title = "x"\nvms = []\n', "vms"),
    ],
)
def test_a_wrong_head_is_refused(tmp_path: Path, head: str, word: str) -> None:
    with pytest.raises(LabError, match=word):
        read(tmp_path, SCHEDULE, head)


def test_steps_are_played_at_their_time_and_an_impossible_one_is_skipped(
    lab: ImdsLab, tmp_path: Path, passing: Passing
) -> None:
    story = SCHEDULE + step("update", at_seconds=15, event='"reboot"', fields='{ Description = "soon" }')
    story += step("start", event='"reboot"') + step("cancel", event='"reboot"')
    reports: list[tuple[float, str]] = []
    scenario = read(tmp_path, story)

    def report(text: str) -> None:
        reports.append((round(passing.now - passing.began, 3), text[:12]))

    assert play(scenario, lab, passing, report)
    assert reports == [
        (0.1, "A reboot com"),
        (0.15, "x"),
        (0.2, "x"),
        (0.2, "x (skipped: "),
    ]
    assert [(event["EventStatus"], event["Description"]) for event in lab.events] == [("Started", "soon")]


def test_an_event_that_could_not_be_scheduled_is_reported(
    lab: ImdsLab, tmp_path: Path, passing: Passing
) -> None:
    story = SCHEDULE + "notice_seconds = -5\n" + step("start", event='"reboot"')
    reports: list[str] = []
    assert play(read(tmp_path, story), lab, passing, reports.append)
    assert ["skipped" in one for one in reports] == [True, True]


def test_playing_ends_at_once_when_it_is_stopped(lab: ImdsLab, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert not play(read(tmp_path, SCHEDULE.replace("at_seconds = 10", "at_seconds = 1e9")), lab, stop)


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(LabError, match=r"nowhere.*live-migration.*user-reboot"):
        load_scenario("nowhere")


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
