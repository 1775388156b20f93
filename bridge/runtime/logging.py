"""Log lines: one JSON object each, or plain text on a terminal; secrets never appear in either."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections import deque
from datetime import UTC, datetime

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_secrets: set[str] = set()
_passing: deque[str] = deque(maxlen=64)  # tokens come and go; each has expired long before it is forgotten
_MIN_SECRET_LENGTH = 6  # hiding shorter strings would hide half of every line
# Whatever its source: a URL's query, and a bearer token.
_PATTERNS = (
    # A URL is eaten whole, with or without a query, so that the time is linear; JSON's own escapes stay whole.
    (
        re.compile(r"(https?://(?:\\[u/]|[^\s\"'?\\])*)(?:(\?)(?:\\[u/][0-9A-Fa-f]{0,4}|[^\s\"'\\])*)?"),
        lambda url: f"{url[1]}?***" if url[2] else url[0],
    ),
    (re.compile(r"(?i)\b(bearer|sharedaccesskey)\s+[\w.~+/=-]+"), r"\1 ***"),
)


def register_secret(secret: str) -> None:
    """Replace `secret` by *** in every log line from now on."""
    for part in (secret, *secret.splitlines()):
        if len(part.strip()) >= _MIN_SECRET_LENGTH:
            _secrets.update((part, json.dumps(part)[1:-1]))


def register_token(token: str) -> None:
    """Hide a token that is replaced by others in time, and forget it after many of them."""
    if token not in _passing:
        _passing.append(token)


def redact(text: str) -> str:
    """Take out every known secret, URL query and bearer token."""
    for secret in sorted({*_secrets, *_passing}, key=len, reverse=True):
        text = text.replace(secret, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _clean(value: object) -> object:
    """Take secrets out of every text in a value, before JSON's quotes and escapes stand around it."""
    if isinstance(value, dict):
        return {redact(str(name)): _clean(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else redact(str(value))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, message, and whatever `extra` gave."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record, secrets taken out."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1]:
            line["error"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps({name: _clean(value) for name, value in line.items()}, default=str)


class TextFormatter(logging.Formatter):
    """What a person reads on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Write the record, secrets taken out."""
        clock = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        details = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        text = f"{clock} {record.levelname.lower():7} {record.getMessage()}" + (
            f"  [{details}]" if details else ""
        )
        if record.exc_info and record.exc_info[1]:
            text += "\n" + "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return redact(text)


def set_up(*, level: str, style: str) -> None:
    """Send all logging to stderr; `style` is "json", "text", or "auto": text on a terminal."""
    as_text = style == "text" or (style == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if as_text else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("urllib3").setLevel(
        logging.ERROR
    )  # it would log URLs, and each failure that we log ourselves
