"""Programs of auto rules without a process: a test ends them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.runtime.program import DetachedRun, Result


@dataclass(kw_only=True)
class Machine:
    """What runs on the machine, whatever happens to the listener.

    Attributes:
        jobs: every job that was started, in order.
        running: the records of the runs that have not ended.
        results: how runs ended, by their records.
        error: what the next starts raise.
        ended: the records of runs that were asked to end, which they do at once.
    """

    jobs: list[dict[str, Any]] = field(default_factory=list)
    running: set[Path] = field(default_factory=set)
    results: dict[Path, Result] = field(default_factory=dict)
    error: OSError | None = None
    ended: list[Path] = field(default_factory=list)

    def run(self, path: Path) -> DetachedRun:
        """Make a run from the path of its record."""
        return _Run(self, path)

    def finish(self, **result: Any) -> None:
        """End every program that runs."""
        self.results |= dict.fromkeys(self.running, Result(**result))
        self.running.clear()


class _Run(DetachedRun):
    def __init__(self, machine: Machine, path: Path) -> None:
        super().__init__(path)
        self._machine = machine

    def start(self, job: bytes) -> None:
        """Start the program, or raise what the machine raises."""
        if self._machine.error:
            raise self._machine.error
        assert self.path not in self._machine.running
        self._machine.jobs.append(json.loads(job))
        self._machine.running.add(self.path)

    def result(self) -> Result | None:
        """Return how it ended."""
        return self._machine.results.get(self.path)

    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self.path in self._machine.running

    def end(self) -> None:
        """End it without a result."""
        if self.is_running():
            self._machine.running.discard(self.path)
            self._machine.ended.append(self.path)

    def forget(self, **_: Any) -> bool:
        """Forget nothing."""
        return False
