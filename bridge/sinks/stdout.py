"""Print each event as one line of JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from bridge.config.sinks import StdoutSettings
from bridge.errors import Unavailable
from bridge.events.model import StoredEvent
from bridge.sinks.base import RETRY_LIMIT_SECONDS, Request


class StdoutSink:
    """The process's standard output; whoever reads it slowly delays only this sink.

    It is written without Python's buffer, which would keep what failed and write it once more later.
    """

    max_batch = 1
    retry_limit_seconds = RETRY_LIMIT_SECONDS

    def __init__(self, settings: StdoutSettings) -> None:
        self._settings = settings
        self._cut_off = b""  # what is missing of a line that was begun

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Write the event and a line's end; a line that broke off earlier is ended first."""
        (event,) = events
        begun = len(self._cut_off)
        text = self._cut_off + _line(event.body) + b"\n"
        written = 0
        try:
            while written < len(text):
                written += os.write(_descriptor(), text[written:])
        except OSError as error:
            raise Unavailable(f"standard output cannot be written: {error.strerror or error}") from error
        finally:
            self._cut_off = text[written : begun if written <= begun else None]

    def keep_alive(self) -> None:
        """Do nothing."""

    def reload(self) -> None:
        """Do nothing: there is no secret."""

    def check(self) -> str:
        """Tell that the output is there."""
        try:
            os.fstat(_descriptor())
        except OSError as error:
            raise Unavailable(f"standard output cannot be written: {error.strerror or error}") from error
        return "standard output is open"

    def show(self, event: StoredEvent) -> Request:
        """Show the line."""
        return Request(head=(), body=_line(event.body))

    def close(self) -> None:
        """Leave the output to the process."""


def _line(body: bytes) -> bytes:
    """Bring JSON onto one line: what a relay brings may be laid out, and line breaks stand only between tokens."""
    return body.translate(bytes.maketrans(b"\r\n", b"  "))


def _descriptor() -> int:
    """Return the number of the standard output.

    Raises:
        OSError: the process was started without one.
    """
    if sys.stdout is None:
        raise OSError(None, "it is closed")
    return sys.stdout.fileno()
