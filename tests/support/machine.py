"""A machine that runs the programs of one listener in memory: the test says when and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from bridge.runtime.program import Result, Run


def program(name: str = "drain") -> str:
    """Return a path that a rule or a sink of this system may name; nothing is there."""
    return rf"C:\Tools\{name}.exe" if sys.platform == "win32" else f"/usr/local/bin/{name}"


class Machine:
    """Runs the programs of one listener; `runs` has every one that was made, in order.

    `on_start` and `on_end` are called with a run that is started, or asked to end.
    """

    def __init__(self) -> None:
        self.runs: list[MachineRun] = []
        self.is_slow_to_end = False
        self.on_start: Callable[[MachineRun], object] = lambda _: None
        self.on_end: Callable[[MachineRun], object] = lambda _: None

    def make(self, *given: Any, timeout_seconds: float) -> Run:
        """Make a run, as the listener does."""
        self.runs.append(MachineRun(self, *given, timeout_seconds=timeout_seconds))
        return self.runs[-1]

    @property
    def running(self) -> list[MachineRun]:
        """Those that have not ended."""
        return [run for run in self.runs if run.result is None]

    @property
    def asked_to_end(self) -> list[MachineRun]:
        """Those that were asked to end, whether or not they have."""
        return [run for run in self.runs if run.is_asked_to_end]

    @property
    def ended(self) -> list[MachineRun]:
        """Those that have ended because they were asked to."""
        return [run for run in self.runs if run.result and run.result.ended_by == "stop"]

    @property
    def names(self) -> list[str]:
        """The program of each run."""
        return [run.command[0] for run in self.runs]

    def finish(self, **result: Any) -> None:
        """End every program that runs."""
        for run in self.running:
            run.result = Result(**result)


class MachineRun(Run):
    """A run that starts nothing, and ends at once when it is asked to, unless the machine is slow."""

    def __init__(self, machine: Machine, *given: Any, timeout_seconds: float) -> None:
        super().__init__(*given, timeout_seconds=timeout_seconds)
        self._machine, self.is_asked_to_end, self.name = machine, False, ""
        self.command, self.body, self.data = given
        self.timeout_seconds = timeout_seconds

    def start(self, name: str) -> None:
        """Start nothing."""
        self.name = name
        self._machine.on_start(self)

    def end(self) -> None:
        """End it without a result of its own."""
        if not self.is_asked_to_end and self.result is None:
            self._machine.on_end(self)
        self.is_asked_to_end = True
        if not self._machine.is_slow_to_end:
            self.result = self.result or Result(code=-15, ended_by="stop")
