"""Calls into libraries that may block without a limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from threading import Thread

from bridge.errors import HungError
from bridge.runtime.threads import Stop, T, extend_deadline, start_thread

# How soon a worker's call notices the stop.
STOP_POLL_SECONDS = 0.5


@dataclass(eq=False)
class Worker:
    """Runs calls of a library that can block without bound, each on a thread of its own. It is used from one thread.

    A call that outlives its limit is left behind with its thread; once `max_hung` of them hang at the same time, the
    process has to be restarted.

    Args:
        name: of the threads, and for errors.
        max_hung: how many calls may hang before the process has to be restarted.
        stop: shortens every limit once it is set.
        stop_seconds: what all calls together may take after the stop.
    """

    name: str
    _: KW_ONLY
    max_hung: int = 3
    stop: Stop = field(default_factory=Stop)
    stop_seconds: float = 0.0
    _stop_at: float = math.inf  # when calls are left behind because of the stop
    # The threads that were left behind, when each counts as hung, and what ends its call.
    _left: list[tuple[Thread, float, Callable[[], object]]] = field(default_factory=list)

    def call(
        self,
        function: Callable[[], T],
        *,
        limit_seconds: float,
        abort: Callable[[], object] = lambda: None,
        afterwards: Callable[[], object] = lambda: None,
    ) -> T:
        """Run `function` on a thread and return what it returns, or raise what it raises.

        Args:
            function: what may block.
            limit_seconds: after this time it is left behind.
            abort: ends what a call that was left behind hangs on; repeated at each later call, as the first time can
                be before there is anything to be ended.
            afterwards: cleans up if a call that was left behind returns after all.

        Raises:
            HungError: it took longer; `final` once too many hang.
        """
        if (hanging := self._hanging()) >= self.max_hung:
            raise HungError(f"{self.name}: {hanging} calls have not returned", final=True)
        outcome: Future[T] = Future()
        thread = start_thread(self.name, lambda: _run(function, outcome, afterwards))
        extend_deadline(limit_seconds)
        self._wait(outcome, time.monotonic() + limit_seconds)
        if outcome.cancel():  # it has not returned
            self._left.append((thread, -math.inf, abort))
            raise HungError(
                f"{self.name}: a call has not returned within {limit_seconds:g} s",
                final=self._hanging() >= self.max_hung,
            )
        return outcome.result()

    def _wait(self, outcome: Future[T], deadline: float) -> None:
        """Wait for a call until the deadline, or until the stop allows no more."""
        while not outcome.done():
            now = time.monotonic()
            if self.stop and self._stop_at == math.inf:
                self._stop_at = now + self.stop_seconds
            left_seconds = min(deadline, self._stop_at) - now
            if left_seconds <= 0:
                return
            wait([outcome], min(STOP_POLL_SECONDS, left_seconds))

    def leave(self, last: Callable[[], object], *, limit_seconds: float) -> None:
        """Run `last` without waiting for it; if it hangs, it counts as a hung call."""
        thread = start_thread(self.name, lambda: _run(last, Future(), lambda: None))
        self._left.append((thread, time.monotonic() + limit_seconds, lambda: None))

    def _hanging(self) -> int:
        """Return how many calls hang, after one more try to end them."""
        self._left = [left for left in self._left if left[0].is_alive()]
        for _, _, abort in self._left:
            abort()
        now = time.monotonic()
        return sum(late_at <= now for _, late_at, _ in self._left)


def _run(function: Callable[[], T], outcome: Future[T], afterwards: Callable[[], object]) -> None:
    finish: Callable[[], None]
    try:
        finish = partial(outcome.set_result, function())
    except BaseException as error:  # noqa: BLE001 - it is raised again in the calling thread
        finish = partial(outcome.set_exception, error)
    try:
        finish()
    except InvalidStateError:  # it was left behind
        with suppress(Exception):
            afterwards()
