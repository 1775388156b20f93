"""Compare two documents: which events appeared, changed or ended, and how certain the end is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal

from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, read_document

# An impact can be over within seconds: after a longer gap it is unknown whether it happened.
CONTINUOUS_SECONDS = 5.0
# IMDS lists events within five minutes of being turned on.
GRACE_SECONDS = 300.0

ChangeKind = Literal["scheduled", "started", "updated", "completed", "canceled", "ended"]

_sorted_json = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happened to one event between two documents.

    `event` is as seen now, or as last seen if it is gone. `changed` names the properties that differ.
    """

    kind: ChangeKind
    event: ScheduledEvent
    previous: ScheduledEvent | None = None
    changed: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the change in normal form: equal on every VM that saw the same change."""
        return sha256(_sorted_json([self.event.key, self.kind, self.event.content]).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class MissingEvent:
    """An event that is missing since IMDS restarted, and may come back until `expires_at` (steady seconds)."""

    event: ScheduledEvent
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is known after a usable answer: the document, and missing events that may still come back."""

    document: Document | None = None
    missing: Mapping[str, MissingEvent] = field(default_factory=dict)

    def dump(self) -> str:
        """Write the watch as JSON."""
        missing = {
            key: {"raw": missing.event.raw, "expires_at": missing.expires_at}
            for key, missing in self.missing.items()
        }
        return json.dumps({"document": self.document.raw if self.document else None, "missing": missing})

    @classmethod
    def load(cls, text: str) -> Watch:
        """Read what `dump` wrote; an empty text is an empty watch."""
        if not text:
            return cls()
        saved = json.loads(text)
        missing = {
            key: MissingEvent(event=ScheduledEvent(raw=missing["raw"]), expires_at=missing["expires_at"])
            for key, missing in saved["missing"].items()
        }
        raw = saved["document"]
        return cls(document=read_document(raw) if raw is not None else None, missing=missing)

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

    `at` is the time in steady seconds. `gap_seconds` is the time since the last usable answer, None if that was in
    another process. `service_was_off`: the call turned the service on, so events may be missing from the document.
    """

    at: float
    gap_seconds: float | None
    service_was_off: bool = False


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
    missing = _missing(previous, current, observation)
    gone = [
        _end(
            event,
            surely_unstarted=key not in previous.missing and _is_continuous(previous, current, observation),
        )
        for key, event in known.items()
        if key not in current.events and key not in missing
    ]
    return Watch(document=current, missing=missing), (*present, *gone)


def _missing(previous: Watch, current: Document, observation: Observation) -> dict[str, MissingEvent]:
    """Return the events that are not in the document but may come back."""
    missing = {
        key: event
        for key, event in previous.missing.items()
        if key not in current.events and observation.at < event.expires_at
    }
    if observation.service_was_off or _is_reset(previous, current):
        expires_at = observation.at + GRACE_SECONDS
        for key, event in previous.known.items():
            if key not in current.events and key not in previous.missing:
                missing[key] = MissingEvent(event=event, expires_at=expires_at)
    return missing


def _transition(before: ScheduledEvent | None, now: ScheduledEvent) -> Change | None:
    changed = _differences(before, now) if before else ()
    if before and not changed:
        return None
    return Change(kind=_kind(before, now), event=now, previous=before, changed=changed)


def _kind(before: ScheduledEvent | None, now: ScheduledEvent) -> ChangeKind:
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


def _end(event: ScheduledEvent, *, surely_unstarted: bool) -> Change:
    kind: ChangeKind = "ended"
    if event.status == STARTED:
        kind = "completed"
    elif event.status == SCHEDULED and surely_unstarted:
        kind = "canceled"
    return Change(kind=kind, event=event, previous=event)


def _is_reset(previous: Watch, current: Document) -> bool:
    before = previous.document.incarnation if previous.document else None
    return before is not None and current.incarnation is not None and current.incarnation < before


def _is_continuous(previous: Watch, current: Document, observation: Observation) -> bool:
    if observation.gap_seconds is None or observation.gap_seconds > CONTINUOUS_SECONDS:
        return False
    before = previous.document
    if before is None or before.incarnation is None or current.incarnation is None:
        return False
    # The event may be in an entry that became unreadable.
    if len(current.invalid_entries) > len(before.invalid_entries):
        return False
    return current.incarnation - before.incarnation in (0, 1)
