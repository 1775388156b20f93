"""Log lines: one JSON object each, or plain text on a terminal; secrets never appear in either.

A thread of its own writes them, so that a reader that does not read blocks nothing else.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from bridge.runtime.text import escape, journal_mark, redact

MAX_LINES = 1000
# How long the end of the process waits for the last lines.
FLUSH_SECONDS = 1.0
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record without secrets."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if error := _error(record):
            line["error"] = error
        return escape(json.dumps({name: _redacted(value) for name, value in line.items()}, default=str))


class TextFormatter(logging.Formatter):
    """Plain text for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record without secrets."""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        text = f"{clock} {record.levelname.lower():7} {record.getMessage()}"
        if fields := " ".join(f"{name}={value}" for name, value in _fields(record).items()):
            text += f"  [{fields}]"
        # Text from outside may have line breaks; indented, none of its lines looks like the start of another record.
        error = [f"    {line}" for line in redact(_error(record)).split("\n") if line]
        return "\n".join(map(escape, [redact(text), *error]))


def set_up(*, level: str, style: str) -> None:
    """Send all log lines to stderr, never blocking; `style` is "json", "text", or "auto": text on a terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    handler = LogWriter(sys.stderr)
    handler.setFormatter(
        TextFormatter() if style == "text" or (style == "auto" and is_terminal) else JsonFormatter()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # They would log URLs, and each failure that imds-bridge logs itself.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    handler.addFilter(lambda record: record.name != "apprise")


def flush() -> None:
    """Wait until all log lines are written, but not for long."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _error(record: logging.LogRecord) -> str:
    if not record.exc_info or not record.exc_info[1]:
        return ""
    return "".join(traceback.format_exception(record.exc_info[1]))


def _redacted(value: object) -> object:
    """Redact every text in a value, before JSON adds quotes and escapes to it."""
    if isinstance(value, dict):
        return {redact(str(name)): _redacted(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else redact(str(value))


class LogWriter(logging.Handler):
    """A handler that never blocks: while the stream is not read, lines wait, and further ones are dropped."""

    def __init__(self, stream: TextIO | None, *, max_lines: int = MAX_LINES) -> None:
        """Start the thread.

        Args:
            stream: where lines are written; None drops them.
            max_lines: how many may wait.
        """
        super().__init__()
        # Around the stream's own buffer: its lock, held by a blocked write, would abort the interpreter's exit.
        buffer = getattr(stream, "buffer", None)
        self._raw = getattr(buffer, "raw", buffer)
        self._lines: queue.Queue[str] = queue.Queue(max_lines)
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record's line; drop it if there is no space, or if it cannot be formatted."""
        with suppress(Exception):
            mark = journal_mark(self._raw, record.levelno)
            self._lines.put_nowait(mark + self.format(record).replace("\n", f"\n{mark}"))

    def flush(self) -> None:
        """Wait until all queued lines are written, but not for long."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            self._write(f"{self._lines.get()}\n".encode("utf-8", "backslashreplace"))
            self._lines.task_done()

    def _write(self, rest: bytes) -> None:
        with suppress(OSError, ValueError):  # the stream is closed
            while rest and self._raw:
                rest = rest[self._raw.write(rest) or len(rest) :]  # None: non-blocking, and full
