"""Text from outside: on one line, without what controls a terminal, and without secrets."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import TextIO

# Control characters, characters that reorder or hide others, lone surrogates, and code points that are no character.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffc\ufffe\uffff\U000e0000-\U000e0fff]"
)

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


def printable(value: object, max_characters: int = 1000) -> str:
    """Return the start of a text without control characters; "" for anything else."""
    text = value if isinstance(value, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[:max_characters]


def one_line(text: str) -> str:
    """Return a text on one line, its words a space apart."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def escape(text: str) -> str:
    """Replace unsafe characters, line breaks included, by the escapes of JSON.

    JSON keeps its meaning: between its values none of these characters may stand but white space.
    """
    return UNSAFE.sub(_escape, text)


def show(*lines: str, stream: TextIO | None = None) -> None:
    """Print lines on the standard output or another stream; a line break within one is shown as an escape."""
    print("\n".join(map(escape, lines)), file=stream, flush=True)


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


def redact(text: str) -> str:
    """Replace every registered secret, URL query and bearer token by ***."""
    for secret in sorted({*_secrets, *_tokens}, key=len, reverse=True):
        text = text.replace(secret, "***")
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text
