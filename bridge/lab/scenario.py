"""Read scenarios from TOML and play them on a simulated IMDS."""

from __future__ import annotations

import inspect
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bridge.lab.httpd import LabError
from bridge.lab.imds import ImdsLab

SCENARIO_DIR = Path(__file__).parent / "scenarios"

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Step(BaseModel):
    """What is done to an event, under the scenario's own name for it; `schedule` takes the lab's arguments."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    at_seconds: Seconds  # lab seconds after the scenario's start
    text: str  # printed when the step runs
    do: Literal["schedule", "start", "cancel", "complete", "update"]
    event: str
    fields: dict[str, Any] = {}  # of `update`

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if self.do != "schedule" and self.arguments:
            raise ValueError(f"given: {', '.join(self.arguments)}; expected: only arguments of {self.do}")
        try:
            inspect.signature(ImdsLab.schedule).bind_partial(**self.arguments)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """Return what `schedule` gives to the lab."""
        return self.model_extra or {}


class Scenario(BaseModel):
    """A scenario to play."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    title: str
    time_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0  # lab seconds per real second
    vms: Annotated[list[str], Field(min_length=1)]
    scale_set: str = "web"
    step: Annotated[list[Step], Field(min_length=1)]


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the lab."""
    return sorted(path.stem for path in SCENARIO_DIR.glob("*.toml"))


def load_scenario(name_or_file: str) -> Scenario:
    """Return a built-in scenario by its name, or a scenario from a file; raise LabError for an invalid one."""
    known = SCENARIO_DIR / f"{name_or_file}.toml"
    path = known if name_or_file in scenario_names() else Path(name_or_file)
    try:
        return Scenario.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        expected = f"a file, or one of: {', '.join(scenario_names())}"
        raise LabError(f"scenario given: {name_or_file!r} ({error}); expected: {expected}") from error
    except ValueError as error:  # of TOML, UTF-8 or the model
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
    for step in sorted(scenario.step, key=lambda one: one.at_seconds):
        wait_seconds = started + step.at_seconds / lab.time_scale - time.monotonic()
        if stop.wait(max(0.0, wait_seconds)):
            return False
        try:
            if step.do == "schedule":
                event_ids[step.event] = lab.schedule(**step.arguments)
            else:
                getattr(lab, step.do)(event_ids[step.event], **step.fields)
        except (LabError, KeyError) as error:  # a KeyError: the event was not scheduled
            report(f"{step.text} (skipped: {error})")
        else:
            report(step.text)
    return True
