"""The loop of `forward`: poll IMDS, compare documents, and commit each change together with its events.

A gap of more than 5 s without a usable answer is published, whatever its cause.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Any, NamedTuple

from bridge.config.models import ImdsSettings
from bridge.contract.status import ForwardStatus
from bridge.errors import ImdsError
from bridge.events.builder import GapCause
from bridge.events.model import CloudEvent
from bridge.imds.client import CALL_SECONDS, FIRST_CALL_SECONDS, OFF_AFTER_SECONDS
from bridge.imds.diff import CONTINUOUS_SECONDS, Change, MissingEvent, Observation, Watch, compare
from bridge.imds.document import Document, parse_document
from bridge.outbox.rows import AGAIN, OCCURRENCE, STATE, WATCH
from bridge.process.bridge_events import LISTED_IDS, BridgeEvents
from bridge.process.parts import Parts
from bridge.runtime.json import Json
from bridge.runtime.threads import report_progress
from bridge.runtime.time import RepeatLimit, iso_utc, parse_iso

log = logging.getLogger(__name__)

LAST_POLL_SECONDS = 2.0
SHARE_OF = 20  # requests, of which a share has failed
NEVER = "never"
OUTAGE = "outage"  # the record of since when IMDS cannot be reached
_REASONS: dict[GapCause, str] = {
    "Restart": "imds-bridge was restarted",
    "NotPolled": "imds-bridge did not poll in that time: the VM was suspended, or its disk or CPU held it up",
}


class Forwarder:
    """Watches one VM's document. `run` is for one thread; `status` may be called from any."""

    def __init__(self, parts: Parts, settings: ImdsSettings, *, is_fleet: bool = False) -> None:
        """Prepare to poll.

        Args:
            parts: of the process; its stop ends `run`.
            settings: where IMDS is, and how often it is polled.
            is_fleet: whether documents about other VMs alone are left to those.
        """
        self._parts = parts
        self._settings = settings
        self._is_fleet = is_fleet
        self._clock = parts.clock
        self._identity = parts.identity
        self._bridge_events = BridgeEvents(parts.identity)
        self._watch = Watch.load(parts.outbox.record(STATE, WATCH))
        self._body: bytes | None = None
        self._has_polled = False
        self._reachability = Reachability(parts, settings.poll_seconds)

    def run(self) -> None:
        """Poll until `stop` is set or the VM has another name, then once more."""
        self._bridge_events.emit_started()
        due = self._clock.monotonic()
        while not (self._identity.is_renamed or self._parts.stop.wait(due - self._clock.monotonic())):
            wait_seconds = self._poll_and_report()
            now = self._clock.monotonic()
            if wait_seconds is None:
                due += self._settings.poll_seconds * max(
                    1, math.ceil((now - due) / self._settings.poll_seconds)
                )
            else:
                due = now + wait_seconds
        self.poll(timeout_seconds=LAST_POLL_SECONDS)
        self._bridge_events.emit_stopping()

    def run_once(self) -> None:
        """Poll once."""
        self._bridge_events.emit_started()
        self._poll_and_report()
        self._has_polled = True
        self._bridge_events.emit_stopping()

    def faults(self) -> list[str]:
        """Return what kept the last poll from a usable answer, if anything did."""
        error = self._reachability.last_error or ("" if self._has_polled else "the poll did not end")
        return [f"IMDS gave no usable answer: {error}"] if error else []

    def _poll_and_report(self) -> float | None:
        """Poll, and publish what the process reports about itself; return how long to wait, as `poll` does."""
        report_progress()
        self._bridge_events.emit_losses(self._begin_again)
        wait_seconds = self.poll()
        self._identity.resolve()
        self._bridge_events.emit_heartbeat(self._open_events)
        return wait_seconds

    def _open_events(self) -> dict[str, Json]:
        """Return what a heartbeat says of the events that are not over, if they are few enough to be listed."""
        known = [event.event_id for event in self._watch.known.values()]
        return {"OpenEventIds": known if len(known) <= LISTED_IDS else None}

    def _begin_again(self) -> dict[tuple[str, str], Json]:
        """Have the next document published as a whole; return the records for it."""
        self._body = None
        return {(STATE, AGAIN): True}

    def poll(self, *, timeout_seconds: float | None = None) -> float | None:
        """Request the document once and process it.

        Args:
            timeout_seconds: the time limit; None for what IMDS may need.

        Returns:
            How long to wait before the next request, None for the usual interval.
        """
        # After a day without an answer the service is off.
        may_be_off = self._reachability.gap_seconds() >= OFF_AFTER_SECONDS
        limit_seconds = timeout_seconds or (FIRST_CALL_SECONDS if may_be_off else CALL_SECONDS)
        waiting = None if may_be_off else self._reachability.note_waiting
        try:
            body = self._parts.imds.document(timeout_seconds=limit_seconds, waiting=waiting)
            self._process(body, may_be_off=may_be_off)
        except ImdsError as error:
            self._reachability.note_failure(error)
            is_throttled = error.status == HTTPStatus.TOO_MANY_REQUESTS
            return (
                max(self._settings.poll_seconds, error.retry_after_seconds or 0.0) if is_throttled else None
            )
        return None

    def status(self) -> ForwardStatus:
        """Return what the status file shows."""
        document, good_time = self._watch.document, self._reachability.good_time
        return ForwardStatus(
            vm=self._identity.vm.name if self._identity.vm else None,
            imds=self._parts.imds.base or self._settings.endpoint,
            version_error=self._parts.imds.version_error,
            clock_ahead_seconds=self._parts.imds.clock_ahead_seconds,
            last_error=self._reachability.last_error or None,
            failed_share=round(self._reachability.failed_share, 2),
            last_good_at=iso_utc(good_time) if good_time else None,
            document=document.raw if document else None,
            missing=[missing.event.raw for missing in self._watch.missing.values()],
        )

    # A usable answer

    def _process(self, body: bytes, *, may_be_off: bool) -> None:
        changed = body != self._body or self._watch.is_due(self._clock.steady())
        document = self._parse(body) if changed else None
        gap = self._reachability.note_answer()
        events, records = [*gap.events], {**gap.records}
        if document:
            new, changed_records = self._compare(document, gap.seconds, service_was_off=may_be_off)
            events += new
            records |= changed_records
        if events or records:  # a gap and the change that follows it wait for the disk once
            self._parts.outbox.commit(events, records=records)
        self._parts.folder.write_last_good(gap.until)
        if document:
            self._body = body

    def _parse(self, body: bytes) -> Document:
        try:
            return parse_document(body)
        except ValueError as error:
            raise ImdsError(f"IMDS at {self._parts.imds.base} sent {error}") from error

    def _compare(
        self, document: Document, gap_seconds: float | None, *, service_was_off: bool
    ) -> tuple[list[CloudEvent], dict[tuple[str, str], Any]]:
        """Return the events and records to commit for what differs from the last document."""
        must_repeat = bool(self._parts.outbox.record(STATE, AGAIN))
        before = _unshown(self._watch, document) if must_repeat else self._watch
        observation = Observation(
            at=self._clock.steady(),
            wall=self._clock.wall(),
            gap_seconds=gap_seconds,
            service_was_off=service_was_off,
            boot_id=self._parts.boot_id,
        )
        watch, changes = compare(before, document, observation)
        if watch == before:
            return [], {}
        self._watch = watch
        counted = self._counted(changes, are_repeated=before.document is None)
        is_witness = gap_seconds is not None and self._is_witness(before, document, changes)
        reporter = self._identity.reporter()
        scheduled = [
            reporter.scheduled_event(change, seen_before=count, incarnation=document.incarnation)
            for change, count in counted
        ]
        ids = [event.id for event in scheduled]
        own = [] if is_witness else self._own_events(before, document, ids)
        records: dict[tuple[str, str], Any] = {(STATE, WATCH): watch.dump()}
        records |= {(STATE, AGAIN): False} if must_repeat else {}
        records |= {(OCCURRENCE, change.fingerprint): count + 1 for change, count in counted}
        if is_witness:
            records |= self._bridge_events.list_later(ids)
        _log_changes(document, changes)
        return [*scheduled, *own], records  # the urgent first

    def _is_witness(self, before: Watch, document: Document, changes: Sequence[Change]) -> bool:
        """Return whether the VMs that a change names report the document, and this one need not.

        It does for its first document, for entries that cannot be read, and where only the incarnation has changed.
        """
        if not self._is_fleet or not changes or before.document is None:
            return False
        reporter = self._identity.reporter()
        seen = [event for change in changes for event in (change.event, change.previous) if event]
        return not document.invalid_entries and all(reporter.affects(event) is False for event in seen)

    def _counted(self, changes: Iterable[Change], *, are_repeated: bool) -> list[tuple[Change, int]]:
        """Pair each change with how often it was seen before; one that is published again keeps its number and id."""
        counts = [
            (change, self._parts.outbox.record(OCCURRENCE, change.fingerprint) or 0) for change in changes
        ]
        return [
            (change, max(0, count - (are_repeated and change.previous is None))) for change, count in counts
        ]

    def _own_events(self, before: Watch, document: Document, ids: Sequence[str]) -> list[CloudEvent]:
        """Build the VM's own events about a document: that it has changed, with the ids of what was published."""
        if not ids and before.document is not None and before.document.raw == document.raw:
            return []
        return [self._identity.reporter().document(document, previous=before.document, event_ids=ids)]


