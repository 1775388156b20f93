"""Compare two documents: which events appeared, changed or ended, and how certain the end is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from bridge.imds.document import ADVISORY, SCHEDULED, STARTED, Document, ScheduledEvent, read_document
from bridge.runtime.json import Json

# An impact can be over within seconds: after a longer gap it is unknown whether it happened.
CONTINUOUS_SECONDS = 5.0
# IMDS lists events within five minutes of being turned on.
GRACE_SECONDS = 300.0

ChangeKind = Literal["scheduled", "started", "updated", "advised", "completed", "canceled", "ended"]
# Why it is unknown whether an event that is gone has happened.
EndReason = Literal[
    "Advisory",
    "UnknownStatus",
    "Restart",
    "Gap",
    "Reset",
    "IncarnationSkipped",
    "IncarnationUnknown",
    "EntryUnreadable",
    "NotBeforeUnknown",
    "NotBeforePassed",
    "ClockJumped",
]

_sorted_json = json.JSONEncoder(sort_keys=True, check_circular=False).encode


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happened to one event between two documents.

    `event` is as seen now, or as last seen if it is gone. `changed` names the properties that differ. Of an event
    that is gone, `end_reason` says why it is unknown whether it happened, and `vm_rebooted` whether this VM has
    rebooted since it was last seen (None if that is unknown).
    """

    kind: ChangeKind
    event: ScheduledEvent
    previous: ScheduledEvent | None = None
    changed: tuple[str, ...] = ()
    end_reason: EndReason | None = None
    vm_rebooted: bool | None = None

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the change in normal form: equal on every VM that saw the same change."""
        return sha256(_sorted_json([self.event.key, self.kind, self.event.content]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class MissingEvent:
    """An event that is missing from the document, and ends unless it comes back before `expires_at` (steady seconds).

    `reason` and `boot_id` are those of the time when it was first missed and last seen.
    """

    event: ScheduledEvent
    expires_at: float
    reason: EndReason | None = None
    boot_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is known after a usable answer: the document, and missing events that may still come back.

    `boot_id` is the machine's when the document was last seen.
    """

    document: Document | None = None
    missing: Mapping[str, MissingEvent] = field(default_factory=dict)
    boot_id: str = ""

    def dump(self) -> dict[str, Json]:
        """Return the watch as JSON."""
        missing = {
            key: {**asdict(missing), "event": missing.event.raw} for key, missing in self.missing.items()
        }
        document = self.document.raw if self.document else None
        return {"document": document, "missing": missing, "boot_id": self.boot_id}

    @classmethod
    def load(cls, saved: Mapping[str, Any] | None) -> Watch:
        """Read what `dump` returned; None is an empty watch."""
        if not saved:
            return cls()
        missing = {
            key: MissingEvent(**{**missing, "event": ScheduledEvent(raw=missing["event"])})
            for key, missing in saved["missing"].items()
        }
        raw = saved["document"]
        document = read_document(raw) if raw is not None else None
        return cls(document=document, missing=missing, boot_id=saved["boot_id"])

    @property
    def known(self) -> dict[str, ScheduledEvent]:
        """All known events by key, those that are missing last."""
        events = dict(self.document.events) if self.document else {}
        return {**events, **{key: missing.event for key, missing in self.missing.items()}}

    def is_due(self, at: float) -> bool:
        """Return whether the time to come back is over for some missing event at `at` (steady seconds)."""
        return any(missing.expires_at <= at for missing in self.missing.values())


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The circumstances in which a document was seen.

    Args:
        at: the time in steady seconds.
        wall: the wall clock, in seconds since 1970; None: it has not jumped, so that it agrees with `at`.
        gap_seconds: the time since the last usable answer, None if that was in another process.
        service_was_off: the call turned the service on, so events may be missing from the document.
        boot_id: the machine's, "" if unknown.
    """

    at: float
    gap_seconds: float | None
    wall: float | None = None
    service_was_off: bool = False
    boot_id: str = ""


def compare(previous: Watch, current: Document, observation: Observation) -> tuple[Watch, tuple[Change, ...]]:
    """Find what changed from `previous` to `current`, and what is known from now on.

    Args:
        previous: what was known before.
        current: the document as it is now.
        observation: how it was seen.

    Returns:
        What is known now, and the changes: first those of the events in the document, in its order, then those of the
        events that are gone.
    """
    known = previous.known
    present = [
        change
        for key, event in current.events.items()
        if (change := _transition(known.get(key), event)) is not None
    ]
    gone = {
        key: previous.missing.get(key) or _missed(event, previous, current, observation)
        for key, event in known.items()
        if key not in current.events
    }
    missing = {key: one for key, one in gone.items() if observation.at < one.expires_at}
    ends = [_end(one, observation) for key, one in gone.items() if key not in missing]
    watch = Watch(document=current, missing=missing, boot_id=observation.boot_id)
    return watch, (*present, *ends)


def _missed(
    event: ScheduledEvent, previous: Watch, current: Document, observation: Observation
) -> MissingEvent:
    """Return what is known of an event that is missing for the first time."""
    before = previous.document.incarnation if previous.document else None
    is_incomplete = observation.service_was_off or is_reset(before, current.incarnation)
    return MissingEvent(
        event=event,
        expires_at=observation.at + (GRACE_SECONDS if is_incomplete and event.status != STARTED else 0.0),
        reason="Reset" if is_incomplete else _doubt(event, previous, current, observation),
        boot_id=previous.boot_id,
    )


def _transition(before: ScheduledEvent | None, now: ScheduledEvent) -> Change | None:
    changed = _differences(before, now) if before else ()
    if before and not changed:
        return None
    return Change(kind=_kind(before, now), event=now, previous=before, changed=changed)


def _kind(before: ScheduledEvent | None, now: ScheduledEvent) -> ChangeKind:
    if now.status == ADVISORY:
        return "advised"
    if before and before.status == now.status:
        return "updated"
    if now.status == STARTED:
        return "started"
    if now.status == SCHEDULED and not (before and before.status == STARTED):
        return "scheduled"
    return "updated"


def _differences(before: ScheduledEvent, now: ScheduledEvent) -> tuple[str, ...]:
    old, new = before.content, now.content
    return tuple(name for name in dict.fromkeys((*now.raw, *before.raw)) if old.get(name) != new.get(name))


def _end(missing: MissingEvent, observation: Observation) -> Change:
    reason: EndReason | None = "Advisory" if missing.event.status == ADVISORY else missing.reason
    kind: ChangeKind = "ended" if reason else "canceled"
    if missing.event.status == STARTED:
        kind = "completed"
    before, now = missing.boot_id, observation.boot_id
    return Change(
        kind=kind,
        event=missing.event,
        previous=missing.event,
        end_reason=reason if kind == "ended" else None,
        vm_rebooted=before != now if before and now else None,
    )


def is_reset(before: int | None, now: int | None) -> bool:
    """Return whether an incarnation after another one shows that IMDS has begun anew; None is unknown."""
    return before is not None and now is not None and now < before


def _doubt(
    event: ScheduledEvent, previous: Watch, current: Document, observation: Observation
) -> EndReason | None:
    """Return why it is unknown whether an event happened that is gone; None if it surely did not."""
    if event.status != SCHEDULED:
        return "UnknownStatus"
    if observation.gap_seconds is None:
        return "Restart"
    if observation.gap_seconds > CONTINUOUS_SECONDS:
        return "Gap"
    return _document_doubt(previous, current) or _start_doubt(event, observation)


def _document_doubt(previous: Watch, current: Document) -> EndReason | None:
    before = previous.document
    if before is None or before.incarnation is None or current.incarnation is None:
        return "IncarnationUnknown"
    # The event may be in an entry that became unreadable.
    if len(current.invalid_entries) > len(before.invalid_entries):
        return "EntryUnreadable"
    return None if current.incarnation - before.incarnation in (0, 1) else "IncarnationSkipped"


def _start_doubt(event: ScheduledEvent, observation: Observation) -> EndReason | None:
    if event.not_before is None:
        return "NotBeforeUnknown"
    not_before = event.not_before.timestamp()
    wall = observation.at if observation.wall is None else observation.wall
    if max(observation.at, wall) < not_before:
        return None
    return "NotBeforePassed" if min(observation.at, wall) >= not_before else "ClockJumped"
