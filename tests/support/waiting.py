"""Wait for what a simulator has seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    predicate: Callable[[], T], timeout: float, changed: threading.Condition, describe: Callable[[], str]
) -> T:
    """Wait until the predicate returns a true value.

    It is called after every change and at least every 50 ms, and never under a lock, so that it may also check
    things outside the simulator.

    Args:
        predicate: the condition.
        timeout: in seconds.
        changed: notified when the simulator's state has changed.
        describe: returns the state, for the error.

    Returns: what the predicate returned.
    Raises: AssertionError with the state, after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        rest_seconds = deadline - time.monotonic()
        if rest_seconds <= 0:
            raise AssertionError(f"not within {timeout:g} s; {describe()}")
        with changed:
            changed.wait(min(rest_seconds, 0.05))
