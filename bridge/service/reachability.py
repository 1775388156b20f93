"""Whether IMDS gives usable answers: a gap of more than 5 s is published, whatever its cause."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from bridge.errors import ImdsError
from bridge.events.builder import GapCause
from bridge.events.model import CloudEvent
from bridge.formats.cloudevents import encode_events
from bridge.imds.client import OFF_AFTER_SECONDS
from bridge.imds.diff import CONTINUOUS_SECONDS
from bridge.outbox.rows import STATE
from bridge.runtime.time import RepeatLimit, iso_utc, parse_iso

if TYPE_CHECKING:
    from bridge.service.composition import Parts

log = logging.getLogger(__name__)

NEVER = "never"
OUTAGE = "outage"  # the record of since when IMDS cannot be reached
_REASONS: dict[GapCause, str] = {
    "Restart": "imds-bridge was restarted",
    "NotPolled": "imds-bridge did not poll in that time: the VM was suspended, or its disk or CPU held it up",
}


class Reachability:
    """When IMDS gave usable answers, over restarts; publishes each gap. For the thread that polls.

    `good_time` is the time of the last usable answer, None if there was none. `failures` counts those in a row, of
    which `last_error` is the last.
    """

    def __init__(self, parts: Parts) -> None:
        self._gap_limit_seconds = max(CONTINUOUS_SECONDS, 2 * parts.config.imds.poll_seconds)
        self._identity = parts.identity
        self._outbox = parts.outbox
        self._folder = parts.folder
        self._clock = parts.clock
        self._began_at = self._clock.monotonic()
        self._good_at: float | None = None  # monotonic, in this process
        self.good_time = parse_iso(self._folder.read_last_good())
        self._outage_since = self._outbox.record(STATE, OUTAGE) or ""  # of an outage that is published
        self.failures = 0
        self.last_error = ""
        self._log_limit = RepeatLimit(self._clock)

    def service_may_be_off(self) -> bool:
        """Return whether there was no usable answer for a day, after which the service is off."""
        if self._good_at is not None:
            return self._clock.monotonic() - self._good_at >= OFF_AFTER_SECONDS
        if self.good_time is None:
            return True
        return (self._clock.now() - self.good_time).total_seconds() >= OFF_AFTER_SECONDS

    def note_waiting(self) -> None:
        """Publish an outage while a request is not answered."""
        self._publish_outage("IMDS does not answer")

    def note_failure(self, error: ImdsError) -> None:
        """Log a failure, and publish an outage once it is one."""
        self.failures += 1
        self.last_error = str(error)
        if self._log_limit.is_due():
            log.warning("IMDS gave no usable answer: %s; retrying", error)
        self._publish_outage(str(error))

    def note_answer(self) -> float | None:
        """Note a usable answer, and publish the gap that it ends.

        Returns:
            The time since the usable answer before, None if that was in another process.
        """
        now, at = self._clock.monotonic(), self._clock.now()
        gap_seconds = None if self._good_at is None else now - self._good_at
        if self._outage_since:
            since, self._outage_since = parse_iso(self._outage_since), ""
            self._commit([self._recovered(since, at, "NoAnswer")])
        elif gap_seconds is None:
            self._publish_restart(at)
        elif gap_seconds > self._gap_limit_seconds:
            self._publish_gap(gap_seconds, at, cause="NoAnswer" if self.failures else "NotPolled")
        if self.failures:
            log.info("IMDS answers again", extra={"failures": self.failures})
            self._log_limit.reset()
        self.failures, self.last_error = 0, ""
        self._good_at, self.good_time = now, at
        self._folder.write_last_good(iso_utc(at))
        return gap_seconds

    def _publish_outage(self, reason: str) -> None:
        """Publish that IMDS cannot be reached, once it has lasted long enough, and once for each outage."""
        gap_seconds = self._clock.monotonic() - (self._began_at if self._good_at is None else self._good_at)
        if self._outage_since or gap_seconds < self._gap_limit_seconds:
            return
        since = (
            self.good_time if self._good_at is None else self._clock.now() - timedelta(seconds=gap_seconds)
        )
        self._outage_since = iso_utc(since) if since else NEVER
        self._commit([self._unreachable(since, reason, "NoAnswer")])

    def _publish_restart(self, until: datetime) -> None:
        """Publish the gap since the last usable answer of the process before, if it was one."""
        gap_seconds = (until - self.good_time).total_seconds() if self.good_time else 0.0
        if gap_seconds > self._gap_limit_seconds:
            self._publish_gap(gap_seconds, until, cause="Restart")

    def _publish_gap(self, seconds: float, until: datetime, *, cause: GapCause) -> None:
        """Publish a gap that is over, with its start, which nothing that ran could have noticed."""
        since = until - timedelta(seconds=seconds)
        reason = _REASONS.get(cause, self.last_error)
        self._commit([self._unreachable(since, reason, cause), self._recovered(since, until, cause)])

    def _unreachable(self, since: datetime | None, reason: str, cause: GapCause) -> CloudEvent:
        return self._identity.reporter().unreachable(
            since=since,
            reason=reason,
            cause=cause,
            sequence=self._outbox.next_number(),
            at=self._clock.now(),
        )

    def _recovered(self, since: datetime | None, until: datetime, cause: GapCause) -> CloudEvent:
        return self._identity.reporter().recovered(
            since=since, cause=cause, sequence=self._outbox.next_number(), at=until
        )

    def _commit(self, events: list[CloudEvent]) -> None:
        self._outbox.commit(encode_events(events), records={(STATE, OUTAGE): self._outage_since})
