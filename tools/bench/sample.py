"""One VM and its events, as large as real ones are."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from bridge.events.builder import Reporter
from bridge.events.model import CloudEvent
from bridge.imds.diff import Change
from bridge.imds.document import ScheduledEvent
from bridge.imds.instance import Vm

CYCLE = 50_000  # events before a NotBefore comes again: no cache may make them cheaper than real ones
AT = datetime(2026, 3, 2, 9, 30, 0, 125_000, tzinfo=UTC)
INCARNATION = 7
_GROUP = "/subscriptions/00000000-0000-4000-8000-00000000001a/resourceGroups/shop"
REPORTER = Reporter(
    name="web_0",
    role="forward",
    epoch="5bb3c2c3b1f74a0e8b6b0f6e4b0c2a11",
    at=AT,
    next_number=lambda: 0,
    vm=Vm(
        name="web_0",
        vm_id="c7bd03f5-5d5c-4a6c-9a1f-3f7a0b1c2d3e",
        resource_id=f"{_GROUP}/providers/Microsoft.Compute/virtualMachineScaleSets/web/virtualMachines/0",
        location="westeurope",
        zone="1",
        scale_set="web",
        subscription_id="00000000-0000-4000-8000-00000000001a",
        resource_group="shop",
        tags={"env": "production", "team": "checkout"},
    ),
)


def raw_event(number: int = 0) -> dict[str, Any]:
    """Return an entry of a document."""
    not_before = AT + timedelta(seconds=900 + number % CYCLE)
    return {
        "EventId": f"4CAEA225-A741-474D-A72E-{number:012X}",
        "EventStatus": "Scheduled",
        "EventType": "Freeze",
        "ResourceType": "VirtualMachine",
        "Resources": ["web_0", "web_1"],
        "NotBefore": format_datetime(not_before, usegmt=True),
        "Description": "Virtual machine is being paused because of a memory-preserving Live Migration operation.",
        "EventSource": "Platform",
        "DurationInSeconds": 5,
    }


def change(number: int = 0) -> Change:
    """Return the first sight of an event, of which nothing has been read yet."""
    return Change(kind="scheduled", event=ScheduledEvent(raw=raw_event(number)))


def event(number: int = 0) -> CloudEvent:
    """Return an event that this VM publishes."""
    return REPORTER.scheduled_event(change(number), seen_before=0, incarnation=INCARNATION)
