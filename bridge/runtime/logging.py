"""Log lines: one JSON object each, or plain text on a terminal; secrets never appear in either."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

from bridge.runtime.log_writer import LogWriter
from bridge.runtime.redaction import redact
from bridge.runtime.terminal import escape

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
        return escape(json.dumps({name: _sanitize(value) for name, value in line.items()}, default=str))


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
    for former in root.handlers:
        if isinstance(former, LogWriter):
            former.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It would log URLs, and each failure that imds-bridge logs itself.
    logging.getLogger("urllib3").setLevel(logging.ERROR)


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


def _sanitize(value: object) -> object:
    """Redact every text in a value, before JSON adds quotes and escapes to it."""
    if isinstance(value, dict):
        return {redact(str(name)): _sanitize(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sanitize(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else redact(str(value))
