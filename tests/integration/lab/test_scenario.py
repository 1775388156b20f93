"""Scenarios are checked when they are read, and played at their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from bridge.lab.httpd import LabError
from bridge.lab.scenario import Scenario, load_scenario, play, scenario_names
from tests.support.imds_lab import ImdsLab

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
    with TemporaryDirectory() as folder:
        path = Path(folder, "story.toml")
        path.write_text(head + steps)
        return load_scenario(str(path))


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


def run(scenario: Scenario, lab: ImdsLab) -> list[str]:
    reports: list[str] = []
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


def test_a_scenario_is_read_from_a_file() -> None:
    scenario = read(SCHEDULE)
    assert (scenario.title, scenario.time_scale, scenario.vms) == ("A test", 100.0, ["web-0"])
    (only,) = scenario.step
    assert (only.at_seconds, only.do, only.text) == (10.0, "schedule", "A reboot comes")


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(LabError, match=r"nowhere.*live-migration"):
        load_scenario("nowhere")


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("step = 5", "step"),
        ("", "step"),
        ("step = []", "at least 1 item"),
        ("colour = 1" + SCHEDULE, "colour"),
        ("[[", "story.toml"),
        (step("dance"), "dance"),
        (SCHEDULE + step("start", at_seconds=-1, event='"reboot"'), "at_seconds"),
        (SCHEDULE + step("start", event='"reboot"', colour="1"), "colour"),
        (step("cancel"), "event"),
        (step("cancel", event='"reboot"'), "step 1: event given: 'reboot'"),
        (
            SCHEDULE + step("start", at_seconds=5, event='"reboot"'),
            "step 2: at_seconds given: 5; expected: 10",
        ),
        (SCHEDULE + SCHEDULE, "a new event"),
        (SCHEDULE.replace("Reboot", "Dance"), "Freeze"),
        (SCHEDULE.replace("web-0", "web-9"), "resources among"),
        (SCHEDULE + "event_source = 'Moon'", "event_source"),
        (SCHEDULE + "notice_seconds = -5", "notice_seconds"),
        (SCHEDULE + "notice_seconds = nan", "notice_seconds"),
        (SCHEDULE + "completes = 1", "completes"),
        (step("fault", kind='"wobble"'), "'wobble'; expected: an HTTP status"),
    ],
)
def test_a_wrong_scenario_is_refused_with_file_and_reason(steps: str, words: str) -> None:
    with pytest.raises(LabError) as caught:
        read(steps)
    assert str(caught.value).startswith("story.toml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        ('time_scale = 1\nvms = ["a"]\n', "title"),
        ('title = "x"\ntime_scale = 0\nvms = ["a"]\n', "time_scale"),
        ('title = "x"\nvms = []\n', "vms"),
    ],
)
def test_a_wrong_head_is_refused(head: str, word: str) -> None:
    with pytest.raises(LabError, match=word):
        read(SCHEDULE, head)


# --- playing ---


def test_steps_are_played_and_reported_in_order(lab: ImdsLab) -> None:
    story = SCHEDULE + step("update", event='"reboot"', fields='{ Description = "soon" }')
    assert run(read(story), lab) == ["A reboot comes", "x"]
    assert [(event["EventType"], event["Description"]) for event in lab.events] == [("Reboot", "soon")]


@pytest.mark.parametrize(("do", "left"), [("start", ["Started"]), ("cancel", []), ("complete", [])])
def test_an_event_is_driven_by_its_name_in_the_story(lab: ImdsLab, do: str, left: list[str]) -> None:
    run(read(SCHEDULE + step(do, event='"reboot"')), lab)
    assert [event["EventStatus"] for event in lab.events] == left


def test_faults_are_played(lab: ImdsLab) -> None:
    run(read(step("fault", kind="503", count="2", vm='"web-0"')), lab)
    with pytest.raises(HTTPError, match="503"):
        urlopen(f"{lab.url('web-0')}/metadata/instance", timeout=LIMIT_SECONDS)  # noqa: S310 - of this machine


def test_an_impossible_step_is_skipped_and_reported(lab: ImdsLab) -> None:
    story = SCHEDULE + step("start", event='"reboot"') + step("cancel", event='"reboot"')
    reports = run(read(story + step("complete", event='"reboot"')), lab)
    assert ["skipped" in one for one in reports] == [False, False, True, False]
    assert lab.events == []


def test_steps_keep_their_time(lab: ImdsLab) -> None:
    started = time.monotonic()
    run(read(SCHEDULE + step("start", at_seconds=30, event='"reboot"')), lab)
    assert time.monotonic() - started >= 0.3  # 30 lab seconds at time_scale 100


def test_playing_ends_at_once_when_it_is_stopped(lab: ImdsLab) -> None:
    stop = threading.Event()
    stop.set()
    assert not play(read(SCHEDULE.replace("at_seconds = 10", "at_seconds = 1e9")), lab, stop)


@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_of_the_lab_plays_to_its_end_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    scenario, passing, reports = load_scenario(name), Passing(monkeypatch), list[str]()
    with ImdsLab(vms=scenario.vms, scale_set=scenario.scale_set, time_scale=scenario.time_scale) as lab:
        assert play(scenario, lab, passing, reports.append)
        assert not any("skipped" in one for one in reports)
        for _ in range(2):  # events that have not started start, and then complete
            passing.wait(86_400)
            left = lab.events
        assert left == []
