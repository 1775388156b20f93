"""Run the programs of auto rules, once for each event, and refuse the approval unless they end with exit code 0.

I/O: files in the state folder, processes and the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from bridge.config.approvals import AutoSettings
from bridge.imds.document import ScheduledEvent
from bridge.runtime.program import DetachedRun, Result

log = logging.getLogger(__name__)

END_BEFORE_SECONDS = 10.0  # how long before NotBefore a program gets SIGTERM; SIGKILL follows 5 s later
KEEP_SECONDS = 86_400.0  # how long it is remembered that a program has run for an event that is gone


def run_seconds(event: ScheduledEvent, *, timeout_seconds: float, now: datetime) -> float:
    """Return how long a program that is started now may run, 0 or less if there is no time for it.

    Args:
        event: what the program is for; it has to end before NotBefore.
        timeout_seconds: the rule's limit.
        now: the time of day.
    """
    if event.not_before is None:
        return timeout_seconds
    return min(timeout_seconds, (event.not_before - now).total_seconds() - END_BEFORE_SECONDS)


class Programs:
    """The programs of one listener, each in its own process; no method waits for them. For one thread."""

    def __init__(self, folder: Path, *, start: Callable[[Path], DetachedRun] = DetachedRun) -> None:
        """Find what an earlier process has run.

        Args:
            folder: where the runs are recorded.
            start: makes a run from the path of its record.
        """
        self._folder = folder
        self._make = start
        self._runs = {path.stem: start(path) for path in folder.glob("*.run")}
        self._running: dict[str, str] = {}  # the programs whose end is not logged yet

    def refusal(
        self, event: ScheduledEvent, rule: AutoSettings, *, now: datetime, job: Callable[[float], bytes]
    ) -> str | None:
        """Return "" if the rule's program allows the approval, else why not, and None while it runs; start it once.

        Args:
            event: as in the document, Scheduled.
            rule: names the program.
            now: the time of day.
            job: makes the runner's job from the program's time limit.
        """
        name, program = _name(event.key), rule.run[0]
        run = self._runs.setdefault(name, self._make(self._folder / f"{name}.run"))
        result = run.result()
        if result is not None:
            self._log_end(name, run)
            return f"{program}: {result.fault}" if result.fault else ""
        left_seconds = run_seconds(event, timeout_seconds=rule.run_timeout_seconds, now=now)
        if run.is_running():
            self._running[name] = program
            if left_seconds <= 0:
                run.end()
            return None
        if left_seconds <= 0:
            return f"{program}: there was not enough time before NotBefore"
        try:
            run.start(job(left_seconds))
        except OSError as error:
            if name not in self._running:
                log.error("%s cannot be run; it is tried again: %s", program, error)  # noqa: TRY400
        else:
            log.info("running %s", program, extra={"event_id": event.event_id})
        self._running[name] = program
        return None

    def end_others(self, events: Iterable[ScheduledEvent]) -> None:
        """End the programs of all events but these, and forget those of long ago."""
        names = {_name(event.key) for event in events}
        for name in self._runs.keys() - names:
            run = self._runs[name]
            run.end()
            if not run.is_running():
                self._log_end(name, run)
                if run.forget(older_than_seconds=KEEP_SECONDS):
                    del self._runs[name]

    def end_all(self) -> None:
        """End all programs soon; a later process runs them again if there is still time."""
        for run in self._runs.values():
            run.end()

    def _log_end(self, name: str, run: DetachedRun) -> None:
        if program := self._running.pop(name, ""):
            result = run.result() or Result(code=None, error="it was ended")
            level = logging.WARNING if result.fault else logging.INFO
            log.log(
                level,
                "%s has ended: %s",
                program,
                result.fault or "exit code 0",
                extra={"output": result.output},
            )


def _name(key: str) -> str:
    return sha256(key.encode()).hexdigest()[:32]
