"""Read scenarios from TOML and play them on a simulated IMDS."""

from __future__ import annotations

import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bridge.lab.faults import Fault
from bridge.lab.httpd import LabError, check_seconds
from bridge.lab.imds import EVENT_TYPES, ImdsLab

SCENARIO_DIR = Path(__file__).parent / "scenarios"

TEXT = (str,)
NUMBER = (int, float)
WHOLE = (int,)
NAMES = (list,)
SWITCH = (bool,)

# the arguments of each action besides at_seconds, do and text: name -> (types, required)
ARGUMENTS: dict[str, dict[str, tuple[tuple[type, ...], bool]]] = {
    "schedule": {
        "event": (TEXT, True),
        "event_type": (TEXT, True),
        "resources": (NAMES, True),
        "notice_seconds": (NUMBER, False),
        "event_source": (TEXT, False),
        "duration_seconds": (WHOLE, False),
        "description": (TEXT, False),
        "event_status": (TEXT, False),
        "completes": (SWITCH, False),
        "impact_seconds": (NUMBER, False),
    },
    "start": {"event": (TEXT, True)},
    "cancel": {"event": (TEXT, True)},
    "complete": {"event": (TEXT, True)},
    "update": {"event": (TEXT, True), "fields": ((dict,), True)},
    "fault": {
        "kind": ((str, int), True),
        "vm": (TEXT, False),
        "count": (WHOLE, False),
        "seconds": (NUMBER, False),
        "retry_after": ((str, int), False),
        "method": (TEXT, False),
    },
    "reset": {"to": (WHOLE, False)},
}
STEP_KEYS = ("at_seconds", "do", "text")
SCENARIO_KEYS = ("title", "time_scale", "vms", "scale_set", "step")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Hold one step of a scenario."""

    number: int
    at_seconds: float  # lab seconds after the scenario's start
    action: str
    text: str  # printed when the step runs
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Hold a scenario to play, its steps in order of time."""

    title: str
    time_scale: float  # lab seconds per real second
    vms: tuple[str, ...]
    scale_set: str
    steps: tuple[Step, ...]

    @property
    def real_seconds(self) -> float:
        """Return when the last step runs, in real seconds; events may end later."""
        return self.steps[-1].at_seconds / self.time_scale


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with the lab."""
    return sorted(path.stem for path in SCENARIO_DIR.glob("*.toml"))


def load_scenario(name_or_file: str) -> Scenario:
    """Return a built-in scenario by its name, or a scenario from a file.

    Raises: LabError that names the file, the step, what was given and what was expected.
    """
    known = SCENARIO_DIR / f"{name_or_file}.toml"
    path = known if name_or_file in scenario_names() else Path(name_or_file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected = f"a file, or one of: {', '.join(scenario_names())}"
        raise LabError(f"scenario given: {name_or_file!r} ({error}); expected: {expected}") from error
    return parse_scenario(text, file=path.name)


def parse_scenario(text: str, *, file: str) -> Scenario:
    """Return the scenario in the TOML text; `file` names it in errors."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"{file}: not TOML: {error}") from error
    _check_keys(content, SCENARIO_KEYS, where=file)
    title = _value(content, "title", TEXT, where=file)
    time_scale = content.get("time_scale", 1.0)
    _seconds("time_scale", time_scale, where=file)
    if time_scale == 0:
        raise LabError(f"{file}: time_scale given: 0; expected: a number above 0")
    vms = _names(content, "vms", where=file)
    scale_set = _value({"scale_set": "web", **content}, "scale_set", TEXT, where=file)
    entries = _value(content, "step", (list,), where=file)
    if not vms or not entries:
        raise LabError(f"{file}: given: {len(vms)} vms, {len(entries)} steps; expected: at least one of each")
    steps = [_step(entry, number, vms, file) for number, entry in enumerate(entries, start=1)]
    _check_story(steps, file)
    return Scenario(
        title=title, time_scale=float(time_scale), vms=tuple(vms), scale_set=scale_set, steps=tuple(steps)
    )


def play(
    scenario: Scenario,
    lab: ImdsLab,
    stop: threading.Event,
    on_step: Callable[[Step], None] = lambda _: None,
) -> bool:
    """Play the steps at their times on the lab's clock, until the last one or `stop`.

    A step that is no longer possible, such as canceling an event that an approval has started, is skipped:
    `on_step` is then called with the reason in `text`.

    Args:
        scenario: what to play.
        lab: where to play it.
        stop: ends it when set.
        on_step: called after each step.

    Returns: whether all steps were played.
    """
    started = time.monotonic()
    event_ids: dict[str, str] = {}
    for step in scenario.steps:
        wait_seconds = started + step.at_seconds / lab.time_scale - time.monotonic()
        if stop.wait(max(0.0, wait_seconds)):
            return False
        try:
            _do(step, lab, event_ids)
        except LabError as error:
            on_step(replace(step, text=f"{step.text} (skipped: {error})"))
        else:
            on_step(step)
    return True


