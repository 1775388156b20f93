"""What every part's settings are made of: frozen models, secrets from files, and what every sink has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bridge.config.validators import show

DAY_SECONDS = 86_400.0
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


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret, or the file that holds it; never shown, and read anew whenever it is asked for."""

    value: str = field(default="", repr=False)
    file: Path | None = None

    def read(self) -> str:
        """Return the secret as it stands now.

        Raises:
            OSError, ValueError: its file cannot be read, is empty or is no text.
        """
        if self.file is None:
            return self.value
        try:
            text = self.file.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError:
            raise ValueError(f"{self.file} is no UTF-8 text") from None
        if not text:
            raise ValueError(f"{self.file} is empty")
        return text


class Settings(BaseModel):
    """The base of every part: frozen, no unknown keys, and `x_file` wherever `x` is a secret."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False, defer_build=True
    )

    secret_checks: ClassVar[Mapping[str, Callable[[str], object]]] = {}
    """What refuses a secret's text, by the setting's name."""

    @model_validator(mode="before")
    @classmethod
    def _take_secrets(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = dict(given)
        for name in cls.secret_names():
            file, value = taken.pop(f"{name}_file", None), taken.get(name)
            if file is not None:
                taken[name] = Secret(value="" if value is None else str(value), file=Path(str(file)))
            elif isinstance(value, str):
                taken[name] = Secret(value)
        return taken

    @field_validator("*")
    @classmethod
    def _check_secret(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Secret):
            if value.file and value.value:
                raise ValueError(f"expected either {info.field_name} or {info.field_name}_file, not both")
            text = _read(value)
            if check := cls.secret_checks.get(str(info.field_name)):
                check(text)
        return value

    @classmethod
    def secret_names(cls) -> list[str]:
        """Name the settings that are secrets."""
        return [
            name
            for name, info in cls.model_fields.items()
            if info.annotation is Secret or Secret in get_args(info.annotation)
        ]

    @classmethod
    def known_keys(cls) -> list[str]:
        """Name every key that may be written."""
        return [*cls.model_fields, *(f"{name}_file" for name in cls.secret_names())]


class SecretUnreadable(ValueError):
    """The file of a secret cannot be read, by this user or at all."""


def _read(secret: Secret) -> str:
    try:
        return secret.read()
    except OSError as error:
        raise SecretUnreadable(f"expected a file that can be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"expected a file that holds the secret: {error}") from None


def _check_wanted(value: Any) -> Any:
    items = value if isinstance(value, list | tuple) else [value]
    if not items or not all(isinstance(item, str | bool | int | float) for item in items):
        raise ValueError("expected a text, a number, true or false, or a list of them")
    return value


Wanted = Annotated[Any, AfterValidator(_check_wanted)]


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
    max_age_seconds: float = Field(default=7 * DAY_SECONDS, gt=0)
    from_start: bool = False
    max_per_second: float | None = Field(default=None, ge=0.001, le=10_000)

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
