"""A trial of what every process does first: events are stored, and taken from what is stored."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.delivery.dispatcher import Dispatcher
from bridge.errors import StateError
from bridge.events.filters import Filter
from bridge.events.model import StoredEvent
from bridge.formats.samples import samples
from bridge.outbox.state_dir import StateFolder
from bridge.outbox.upkeep import KeptOutbox
from bridge.runtime.time import Clock
from bridge.sinks.base import RequestPreview, Sink

MAX_BYTES = 64 * 1024 * 1024
_NAME = "check"


class _Nowhere(Sink):
    """Takes everything, and sends nothing."""

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Take the events."""

    def check(self) -> str:
        """Find nothing wrong."""
        return ""

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the event."""
        return RequestPreview(head=(), body=event.body)


def try_to_store(beside: Path) -> None:
    """Store a sample of every type of event, and take each again; nothing of it stays, and nothing is sent.

    Args:
        beside: a folder on the disk to try.

    Raises:
        Exception: whatever this disk, this SQLite or this Python does not allow; nothing is logged.
    """
    logged = logging.root.manager.disable
    logging.disable()
    try:
        with TemporaryDirectory(prefix="check-", dir=beside) as folder:
            _store(Path(folder, "outbox"))
    finally:
        logging.disable(logged)


def _store(folder: Path) -> None:
    clock, sinks = Clock(), {_NAME: (Filter(), False)}
    outbox = KeptOutbox(
        StateFolder(folder), clock=clock, sinks=sinks, max_bytes=MAX_BYTES, retain_seconds=0.0
    )
    with closing(outbox):
        outbox.commit(samples(clock.now()))
        dispatcher = Dispatcher(_NAME, _Nowhere(), max_age_seconds=math.inf, outbox=outbox, clock=clock)
        while dispatcher.step() is None:
            pass
        left = outbox.backlog(_NAME)[0]
        outbox.prune()
        if left or outbox.storage_error:
            raise StateError(outbox.storage_error or f"{left} events cannot be taken from what is stored")
