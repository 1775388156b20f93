"""Instance data: who this VM is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bridge.contract.types import session_id
from bridge.runtime.json import BoundedDecoder, Json, read_object
from bridge.runtime.text import printable

_decoder = BoundedDecoder(max_depth=100)
_PROPERTIES = {
    "vmId": "vm_id",
    "name": "name",
    "resourceGroupName": "resource_group",
    "subscriptionId": "subscription_id",
    "resourceId": "resource_id",
    "location": "location",
    "zone": "zone",
    "vmScaleSetName": "scale_set",
}
_EVERY_VM_HAS = ("vmId", "name", "resourceGroupName", "subscriptionId")
_NAMED_BY = ("name", "resource_id", "subscription_id", "resource_group", "scale_set")


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

    @property
    def missing(self) -> list[str]:
        """What every VM has and this does not, by the names of IMDS, which answers with a part at times."""
        return [name for name in _EVERY_VM_HAS if not getattr(self, _PROPERTIES[name])]

    def named_as(self, other: Vm) -> Vm | None:
        """Return this VM with the other's spelling of what names it; None if that differs in more than case."""
        names = {name: getattr(other, name) for name in _NAMED_BY}
        is_same = all(getattr(self, name).lower() == known.lower() for name, known in names.items())
        return replace(self, **names) if is_same else None


def parse_vm(body: bytes) -> Vm:
    """Read an answer with instance data, whatever is missing from it beside the name.

    Raises:
        ValueError: it is not instance data with a name.
    """
    compute = read_object(body, max_bytes=len(body), decoder=_decoder)
    known, tags = {of: _text(compute.get(name)) for name, of in _PROPERTIES.items()}, compute.get("tagsList")
    if not known["name"]:
        raise ValueError("no name")
    named = {
        tag["name"]: str(tag.get("value", ""))
        for tag in (tags if isinstance(tags, list) else [])
        if isinstance(tag, dict) and isinstance(tag.get("name"), str)
    }
    return Vm(**known, tags=named)


def approval_session(template: str, vm: Vm | None) -> str | None:
    """Return a VM's session id; "" without a template, None while what the template names is unknown."""
    if not template:
        return ""
    known = (
        {"vm": vm.name, "resource_group": vm.resource_group, "subscription": vm.subscription_id} if vm else {}
    )
    is_known = vm is not None and all(known.get(name) for name in re.findall(r"\{(\w+)\}", template))
    return session_id(template, **known) if is_known else None


def resource_group_of(resource_id: str) -> str:
    """Return the name of the resource group in an ARM id; "" if there is none."""
    match = re.search(r"/resourceGroups/([^/]+)", resource_id, re.IGNORECASE)
    return match.group(1) if match else ""


def _text(value: Json) -> str:
    """Return a value that can be an attribute: printable text of limited length."""
    return printable(value, 1024).strip()
