"""What the console takes from a CloudEvent: who reports it, when, and about which event."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import uuid4

from bridge.contract.types import TYPE_PREFIX
from bridge.events.envelope import check_event
from bridge.runtime.json import Json
from bridge.runtime.time import iso_utc, parse_iso

SCHEDULED_EVENT, APPROVAL = "scheduledevent", "approval"
HEARTBEAT, DOCUMENT = "bridge.heartbeat", "document.changed"
# Only the console itself writes these.
EXPECTED, FORGOTTEN, DISMISSED = "console.expected", "console.forgotten", "console.dismissed"
RESTORED = "console.restored"  # takes back one of the last two
OF_PEOPLE = (FORGOTTEN, DISMISSED, RESTORED)
OWN_PREFIX, _SOURCE = f"{TYPE_PREFIX}console.", "urn:imds-bridge:console"
MAX_TEXT = 300
MAX_TAGS = 50  # as many as Azure allows
# Clocks that show other times are not believed: then the time of arrival counts.
_EARLIEST = 1_735_689_600.0  # 2025: no imds-bridge is older
_FUTURE_SECONDS = 300.0
MAX_SEQUENCE = 10**18  # what SQLite stores
_NUMBER = re.compile(r"[0-9]{1,18}")
_GROUP = re.compile(r"/subscriptions/([^/]+)/resourcegroups/([^/]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportingVm:
    """The VM that published an event.

    Attributes:
        id: its key in the store.
        name: as in Resources.
        scope: the subscription, resource group and scale set in lower case: the VMs that can share events.
        subscription: its id in lower case, "" if it is unknown.
        group: what people call the scope: the resource group, with the scale set if there is one. In lower case, as
            Azure gives the VMs of one group different spellings.
        scale_set: in lower case, "" for a VM on its own.
        zone: the availability zone, "" without one.
        location: the Azure region.
        resource_id: the ARM id, "" while it is unknown.
        tags: a line `name=value` for each, folded, between line feeds.
    """

    id: int
    name: str
    scope: str
    subscription: str
    group: str
    scale_set: str
    zone: str
    location: str
    resource_id: str
    tags: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """One CloudEvent as received, with what is looked up by.

    Attributes:
        key: the same for the same source and id.
        sighting: of the reporting VM's scope and the id: by the id alone a document lists its events.
        kind: the type without prefix and version, such as `scheduledevent.started`.
        at: when the VM saw it, in seconds since 1970; the time of arrival if its clock is not believed.
        late_by: what was added to the VM's own time for that.
        event_id: the EventId in lower case, "" for what is not about an event.
        vm: who reports it; None if the event does not say.
        reporter: the process, its epoch and this event's place in it; the number is None without one.
        data: the event's data, {} if it is not an object.
        body: the event in structured mode.
    """

    key: bytes
    sighting: int
    kind: str
    at: float
    late_by: float
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
    check_event(given)
    is_ours = given["type"].startswith(TYPE_PREFIX) and not given["type"].startswith(OWN_PREFIX)
    return read_event(given, body, now=now) if is_ours else None


def read_event(given: Mapping[str, Any], body: bytes, *, now: float) -> Received:
    """Read a CloudEvent of imds-bridge; arguments as of `receive`."""
    data = given.get("data")
    properties = data if isinstance(data, dict) else {}
    kind = given["type"].removeprefix(TYPE_PREFIX).removesuffix(".v1")[:MAX_TEXT]
    vm = read_vm(properties.get("Vm"))
    reported = parse_iso(given.get("time"))
    given_at = reported.timestamp() if reported else now
    at = given_at if _EARLIEST < given_at < now + _FUTURE_SECONDS else now
    return Received(
        key=sha256(f"{given['source']}\n{given['id']}".encode("utf-8", "replace")).digest()[:16],
        sighting=sighting_of(vm, given["id"]),
        kind=kind,
        at=at,
        late_by=at - given_at,
        event_id=_event_id(kind, properties),
        vm=vm,
        reporter=_read_reporter(given),
        data=properties,
        body=body,
    )


def own_event(kind: str, data: Mapping[str, Json], *, now: float) -> Received:
    """Return an event that the console itself writes; a sender of events cannot.

    Args:
        kind: EXPECTED, FORGOTTEN, DISMISSED or RESTORED.
        data: of the event.
        now: seconds since 1970.
    """
    event = {
        "specversion": "1.0",
        "id": str(uuid4()),
        "source": _SOURCE,
        "type": f"{TYPE_PREFIX}{kind}.v1",
        "time": iso_utc(datetime.fromtimestamp(now, UTC)),
        "data": data,
    }
    return read_event(event, json.dumps(event).encode(), now=now)


def hash_text(text: str) -> int:
    """Return a number that fits into a column of integers."""
    return int.from_bytes(sha256(text.encode("utf-8", "replace")).digest()[:8], "big", signed=True)


def sighting_of(vm: ReportingVm | None, event_id: str) -> int:
    """Return by what a VM's sighting of a CloudEvent is found: VMs of one scope share the source of its events."""
    return hash_text(f"{vm.scope if vm else ''}\n{event_id}")


