"""Instance data: who this VM is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.runtime.json import Json


@dataclass(frozen=True, kw_only=True)
class Vm:
    """Who this VM is, from instance data; "" where it does not apply (IMDS says so too)."""

    name: str
    vm_id: str = ""
    resource_id: str = ""
    location: str = ""
    zone: str = ""
    scale_set: str = ""
    subscription_id: str = ""
    resource_group: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def resource_group_of(resource_id: str) -> str:
    """Read the resource group's name out of an ARM id; "" where there is none."""
    match = re.search(r"/resourceGroups/([^/]+)", resource_id, re.IGNORECASE)
    return match.group(1) if match else ""


def read_vm(compute: Mapping[str, Json]) -> Vm:
    """Make a Vm of instance data, whatever it lacks."""
    tags = compute.get("tagsList")
    return Vm(
        name=_text(compute.get("name")),
        vm_id=_text(compute.get("vmId")),
        resource_id=_text(compute.get("resourceId")),
        location=_text(compute.get("location")),
        zone=_text(compute.get("zone")),
        scale_set=_text(compute.get("vmScaleSetName")),
        subscription_id=_text(compute.get("subscriptionId")),
        resource_group=_text(compute.get("resourceGroupName")),
        tags={
            tag["name"]: str(tag.get("value", ""))
            for tag in (tags if isinstance(tags, list) else [])
            if isinstance(tag, dict) and isinstance(tag.get("name"), str)
        },
    )


def _text(value: Json) -> str:
    """Keep what can stand in an attribute: printable text of a sane length."""
    if not isinstance(value, str):
        return ""
    return "".join(letter for letter in value if letter.isprintable())[:1024].strip()
