"""Print each event as one line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bridge.config import StdoutSettings
from bridge.errors import Unavailable
from bridge.model import StoredEvent


class StdoutSink:
    """The process's standard output; whoever reads it slowly delays only this sink."""

    max_batch = 1

    def __init__(self, settings: StdoutSettings) -> None:
        self._settings = settings

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Write the event and a line's end, past every buffer."""
        try:
            for event in events:
                sys.stdout.buffer.write(event.body + b"\n")
            sys.stdout.buffer.flush()
        except (OSError, ValueError) as error:
            raise Unavailable(f"standard output cannot be written: {error}") from error

    def reload(self) -> None:
        """Do nothing: there is no secret."""

    def check(self) -> str:
        """Tell that the output is there."""
        if sys.stdout is None or sys.stdout.closed:
            raise Unavailable("standard output is closed")
        return "standard output is open"

    def close(self) -> None:
        """Leave the output to the process."""
