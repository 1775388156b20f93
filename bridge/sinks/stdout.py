"""Print each event as one line of JSON."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from typing import Literal

from bridge.config.sinks import SinkSettings
from bridge.errors import Unavailable
from bridge.events.model import StoredEvent
from bridge.runtime.text import escape
from bridge.sinks.base import RequestPreview, Sink

WAIT_SECONDS = 10.0
# What a pipe takes without blocking once it is writable.
CHUNK_BYTES = 4096


class StdoutSettings(SinkSettings):
    """Print each event as one line of JSON."""

    kind: Literal["stdout"]


class StdoutSink(Sink):
    """The process's standard output; a slow reader delays only this sink.

    It is written without Python's buffer, which would keep what failed and write it once more later.
    """

    def __init__(self, _: StdoutSettings) -> None:
        # The rest of a line that was interrupted.
        self._unwritten = b""

    def send(self, events: Sequence[StoredEvent]) -> None:
        """Write the event as a line; a line that was interrupted earlier is finished first."""
        (event,) = events
        rest = len(self._unwritten)
        text = self._unwritten + _line(event.body) + b"\n"
        written = 0
        try:
            while written < len(text):
                descriptor = _descriptor()
                _wait_until_writable(descriptor)
                written += os.write(descriptor, text[written : written + CHUNK_BYTES])
        except OSError as error:
            raise _unwritable(error) from error
        finally:
            self._unwritten = text[written : rest if written <= rest else None]

    def check(self) -> str:
        """Test whether the output is open."""
        try:
            os.fstat(_descriptor())
        except OSError as error:
            raise _unwritable(error) from error
        return "standard output is open"

    def preview(self, event: StoredEvent) -> RequestPreview:
        """Return the line."""
        return RequestPreview(head=(), body=_line(event.body))


def _unwritable(error: OSError) -> Unavailable:
    return Unavailable(f"standard output cannot be written: {error.strerror or error}")


def _line(body: bytes) -> bytes:
    """Put JSON onto one line: a relayed event may be indented, and line breaks and tabs are only between tokens."""
    return escape(body.translate(bytes.maketrans(b"\r\n\t", b"   ")).decode()).encode()


def _wait_until_writable(descriptor: int) -> None:
    """Wait for a reader that is slow; without this, one that never reads would block the thread for ever.

    Raises:
        OSError: it has not read in time.
    """
    if sys.platform != "win32":  # which has no poll
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if not poll.poll(WAIT_SECONDS * 1000):
            raise OSError(None, f"nothing has read it for {WAIT_SECONDS:g} s")


def _descriptor() -> int:
    """Return the descriptor of the standard output.

    Raises:
        OSError: the process was started without one.
    """
    if sys.stdout is None:
        raise OSError(None, "it is closed")
    return sys.stdout.fileno()
