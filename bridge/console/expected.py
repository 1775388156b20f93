"""VMs that should publish, as a program lists them: of which nothing was ever heard is shown as not watched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from bridge.console.received import EXPECTED, MAX_TAGS, MAX_TEXT, Received, own_event
from bridge.runtime.json import Json

MAX_BYTES = 20 * 1024 * 1024
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


_VM = TypeAdapter(ExpectedVm)
_HINT = "expected a list of VMs with Name and ResourceId"


def read_expected(body: bytes, *, now: float) -> Received:
    """Return the event that replaces the list of expected VMs; nobody else may send it, and it is not kept.

    Args:
        body: as received.
        now: seconds since 1970.

    Raises:
        ValueError: it is not such a list.
    """
    try:
        vms = from_json(body)
    except ValueError as error:
        raise ValueError(f"the body: Invalid JSON: {error}; {_HINT}") from None
    check(vms)
    # Without the VMs in its text, which would be a copy of the body that nobody reads.
    return replace(own_event(EXPECTED, {}, now=now), data={"Vms": vms})


def check(vms: Json) -> None:
    """Check a list of expected VMs, one after another: all of them as objects need much memory.

    Raises:
        ValueError: as of `read_expected`.
    """
    if not isinstance(vms, list):
        raise ValueError(f"the body: Input should be a valid list; {_HINT}")
    for number, vm in enumerate(vms):
        try:
            _VM.validate_python(vm)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, (number, *first["loc"])))
            raise ValueError(f"{place}: {first['msg']}; {_HINT}") from None
