"""Compare two documents: which events appeared, changed or ended, and how sure one can be of the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Literal

from bridge.imds.document import SCHEDULED, STARTED, Document, ScheduledEvent, read_document

# An impact can be over within seconds: whoever looked away longer cannot know that it did not happen.
CONTINUOUS_SECONDS = 5.0
# IMDS lists events within five minutes of being turned on.
GRACE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The circumstances in which a document was seen.

    `at` is the time in steady seconds. `gap_seconds` is how long before it the last good answer came, None
    if that was in another process. `service_was_off`: the call turned the service on, so events may be missing.
    """

    at: float
    gap_seconds: float | None
    service_was_off: bool = False


def compare(previous: Watch, current: Document, observation: Observation) -> tuple[Watch, tuple[Change, ...]]:
    """Find what changed from `previous` to `current`, and what is known from now on.

    Events that stand in the document come first, in its order; then those that are gone.
    """
    known = {**_events(previous), **{key: missing.event for key, missing in previous.missing.items()}}
    changes = [
        change
        for key, event in current.events.items()
        if (change := _transition(known.get(key), event)) is not None
    ]
    continuous = _is_continuous(previous, current, observation)
    incomplete = observation.service_was_off or _is_reset(previous, current)
    missing: dict[str, MissingEvent] = {}
    for key, event in known.items():
        if key in current.events:
            continue
        if key not in previous.missing and incomplete:
            missing[key] = MissingEvent(event=event, expires_at=observation.at + GRACE_SECONDS)
        elif key in previous.missing and observation.at < previous.missing[key].expires_at:
            missing[key] = previous.missing[key]
        else:
            surely_unstarted = continuous and key not in previous.missing
            changes.append(
                Change(kind=_end(event, surely_unstarted=surely_unstarted), event=event, previous=event)
            )
    return Watch(document=current, missing=missing), tuple(changes)


def is_due(watch: Watch, at: float) -> bool:
    """Tell whether an event that was waited for has now to be given up."""
    return any(missing.expires_at <= at for missing in watch.missing.values())


def _events(watch: Watch) -> dict[str, ScheduledEvent]:
    return dict(watch.document.events) if watch.document else {}


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


def _end(event: ScheduledEvent, *, surely_unstarted: bool) -> ChangeKind:
    if event.status == STARTED:
        return "completed"
    return "canceled" if event.status == SCHEDULED and surely_unstarted else "ended"


def _is_reset(previous: Watch, current: Document) -> bool:
    before = previous.document.incarnation if previous.document else None
    return before is not None and current.incarnation is not None and current.incarnation < before


def _is_continuous(previous: Watch, current: Document, observation: Observation) -> bool:
    if observation.gap_seconds is None or observation.gap_seconds > CONTINUOUS_SECONDS:
        return False
    before = previous.document
    if before is None or before.incarnation is None or current.incarnation is None:
        return False
    if len(current.invalid_entries) > len(
        before.invalid_entries
    ):  # the event may hide in an entry that became unreadable
        return False
    return current.incarnation - before.incarnation in (0, 1)


# IMDS sends GUIDs. Longer ids, or ids with blanks or control characters, could not stand in an attribute.
_sorted_json = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True, kw_only=True)
class MissingEvent:
    """An event that vanished when IMDS started its count anew, and may come back until `expires_at` (steady s)."""

    event: ScheduledEvent
    expires_at: float


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is known after a good answer: the document, and events that are missing from it but not given up."""

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


ChangeKind = Literal["scheduled", "started", "updated", "completed", "canceled", "ended"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one event between two documents.

    `event` is as now seen, or as last seen when it is gone. `changed` names the properties that differ.
    """

    kind: ChangeKind
    event: ScheduledEvent
    previous: ScheduledEvent | None = None
    changed: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Hash what happened to which event, in the normal form: equal on every VM that saw the same."""
        told = [self.event.key, self.kind, self.event.content]
        return sha256(_sorted_json(told).encode()).hexdigest()
