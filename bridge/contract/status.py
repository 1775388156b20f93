"""How a process is: what it writes to its status file, and what commands, metrics and health checks read of it.

A field that a file lacks, or has with another type, is NOT_KNOWN: a process of another version has written the file.
What a process says of itself has every field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args

from pydantic import ConfigDict, Field, TypeAdapter, WithJsonSchema, WrapValidator


class NotKnown:
    """Stands for a field that the file lacks; it is false."""

    def __bool__(self) -> Literal[False]:
        return False

    def __str__(self) -> str:
        return "not known"


NOT_KNOWN = NotKnown()
T = TypeVar("T")


def _known(value: object, read: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return NOT_KNOWN
    try:
        return read(value)
    except ValueError:
        return NOT_KNOWN


if TYPE_CHECKING:
    Known: TypeAlias = T | NotKnown
else:
    Known = Annotated[T, WrapValidator(_known), Field(default_factory=lambda: NOT_KNOWN)]

Instant = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
"""RFC 3339 in UTC."""


@dataclass(frozen=True, kw_only=True)
class SinkStatus:
    """What waits for a sink, and what its last deliveries showed. `is_held`: a digest gathers, or copies wait."""

    state: Known[str]
    backlog: Known[int]
    oldest_waits_seconds: Known[float | None]
    is_held: Known[bool]
    notice_until: Known[Instant | None]
    failures: Known[int]
    next_retry_at: Known[Instant | None]
    last_success_at: Known[Instant | None]
    last_error: Known[str | None]
    last_error_at: Known[Instant | None]
    dead_letters: Known[int]


@dataclass(frozen=True, kw_only=True)
class BusStatus:
    """What is received from a queue or subscription; `looked_at`: when what was there came last, if only nothing."""

    __pydantic_config__ = ConfigDict(alias_generator=lambda name: name.rstrip("_"))

    from_: Known[str]
    unsettled: Known[int]
    rests: Known[bool]
    looked_at: Known[Instant | None]
    last_error: Known[str | None]


@dataclass(frozen=True, kw_only=True)
class ConsoleBus(BusStatus):
    """What a console receives; `malformed` counts messages that are not events."""

    malformed: Known[int]


@dataclass(frozen=True, kw_only=True)
class RelayBus(ConsoleBus):
    """What a relay receives, in numbers since its start."""

    relayed: Known[int]
    repeated: Known[int]
    uncompleted: Known[int]
    last_event_at: Known[Instant | None]


@dataclass(frozen=True, kw_only=True)
class VmStatus:
    """What a process on a VM knows of it, and the last answers of IMDS, whose clock its own may be ahead of."""

    vm: Known[str | None]
    clock_ahead_seconds: Known[float | None]
    imds: Known[str]
    version_error: Known[str | None]
    last_error: Known[str | None]
    last_good_at: Known[Instant | None]


@dataclass(frozen=True, kw_only=True)
class ForwardStatus(VmStatus):
    """What `forward` knows; `document` is IMDS's last one, and `missing` are events that may still come back."""

    failed_share: Known[float]
    document: Known[Mapping[str, Any] | None]
    missing: Known[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class OutOfWork:
    """Since when and why a VM is out of work; `IsHeld` by an event, so that nothing may put it back yet."""

    Since: Known[Instant]
    Why: Known[str]
    IsHeld: Known[bool]
    NeedsPerson: Known[bool]


@dataclass(frozen=True, kw_only=True)
class AutoStatus:
    """What the auto rules make of an event."""

    EventId: Known[str]
    Why: Known[str]
    NeedsPerson: Known[bool]


@dataclass(frozen=True, kw_only=True)
class ListenStatus(VmStatus):
    """What `listen` does; `commands` is null if only auto rules approve."""

    waiting_commands: Known[int]
    dry_run: Known[bool]
    out_of_work: Known[Sequence[OutOfWork]]
    auto: Known[Sequence[AutoStatus]]
    commands: Known[BusStatus | None]


@dataclass(frozen=True, kw_only=True)
class RelayStatus:
    """What `relay` does."""

    relay: Known[RelayBus]


@dataclass(frozen=True, kw_only=True)
class ConsoleStatus:
    """What `console` does; `bus` is null if events only come to its port."""

    url: Known[str]
    started_at: Known[Instant]
    received: Known[int]
    repeated: Known[int]
    last_event_at: Known[Instant | None]
    bus: Known[ConsoleBus | None]


FlowStatus = ForwardStatus | ListenStatus | RelayStatus | ConsoleStatus
FLOWS = dict(zip(("forward", "listen", "relay", "console"), get_args(FlowStatus), strict=True))


@dataclass(frozen=True, kw_only=True)
class Status:
    """What every process says of itself; in JSON, the fields of `flow` stand beside the others.

    `config` is the file that it has loaded, `program_faults` why programs that it will need cannot be started by it.
    """

    version: Known[str]
    role: str
    pid: Known[int]
    running: Known[bool]
    written_at: Known[Instant]
    storage_error: Known[str | None]
    metrics: Known[str]
    metrics_error: Known[str | None]
    kept_log: Known[str | None]
    config: Known[str]
    program_faults: Known[Sequence[str]]
    identity_error: Known[str | None]
    left_sinks: Known[Mapping[str, int]]
    sinks: Known[Mapping[str, SinkStatus]]
    flow: FlowStatus

    @property
    def receiver(self) -> BusStatus | None:
        """From where messages come; None if from nowhere, or if that is not known."""
        match self.flow:
            case ListenStatus(commands=bus) | RelayStatus(relay=bus) | ConsoleStatus(bus=bus):
                return bus or None
        return None


def from_json(raw: Mapping[str, Any], role: str) -> Status:
    """Read what a process of a role has written, whatever its version."""
    flow: FlowStatus = _reader(FLOWS[role]).validate_python(raw)
    status: Status = _reader(Status).validate_python({**raw, "role": role, "flow": flow})
    return status


@cache  # it takes milliseconds to make
def _reader(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_json(part: object) -> dict[str, Any]:
    """Return what JSON has of a report, a status or a part of it, whose parts are left as they are."""
    known = {name.rstrip("_"): one for name, one in vars(part).items() if one is not NOT_KNOWN}
    inner = known.pop("status", None) or known.pop("flow", None)
    return {**(to_json(inner) if inner else {}), **known}


def not_known(part: object, name: str = "") -> Iterator[str]:
    """Yield the names of the fields that are not known, with dots into parts."""
    if part is NOT_KNOWN:
        yield name.rstrip("_")
    inner = vars(part) if is_dataclass(part) else part if isinstance(part, Mapping) else {}
    for key, one in inner.items():
        yield from not_known(one, name if key == "flow" else f"{name}.{key}".lstrip("."))
