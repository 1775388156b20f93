"""Commit what several senders deliver at the same time in one transaction, and answer each after the commit."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime
from queue import Empty, SimpleQueue

from bridge.console.received import Received
from bridge.console.store import Store, is_broken
from bridge.errors import Unavailable
from bridge.runtime.threads import Stop, report_progress
from bridge.runtime.time import Clock, RepeatLimit

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25
MAX_EVENTS = 1000  # of one transaction
PRUNE_SECONDS = 60.0
RETRY_AFTER_SECONDS = 5.0

# Errors of values, which are the same in every try.
_UNFIT = (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.InterfaceError)
_Waiting = tuple[Sequence[Received], "Future[None]"]


class Writer:
    """The only writer of the store. `run` is for one thread; everything else may be called from any.

    Attributes:
        error: why the store could not be written last time, "" if it could.
        version: grows with every commit of a change.
        received: how many events were new since the start.
        repeated: how many were known.
        last_received_at: when the last new event was committed.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Clock,
        stop: Stop,
        retain_seconds: float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare to write.

        Args:
            store: belongs to the thread of `run` from then on.
            clock: dates what is received.
            stop: ends `run` after everything that waits is committed.
            retain_seconds: how long events are kept.
            on_change: is called after each commit of a change, on the thread of `run`.
        """
        self._store = store
        self._clock = clock
        self._stop = stop
        self._retain_seconds = retain_seconds
        self._on_change = on_change
        self._queue: SimpleQueue[_Waiting] = SimpleQueue()
        self._log_limit = RepeatLimit(clock)
        self._prune_at = 0.0
        self.error = ""
        self.version = 0
        self.received = 0
        self.repeated = 0
        self.last_received_at: datetime | None = None

    def submit(self, events: Sequence[Received]) -> Future[None]:
        """Have events committed; the future is done after the commit.

        It raises Unavailable if they could not be committed, and the sender has to deliver them again; ValueError
        if one of them can never be stored.
        """
        future: Future[None] = Future()
        self._queue.put((events, future))
        return future

    def run(self) -> None:
        """Commit until the stop, and then what waits; damage to the store ends it."""
        while not self._stop:
            report_progress()
            self.run_once(PASS_SECONDS)
        self.run_once(0.0)

    def run_once(self, wait_seconds: float) -> None:
        """Commit what waits, at most `wait_seconds` later, and delete what is too old."""
        waiting = self._take(wait_seconds)
        if waiting:
            self._commit(waiting)
        if self._clock.monotonic() >= self._prune_at:
            self._prune()

    def _take(self, wait_seconds: float) -> list[_Waiting]:
        waiting: list[_Waiting] = []
        try:
            waiting.append(
                self._queue.get(timeout=wait_seconds) if wait_seconds else self._queue.get_nowait()
            )
            while sum(len(events) for events, _ in waiting) < MAX_EVENTS:
                waiting.append(self._queue.get_nowait())
        except Empty:
            pass
        return waiting

    def _commit(self, waiting: list[_Waiting]) -> None:
        events = [event for some, _ in waiting for event in some]
        try:
            added = self._store.add(events, received_at=self._clock.wall())
        except Exception as error:
            if is_broken(error):
                self._fail(waiting, error)
                raise
            if isinstance(error, sqlite3.Error | OSError | MemoryError) and not isinstance(error, _UNFIT):
                self._fail(waiting, error)
            else:
                self._commit_each(waiting, error)
            return
        self.error = ""
        self.received += added.new
        self.repeated += added.repeated
        if added.new:
            self.last_received_at = self._clock.now()
        if added.is_change:
            self.version += 1
            self._on_change()
        for _, future in waiting:  # last: who knows of the commit may rely on the rest
            future.set_result(None)

    def _commit_each(self, waiting: list[_Waiting], error: Exception) -> None:
        """Let one sender's events that cannot be stored hold up no other sender."""
        if len(waiting) > 1:
            for one in waiting:
                self._commit([one])
            return
        log.error("events that cannot be stored are refused", exc_info=error)
        waiting[0][1].set_exception(ValueError(f"the events cannot be stored: {error}"))

    def _fail(self, waiting: list[_Waiting], error: Exception) -> None:
        self._note(error)
        for _, future in waiting:
            future.set_exception(
                Unavailable(f"the store cannot be written: {error}", retry_after_seconds=RETRY_AFTER_SECONDS)
            )

    def _prune(self) -> None:
        """Delete what is too old; a clock that jumps ahead makes nothing old."""
        self._prune_at = self._clock.monotonic() + PRUNE_SECONDS
        before = min(self._clock.wall(), self._clock.steady()) - self._retain_seconds
        try:
            if self._store.prune(before):
                self._prune_at = self._clock.monotonic()
            self.error = ""
        except (sqlite3.Error, OSError) as error:
            self._note(error)
            if is_broken(error):
                raise

    def _note(self, error: Exception) -> None:
        self.error = str(error)
        if self._log_limit.is_due(self.error):
            log.error("the store cannot be written; senders retry: %s", error)
