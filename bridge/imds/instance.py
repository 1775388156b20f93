"""Instance data: who this VM is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.runtime.json import BoundedDecoder, Json, read_object
from bridge.runtime.text import printable

_decoder = BoundedDecoder(max_depth=100)


@dataclass(frozen=True, kw_only=True)
class Vm:
    """Who this VM is, from instance data; "" for what does not apply, as in IMDS."""

    name: str
    vm_id: str = ""
    resource_id: str = ""
    location: str = ""
    zone: str = ""
    scale_set: str = ""
    subscription_id: str = ""
    resource_group: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def parse_vm(body: bytes) -> Vm:
    """Read an answer with instance data, whatever is missing from it beside the name.

    Raises:
        ValueError: it is not instance data with a name.
    """
    compute = read_object(body, max_bytes=len(body), decoder=_decoder)
    name, tags = _text(compute.get("name")), compute.get("tagsList")
    if not name:
        raise ValueError("no name")
    return Vm(
        name=name,
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


def resource_group_of(resource_id: str) -> str:
    """Return the name of the resource group in an ARM id; "" if there is none."""
    match = re.search(r"/resourceGroups/([^/]+)", resource_id, re.IGNORECASE)
    return match.group(1) if match else ""


def _text(value: Json) -> str:
    """Return a value that can be an attribute: printable text of limited length."""
    return printable(value, 1024).strip()
