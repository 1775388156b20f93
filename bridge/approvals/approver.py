"""IMDS as the listener uses it: a document of the last second, and starts, within its share of IMDS's limit."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from bridge.approvals.policy import Decision
from bridge.errors import ImdsError
from bridge.imds.document import Document, ScheduledEvent, parse_document
from bridge.imds.port import Imds
from bridge.runtime.clock import Clock

log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 1.0  # how often the document is read, for all commands together
FRESH_SECONDS = 2.0  # how old a document may be that is judged by
PAUSE_SECONDS = 1.0  # after IMDS has failed, where it does not say how long
CALLS_PER_SECOND = 3  # of the five that IMDS allows this VM; `forward` needs one or two


@dataclass(frozen=True, kw_only=True)
class ApprovalResult:
    """What became of a POST: decisions by EventId in lower case; `untouched`: IMDS surely did nothing."""

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    untouched: bool = False


class ImdsApprover:
    """Reads the document and has events started. It is used from one thread, but for `trouble`."""

    def __init__(self, imds: Imds, *, clock: Clock) -> None:
        self._imds = imds
        self._clock = clock
        self._document: Document | None = None
        self.read_at = -math.inf
        self._good_at = -math.inf
        self._troubles = {"document": "", "POST": ""}
        self._calls: deque[float] = deque(maxlen=CALLS_PER_SECOND)
        self._paused_until = -math.inf
        self._alone: dict[str, None] = {}  # what IMDS has refused together with others
        self.good_time: datetime | None = None

    @property
    def base(self) -> str:
        """Where IMDS is."""
        return self._imds.base

    def document(self) -> Document | None:
        """Return a document of the last second, as far as IMDS may be asked; None while it gives none."""
        now = self._clock.monotonic()
        if now - self.read_at >= READ_EVERY_SECONDS and self.may_call():
            self.read_at = now
            try:
                self._document = parse_document(self._imds.document())
            except (ImdsError, ValueError) as error:
                self._note_trouble("document", error)
            else:
                self._note_trouble("document", None)
                self._good_at, self.good_time = self.read_at, self._clock.now()
        is_good = self._good_at == self.read_at and now - self._good_at < FRESH_SECONDS
        return self._document if is_good else None

    def may_call(self) -> bool:
        """Keep to the share of IMDS's limit, and to the pauses that it asks for; notes the call."""
        now = self._clock.monotonic()
        is_over = len(self._calls) == CALLS_PER_SECOND and now - self._calls[0] < 1.0
        if is_over or now < self._paused_until:
            return False
        self._calls.append(now)
        return True

    @property
    def trouble(self) -> str:
        """What is wrong with IMDS, "" when nothing is."""
        return next((trouble for trouble in self._troubles.values() if trouble), "")

    def _note_trouble(self, call: str, error: Exception | None) -> None:
        """Note how a kind of call went, and say so when it changes."""
        before = self.trouble
        self._troubles[call] = "" if error is None else str(error)
        if error is not None:
            pause = error.retry_after_seconds if isinstance(error, ImdsError) else None
            self._paused_until = self._clock.monotonic() + max(PAUSE_SECONDS, pause or 0.0)
        if self.trouble and not before:
            log.warning("commands wait for IMDS: %s", self.trouble)
        elif before and not self.trouble:
            log.info("IMDS answers again; waiting commands go on")

    def choose(self, new: dict[str, ScheduledEvent]) -> list[ScheduledEvent]:
        """Choose what goes into one POST: everything, but what IMDS has refused in company goes alone."""
        self._alone = {key: None for key in self._alone if key in new}
        together = [event for key, event in new.items() if key not in self._alone]
        return together or [new[key] for key in list(self._alone)[:1]]

    def post(self, events: Sequence[ScheduledEvent]) -> ApprovalResult:
        """Have IMDS start the events; say what it said of each, nothing of those it gave no answer to."""
        try:
            self._approve(events)
        except ImdsError as error:
            return self._refused(events, error)
        self._note_trouble("POST", None)
        approved = {
            event.key: Decision(outcome="accepted", reason="approved", event=event) for event in events
        }
        return ApprovalResult(decisions=approved)

    def _refused(self, events: Sequence[ScheduledEvent], error: ImdsError) -> ApprovalResult:
        keys = [event.key for event in events]
        untouched = error.status is not None and error.status < 500  # noqa: PLR2004 - refused: nothing was done
        if error.status != 400:  # noqa: PLR2004 - Bad Request: what was asked for is wrong
            self._note_trouble("POST", error)
            self._alone = {**{key: None for key in self._alone if key not in keys}, **self._alone}
            return ApprovalResult(untouched=untouched)
        self._note_trouble("POST", None)
        if len(events) > 1:
            self._alone |= dict.fromkeys(keys)
            return ApprovalResult(untouched=True)
        refused = Decision(outcome="failed", reason="imds_refused", detail=str(error), event=events[0])
        return ApprovalResult(decisions={keys[0]: refused}, untouched=True)

    def _approve(self, events: Sequence[ScheduledEvent]) -> None:
        incarnation = self._document.raw.get("DocumentIncarnation") if self._document else None
        for event in events:
            names = ", ".join(event.resources)
            log.info(
                "approving %s of %s", event.raw.get("EventType"), names, extra={"event_id": event.event_id}
            )
        self._imds.approve([event.event_id for event in events], incarnation=incarnation)
