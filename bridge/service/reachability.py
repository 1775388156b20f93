"""Whether IMDS gives usable answers: a gap of more than 5 s is published, whatever its cause."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

from bridge.errors import ImdsError
from bridge.events.builder import GapCause
from bridge.events.model import CloudEvent
from bridge.formats.cloudevents import encode_events
from bridge.imds.client import OFF_AFTER_SECONDS
from bridge.imds.diff import CONTINUOUS_SECONDS
from bridge.outbox.outbox import Outbox
from bridge.outbox.state_dir import StateFolder
from bridge.runtime.clock import Clock
from bridge.runtime.instants import iso_utc, parse_iso
from bridge.runtime.repeat_limit import RepeatLimit
from bridge.service.identity import VmIdentity

log = logging.getLogger(__name__)

NEVER = "never"
_REASONS: dict[GapCause, str] = {
    "Restart": "imds-bridge was restarted",
    "Suspended": "imds-bridge did not run",
}


class Reachability:
    """When IMDS gave usable answers, over restarts; publishes each gap. For the thread that polls.

    `good_time` is the time of the last usable answer, None if there was none. `failures` counts those in a row, of
    which `last_error` is the last.

    Args:
        poll_seconds: how often IMDS is asked.
        identity: in whose name gaps are published.
        outbox: gets the events, and keeps whether an outage was published.
        folder: keeps the time of the last usable answer.
        clock: the time.
    """

    def __init__(
        self, *, poll_seconds: float, identity: VmIdentity, outbox: Outbox, folder: StateFolder, clock: Clock
    ) -> None:
        self._gap_limit_seconds = max(CONTINUOUS_SECONDS, 2 * poll_seconds)
        self._identity = identity
        self._outbox = outbox
        self._folder = folder
        self._clock = clock
        self._began_at = clock.monotonic()
        self._good_at: float | None = None  # monotonic, in this process
        self.good_time = parse_iso(folder.read_last_good())
        self._before_start = self.good_time  # until the gap since then is published
        self._resumed: datetime | None = None  # the first usable answer of this process
        self._outage_since = outbox.meta("outage_since")  # of an outage that is published, else ""
        self.failures = 0
        self.last_error = ""
        self._log_limit = RepeatLimit(clock)

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
        self._resumed = self._resumed or at
        if self._outage_since:
            self._publish_end(at)
        elif gap_seconds is not None and gap_seconds > self._gap_limit_seconds:
            self._publish_gap(self.good_time, at, cause="NoAnswer" if self.failures else "Suspended")
        elif self._identity.is_confirmed:
            self._publish_restart(self._resumed)
        if self.failures:
            log.info("IMDS answers again", extra={"failures": self.failures})
            self._log_limit.reset()
        self.failures, self.last_error = 0, ""
        self._good_at, self.good_time = now, at
        if self._identity.is_confirmed:
            self._folder.write_last_good(iso_utc(at))
        return gap_seconds

    def forget(self) -> None:
        """Forget what was another VM's."""
        self.good_time, self._before_start, self._outage_since = None, None, ""

    def shift(self, seconds: float) -> None:
        """Follow a jump of the wall clock."""
        jump = timedelta(seconds=seconds)
        if self.good_time:
            self.good_time += jump
        if self._before_start:
            self._before_start += jump
        if self._resumed:
            self._resumed += jump

    def _publish_outage(self, reason: str) -> None:
        """Publish that IMDS cannot be reached, once it has lasted long enough, and once for each outage."""
        gap_seconds = self._clock.monotonic() - (self._began_at if self._good_at is None else self._good_at)
        if self._outage_since or gap_seconds < self._gap_limit_seconds:
            return
        self._outage_since = iso_utc(self.good_time) if self.good_time else NEVER
        self._commit([self._unreachable(self.good_time, reason, "NoAnswer")])

    def _publish_end(self, at: datetime) -> None:
        since = parse_iso(self._outage_since)
        self._outage_since, self._before_start = "", None
        self._commit([self._recovered(since, at, "NoAnswer")])

    def _publish_restart(self, until: datetime) -> None:
        """Publish the gap since the last usable answer of the process before, if it was one."""
        since, self._before_start = self._before_start, None
        if since and (until - since).total_seconds() > self._gap_limit_seconds:
            self._publish_gap(since, until, cause="Restart")

    def _publish_gap(self, since: datetime | None, until: datetime, *, cause: GapCause) -> None:
        """Publish a gap that is over, with its start, which nothing that ran could have noticed."""
        reason = _REASONS.get(cause, self.last_error)
        self._commit([self._unreachable(since, reason, cause), self._recovered(since, until, cause)])

    def _unreachable(self, since: datetime | None, reason: str, cause: GapCause) -> CloudEvent:
        return self._identity.reporter().unreachable(
            since=since,
            reason=reason,
            cause=cause,
            sequence=self._identity.next_sequence(),
            at=self._clock.now(),
        )

    def _recovered(self, since: datetime | None, until: datetime, cause: GapCause) -> CloudEvent:
        return self._identity.reporter().recovered(
            since=since, cause=cause, sequence=self._identity.next_sequence(), at=until
        )

    def _commit(self, events: list[CloudEvent]) -> None:
        self._outbox.commit(encode_events(events), meta={"outage_since": self._outage_since})
