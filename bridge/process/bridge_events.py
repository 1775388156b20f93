"""The events `bridge.heartbeat` and `bridge.loss`, which a process publishes about itself."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping, Sequence

from bridge import __version__
from bridge.outbox.rows import LOST, STATE, UNKNOWN_LOSSES
from bridge.process.identity import VmIdentity
from bridge.runtime.json import Json

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_SECONDS = 3600.0
# How often losses are looked for, and how often they are published.
LOSSES_LOOK_SECONDS = 5.0
LOSSES_EVERY_SECONDS = 60.0
UNLISTED = "unlisted"  # the record of the ids of events that no `document.changed` lists
LISTED_IDS = 1000  # in one heartbeat, of 40 bytes each


class BridgeEvents:
    """Publishes heartbeats and losses in the VM's name; for the thread that builds the process's events."""

    def __init__(self, identity: VmIdentity) -> None:
        self._identity, self._outbox, self._clock = identity, identity.outbox, identity.clock
        self._heartbeat_at = self._losses_at = -math.inf
        self._has_error = False
        self._unlisted: list[str] = self._outbox.record(STATE, UNLISTED) or []

    def emit_started(self) -> None:
        """Publish the first event of this run, which names the run before."""
        self._publish("Started")

    def emit_heartbeat(self, more: Callable[[], Mapping[str, Json]] = dict) -> bool:
        """Publish a heartbeat every hour; earlier for many events to list, and if instance data fails or works again.

        Args:
            more: returns what this process adds to the heartbeat's data.

        Returns:
            Whether it was time.
        """
        has_changed = bool(self._identity.last_error) != self._has_error
        is_due = (
            self._clock.monotonic() >= self._heartbeat_at or len(self._unlisted) >= LISTED_IDS or has_changed
        )
        if is_due:
            self._publish("Hourly", more())
        return is_due

    def list_later(self, ids: Sequence[str]) -> dict[tuple[str, str], Json]:
        """Let the next heartbeat list events that no `document.changed` lists; return the record to commit."""
        self._unlisted += ids
        return {(STATE, UNLISTED): [*self._unlisted]}

    def emit_losses(self, begin_again: Callable[[], Mapping[tuple[str, str], Json]] = dict) -> None:
        """Publish losses of events.

        Args:
            begin_again: is called if it is unknown which events are lost: what is current must be published again;
                returns the records to commit for that.
        """
        now = self._clock.monotonic()
        if now < self._losses_at:
            return
        losses = self._outbox.losses()
        self._losses_at = now + (LOSSES_EVERY_SECONDS if losses else LOSSES_LOOK_SECONDS)
        if not losses:
            return
        are_unknown = any(loss.reason in UNKNOWN_LOSSES for loss in losses)
        records = {**begin_again(), (STATE, LOST): True} if are_unknown else {}
        events = [self._identity.reporter().loss(**vars(loss)) for loss in losses]
        self._outbox.commit(events, records=records, published=losses)

    def emit_stopping(self) -> None:
        """Publish the last heartbeat of a process that is stopped."""
        self._publish("Stopping")

    def _publish(self, reason: str, more: Mapping[str, Json] | None = None) -> None:
        is_first = reason == "Started"
        # The first hour is shorter: heartbeats of VMs that start together must not stay together.
        share = random.uniform(0.1, 1) if is_first else 1  # noqa: S311 - it spreads load
        self._heartbeat_at = self._clock.monotonic() + share * HEARTBEAT_EVERY_SECONDS
        listed, self._unlisted = self._unlisted[:LISTED_IDS], self._unlisted[LISTED_IDS:]
        self._has_error = bool(self._identity.last_error)
        event = self._identity.reporter().heartbeat(
            reason=reason,
            version=__version__,
            backlog=self._outbox.backlogs(),
            previous=self._outbox.previous_run if is_first else None,
            event_ids=listed,
            more={**(more or {}), "IdentityError": self._identity.last_error or None},
        )
        self._outbox.commit([event], records={(STATE, UNLISTED): [*self._unlisted]} if listed else {})
