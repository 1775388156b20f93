"""Decide when the events of one simulated group start and end. No I/O apart from the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

from bridge.lab.httpd import LabError, check_seconds


@dataclass(kw_only=True)
class _Event:
    fields: dict[str, Any]  # as a document of the newest version shows them
    start_at: float | None = None  # time.monotonic(), like complete_at; None: only by hand
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
    """Keep the events of one group, and start and end them on time. The caller holds the lock.

    Every method that reads or changes events first applies what is due, so that a document never shows an
    event as Scheduled after its start.
    """

    def __init__(self, time_scale: float, report: Callable[[str], None]) -> None:
        """Start empty.

        Args:
            time_scale: how many lab seconds pass in one real second.
            report: called with a sentence for everything that happens to an event.
        """
        self.time_scale = time_scale
        self.incarnation = 1
        self._report = report
        self._events: dict[str, _Event] = {}

    def schedule(
        self, fields: dict[str, Any], *, notice_seconds: float, impact_seconds: float | None, hold: bool
    ) -> None:
        """Add an event, and start it if its EventStatus is Started.

        Args:
            fields: as a document of the newest version shows them.
            notice_seconds: lab seconds until NotBefore.
            impact_seconds: lab seconds until it completes; None: only by hand.
            hold: whether an approval starts it only after `release`.
        """
        key = str(fields["EventId"]).casefold()
        if key in self._events:
            raise LabError(
                f"event_id given: {fields['EventId']!r}, which is in the document; expected: a new one"
            )
        event = self._events[key] = _Event(fields=fields, impact_seconds=impact_seconds, released=not hold)
        if event.pending:
            self._give_notice(event, notice_seconds)
            self._changed(event, f"is Scheduled, NotBefore {fields['NotBefore']}")
        elif fields["EventStatus"] == "Advisory":
            self._changed(event, "is Advisory")
        else:
            self._begin(event)

    def start(self, event_id: str) -> None:
        """Start the event, approved or not; does nothing if it has started."""
        event = self._find(event_id)
        if event.pending:
            self._begin(event)

    def cancel(self, event_id: str) -> None:
        """Cancel a Scheduled event."""
        event = self._find(event_id)
        if not event.pending:
            raise LabError(
                f"event given: {event_id!r}, which has started; expected: a Scheduled one, or complete it"
            )
        self._remove(event, "is canceled")

    def complete(self, event_id: str) -> None:
        """Complete an event, started or not."""
        self._remove(self._find(event_id), "is completed")

    def release(self, event_id: str) -> None:
        """Stop holding an event: start it now if it is approved, else when it is approved."""
        self._find(event_id).released = True
        self.advance()

    def change(self, event_id: str, fields: Mapping[str, Any]) -> None:
        """Change an event.

        Args:
            event_id: in any letter case.
            fields: new values; `notice_seconds` sets NotBefore, and moves the start.
        """
        event = self._find(event_id)
        if "notice_seconds" in fields:
            check_seconds("notice_seconds", fields["notice_seconds"])
            self._give_notice(event, fields["notice_seconds"])
        event.fields.update({name: value for name, value in fields.items() if name != "notice_seconds"})
        self._changed(event, f"changes: {', '.join(fields)}")

    def approve(self, vm: str, event_ids: Sequence[str]) -> str:
        """Record the VM's approvals, all or none; approving a started event changes nothing.

        Returns: why they are refused, or an empty text.
        """
        self.advance()
        for event_id in event_ids:
            if refusal := self._refusal(vm, event_id):
                return refusal
        for event in [self._events[event_id.casefold()] for event_id in event_ids]:
            if not event.approved:
                event.approved = True
                self._report(f"{_title(event)} is approved by {vm}")
        return ""

    def advance(self) -> None:
        """Start and complete the events that are due."""
        now = time.monotonic()
        for event in list(self._events.values()):
            if event.pending and self._may_start(event, now):
                self._begin(event)
            if event.complete_at is not None and event.complete_at <= now:
                self._remove(event, "is completed")

    def next_due(self) -> float | None:
        """Return when the next event starts or completes, as time.monotonic()."""
        starts = [event.start_at for event in self._events.values() if event.pending]
        ends = [event.complete_at for event in self._events.values()]
        return min((at for at in starts + ends if at is not None), default=None)

    def fields(self) -> list[dict[str, Any]]:
        """Return the events as the newest version shows them."""
        return [dict(event.fields) for event in self._events.values()]

    def state(self) -> list[dict[str, Any]]:
        """Return the events, and whether they are approved and released."""
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
        # an unapproved deletion delays the approved ones, which then start together
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
        # whole seconds, rounded down: no event starts before the published NotBefore
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
        self._report(f"{_title(event)} {what}")


def _title(event: _Event) -> str:
    names = ", ".join(str(name) for name in event.fields["Resources"]) or "no VM"
    return f"{event.fields['EventType']} {event.fields['EventId']} of {names}"
