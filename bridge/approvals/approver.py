"""Read the document and POST approvals, within the listener's share of IMDS's request limit.

I/O: IMDS, the clock and the log.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus

from bridge.approvals.policy import Decision
from bridge.errors import ImdsError
from bridge.imds.client import CALL_SECONDS, ImdsClient
from bridge.imds.document import Document, ScheduledEvent, parse_document
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 1.0  # one document for all commands together
FRESH_SECONDS = 2.0  # how old a document may be for a decision
JUST_READ_SECONDS = 0.3  # how old a document may be for a POST
PAUSE_SECONDS = 1.0  # after a 429 without Retry-After
# An event whose POST has failed waits for 1 s, then for 2 s; four times as long as the POST took if that is more.
AGAIN_SECONDS, AGAIN_FACTOR, AGAIN_LIMIT_SECONDS = 2.0, 4.0, 30.0
CALLS_PER_SECOND = 3  # of the five that IMDS allows this VM; `forward` needs one or two


@dataclass(kw_only=True)
class _Tries:
    """The failed POSTs of an event: how many, why, and when the next one is due (monotonic)."""

    error: str
    next_at: float
    count: int = 1


class ImdsApprover:
    """Reads the document and POSTs approvals, for one thread; `last_error` may be read from any."""

    def __init__(self, imds: ImdsClient, *, clock: Clock) -> None:
        self._imds = imds
        self._clock = clock
        self._document: Document | None = None
        self.read_at = self._wanted_at = -math.inf
        self._errors = {"document": "", "POST": ""}
        self._tries: dict[str, _Tries] = {}  # by EventId in lower case
        self._calls: deque[float] = deque(maxlen=CALLS_PER_SECOND)
        self._paused_until = -math.inf
        self._is_failing = False  # as the log says
        self.good_time: datetime | None = None

    def document(self) -> Document | None:
        """Return a document of the last two seconds; None while IMDS cannot be asked or does not answer."""
        now = self._clock.monotonic()
        is_due = now - self.read_at >= READ_EVERY_SECONDS
        if (is_due or self.newer_in_seconds == 0) and self.may_call():
            self.read_at, self._document = now, self._read()
        self._log_change()
        return self._document if now - self.read_at < FRESH_SECONDS else None

    def want_newer(self, than: float) -> None:
        """Have the document read again, if it was read before that instant, as soon as a call is to spare."""
        self._wanted_at = max(self._wanted_at, than)

    def is_just_read(self, since: float) -> bool:
        """Return whether the last document is young enough for a POST, and was read at that instant or later."""
        return self.read_at >= since and self._clock.monotonic() - self.read_at < JUST_READ_SECONDS

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
        errors = [*self._errors.values(), *(tries.error for tries in self._tries.values())]
        return next((error for error in errors if error), "")

    def _note_result(self, call: str, error: Exception | None) -> None:
        """Remember how a kind of call went; a 429 pauses all calls."""
        self._errors[call] = "" if error is None else str(error)
        if isinstance(error, ImdsError):
            pause = error.retry_after_seconds or 0.0
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                pause = max(PAUSE_SECONDS, pause)
            self._paused_until = self._clock.monotonic() + pause

    def _log_change(self) -> None:
        was_failing, self._is_failing = self._is_failing, bool(self.last_error)
        if self._is_failing and not was_failing:
            log.warning("commands wait for IMDS: %s", self.last_error)
        elif was_failing and not self._is_failing:
            log.info("IMDS answers again; waiting commands go on")

    def choose(self, new: Mapping[str, ScheduledEvent]) -> list[ScheduledEvent]:
        """Choose the events of the next POST: all that were never tried, else one that is due again."""
        self._tries = {key: tries for key, tries in self._tries.items() if key in new}
        untried = [event for key, event in new.items() if key not in self._tries]
        key = min(self._tries, key=lambda key: self._tries[key].next_at, default="")
        is_due = key and self._tries[key].next_at <= self._clock.monotonic()
        return untried or ([new[key]] if is_due else [])

    def post(self, events: Sequence[ScheduledEvent]) -> tuple[dict[str, Decision], bool]:
        """POST the approval of events.

        Returns:
            What is decided, by EventId in lower case, and whether IMDS refused the request, so that none is approved.
        """
        began = self._clock.monotonic()
        try:
            self._approve(events)
        except ImdsError as error:
            decided, is_refused = self._refused(events, error, self._clock.monotonic() - began)
        else:
            decided = {one.key: Decision(outcome="accepted", reason="approved", event=one) for one in events}
            is_refused = False
        for key in decided:
            self._tries.pop(key, None)
            self._errors["POST"] = ""
        return decided, is_refused

    def _refused(
        self, events: Sequence[ScheduledEvent], error: ImdsError, took_seconds: float
    ) -> tuple[dict[str, Decision], bool]:
        is_refused = error.status is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            self._note_result("POST", error)
        elif error.status == HTTPStatus.BAD_REQUEST and len(events) == 1:  # a retry cannot help
            detail = str(error)
            refused = Decision(outcome="failed", reason="imds_refused", detail=detail, event=events[0])
            return {events[0].key: refused}, True
        else:
            self._note_failure(events, error, took_seconds)
        return {}, is_refused

    def _note_failure(self, events: Sequence[ScheduledEvent], error: ImdsError, took_seconds: float) -> None:
        """Have each event tried alone from now on: at once after a POST of several, else after a while."""
        self._errors["POST"] = ""
        for event in events:
            count = self._tries[event.key].count + 1 if event.key in self._tries else 1
            wait_seconds = max(
                *(min(AGAIN_SECONDS, count), AGAIN_FACTOR * took_seconds, error.retry_after_seconds or 0.0)
            )
            next_at = self._clock.monotonic() + min(AGAIN_LIMIT_SECONDS, wait_seconds) * (len(events) == 1)
            self._tries[event.key] = _Tries(error=str(error), count=count, next_at=next_at)

    def _approve(self, events: Sequence[ScheduledEvent]) -> None:
        incarnation = self._document.raw.get("DocumentIncarnation") if self._document else None
        for event in events:
            names = ", ".join(event.resources)
            log.info(
                "approving %s of %s", event.raw.get("EventType"), names, extra={"event_id": event.event_id}
            )
        tries = self._tries.get(events[0].key)
        limit_seconds = min(CALL_SECONDS, 2.0**tries.count) if tries else CALL_SECONDS
        event_ids = [event.event_id for event in events]
        self._imds.approve(event_ids, incarnation=incarnation, limit_seconds=limit_seconds)
