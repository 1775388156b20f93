"""Calls into libraries that may block without a limit."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from bridge.errors import HungError
from bridge.runtime.threads import Stop, T, extend_deadline, start_thread

# How soon a worker's call notices the stop.
STOP_POLL_SECONDS = 0.5


class Worker:
    """A thread for a library whose calls can block without bound. It is used from one thread.

    A call that outlives its limit is left behind with its thread, and the next call gets a new thread; once
    `max_hung` of them hang at the same time, the process has to be restarted.
    """

    def __init__(
        self, name: str, *, max_hung: int = 3, stop: Stop | None = None, stop_seconds: float = 0.0
    ) -> None:
        """Prepare the thread; the first call starts it.

        Args:
            name: of the thread, and for errors.
            max_hung: how many calls may hang before the process has to be restarted.
            stop: shortens every limit once it is set.
            stop_seconds: what all calls together may take after the stop.
        """
        self._name = name
        self._max_hung = max_hung
        self._stop = stop
        self._stop_seconds = stop_seconds
        # When calls are left behind because of the stop.
        self._stop_at = math.inf
        self._left: list[_Outcome] = []
        self._calls: SimpleQueue[tuple[Callable[[], Any], _Outcome] | None] | None = None

    def call(
        self,
        function: Callable[[], T],
        *,
        limit_seconds: float,
        afterwards: Callable[[], object] | None = None,
    ) -> T:
        """Run `function` on the thread and return what it returns, or raise what it raises.

        Args:
            function: what may block.
            limit_seconds: after this time it is left behind.
            afterwards: cleans up if a call that was left behind returns after all.

        Raises:
            HungError: it took longer; `final` once too many hang.
        """
        self._refuse_if_too_many_hang()
        outcome = self._put(function, limit_seconds)
        extend_deadline(limit_seconds)
        if not self._wait(outcome, limit_seconds):
            self._left.append(outcome)
            if afterwards is not None:
                self._put(afterwards, limit_seconds)
            self.close()
            raise HungError(
                f"{self._name}: a call has not returned within {limit_seconds:g} s",
                final=self._hanging() >= self._max_hung,
            )
        if outcome.error is not None:
            raise outcome.error
        result: T = outcome.result
        return result

    def _wait(self, outcome: _Outcome, limit_seconds: float) -> bool:
        """Wait for a call; return whether it has returned in time."""
        if self._stop is None:
            return outcome.done.wait(limit_seconds)
        deadline = time.monotonic() + limit_seconds
        while not outcome.done.is_set():
            now = time.monotonic()
            if self._stop and self._stop_at == math.inf:
                self._stop_at = now + self._stop_seconds
            left_seconds = min(deadline, self._stop_at) - now
            if left_seconds <= 0:
                return False
            outcome.done.wait(min(STOP_POLL_SECONDS, left_seconds))
        return True

    def leave(self, last: Callable[[], object], *, limit_seconds: float) -> None:
        """End the thread after `last`, without waiting; if `last` hangs, it counts as a hung call."""
        self._left.append(self._put(last, limit_seconds))
        self.close()

    def close(self) -> None:
        """End the thread after its calls, without waiting."""
        if self._calls is not None:
            self._calls.put(None)
            self._calls = None

    def _put(self, function: Callable[[], Any], limit_seconds: float) -> _Outcome:
        if self._calls is None:
            self._calls = SimpleQueue()
            calls = self._calls
            start_thread(self._name, lambda: _work(calls))
        outcome = _Outcome(time.monotonic() + limit_seconds)
        self._calls.put((function, outcome))
        return outcome

    def _hanging(self) -> int:
        self._left = [outcome for outcome in self._left if not outcome.done.is_set()]
        now = time.monotonic()
        return sum(outcome.late_at <= now for outcome in self._left)

    def _refuse_if_too_many_hang(self) -> None:
        if (hanging := self._hanging()) >= self._max_hung:
            raise HungError(f"{self._name}: {hanging} calls have not returned", final=True)


class _Outcome:
    """The outcome of one call; after `late_at` (monotonic) it counts as hung."""

    def __init__(self, late_at: float) -> None:
        self.late_at = late_at
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


def _work(calls: SimpleQueue[tuple[Callable[[], Any], _Outcome] | None]) -> None:
    while (call := calls.get()) is not None:
        function, outcome = call
        try:
            outcome.result = function()
        except BaseException as error:  # noqa: BLE001 - it is raised again in the calling thread
            outcome.error = error
        outcome.done.set()