def vm_id(name: str, resource_id: str) -> int:
    """Return a VM's key in the store."""
    return hash_text((resource_id or f"urn:imds-bridge:vm:{name}").lower())


def scope_id(scope: str) -> int:
    """Return the key of a scope, 0 for that of VMs that are not identified."""
    return hash_text(scope) if scope else 0


def place_of(scope: str, folded: str) -> int:
    """Return by what the VMs that an event names are found: a VM's name is its own within its scope."""
    return hash_text(f"{scope}\n{folded}")


def natural(name: str) -> str:
    """Return a key that sorts web-9 before web-10."""
    return _NUMBER.sub(lambda found: found[0].zfill(18), name.casefold())


def clip(value: Json) -> str:
    """Return a text of limited length, "" for what is not a text."""
    # Without halves of surrogate pairs, which JSON can bring and SQLite cannot store.
    return value[:MAX_TEXT].encode("utf-8", "replace").decode() if isinstance(value, str) else ""


def _event_id(kind: str, data: Mapping[str, Json]) -> str:
    is_about_event = kind in (DISMISSED, RESTORED) or kind.partition(".")[0] in (SCHEDULED_EVENT, APPROVAL)
    return clip(data.get("EventId")).strip().lower() if is_about_event else ""


def read_vm(given: Json) -> ReportingVm | None:
    """Read an event's `Vm`; None if it names none."""
    vm = given if isinstance(given, dict) else {}
    name = clip(vm.get("Name"))
    if not name:
        return None
    resource_id, scale_set = clip(vm.get("ResourceId")), clip(vm.get("ScaleSet")).lower()
    found = _GROUP.match(resource_id.lower())
    subscription, resource_group = found.groups() if found else ("", "")
    group = "/".join(filter(None, (resource_group, scale_set)))
    tags = vm.get("Tags")
    return ReportingVm(
        id=vm_id(name, resource_id),
        name=name,
        scope=f"{subscription}/{group}".strip("/"),
        subscription=subscription,
        group=group,
        scale_set=scale_set,
        zone=clip(vm.get("Zone")),
        location=clip(vm.get("Location")),
        resource_id=resource_id,
        tags=_fold_tags(tags) if isinstance(tags, dict) else "",
    )


def _fold_tags(tags: Mapping[str, Json]) -> str:
    lines = (
        " ".join(clip(f"{name}={value}").casefold().split()) for name, value in list(tags.items())[:MAX_TAGS]
    )
    return "\n".join(["", *lines, ""])


def _read_reporter(given: Mapping[str, Json]) -> tuple[str, str, int | None]:
    number = clip(given.get("reporterseq"))
    sequence = int(number) if _NUMBER.fullmatch(number) else None
    return clip(given.get("reporter")), clip(given.get("reporterepoch")), sequence
