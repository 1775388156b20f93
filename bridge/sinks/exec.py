"""Run a program for each event."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bridge.config.sinks import ExecSettings
from bridge.errors import DeliveryError, Misconfigured, Rejected, Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.program import Result, Run, environment, find_fault
from bridge.sinks.base import RequestPreview, Sink

log = logging.getLogger(__name__)

TRY_AGAIN_LATER = 75  # EX_TEMPFAIL of sysexits.h


class ExecSink(Sink):
    """A program that gets the CloudEvent on standard input: its exit code decides what becomes of the event."""

    def __init__(self, settings: ExecSettings) -> None:
        self._settings = settings
        self._program = settings.run[0]

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Run the program to its end."""
        (event,) = events
        limit_seconds = self._settings.timeout_seconds
        result = Run(self._settings.run, event.body, _data(event), timeout_seconds=limit_seconds).finish()
        if result.output:
            log.info("output of %s", self._program, extra={"output": result.output, "event": event.id})
        if result.fault:
            raise self._error(result)

    def _error(self, result: Result) -> DeliveryError:
        text = f"{self._program}: {result.fault}"
        if result.code is None:
            return Misconfigured(text, is_unreached=True)
        is_temporary = result.ended_by or result.code in (TRY_AGAIN_LATER, *range(-64, 0))
        return Unavailable(text) if is_temporary else Rejected(text)

    def check(self) -> str:
        """Test whether the program can be executed, and whether any user could replace it."""
        if fault := find_fault(self._program):
            raise Misconfigured(fault)
        return f"{self._program} can be executed"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the command, what of the environment is about the event, and the standard input."""
        names = {name: value for name, value in environment(_data(event)).items() if name.startswith("IMDS_")}
        head = (" ".join(self._settings.run), *(f"{name}={value}" for name, value in names.items()))
        return RequestPreview(head=head, body=event.body)


def _data(event: StoredEvent) -> dict[str, object]:
    data = event.envelope.get("data")
    return data if isinstance(data, dict) else {}
