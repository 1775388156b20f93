"""Scenarios are checked when they are read, and played at their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.imds import ImdsLab
from bridge.lab.scenario import Scenario, Step, load_scenario, parse_scenario, play, scenario_names

LIMIT_SECONDS = 20
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


def read(steps: str, head: str = HEAD) -> Scenario:
    return parse_scenario(head + steps, file="story.toml")


def step(do: str, at_seconds: float = 20, **values: str) -> str:
    lines = [f"{name} = {value}" for name, value in values.items()]
    return "\n".join(["[[step]]", f"at_seconds = {at_seconds}", f'do = "{do}"', 'text = "x"', *lines, ""])


class Passing(threading.Event):
    """A stop that is never set: waiting for it moves the lab's clock instead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: 1_800_000_000.0 + self.now)
        for module in ("imds", "scenario", "timetable"):
            monkeypatch.setattr(f"bridge.lab.{module}.time", clock)

    def wait(self, timeout: float | None = None) -> bool:
        """Move the clock."""
        self.now += timeout or 0.0
        return False


def run(scenario: Scenario, lab: ImdsLab) -> list[Step]:
    reports: list[Step] = []
    assert play(scenario, lab, threading.Event(), reports.append)
    return reports


# --- reading ---


def test_the_scenarios_that_were_promised_are_there() -> None:
    assert scenario_names() == [
        "cancellation",
        "degraded-hardware",
        "host-failure",
        "live-migration",
        "spot-preempt",
        "terminate",
        "user-reboot",
    ]


def test_a_scenario_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(HEAD + SCHEDULE)
    scenario = load_scenario(str(path))
    assert (scenario.title, scenario.time_scale, scenario.vms) == ("A test", 100.0, ("web-0",))
    (only,) = scenario.steps
    assert (only.number, only.at_seconds, only.action, only.text) == (1, 10.0, "schedule", "A reboot comes")


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(LabError, match=r"nowhere.*live-migration"):
        load_scenario("nowhere")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("step = 5", "step given: 5; expected: a list"),
        ("", "step given: nothing"),
        ("step = []", "expected: at least one"),
        ("step = [5]", "step 1: given: 5; expected: a table"),
        ("colour = 1" + SCHEDULE, "given: colour; expected only: title"),
        ("[[", "not TOML"),
        (step("dance"), "step 1: do given: 'dance'; expected one of: schedule"),
        (step("reset", to='"x"'), "to given: 'x'; expected: a whole number"),
        (step("reset", to="true"), "to given: True"),
        (step("reset", at_seconds=-1), "at_seconds given: -1"),
        (step("reset", colour="1"), "given: colour; expected only: at_seconds, do, text, to"),
        (step("cancel"), "event given: nothing; expected: a text"),
        (step("cancel", event='"reboot"'), "event given: 'reboot'; expected one of: an event"),
        (
            SCHEDULE + step("start", event='"redeploy"'),
            "step 2: event given: 'redeploy'; expected one of: reboot",
        ),
        (SCHEDULE + step("start", at_seconds=5, event='"reboot"'), "expected: 10 or later"),
        (SCHEDULE + SCHEDULE, "'reboot' a second time"),
        (SCHEDULE.replace("Reboot", "Dance"), "event_type given: 'Dance'; expected one of: Freeze"),
        (SCHEDULE.replace("web-0", "web-9"), "resources given: ['web-9']; expected only: web-0"),
        (SCHEDULE.replace('["web-0"]', "[1]"), "expected: a list of names"),
        (SCHEDULE + "event_source = 'Moon'", "event_source given: 'Moon'"),
        (SCHEDULE + "notice_seconds = -5", "notice_seconds given: -5"),
        (SCHEDULE + "notice_seconds = nan", "notice_seconds given: nan"),
        (step("fault", kind='"wobble"'), "'wobble'; expected: an HTTP status"),
        (step("fault", kind="503", vm='"web-9"'), "vm given: 'web-9'"),
    ],
)
def test_a_wrong_scenario_is_refused_with_file_step_given_and_expected(steps: str, words: str) -> None:
    with pytest.raises(LabError) as caught:
        read(steps)
    assert str(caught.value).startswith("story.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ('time_scale = 1\nvms = ["a"]\n', "title given: nothing"),
        ('title = "x"\ntime_scale = 0\nvms = ["a"]\n', "time_scale given: 0"),
        ('title = "x"\ntime_scale = "fast"\nvms = ["a"]\n', "time_scale given: 'fast'"),
        ('title = "x"\nvms = []\n', "given: 0 vms"),
    ],
)
def test_a_wrong_head_is_refused(head: str, words: str) -> None:
    with pytest.raises(LabError) as caught:
        read(SCHEDULE, head)
    assert words in str(caught.value)


# --- playing ---


def test_steps_are_played_and_reported_in_order(lab: ImdsLab) -> None:
    story = SCHEDULE + step("update", event='"reboot"', fields='{ Description = "soon" }')
    assert [one.number for one in run(read(story), lab)] == [1, 2]
    assert [(event["EventType"], event["Description"]) for event in lab.events] == [("Reboot", "soon")]


@pytest.mark.parametrize(("do", "left"), [("start", ["Started"]), ("cancel", []), ("complete", [])])
def test_an_event_is_driven_by_its_name_in_the_story(lab: ImdsLab, do: str, left: list[str]) -> None:
    run(read(SCHEDULE + step(do, event='"reboot"')), lab)
    assert [event["EventStatus"] for event in lab.events] == left


def test_faults_and_resets_are_played(lab: ImdsLab) -> None:
    run(read(step("fault", kind="503", count="2") + step("reset", to="40")), lab)
    assert lab.incarnation == 40


def test_an_impossible_step_is_skipped_and_reported(lab: ImdsLab) -> None:
    story = (
        SCHEDULE + step("start", event='"reboot"') + step("cancel", event='"reboot"') + step("reset", to="9")
    )
    reports = run(read(story), lab)
    assert "skipped" in reports[2].text
    assert lab.incarnation == 9


def test_steps_keep_their_time(lab: ImdsLab) -> None:
    started = time.monotonic()
    run(read(step("reset", at_seconds=10) + step("reset", at_seconds=30)), lab)
    assert time.monotonic() - started >= 0.3  # 30 lab seconds at time_scale 100


def test_playing_ends_at_once_when_it_is_stopped(lab: ImdsLab) -> None:
    stop = threading.Event()
    stop.set()
    assert not play(read(SCHEDULE.replace("at_seconds = 10", "at_seconds = 1e9")), lab, stop)


@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_of_the_lab_plays_to_its_end_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scenario, passing, reports = load_scenario(name), Passing(monkeypatch), list[Step]()
    with ImdsLab(vms=scenario.vms, scale_set=scenario.scale_set, time_scale=scenario.time_scale) as lab:
        assert play(scenario, lab, passing, reports.append)
        assert not any("skipped" in one.text for one in reports)
        for _ in range(2):  # events that have not started start, and then complete
            passing.wait(86_400)
            left = lab.events
        assert left == []
