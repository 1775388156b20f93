"""Write the status file when something has changed, and every few seconds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from bridge.outbox.state_dir import StateFolder
from bridge.runtime.sd_notify import Supervisor
from bridge.runtime.time import Clock

log = logging.getLogger(__name__)

MAX_AGE_SECONDS = 10.0
# What changes all the time although nothing happens.
_VOLATILE = {"written_at", "last_good_at", "oldest_waits_seconds"}


class StatusFile:
    """The file that `imds-bridge status` reads, and the line that a supervisor shows."""

    def __init__(self, folder: StateFolder, *, supervisor: Supervisor, clock: Clock) -> None:
        """Prepare to write.

        Args:
            folder: where the file is.
            supervisor: gets a line for each change.
            clock: times the writes.
        """
        self._folder = folder
        self._supervisor = supervisor
        self._clock = clock
        self._written: dict[str, Any] = {}
        self._due_at = -math.inf

    def write(self, status: dict[str, Any], dead_letters: Callable[[], Mapping[str, int]]) -> None:
        """Write the status if it has changed, or if the file is getting old.

        Args:
            status: without the dead letters.
            dead_letters: counts them for each sink; called only to write, because it reads the outbox.
        """
        stable = _stable(status)
        if stable == self._written and self._clock.monotonic() < self._due_at:
            return
        self._write(with_dead_letters(status, dead_letters()), is_changed=stable != self._written)
        self._written = stable
        self._due_at = self._clock.monotonic() + MAX_AGE_SECONDS

    def _write(self, status: dict[str, Any], *, is_changed: bool) -> None:
        if self._supervisor.is_there and is_changed:
            from bridge.service.status import headline  # noqa: PLC0415 - only a supervisor needs it

            self._supervisor.report_status(headline(status))
        try:
            self._folder.write_status(status)
        except OSError as error:
            log.debug("the status file cannot be written: %s", error)


def with_dead_letters(status: dict[str, Any], counts: Mapping[str, int]) -> dict[str, Any]:
    """Return a status with the number of each sink's dead letters."""
    sinks = {name: {**sink, "dead_letters": counts.get(name, 0)} for name, sink in status["sinks"].items()}
    return {**status, "sinks": sinks}


def _stable(status: dict[str, Any]) -> dict[str, Any]:
    sinks = {name: _without_volatile(sink) for name, sink in status["sinks"].items()}
    return {**_without_volatile(status), "sinks": sinks}


def _without_volatile(status: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in status.items() if key not in _VOLATILE}
