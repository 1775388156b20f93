"""What every sink has: which events it takes, and for how long they are worth sending."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    field_validator,
)

from bridge.config.base import DAY_SECONDS, Settings
from bridge.config.validators import show

EVENT_TYPES = [
    f"io.imdsbridge.{name}.v1"
    for name in (
        *("scheduledevent.scheduled", "scheduledevent.started", "scheduledevent.updated"),
        *("scheduledevent.completed", "scheduledevent.canceled", "scheduledevent.ended"),
        *("document.changed", "imds.unreachable", "imds.recovered", "bridge.heartbeat"),
        *("approval.accepted", "approval.rejected", "approval.failed"),
    )
]

# What an event can have: attributes, Microsoft's properties, and what is added to them.
WHERE_NAMES = (
    *("id", "source", "type", "subject", "dataschema", "correlationid", "causationid", "partitionkey"),
    *(
        "reporter",
        "reporterepoch",
        "EventId",
        "EventType",
        "EventStatus",
        "EventSource",
        "ResourceType",
        "Resources",
    ),
    *(
        "Description",
        "DurationInSeconds",
        "PreviousStatus",
        "Changed",
        "DocumentIncarnation",
        "AffectsThisVm",
        "ApprovalSession",
        "Vm",
    ),
    *("Outcome", "Reason", "DryRun", "Command", "Version"),
)

# What IMDS says today; it may come to say more, so that only what looks like a slip is refused.
_KNOWN_VALUES = {
    "EventType": ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate"),
    "EventStatus": ("Scheduled", "Started", "Completed", "Canceled", "Ended"),
    "EventSource": ("Platform", "User"),
    "Outcome": ("Accepted", "Rejected", "Failed"),
}


def _check_wanted(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise ValueError("expected a text, a number, true or false, or a list of them")
    return value


Wanted = Annotated[Any, AfterValidator(_check_wanted)]


PositiveSeconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0.001, le=10_000)]


class SinkSettings(Settings):
    """What every sink has: which events it takes, and for how long they are worth sending.

    `types` may hold `*`; `where` asks for equality with an attribute or a property of `data`, with one of
    several where a list is given. `scope` "self" takes what names this VM (or may do so), "first" what names it
    first. A new sink starts with the next event unless `from_start`. `max_per_second` counts sendings, of one event
    or of a batch.
    """

    kind: str
    types: tuple[str, ...] = ("*",)
    where: Mapping[str, Wanted] = Field(default_factory=dict)
    scope: Literal["self", "first", "all"] | None = None
    max_age_seconds: PositiveSeconds = 7 * DAY_SECONDS
    from_start: bool = False
    max_per_second: Rate | None = None

    @classmethod
    def model_for(cls, given: Mapping[str, Any]) -> type[SinkSettings]:  # noqa: ARG003 - for those that choose by it
        """Return the settings that a sink's table is read with.

        Raises:
            UnknownNameError: the table asks for settings that do not exist.
        """
        return cls

    @property
    def is_chat_format(self) -> bool:
        """Whether people read it: then only what names this VM is of interest, unless `scope` says more."""
        return False

    @field_validator("types")
    @classmethod
    def _check_types(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('expected at least one pattern, for example ["io.imdsbridge.scheduledevent.*"]')
        for pattern in value:
            if not any(
                fnmatchcase(known, pattern.replace("[", "[[]").replace("?", "[?]")) for known in EVENT_TYPES
            ):
                families = sorted({f"{known.rsplit('.', 2)[0]}.*" for known in EVENT_TYPES})
                close = get_close_matches(pattern, [*EVENT_TYPES, *families], n=1)
                hint = f"; did you mean {close[0]}?" if close else f", for example {EVENT_TYPES[0]}"
                raise ValueError(f"expected types that there are{hint}")
        return value

    @field_validator("where")
    @classmethod
    def _check_where(cls, value: Mapping[str, Wanted]) -> Mapping[str, Wanted]:
        for name, wanted in value.items():
            known = _KNOWN_VALUES.get(name, ())
            for one in wanted if isinstance(wanted, list | tuple) else [wanted]:
                if one not in known and (near := get_close_matches(str(one), list(map(str, known)), n=1)):
                    raise ValueError(f"{name}: given {show(one)}, did you mean {near[0]}?")
            if name == "AffectsThisVm" and not isinstance(wanted, bool):
                raise ValueError(f"{name}: given {show(wanted)}, expected true or false")
            if name.partition(".")[0] not in WHERE_NAMES:
                close = get_close_matches(name, WHERE_NAMES, n=1)
                hint = f"; did you mean {close[0]}?" if close else ", such as EventType or AffectsThisVm"
                raise ValueError(f"expected names of attributes or data{hint}")
        return value


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]
