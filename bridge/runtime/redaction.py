"""Remove secrets from text: registered ones, tokens, and queries of URLs."""

from __future__ import annotations

import json
import re
from collections import deque

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
