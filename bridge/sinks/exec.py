"""Run a program for each event."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, Literal

from bridge.config.sinks import Program, RunSeconds, SinkSettings
from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.program import Result, Run, environment, find_fault
from bridge.sinks.base import RequestPreview, Sink

log = logging.getLogger(__name__)

TRY_AGAIN_LATER = 75  # EX_TEMPFAIL of sysexits.h


class ExecSettings(SinkSettings):
    """Run a program for each event, by default of those that may affect this VM.

    It gets the CloudEvent on standard input.
    """

    kind: Literal["exec"]
    run: Program
    """The program, by its absolute path, and its arguments; no shell is involved. Example:
    `["/usr/local/bin/notify", "--quiet"]`."""
    timeout_seconds: RunSeconds = 30.0
    """How long the program may run; then its process group gets SIGTERM, and SIGKILL 5 s later. Example: `60`."""
    acts_on_this_vm: ClassVar = True


class ExecSink(Sink):
    """A program that gets the CloudEvent on standard input: its exit code decides what becomes of the event."""

    def __init__(self, settings: ExecSettings) -> None:
        self._settings = settings
        self._program = settings.run[0]
        self.is_at_work = True  # until a run fails

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Run the program to its end."""
        (event,) = events
        limit_seconds = self._settings.timeout_seconds
        result = Run(self._settings.run, event.body, event.data, timeout_seconds=limit_seconds).finish()
        if result.output:
            log.info("output of %s", self._program, extra={"output": result.output, "event": event.id})
        self.is_at_work = not result.fault
        if result.fault:
            raise self._error(result)

    def _error(self, result: Result) -> DeliveryError:
        text = f"{self._program}: {result.fault}"
        if result.code is None:
            return Misconfigured(text, is_unreached=True)
        is_temporary = result.ended_by or result.code < 0 or result.code == TRY_AGAIN_LATER
        return Unavailable(text) if is_temporary else Rejected(text)

    def check(self) -> str:
        """Test whether the program can be executed, and whether any user could replace it."""
        if fault := find_fault(self._settings.run):
            raise Misconfigured(fault)
        return f"{self._program} can be executed"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the command, what of the environment is about the event, and the standard input."""
        variables = environment(event.data, self._settings.timeout_seconds)
        names = {name: value for name, value in variables.items() if name.startswith("IMDS_")}
        head = (" ".join(self._settings.run), *(f"{name}={value}" for name, value in names.items()))
        return RequestPreview(head=head, body=event.body)
