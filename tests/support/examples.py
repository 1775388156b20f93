"""Events to show: of every type, and Scheduled Events with whatever properties."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from bridge.formats.notice import Notice, notice
from bridge.formats.samples import check_event
from bridge.imds.diff import Change, ChangeKind
from tests.support import samples
from tests.support.receivers import NOW

BERLIN = ZoneInfo("Europe/Berlin")
EVENTS = {
    stored.type.removeprefix("io.imdsbridge.").removesuffix(".v1"): stored.envelope
    for stored in (*samples.samples(NOW), check_event(NOW, vm="web-0"))
}
EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")


def scheduled(kind: ChangeKind, **properties: Any) -> dict[str, Any]:
    """Make the CloudEvent of a Scheduled Event, seen now, for the first time."""
    event = samples.scheduled_event(NOW, **properties)
    return samples.stored(samples.change_event(Change(kind=kind, event=event), NOW)).envelope


def updated(before: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """Make the CloudEvent of a Scheduled Event that had the properties `before`."""
    event = samples.scheduled_event(NOW, **properties)
    old = samples.scheduled_event(NOW, **before)
    changed = tuple(name for name in event.raw if event.raw[name] != old.raw.get(name))
    change = Change(kind="updated", event=event, previous=old, changed=changed)
    return samples.stored(samples.change_event(change, NOW)).envelope


def with_data(event: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {**event, "data": {**event["data"], **data}}


def in_(**span: float) -> str:
    """Write a NotBefore that is so far away."""
    return samples.http_date(NOW + timedelta(**span))


def written(event: dict[str, Any], *, now: datetime = NOW, zone: Any = BERLIN) -> Notice:
    return notice(event, now=now, zone=zone)


def fields(message: Notice) -> dict[str, str]:
    return {field.label: field.text for field in (*message.fields, *message.details)}
