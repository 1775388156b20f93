"""Events to show, made by the code that makes the real ones: of every type, and with whatever properties."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import count
from typing import Any
from zoneinfo import ZoneInfo

from bridge import __version__
from bridge.events.builder import Reporter
from bridge.events.model import CloudEvent, StoredEvent, structured
from bridge.formats.notice import Notice, notice
from bridge.formats.samples import make_test_event
from bridge.imds.diff import Change, ChangeKind
from bridge.imds.document import Document, ScheduledEvent
from bridge.runtime.time import iso_utc
from tests.support.diff import VM, entry

NOW = datetime(2026, 11, 20, 13, 3, tzinfo=UTC)
BERLIN = ZoneInfo("Europe/Berlin")
EVENT_TYPES = ("Freeze", "Reboot", "Redeploy", "Preempt", "Terminate")
EVENT_ID = "602d9444-d2cd-49c7-8624-8643e7171297"
REPORTER = Reporter(
    name=VM.name,
    role="forward",
    epoch="c6c5a3b0-7a0e-4c67-9f52-6f1f2f3a9d11",
    at=NOW,
    next_number=lambda: 0,
    vm=VM,
    session="{resource_group}.{vm}",
)


def reporting(by: Reporter, at: datetime, sequence: int = 0) -> Reporter:
    """Return a reporter as of an instant, whose next event has this number."""
    return replace(by, at=at, next_number=lambda: sequence)


def samples(at: datetime) -> list[StoredEvent]:
    """Return an event of every type, as if seen at `at`: a reboot of two VMs in 15 minutes, and what follows."""
    return [stored(event) for event in events(at)]


def events(
    at: datetime,
    *,
    by: Reporter = REPORTER,
    reason: str = "no answer within 10 s",
    **properties: Any,
) -> list[CloudEvent]:
    """Return an event of every type by a reporter, with `properties` of the Scheduled Event and this reason."""
    counting = replace(by, at=at, next_number=count(1).__next__)
    return [
        *_of_a_reboot(at, by, properties),
        *_of_the_vm(at, counting, reason, properties),
        *_receipts(at, counting, reason),
    ]


def stored(event: CloudEvent) -> StoredEvent:
    """Return an event in the form that sinks take."""
    return StoredEvent(seq=1, id=event.id, type=event.type, stored_at=0.0, body=structured(event))


def scheduled_event(at: datetime, **properties: Any) -> ScheduledEvent:
    """Make an event as IMDS shows it: a reboot by the platform in 15 minutes, changed by `properties`."""
    usual = {
        "Resources": ["web-0", "web-1"],
        "NotBefore": http_date(at + timedelta(minutes=15)),
        "Description": "Host server is undergoing maintenance.",
    }
    return ScheduledEvent(raw=entry(EVENT_ID, **{**usual, **properties}))


def http_date(instant: datetime) -> str:
    """Write an instant as IMDS does."""
    return format_datetime(instant, usegmt=True)


def change_event(change: Change, at: datetime, by: Reporter = REPORTER) -> CloudEvent:
    """Make the event for a change."""
    return reporting(by, at).scheduled_event(change, seen_before=0, incarnation=12)


def _of_a_reboot(at: datetime, by: Reporter, properties: Mapping[str, Any]) -> Iterator[CloudEvent]:
    first = scheduled_event(at, **properties)
    sooner = scheduled_event(at, **properties, NotBefore=http_date(at + timedelta(minutes=10)))
    started = scheduled_event(at, **properties, EventStatus="Started", NotBefore="")
    advised = scheduled_event(at, **properties, EventStatus="Advisory", NotBefore="")
    life: dict[ChangeKind, tuple[ScheduledEvent, ScheduledEvent | None, tuple[str, ...]]] = {
        "scheduled": (first, None, ()),
        "started": (started, first, ("EventStatus", "NotBefore")),
        "updated": (sooner, first, ("NotBefore",)),
        "advised": (advised, None, ()),
        "completed": (started, started, ()),
        "canceled": (first, first, ()),
        "ended": (first, first, ()),
    }
    for kind, (event, previous, changed) in life.items():
        change = Change(kind=kind, event=event, previous=previous, changed=changed)
        if kind == "ended":
            change = replace(change, end_reason="Restart", vm_rebooted=True)
        yield change_event(change, at, by)


def _of_the_vm(
    at: datetime, by: Reporter, reason: str, properties: Mapping[str, Any]
) -> Iterator[CloudEvent]:
    event = scheduled_event(at, **properties)
    raw = {"DocumentIncarnation": 12, "Events": [event.raw]}
    document = Document(raw=raw, incarnation=12, events={event.key: event})
    scheduled = change_event(Change(kind="scheduled", event=event), at, by)
    before = at - timedelta(seconds=42)
    yield by.document(document, previous=None, event_ids=[scheduled.id])
    yield by.unreachable(since=before, reason=reason, cause="NoAnswer")
    yield by.recovered(since=before, cause="NoAnswer")
    yield by.heartbeat(reason="Hourly", version=__version__, backlog={"ops": 0})
    yield by.loss(reason="SizeLimit", count=20, sink="ops", oldest=before.timestamp(), newest=at.timestamp())


def _receipts(at: datetime, by: Reporter, reason: str) -> Iterator[CloudEvent]:
    outcomes = {
        "accepted": ("approved", ""),
        "rejected": ("denied", "no rule allows it"),
        "failed": ("imds_unavailable", reason),
    }
    for outcome, (name, detail) in outcomes.items():
        yield by.receipt(
            outcome=outcome,
            key="order-17",
            command_id="order-17",
            event_id=EVENT_ID,
            resources=["web-0", "web-1"],
            data={
                "Reason": name,
                "Detail": detail,
                "Command": {"Id": "order-17", "RequestedBy": "ops@example.org", "Reason": "drained"},
                "EventType": "Reboot",
                "NotBeforeUtc": iso_utc(at + timedelta(minutes=15)),
                "DryRun": False,
            },
        )
    event = scheduled_event(at)
    since, detail = at - timedelta(hours=1), "recover /usr/local/bin/recover: exit code 1"
    yield by.prepared(event, key="stay", seconds=12.5)
    yield by.of_work("recovered", event, since, {"DurationSeconds": 3.2})
    more = {"Reason": "RecoverFails", "Detail": detail}
    yield by.of_work("outofwork", event, since, more)


# CloudEvents as formats get them, seen at NOW.

EVENTS = {
    event.type.removeprefix("io.imdsbridge.").removesuffix(".v1"): event.envelope
    for event in (*samples(NOW), make_test_event(NOW, vm="web-0"))
}


def scheduled(kind: ChangeKind, **properties: Any) -> dict[str, Any]:
    """Make the event of a Scheduled Event that is seen for the first time."""
    change = Change(kind=kind, event=scheduled_event(NOW, **properties))
    return stored(change_event(change, NOW)).envelope


def updated(before: dict[str, Any], **properties: Any) -> dict[str, Any]:
    """Make the event of a Scheduled Event that had the properties `before`."""
    event, old = scheduled_event(NOW, **properties), scheduled_event(NOW, **before)
    changed = tuple(name for name in event.raw if event.raw[name] != old.raw.get(name))
    change = Change(kind="updated", event=event, previous=old, changed=changed)
    return stored(change_event(change, NOW)).envelope


def with_data(event: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {**event, "data": {**event["data"], **data}}


def in_(**span: float) -> str:
    """Write a NotBefore that is so far away."""
    return http_date(NOW + timedelta(**span))


def written(event: dict[str, Any], *, now: datetime = NOW, zone: Any = BERLIN) -> Notice:
    return notice(event, now=now, zone=zone)


def fields(message: Notice) -> dict[str, str]:
    return {field.label: field.text for field in (*message.fields, *message.details)}
