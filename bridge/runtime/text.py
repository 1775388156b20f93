"""Text from outside, without characters that are not for print."""

from __future__ import annotations


def printable(value: object, max_characters: int = 1000) -> str:
    """Return the start of a text without control characters; "" for anything else."""
    text = value if isinstance(value, str) else ""
    return "".join(letter for letter in text if letter.isprintable())[:max_characters]


def one_line(text: str) -> str:
    """Return a text on one line, its words a space apart."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