@dataclass(frozen=True, kw_only=True)
class Outage:
    """A time without a usable answer; once it is published, `since` is when it began, as text or NEVER.

    `failures` counts the requests that failed, of which `last_error` is the last.
    """

    failures: int = 0
    last_error: str = ""
    since: str = ""


class Gap(NamedTuple):
    """The time between two usable answers, and what is to be published of it.

    `seconds` is None if the one before was in another process; `until` is the time of the later one.
    """

    seconds: float | None
    until: str
    events: Sequence[CloudEvent]
    records: dict[tuple[str, str], Any]


class Reachability:
    """When IMDS gave usable answers, over restarts; publishes each gap. For the thread that polls.

    `good_time` is the time of the last usable answer, None if there was none. `outage` lasts from a first failure to
    the next answer; `failed_share` is about how many of the last 20 requests failed, 0 to 1.
    """

    def __init__(self, parts: Parts, poll_seconds: float) -> None:
        self._gap_limit_seconds = max(CONTINUOUS_SECONDS, 2 * poll_seconds)
        self._parts = parts
        self._clock = parts.clock
        self._began_at = self._clock.monotonic()
        self._good_at: float | None = None  # monotonic, in this process
        self.good_time = parse_iso(self._parts.folder.read_last_good())
        since = self._parts.outbox.record(STATE, OUTAGE)
        self.outage = Outage(since=since) if since else None
        self.failed_share = 0.0
        self._log_limit = RepeatLimit(self._clock)

    @property
    def last_error(self) -> str:
        """Why the last request had no usable answer, "" if it had."""
        return self.outage.last_error if self.outage else ""

    def gap_seconds(self) -> float:
        """Return the time since the last usable answer, infinite if there was none."""
        if self._good_at is not None:
            return self._clock.monotonic() - self._good_at
        return (self._clock.now() - self.good_time).total_seconds() if self.good_time else math.inf

    def note_waiting(self) -> None:
        """Publish an outage while a request is not answered."""
        self._publish_outage(self.outage or Outage(), "IMDS does not answer")

    def note_failure(self, error: ImdsError) -> None:
        """Log a failure, and publish an outage once it is one."""
        before = self.outage or Outage()
        self.outage = replace(before, failures=before.failures + 1, last_error=str(error))
        self.failed_share += (1 - self.failed_share) / SHARE_OF
        if self._log_limit.is_due():
            log.warning("IMDS gave no usable answer: %s; retrying", error)
        self._publish_outage(self.outage, str(error))

    def note_answer(self) -> Gap:
        """Note a usable answer; return the gap that it ends, with what is to be published of it."""
        now, at, gap_seconds = self._clock.monotonic(), self._clock.now(), self.gap_seconds()
        outage, self.outage = self.outage or Outage(), None
        is_first = self._good_at is None
        events: list[CloudEvent] = []
        if outage.since:
            events = [self._recovered(parse_iso(outage.since), "NoAnswer")]
        elif self._gap_limit_seconds < gap_seconds < math.inf:
            # A gap that is over: nothing that ran could have noticed its start.
            cause: GapCause = "Restart" if is_first else "NoAnswer" if outage.failures else "NotPolled"
            since, reason = at - timedelta(seconds=gap_seconds), _REASONS.get(cause, outage.last_error)
            events = [self._unreachable(since, cause, reason), self._recovered(since, cause)]
        if outage.failures:
            log.info("IMDS answers again", extra={"failures": outage.failures})
            self._log_limit.reset()
        self.failed_share -= self.failed_share / SHARE_OF
        self._good_at, self.good_time = now, at
        records = {(STATE, OUTAGE): ""} if events else {}
        return Gap(None if is_first else gap_seconds, iso_utc(at), events, records)

    def _publish_outage(self, outage: Outage, reason: str) -> None:
        """Publish that IMDS cannot be reached, once it has lasted long enough, and once for each outage."""
        gap_seconds = self._clock.monotonic() - (self._began_at if self._good_at is None else self._good_at)
        if outage.since or gap_seconds < self._gap_limit_seconds:
            return
        since = (
            self.good_time if self._good_at is None else self._clock.now() - timedelta(seconds=gap_seconds)
        )
        self.outage = replace(outage, since=iso_utc(since) if since else NEVER)
        event = self._unreachable(since, "NoAnswer", reason)
        self._parts.outbox.commit([event], records={(STATE, OUTAGE): self.outage.since})

    def _unreachable(self, since: datetime | None, cause: GapCause, reason: str) -> CloudEvent:
        return self._parts.identity.reporter().unreachable(since=since, reason=reason, cause=cause)

    def _recovered(self, since: datetime | None, cause: GapCause) -> CloudEvent:
        return self._parts.identity.reporter().recovered(since=since, cause=cause)


def _unshown(watch: Watch, document: Document) -> Watch:
    """Return a watch that knows only events which a document does not show; they end with it."""
    missing = {
        key: MissingEvent(event=event, expires_at=0.0, reason="Restart", boot_id=watch.boot_id)
        for key, event in watch.known.items()
        if key not in document.events
    }
    return Watch(missing=missing)


def _log_changes(document: Document, changes: tuple[Change, ...]) -> None:
    """Log the changes for an operator."""
    log.info("document %s: %d event(s)", document.incarnation, len(document.events))
    for change in changes:
        event = change.event
        when = f", not before {iso_utc(event.not_before)}" if event.not_before else ""
        log.info(
            "%s of %s %s%s",
            *(event.raw.get("EventType"), ", ".join(event.resources) or "unnamed VMs", change.kind, when),
            extra={
                "event_id": event.event_id,
                "source": event.raw.get("EventSource"),
                "changed": change.changed,
            },
        )
    for entry in document.invalid_entries:
        log.warning(
            "an entry of the document cannot be read; it is published as received", extra={"entry": entry}
        )
