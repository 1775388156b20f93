"""What the simulated IMDS shows and refuses for each api-version, as Microsoft documents it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.lab.httpd import Answer, HttpRequest, json_answer
from bridge.runtime.time import parse_instant

EVENTS_PATH = "/metadata/scheduledevents"
INSTANCE_PATH = "/metadata/instance"
COMPUTE_PATH = "/metadata/instance/compute"

PREVIEW = "2017-03-01"
EVENT_VERSIONS = (
    PREVIEW,
    "2017-08-01",
    "2017-11-01",
    "2019-01-01",
    "2019-04-01",
    "2019-08-01",
    "2020-07-01",
    "2024-07-09",
)
INSTANCE_VERSIONS = ("2021-02-01", "2021-12-13", "2023-11-15", "2025-04-07")  # some of the documented ones
TYPE_SINCE = {"Preempt": "2017-11-01", "Terminate": "2019-01-01", "SpotRebalanceRecommendation": "2024-07-09"}
FIELD_SINCE = {"Description": "2019-04-01", "EventSource": "2019-08-01", "DurationInSeconds": "2020-07-01"}
EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate", "SpotRebalanceRecommendation")

SUBSCRIPTION_ID = "00000000-0000-4000-8000-00000000001a"
RESOURCE_GROUP = "lab"
NAMES = uuid.uuid5(uuid.NAMESPACE_URL, "urn:imds-bridge:lab")


def event_fields(
    *,
    event_id: str | None,
    event_type: str,
    event_status: str,
    resources: Sequence[str],
    description: str,
    event_source: str,
    duration_seconds: int,
) -> dict[str, Any]:
    """Return a new event as the newest version shows it, with an empty NotBefore.

    Args:
        event_id: None to generate one.
        event_type: any text.
        event_status: any text.
        resources: names of VMs.
        description: any text.
        event_source: any text.
        duration_seconds: the value of DurationInSeconds.
    """
    return {
        "EventId": event_id or str(uuid.uuid4()).upper(),
        "EventStatus": event_status,
        "EventType": event_type,
        "ResourceType": "VirtualMachine",
        "Resources": list(resources),
        "NotBefore": "",
        "Description": description,
        "EventSource": event_source,
        "DurationInSeconds": duration_seconds,
    }


def render_document(incarnation: int, events: Sequence[Mapping[str, Any]], version: str) -> dict[str, Any]:
    """Return the document as an api-version shows it.

    Args:
        incarnation: DocumentIncarnation.
        events: as the newest version shows them.
        version: one of EVENT_VERSIONS.
    """
    shown = [
        _render_event(event, version)
        for event in events
        if version >= TYPE_SINCE.get(str(event["EventType"]), PREVIEW)
    ]
    number = str(incarnation) if version == PREVIEW else incarnation
    return {"DocumentIncarnation": number, "Events": shown}


def _render_event(event: Mapping[str, Any], version: str) -> dict[str, Any]:
    shown = {name: value for name, value in event.items() if version >= FIELD_SINCE.get(name, PREVIEW)}
    if version == PREVIEW:
        instant = parse_instant(shown.get("NotBefore"))
        shown["Resources"] = ["_" + name for name in shown["Resources"]]
        shown["NotBefore"] = instant.strftime("%Y-%m-%dT%H:%M:%SZ") if instant else ""
    return shown


def compute_of(vm: str, scale_set: str, resource_group: str) -> dict[str, Any]:
    """Return the VM's instance data; every primitive is a string, as in the real service."""
    group = f"/subscriptions/{SUBSCRIPTION_ID}/resourceGroups/{resource_group}/providers/Microsoft.Compute"
    set_name, _, number = vm.rpartition("_")
    uniform = bool(scale_set) and set_name == scale_set and number.isalnum()
    return {
        "location": "westeurope",
        "name": vm,
        "resourceGroupName": resource_group,
        "resourceId": (
            f"{group}/virtualMachineScaleSets/{scale_set}/virtualMachines/{number}"
            if uniform
            else f"{group}/virtualMachines/{vm}"
        ),
        "subscriptionId": SUBSCRIPTION_ID,
        "tagsList": [{"name": "env", "value": "lab"}],
        "vmId": str(uuid.uuid5(NAMES, f"vm/{vm}")),
        "vmScaleSetName": scale_set,
        "zone": "1",
    }


def event_ids_of(body: bytes) -> list[str]:
    """Return the EventIds in the body of an approval; raise ValueError if it is malformed."""
    try:
        content = json.loads(body)
    except ValueError as error:
        raise ValueError("The body is not JSON.") from error
    starts = content.get("StartRequests") if isinstance(content, dict) else None
    if not isinstance(starts, list) or not starts:
        raise ValueError("The body needs StartRequests, a list of one or more.")
    ids = [start.get("EventId") if isinstance(start, dict) else None for start in starts]
    if not all(isinstance(event_id, str) and event_id for event_id in ids):
        raise ValueError("Each of StartRequests needs an EventId.")
    return [str(event_id) for event_id in ids]


def version_of(request: HttpRequest) -> str:
    """Return the api-version that the request names, or an empty text."""
    return (request.parameters.get("api-version") or [""])[0]


def path_of(request: HttpRequest) -> str:
    """Return the path without a slash at the end."""
    return request.path.rstrip("/")


def refusal_of(request: HttpRequest) -> Answer | None:
    """Return the answer to a request that IMDS refuses in any state, or None."""
    path, version = path_of(request), version_of(request)
    if "x-forwarded-for" in request.headers:
        return refuse(400, "Bad request. Requests with X-Forwarded-For come through a proxy.")
    if path not in (EVENTS_PATH, INSTANCE_PATH, COMPUTE_PATH):
        return refuse(404, "Not found.")
    of_events = path == EVENTS_PATH
    allowed = ("GET", "POST") if of_events else ("GET",)
    if request.method not in allowed:
        return json_answer({"error": "Method not allowed."}, 405, allow=", ".join(allowed))
    versions = EVENT_VERSIONS if of_events else INSTANCE_VERSIONS
    if version and version not in versions and of_events:
        return refuse(404, "Not found. Invalid version requested")
    if version not in versions:
        newest = {"newest-versions": versions[::-1]}
        return refuse(400, "Bad request. A supported api-version is required.", **newest)
    header = request.headers.get("metadata", "").strip().lower()
    if header != "true" and not (of_events and version == PREVIEW):
        return refuse(400, "Bad request. The header Metadata: true is required.")
    return None


def refuse(status: int, message: str, **more: object) -> Answer:
    """Return an error answer with the reason."""
    return json_answer({"error": message, **more}, status)
