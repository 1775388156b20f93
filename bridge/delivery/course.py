"""Decide what one sink is sent next, and what waits after a failure; the rows are in the outbox (`queue`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from bridge.delivery.queue import Head, Ready
from bridge.errors import DeliveryError
from bridge.sinks.base import RETRY_BASE_SECONDS

NOTHING_WAITS = math.inf
# Read at once: enough for a batch, few enough to cost no memory while large events wait.
PAGE_EVENTS = 64
# A notice behind 40 events that fail is tried within 3 s, and a receiver that refuses everything is not flooded.
FIRST_TRY_SECONDS = 1 / 20
# Whatever the number of events that fail, they are a small load for a receiver that accepts others meanwhile.
RETRY_SECONDS = 1 / 4
# A chat takes few messages: between two tries of a digest, or of its events, that fail.
DIGEST_RETRY_SECONDS = 2.0
# Nothing was accepted for so long: shorter waits between the tries of an event are over by themselves.
OUTAGE_SECONDS = 10.0
# While the process stops, which may take some seconds.
DRAIN_LIMIT_SECONDS = 0.5
_MAX_EXPONENT = 32  # of the doubling limit, so that no float overflows


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What limits the waits now.

    `limit_seconds` is the longest wait of the sink, `urgent_seconds` that of the most urgent event (infinite: none is
    urgent), `is_draining` whether the process is about to stop.
    """

    limit_seconds: float
    urgent_seconds: float = math.inf
    is_draining: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A try that failed, the `count`-th in a row, for which the sink raised `error`.

    It began at `began_at` and ended at `at`, in steady seconds. `share` is drawn between 0 and 1 and spreads the
    retries of a fleet ("full jitter").
    """

    error: DeliveryError
    began_at: float = -math.inf
    at: float
    share: float
    count: int = 1

    @property
    def is_answered(self) -> bool:
        """Whether there was an HTTP status."""
        return self.error.status is not None

    @property
    def may_be_caused_by_event(self) -> bool:
        """Whether another event may be accepted: the receiver got this one, and did not ask everybody to wait."""
        return not self.error.is_unreached and self.error.status != HTTPStatus.TOO_MANY_REQUESTS

    def must_wait(self, pace: Pace) -> bool:
        """Return whether `Retry-After` is obeyed: other than with 429 it cannot delay an urgent event."""
        asked = self.error.retry_after_seconds
        is_strict = pace.is_draining or self.error.status == HTTPStatus.TOO_MANY_REQUESTS
        return asked is not None and (is_strict or asked <= pace.urgent_seconds)

    def retry_at(self, pace: Pace) -> float:
        """Return when to try again, in steady seconds.

        The wait is what the receiver asked for, or drawn below a limit that doubles with each failure.
        """
        if self.must_wait(pace):
            return self.at + max(RETRY_BASE_SECONDS, self.error.retry_after_seconds or 0.0)
        limits = [pace.limit_seconds, RETRY_BASE_SECONDS * 2.0 ** min(self.count - 1, _MAX_EXPONENT)]
        if self.error.retry_after_seconds is not None:
            limits = [self.error.retry_after_seconds]
        limits += [pace.urgent_seconds] + [DRAIN_LIMIT_SECONDS] * pace.is_draining
        return self.at + self.share * min(limits)


@dataclass(frozen=True, kw_only=True)
class Course:
    """How the deliveries to a sink go, as far as its rows do not say it; each step returns another one.

    1. The most urgent event goes first, a retry that is due only if it is more urgent than what was never tried.
    2. An event that fails waits for its retry. First tries are at most 20 a second and retries 4, as far as they
       fail. After a try that failed, what was never tried goes first.
    3. Without an answer, or if the receiver asks for time, the sink as a whole waits; then what was never
       tried goes first, and if there is nothing, all that failed is due.
    4. A batch that fails is followed by one event alone, and then by a quarter of it, which doubles. Retries are in
       a batch only after one that was accepted, or after an outage.
    5. When something is accepted after two or more failures in a row and 10 s without, all that failed is due. It is
       never decided whether the receiver or an event is the cause.

    Args:
        max_batch: how many events are sent at once.
        is_digest: whether a batch is one message.
        batch: how many events are sent at once now.
        must_be_alone: whether the next event is sent alone, because a batch failed.
        may_gather: whether retries can go together, and with others: since one was accepted, or all became due.
        blocked_by: the failure after which the sink as a whole waits; None while it does not.
        failures: how many tries failed in a row.
        begin_at: when something is tried for the first time again, in steady seconds.
        again_at: when a retry is tried again.
        accepted_at: when something was accepted last.
        accepted_seq: the last number that was given by then.
        pause_until: until when a digest gathers; infinite where events are held for their own time alone.
    """

    max_batch: int
    is_digest: bool = False
    batch: int
    must_be_alone: bool = False
    may_gather: bool = False
    blocked_by: Failure | None = None
    failures: int = 0
    begin_at: float = -math.inf
    again_at: float = -math.inf
    accepted_at: float = -math.inf
    accepted_seq: int = 0
    pause_until: float = math.inf

    @property
    def is_calm(self) -> bool:
        """Whether nothing fails but single events."""
        return self.batch == self.max_batch and not (self.blocked_by or self.must_be_alone)

    @property
    def limit(self) -> int:
        """How many events are sent next."""
        return 1 if self.must_be_alone else self.batch

    def blocked_until(self, pace: Pace) -> float:
        """Return until when the sink as a whole waits, in steady seconds."""
        return max(self.blocked_by.retry_at(pace), self.again_at) if self.blocked_by else -math.inf

    def kinds(self, now: float) -> dict[str, Any]:
        """Return for what it is not too early (see Queue.ready); after the sink has waited as a whole, for all."""
        return {
            "may_begin": self.blocked_by is not None or self.begin_at <= now,
            "may_retry": self.blocked_by is not None or self.again_at <= now,
            "failures": self.failures,
            "since": self.accepted_seq,
        }

    def choose(self, ready: Ready, now: float) -> tuple[float, Sequence[Head]]:
        """Return the heads to send now; if there are none, when to ask again, NOTHING_WAITS if no event waits."""
        fresh, again = ready.fresh, ready.again
        is_message = self.is_digest and self.is_calm
        if again and self.may_gather:
            is_message = False
            fresh = sorted([*again, *fresh], key=lambda head: head.lane)[: self.limit]
        elif again and not (fresh and (self.failures or fresh[0].lane < self._lane(again[0]))):
            fresh = again[:1]
        if fresh:
            # What starts soon is in no batch with others, any of which may fail; a digest of what was never tried is
            # one message at first.
            is_soon = fresh[0].lane == 0 and not is_message
            return now, [head for head in fresh if head.lane == 0] if is_soon else fresh
        kept_back = [at for at in (self.begin_at, self.again_at) if at > now] if ready.is_kept_back else []
        return min([ready.due_at, *kept_back]), []

    def is_after_outage(self, now: float) -> bool:
        """Return whether what is accepted now follows an outage; less tells nothing, as a few events may fail."""
        return self.failures > 1 and now >= self.accepted_at + OUTAGE_SECONDS

    def _lane(self, again: Head) -> int:
        # What failed once may have met a receiver that was busy; of what failed more often, only the more urgent
        # comes before what was never tried, and a chat has no time for either.
        return again.lane + (self.is_digest or again.tries > 1)

    def idle(self, *, is_empty: bool) -> Course:
        """Return how it goes on while nothing is due; with `is_empty`, nothing waits at all."""
        after = replace(self, batch=self.max_batch, must_be_alone=False, failures=0) if is_empty else self
        return replace(after, blocked_by=None)

    def accepted(self, *, is_again: bool = False) -> Course:
        """Return how it goes on once the receiver has accepted something; `is_again`: that had failed before."""
        may_gather = is_again or self.failures > 1
        after = replace(self, must_be_alone=False, may_gather=may_gather, blocked_by=None, failures=0)
        if self.failures > 1:  # it was not the batch
            return replace(after, batch=self.max_batch)
        return after if self.must_be_alone else replace(after, batch=min(self.max_batch, 2 * self.batch))

    def split(self, count: int, *, parts: int) -> Course:
        """Return how it goes on after a batch of so many events of which one may be the cause."""
        # Less than the whole batch, by which a second failure is known.
        return replace(self, must_be_alone=True, batch=max(1, min(count // parts, self.max_batch - 1)))

    def failed(self, failure: Failure, *, count: int, is_again: bool, pace: Pace) -> Course:
        """Return how it goes on after a try that failed.

        Args:
            failure: why.
            count: the number of events that were not accepted.
            is_again: whether one of them had failed before.
            pace: as it is now.
        """
        after = replace(self, may_gather=False)
        if count > 1 and failure.may_be_caused_by_event:
            # Two messages are less than many, if a chat fails now and then.
            is_first = self.is_digest and self.batch == self.max_batch
            after = after.split(count, parts=1 if is_first else 4)
        if self.is_digest:
            again_at = failure.at + DIGEST_RETRY_SECONDS
            after = replace(after, again_at=again_at, begin_at=again_at)
        elif is_again:
            after = replace(after, again_at=failure.at + RETRY_SECONDS)
        else:
            after = replace(after, begin_at=failure.began_at + FIRST_TRY_SECONDS)
        is_about_events = (
            failure.is_answered and failure.may_be_caused_by_event and not failure.must_wait(pace)
        )
        if is_about_events:
            return replace(after, blocked_by=None, failures=self.failures + (count == 1))
        count = self.blocked_by.count + 1 if self.blocked_by else 1
        return replace(after, blocked_by=replace(failure, count=count), failures=self.failures + 1)
