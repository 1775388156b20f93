"""Read the document and POST approvals, within the listener's share of IMDS's request limit.

I/O: IMDS, the clock and the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus
from operator import itemgetter

from bridge.approvals.policy import Decision
from bridge.approvals.state import EventState, Stay, Tries
from bridge.errors import ImdsError
from bridge.imds.client import ImdsClient
from bridge.imds.document import Document, parse_document
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 1.0  # one document for all commands together
FRESH_SECONDS = 2.0  # how old a document may be for a decision
JUST_READ_SECONDS = 0.3  # how old a document may be for a POST
EARLY_SECONDS = 0.25  # how long before its POST is possible a document may be read
PAUSE_SECONDS = 1.0  # after a 429 without Retry-After
# An event whose POST has failed waits for 1 s, then for 2 s; four times as long as the POST took if that is more.
AGAIN_SECONDS, AGAIN_FACTOR, AGAIN_LIMIT_SECONDS = 2.0, 4.0, 30.0
_AT_ONCE = datetime.min.replace(tzinfo=UTC)  # an event without NotBefore
CALLS_PER_SECOND = 3  # of the five that IMDS allows this VM; `forward` needs one or two


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The last request for the document.

    Attributes:
        document: None before the first answer, and if there was none.
        at: when it was asked for, monotonic.
        error: why there is none.
        good_time: when there was one last, None for never.
    """

    document: Document | None = None
    at: float = -math.inf
    answered_at: float = -math.inf
    error: str = ""
    good_time: datetime | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When IMDS was called last, the oldest call first, and until when it may not be (monotonic)."""

    calls: tuple[float, ...] = (-math.inf,) * CALLS_PER_SECOND
    paused_until: float = -math.inf
    error: str = ""

    @property
    def call_at(self) -> float:
        """When IMDS may be called."""
        return max(self.paused_until, self.calls[0] + 1.0)

    @property
    def read_at(self) -> float:
        """When the document may be read so early that its POST is possible soon enough."""
        return max(self.call_at, self.calls[1] + 1.0 - EARLY_SECONDS)

    def called(self, at: float) -> Budget:
        """Return the budget after a call."""
        return replace(self, calls=(*self.calls[1:], at))


@dataclass(frozen=True, kw_only=True)
class Posted:
    """What became of a POST.

    Attributes:
        decided: the answers, by EventId in lower case.
        stays: what has become of the events' stays, by EventId in lower case.
        is_refused: IMDS refused the request, so that none is approved.
    """

    decided: Mapping[str, Decision] = field(default_factory=dict)
    stays: Mapping[str, Stay]
    is_refused: bool = False


@dataclass(eq=False)
class ImdsApprover:
    """Reads the document and POSTs approvals, for one thread; `reading` may be read from any."""

    imds: ImdsClient
    _: KW_ONLY
    clock: Clock

    def __post_init__(self) -> None:
        self.reading = Reading()
        self._budget = Budget()
        self._wanted_at = -math.inf

    def document(self) -> Document | None:
        """Return a document of the last two seconds; None while IMDS cannot be asked or does not answer."""
        now = self.clock.monotonic()
        # What a command waits for is read when it can be POSTed, not by a poll that would use up the call.
        every_seconds = FRESH_SECONDS if self.reading.at < self._wanted_at else READ_EVERY_SECONDS
        is_due = now - self.reading.at >= every_seconds or self.newer_in_seconds == 0
        if is_due and self.may_call():
            self.reading = self._read(now)
        return self.reading.document if now - self.reading.at < FRESH_SECONDS else None

    def want_newer(self, than: float) -> None:
        """Have the document read again, if it was read before that instant, as soon as a call is to spare."""
        self._wanted_at = max(self._wanted_at, than)

    def is_just_read(self, since: float) -> bool:
        """Return whether the last document is young enough for a POST, and was read at that instant or later."""
        return (
            self.reading.at >= since and self.clock.monotonic() - self.reading.answered_at < JUST_READ_SECONDS
        )

    @property
    def newer_in_seconds(self) -> float:
        """How long until the document that is wanted may be read, with a call left for its POST; inf for none."""
        if self.reading.at >= self._wanted_at:
            return math.inf
        return max(0.0, self._budget.read_at - self.clock.monotonic())

    @property
    def call_in_seconds(self) -> float:
        """How long until IMDS may be called again; inf if it may be now."""
        left_seconds = self._budget.call_at - self.clock.monotonic()
        return left_seconds if left_seconds > 0 else math.inf

    def _read(self, now: float) -> Reading:
        last = replace(self.reading, document=None, at=now)
        try:
            document = parse_document(self.imds.document())
        except (ImdsError, ValueError) as error:
            self._pause(error)
            if not self.reading.error:
                log.warning("commands wait for IMDS: %s", error)
            return replace(last, error=str(error))
        if self.reading.error:
            log.info("IMDS answers again; waiting commands go on")
        answered_at = self.clock.monotonic()
        return replace(last, document=document, answered_at=answered_at, error="", good_time=self.clock.now())

    def may_call(self) -> bool:
        """Return whether IMDS may be called now, by its limit and its pauses, and count the call."""
        now = self.clock.monotonic()
        if now < self._budget.call_at:
            return False
        self._budget = self._budget.called(now)
        return True

    def last_error(self, events: Iterable[EventState]) -> str:
        """Return the last error of IMDS that has not been followed by a good answer, "" if there is none."""
        tried = (one.stay.tries.error for one in events if one.stay.tries)
        return next(filter(None, (self.reading.error, self._budget.error, *tried)), "")

    def _pause(self, error: Exception) -> None:
        """Leave IMDS alone for as long as it asks; a 429 pauses all calls."""
        if isinstance(error, ImdsError):
            pause = error.retry_after_seconds or 0.0
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                pause = max(PAUSE_SECONDS, pause)
            self._budget = replace(self._budget, paused_until=self.clock.monotonic() + pause)

    def post(self, events: Sequence[EventState], limit_seconds: float) -> Posted:
        """POST the approval of events; IMDS answers as well to one that is repeated."""
        began, document = self.clock.monotonic(), self.reading.document
        self._budget = replace(self._budget, error="")
        for event in (one.event for one in events):
            given = event.raw.get("EventType"), ", ".join(event.resources)
            log.info("approving %s of %s", *given, extra={"event_id": event.event_id})
        event_ids = [one.event.event_id for one in events]
        incarnation = document.raw.get("DocumentIncarnation") if document else None
        try:
            self.imds.approve(event_ids, incarnation=incarnation, limit_seconds=limit_seconds)
        except ImdsError as error:
            log.warning("no good answer to the POST: %s", error)
            return self._failed(events, error, self.clock.monotonic() - began)
        now = self.clock.now()
        decided, stays = dict[str, Decision](), dict[str, Stay]()
        for one in events:
            decided[one.event.key] = Decision(outcome="accepted", reason="approved", event=one.event)
            stays[one.event.key] = replace(one.stay, approved_at=now, is_settled=True, tries=None)
        return Posted(decided=decided, stays=stays)

    def _failed(self, events: Sequence[EventState], error: ImdsError, took_seconds: float) -> Posted:
        is_refused = error.status is not None and error.status < HTTPStatus.INTERNAL_SERVER_ERROR
        stays = {one.event.key: one.stay for one in events}
        if error.status == HTTPStatus.TOO_MANY_REQUESTS:
            self._pause(error)
            self._budget = replace(self._budget, error=str(error))
            if len(events) > 1:  # one alone may pass
                stays = {key: self._tried(stay, error, 0.0, len(events)) for key, stay in stays.items()}
            return Posted(stays=stays, is_refused=True)
        if error.status == HTTPStatus.BAD_REQUEST and len(events) == 1:  # a retry cannot help
            event = events[0].event
            stays = {event.key: replace(events[0].stay, is_settled=True, tries=None)}
            refused = Decision(outcome="failed", reason="imds_refused", detail=str(error), event=event)
            return Posted(decided={event.key: refused}, stays=stays, is_refused=True)
        stays = {key: self._tried(stay, error, took_seconds, len(events)) for key, stay in stays.items()}
        return Posted(stays=stays, is_refused=is_refused)

    def _tried(self, stay: Stay, error: ImdsError, took_seconds: float, together: int) -> Stay:
        """Have an event tried alone from now on: at once after a POST of several, else after a while."""
        count = stay.tries.count + 1 if stay.tries else 1
        wait_seconds = max(
            min(AGAIN_SECONDS, count), AGAIN_FACTOR * took_seconds, error.retry_after_seconds or 0.0
        )
        wait_seconds = min(AGAIN_LIMIT_SECONDS, wait_seconds) * (together == 1)
        next_at = self.clock.monotonic() + wait_seconds
        return replace(stay, tries=Tries(error=str(error), count=count, next_at=next_at))


def choose(wanted: Collection[EventState], at: float) -> list[EventState]:
    """Choose the events of the next POST: all that were never tried, else one that is due at an instant.

    It is the most urgent of those that have failed least often.
    """
    due = [
        (tries.count, one.event.not_before or _AT_ONCE, one)
        for one in wanted
        if (tries := one.stay.tries) and tries.next_at <= at
    ]
    untried = [one for one in wanted if not one.stay.tries]
    return untried or [one for *_, one in sorted(due, key=itemgetter(0, 1))[:1]]
