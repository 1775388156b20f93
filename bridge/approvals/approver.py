"""Read the document and POST approvals, within the listener's share of IMDS's request limit.

I/O: IMDS, the clock and the log.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from bridge.approvals.policy import Decision
from bridge.errors import ImdsError
from bridge.imds.client import ImdsClient
from bridge.imds.document import Document, ScheduledEvent, parse_document
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 1.0  # one document for all commands together
FRESH_SECONDS = 2.0  # how old a document may be for a decision
PAUSE_SECONDS = 1.0  # after a failure without Retry-After
CALLS_PER_SECOND = 3  # of the five that IMDS allows this VM; `forward` needs one or two


@dataclass(frozen=True, kw_only=True)
class ApprovalResult:
    """What became of a POST.

    `decisions` are by EventId in lower case. `not_applied`: IMDS refused the request, so nothing was approved.
    """

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    not_applied: bool = False


class ImdsApprover:
    """Reads the document and POSTs approvals, for one thread; `last_error` may be read from any."""

    def __init__(self, imds: ImdsClient, *, clock: Clock) -> None:
        self._imds = imds
        self._clock = clock
        self._document: Document | None = None
        self.read_at = self._wanted_at = -math.inf
        self._errors = {"document": "", "POST": ""}
        self._calls: deque[float] = deque(maxlen=CALLS_PER_SECOND)
        self._paused_until = -math.inf
        self._post_alone: dict[str, None] = {}  # EventIds that IMDS has refused together with others
        self.good_time: datetime | None = None

    @property
    def base(self) -> str:
        """Where IMDS is."""
        return self._imds.base

    def document(self) -> Document | None:
        """Return a document of the last two seconds; None while IMDS cannot be asked or does not answer."""
        now = self._clock.monotonic()
        is_due = now - self.read_at >= READ_EVERY_SECONDS
        if (is_due or self.newer_in_seconds == 0) and self.may_call():
            self.read_at, self._document = now, self._read()
        return self._document if now - self.read_at < FRESH_SECONDS else None

    def want_newer(self, than: float) -> None:
        """Have the document read again, if it was read before that instant, as soon as a call is to spare."""
        self._wanted_at = max(self._wanted_at, than)

    @property
    def newer_in_seconds(self) -> float:
        """How long until the document that is wanted may be read, with a call left for its POST; inf for none."""
        if self.read_at >= self._wanted_at:
            return math.inf
        now = self._clock.monotonic()
        calls = [-math.inf] * CALLS_PER_SECOND + [*self._calls]
        return max(0.0, self._paused_until - now, calls[1 - CALLS_PER_SECOND] + 1.0 - now)

    def _read(self) -> Document | None:
        try:
            document = parse_document(self._imds.document())
        except (ImdsError, ValueError) as error:
            self._note_result("document", error)
            return None
        self._note_result("document", None)
        self.good_time = self._clock.now()
        return document

    def may_call(self) -> bool:
        """Return whether IMDS may be called now, by its limit and its pauses, and count the call."""
        now = self._clock.monotonic()
        is_over = len(self._calls) == CALLS_PER_SECOND and now - self._calls[0] < 1.0
        if is_over or now < self._paused_until:
            return False
        self._calls.append(now)
        return True

    @property
    def last_error(self) -> str:
        """The last error of IMDS that has not been followed by a good answer, "" if there is none."""
        return next((error for error in self._errors.values() if error), "")

    def _note_result(self, call: str, error: Exception | None) -> None:
        """Remember how a kind of call went; log when that changes."""
        before = self.last_error
        self._errors[call] = "" if error is None else str(error)
        if error is not None:
            pause = error.retry_after_seconds if isinstance(error, ImdsError) else None
            self._paused_until = self._clock.monotonic() + max(PAUSE_SECONDS, pause or 0.0)
        if self.last_error and not before:
            log.warning("commands wait for IMDS: %s", self.last_error)
        elif before and not self.last_error:
            log.info("IMDS answers again; waiting commands go on")

    def choose(self, new: dict[str, ScheduledEvent]) -> list[ScheduledEvent]:
        """Choose the events of one POST: all, except that those that IMDS refused together go one by one."""
        self._post_alone = {key: None for key in self._post_alone if key in new}
        together = [event for key, event in new.items() if key not in self._post_alone]
        return together or [new[key] for key in list(self._post_alone)[:1]]

    def post(self, events: Sequence[ScheduledEvent]) -> ApprovalResult:
        """POST the approval of events; return what is known about each."""
        try:
            self._approve(events)
        except ImdsError as error:
            return self._refused(events, error)
        self._note_result("POST", None)
        approved = {
            event.key: Decision(outcome="accepted", reason="approved", event=event) for event in events
        }
        return ApprovalResult(decisions=approved)

    def _refused(self, events: Sequence[ScheduledEvent], error: ImdsError) -> ApprovalResult:
        keys = [event.key for event in events]
        not_applied = error.status is not None and error.status < 500  # noqa: PLR2004 - after a 5xx the approval may have been applied
        if error.status != 400:  # noqa: PLR2004 - Bad Request: a retry cannot help
            self._note_result("POST", error)
            self._post_alone = {
                **{key: None for key in self._post_alone if key not in keys},
                **self._post_alone,
            }
            return ApprovalResult(not_applied=not_applied)
        self._note_result("POST", None)
        if len(events) > 1:
            self._post_alone |= dict.fromkeys(keys)
            return ApprovalResult(not_applied=True)
        refused = Decision(outcome="failed", reason="imds_refused", detail=str(error), event=events[0])
        return ApprovalResult(decisions={keys[0]: refused}, not_applied=True)

    def _approve(self, events: Sequence[ScheduledEvent]) -> None:
        incarnation = self._document.raw.get("DocumentIncarnation") if self._document else None
        for event in events:
            names = ", ".join(event.resources)
            log.info(
                "approving %s of %s", event.raw.get("EventType"), names, extra={"event_id": event.event_id}
            )
        self._imds.approve([event.event_id for event in events], incarnation=incarnation)
