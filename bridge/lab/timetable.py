"""When events start and end: the timetable of one simulated group. Pure but for the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Literal

from bridge.lab.httpd import LabError, check_seconds
from bridge.lab.rendering import instant_of

Approvals = Literal["immediate", "hold"]


@dataclass(kw_only=True)
class _Event:
    fields: dict[str, Any]  # as a document of the newest version shows them
    start_at: float | None  # time.monotonic(), as the others; None: not by itself
    complete_at: float | None = None
    impact_seconds: float | None = None  # None: stays Started until completed by hand
    approved: bool = False
    released: bool = False  # the platform is ready to start it once it is approved

    @property
    def pending(self) -> bool:
        return bool(self.fields["EventStatus"] == "Scheduled")

    @property
    def is_deletion(self) -> bool:
        return bool(self.fields["EventType"] == "Terminate")


class Timetable:
    """Keep the events of one group and let them start and end in time. The caller holds the lock.

    Every method that reads or changes events first does what the clock demands, so that a document never
    shows an event as Scheduled whose time has come.
    """

    def __init__(self, *, time_scale: float, approvals: Approvals, tell: Callable[[str], None]) -> None:
        self.time_scale = time_scale
        self.incarnation = 1
        self._ready = approvals == "immediate"
        self._tell = tell
        self._events: dict[str, _Event] = {}

    def schedule(
        self,
        *,
        fields: dict[str, Any],
        notice_seconds: float,
        impact_seconds: float | None,
    ) -> None:
        """Add an event; one whose EventStatus is Started starts now."""
        key = str(fields["EventId"]).casefold()
        if key in self._events:
            raise LabError(
                f"event_id given: {fields['EventId']!r}, which is in the document; expected: a new one"
            )
        event = _Event(fields=fields, start_at=None, impact_seconds=impact_seconds, released=self._ready)
        self._events[key] = event
        if event.pending:
            self._give_notice(event, notice_seconds)
            self._changed(event, f"is Scheduled, NotBefore {fields['NotBefore']}")
        else:
            self._begin(event)

    def start(self, event_id: str) -> None:
        """Start the event whether approved or not; one that has started stays so."""
        event = self._find(event_id)
        if event.pending:
            self._begin(event)

    def cancel(self, event_id: str) -> None:
        """Take a Scheduled event away."""
        event = self._find(event_id)
        if not event.pending:
            raise LabError(
                f"event given: {event_id!r}, which has started; expected: a Scheduled one, or complete it"
            )
        self._remove(event, "is canceled")

    def complete(self, event_id: str) -> None:
        """Take an event away, started or not."""
        self._remove(self._find(event_id), "is completed")

    def release(self, event_id: str) -> None:
        """Let a held event start: at once if it is approved, else as soon as it is."""
        self._find(event_id).released = True
        self.advance()

    def change(self, event_id: str, fields: Mapping[str, Any], *, quietly: bool = False) -> None:
        """Set any field; `notice_seconds` sets NotBefore; NotBefore moves the start where it is a time."""
        event = self._find(event_id)
        if "EventId" in fields:
            raise LabError("field given: EventId; expected: any other, since an event keeps its id")
        instant = instant_of(fields["NotBefore"]) if "NotBefore" in fields else None
        if "notice_seconds" in fields:
            check_seconds("notice_seconds", fields["notice_seconds"])
            self._give_notice(event, fields["notice_seconds"])
        elif instant is not None:
            event.start_at = time.monotonic() + instant.timestamp() - time.time()
        event.fields.update({name: value for name, value in fields.items() if name != "notice_seconds"})
        if not quietly:
            self._changed(event, f"changes: {', '.join(fields)}")

    def approve(self, vm: str, event_ids: Sequence[str]) -> str:
        """Note the VM's approvals, all or none; that of an event that has started changes nothing.

        Returns: why none is allowed, or an empty text.
        """
        self.advance()
        for event_id in event_ids:
            if refusal := self._refusal(vm, event_id):
                return refusal
        for event in [self._events[event_id.casefold()] for event_id in event_ids]:
            if not event.approved:
                event.approved = True
                self._tell(f"{_title(event)} is approved by {vm}")
        return ""

    def advance(self) -> None:
        """Do what the clock demands."""
        now = time.monotonic()
        for event in list(self._events.values()):
            if event.pending and self._may_start(event, now):
                self._begin(event)
            if event.complete_at is not None and event.complete_at <= now:
                self._remove(event, "is completed")

    def next_due(self) -> float | None:
        """Return when something happens by itself next, as time.monotonic()."""
        starts = [event.start_at for event in self._events.values() if event.pending]
        ends = [event.complete_at for event in self._events.values()]
        return min((at for at in starts + ends if at is not None), default=None)

    def fields(self) -> list[dict[str, Any]]:
        """Return the events as the newest version shows them."""
        return [dict(event.fields) for event in self._events.values()]

    def state(self) -> list[dict[str, Any]]:
        """Return the events with what no document shows."""
        return [
            {**event.fields, "approved": event.approved, "released": event.released}
            for event in self._events.values()
        ]

    def _refusal(self, vm: str, event_id: str) -> str:
        event = self._events.get(event_id.casefold())
        if event is None:
            return f"EventId {event_id} is unknown."
        own = vm.casefold() in [str(name).lstrip("_").casefold() for name in event.fields["Resources"]]
        if event.is_deletion and not own:
            return f"EventId {event_id} is the deletion of another VM."
        return ""

    def _may_start(self, event: _Event, now: float) -> bool:
        if event.start_at is not None and event.start_at <= now:
            return True
        if not (event.approved and event.released):
            return False
        # an unapproved deletion holds back the approved ones, which then go together
        return not event.is_deletion or all(
            other.approved for other in self._events.values() if other.pending and other.is_deletion
        )

    def _begin(self, event: _Event) -> None:
        event.fields.update(EventStatus="Started", NotBefore="")
        event.start_at = None
        if event.impact_seconds is not None:
            event.complete_at = time.monotonic() + event.impact_seconds / self.time_scale
        self._changed(event, "is Started")

    def _give_notice(self, event: _Event, notice_seconds: float) -> None:
        real_seconds = notice_seconds / self.time_scale
        event.start_at = time.monotonic() + real_seconds
        # whole seconds, rounded down: no event starts before the NotBefore that was shown
        event.fields["NotBefore"] = formatdate(math.floor(time.time() + real_seconds), usegmt=True)

    def _find(self, event_id: str) -> _Event:
        self.advance()
        event = self._events.get(str(event_id).casefold())
        if event is None:
            known = ", ".join(str(event.fields["EventId"]) for event in self._events.values())
            raise LabError(
                f"event given: {event_id!r}; expected one of the document: {known or 'it has none'}"
            )
        return event

    def _remove(self, event: _Event, what: str) -> None:
        del self._events[str(event.fields["EventId"]).casefold()]
        self._changed(event, what)

    def _changed(self, event: _Event, what: str) -> None:
        self.incarnation += 1
        self._tell(f"{_title(event)} {what}")


def _title(event: _Event) -> str:
    names = ", ".join(str(name) for name in event.fields["Resources"]) or "no VM"
    return f"{event.fields['EventType']} {event.fields['EventId']} of {names}"
