"""VMs that should publish, as a program lists them: of which nothing was ever heard is shown as not watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from bridge.console.received import EXPECTED, MAX_TAGS, MAX_TEXT, Received, own_event
from bridge.runtime.json import Json

MAX_BYTES = 32 * 1024 * 1024
_Text = Annotated[str, Field(max_length=MAX_TEXT)]


@dataclass(frozen=True, kw_only=True)
class ExpectedVm:
    """A VM, as events name theirs in `Vm`."""

    Name: Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
    ResourceId: Annotated[
        str, Field(pattern="^/subscriptions/[^/]+/resource[gG]roups/[^/]+/.", max_length=MAX_TEXT)
    ]
    ScaleSet: _Text | None = None
    Zone: _Text | None = None
    Location: _Text | None = None
    Tags: Annotated[dict[str, str] | None, Field(max_length=MAX_TAGS)] = None


VMS = TypeAdapter(list[ExpectedVm])


def read_expected(body: bytes, *, now: float) -> Received:
    """Return the event that replaces the list of expected VMs; nobody else may send it, and it is not kept.

    Args:
        body: as received.
        now: seconds since 1970.

    Raises:
        ValueError: it is not such a list.
    """
    return own_event(EXPECTED, {"Vms": VMS.dump_python(_checked(VMS.validate_json, body))}, now=now)


def check(vms: Json) -> None:
    """Check the list of an event that an export has.

    Raises:
        ValueError: as of `read_expected`.
    """
    _checked(VMS.validate_python, vms)


def _checked(validate: Callable[[Any], list[ExpectedVm]], given: Any) -> list[ExpectedVm]:
    try:
        return validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise ValueError(
            f"{place}: {first['msg']}; expected a list of VMs with Name and ResourceId"
        ) from None
