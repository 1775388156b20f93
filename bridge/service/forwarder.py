"""The loop of `forward`: poll IMDS, compare documents, and commit each change together with its events."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from bridge.config.models import Config
from bridge.errors import ImdsError
from bridge.events.model import CloudEvent
from bridge.formats.cloudevents import structured
from bridge.imds.client import CALL_SECONDS, OFF_AFTER_SECONDS
from bridge.imds.diff import CONTINUOUS_SECONDS, Change, Observation, Watch, compare
from bridge.imds.document import Document, parse_document
from bridge.imds.port import Imds
from bridge.outbox.outbox import Outbox
from bridge.runtime.clock import Clock, full_jitter
from bridge.runtime.instants import iso_utc, parse_iso
from bridge.runtime.threads import Stop, report_progress
from bridge.service.identity import VmIdentity

log = logging.getLogger(__name__)

RETRY_BASE_SECONDS = 0.5
RETRY_LIMIT_SECONDS = 5.0
RETRY_FLOOR_SECONDS = 0.2  # IMDS allows five requests a second
LAST_POLL_SECONDS = 2.0
REMEMBER_EVERY_SECONDS = 60.0
REPEAT_LOG_SECONDS = 600.0


class Forwarder:
    """Watches one VM's document. `run` is for one thread; `status` may be called from any.

    Args:
        config: the whole configuration.
        imds: where documents come from.
        outbox: what keeps the state and gets the events.
        clock: the time.
        stop: what ends `run`.
    """

    def __init__(self, config: Config, *, imds: Imds, outbox: Outbox, clock: Clock, stop: Stop) -> None:
        self._config = config
        self._imds = imds
        self._outbox = outbox
        self._clock = clock
        self._stop = stop
        self._watch = _load_watch(outbox.meta("watch"))
        self._identity = VmIdentity(config, "forward", imds=imds, outbox=outbox, clock=clock)
        self._body: bytes | None = None
        self._good_at: float | None = None  # monotonic, in this process
        self._good_time = parse_iso(outbox.meta("last_good_at"))
        self._remembered_at = -math.inf
        self._began_at = clock.monotonic()
        self._failures = 0
        self._last_error = ""
        self._logged_at = -math.inf

    def run(self) -> None:
        """Poll until `stop` is set, then once more."""
        due = self._clock.monotonic()
        while not self._stop.wait(due - self._clock.monotonic()):
            report_progress()
            wait_seconds = self.poll()
            self._identity.emit_heartbeat()
            now = self._clock.monotonic()
            if wait_seconds is None:
                due += self._config.imds.poll_seconds * max(
                    1, math.ceil((now - due) / self._config.imds.poll_seconds)
                )
            else:
                due = now + wait_seconds
        self.poll(timeout_seconds=LAST_POLL_SECONDS)
        self._remember_good_time()
        self._identity.emit_stopping()

    def poll(self, *, timeout_seconds: float | None = None) -> float | None:
        """Request the document once and process it; return how long to wait after a failure, else None."""
        self._notice_clock()
        requested_at = self._clock.monotonic()
        try:
            body = self._imds.document(timeout_seconds=timeout_seconds)
            self._process(body, requested_at)
        except ImdsError as error:
            return self._fail(error)
        return None

    def status(self) -> dict[str, Any]:
        """Return what the status file shows."""
        document = self._watch.document
        return {
            "vm": self._identity.vm.name if self._identity.vm else None,
            "imds": self._imds.base or self._config.imds.endpoint,
            "last_error": self._last_error or None,
            "last_good_at": iso_utc(self._good_time) if self._good_time else None,
            "document": document.raw if document else None,
            "missing": [missing.event.raw for missing in self._watch.missing.values()],
        }

    # A usable answer

    def _process(self, body: bytes, requested_at: float) -> None:
        now = self._clock.monotonic()
        changed = body != self._body or self._watch.is_due(self._clock.steady())
        document = self._parse(body) if changed else None
        if self._identity.resolve():
            # The state was that of another VM.
            self._watch, self._good_time, self._body = Watch(), None, None
        if self._failures or changed:
            self._recover()
        if document:
            self._compare(document, now, requested_at)
            self._body = body
        self._good_at = now
        self._good_time = self._clock.now()
        if now - self._remembered_at >= REMEMBER_EVERY_SECONDS:
            self._remember_good_time()

    def _parse(self, body: bytes) -> Document:
        try:
            return parse_document(body)
        except ValueError as error:
            raise ImdsError(f"IMDS at {self._imds.base} sent {error}") from error

    def _compare(self, document: Document, now: float, requested_at: float) -> None:
        """Commit what differs from the last document, if anything does."""
        before = self._watch
        watch, changes = compare(
            before,
            document,
            Observation(
                at=self._clock.steady(),
                gap_seconds=None if self._good_at is None else now - self._good_at,
                service_was_off=now - requested_at > CALL_SECONDS or self._service_may_be_off(),
            ),
        )
        if watch == before:
            return
        self._watch = watch
        fingerprints = [change.fingerprint for change in changes]
        counts = [self._outbox.occurrences(fingerprint) for fingerprint in fingerprints]
        events = self._events(before, document, list(zip(changes, counts, strict=True)))
        self._commit(
            events, occurrences={name: count + 1 for name, count in zip(fingerprints, counts, strict=True)}
        )
        _log_changes(document, changes)

    def _events(
        self, before: Watch, document: Document, changes: list[tuple[Change, int]]
    ) -> list[CloudEvent]:
        """Build the events that report a changed document: the urgent ones first, the document last."""
        at = self._clock.now()
        reporter = self._identity.reporter()
        events = [
            reporter.scheduled_event(change, seen_before=count, incarnation=document.incarnation, at=at)
            for change, count in changes
        ]
        if changes or before.document is None or before.document.raw != document.raw:
            events.append(
                reporter.document(
                    document,
                    previous=before.document,
                    event_ids=[event.id for event in events],
                    sequence=self._identity.next_sequence(),
                    at=at,
                )
            )
        return events

    def _commit(
        self, events: list[CloudEvent], *, occurrences: dict[str, int] | None = None, **meta: str
    ) -> None:
        encoded = [(event, structured(event)) for event in events]
        self._outbox.commit(encoded, meta={"watch": self._watch.dump(), **meta}, occurrences=occurrences)

    def _service_may_be_off(self) -> bool:
        """Return whether this process has not called IMDS for a day, after which the service is off."""
        if self._good_at is not None:
            return self._clock.monotonic() - self._good_at >= OFF_AFTER_SECONDS
        return self._good_time is not None and (
            (self._clock.now() - self._good_time).total_seconds() >= OFF_AFTER_SECONDS
        )

    # Outages

    def _fail(self, error: ImdsError) -> float:
        """Log a failure, and publish an outage once it is one; return how long to wait."""
        now = self._clock.monotonic()
        self._failures += 1
        self._last_error = str(error)
        if self._failures == 1 or now - self._logged_at >= REPEAT_LOG_SECONDS:
            log.warning("IMDS gave no usable answer: %s; retrying", error)
            self._logged_at = now
        gap_seconds = now - (self._began_at if self._good_at is None else self._good_at)
        if gap_seconds >= CONTINUOUS_SECONDS and not self._outbox.meta("blind_since"):
            since = self._good_time
            reporter = self._identity.reporter()
            event = reporter.unreachable(
                since=since, reason=str(error), sequence=self._identity.next_sequence(), at=self._clock.now()
            )
            self._commit([event], blind_since=iso_utc(since) if since else "never")
        if error.retry_after_seconds is not None:
            return max(RETRY_FLOOR_SECONDS, error.retry_after_seconds)
        jitter = full_jitter(
            self._failures - 1, base_seconds=RETRY_BASE_SECONDS, limit_seconds=RETRY_LIMIT_SECONDS
        )
        return max(RETRY_FLOOR_SECONDS, jitter)

    def _recover(self) -> None:
        """Publish the end of an outage that was published."""
        if self._failures:
            log.info("IMDS answers again", extra={"failures": self._failures})
        self._failures, self._last_error = 0, ""
        if since := self._outbox.meta("blind_since"):
            event = self._identity.reporter().recovered(
                since=parse_iso(since), sequence=self._identity.next_sequence(), at=self._clock.now()
            )
            self._commit([event], blind_since="")

    # Time

    def _notice_clock(self) -> None:
        jump = self._identity.notice_clock()
        if not jump:
            return
        missing = {
            key: replace(missing, expires_at=missing.expires_at + jump)
            for key, missing in self._watch.missing.items()
        }
        self._watch = replace(self._watch, missing=missing)

    def _remember_good_time(self) -> None:
        if self._good_time:
            self._remembered_at = self._clock.monotonic()
            self._outbox.set_meta({"last_good_at": iso_utc(self._good_time)})


def _load_watch(text: str) -> Watch:
    try:
        return Watch.load(text)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # The text is enough, without a traceback.
        log.error("the last document cannot be read from the state; every event is new: %s", error)  # noqa: TRY400
        return Watch()


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
