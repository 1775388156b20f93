"""The settings of every sink: which events it takes, and how old they may become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    WithJsonSchema,
    field_validator,
)

from bridge.config.base import DAY_SECONDS, Fault, Faults, Settings, try_setting
from bridge.config.filters import check_name, check_outcomes, check_pattern
from bridge.config.names import likely_meant
from bridge.config.validators import quote
from bridge.contract.types import EVENT_TYPES, KNOWN_VALUES


def alternatives(wanted: Any) -> Sequence[Any]:
    """Return the values that a setting allows, which may be written without a list if there is only one."""
    return wanted if isinstance(wanted, list | tuple) else [wanted]


def _check_wanted(value: Any) -> Any:
    items = alternatives(value)
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise ValueError("expected a text, a number, true or false, or a list of them")
    return value


_VALUE = {"type": ["string", "boolean", "number"]}
Wanted = Annotated[
    Any,
    AfterValidator(_check_wanted),
    WithJsonSchema({"anyOf": [_VALUE, {"type": "array", "items": _VALUE, "minItems": 1}]}),
]


Pattern = Annotated[
    str,
    AfterValidator(check_pattern),
    WithJsonSchema({"type": "string", "anyOf": [{"enum": list(EVENT_TYPES)}, {"pattern": r"\*"}]}),
]
PositiveSeconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0.001, le=10_000)]


def _find_criterion_faults(name: str, wanted: Any) -> Iterator[Fault]:
    yield from try_setting(name, partial(check_name, name))
    if name == "AffectsThisVm" and not isinstance(wanted, bool):
        yield name, f"given {quote(wanted)}, expected true or false"
    if name == "Outcome":
        yield from try_setting(name, partial(check_outcomes, alternatives(wanted)))


class SinkSettings(Settings):
    """The settings of every sink: which events it takes, and how old they may become."""

    kind: str
    """What the sink sends to."""
    types: tuple[Pattern, ...] = ("*",)
    """The types of the events to send; `*` matches any text. Example: `["io.imdsbridge.scheduledevent.*"]`."""
    where: Mapping[str, Wanted] = Field(default_factory=dict)
    """The values that attributes and properties of `data` must have; a list gives alternatives, `Vm.Name` names an
    inner property. Example: `{ EventType = ["Reboot", "Redeploy"], AffectsThisVm = true }`."""
    scope: Literal["self", "first", "all"] | None = None
    """`self`: events that name this VM or no VM; `first`: events that name it first or no VM; `all`. The default is
    `self` for chat formats and exec, else `all`; a relay's sinks have no scope."""
    max_age_seconds: PositiveSeconds = 7 * DAY_SECONDS
    """Older events become dead letters. Example: `86400`."""
    from_start: bool = False
    """Whether a new sink also gets the events that are already stored."""
    max_per_second: Rate | None = None
    """The most requests a second, each of one event or one batch; by default without a limit. Example: `10`."""

    @classmethod
    def model_for(cls, given: Mapping[str, Any]) -> type[SinkSettings]:  # noqa: ARG003 - for those that choose by it
        """Return the settings that a sink's table is read with.

        Raises:
            UnknownNameError: the table asks for settings that do not exist.
        """
        return cls

    @property
    def is_chat_format(self) -> bool:
        """Whether people read it: then it gets only events that name this VM, unless `scope` says otherwise."""
        return False

    @field_validator("types")
    @classmethod
    def _check_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('expected at least one pattern, for example ["io.imdsbridge.scheduledevent.*"]')
        return value

    @field_validator("where")
    @classmethod
    def _check_where(cls, value: Mapping[str, Wanted]) -> Mapping[str, Wanted]:
        if found := [
            fault for name, wanted in value.items() for fault in _find_criterion_faults(name, wanted)
        ]:
            raise Faults(found)
        return value

    def warnings(self) -> list[str]:
        """Describe what is accepted but looks like a slip: Azure may add values, so none is refused."""
        return [
            f"where.{name}: given {quote(value)}, did you mean {meant}?"
            for name, wanted in self.where.items()
            for value in alternatives(wanted)
            if (meant := likely_meant(str(value), KNOWN_VALUES.get(name, ())))
        ]


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]