def _do(step: Step, lab: ImdsLab, event_ids: dict[str, str]) -> None:
    arguments = dict(step.arguments)
    label = arguments.pop("event", "")
    match step.action:
        case "schedule":
            event_ids[label] = lab.schedule(**arguments)
        case "start":
            lab.start(event_ids[label])
        case "cancel":
            lab.cancel(event_ids[label])
        case "complete":
            lab.complete(event_ids[label])
        case "update":
            lab.update(event_ids[label], **arguments["fields"])
        case "fault":
            lab.fault(**arguments)
        case "reset":
            lab.reset_incarnation(**arguments)


def _step(entry: Any, number: int, vms: list[str], file: str) -> Step:
    where = f"{file}, step {number}"
    if not isinstance(entry, dict):
        raise LabError(f"{where}: given: {entry!r}; expected: a table")
    action = _value(entry, "do", TEXT, where=where)
    if action not in ARGUMENTS:
        raise LabError(f"{where}: do given: {action!r}; expected one of: {', '.join(ARGUMENTS)}")
    accepted = ARGUMENTS[action]
    _check_keys(entry, (*STEP_KEYS, *accepted), where=where)
    _value(entry, "at_seconds", NUMBER, where=where)
    text = _value(entry, "text", TEXT, where=where)
    arguments = {
        name: _value(entry, name, types, where=where)
        for name, (types, demanded) in accepted.items()
        if demanded or name in entry
    }
    for name in ("at_seconds", "notice_seconds", "impact_seconds", "seconds"):
        _seconds(name, entry.get(name, 0), where=where)
    _check_values(arguments, vms, where)
    return Step(
        number=number, at_seconds=float(entry["at_seconds"]), action=action, text=text, arguments=arguments
    )


def _check_values(arguments: Mapping[str, Any], vms: list[str], where: str) -> None:
    allowed = {
        "event_type": EVENT_TYPES,
        "event_source": ("Platform", "User"),
        "event_status": ("Scheduled", "Started"),
        "vm": tuple(vms),
    }
    for name, expected in allowed.items():
        if name in arguments and arguments[name] not in expected:
            given = arguments[name]
            raise LabError(f"{where}: {name} given: {given!r}; expected one of: {', '.join(expected)}")
    if "resources" in arguments:
        strangers = [name for name in _names(arguments, "resources", where=where) if name not in vms]
        if strangers:
            raise LabError(f"{where}: resources given: {strangers}; expected only: {', '.join(vms)}")
    if "kind" in arguments:
        try:
            Fault.of(arguments["kind"])
        except LabError as error:
            raise LabError(f"{where}: {error}") from error


def _check_story(steps: list[Step], file: str) -> None:
    """Refuse steps that go back in time, and steps about events that no step before has scheduled."""
    known: list[str] = []
    for before, step in zip([None, *steps], steps, strict=False):
        where = f"{file}, step {step.number}"
        if before is not None and step.at_seconds < before.at_seconds:
            expected = f"{before.at_seconds:g} or later, as the step before"
            raise LabError(f"{where}: at_seconds given: {step.at_seconds:g}; expected: {expected}")
        label = step.arguments.get("event")
        if step.action == "schedule":
            if label in known:
                raise LabError(f"{where}: event given: {label!r} a second time; expected: a new name")
            known.append(str(label))
        elif label is not None and label not in known:
            expected = ", ".join(known) or "an event that a step before schedules"
            raise LabError(f"{where}: event given: {label!r}; expected one of: {expected}")


def _check_keys(table: Mapping[str, Any], expected: tuple[str, ...], *, where: str) -> None:
    unknown = [name for name in table if name not in expected]
    if unknown:
        raise LabError(f"{where}: given: {', '.join(unknown)}; expected only: {', '.join(expected)}")


def _value(table: Mapping[str, Any], name: str, types: tuple[type, ...], *, where: str) -> Any:
    value = table.get(name)
    # TOML's true is not a number, although Python's True is an int
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        given = "nothing" if name not in table else repr(value)
        kinds = {"str": "a text", "int": "a whole number", "float": "a number", "list": "a list"}
        expected = " or ".join(kinds.get(kind.__name__, kind.__name__) for kind in types)
        raise LabError(f"{where}: {name} given: {given}; expected: {expected}")
    return value


def _names(table: Mapping[str, Any], name: str, *, where: str) -> list[str]:
    values = _value(table, name, NAMES, where=where)
    if not all(isinstance(value, str) and value for value in values):
        raise LabError(f"{where}: {name} given: {values!r}; expected: a list of names")
    return list(values)


def _seconds(name: str, value: Any, *, where: str) -> None:
    try:
        check_seconds(name, value)
    except LabError as error:
        raise LabError(f"{where}: {error}") from error
