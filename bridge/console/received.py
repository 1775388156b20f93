"""What the console takes from a CloudEvent: who reports it, when, and about which event."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from bridge.contract.types import TYPE_PREFIX
from bridge.events.envelope import check_event
from bridge.runtime.json import Json
from bridge.runtime.time import parse_iso

SCHEDULED_EVENT, APPROVAL = "scheduledevent", "approval"
MAX_TEXT = 300
# Clocks that show other times are not believed: then the time of arrival counts.
_EARLIEST = 1_735_689_600.0  # 2025: no imds-bridge is older
_FUTURE_SECONDS = 300.0
_SEQUENCE = re.compile(r"[0-9]{1,18}")  # what SQLite stores
_GROUP = re.compile(r"(/subscriptions/[^/]+)/resourcegroups/([^/]+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportingVm:
    """The VM that published an event.

    Attributes:
        id: its key in the store.
        name: as in Resources.
        scope: the subscription, resource group and scale set in lower case: the VMs that can share events.
        group: what people call the scope: the resource group, with the scale set if there is one. In lower case, as
            Azure gives the VMs of one group different spellings.
        zone: the availability zone, "" without one.
        location: the Azure region.
        resource_id: the ARM id, "" while it is unknown.
    """

    id: int
    name: str
    scope: str
    group: str
    zone: str
    location: str
    resource_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """One CloudEvent as received, with what is looked up by.

    Attributes:
        key: the same for the same source and id.
        id_hash: of the id alone, by which a document lists it.
        kind: the type without prefix and version, such as `scheduledevent.started`.
        at: when the VM saw it, in seconds since 1970.
        event_id: the EventId in lower case, "" for what is not about an event.
        vm: who reports it; None if the event does not say.
        reporter: the process, its epoch and this event's place in it; the number is None without one.
        data: the event's data, {} if it is not an object.
        body: the event in structured mode.
    """

    key: bytes
    id_hash: int
    kind: str
    at: float
    event_id: str
    vm: ReportingVm | None
    reporter: tuple[str, str, int | None]
    data: Mapping[str, Json]
    body: bytes


def receive(given: Mapping[str, Json], body: bytes, *, now: float) -> Received | None:
    """Read a decoded event; None if it is not one of imds-bridge.

    Args:
        given: the decoded event.
        body: the same in structured mode.
        now: seconds since 1970.

    Raises:
        ValueError: it is not a CloudEvent.
    """
    envelope = check_event(given)
    if not envelope.type.startswith(TYPE_PREFIX):
        return None
    data = given.get("data")
    properties = data if isinstance(data, dict) else {}
    kind = envelope.type.removeprefix(TYPE_PREFIX).removesuffix(".v1")[:MAX_TEXT]
    return Received(
        key=sha256(f"{envelope.source}\n{envelope.id}".encode("utf-8", "replace")).digest()[:16],
        id_hash=hash_text(envelope.id),
        kind=kind,
        at=_instant(given.get("time"), now),
        event_id=_event_id(kind, properties),
        vm=read_vm(properties.get("Vm")),
        reporter=_read_reporter(given),
        data=properties,
        body=body,
    )


def hash_text(text: str) -> int:
    """Return a number that fits into a column of integers."""
    return int.from_bytes(sha256(text.encode("utf-8", "replace")).digest()[:8], "big", signed=True)


def clip(value: Json) -> str:
    """Return a text of limited length, "" for what is not a text."""
    # Without halves of surrogate pairs, which JSON can bring and SQLite cannot store.
    return value[:MAX_TEXT].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _instant(value: Json, now: float) -> float:
    instant = parse_iso(value)
    seconds = instant.timestamp() if instant else now
    return seconds if _EARLIEST < seconds < now + _FUTURE_SECONDS else now


def _event_id(kind: str, data: Mapping[str, Json]) -> str:
    is_about_event = kind.partition(".")[0] in (SCHEDULED_EVENT, APPROVAL)
    return clip(data.get("EventId")).strip().lower() if is_about_event else ""


def read_vm(given: Json) -> ReportingVm | None:
    """Read an event's `Vm`; None if it names none."""
    vm = given if isinstance(given, dict) else {}
    name = clip(vm.get("Name"))
    if not name:
        return None
    resource_id, scale_set = clip(vm.get("ResourceId")), clip(vm.get("ScaleSet"))
    found = _GROUP.match(resource_id)
    names = [found[2] if found else "", scale_set]
    return ReportingVm(
        id=hash_text((resource_id or f"urn:imds-bridge:vm:{name}").lower()),
        name=name,
        scope="/".join(filter(None, [found[1] if found else "", *names])).lower(),
        group="/".join(filter(None, names)).lower(),
        zone=clip(vm.get("Zone")),
        location=clip(vm.get("Location")),
        resource_id=resource_id,
    )


def _read_reporter(given: Mapping[str, Json]) -> tuple[str, str, int | None]:
    number = clip(given.get("reporterseq"))
    sequence = int(number) if _SEQUENCE.fullmatch(number) else None
    return clip(given.get("reporter")), clip(given.get("reporterepoch")), sequence
