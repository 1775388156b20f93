"""Write log lines from a thread of its own, so that a reader that does not read blocks nothing else."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TextIO

MAX_LINES = 1000
# How long the end of the process waits for the last lines.
FLUSH_SECONDS = 1.0
RETRY_SECONDS = 0.05
_DROPPED = "%d log line(s) were dropped: the log was not read"


class LogWriter(logging.Handler):
    """A handler that never blocks: while the stream is not read, lines wait; further ones are dropped and counted."""

    def __init__(self, stream: TextIO | None, *, max_lines: int = MAX_LINES) -> None:
        """Start the thread.

        Args:
            stream: where lines are written; None drops them.
            max_lines: how many may wait.
        """
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._count_lock = threading.Lock()
        self._dropped = 0
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; count it instead if there is no space."""
        try:
            line = self.format(record)
        except Exception as error:  # noqa: BLE001 - a line that cannot be written must not end its thread
            line = f"a log line cannot be written: {error!r}"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._count(1)

    def flush(self) -> None:
        """Wait until all queued lines are written, but not for long."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_SECONDS)

    def close(self) -> None:
        """End the thread after the queued lines; if nothing reads them, it ends with the process."""
        super().close()
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if self._lines.empty():
                self._report_dropped()
            self._lines.task_done()
        self._lines.task_done()

    def _report_dropped(self) -> None:
        with self._count_lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, _DROPPED, (dropped,), None)
            self._write(self.format(record), stands_for=dropped)

    def _write(self, line: str, *, stands_for: int = 1) -> None:
        try:
            _write(self._stream, f"{line}\n")
        except (OSError, ValueError):
            # The stream is closed.
            self._count(stands_for)

    def _count(self, dropped: int) -> None:
        with self._count_lock:
            self._dropped += dropped


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    # Around the stream's own buffer: its lock, held by a blocked write, would abort the interpreter's exit.
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    if raw is None:
        stream.write(text)
        return
    rest = text.encode("utf-8", "backslashreplace")
    while rest:
        written = raw.write(rest)
        if not written:
            # Somebody has made the stream non-blocking.
            time.sleep(RETRY_SECONDS)
        rest = rest[written or 0 :]
