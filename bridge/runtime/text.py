"""Text from outside, made safe for where it goes.

`printable` makes an attribute or an id of a value, `sanitize` a text for people, `one_line` the detail of an error.
`escape` keeps what is logged or printed from controlling a terminal, and `redact` keeps secrets out of it.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Collection
from typing import IO, Any, TextIO

from bridge.runtime.json import Json

TRUNCATED = "… (cut)"
TEXT_LENGTH = 400
DETAIL_CHARACTERS = 500

# Control characters, characters that reorder or hide others, lone surrogates, and code points that are no character.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffc\ufffe\uffff\U000e0000-\U000e0fff]"
)

_MAX_INTEGER = 10**18
_READ_AHEAD = 8  # spaces collapse: enough is read to fill a text that is mostly spaces

# Of syslog, by the level of `logging`.
_PRIORITIES = {20: 6, 30: 4, 40: 3, 50: 2}
# Replacing shorter strings would make every log line unreadable.
_MIN_SECRET_LENGTH = 6
_secrets: set[str] = set()
# Tokens are replaced all the time; each has expired long before 64 others have followed it.
_tokens: deque[str] = deque(maxlen=64)
_PATTERNS = (
    # A URL is matched whole, with or without a query, so that the time is linear; JSON's escapes stay whole.
    (
        re.compile(r"(https?://(?:\\[u/]|[^\s\"'?\\])*)(?:(\?)(?:\\[u/][0-9A-Fa-f]{0,4}|[^\s\"'\\])*)?"),
        lambda url: f"{url[1]}?***" if url[2] else url[0],
    ),
    (re.compile(r"(?i)\b(bearer|sharedaccesskey)\s+[\w.~+/=-]+"), r"\1 ***"),
)
# systemd's copies for a unit, and those of older-systemd.conf.
_COPY = re.compile(r"/run/(?:credentials/imds-bridge-(\w+)\.service|imds-bridge/(\w+))/(config\.|secrets_?)")


def printable(value: object, max_characters: int = 1000) -> str:
    """Return the start of a text without control characters; "" for anything else."""
    text = value if isinstance(value, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[:max_characters]


def one_line(text: str, max_characters: int = DETAIL_CHARACTERS) -> str:
    """Return the start of what a program, a library or a server says: on one line, without secrets."""
    readable = "".join(letter if letter.isprintable() else " " for letter in redact(text))
    return " ".join(readable.split())[:max_characters]


def length(text: str) -> int:
    """Return the length as the strictest receiver counts it, in UTF-16 units."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le")) // 2


def truncate(text: str, max_length: int, *, mark: str = TRUNCATED) -> str:
    """Shorten a text to `max_length` UTF-16 units, with a mark where something is missing."""
    if len(text) <= max_length and length(text) <= max_length:
        return text
    max_bytes = 2 * (max_length - len(mark))
    kept = text[:max_length].encode("utf-16-le")[:max_bytes].decode("utf-16-le", "ignore")
    return kept.rstrip() + mark


def sanitize(value: Json, max_length: int = TEXT_LENGTH) -> str:
    """Make one safe line of text from a value of unknown origin; "" if there is nothing to read.

    Runs of white space become single spaces; unsafe characters are replaced visibly.
    """
    if isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < _MAX_INTEGER):
        return str(value)
    if not isinstance(value, str):
        return "" if value is None else "(not a text)"
    head = value[: max_length * _READ_AHEAD]
    line = UNSAFE.sub("\ufffd", " ".join(head.split()))
    is_shortened = len(head) < len(value) and len(line) < max_length
    return truncate(line + TRUNCATED if is_shortened else line, max_length)


def escape(text: str) -> str:
    """Replace unsafe characters, line breaks included, by the escapes of JSON.

    JSON keeps its meaning: between its values none of these characters may stand but white space.
    """
    return UNSAFE.sub(_escape, text)


def show(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on the standard output or another stream; a line break within one is shown as an escape."""
    print("\n".join(map(escape, lines)), file=stream, flush=True)


def journal_mark(stream: IO[Any] | None, level: int = 40) -> str:
    """Return sd-daemon's prefix for a line of a level of `logging` if the stream is the journal, else ""."""
    try:
        status = os.fstat(stream.fileno())  # type: ignore[union-attr] # None has no number, either
    except (AttributeError, OSError, ValueError):
        return ""
    is_journal = os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
    return f"<{_PRIORITIES.get(level, 7)}>" if is_journal else ""


def _escape(unsafe: re.Match[str]) -> str:
    return "\\u007f" if unsafe[0] == "\x7f" else json.dumps(unsafe[0])[1:-1]


def register_secret(secret: str) -> None:
    """Replace `secret` by *** in every text from now on."""
    for part in (secret, *secret.splitlines()):
        if len(part.strip()) >= _MIN_SECRET_LENGTH:
            _secrets.update((part, json.dumps(part)[1:-1]))


def register_token(token: str) -> None:
    """Replace a short-lived token by ***, and forget it after many others."""
    if token not in _tokens:
        _tokens.append(token)


def plain(text: str) -> str:
    """Name the file under /etc of which a unit has a copy, and no numbers of the system's errors."""
    names = {"config.": "{}.", "secrets_": "{}.secrets/", "secrets": "secrets"}
    text = re.sub(r"\[Errno \d+\] ", "", text)
    return _COPY.sub(lambda copy: "/etc/imds-bridge/" + names[copy[3]].format(copy[1] or copy[2]), text)


def redact(text: str, *, keep: Collection[str] = ()) -> str:
    """Replace every registered secret but those to `keep`, URL query and bearer token by ***; be plain."""
    for secret in sorted({*_secrets, *_tokens}.difference(keep), key=len, reverse=True):
        text = text.replace(secret, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return plain(text)
