"""Read scenarios from TOML and play them on a simulated IMDS."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bridge.lab.faults import Fault
from bridge.lab.httpd import LabError
from bridge.lab.imds import ImdsLab

SCENARIO_DIR = Path(__file__).parent / "scenarios"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Step(_Strict):
    at_seconds: Seconds  # lab seconds after the scenario's start
    text: str  # printed when the step runs
    event: str = ""

    def arguments(self) -> dict[str, Any]:
        """Return what the step gives to the lab."""
        return self.model_dump(exclude={"at_seconds", "text", "event", "do"}, exclude_unset=True)


class ScheduleStep(_Step):
    """Add an event, under a name of the scenario's own."""

    do: Literal["schedule"]
    event: str
    event_type: Literal["Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"]
    resources: list[str]
    notice_seconds: Seconds = 0
    event_source: Literal["Platform", "User"] = "Platform"
    duration_seconds: int = -1
    description: str = ""
    event_status: Literal["Scheduled", "Started"] = "Scheduled"
    completes: bool = False
    impact_seconds: Seconds = 0


class EventStep(_Step):
    """Start, cancel or complete an event."""

    do: Literal["start", "cancel", "complete"]
    event: str


class UpdateStep(_Step):
    """Change fields of an event."""

    do: Literal["update"]
    event: str
    fields: dict[str, Any]


class FaultStep(_Step):
    """Answer the next requests wrongly."""

    do: Literal["fault"]
    kind: str | int
    vm: str | None = None
    count: int = 1
    seconds: Seconds = 0
    retry_after: str | int = ""
    method: str = "GET"

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str | int) -> str | int:
        Fault.of(kind)
        return kind


Step = Annotated[ScheduleStep | EventStep | UpdateStep | FaultStep, Field(discriminator="do")]


class Scenario(_Strict):
    """A scenario to play, its steps in order of time."""

    title: str
    time_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # lab seconds per real second
    vms: Annotated[list[str], Field(min_length=1)]
    scale_set: str = "web"
    step: Annotated[list[Step], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_story(self) -> Self:
        """Refuse steps that go back in time, and steps about what is not there."""
        known: list[str] = []
        now = 0.0
        for number, step in enumerate(self.step, start=1):
            if step.at_seconds < now:
                raise ValueError(
                    f"step {number}: at_seconds given: {step.at_seconds:g}; expected: {now:g} or later"
                )
            now = step.at_seconds
            if isinstance(step, ScheduleStep):
                if step.event in known or not {*step.resources} <= {*self.vms}:
                    raise ValueError(f"step {number}: expected: a new event, and resources among {self.vms}")
                known.append(step.event)
            elif step.event and step.event not in known:
                raise ValueError(f"step {number}: event given: {step.event!r}; expected one of: {known}")
        return self


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the lab."""
    return sorted(path.stem for path in SCENARIO_DIR.glob("*.toml"))


def load_scenario(name_or_file: str) -> Scenario:
    """Return a built-in scenario by its name, or a scenario from a file; raise LabError for an invalid one."""
    known = SCENARIO_DIR / f"{name_or_file}.toml"
    path = known if name_or_file in scenario_names() else Path(name_or_file)
    try:
        return Scenario.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a file, or one of: {', '.join(scenario_names())}"
        raise LabError(f"scenario given: {name_or_file!r} ({error}); expected: {expected}") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise LabError(f"{path.name}: {error}") from error


def play(
    scenario: Scenario, lab: ImdsLab, stop: threading.Event, report: Callable[[str], None] = lambda _: None
) -> bool:
    """Play the steps at their times on the lab's clock, until the last one or `stop`.

    A step that is no longer possible, such as canceling an event that an approval has started, is skipped.

    Args:
        scenario: what to play.
        lab: where to play it.
        stop: ends it when set.
        report: called with a sentence after each step.

    Returns: whether all steps were played.
    """
    started = time.monotonic()
    event_ids: dict[str, str] = {}
    for step in scenario.step:
        wait_seconds = started + step.at_seconds / lab.time_scale - time.monotonic()
        if stop.wait(max(0.0, wait_seconds)):
            return False
        try:
            _do(step, lab, event_ids)
        except LabError as error:
            report(f"{step.text} (skipped: {error})")
        else:
            report(step.text)
    return True


def _do(step: Step, lab: ImdsLab, event_ids: dict[str, str]) -> None:
    match step:
        case ScheduleStep():
            event_ids[step.event] = lab.schedule(**step.arguments())
        case UpdateStep():
            lab.update(event_ids[step.event], **step.fields)
        case FaultStep():
            lab.fault(**step.arguments())
        case EventStep():
            getattr(lab, step.do)(event_ids[step.event])
