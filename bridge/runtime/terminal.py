"""Show text on a terminal so that nothing from outside can control it."""

from __future__ import annotations

import json
import re
from typing import TextIO

# Control characters, characters that reorder or hide others, lone surrogates, and code points that are no character.
UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffc\ufffe\uffff\U000e0000-\U000e0fff]"
)


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
